// What the tests of the families related to the delta rule share: specs, tolerances, comparisons, strided runs.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "support/random.h"
#include "support/related_case.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::kRelatedOps;
using support::RelatedCase;
using support::RelatedInputs;
using support::RelatedOp;
using support::RelatedOutputs;
using support::RelatedResults;
using support::RelatedSpec;

inline std::vector<std::string> implementations(RelatedOp op, const std::string& mode) {
  return names_of(support::implementations_of(op), mode);
}

// Specs -------------------------------------------------------------------------------------------------------------

inline std::string describe(const RelatedSpec& spec) {
  std::ostringstream out;
  out << name_of(spec.op) << " B=" << spec.B << " T=" << spec.T << " H=" << spec.H << " K=" << spec.K << " V=" << spec.V
      << " C=" << spec.chunk_size << " " << name_of(spec.dtype) << " gates " << name_of(spec.gate_dtype);
  if (!spec.cu_seqlens.empty()) {
    out << " cu_seqlens=[";
    for (size_t i = 0; i < spec.cu_seqlens.size(); ++i) out << (i > 0 ? " " : "") << spec.cu_seqlens[i];
    out << "]";
  }
  if (spec.scale != GlaOptions::kUnset) out << " scale=" << spec.scale;
  if (spec.state_v_first) out << " state_v_first";
  if (spec.qk_l2norm) out << " qk_l2norm";
  if (!spec.initial_state) out << " no_initial_state";
  if (spec.g_gamma) out << " g_gamma";
  if (spec.p_absent) out << " p_absent";
  if (spec.beta_absent) out << " beta_absent";
  if (spec.gate_divisor != 1) out << " gate_divisor=" << spec.gate_divisor;
  if (spec.hard_gate_fraction > 0) out << " hard_gate_fraction=" << spec.hard_gate_fraction;
  return out.str();
}

inline RelatedSpec spec_of(RelatedOp op, int64_t T, int64_t K, int64_t V, int64_t H = 1) {
  RelatedSpec spec;
  spec.op = op;
  spec.T = T;
  spec.K = K;
  spec.V = V;
  spec.H = H;
  return spec;
}

inline bool has_gate(RelatedOp op) { return gate_of(op) != Gate::kNone; }

// The ways in which an operator's inputs may differ, each on top of `plain`.
inline std::vector<RelatedSpec> variants(const RelatedSpec& plain) {
  std::vector<RelatedSpec> list{plain};
  const auto add = [&](const auto& change) {
    list.push_back(plain);
    change(list.back());
  };
  add([](RelatedSpec& spec) { spec.state_v_first = true; });
  add([](RelatedSpec& spec) { spec.initial_state = false; });
  add([](RelatedSpec& spec) { spec.scale = -0.7; });
  if (plain.op == RelatedOp::kSimpleGla) add([](RelatedSpec& spec) { spec.g_gamma = true; });
  if (plain.op == RelatedOp::kComba) {
    add([](RelatedSpec& spec) { spec.qk_l2norm = true; });
    add([](RelatedSpec& spec) { spec.p_absent = true; });
    add([](RelatedSpec& spec) { spec.beta_absent = true; });
    add([](RelatedSpec& spec) { spec.p_absent = spec.beta_absent = spec.qk_l2norm = true; });
  }
  return list;
}

// Tolerances --------------------------------------------------------------------------------------------------------

// The largest relative rms error of a result against the reference in double on the same rounded inputs.
inline double tolerance(const RelatedSpec& spec, const std::string& tensor, DType result_type) {
  if (is_16_bit(spec.dtype) || is_16_bit(result_type)) {
    if (tensor == "dg" || tensor == "dbeta") return 2e-2;
    return 8e-3;
  }
  if (spec.dtype == DType::kF64 && result_type == DType::kF64) return 1e-10;
  return tensor == "dbeta" ? 3e-5 : 1e-5;  // dbeta is the difference of two sums, over v and over what was read
}

inline void expect_close(const RelatedCase& problem, const RelatedResults& results, const RelatedResults& expected) {
  const Closeness closeness{
      .tolerance = [&](const std::string& name, DType type) { return tolerance(problem.spec, name, type); },
      .smallest = problem.spec.dtype == DType::kF64 ? 1e-12 : 1e-6};
  expect_close(results.implementation, results.named(), expected.named(), closeness, describe(problem.spec));
}

// Every CPU implementation of the mode on this problem, against the reference in double.
inline void check_forward(const RelatedCase& problem, bool chunk_states = true) {
  const RelatedResults expected = support::forward(support::in_double(problem), reference_context(), chunk_states);
  for (const std::string& name : implementations(problem.spec.op, "forward")) {
    const auto results =
        unless_declined("forward", name, [&] { return support::forward(problem, context_for(name), chunk_states); });
    if (results) expect_close(problem, *results, expected);
  }
}

inline void check_backward(const RelatedCase& problem) {
  const RelatedResults expected = support::backward(support::in_double(problem), reference_context());
  for (const std::string& name : implementations(problem.spec.op, "backward")) {
    const auto results =
        unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

// Strided runs ------------------------------------------------------------------------------------------------------

// One call with every input and output in a strided layout; `results` holds the poisoned outputs and receives theirs.
template <class Run>
RelatedResults run_strided(const RelatedCase& problem, Layout layout, RelatedResults results, const Run& run) {
  RelatedInputs<StridedTensor> inputs;
  RelatedInputs<TensorView> in;
  for (size_t i = 0; i < inputs.all().size(); ++i) {
    *inputs.all()[i] = StridedTensor(*problem.all()[i], layout);
    *in.all()[i] = inputs.all()[i]->view();
  }
  RelatedOutputs<StridedTensor> outputs;
  RelatedOutputs<TensorView> out;
  for (size_t i = 0; i < outputs.all().size(); ++i) {
    *outputs.all()[i] = StridedTensor(*results.all()[i], layout);
    *out.all()[i] = outputs.all()[i]->view();
  }
  results.implementation = run(in, out);
  for (size_t i = 0; i < outputs.all().size(); ++i) {
    EXPECT_TRUE(outputs.all()[i]->guards_intact())
        << results.implementation << " wrote outside " << results.kNames[i] << "\n  " << describe(problem.spec);
    *results.all()[i] = outputs.all()[i]->dense();
  }
  return results;
}

inline RelatedResults forward_strided(const RelatedCase& problem, const Context& context, Layout layout) {
  return run_strided(problem, layout, support::forward_outputs(problem, true), [&](const auto& in, const auto& out) {
    return support::run_forward(problem.spec, context, in, out);
  });
}

inline RelatedResults backward_strided(const RelatedCase& problem, const Context& context, Layout layout) {
  return run_strided(problem, layout, support::backward_outputs(problem), [&](const auto& in, const auto& out) {
    return support::run_backward(problem.spec, context, in, out);
  });
}

inline void check_strided(const RelatedCase& problem, Layout layout) {
  const RelatedCase exact = support::in_double(problem);
  const RelatedResults expected_forward = support::forward(exact, reference_context(), true);
  for (const std::string& name : implementations(problem.spec.op, "forward")) {
    const auto results =
        unless_declined("forward", name, [&] { return forward_strided(problem, context_for(name), layout); });
    if (results) expect_close(problem, *results, expected_forward);
  }
  const RelatedResults expected_backward = support::backward(exact, reference_context());
  for (const std::string& name : implementations(problem.spec.op, "backward")) {
    const auto results =
        unless_declined("backward", name, [&] { return backward_strided(problem, context_for(name), layout); });
    if (results) expect_close(problem, *results, expected_backward);
  }
}

}  // namespace fastweight::test
