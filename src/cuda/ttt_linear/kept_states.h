// Where the states before the mini-batches of all sequences lie, which a backward keeps.
#pragma once

#include <cstdint>

#include "cuda/common/sequences.h"

namespace fastweight::cuda::ttt {

// Mini-batch m of a head of a sequence has number (first_mini_batch + m) * H + head. A packed sequence has room for one
// mini-batch more than the tokens before it fill, so nobody need know the lengths of those before it.
FW_HOST_DEVICE inline int64_t first_mini_batch(const Sequences& sequences, const SequenceSpan& span, int64_t sequence,
                                               int mini_batch) {
  if (sequences.offsets == nullptr) return sequence * chunks_of(sequences.tokens, mini_batch);
  return span.begin / mini_batch + sequence;
}

inline int64_t most_mini_batches(const Sequences& sequences, int mini_batch) {
  if (sequences.offsets == nullptr) return sequences.count * chunks_of(sequences.tokens, mini_batch);
  return sequences.tokens / mini_batch + sequences.count;
}

}  // namespace fastweight::cuda::ttt
