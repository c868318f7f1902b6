// Every backward implementation against the reference in double.
#include <gtest/gtest.h>

#include "tests/ttt_linear/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

TEST(Backward, Lengths) {
  for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 31, 33, 63, 64, 130, 191, 320}, 4)) {
    for (int32_t mini_batch : {16, 32, 64}) {
      TttLinearSpec spec = spec_of(T, 24, 2);
      spec.options.mini_batch = mini_batch;
      spec.B = 2;
      check_backward(draw(spec, 41));
    }
  }
}

// Below about 8 entries the layer norm's derivative is a difference of nearly equal numbers.
TEST(Backward, HeadWidths) {
  for (int64_t D : first<int64_t>({60, 16, 128, 33, 64, 100, 17, 20, 31, 48, 96, 127, 12}, 4)) {
    check_backward(draw(spec_of(70, D), 42));
  }
}

TEST(Backward, LongSequence) { check_backward(draw(spec_of(reduced() ? 200 : 1024, 64), 43)); }

TEST(Backward, VariableLengths) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5, 0, 64, 1, 33}, {0, 0}, {0, 130, 0}, {1, 1, 1, 1}, {64, 128, 65}, {200, 3}, {16, 32, 48}}) {
    for (int32_t mini_batch : first<int32_t>({16, 64}, 1)) {
      TttLinearSpec spec = with_lengths(spec_of(0, 20, 2), lengths);
      spec.options.mini_batch = mini_batch;
      check_backward(draw(spec, 44));
    }
  }
}

TEST(Backward, States) {
  for (bool state : {false, true}) {
    for (bool bias : {false, true}) {
      TttLinearSpec spec = spec_of(69, 20, 2);
      spec.initial_state = state;
      spec.initial_state_bias = bias;
      check_backward(draw(spec, 45));
    }
  }
}

TEST(Backward, ScaleAndEps) {
  for (double scale : {0.01, 1.0, 3.0}) {
    for (double eps : {1e-6, 1e-2}) {
      TttLinearSpec spec = spec_of(69, 36);
      spec.options.scale = scale;
      spec.options.eps = eps;
      check_backward(draw(spec, 46));
    }
  }
}

TEST(Backward, StepSizes) {
  for (double factor : {0.0, 0.1, -1.0, 10.0}) {
    TttLinearCase problem = draw(spec_of(69, 36), 47);
    for (int64_t i = 0; i < problem.eta.size(); ++i) problem.eta.set(i, factor * problem.eta[i]);
    check_backward(problem);
  }
}

TEST(Backward, SixteenBitTypes) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType parameter_dtype : {DType::kF32, dtype}) {
      for (int64_t T : first<int64_t>({63, 300}, 1)) {
        TttLinearSpec spec = spec_of(T, 60, 2);
        spec.dtype = dtype;
        spec.parameter_dtype = parameter_dtype;
        check_backward(draw(spec, 48));
        check_backward(draw(with_lengths(spec, {5, 0, 64, 1, 33}), 48));
      }
    }
  }
}

TEST(Backward, MixedTypes) {
  for (DType parameter_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    TttLinearSpec spec = spec_of(70, 20);
    spec.parameter_dtype = parameter_dtype;
    check_backward(draw(spec, 49));
  }
  for (DType state_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    TttLinearCase problem = draw(spec_of(70, 20), 49);
    for (Tensor* x :
         {&problem.initial_state, &problem.initial_state_bias, &problem.d_final_state, &problem.d_final_state_bias}) {
      *x = x->to(state_dtype);
    }
    check_backward(problem);
  }
}

// Gradients in fp32 for 16-bit inputs.
TEST(Backward, WideGradients) {
  TttLinearSpec spec = spec_of(70, 20);
  spec.dtype = spec.parameter_dtype = DType::kBF16;
  const TttLinearCase problem = draw(spec, 50);
  const TttLinearResults expected = support::backward(support::in_double(problem), reference_context());
  TttLinearResults outputs = support::backward_outputs(problem);
  for (Tensor* x : {&outputs.dq, &outputs.dk, &outputs.dv, &outputs.dw, &outputs.db, &outputs.deta})
    *x = x->to(DType::kF32);
  for (const std::string& name : implementations("backward")) {
    const auto results = unless_declined(
        "backward", name, [&] { return backward_strided(problem, context_for(name), Layout::kDense, outputs); });
    if (results) expect_close(problem, *results, expected);
  }
}

TEST(Backward, StridedTensors) {
  for (Layout layout : kLayouts) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      TttLinearSpec spec = spec_of(69, 20, 2);
      spec.B = 2;
      spec.dtype = dtype;
      const TttLinearCase problem = draw(spec, 51);
      const TttLinearResults expected = support::backward(support::in_double(problem), reference_context());
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
TEST(Backward, EachGradientAlone) {
  TttLinearSpec spec = spec_of(69, 20, 2);
  spec.B = 2;
  const TttLinearCase problem = draw(spec, 52);
  const struct {
    const char* name;
    Tensor TttLinearResults::*result;
    TensorView TttLinearBackward::*argument;
  } gradients[] = {
      {"dq", &TttLinearResults::dq, &TttLinearBackward::dq},
      {"dk", &TttLinearResults::dk, &TttLinearBackward::dk},
      {"dv", &TttLinearResults::dv, &TttLinearBackward::dv},
      {"dw", &TttLinearResults::dw, &TttLinearBackward::dw},
      {"db", &TttLinearResults::db, &TttLinearBackward::db},
      {"deta", &TttLinearResults::deta, &TttLinearBackward::deta},
      {"d_initial_state", &TttLinearResults::d_initial_state, &TttLinearBackward::d_initial_state},
      {"d_initial_state_bias", &TttLinearResults::d_initial_state_bias, &TttLinearBackward::d_initial_state_bias},
  };
  for (const std::string& name : implementations("backward")) {
    const auto all = unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (!all) continue;
    for (const auto& [gradient, result, argument] : gradients) {
      const Tensor& expected = (*all).*result;
      Tensor alone(expected.dtype(), expected.shape());
      TttLinearBackward args = support::backward_args(problem, {});
      args.*argument = alone.view();
      support::run(context_for(name), args);
      EXPECT_TRUE(support::same_bits(alone, expected)) << name << " " << gradient;
    }
  }
}

TEST(Backward, AbsentOutputGradients) {
  for (int variant = 0; variant < 8; ++variant) {
    TttLinearCase problem = draw(spec_of(70, 20), 53);
    if (variant & 1) problem.d_o = {};
    if (variant & 2) problem.d_final_state = {};
    if (variant & 4) problem.d_final_state_bias = {};
    check_backward(problem);
  }
}

}  // namespace
}  // namespace fastweight::test
