// The chunks of a block's problem.
#pragma once

#include "core/blocks_problem.h"
#include "cuda/common/first_chunks.h"

namespace fastweight::cuda {

inline NumberedChunks number_chunks(const BlockSizes& sizes, const TensorView& cu_seqlens, const Context& context) {
  const int64_t count = cu_seqlens.present() ? cu_seqlens.shape[0] - 1 : sizes.batch;
  return {device_sequences(cu_seqlens, count, sizes.tokens), sizes.chunk_size, context};
}

}  // namespace fastweight::cuda
