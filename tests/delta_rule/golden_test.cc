// Answers that were computed elsewhere, in double: see tests/golden.
#include "support/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/delta_rule/cases.h"

namespace fastweight::test {
namespace {

using support::GoldenCase;

constexpr double kExact = 1e-10;

const std::vector<GoldenCase>& golden_cases() {
  static const std::vector<GoldenCase> cases = support::load_delta_rule_golden(golden_folder(FASTWEIGHT_GOLDEN_DIR));
  return cases;
}

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const GoldenCase& golden : golden_cases()) names.push_back(golden.problem.spec.name);
  return names;
}

double largest(const Tensor& x) {
  double result = 0;
  for (double value : x.values()) result = std::max(result, std::fabs(value));
  return result;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  const GoldenCase& golden() const {
    return *std::find_if(golden_cases().begin(), golden_cases().end(),
                         [](const GoldenCase& one) { return one.problem.spec.name == GetParam(); });
  }

  // The files hold only the results, not how hard the gates were drawn.
  double fp32_tolerance() const {
    return GetParam() == "kda_hard_gates" || GetParam() == "kda_strong_gates" ? 5e-4 : 1e-5;
  }

  // Forward and backward results together, compared with every answer in the file.
  void expect_answers(const std::string& name, const DeltaRuleResults& results, double bound) const {
    int compared = 0;
    for (const auto& [tensor, expected] : golden().expected.named()) {
      for (const auto& [result_tensor, result] : results.named()) {
        if (result_tensor != tensor) continue;
        const support::Difference difference = support::compare(*result, *expected);
        const double terms = rms_of_gate_terms(golden().problem, golden().expected, tensor);
        const double scale = bound == kExact ? 1 : std::max(1.0, terms / (rms(*expected) + 1e-8));
        EXPECT_LT(difference.relative_rms, bound * scale) << name << " " << tensor;
        EXPECT_LT(difference.max_abs, 10 * bound * scale * std::max(1.0, largest(*expected))) << name << " " << tensor;
        ++compared;
      }
    }
    EXPECT_GT(compared, 0) << name;
  }
};

TEST_P(Golden, ReferenceInDouble) {
  const DeltaRuleCase problem = support::in_double(golden().problem);
  DeltaRuleResults results = support::backward(problem, reference_context());
  const DeltaRuleResults forward = support::forward(problem, reference_context());
  results.o = forward.o;
  results.final_state = forward.final_state;
  ASSERT_EQ(results.named().size(), golden().expected.named().size());
  expect_answers("reference", results, kExact);
}

TEST_P(Golden, Forward) {
  const DeltaRuleCase& problem = golden().problem;
  for (const std::string& name : implementations("forward")) {
    const auto results = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
    if (results) expect_answers(name, *results, fp32_tolerance());
  }
}

// On inputs rounded to 16 bits, against the reference on the same.
TEST_P(Golden, ForwardIn16Bits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    DeltaRuleCase problem = golden().problem;
    problem.spec.dtype = dtype;
    for (Tensor* x : {&problem.q, &problem.k, &problem.v}) *x = x->to(dtype);
    const DeltaRuleResults expected = support::forward(problem, reference_context());
    for (const std::string& name : implementations("forward")) {
      const auto results =
          unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

TEST_P(Golden, Backward) {
  const DeltaRuleCase& problem = golden().problem;
  for (const std::string& name : implementations("backward")) {
    const auto results =
        unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (results) expect_answers(name, *results, fp32_tolerance());
  }
}

TEST_P(Golden, Step) {
  const DeltaRuleCase& problem = golden().problem;
  for (const std::string& name : implementations("step")) {
    const auto results = unless_declined("step", name, [&] { return support::step(problem, context_for(name)); });
    if (results) expect_answers(name, *results, fp32_tolerance());
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::ValuesIn(golden_names()),
                         [](const auto& instance) { return instance.param; });

TEST(GoldenFiles, AllArePresent) { EXPECT_EQ(golden_cases().size(), 21u); }

}  // namespace
}  // namespace fastweight::test
