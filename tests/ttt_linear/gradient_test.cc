// The reference's gradients against central differences of its forward, in double, for every element of every input.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/ttt_linear/cases.h"

namespace fastweight::test {
namespace {

std::vector<TttLinearSpec> specs() {
  std::vector<TttLinearSpec> list;
  const auto add = [&](const std::string& name, TttLinearSpec spec) {
    spec.name = name;
    spec.dtype = spec.parameter_dtype = DType::kF64;
    list.push_back(spec);
  };
  // One whole and one partial mini-batch.
  TttLinearSpec plain = spec_of(19, 5, 2);
  plain.B = 2;
  add("plain", plain);
  TttLinearSpec spec = plain;
  spec.options.scale = 0.7;
  spec.options.eps = 1e-2;
  add("scale_and_eps", spec);
  add("whole", spec_of(32, 4));
  add("one_token", spec_of(1, 6, 2));
  spec = spec_of(40, 4);
  spec.options.mini_batch = 32;
  add("mini_batch_32", spec);
  spec = spec_of(70, 3);
  spec.options.mini_batch = 64;
  add("mini_batch_64", spec);
  spec = plain;
  spec.initial_state = false;
  add("no_state", spec);
  spec = plain;
  spec.initial_state_bias = false;
  add("no_bias", spec);
  add("varlen", with_lengths(plain, {1, 0, 18, 3, 16}));
  return list;
}

double product(const Tensor& x, const Tensor& dx) {
  double sum = 0;
  for (int64_t i = 0; i < x.size(); ++i) sum += x[i] * dx[i];
  return sum;
}

double loss(const TttLinearCase& problem) {
  const TttLinearResults results = support::forward(problem, context_for("reference", 1));
  return product(results.o, problem.d_o) + product(results.final_state, problem.d_final_state) +
         product(results.final_state_bias, problem.d_final_state_bias);
}

// Of fourth order: the layer norm bends too much for two points.
Tensor central_differences(const TttLinearCase& problem, Tensor TttLinearCase::*input) {
  constexpr double kStep = 1e-3;
  Tensor gradient(DType::kF64, (problem.*input).shape());
  TttLinearCase shifted = problem;
  // eta is about 0.005, and its derivatives grow with the sums over the mini-batch.
  const double step = input == &TttLinearCase::eta ? 1e-2 * kStep : kStep;
  for (int64_t i = 0; i < gradient.size(); ++i) {
    const double x = (problem.*input)[i];
    const auto difference = [&](double h) {
      (shifted.*input).set(i, x + h);
      const double above = loss(shifted);
      (shifted.*input).set(i, x - h);
      return (above - loss(shifted)) / (2 * h);
    };
    gradient.set(i, (4 * difference(step / 2) - difference(step)) / 3);
    (shifted.*input).set(i, x);
  }
  return gradient;
}

class Gradient : public ::testing::TestWithParam<TttLinearSpec> {};

TEST_P(Gradient, MatchesCentralDifferences) {
  const TttLinearCase problem = support::draw(GetParam(), 11);
  const TttLinearResults results = support::backward(problem, reference_context());
  const struct {
    const char* name;
    Tensor TttLinearCase::*input;
    Tensor TttLinearResults::*gradient;
  } pairs[] = {
      {"dq", &TttLinearCase::q, &TttLinearResults::dq},
      {"dk", &TttLinearCase::k, &TttLinearResults::dk},
      {"dv", &TttLinearCase::v, &TttLinearResults::dv},
      {"dw", &TttLinearCase::w, &TttLinearResults::dw},
      {"db", &TttLinearCase::b, &TttLinearResults::db},
      {"deta", &TttLinearCase::eta, &TttLinearResults::deta},
      {"d_initial_state", &TttLinearCase::initial_state, &TttLinearResults::d_initial_state},
      {"d_initial_state_bias", &TttLinearCase::initial_state_bias, &TttLinearResults::d_initial_state_bias},
  };
  for (const auto& [name, input, gradient] : pairs) {
    ASSERT_EQ((problem.*input).present(), (results.*gradient).present()) << name;
    if (!(problem.*input).present()) continue;
    const support::Difference difference = support::compare(results.*gradient, central_differences(problem, input));
    EXPECT_LT(difference.relative_rms, 1e-7) << name << ", largest " << difference.max_abs;
  }
}

// The gradients of the parts add up; an absent gradient counts as 0.
TEST_P(Gradient, AbsentGradientsAreZero) {
  const TttLinearCase all = support::draw(GetParam(), 12);
  TttLinearCase only_o = all, only_state = all, only_bias = all, none = all;
  only_o.d_final_state = only_o.d_final_state_bias = {};
  only_state.d_o = only_state.d_final_state_bias = {};
  only_bias.d_o = only_bias.d_final_state = {};
  none.d_o = none.d_final_state = none.d_final_state_bias = {};
  const TttLinearResults whole = support::backward(all, reference_context());
  const TttLinearResults o = support::backward(only_o, reference_context());
  const TttLinearResults state = support::backward(only_state, reference_context());
  const TttLinearResults bias = support::backward(only_bias, reference_context());
  const TttLinearResults zero = support::backward(none, reference_context());
  const auto sums = whole.named(), of_o = o.named(), of_state = state.named(), of_bias = bias.named();
  const auto zeros = zero.named();
  for (size_t i = 0; i < sums.size(); ++i) {
    const auto& [name, sum] = sums[i];
    for (int64_t j = 0; j < sum->size(); ++j) {
      const double parts = (*of_o[i].second)[j] + (*of_state[i].second)[j] + (*of_bias[i].second)[j];
      ASSERT_NEAR((*sum)[j], parts, 1e-11 * (1 + rms(*sum))) << name << " " << j;
      ASSERT_EQ((*zeros[i].second)[j], 0) << name << " " << j;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, Gradient, ::testing::ValuesIn(specs()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fastweight::test
