// How a short convolution is cut into items for the parallel loop: by ranges of tokens and blocks of channels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/short_conv_problem.h"

namespace fastweight::cpu {

// Tokens [begin, end) of a sequence, counted from its start. A sequence without tokens has one empty range.
struct TokenRange {
  int64_t sequence;
  int64_t begin;
  int64_t end;
};

// An item is a group of consecutive ranges of about kRangeTokens tokens, for one block of channels. The gradients of
// the weights are summed per group, then over the groups in order: the cut depends on the lengths alone. The windows of
// a block, 28 rows of 2 KiB in the backward with W = 4, stay in the cache next to the core.
inline constexpr int64_t kRangeTokens = 256;
inline constexpr int64_t kBlockChannels = 512;

struct ShortConvPartition {
  std::vector<TokenRange> ranges;
  std::vector<int64_t> groups;  // where each begins among the ranges, and the end of the last one
  int64_t channel_blocks;

  int64_t num_groups() const { return static_cast<int64_t>(groups.size()) - 1; }
};

// `whole`: sequences are not cut, as where states advance in place.
template <class Problem>
ShortConvPartition partition_of(const Problem& problem, bool whole) {
  const ShortConvSizes& sizes = problem.sizes;
  ShortConvPartition partition;
  partition.channel_blocks = (sizes.channels + kBlockChannels - 1) / kBlockChannels;
  int64_t size = kRangeTokens;  // of the open group
  for (const Sequence& s : problem.sequences) {
    int64_t begin = 0;
    do {
      const int64_t end = whole ? s.length : std::min(begin + kRangeTokens, s.length);
      if (size >= kRangeTokens) {
        partition.groups.push_back(static_cast<int64_t>(partition.ranges.size()));
        size = 0;
      }
      partition.ranges.push_back({s.index, begin, end});
      size += end - begin + sizes.width;  // a window is opened even for no token
      begin = end;
    } while (begin < s.length);
  }
  partition.groups.push_back(static_cast<int64_t>(partition.ranges.size()));
  return partition;
}

}  // namespace fastweight::cpu
