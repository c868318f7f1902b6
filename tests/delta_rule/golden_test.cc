#include <gtest/gtest.h>

#include "tests/golden_answers.h"

namespace fastweight::test {
namespace {

const std::vector<support::GoldenCase>& golden_cases() {
  static const auto cases = support::load_delta_rule_golden(golden_folder(FASTWEIGHT_GOLDEN_DIR));
  return cases;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  const support::GoldenCase& golden() const { return golden_named(golden_cases(), GetParam()); }
};

TEST_P(Golden, ReferenceInDouble) { expect_exact_answers(golden()); }
TEST_P(Golden, Forward) { expect_answers(Mode::kForward, golden()); }
TEST_P(Golden, Backward) { expect_answers(Mode::kBackward, golden()); }
TEST_P(Golden, Step) { expect_answers(Mode::kStep, golden()); }
TEST_P(Golden, ForwardIn16Bits) { expect_close_in_16_bits(Mode::kForward, golden()); }
TEST_P(Golden, BackwardIn16Bits) { expect_close_in_16_bits(Mode::kBackward, golden()); }

INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::ValuesIn(names_in(golden_cases())),
                         [](const auto& instance) { return instance.param; });

TEST(GoldenFiles, AllArePresent) { EXPECT_EQ(golden_cases().size(), 21u); }

}  // namespace
}  // namespace fastweight::test
