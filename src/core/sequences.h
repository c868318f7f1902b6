// Dense batches and packed variable-length sequences as one table, and the chunks of their tokens.
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

// For host memory; cu_seqlens absent: `batch` sequences of `tokens` tokens. `ops` makes the table of a call once and
// hands it on in the problem.
std::vector<Sequence> sequence_table(int64_t batch, int64_t tokens, const TensorView& cu_seqlens, int64_t chunk_size);

// NT: the chunks of a row of the batch, or of all packed sequences. Lengths in device memory cannot be read here: then
// an upper bound.
int64_t count_chunks(int64_t tokens, const TensorView& cu_seqlens, int64_t chunk_size);

}  // namespace fastweight
