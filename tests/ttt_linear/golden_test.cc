#include <gtest/gtest.h>

#include "tests/golden_answers.h"

namespace fastweight::test {
namespace {

const std::vector<support::TttLinearGoldenCase>& golden_cases() {
  static const auto cases = support::load_ttt_linear_golden(golden_folder(FASTWEIGHT_GOLDEN_DIR));
  return cases;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  const support::TttLinearGoldenCase& golden() const { return golden_named(golden_cases(), GetParam()); }
};

TEST_P(Golden, ReferenceInDouble) { expect_exact_answers(golden()); }
TEST_P(Golden, Forward) { expect_answers(Mode::kForward, golden()); }
TEST_P(Golden, Backward) { expect_answers(Mode::kBackward, golden()); }
TEST_P(Golden, Step) { expect_answers(Mode::kStep, golden()); }
TEST_P(Golden, ForwardIn16Bits) { expect_close_in_16_bits(golden()); }

// On inputs rounded to 16 bits, against the reference on the same.
TEST_P(Golden, BackwardIn16Bits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    support::TttLinearCase problem = golden().problem;
    problem.spec.dtype = dtype;
    for (Tensor* x : {&problem.q, &problem.k, &problem.v, &problem.d_o}) *x = x->to(dtype);
    const auto expected = support::backward(support::in_double(problem), reference_context());
    for (const std::string& name : implementations(problem.spec, Mode::kBackward)) {
      const auto results =
          unless_declined(Mode::kBackward, name, [&] { return support::backward(problem, context_for(name)); });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::ValuesIn(names_in(golden_cases())),
                         [](const auto& instance) { return instance.param; });

TEST(GoldenFiles, AllArePresent) { EXPECT_EQ(golden_cases().size(), 5u); }

}  // namespace
}  // namespace fastweight::test
