// What the host gives the gradients of chunk_sm90 where decays are per channel.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_16bit/gradient.cuh"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda::chunk_sm90 {

struct ChannelGradientMaps {
  TensorMap k, q, v, d_o, dq, dk;  // token_map with boxes of 64 x 64; dq and dk unused where nobody wants them
  TensorMap keys;                  // copies_map
  LowerMaps lower;
  TensorMap S;             // states_map, boxes of channel_gradient_columns
  TensorMap G, Y;          // rows_map
  bool has_gates = false;  // the gates, and dg if anybody wants it, have one type and are in maps
  TensorMap g{}, dg{};     // token_map with boxes of 64 rows of 128 bytes
};

// Value columns that a block takes at once.
constexpr int channel_gradient_columns(int padded_k) { return padded_k; }
// Blocks on a multiprocessor.
constexpr int channel_gradients_on_one(int padded_k) { return padded_k == 64 ? 2 : 1; }

size_t channel_gradients_bytes(int padded_k);  // of shared memory in a block

// Matrices of GradientArgs::key_sums for a block where V is above its columns.
inline constexpr int kRangeSums = 4;

// One launch over all chunks and key heads of the window, but for the pairs with a strong gate: those are marked in
// args.left, all others unmarked. For bf16 and fp16, a file each.
template <DType kType>
void launch_channel_gradients(const chunk_16bit::GradientArgs& args, const ChannelGradientMaps& maps, int64_t blocks,
                              const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
