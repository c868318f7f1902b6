// What the implementations of the delta rule's segment maps receive, and the maps as problems of the delta rule itself:
//
//     h     is the final state of a forward
//     M     the final state of a forward with V = K and v = 0 from the identity
//     e     the gradient of the initial state in a backward
//     M^T   the same with V = K, d_o = 0 and the identity as the gradient of the final state
#pragma once

#include "core/delta_rule_problem.h"
#include "fastweight/delta_rule_map.h"

namespace fastweight {

using DeltaRuleMapForwardProblem = DeltaRuleProblem<DeltaRuleMapForward>;
using DeltaRuleMapBackwardProblem = DeltaRuleProblem<DeltaRuleMapBackward>;

// The delta rule's problem of the same sequences and options, without outputs.
template <class Inner, class Args>
DeltaRuleProblem<Inner> recurrence_of(const DeltaRuleProblem<Args>& map) {
  DeltaRuleProblem<Inner> inner;
  inner.sizes = map.sizes;
  inner.args.in = map.args.in;
  inner.args.options = map.args.options;
  inner.sequences = map.sequences;
  inner.scale = map.scale;
  inner.has_fp64 = map.has_fp64;
  return inner;
}

// Of the problem that M or its transpose belongs to: V = K, and states that are K x K. `zero` is one element of the
// type of v, which stands for all of its values.
template <class Inner, class Args>
DeltaRuleProblem<Inner> square_recurrence_of(const DeltaRuleProblem<Args>& map, void* zero) {
  DeltaRuleProblem<Inner> inner = recurrence_of<Inner>(map);
  inner.sizes.head_dim_v = inner.sizes.head_dim_k;
  inner.args.options.state_v_first = false;
  TensorView& v = inner.args.in.v;
  v.data = zero;
  v.shape[3] = inner.sizes.head_dim_k;
  v.strides = {};
  inner.args.in.initial_state = {};
  return inner;
}

// [N, HV, K, K], every matrix the one at `matrix`.
inline TensorView broadcast_square(const DeltaRuleSizes& sizes, void* matrix, DType dtype, Device device) {
  const int64_t K = sizes.head_dim_k;
  TensorView view = TensorView::dense(matrix, dtype, {sizes.num_sequences, sizes.num_value_heads, K, K}, device);
  view.strides[0] = view.strides[1] = 0;
  return view;
}

}  // namespace fastweight
