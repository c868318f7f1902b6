// The chunks of all sequences as one table, which the blocks work through in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/blocks_problem.h"
#include "core/sequences.h"

namespace fastweight::cpu::blocks {

// Tokens [begin, begin + length) of a batch row, 1 <= length <= C.
struct Chunk {
  int64_t batch, begin, length;
};

inline std::vector<Chunk> chunk_table(const std::vector<Sequence>& sequences, int64_t chunk_size) {
  std::vector<Chunk> table;
  for (const Sequence& sequence : sequences) {
    for (int64_t i = 0; i < sequence.length; i += chunk_size) {
      table.push_back({sequence.batch, sequence.begin + i, std::min(chunk_size, sequence.length - i)});
    }
  }
  return table;
}

// Where gates are not summed, and for the rows of a norm, there are no chunks and the cut is one of convenience.
inline constexpr int64_t kRowsPerItem = 64;

template <class Args>
std::vector<Chunk> chunks_of(const BlockProblem<Args>& problem) {
  const int64_t chunk_size = problem.sizes.chunk_size;
  return chunk_table(problem.sequences, chunk_size == 0 ? kRowsPerItem : chunk_size);
}

}  // namespace fastweight::cpu::blocks
