// Forward and decoding: rows of channels, one token after the other over a window of the last W.
//
//     z = bias + sum_i w_i x_i,   y = act(z) + residual

#include <cstdint>

#include "core/workspace.h"
#include "cpu/denormals.h"
#include "cpu/parallel.h"
#include "cpu/partition.h"
#include "cpu/short_conv/kernels.h"
#include "cpu/short_conv/partition.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/short_conv/direct_fwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/short_conv/window-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace short_conv {
namespace {

struct ForwardScratch {
  Filter filter;
  float* y;         // [ld]
  float* residual;  // [ld]

  void lay_out(ScratchLayout& layout, const ShortConvSizes& sizes) {
    filter.lay_out(layout, sizes);
    y = layout.take<float>(most_columns(sizes));
    residual = layout.take<float>(most_columns(sizes));
  }
};

template <class Args>
HWY_INLINE void run_tokens(const Args& args, const Sequence& s, const TokenRange& range, const Block& block,
                           ForwardScratch& scratch) {
  Filter& filter = scratch.filter;
  float* const y = scratch.y;
  for (int64_t t = range.begin; t < range.end; ++t) {
    load_token(args.in.x, s, t, block, filter.x.advance(filter.W));
    if (filter.silu) {
      filter.convolve(block, [&](int64_t c, Vec z) HWY_ATTR { store(hn::Mul(z, sigmoid(z)), y + c); });
    } else {
      filter.convolve(block, [&](int64_t c, Vec z) HWY_ATTR { store(z, y + c); });
    }
    if (args.residual.present()) {
      load_token(args.residual, s, t, block, scratch.residual);
      for (int64_t c = 0; c < block.ld; c += kLanes) store(hn::Add(load(y + c), load(scratch.residual + c)), y + c);
    }
    store_token(y, args.y, s, t, block);
  }
}

void run_range(const ShortConvForward& args, const Sequence& s, const TokenRange& range, const Block& block,
               ForwardScratch& scratch) {
  Filter& filter = scratch.filter;
  filter.open_window(args.in.x, args.in.initial_state, s.index, s, range.begin, block);
  run_tokens(args, s, range, block, scratch);
  if (range.end == s.length && args.final_state.present()) {
    store_state(filter.x, args.final_state, s.index, filter.W, block, filter.packed);
  }
}

// The range is the whole sequence.
void run_range(const ShortConvStep& args, const Sequence& s, const TokenRange& range, const Block& block,
               ForwardScratch& scratch) {
  Filter& filter = scratch.filter;
  const TensorView& indices = args.state_indices;
  const int64_t slot =
      indices.present() ? load_integer(indices.data, indices.dtype, s.index * indices.strides[0]) : s.index;
  if (slot < 0) {
    fill_row(scratch.y, block.ld, 0);
    for (int64_t t = 0; t < s.length; ++t) store_token(scratch.y, args.y, s, t, block);
    return;
  }
  filter.open_window(args.in.x, args.state, slot, s, 0, block);
  run_tokens(args, s, range, block, scratch);
  store_state(filter.x, args.state, slot, filter.W, block, filter.packed);
}

template <class Problem>
HWY_INLINE void run(const Problem& problem, const Context& context, bool whole) {
  const ShortConvSizes& sizes = problem.sizes;
  const ShortConvPartition partition = partition_of(problem, whole);
  const int64_t items = partition.num_groups() * partition.channel_blocks;
  // A token and channel costs W multiply-adds, and about 20 for the rest.
  const int threads =
      useful_threads(num_threads(context), items, sizes.batch * sizes.tokens * sizes.channels * (sizes.width + 20));
  ScratchLayout measure;
  ForwardScratch().lay_out(measure, sizes);
  const Workspace workspace(context, measure.bytes() * static_cast<size_t>(threads));
  const FlushDenormals flush;
  parallel_for(items, threads, [&](int64_t item, int thread) HWY_ATTR {
    ScratchLayout layout(static_cast<char*>(workspace.data()) + measure.bytes() * static_cast<size_t>(thread));
    ForwardScratch scratch;
    scratch.lay_out(layout, sizes);
    const Block block = block_of(sizes, item % partition.channel_blocks);
    const size_t group = static_cast<size_t>(item / partition.channel_blocks);
    scratch.filter.open(problem.args.in, problem.args.options, block);
    for (int64_t i = partition.groups[group]; i < partition.groups[group + 1]; ++i) {
      const TokenRange& range = partition.ranges[static_cast<size_t>(i)];
      run_range(problem.args, problem.sequences[static_cast<size_t>(range.sequence)], range, block, scratch);
    }
  });
}

}  // namespace
}  // namespace short_conv

void short_conv_forward(const ShortConvForwardProblem& problem, const Context& context) {
  short_conv::run(problem, context, false);
}
void short_conv_step(const ShortConvStepProblem& problem, const Context& context) {
  short_conv::run(problem, context, true);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(short_conv_forward);
HWY_EXPORT(short_conv_step);

}  // namespace

void short_conv::direct_forward(const ShortConvForwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(short_conv_forward)(problem, context);
}

void short_conv::direct_step(const ShortConvStepProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(short_conv_step)(problem, context);
}

}  // namespace fastweight::cpu
#endif
