// The gradients of the reference (tests/differences.h), with every option.
#include <gtest/gtest.h>

#include "tests/delta_rule/grid.h"
#include "tests/differences.h"

namespace fastweight::test {
namespace {

// Crosses a chunk boundary.
DeltaRuleSpec small(Gate gate) {
  DeltaRuleSpec spec = spec_of(gate, 19, 3, 4);
  spec.B = 2;
  spec.dtype = spec.gate_dtype = DType::kF64;
  spec.options.chunk_size = 16;
  return with_heads(spec, 1, gate == Gate::kNone ? 1 : 2);
}

std::vector<DeltaRuleSpec> specs() {
  std::vector<DeltaRuleSpec> list;
  const auto add = [&](const std::string& name, DeltaRuleSpec spec) {
    spec.name = std::string(name_of(spec.options.gate)) + "_" + name;
    list.push_back(spec);
  };
  for (Gate gate : kGates) {
    const DeltaRuleSpec plain = small(gate);
    add("plain", plain);
    DeltaRuleSpec spec = plain;
    spec.options.qk_l2norm = true;
    spec.options.scale = 0.7;
    add("l2norm", spec);
    spec = plain;
    spec.options.beta_sigmoid = true;
    add("beta_sigmoid", spec);
    spec.options.allow_neg_eigval = true;
    add("negative_eigenvalues", spec);
    spec = plain;
    spec.options.state_v_first = true;
    add("v_first", spec);
    spec = plain;
    spec.beta_absent = true;
    add("no_beta", spec);
    spec = plain;
    spec.beta_per_value = true;
    add("beta_per_value", spec);
    spec.options.beta_sigmoid = true;
    add("beta_per_value_sigmoid", spec);
    spec = plain;
    spec.initial_state = false;
    add("no_state", spec);
    spec = with_lengths(plain, {1, 0, 18, 3});
    add("varlen", spec);
    spec.options.qk_l2norm = spec.options.beta_sigmoid = spec.options.state_v_first = true;
    add("varlen_options", spec);
    if (gate == Gate::kNone) continue;
    spec = plain;
    spec.options.gate_in_kernel = true;
    add("gate_in_kernel", spec);
    spec.dt_bias_absent = true;
    add("gate_in_kernel_no_bias", spec);
    spec = with_lengths(plain, {2, 0, 17});
    spec.options.gate_in_kernel = spec.options.qk_l2norm = spec.options.beta_sigmoid = true;
    add("gate_in_kernel_varlen", spec);
    if (gate == Gate::kPerHead) continue;
    spec = plain;
    spec.options.gate_in_kernel = true;
    spec.options.lower_bound = -5;
    add("lower_bound", spec);
    spec.a_log_absent = true;
    add("lower_bound_no_a_log", spec);
    spec.dt_bias_absent = true;
    spec.options.safe_gate = true;
    add("lower_bound_safe", spec);
  }
  return list;
}

class Gradient : public ::testing::TestWithParam<DeltaRuleSpec> {};

TEST_P(Gradient, MatchesCentralDifferences) { expect_gradients_match_differences(support::draw(GetParam(), 11)); }
TEST_P(Gradient, AbsentGradientsAreZero) { expect_absent_gradients_are_zero(support::draw(GetParam(), 12)); }

// From saved states the same gradients come out.
TEST_P(Gradient, FromSavedStates) {
  const DeltaRuleCase problem = support::draw(GetParam(), 13);
  const DeltaRuleResults forward = support::forward(problem, reference_context(), true);
  const DeltaRuleResults expected = support::backward(problem, reference_context());
  expect_same_bits(support::backward(problem, reference_context(), forward.chunk_states), expected);
}

INSTANTIATE_TEST_SUITE_P(Reference, Gradient, ::testing::ValuesIn(specs()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fastweight::test
