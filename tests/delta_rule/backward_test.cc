// Every backward implementation against the reference in double.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/delta_rule/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

class Backward : public ::testing::TestWithParam<Gate> {
 protected:
  static DeltaRuleSpec spec(int64_t T, int64_t K, int64_t V) { return spec_of(GetParam(), T, K, V); }
};

TEST_P(Backward, Lengths) {
  for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 63, 64, 130, 191, 320}, 4)) {
    for (int32_t chunk_size : first<int32_t>({64, 32, 16}, 1)) {
      DeltaRuleSpec one = spec(T, 24, 40);
      one.options.chunk_size = chunk_size;
      one.B = 2;
      check_backward(draw(one, 41));
    }
  }
}

TEST_P(Backward, HeadWidths) {
  const std::vector<std::pair<int64_t, int64_t>> widths{{20, 36},  {1, 1},     {3, 128},   {128, 3},   {60, 100},
                                                        {1, 17},   {100, 60},  {128, 128}, {200, 256}, {256, 200},
                                                        {16, 256}, {256, 256}, {7, 5},     {31, 33},   {64, 8}};
  for (const auto& [K, V] : first(widths, 4)) check_backward(draw(spec(70, K, V), 42));
}

TEST_P(Backward, LongSequence) { check_backward(draw(spec(reduced() ? 200 : 1024, 128, 128), 43)); }

TEST_P(Backward, GroupedHeads) {
  for (int64_t group : {2, 3}) {
    for (bool l2norm : {false, true}) {
      DeltaRuleSpec one = with_heads(spec(67, 20, 36), 2, group);
      one.B = 2;
      one.options.qk_l2norm = l2norm;
      check_backward(draw(one, 44));
    }
  }
}

TEST_P(Backward, VariableLengths) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5, 0, 64, 1, 33}, {0, 0}, {0, 130, 0}, {1, 1, 1, 1}, {64, 128, 65}, {200, 3}}) {
    for (int32_t chunk_size : first<int32_t>({64, 16}, 1)) {
      DeltaRuleSpec one = with_lengths(with_heads(spec(0, 20, 36), 2, 1), lengths);
      one.options.chunk_size = chunk_size;
      check_backward(draw(one, 45));
    }
  }
}

TEST_P(Backward, States) {
  for (bool v_first : {false, true}) {
    for (bool initial_state : {false, true}) {
      DeltaRuleSpec one = with_heads(spec(69, 20, 36), 1, 2);
      one.options.state_v_first = v_first;
      one.initial_state = initial_state;
      check_backward(draw(one, 46));
    }
  }
}

TEST_P(Backward, InKernelOptions) {
  for (int variant = 0; variant < 6; ++variant) {
    DeltaRuleSpec one = with_heads(spec(130, 36, 20), 1, 2);
    one.B = 2;
    one.options.qk_l2norm = true;
    one.options.beta_sigmoid = variant >= 1;
    one.options.allow_neg_eigval = variant >= 2;
    if (GetParam() != Gate::kNone) {
      one.options.gate_in_kernel = variant >= 2;
      one.dt_bias_absent = variant == 3;
    }
    if (GetParam() == Gate::kPerChannel && variant >= 4) {
      one.options.lower_bound = -5;
      one.options.safe_gate = one.a_log_absent = variant == 5;
    }
    check_backward(draw(one, 47));
  }
}

TEST_P(Backward, SafeGate) {
  if (GetParam() != Gate::kPerChannel) GTEST_SKIP() << "only for gates per channel";
  for (double divisor : {1.0, 0.1}) {
    DeltaRuleSpec one = spec(130, 36, 20);
    one.options.safe_gate = true;
    one.gate_divisor = divisor;
    check_backward(draw(one, 48));
  }
}

TEST_P(Backward, BetaForms) {
  DeltaRuleSpec one = spec(70, 20, 36);
  one.beta_absent = true;
  check_backward(draw(one, 49));
  one.beta_absent = false;
  one.beta_per_value = true;
  check_backward(draw(one, 49));
  one.beta_per_value = false;
  for (double value : {0.0, 1.0, 1.99}) {
    DeltaRuleCase problem = draw(one, 49);
    problem.beta.fill(value);
    check_backward(problem);
  }
}

TEST_P(Backward, StrongAndWeakGates) {
  if (GetParam() == Gate::kNone) GTEST_SKIP() << "no gate";
  for (double divisor : {0.01, 0.1, 10.0, 1000.0}) {
    DeltaRuleSpec one = spec(130, 36, 20);
    one.gate_divisor = divisor;
    check_backward(draw(one, 50));
  }
  for (double fraction : {0.1, 0.5, 1.0}) {
    DeltaRuleSpec one = spec(130, 36, 20);
    one.hard_gate_fraction = fraction;
    check_backward(draw(one, 51));
  }
  DeltaRuleCase open = draw(spec(130, 36, 20), 52);
  open.g.fill(0);
  check_backward(open);
}

TEST_P(Backward, SixteenBitTypes) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType gate_dtype : {DType::kF32, dtype}) {
      for (int64_t T : first<int64_t>({70, 300}, 1)) {
        DeltaRuleSpec one = with_heads(spec(T, 60, 100), 1, 2);
        one.dtype = dtype;
        one.gate_dtype = gate_dtype;
        check_backward(draw(one, 53));
        one.options.qk_l2norm = true;
        check_backward(draw(with_lengths(one, {5, 0, 64, 1, 33}), 53));
      }
    }
  }
}

TEST_P(Backward, MixedTypes) {
  for (DType gate_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    DeltaRuleSpec one = spec(70, 20, 36);
    one.gate_dtype = gate_dtype;
    check_backward(draw(one, 54));
  }
  DeltaRuleCase problem = draw(spec(70, 20, 36), 54);
  for (DType state_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    problem.initial_state = problem.initial_state.to(state_dtype);
    problem.d_final_state = problem.d_final_state.to(state_dtype);
    check_backward(problem);
  }
}

// Gradients in fp32 for 16-bit inputs.
TEST_P(Backward, WideGradients) {
  DeltaRuleSpec one = spec(70, 20, 36);
  one.dtype = one.gate_dtype = DType::kBF16;
  const DeltaRuleCase problem = draw(one, 55);
  const DeltaRuleResults expected = support::backward(support::in_double(problem), reference_context());
  DeltaRuleResults outputs = support::backward_outputs(problem);
  for (Tensor* x : {&outputs.dq, &outputs.dk, &outputs.dv, &outputs.dg, &outputs.dbeta, &outputs.d_initial_state}) {
    *x = x->to(DType::kF32);
  }
  for (const std::string& name : implementations("backward")) {
    const auto results = unless_declined(
        "backward", name, [&] { return backward_strided(problem, context_for(name), Layout::kDense, outputs); });
    if (results) expect_close(problem, *results, expected);
  }
}

// From the forward's fp32 chunk states.
TEST_P(Backward, SavedStates) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{{}, {5, 0, 130, 1, 64}}) {
    for (int32_t chunk_size : {16, 64}) {
      DeltaRuleSpec one = with_heads(spec(150, 20, 36), 2, 2);
      if (!lengths.empty()) one = with_lengths(one, lengths);
      one.options.chunk_size = chunk_size;
      one.options.state_v_first = chunk_size == 16;
      const DeltaRuleCase problem = draw(one, 56);
      const Tensor saved = support::forward(problem, reference_context(), true).chunk_states;
      const DeltaRuleResults expected = support::backward(support::in_double(problem), reference_context());
      for (const std::string& name : implementations("backward")) {
        const auto results =
            unless_declined("backward", name, [&] { return support::backward(problem, context_for(name), saved); });
        if (results) expect_close(problem, *results, expected);
      }
    }
  }
}

TEST_P(Backward, StridedTensors) {
  for (Layout layout : kLayouts) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      DeltaRuleSpec one = with_heads(spec(69, 20, 36), 2, 2);
      one.B = 2;
      one.dtype = dtype;
      if (GetParam() != Gate::kNone) one.options.gate_in_kernel = true;
      const DeltaRuleCase problem = draw(one, 57);
      const DeltaRuleResults expected = support::backward(support::in_double(problem), reference_context());
      for (const std::string& name : implementations("backward")) {
        const auto results = unless_declined("backward", name, [&] {
          return backward_strided(problem, context_for(name), layout, support::backward_outputs(problem));
        });
        if (results) expect_close(problem, *results, expected);
      }
    }
  }
}

// Each gradient alone is what it is together with the others.
TEST_P(Backward, EachGradientAlone) {
  DeltaRuleSpec one = with_heads(spec(69, 20, 36), 1, 2);
  one.options.gate_in_kernel = GetParam() != Gate::kNone;
  const DeltaRuleCase problem = draw(one, 58);
  const struct {
    const char* name;
    Tensor DeltaRuleResults::*result;
    TensorView DeltaRuleBackward::*argument;
  } gradients[] = {
      {"dq", &DeltaRuleResults::dq, &DeltaRuleBackward::dq},
      {"dk", &DeltaRuleResults::dk, &DeltaRuleBackward::dk},
      {"dv", &DeltaRuleResults::dv, &DeltaRuleBackward::dv},
      {"dg", &DeltaRuleResults::dg, &DeltaRuleBackward::dg},
      {"dbeta", &DeltaRuleResults::dbeta, &DeltaRuleBackward::dbeta},
      {"da_log", &DeltaRuleResults::da_log, &DeltaRuleBackward::da_log},
      {"ddt_bias", &DeltaRuleResults::ddt_bias, &DeltaRuleBackward::ddt_bias},
      {"d_initial_state", &DeltaRuleResults::d_initial_state, &DeltaRuleBackward::d_initial_state},
  };
  for (const std::string& name : implementations("backward")) {
    const auto all = unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (!all) continue;
    for (const auto& [gradient, result, argument] : gradients) {
      const Tensor& expected = (*all).*result;
      if (!expected.present()) continue;
      Tensor alone(expected.dtype(), expected.shape());
      DeltaRuleBackward args = support::backward_args(problem, {});
      args.*argument = alone.view();
      support::run(context_for(name), args);
      EXPECT_TRUE(support::same_bits(alone, expected)) << name << " " << gradient;
    }
  }
}

TEST_P(Backward, AbsentOutputGradients) {
  for (int variant = 0; variant < 3; ++variant) {
    DeltaRuleCase problem = draw(spec(70, 20, 36), 59);
    if (variant != 0) problem.d_o = {};
    if (variant != 1) problem.d_final_state = {};
    check_backward(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Backward, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
