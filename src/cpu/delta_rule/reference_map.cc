// The map of a segment from its definition: forward and backward of the reference on other arguments
// (core/delta_rule_map_problem.h), in double throughout.
#include <cstdint>

#include "core/workspace.h"
#include "cpu/delta_rule/kernels.h"

namespace fastweight::cpu {
namespace {

// Runs body(zero, identity) with one element and a [N, HV, K, K] tensor in double.
template <class Body>
void with_constants(const DeltaRuleSizes& sizes, const Context& context, const Body& body) {
  const int64_t K = sizes.head_dim_k;
  const Workspace workspace(context, static_cast<size_t>(1 + K * K) * sizeof(double));
  double* zero = static_cast<double*>(workspace.data());
  double* identity = zero + 1;
  *zero = 0;
  for (int64_t i = 0; i < K * K; ++i) identity[i] = i % (K + 1) == 0 ? 1 : 0;
  body(zero, broadcast_square(sizes, identity, DType::kF64, context.device));
}

}  // namespace

void reference_map_forward(const DeltaRuleMapForwardProblem& problem, const Context& context) {
  if (problem.args.h.present()) {
    DeltaRuleForwardProblem inner = recurrence_of<DeltaRuleForward>(problem);
    inner.args.final_state = problem.args.h;
    reference_forward(inner, context);
  }
  if (!problem.args.m.present()) return;
  with_constants(problem.sizes, context, [&](double* zero, const TensorView& identity) {
    DeltaRuleForwardProblem inner = square_recurrence_of<DeltaRuleForward>(problem, zero);
    inner.args.in.initial_state = identity;
    inner.args.final_state = problem.args.m;
    reference_forward(inner, context);
  });
}

void reference_map_backward(const DeltaRuleMapBackwardProblem& problem, const Context& context) {
  const DeltaRuleMapBackward& args = problem.args;
  if (args.e.present()) {
    DeltaRuleBackwardProblem inner = recurrence_of<DeltaRuleBackward>(problem);
    inner.args.d_o = args.d_o;
    inner.args.d_final_state = args.d_final_state;
    inner.args.d_initial_state = args.e;
    reference_backward(inner, context);
  }
  if (!args.mt.present()) return;
  with_constants(problem.sizes, context, [&](double* zero, const TensorView& identity) {
    DeltaRuleBackwardProblem inner = square_recurrence_of<DeltaRuleBackward>(problem, zero);
    inner.args.d_final_state = identity;
    inner.args.d_initial_state = args.mt;
    reference_backward(inner, context);
  });
}

}  // namespace fastweight::cpu
