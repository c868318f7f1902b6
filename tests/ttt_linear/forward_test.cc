// Every forward implementation against the reference in double.
#include <gtest/gtest.h>

#include "tests/ttt_linear/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

TEST(Forward, Lengths) {
  for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 31, 33, 63, 64, 130, 191, 320}, 4)) {
    for (int32_t mini_batch : {16, 32, 64}) {
      TttLinearSpec spec = spec_of(T, 24, 2);
      spec.options.mini_batch = mini_batch;
      spec.B = 2;
      check_forward(draw(spec, 21));
    }
  }
}

TEST(Forward, HeadWidths) {
  for (int64_t D : first<int64_t>({60, 16, 128, 33, 64, 100, 17, 20, 31, 48, 96, 127, 8, 5, 1}, 4)) {
    check_forward(draw(spec_of(70, D), 22));
  }
}

TEST(Forward, LongSequence) { check_forward(draw(spec_of(reduced() ? 200 : 1024, 64), 23)); }

TEST(Forward, VariableLengths) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5, 0, 64, 1, 33}, {0, 0}, {0, 130, 0}, {1, 1, 1, 1}, {64, 128, 65}, {200, 3}, {16, 32, 48}}) {
    for (int32_t mini_batch : first<int32_t>({16, 64}, 1)) {
      TttLinearSpec spec = with_lengths(spec_of(0, 20, 2), lengths);
      spec.options.mini_batch = mini_batch;
      check_forward(draw(spec, 24));
    }
  }
}

TEST(Forward, States) {
  for (bool state : {false, true}) {
    for (bool bias : {false, true}) {
      TttLinearSpec spec = spec_of(69, 20, 2);
      spec.initial_state = state;
      spec.initial_state_bias = bias;
      check_forward(draw(spec, 25));
    }
  }
}

TEST(Forward, ScaleAndEps) {
  for (double scale : {0.01, 1.0, 3.0}) {
    for (double eps : {1e-6, 1e-2}) {
      TttLinearSpec spec = spec_of(69, 36);
      spec.options.scale = scale;
      spec.options.eps = eps;
      check_forward(draw(spec, 26));
    }
  }
}

TEST(Forward, StepSizes) {
  for (double factor : {0.0, 0.1, -1.0, 10.0}) {
    TttLinearCase problem = draw(spec_of(69, 36), 27);
    for (int64_t i = 0; i < problem.eta.size(); ++i) problem.eta.set(i, factor * problem.eta[i]);
    check_forward(problem);
  }
}

TEST(Forward, SixteenBitTypes) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType parameter_dtype : {DType::kF32, dtype}) {
      for (int32_t mini_batch : {16, 64}) {
        for (int64_t T : first<int64_t>({63, 300}, 1)) {
          TttLinearSpec spec = spec_of(T, 60, 2);
          spec.dtype = dtype;
          spec.parameter_dtype = parameter_dtype;
          spec.options.mini_batch = mini_batch;
          check_forward(draw(spec, 28));
          check_forward(draw(with_lengths(spec, {5, 0, 64, 1, 33}), 28));
        }
      }
    }
  }
}

TEST(Forward, MixedTypes) {
  for (DType parameter_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    TttLinearSpec spec = spec_of(70, 20);
    spec.parameter_dtype = parameter_dtype;
    check_forward(draw(spec, 29));
  }
  for (DType state_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    TttLinearCase problem = draw(spec_of(70, 20), 29);
    problem.initial_state = problem.initial_state.to(state_dtype);
    problem.initial_state_bias = problem.initial_state_bias.to(state_dtype);
    check_forward(problem);
  }
}

// o in fp32 for 16-bit inputs.
TEST(Forward, WideOutput) {
  TttLinearSpec spec = spec_of(70, 20);
  spec.dtype = DType::kBF16;
  const TttLinearCase problem = draw(spec, 30);
  const TttLinearResults expected = support::forward(support::in_double(problem), reference_context());
  TttLinearResults outputs = support::forward_outputs(problem);
  outputs.o = outputs.o.to(DType::kF32);
  for (const std::string& name : implementations("forward")) {
    const auto results = unless_declined(
        "forward", name, [&] { return forward_strided(problem, context_for(name), Layout::kDense, outputs); });
    if (results) expect_close(problem, *results, expected);
  }
}

// eta as [B, T, H] and the biases as [N, H, D] give the same bits.
TEST(Forward, ShapesWithoutUnitAxes) {
  TttLinearSpec spec = spec_of(69, 20, 3);
  spec.B = 2;
  const TttLinearCase problem = draw(spec, 31);
  TttLinearForward args;
  args.in = problem.inputs();
  args.in.eta.rank = 3;
  TensorView& bias = args.in.initial_state_bias;
  bias = TensorView::dense(bias.data, bias.dtype, {spec.B, spec.H, spec.D});
  for (const std::string& name : implementations("forward")) {
    const auto expected =
        unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
    if (!expected) continue;
    Tensor o(DType::kF32, problem.v.shape()), final_bias(DType::kF32, {spec.B, spec.H, spec.D});
    args.o = o.view();
    args.final_state_bias = final_bias.view();
    support::run(context_for(name), args);
    EXPECT_TRUE(support::same_bits(o, expected->o)) << name;
    EXPECT_EQ(final_bias.values(), expected->final_state_bias.values()) << name;
  }
}

TEST(Forward, StridedTensors) {
  for (Layout layout : kLayouts) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      TttLinearSpec spec = spec_of(69, 20, 2);
      spec.B = 2;
      spec.dtype = dtype;
      const TttLinearCase problem = draw(spec, 32);
      const TttLinearResults expected = support::forward(support::in_double(problem), reference_context());
      for (const std::string& name : implementations("forward")) {
        const auto results = unless_declined("forward", name, [&] {
          return forward_strided(problem, context_for(name), layout, support::forward_outputs(problem));
        });
        if (results) expect_close(problem, *results, expected);
      }
    }
  }
}

// A stride of 0 repeats one element along an axis; with all of them 0, eta is one number.
TEST(Forward, BroadcastInputs) {
  TttLinearSpec spec = spec_of(69, 20, 2);
  spec.B = 2;
  TttLinearCase problem = draw(spec, 33);
  problem.eta.fill(0.004);
  TttLinearForward args;
  args.in = problem.inputs();
  args.in.eta.strides = {};
  for (size_t axis = 0; axis < 3; ++axis) {
    const TensorView view = problem.k.view();
    args.in.k = view;
    args.in.k.strides[axis] = 0;
    TttLinearCase repeated = problem;
    for (int64_t i = 0; i < repeated.k.size(); ++i) {
      const int64_t position = i / view.strides[axis] % view.shape[axis];
      repeated.k.set(i, problem.k[i - position * view.strides[axis]]);
    }
    for (const std::string& name : implementations("forward")) {
      const auto dense =
          unless_declined("forward", name, [&] { return support::forward(repeated, context_for(name)); });
      if (!dense) continue;
      Tensor o(DType::kF32, problem.v.shape());
      args.o = o.view();
      support::run(context_for(name), args);
      EXPECT_TRUE(support::same_bits(o, dense->o)) << name << ", axis " << axis;
    }
  }
}

// The optional outputs do not change the others.
TEST(Forward, OptionalOutputs) {
  const TttLinearCase problem = draw(spec_of(69, 20), 34);
  for (const std::string& name : implementations("forward")) {
    const auto all = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
    if (!all) continue;
    TttLinearForward args;
    args.in = problem.inputs();
    Tensor o(DType::kF32, problem.v.shape());
    args.o = o.view();
    support::run(context_for(name), args);
    EXPECT_TRUE(support::same_bits(o, all->o)) << name;
  }
}

}  // namespace
}  // namespace fastweight::test
