// What the partitions of all operators share: the order of the sequences, and how many threads to use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/sequences.h"

namespace fastweight::cpu {

// Indices of the sequences, longest first.
inline std::vector<int64_t> longest_first(const std::vector<Sequence>& sequences) {
  std::vector<int64_t> order(sequences.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return sequences[static_cast<size_t>(a)].length > sequences[static_cast<size_t>(b)].length;
  });
  return order;
}

// Threads that pay for themselves: one per `kGrain` multiply-adds, about ten microseconds.
inline int useful_threads(int threads, int64_t items, int64_t multiply_adds) {
  constexpr int64_t kGrain = 200'000;
  const int64_t most = std::min(items, multiply_adds / kGrain + 1);
  return static_cast<int>(std::min<int64_t>(threads, std::max<int64_t>(1, most)));
}

}  // namespace fastweight::cpu
