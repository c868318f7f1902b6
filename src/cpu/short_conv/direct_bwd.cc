// Backward: one walk over the tokens with a window of inputs and a window of deltas.
//
//     delta_t = dy_t act'(z_t)                                   0 before the start and past the end
//     dw_i   += delta_t x_{t-W+1+i},   dbias += delta_t
//     dx_p    = sum_{i=W-1..0} w_{W-1-i} delta_{p+i}             begun with the final state's gradient of position p
//
// When delta_t is known, so is dx of position p = t - W + 1; positions -W .. -1 are the slots of the initial state. A
// range computes the W - 1 deltas that follow it once more. The sum for dx runs from the latest token to the earliest,
// so that a gradient that arrives through a state in fp32 meets the same sum.

#include <cstdint>

#include "core/workspace.h"
#include "cpu/denormals.h"
#include "cpu/element.h"
#include "cpu/parallel.h"
#include "cpu/partition.h"
#include "cpu/short_conv/kernels.h"
#include "cpu/short_conv/partition.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/short_conv/direct_bwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/short_conv/window-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace short_conv {
namespace {

struct BackwardScratch {
  Filter filter;
  float* delta_buffer;    // [W][ld]
  float* dw_buffer;       // [W][ld]
  float* d_final_buffer;  // [W][ld]
  float* d_start_buffer;  // [W][ld]
  float* dbias;           // [ld]
  float* dy;              // [ld]
  float* dx;              // [ld]
  WindowRows delta, dw, d_final, d_start;

  void lay_out(ScratchLayout& layout, const ShortConvSizes& sizes) {
    const int64_t ld = most_columns(sizes), W = sizes.width;
    filter.lay_out(layout, sizes);
    delta_buffer = layout.take<float>(W * ld);
    dw_buffer = layout.take<float>(W * ld);
    d_final_buffer = layout.take<float>(W * ld);
    d_start_buffer = layout.take<float>(W * ld);
    dbias = layout.take<float>(ld);
    dy = layout.take<float>(ld);
    dx = layout.take<float>(ld);
  }

  HWY_INLINE void open(const ShortConvBackward& args, const Block& block) {
    const int64_t W = filter.W, ld = block.ld;
    filter.open(args.in, args.options, block);
    delta.point_at(delta_buffer, W, ld);
    dw.point_at(dw_buffer, W, ld);
    d_final.point_at(d_final_buffer, W, ld);
    d_start.point_at(d_start_buffer, W, ld);
    for (int64_t i = 0; i < W; ++i) fill_row(dw[i], ld, 0);
    fill_row(dbias, ld, 0);
  }

  // delta_t into the newest row; x_t has just entered the window.
  HWY_INLINE void make_delta(const Block& block, float* row) const {
    const float* const from = dy;
    if (filter.silu) {
      const Vec one = broadcast(1.0f);
      filter.convolve(block, [&](int64_t c, Vec z) HWY_ATTR {
        const Vec s = sigmoid(z);
        store(hn::Mul(load(from + c), hn::Mul(s, fma(z, hn::Sub(one, s), one))), row + c);
      });
    } else {
      std::memcpy(row, from, static_cast<size_t>(block.ld) * sizeof(float));
    }
  }

  HWY_INLINE void add_to_weights(const Block& block) const {
    const int64_t W = filter.W;
    const float* const d = delta[W - 1];
    for (int64_t c = 0; c < block.ld; c += kLanes) {
      const Vec v = load(d + c);
      store(hn::Add(load(dbias + c), v), dbias + c);
      for (int64_t i = 0; i < W; ++i) store(fma(v, load(filter.x[i] + c), load(dw[i] + c)), dw[i] + c);
    }
  }

  // result += sum_i w_{W-1-i} delta_i, the sum from the latest row on; `begun` holds what it begins with, or null.
  HWY_INLINE void gather(const Block& block, const float* begun, float* result) const {
    const int64_t W = filter.W;
    for (int64_t c = 0; c < block.ld; c += kLanes) {
      Vec sum = begun == nullptr ? zero() : load(begun + c);
      for (int64_t i = W - 1; i >= 0; --i) sum = fma(load(filter.w[W - 1 - i] + c), load(delta[i] + c), sum);
      store(sum, result + c);
    }
  }
};

void run_range(const ShortConvBackward& args, const Sequence& s, const TokenRange& range, const Block& block,
               BackwardScratch& scratch) {
  Filter& filter = scratch.filter;
  const int64_t W = filter.W, T = s.length;
  const bool at_start = range.begin == 0;
  filter.open_window(args.in.x, args.in.initial_state, s.index, s, range.begin, block);
  for (int64_t i = 0; i < W; ++i) fill_row(scratch.delta[i], block.ld, 0);
  // The final state holds positions T - W .. T - 1.
  const bool has_final = args.d_final_state.present() && range.end + W > T;
  if (has_final) load_state(args.d_final_state, s.index, W, block, filter.packed, scratch.d_final);

  for (int64_t t = at_start ? -1 : range.begin; t < range.end + W - 1; ++t) {
    float* const delta = scratch.delta.advance(W);
    if (t >= 0 && t < T && args.dy.present()) {
      load_token(args.in.x, s, t, block, filter.x.advance(W));
      load_token(args.dy, s, t, block, scratch.dy);
      scratch.make_delta(block, delta);
      if (t < range.end) scratch.add_to_weights(block);
    } else {
      fill_row(delta, block.ld, 0);
    }
    const int64_t p = t - W + 1;
    if (p < range.begin && !at_start) continue;
    const float* const begun = has_final && p >= T - W ? scratch.d_final[p - (T - W)] : nullptr;
    if (p < 0 && args.d_initial_state.present()) scratch.gather(block, begun, scratch.d_start[p + W]);
    if (p >= 0 && args.dx.present()) {
      scratch.gather(block, begun, scratch.dx);
      store_token(scratch.dx, args.dx, s, p, block);
    }
  }
  if (at_start && args.d_initial_state.present()) {
    store_state(scratch.d_start, args.d_initial_state, s.index, W, block, filter.packed);
  }
}

// Partial sums are [group][W + 1][D]: the taps, then the bias.
void store_weight_gradients(const ShortConvBackward& args, const ShortConvSizes& sizes, const float* partials,
                            int64_t groups) {
  const int64_t W = sizes.width, D = sizes.channels;
  for (int64_t i = 0; i <= W; ++i) {
    const TensorView& gradient = i < W ? args.dw : args.dbias;
    if (!gradient.present()) continue;
    for (int64_t d = 0; d < D; ++d) {
      double sum = 0;
      for (int64_t group = 0; group < groups; ++group) {
        sum += static_cast<double>(partials[(group * (W + 1) + i) * D + d]);
      }
      store_element(gradient, i < W ? d * W + i : d, sum);
    }
  }
}

void backward(const ShortConvBackwardProblem& problem, const Context& context) {
  const ShortConvBackward& args = problem.args;
  const ShortConvSizes& sizes = problem.sizes;
  const int64_t W = sizes.width, D = sizes.channels;
  const ShortConvPartition partition = partition_of(problem, false);
  const int64_t items = partition.num_groups() * partition.channel_blocks;
  // A token and channel costs 3 W multiply-adds, and about 30 for the rest.
  const int threads = useful_threads(num_threads(context), items, sizes.batch * sizes.tokens * D * (3 * W + 30));
  ScratchLayout measure;
  BackwardScratch().lay_out(measure, sizes);
  const size_t each = measure.bytes();
  measure.take<float>(partition.num_groups() * (W + 1) * D);
  const size_t partial_bytes = measure.bytes() - each;
  const Workspace workspace(context, partial_bytes + each * static_cast<size_t>(threads));
  float* const partials = static_cast<float*>(workspace.data());
  const FlushDenormals flush;
  parallel_for(items, threads, [&](int64_t item, int thread) HWY_ATTR {
    ScratchLayout layout(static_cast<char*>(workspace.data()) + partial_bytes + each * static_cast<size_t>(thread));
    BackwardScratch scratch;
    scratch.lay_out(layout, sizes);
    const Block block = block_of(sizes, item % partition.channel_blocks);
    const int64_t group = item / partition.channel_blocks;
    scratch.open(args, block);
    for (int64_t i = partition.groups[static_cast<size_t>(group)]; i < partition.groups[static_cast<size_t>(group) + 1];
         ++i) {
      const TokenRange& range = partition.ranges[static_cast<size_t>(i)];
      run_range(args, problem.sequences[static_cast<size_t>(range.sequence)], range, block, scratch);
    }
    float* const partial = partials + group * (W + 1) * D + block.first;
    const size_t bytes = static_cast<size_t>(block.count) * sizeof(float);
    for (int64_t i = 0; i < W; ++i) std::memcpy(partial + i * D, scratch.dw[i], bytes);
    std::memcpy(partial + W * D, scratch.dbias, bytes);
  });
  store_weight_gradients(args, sizes, partials, partition.num_groups());
}

}  // namespace
}  // namespace short_conv

void short_conv_backward(const ShortConvBackwardProblem& problem, const Context& context) {
  short_conv::backward(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(short_conv_backward);

}  // namespace

void short_conv::direct_backward(const ShortConvBackwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(short_conv_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
