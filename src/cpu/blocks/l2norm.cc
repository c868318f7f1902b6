// The l2 norm of rows and its adjoint.
#include <vector>

#include "cpu/blocks/kernels.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/blocks/l2norm.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/blocks/chunk-inl.h"
#include "cpu/blocks/rows-inl.h"
#include "cpu/l2norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {
namespace {

struct NormScratch {
  int64_t ld;
  float* x = nullptr;   // [ld]
  float* dy = nullptr;  // [ld]

  void lay_out(ScratchLayout& layout) {
    x = layout.take<float>(ld);
    dy = layout.take<float>(ld);
  }
};

// body(i, scratch) for every row i of a tensor like x.
template <class Body>
HWY_INLINE void for_each_row(const TensorView& x, const Context& context, Body body) {
  const int64_t rows = count_rows(x);
  for_each_item((rows + kRowsPerItem - 1) / kRowsPerItem, 2 * rows * width_of(x), context,
                NormScratch{padded_width(width_of(x))}, [&](int64_t item, const NormScratch& scratch) HWY_ATTR {
                  const int64_t end = std::min((item + 1) * kRowsPerItem, rows);
                  for (int64_t i = item * kRowsPerItem; i < end; ++i) body(i, scratch);
                });
}

}  // namespace

void l2norm_forward(const BlockProblem<L2NormForward>& problem, const Context& context) {
  const L2NormForward& args = problem.args;
  const float eps = static_cast<float>(args.eps);
  for_each_row(args.x, context, [&](int64_t i, const NormScratch& s) HWY_ATTR {
    float rstd;
    load_nth(args.x, i, s.x, s.ld);
    normalise_rows(s.x, s.ld, 1, &rstd, eps);
    store_nth(s.x, args.y, i);
    if (args.rstd.present()) store_element(args.rstd, i, static_cast<double>(rstd));
  });
}

void l2norm_backward(const BlockProblem<L2NormBackward>& problem, const Context& context) {
  const L2NormBackward& args = problem.args;
  for_each_row(args.y, context, [&](int64_t i, const NormScratch& s) HWY_ATTR {
    const float rstd = static_cast<float>(load_element(args.rstd, i));
    load_nth(args.y, i, s.x, s.ld);
    load_nth(args.dy, i, s.dy, s.ld);
    l2_adjoint(s.x, &rstd, s.ld, 1, s.dy);
    store_nth(s.dy, args.dx, i);
  });
}

}  // namespace blocks

void block_l2norm_forward(const BlockProblem<L2NormForward>& problem, const Context& context) {
  blocks::l2norm_forward(problem, context);
}
void block_l2norm_backward(const BlockProblem<L2NormBackward>& problem, const Context& context) {
  blocks::l2norm_backward(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(block_l2norm_forward);
HWY_EXPORT(block_l2norm_backward);

}  // namespace

void blocks::simd(const BlockProblem<L2NormForward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_l2norm_forward)(problem, context);
}
void blocks::simd(const BlockProblem<L2NormBackward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_l2norm_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
