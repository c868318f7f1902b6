// The gradients of the reference (tests/differences.h), with every option.
#include <gtest/gtest.h>

#include "tests/differences.h"
#include "tests/related/grid.h"

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

class Gradient : public ::testing::TestWithParam<RelatedOp> {};

TEST_P(Gradient, MatchesCentralDifferences) {
  for (const RelatedSpec& spec : specs(GetParam())) expect_gradients_match_differences(support::draw(spec, 11));
}

TEST_P(Gradient, AbsentGradientsAreZero) {
  for (const RelatedSpec& spec : specs(GetParam())) expect_absent_gradients_are_zero(support::draw(spec, 12));
}

// From saved states the same gradients come out.
TEST_P(Gradient, FromSavedStates) {
  for (const RelatedSpec& spec : specs(GetParam())) {
    const RelatedCase problem = support::draw(spec, 12);
    const Tensor saved = support::forward(problem, reference_context(), true).chunk_states;
    expect_same_bits(support::backward(problem, reference_context(), saved),
                     support::backward(problem, reference_context()), describe(spec));
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Gradient, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
