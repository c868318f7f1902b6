// Where the states before the mini-batches of all sequences lie, which a forward keeps for a backward, or a backward for
// itself.
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

// The states as the products of a forward with 16-bit operands read them: c, and h in 16 bits, as 8 x 8 matrices of 128
// bytes that ldmatrix reads at once. Those of 16 columns [16 w, 16 w + 16) and 16 keys [16 m, 16 m + 16) are four; number i
// has keys 8 (i % 2) .. and columns of tile i / 2 in the order of LaneRows, a row for a column. So ldmatrix gives right
// operands of products along the keys, and ldmatrix_transposed those along the columns: registers j and j + 2 are for keys
// 8 j ..
struct KeptTiles {
  int32_t* data = nullptr;  // [.., words]: h and c of one state after the other
  int padded_dim = 64;

  // Of a state.
  FW_HOST_DEVICE static constexpr int64_t words(int64_t padded_dim) { return padded_dim * padded_dim / 2 + padded_dim; }

  FW_HOST_DEVICE bool present() const { return data != nullptr; }
  FW_HOST_DEVICE uint16_t* h(int64_t number) const {
    return reinterpret_cast<uint16_t*>(data + number * words(padded_dim));
  }
  FW_HOST_DEVICE float* c(int64_t number) const {
    return reinterpret_cast<float*>(h(number) + padded_dim * padded_dim);
  }

  // Where the four matrices begin; and an element of h, from there.
  FW_HOST_DEVICE static int offset(int padded_dim, int w, int m) { return (w * (padded_dim / 16) + m) * 256; }
  FW_HOST_DEVICE int element(int key, int column) const {
    const int in_tile = column % 16, i = in_tile / 2 % 2 * 2 + key / 8 % 2, row = in_tile / 4 * 2 + in_tile % 2;
    return offset(padded_dim, column / 16, key / 16) + i * 64 + row * 8 + key % 8;
  }
};

}  // namespace fastweight::cuda::ttt
