// How a problem is cut into items for the parallel loop: by sequences, value heads and ranges of value columns. And the
// measured crossover between the two forms.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/sequences.h"
#include "cpu/partition.h"

namespace fastweight::cpu {

// Sequences, and last blocks of sequences, with fewer tokens than this run token by token: cheaper than one padded
// block of 16 in the chunk form. The chunk implementation applies it to the end of every sequence, so that choosing
// between "chunk" and "recurrent" by this number never changes a bit, whatever else is in the batch and wherever a
// sequence is cut.
inline constexpr int64_t kCrossoverTokens = 14;

// Panels [first_panel, first_panel + panels) of the values of one head of one sequence.
struct Item {
  int64_t sequence;
  int64_t value_head;
  int64_t first_panel, panels;
  int64_t range;  // which of the head's ranges of columns this is
};

// Items for kernels whose value columns do not touch each other: any cut gives the same bits, so heads are cut into as
// many ranges of columns as the threads need.
inline std::vector<Item> column_items(const std::vector<Sequence>& sequences, int64_t heads, int64_t panels,
                                      int threads) {
  // Two items per thread even out what differs between them; beyond that, each range repeats what is done to the keys.
  constexpr int64_t kItemsPerThread = 2;
  int64_t tokens = 0;
  for (const Sequence& s : sequences) tokens += s.length;
  const int64_t share = std::max<int64_t>(1, tokens * heads * panels / (threads * kItemsPerThread));
  std::vector<Item> items;
  for (int64_t n : longest_first(sequences)) {
    const int64_t cost = sequences[static_cast<size_t>(n)].length * panels;
    const int64_t ranges = threads == 1 ? 1 : std::clamp<int64_t>((cost + share - 1) / share, 1, panels);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t r = 0; r < ranges; ++r) {
        const int64_t first = r * panels / ranges;
        items.push_back({n, h, first, (r + 1) * panels / ranges - first, r});
      }
    }
  }
  return items;
}

// Items for kernels that add over value columns: every head is cut into `units` ranges, whatever the threads.
inline std::vector<Item> unit_items(const std::vector<Sequence>& sequences, int64_t heads, int64_t panels,
                                    int64_t units) {
  std::vector<Item> items;
  for (int64_t n : longest_first(sequences)) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t u = 0; u < units; ++u) {
        const int64_t first = u * panels / units;
        items.push_back({n, h, first, (u + 1) * panels / units - first, u});
      }
    }
  }
  return items;
}

}  // namespace fastweight::cpu
