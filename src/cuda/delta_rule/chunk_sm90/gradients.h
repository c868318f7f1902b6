// What the host gives the gradients of chunk_sm90.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_16bit/gradient.cuh"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda::chunk_sm90 {

inline constexpr int kMostGradientColumns = 128;  // of values

// Value columns, padded, that a block of the gradients takes at once.
constexpr int gradient_columns(int padded_k, int64_t V) {
  return padded_k == 64 && V <= 64 ? 64 : kMostGradientColumns;
}
// Blocks on a multiprocessor.
constexpr int gradients_on_one(int columns) { return columns == 64 ? 2 : 1; }

struct GradientMaps {
  TensorMap k, q, v, d_o, dq, dk;  // token_map with boxes of 64 x 64; dq and dk unused where nobody wants them
  LowerMaps lower;
  TensorMap S;     // states_map of scan.h, boxes of gradient_columns
  TensorMap G, Y;  // rows_map
};

size_t gradients_bytes(int padded_k, int columns);  // of shared memory in a block

// One launch over all chunks and key heads of the window. For bf16 and fp16, a file each.
template <DType kType>
void launch_gradients(const chunk_16bit::GradientArgs& args, const GradientMaps& maps, int64_t blocks,
                      const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
