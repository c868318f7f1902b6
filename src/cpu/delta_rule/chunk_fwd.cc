// Forward in the chunk form: blocks of 16 tokens against a state that stays in cache.
//
// With S the state before a block, gamma the running sums of the log decays inside it, e = exp(gamma),
// w = exp(gamma_n - gamma), and the matrices
//
//     A_ij = beta_i (k_i . k_j) exp(gamma_i - gamma_j),  i > j
//     P_ij = (q_i . k_j) exp(gamma_i - gamma_j),         i >= j
//
// a block is
//
//     X  = e [k; q] S                                 one product for reads and outputs
//     R  = (I + A)^-1 beta (v - X_k)                  forward substitution, no inverse
//     o  = scale (X_q + P R)
//     S' = exp(gamma_n) S + (w k)^T R
//
// (decays per channel stand inside the products; what other corrections have instead of k, A and v is in
// block-inl.h). A, P and the scaled keys belong to the block; everything else is done panel by panel of value columns,
// whose slice of S (8 KB at K = 128 on AVX2) is read from the second-level cache once per block. Columns do not touch
// each other, so an item may own any range of panels.

#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/partition.h"
#include "cpu/parallel.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta_rule/chunk_fwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/delta_rule/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

// o = scale (X_q + P R (+ P2 v)) for one panel, four rows at a time; v and o have the same stride.
HWY_INLINE void output_panel(const Block& block, float scale, const float* X_q, const float* R, const float* v,
                             float* o, int64_t stride) {
  const Vec s = broadcast(scale);
  FW_UNROLL
  for (int64_t top = 0; top < kBlock; top += 4) {
    Vec acc[4][2];
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      const Vec read_scale = broadcast(block.read_scale[top + m]);
      acc[m][0] = hn::Mul(read_scale, load(X_q + (top + m) * kPanel));
      acc[m][1] = hn::Mul(read_scale, load(X_q + (top + m) * kPanel + kLanes));
    }
    add_lower_rows(BlockMatrix{block.P()}, R, kPanel, top, acc);
    if (block.pairs2 != nullptr) add_lower_rows(BlockMatrix{block.pairs2 + kBlock * kBlock}, v, stride, top, acc);
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      store(hn::Mul(s, acc[m][0]), o + (top + m) * stride);
      store(hn::Mul(s, acc[m][1]), o + (top + m) * stride + kLanes);
    }
  }
}

void run_item(const DeltaRuleForwardProblem& problem, const Sequence& sequence, const Item& item,
              ForwardScratch& scratch) {
  const float scale = static_cast<float>(problem.scale);
  const Head head = make_head(problem, sequence, item.value_head, scratch.bias);
  const ItemColumns columns(item, head.V);
  Block& block = scratch.block;
  const int64_t first = block.first_read();
  run_sequence(problem, sequence, item, head, scratch, [&](int64_t token, int64_t n) HWY_ATTR {
    if (n < kCrossoverTokens) {
      run_block_by_tokens(head, token, scale, {scratch.S, kPanel, block.ld * kPanel}, item.panels, columns, scratch);
      return;
    }
    prepare_block(head.K, block);
    for (int64_t p = 0; p < item.panels; ++p) {
      float* S = scratch.S + p * block.ld * kPanel;
      const float* v = scratch.v + p * kPanel;
      read_panel(block, first, 2 * kBlock - first, S, scratch.X, scratch.prefetcher);
      correct_panel(block, scratch.X, v, columns.stride, scratch.R);
      output_panel(block, scale, scratch.X + kBlock * kPanel, scratch.R, v, scratch.o + p * kPanel, columns.stride);
      write_panel(block, S, scratch.R, v, columns.stride, S, scratch.prefetcher);
    }
  });
}

void forward(const DeltaRuleForwardProblem& problem, const Context& context) { run_items(problem, context, run_item); }

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(forward);

void chunk_forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
