// Dense batches and packed variable-length sequences as one table.
#pragma once

#include <cstdint>
#include <vector>

#include "fastweight/tensor.h"

namespace fastweight {

// Sequence n owns tokens [begin, begin + length) of batch row `batch`; its chunk-start states stand at positions
// first_chunk, first_chunk + 1, .. along the chunk axis of that row.
struct Sequence {
  int64_t index;
  int64_t batch;
  int64_t begin;
  int64_t length;
  int64_t first_chunk;
};

// For host memory; cu_seqlens absent: `batch` sequences of `tokens` tokens.
std::vector<Sequence> sequence_table(int64_t batch, int64_t tokens, const TensorView& cu_seqlens, int32_t chunk_size);

}  // namespace fastweight
