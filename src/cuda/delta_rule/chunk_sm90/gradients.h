// What the host gives the gradients of chunk_sm90.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_16bit/gradient.cuh"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda::chunk_sm90 {

struct GradientMaps {
  TensorMap k, q, v, d_o, dq, dk;  // token_map with boxes of 64 x 64; dq and dk unused where nobody wants them
  TensorMap J, sP;                 // lower_map
  TensorMap S;                     // states_map
  TensorMap G, Y;                  // rows_map
};

// The states before the chunks, in boxes of 128 value columns and 64 channels: {channel, column, head, chunk, batch}.
TensorMap states_map(const chunk_16bit::GradientArgs& args, int64_t batch);

size_t gradients_bytes();  // of shared memory in a block

// One launch over all chunks and key heads of the window. For bf16 and fp16, a file each.
template <DType kType>
void launch_gradients(const chunk_16bit::GradientArgs& args, const GradientMaps& maps, int64_t blocks,
                      const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
