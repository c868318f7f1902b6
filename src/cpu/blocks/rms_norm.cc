// The RMS norm of rows with a gate, and its adjoint. With n = x rstd and a = activation(gate):
//
//     y  = weight n a
//     dn = dy weight a                         dx = rstd (dn - n mean(dn n))
//     dgate = dy weight n activation'(gate)    dweight = sum over rows of dy n a
//
// dweight is summed over runs of rows, in fp32 within a run and in fp64 over the runs in order: the threads do not show.
#include <algorithm>
#include <vector>

#include "core/workspace.h"
#include "cpu/blocks/kernels.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/blocks/rms_norm.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/blocks/chunk-inl.h"
#include "cpu/blocks/rows-inl.h"
#include "cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {
namespace {

constexpr int64_t kRowsPerRun = 64;
constexpr int64_t kActivationCost = 16;  // in multiply-adds

struct RmsScratch {
  int64_t ld;
  float* x = nullptr;       // [ld] x, then n
  float* gate = nullptr;    // [ld]
  float* weight = nullptr;  // [ld]
  float* dy = nullptr;      // [ld]
  float* sum = nullptr;     // [ld] of dweight, over a run

  void lay_out(ScratchLayout& layout) {
    for (float** row : {&x, &gate, &weight, &dy, &sum}) *row = layout.take<float>(ld);
  }
};

HWY_INLINE void load_weight(const TensorView& weight, const RmsScratch& s) {
  if (weight.present()) {
    load_row(weight.data, weight.dtype, weight.strides[0], weight.shape[0], s.weight, s.ld);
  } else {
    for (int64_t d = 0; d < s.ld; d += kLanes) store(broadcast(1.0f), s.weight + d);
  }
}

// x becomes n; returns rstd.
HWY_INLINE float normalise(const RmsScratch& s, int64_t width, float eps) {
  const float rstd = 1.0f / std::sqrt(row_dot(s.x, s.x, s.ld) / static_cast<float>(width) + eps);
  for (int64_t d = 0; d < s.ld; d += kLanes) store(hn::Mul(load(s.x + d), broadcast(rstd)), s.x + d);
  return rstd;
}

struct Gated {
  Vec value, slope;  // activation(gate) and its derivative
};
HWY_INLINE Gated activate(Vec gate, bool silu) {
  const Vec y = sigmoid(gate), rest = hn::Sub(broadcast(1.0f), y);
  if (!silu) return {y, hn::Mul(y, rest)};
  return {hn::Mul(gate, y), hn::Mul(y, fma(gate, rest, broadcast(1.0f)))};
}

HWY_NOINLINE void forward_row(const RmsNormForward& args, int64_t i, const RmsScratch& s) {
  const bool gated = args.in.gate.present(), silu = args.options.activation == NormGate::kSilu;
  load_nth(args.in.x, i, s.x, s.ld);
  if (gated) load_nth(args.in.gate, i, s.gate, s.ld);
  normalise(s, width_of(args.in.x), static_cast<float>(args.options.eps));
  for (int64_t d = 0; d < s.ld; d += kLanes) {
    Vec y = hn::Mul(load(s.x + d), load(s.weight + d));
    if (gated) y = hn::Mul(y, activate(load(s.gate + d), silu).value);
    store(y, s.x + d);
  }
  store_nth(s.x, args.y, i);
}

HWY_NOINLINE void backward_row(const RmsNormBackward& args, int64_t i, const RmsScratch& s) {
  const bool gated = args.in.gate.present(), silu = args.options.activation == NormGate::kSilu;
  const int64_t width = width_of(args.in.x);
  load_nth(args.in.x, i, s.x, s.ld);
  load_nth(args.dy, i, s.dy, s.ld);
  if (gated) load_nth(args.in.gate, i, s.gate, s.ld);
  const float rstd = normalise(s, width, static_cast<float>(args.options.eps));
  // dy becomes dn, gate becomes dgate.
  for (int64_t d = 0; d < s.ld; d += kLanes) {
    const Vec n = load(s.x + d), weight = load(s.weight + d);
    Vec through = load(s.dy + d);
    if (gated) {
      const Gated a = activate(load(s.gate + d), silu);
      store(hn::Mul(hn::Mul(through, hn::Mul(weight, n)), a.slope), s.gate + d);
      through = hn::Mul(through, a.value);
    }
    store(fma(through, n, load(s.sum + d)), s.sum + d);
    store(hn::Mul(through, weight), s.dy + d);
  }
  if (args.dgate.present()) store_nth(s.gate, args.dgate, i);
  if (!args.dx.present()) return;
  const Vec along = broadcast(row_dot(s.dy, s.x, s.ld) / static_cast<float>(width));
  for (int64_t d = 0; d < s.ld; d += kLanes) {
    store(hn::Mul(broadcast(rstd), fnma(load(s.x + d), along, load(s.dy + d))), s.dy + d);
  }
  store_nth(s.dy, args.dx, i);
}

}  // namespace

void rms_norm_forward(const BlockProblem<RmsNormForward>& problem, const Context& context) {
  const RmsNormForward& args = problem.args;
  const int64_t rows = count_rows(args.in.x), width = width_of(args.in.x);
  const int64_t cost = args.in.gate.present() ? kActivationCost : 3;
  for_each_item((rows + kRowsPerItem - 1) / kRowsPerItem, cost * rows * width, context, RmsScratch{padded_width(width)},
                [&](int64_t item, const RmsScratch& s) HWY_ATTR {
                  load_weight(args.in.weight, s);
                  const int64_t end = std::min((item + 1) * kRowsPerItem, rows);
                  for (int64_t i = item * kRowsPerItem; i < end; ++i) forward_row(args, i, s);
                });
}

void rms_norm_backward(const BlockProblem<RmsNormBackward>& problem, const Context& context) {
  const RmsNormBackward& args = problem.args;
  const int64_t rows = count_rows(args.in.x), width = width_of(args.in.x), ld = padded_width(width);
  const int64_t runs = (rows + kRowsPerRun - 1) / kRowsPerRun;
  const bool summed = args.dweight.present();
  const Workspace workspace(context, static_cast<size_t>(summed ? runs * ld : 0) * sizeof(float));
  float* const sums = static_cast<float*>(workspace.data());  // [runs][ld]
  for_each_item(runs, 2 * kActivationCost * rows * width, context, RmsScratch{ld},
                [&](int64_t run, const RmsScratch& s) HWY_ATTR {
                  load_weight(args.in.weight, s);
                  for (int64_t d = 0; d < ld; d += kLanes) store(zero(), s.sum + d);
                  const int64_t end = std::min((run + 1) * kRowsPerRun, rows);
                  for (int64_t i = run * kRowsPerRun; i < end; ++i) backward_row(args, i, s);
                  if (summed) std::copy_n(s.sum, ld, sums + run * ld);
                });
  for (int64_t d = 0; d < width && summed; ++d) {
    double total = 0;
    for (int64_t run = 0; run < runs; ++run) total += static_cast<double>(sums[run * ld + d]);
    store_element(args.dweight, d, total);
  }
}

}  // namespace blocks

void block_rms_norm_forward(const BlockProblem<RmsNormForward>& problem, const Context& context) {
  blocks::rms_norm_forward(problem, context);
}
void block_rms_norm_backward(const BlockProblem<RmsNormBackward>& problem, const Context& context) {
  blocks::rms_norm_backward(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(block_rms_norm_forward);
HWY_EXPORT(block_rms_norm_backward);

}  // namespace

void blocks::simd(const BlockProblem<RmsNormForward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_rms_norm_forward)(problem, context);
}
void blocks::simd(const BlockProblem<RmsNormBackward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_rms_norm_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
