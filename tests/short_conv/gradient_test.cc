// The reference's gradients against central differences of its forward, in double, for every element of every input.
#include <gtest/gtest.h>

#include "tests/short_conv/cases.h"

namespace fastweight::test {
namespace {

double product(const Tensor& x, const Tensor& dx) {
  double sum = 0;
  for (int64_t i = 0; i < x.size(); ++i) sum += x[i] * dx[i];
  return sum;
}

double loss(const ShortConvCase& problem) {
  const ShortConvResults results = support::forward(problem, context_for("reference", 1));
  return product(results.y, problem.dy) + product(results.final_state, problem.d_final_state);
}

Tensor central_differences(const ShortConvCase& problem, Tensor ShortConvCase::*input) {
  constexpr double kStep = 1e-5;
  Tensor gradient(DType::kF64, (problem.*input).shape());
  ShortConvCase shifted = problem;
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

void check_gradients(ShortConvSpec spec) {
  spec.dtype = spec.parameter_dtype = DType::kF64;
  SCOPED_TRACE(describe(spec));
  const ShortConvCase problem = support::draw(spec, 11);
  const ShortConvResults results = support::backward(problem, reference_context());
  const struct {
    const char* name;
    Tensor ShortConvCase::*input;
    Tensor ShortConvResults::*gradient;
  } pairs[] = {
      {"dx", &ShortConvCase::x, &ShortConvResults::dx},
      {"dw", &ShortConvCase::w, &ShortConvResults::dw},
      {"dbias", &ShortConvCase::bias, &ShortConvResults::dbias},
      {"d_initial_state", &ShortConvCase::initial_state, &ShortConvResults::d_initial_state},
  };
  for (const auto& [name, input, gradient] : pairs) {
    ASSERT_EQ((problem.*input).present(), (results.*gradient).present()) << name;
    if (!(problem.*input).present()) continue;
    const support::Difference difference = support::compare(results.*gradient, central_differences(problem, input));
    EXPECT_LT(difference.relative_rms, 1e-8) << name << ", largest " << difference.max_abs;
  }
}

TEST(ShortConvGradient, MatchesCentralDifferences) {
  for (Activation activation : {Activation::kNone, Activation::kSilu}) {
    for (int64_t W : {1, 3, 4}) {
      for (int64_t T : {1, 2, 11}) {
        ShortConvSpec spec = spec_of(T, 3, W, activation);
        spec.B = 2;
        check_gradients(spec);
      }
      check_gradients(with_lengths(spec_of(0, 2, W, activation), {1, 0, 7, 2}));
    }
  }
  ShortConvSpec spec = spec_of(6, 3);
  spec.bias = spec.initial_state = false;
  check_gradients(spec);
}

}  // namespace
}  // namespace fastweight::test
