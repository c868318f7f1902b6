// The reference's gradients against central differences of its forward, in double, for every element of every input.
#include <gtest/gtest.h>

#include "tests/related/cases.h"

namespace fastweight::test {
namespace {

// Crosses a chunk boundary.
std::vector<RelatedSpec> specs(RelatedOp op) {
  RelatedSpec plain = spec_of(op, 19, 3, 4, 2);
  plain.dtype = plain.gate_dtype = DType::kF64;
  plain.chunk_size = 16;
  std::vector<RelatedSpec> list = variants(plain);
  list.push_back(with_lengths(plain, {1, 0, 18, 3}));
  return list;
}

double weighted_sum(const Tensor& x, const Tensor& weights) {
  double sum = 0;
  for (int64_t i = 0; i < x.size(); ++i) sum += x[i] * weights[i];
  return sum;
}

double loss(const RelatedCase& problem) {
  const RelatedResults results = support::forward(problem, reference_context());
  return weighted_sum(results.o, problem.d_o) + weighted_sum(results.final_state, problem.d_final_state);
}

Tensor central_differences(const RelatedCase& problem, Tensor RelatedCase::*input) {
  constexpr double kStep = 1e-5;
  RelatedCase shifted = problem;
  Tensor gradient((problem.*input).dtype(), (problem.*input).shape());
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

class Gradient : public ::testing::TestWithParam<RelatedOp> {};

TEST_P(Gradient, MatchesCentralDifferences) {
  for (const RelatedSpec& spec : specs(GetParam())) {
    const RelatedCase problem = support::draw(spec, 11);
    const RelatedResults results = support::backward(problem, reference_context());
    const struct {
      const char* name;
      Tensor RelatedCase::*input;
      Tensor RelatedResults::*gradient;
    } pairs[] = {
        {"dq", &RelatedCase::q, &RelatedResults::dq},
        {"dk", &RelatedCase::k, &RelatedResults::dk},
        {"dv", &RelatedCase::v, &RelatedResults::dv},
        {"dp", &RelatedCase::p, &RelatedResults::dp},
        {"da", &RelatedCase::a, &RelatedResults::da},
        {"db", &RelatedCase::b, &RelatedResults::db},
        {"dg", &RelatedCase::g, &RelatedResults::dg},
        {"dbeta", &RelatedCase::beta, &RelatedResults::dbeta},
        {"dS", &RelatedCase::initial_state, &RelatedResults::d_initial_state},
    };
    for (const auto& [name, input, gradient] : pairs) {
      ASSERT_EQ((problem.*input).present(), (results.*gradient).present()) << name;
      if (!(problem.*input).present()) continue;
      const support::Difference difference = support::compare(results.*gradient, central_differences(problem, input));
      EXPECT_LT(difference.relative_rms, 1e-8)
          << name << ", largest " << difference.max_abs << "\n  " << describe(spec);
    }
  }
}

// An absent gradient counts as 0, and from saved states the same gradients come out.
TEST_P(Gradient, AbsentGradientsAndSavedStates) {
  for (const RelatedSpec& spec : specs(GetParam())) {
    const RelatedCase problem = support::draw(spec, 12);
    const RelatedResults both = support::backward(problem, reference_context());
    RelatedCase only_o = problem, only_final = problem;
    only_o.d_final_state = only_final.d_o = {};
    const RelatedResults first = support::backward(only_o, reference_context());
    const RelatedResults second = support::backward(only_final, reference_context());
    for (size_t i = 0; i < both.all().size(); ++i) {
      const Tensor& sum = *both.all()[i];
      for (int64_t j = 0; j < sum.size() && sum.present(); ++j) {
        ASSERT_NEAR(sum[j], (*first.all()[i])[j] + (*second.all()[i])[j], 1e-11) << both.kNames[i] << " " << j;
      }
    }
    const Tensor saved = support::forward(problem, reference_context(), true).chunk_states;
    expect_same_bits(support::backward(problem, reference_context(), saved), both, describe(spec));
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Gradient, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
