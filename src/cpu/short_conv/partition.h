// How a short convolution is cut for the parallel loop.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/sequences.h"
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

struct ShortConvWork {
  std::vector<Sequence> sequences;
  std::vector<TokenRange> ranges;
  std::vector<int64_t> groups;  // where each begins among the ranges, and the end of the last one
  int64_t channel_blocks;

  int64_t num_groups() const { return static_cast<int64_t>(groups.size()) - 1; }
};

// `whole`: sequences are not cut, as where states advance in place.
template <class Problem>
ShortConvWork short_conv_work(const Problem& problem, bool whole) {
  const ShortConvSizes& sizes = problem.sizes;
  const TensorView none;
  ShortConvWork work;
  work.sequences =
      sequence_table(sizes.batch, sizes.tokens, sizes.num_sequences > 0 ? problem.args.in.cu_seqlens : none, 1);
  work.channel_blocks = (sizes.channels + kBlockChannels - 1) / kBlockChannels;
  int64_t size = kRangeTokens;  // of the open group
  for (const Sequence& s : work.sequences) {
    int64_t begin = 0;
    do {
      const int64_t end = whole ? s.length : std::min(begin + kRangeTokens, s.length);
      if (size >= kRangeTokens) {
        work.groups.push_back(static_cast<int64_t>(work.ranges.size()));
        size = 0;
      }
      work.ranges.push_back({s.index, begin, end});
      size += end - begin + sizes.width;  // a window is opened even for no token
      begin = end;
    } while (begin < s.length);
  }
  work.groups.push_back(static_cast<int64_t>(work.ranges.size()));
  return work;
}

}  // namespace fastweight::cpu
