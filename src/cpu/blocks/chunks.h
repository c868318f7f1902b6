// The chunks of all sequences as one table, which the blocks work through in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/sequences.h"
#include "fastweight/tensor.h"

namespace fastweight::cpu::blocks {

// Tokens [begin, begin + length) of a batch row, 1 <= length <= C.
struct Chunk {
  int64_t batch, begin, length;
};

inline std::vector<Chunk> chunk_table(int64_t batch, int64_t tokens, const TensorView& cu_seqlens, int64_t chunk_size) {
  std::vector<Chunk> table;
  if (tokens == 0) return table;  // however many sequences there are
  for (const Sequence& sequence : sequence_table(batch, tokens, cu_seqlens, static_cast<int32_t>(chunk_size))) {
    for (int64_t i = 0; i < sequence.length; i += chunk_size) {
      table.push_back({sequence.batch, sequence.begin + i, std::min(chunk_size, sequence.length - i)});
    }
  }
  return table;
}

// Where gates are not summed, sequences do not matter and the cut is one of convenience.
inline constexpr int64_t kRowsPerItem = 64;

}  // namespace fastweight::cpu::blocks
