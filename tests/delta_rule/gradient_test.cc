// The reference's gradients against central differences of its forward, in double, for every element of every input.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/delta_rule/cases.h"

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

double loss(const DeltaRuleCase& problem) {
  const DeltaRuleResults results = support::forward(problem, context_for("reference", 1));
  double sum = 0;
  for (int64_t i = 0; i < results.o.size(); ++i) sum += results.o[i] * problem.d_o[i];
  for (int64_t i = 0; i < results.final_state.size(); ++i) sum += results.final_state[i] * problem.d_final_state[i];
  return sum;
}

Tensor central_differences(const DeltaRuleCase& problem, Tensor DeltaRuleCase::*input) {
  constexpr double kStep = 1e-5;
  Tensor gradient(DType::kF64, (problem.*input).shape());
  DeltaRuleCase shifted = problem;
  for (int64_t i = 0; i < gradient.size(); ++i) {
    const double x = (problem.*input)[i];
    (shifted.*input).set(i, x + kStep);
    const double above = loss(shifted);
    (shifted.*input).set(i, x - kStep);
    gradient.set(i, (above - loss(shifted)) / (2 * kStep));
    (shifted.*input).set(i, x);
  }
  return gradient;
}

class Gradient : public ::testing::TestWithParam<DeltaRuleSpec> {};

TEST_P(Gradient, MatchesCentralDifferences) {
  const DeltaRuleCase problem = support::draw(GetParam(), 11);
  const DeltaRuleResults results = support::backward(problem, reference_context());
  const struct {
    const char* name;
    Tensor DeltaRuleCase::*input;
    Tensor DeltaRuleResults::*gradient;
  } pairs[] = {
      {"dq", &DeltaRuleCase::q, &DeltaRuleResults::dq},
      {"dk", &DeltaRuleCase::k, &DeltaRuleResults::dk},
      {"dv", &DeltaRuleCase::v, &DeltaRuleResults::dv},
      {"dg", &DeltaRuleCase::g, &DeltaRuleResults::dg},
      {"dbeta", &DeltaRuleCase::beta, &DeltaRuleResults::dbeta},
      {"da_log", &DeltaRuleCase::a_log, &DeltaRuleResults::da_log},
      {"ddt_bias", &DeltaRuleCase::dt_bias, &DeltaRuleResults::ddt_bias},
      {"d_initial_state", &DeltaRuleCase::initial_state, &DeltaRuleResults::d_initial_state},
  };
  for (const auto& [name, input, gradient] : pairs) {
    ASSERT_EQ((problem.*input).present(), (results.*gradient).present()) << name;
    if (!(problem.*input).present()) continue;
    const support::Difference difference = support::compare(results.*gradient, central_differences(problem, input));
    EXPECT_LT(difference.relative_rms, 1e-8) << name << ", largest " << difference.max_abs;
  }
}

// The gradients of the parts add up; an absent gradient counts as 0.
TEST_P(Gradient, AbsentGradientsAreZero) {
  const DeltaRuleCase both = support::draw(GetParam(), 12);
  DeltaRuleCase only_o = both, only_final = both, neither = both;
  only_o.d_final_state = {};
  only_final.d_o = {};
  neither.d_o = neither.d_final_state = {};
  const DeltaRuleResults sum = support::backward(both, reference_context());
  const DeltaRuleResults first = support::backward(only_o, reference_context());
  const DeltaRuleResults second = support::backward(only_final, reference_context());
  const DeltaRuleResults zero = support::backward(neither, reference_context());
  const auto wholes = sum.named(), firsts = first.named(), seconds = second.named(), zeros = zero.named();
  for (size_t i = 0; i < wholes.size(); ++i) {
    const Tensor &whole = *wholes[i].second, &a = *firsts[i].second, &b = *seconds[i].second;
    const Tensor& none = *zeros[i].second;
    for (int64_t j = 0; j < whole.size(); ++j) {
      ASSERT_NEAR(whole[j], a[j] + b[j], 1e-11) << wholes[i].first << " " << j;
      ASSERT_EQ(none[j], 0) << wholes[i].first << " " << j;
    }
  }
}

// From saved states the same gradients come out.
TEST_P(Gradient, FromSavedStates) {
  const DeltaRuleCase problem = support::draw(GetParam(), 13);
  const DeltaRuleResults forward = support::forward(problem, reference_context(), true);
  const DeltaRuleResults expected = support::backward(problem, reference_context());
  const DeltaRuleResults results = support::backward(problem, reference_context(), forward.chunk_states);
  expect_same_bits(results, expected);
}

INSTANTIATE_TEST_SUITE_P(Reference, Gradient, ::testing::ValuesIn(specs()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fastweight::test
