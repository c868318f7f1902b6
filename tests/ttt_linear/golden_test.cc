// Answers that were computed elsewhere, in double: see tests/golden.
#include "support/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/ttt_linear/cases.h"

namespace fastweight::test {
namespace {

using support::TttLinearGoldenCase;

constexpr double kExact = 1e-10;
constexpr double kFp32 = 1e-5;

const std::vector<TttLinearGoldenCase>& golden_cases() {
  static const std::vector<TttLinearGoldenCase> cases =
      support::load_ttt_linear_golden(golden_folder(FASTWEIGHT_GOLDEN_DIR));
  return cases;
}

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const TttLinearGoldenCase& golden : golden_cases()) names.push_back(golden.problem.spec.name);
  return names;
}

double largest(const Tensor& x) {
  double result = 0;
  for (double value : x.values()) result = std::max(result, std::fabs(value));
  return result;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  const TttLinearGoldenCase& golden() const {
    return *std::find_if(golden_cases().begin(), golden_cases().end(),
                         [](const TttLinearGoldenCase& one) { return one.problem.spec.name == GetParam(); });
  }

  // Every result that has an answer in the file.
  void expect_answers(const std::string& name, const TttLinearResults& results, double bound) const {
    int compared = 0;
    for (const auto& [tensor, expected] : golden().expected.named()) {
      for (const auto& [result_tensor, result] : results.named()) {
        if (result_tensor != tensor) continue;
        const support::Difference difference = support::compare(*result, *expected);
        EXPECT_LT(difference.relative_rms, bound) << name << " " << tensor;
        EXPECT_LT(difference.max_abs, 10 * bound * std::max(1.0, largest(*expected))) << name << " " << tensor;
        ++compared;
      }
    }
    EXPECT_GT(compared, 0) << name;
  }
};

TEST_P(Golden, ReferenceInDouble) {
  const TttLinearCase problem = support::in_double(golden().problem);
  TttLinearResults results = support::backward(problem, reference_context());
  const TttLinearResults forward = support::forward(problem, reference_context());
  results.o = forward.o;
  results.final_state = forward.final_state;
  results.final_state_bias = forward.final_state_bias;
  ASSERT_EQ(results.named().size(), golden().expected.named().size());
  expect_answers("reference", results, kExact);
}

TEST_P(Golden, Forward) {
  const TttLinearCase& problem = golden().problem;
  for (const std::string& name : implementations("forward")) {
    const auto results = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
    if (results) expect_answers(name, *results, kFp32);
  }
}

// On inputs rounded to 16 bits, against the reference on the same.
TEST_P(Golden, ForwardIn16Bits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    TttLinearCase problem = golden().problem;
    problem.spec.dtype = dtype;
    for (Tensor* x : {&problem.q, &problem.k, &problem.v}) *x = x->to(dtype);
    const TttLinearResults expected = support::forward(support::in_double(problem), reference_context());
    for (const std::string& name : implementations("forward")) {
      const auto results =
          unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

TEST_P(Golden, Backward) {
  const TttLinearCase& problem = golden().problem;
  for (const std::string& name : implementations("backward")) {
    const auto results =
        unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (results) expect_answers(name, *results, kFp32);
  }
}

// A step extends no mini-batch: its state is the answer's only where every sequence ends with a full one.
TEST_P(Golden, Step) {
  const TttLinearCase& problem = golden().problem;
  for (const std::string& name : implementations("step")) {
    auto results = unless_declined("step", name, [&] { return support::step(problem, context_for(name)); });
    if (!results) continue;
    const std::vector<double> positions = results->position.values();
    if (std::count(positions.begin(), positions.end(), 0) != static_cast<int64_t>(positions.size())) {
      results->final_state = results->final_state_bias = {};
    }
    expect_answers(name, *results, kFp32);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::ValuesIn(golden_names()),
                         [](const auto& instance) { return instance.param; });

TEST(GoldenFiles, AllArePresent) { EXPECT_EQ(golden_cases().size(), 5u); }

}  // namespace
}  // namespace fastweight::test
