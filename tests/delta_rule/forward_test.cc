// Every forward implementation against the reference in double.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/delta_rule/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

class Forward : public ::testing::TestWithParam<Gate> {
 protected:
  static DeltaRuleSpec spec(int64_t T, int64_t K, int64_t V) { return spec_of(GetParam(), T, K, V); }
};

TEST_P(Forward, Lengths) {
  for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 63, 64, 130, 191, 320}, 4)) {
    for (int32_t chunk_size : first<int32_t>({64, 32, 16}, 1)) {
      DeltaRuleSpec one = spec(T, 24, 40);
      one.options.chunk_size = chunk_size;
      one.B = 2;
      check_forward(draw(one, 21), true);
    }
  }
}

TEST_P(Forward, HeadWidths) {
  const std::vector<std::pair<int64_t, int64_t>> widths{{20, 36},  {1, 1},     {3, 128},   {128, 3},   {60, 100},
                                                        {1, 17},   {100, 60},  {128, 128}, {200, 256}, {256, 200},
                                                        {16, 256}, {256, 256}, {7, 5},     {31, 33},   {64, 8}};
  for (const auto& [K, V] : first(widths, 4)) check_forward(draw(spec(70, K, V), 22), true);
}

TEST_P(Forward, LongSequence) { check_forward(draw(spec(reduced() ? 200 : 1024, 128, 128), 23)); }

TEST_P(Forward, GroupedHeads) {
  for (int64_t group : {2, 3}) {
    DeltaRuleSpec one = with_heads(spec(67, 20, 36), 2, group);
    one.B = 2;
    check_forward(draw(one, 24), true);
  }
}

TEST_P(Forward, VariableLengths) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5, 0, 64, 1, 33}, {0, 0}, {0, 130, 0}, {1, 1, 1, 1}, {64, 128, 65}, {200, 3}}) {
    for (int32_t chunk_size : first<int32_t>({64, 16}, 1)) {
      DeltaRuleSpec one = with_lengths(with_heads(spec(0, 20, 36), 2, 1), lengths);
      one.options.chunk_size = chunk_size;
      check_forward(draw(one, 25), true);
    }
  }
}

TEST_P(Forward, States) {
  for (bool v_first : {false, true}) {
    for (bool initial_state : {false, true}) {
      DeltaRuleSpec one = with_heads(spec(69, 20, 36), 1, 2);
      one.options.state_v_first = v_first;
      one.initial_state = initial_state;
      check_forward(draw(one, 26), true);
    }
  }
}

TEST_P(Forward, InKernelOptions) {
  for (int variant = 0; variant < 6; ++variant) {
    DeltaRuleSpec one = with_heads(spec(130, 36, 20), 1, 2);
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
    check_forward(draw(one, 27));
  }
}

TEST_P(Forward, SafeGate) {
  if (GetParam() != Gate::kPerChannel) GTEST_SKIP() << "only for gates per channel";
  for (double divisor : {1.0, 0.1}) {
    DeltaRuleSpec one = spec(130, 36, 20);
    one.options.safe_gate = true;
    one.gate_divisor = divisor;
    check_forward(draw(one, 28));
  }
}

TEST_P(Forward, BetaForms) {
  DeltaRuleSpec one = spec(70, 20, 36);
  one.beta_absent = true;
  check_forward(draw(one, 29));
  one.beta_absent = false;
  one.beta_per_value = true;
  check_forward(draw(one, 29));
  one.beta_per_value = false;
  for (double value : {0.0, 1.0, 1.99}) {
    DeltaRuleCase problem = draw(one, 29);
    problem.beta.fill(value);
    check_forward(problem);
  }
}

TEST_P(Forward, StrongAndWeakGates) {
  if (GetParam() == Gate::kNone) GTEST_SKIP() << "no gate";
  for (double divisor : {0.01, 0.1, 10.0, 1000.0}) {
    DeltaRuleSpec one = spec(130, 36, 20);
    one.gate_divisor = divisor;
    check_forward(draw(one, 30), true);
  }
  for (double fraction : {0.1, 0.5, 1.0}) {
    DeltaRuleSpec one = spec(130, 36, 20);
    one.hard_gate_fraction = fraction;
    check_forward(draw(one, 31), true);
  }
  DeltaRuleCase open = draw(spec(130, 36, 20), 32);
  open.g.fill(0);
  check_forward(open);
}

// Also where the decay of 16 tokens is just above what a 16-bit operand holds, and just below.
TEST_P(Forward, StrongGatesInSixteenBits) {
  if (GetParam() == Gate::kNone) GTEST_SKIP() << "no gate";
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    DeltaRuleSpec one = spec(70, 36, 20);
    one.dtype = dtype;
    for (double g : {-0.1, -0.3, -5.0, -5.1, -5.5, -9.0}) {
      DeltaRuleCase problem = draw(one, 34);
      problem.g.fill(g);
      check_forward(problem);
    }
    for (double fraction : {0.1, 1.0}) {
      one.hard_gate_fraction = fraction;
      check_forward(draw(one, 35), true);
    }
  }
}

TEST_P(Forward, SixteenBitTypes) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType gate_dtype : {DType::kF32, dtype}) {
      for (int64_t T : first<int64_t>({70, 300}, 1)) {
        DeltaRuleSpec one = with_heads(spec(T, 60, 100), 1, 2);
        one.dtype = dtype;
        one.gate_dtype = gate_dtype;
        check_forward(draw(one, 33), true);
        one.options.qk_l2norm = true;
        check_forward(draw(with_lengths(one, {5, 0, 64, 1, 33}), 33), true);
      }
    }
  }
}

TEST_P(Forward, MixedTypes) {
  for (DType gate_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    DeltaRuleSpec one = spec(70, 20, 36);
    one.gate_dtype = gate_dtype;
    check_forward(draw(one, 34));
  }
  DeltaRuleCase problem = draw(spec(70, 20, 36), 34);
  for (DType state_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    problem.initial_state = problem.initial_state.to(state_dtype);
    check_forward(problem);
  }
}

// o in fp32 for 16-bit inputs, chunk states in k's type.
TEST_P(Forward, OutputTypes) {
  DeltaRuleSpec one = spec(70, 20, 36);
  one.dtype = DType::kBF16;
  const DeltaRuleCase problem = draw(one, 35);
  const DeltaRuleResults expected = support::forward(support::in_double(problem), reference_context(), true);
  DeltaRuleResults outputs = support::forward_outputs(problem, true);
  outputs.o = outputs.o.to(DType::kF32);
  outputs.final_state = outputs.final_state.to(DType::kF32);
  outputs.chunk_states = outputs.chunk_states.to(DType::kBF16);
  for (const std::string& name : implementations("forward")) {
    const auto results = unless_declined(
        "forward", name, [&] { return forward_strided(problem, context_for(name), Layout::kDense, outputs); });
    if (results) expect_close(problem, *results, expected);
  }
}

TEST_P(Forward, StridedTensors) {
  for (Layout layout : kLayouts) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      DeltaRuleSpec one = with_heads(spec(69, 20, 36), 2, 2);
      one.B = 2;
      one.dtype = dtype;
      if (GetParam() != Gate::kNone) one.options.gate_in_kernel = true;
      const DeltaRuleCase problem = draw(one, 36);
      const DeltaRuleResults expected = support::forward(support::in_double(problem), reference_context(), true);
      for (const std::string& name : implementations("forward")) {
        const auto results = unless_declined("forward", name, [&] {
          return forward_strided(problem, context_for(name), layout, support::forward_outputs(problem, true));
        });
        if (results) expect_close(problem, *results, expected);
      }
    }
  }
}

// q, k and v as slices of one buffer [B, T, 2 H K + HV V].
TEST_P(Forward, PackedInputs) {
  DeltaRuleSpec one = with_heads(spec(69, 20, 36), 2, 2);
  one.B = 2;
  const DeltaRuleCase problem = draw(one, 37);
  const int64_t width_qk = one.H * one.K, width = 2 * width_qk + one.HV * one.V;
  Tensor packed(DType::kF32, {one.B, one.T, width});
  const auto place = [&](const Tensor& x, int64_t offset) {
    const int64_t row = x.size() / (one.B * one.T);
    for (int64_t i = 0; i < x.size(); ++i) packed.set(i / row * width + offset + i % row, x[i]);
    TensorView view = x.view();
    view.data = static_cast<float*>(packed.data()) + offset;
    view.strides = {one.T * width, width, view.shape[3], 1};
    return view;
  };
  DeltaRuleForward args;
  args.in = problem.inputs();
  args.options = one.options;
  args.in.q = place(problem.q, 0);
  args.in.k = place(problem.k, width_qk);
  args.in.v = place(problem.v, 2 * width_qk);
  for (const std::string& name : implementations("forward")) {
    const auto dense = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
    if (!dense) continue;
    Tensor o(DType::kF32, problem.v.shape());
    args.o = o.view();
    support::run(context_for(name), args);
    EXPECT_TRUE(support::same_bits(o, dense->o)) << name;
  }
}

// A stride of 0 repeats one element along an axis.
TEST_P(Forward, BroadcastInputs) {
  for (size_t axis = 0; axis < 3; ++axis) {
    DeltaRuleSpec one = with_heads(spec(69, 20, 36), 2, 1);
    one.B = 2;
    DeltaRuleCase problem = draw(one, 38);
    DeltaRuleForward args;
    args.options = one.options;
    const auto broadcast = [&](Tensor& x) {
      if (!x.present()) return TensorView{};
      const TensorView view = x.view();
      TensorView result = view;
      result.strides[axis] = 0;
      for (int64_t i = 0; i < x.size(); ++i) {
        const int64_t position = i / view.strides[axis] % view.shape[axis];
        x.set(i, x[i - position * view.strides[axis]]);
      }
      return result;
    };
    args.in.q = broadcast(problem.q);
    args.in.k = broadcast(problem.k);
    args.in.v = broadcast(problem.v);
    args.in.g = broadcast(problem.g);
    args.in.beta = broadcast(problem.beta);
    args.in.initial_state = problem.initial_state.view();
    for (const std::string& name : implementations("forward")) {
      const auto dense = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
      if (!dense) continue;
      Tensor o(DType::kF32, problem.v.shape());
      args.o = o.view();
      support::run(context_for(name), args);
      EXPECT_TRUE(support::same_bits(o, dense->o)) << name << ", axis " << axis;
    }
  }
}

// The optional outputs do not change the others.
TEST_P(Forward, OptionalOutputs) {
  const DeltaRuleCase problem = draw(spec(130, 20, 36), 39);
  for (const std::string& name : implementations("forward")) {
    const auto all =
        unless_declined("forward", name, [&] { return support::forward(problem, context_for(name), true); });
    if (!all) continue;
    DeltaRuleForward args;
    args.in = problem.inputs();
    args.options = problem.spec.options;
    Tensor o(DType::kF32, problem.v.shape());
    args.o = o.view();
    support::run(context_for(name), args);
    EXPECT_TRUE(support::same_bits(o, all->o)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Forward, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
