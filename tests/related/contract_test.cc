// What tests/contract.h promises, for the families related to the delta rule.
#include <gtest/gtest.h>

#include "tests/contract.h"
#include "tests/related/grid.h"

namespace fastweight::test {
namespace {

using support::draw;

std::vector<RelatedSpec> specs(RelatedOp op, int64_t T) {
  const RelatedSpec plain = spec_of(op, T, 20, 36, 2);
  RelatedSpec options = spec_of(op, T, 33, 70, 1);
  options.state_v_first = options.p_absent = true;
  options.qk_l2norm = op == RelatedOp::kComba;
  options.group = op == RelatedOp::kComba ? 2 : 1;
  options.g_gamma = op == RelatedOp::kSimpleGla;
  RelatedSpec wide = spec_of(op, T, 128, 128);
  wide.dtype = DType::kBF16;
  return first<RelatedSpec>({plain, options, wide}, 2);
}

class Contract : public ::testing::TestWithParam<RelatedOp> {};

TEST_P(Contract, SameBitsForEveryThreadCount) {
  for (const RelatedSpec& spec : specs(GetParam(), reduced() ? 69 : 133)) {
    expect_same_for_every_thread_count(draw(with_batch(spec, 3), 81));
    expect_same_for_every_thread_count(draw(with_lengths(spec, {5, 0, 64, 1, 63}), 81));
  }
}

TEST_P(Contract, SameBitsAloneAndInABatch) {
  for (const RelatedSpec& spec : specs(GetParam(), 69)) {
    expect_same_alone(draw(with_batch(spec, 3), 82));
    expect_same_alone(draw(with_lengths(spec, {5, 0, 64, 1, 70}), 82));
  }
}

TEST_P(Contract, SameBitsInSlots) {
  for (const RelatedSpec& spec : specs(GetParam(), 3)) {
    expect_same_in_slots(draw(with_batch(spec, 4), 88));
    expect_same_in_slots(draw(with_lengths(spec, {2, 1, 17, 5}), 88));
  }
}

// Whatever a token holds, the tokens before it do not see it; in the backward, those after it do not see its gradient.
TEST_P(Contract, SameBitsBeforeWhatIsNotANumber) {
  using C = RelatedCase;
  constexpr int64_t kTokens = 75;
  for (const RelatedSpec& spec : specs(GetParam(), kTokens)) {
    const RelatedCase problem = draw(spec, 86);
    for (int64_t token : first<int64_t>({25, 72, 47, 16}, 1)) {
      expect_not_reached(Mode::kForward, problem, {&C::q, &C::k, &C::v, &C::p, &C::a, &C::b, &C::beta}, token, 0,
                         token);
      expect_not_reached(Mode::kStep, problem, {&C::q, &C::k, &C::v, &C::p, &C::a, &C::b, &C::beta}, token, 0, token);
      expect_not_reached(Mode::kBackward, problem, {&C::v}, token, 0, token);
      expect_not_reached(Mode::kBackward, problem, {&C::d_o, &C::q}, token, token + 1, kTokens);
    }
  }
}

TEST_P(Contract, SameBitsWhenCut) {
  size_t turn = 0;
  for (const Cut& cut : cuts()) {
    const std::vector<RelatedSpec> all = specs(GetParam(), cut.tokens);
    RelatedSpec spec = all[turn++ % all.size()];
    spec.chunk_size = cut.chunk_size;
    expect_same_when_cut(draw(spec, 83), cut.at);
  }
}

TEST_P(Contract, SameBitsFromChunkStates) {
  for (const RelatedSpec& spec : specs(GetParam(), 200)) expect_same_from_chunk_states(draw(spec, 84), spec.chunk_size);
}

INSTANTIATE_TEST_SUITE_P(Operators, Contract, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
