// Forward and decoding token by token, in the order of the definition.

#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/partition.h"
#include "cpu/parallel.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta_rule/recurrent_fwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/delta_rule/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

void run_forward_item(const DeltaRuleForwardProblem& problem, const Sequence& sequence, const Item& item,
                      ForwardScratch& scratch) {
  const Head head = make_head(problem, sequence, item.value_head, scratch.bias);
  const ItemColumns columns(item, head.V);
  const StatePanels S{scratch.S, kPanel, scratch.block.ld * kPanel};
  run_sequence(problem, sequence, item, head, scratch, [&](int64_t token, int64_t) HWY_ATTR {
    run_block_by_tokens(head, token, static_cast<float>(problem.scale), S, item.panels, columns, scratch);
  });
}

void zero_output(const DeltaRuleStep& args, const Sequence& sequence, const Item& item, const ItemColumns& columns,
                 ForwardScratch& scratch) {
  std::memset(scratch.o, 0, static_cast<size_t>(kBlock * columns.stride) * sizeof(float));
  for (int64_t t = 0; t < sequence.length; t += kBlock) {
    store_rows(scratch.o, columns.stride, args.o, sequence.batch, sequence.begin + t, item.value_head,
               std::min(kBlock, sequence.length - t), columns.first, columns.width);
  }
}

// A state that lies in memory as rows of whole panels is advanced where it is; others go through scratch.
void run_step_item(const DeltaRuleStepProblem& problem, const Sequence& sequence, const Item& item,
                   ForwardScratch& scratch) {
  const DeltaRuleStep& args = problem.args;
  const int64_t ld = scratch.block.ld;
  const Head head = make_head(problem, sequence, item.value_head, scratch.bias);
  const ItemColumns columns(item, head.V);
  int64_t slot = sequence.index;
  if (args.state_indices.present()) {
    slot = load_integer(args.state_indices.data, args.state_indices.dtype, slot * args.state_indices.strides[0]);
  }
  if (slot < 0) return zero_output(args, sequence, item, columns, scratch);

  const StateRef state = state_of(args.state, args.options.state_v_first, head.K, head.V, slot, item.value_head);
  const bool in_place = state.dtype == DType::kF32 && state.v_stride == 1 && head.V % kPanel == 0;
  StatePanels S{scratch.S, kPanel, ld * kPanel};
  if (in_place) {
    S = {reinterpret_cast<float*>(state.data) + columns.first, state.k_stride, kPanel};
  } else {
    load_state(state, item.first_panel, item.panels, ld, scratch.S);
  }
  for (int64_t t = 0; t < sequence.length; t += kBlock) {
    const int64_t token = sequence.begin + t;
    const int64_t n = std::min(kBlock, sequence.length - t);
    load_forward_block(head, args.o, token, n, columns, scratch);
    run_block_by_tokens(head, token, static_cast<float>(problem.scale), S, item.panels, columns, scratch);
    store_rows(scratch.o, columns.stride, args.o, sequence.batch, token, item.value_head, n, columns.first,
               columns.width);
  }
  if (!in_place) store_state(scratch.S, state, item.first_panel, item.panels, ld);
}

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  run_items(problem, context, run_forward_item);
}
void step(const DeltaRuleStepProblem& problem, const Context& context) { run_items(problem, context, run_step_item); }

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(step);

void recurrent_forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

void recurrent_step(const DeltaRuleStepProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(step)(problem, context);
}

}  // namespace fastweight::cpu
#endif
