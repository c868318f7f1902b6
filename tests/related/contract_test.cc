// What tests/contract.h promises, for the families related to the delta rule.
#include <gtest/gtest.h>

#include "tests/related/cases.h"

#include "tests/contract.h"

namespace fastweight::test {
namespace {

using support::draw;

std::vector<RelatedSpec> specs(RelatedOp op, int64_t T) {
  const RelatedSpec plain = spec_of(op, T, 20, 36, 2);
  RelatedSpec options = spec_of(op, T, 33, 70, 1);
  options.state_v_first = options.p_absent = true;
  options.qk_l2norm = op == RelatedOp::kComba;
  options.g_gamma = op == RelatedOp::kSimpleGla;
  RelatedSpec wide = spec_of(op, T, 128, 128);
  wide.dtype = DType::kBF16;
  return first<RelatedSpec>({plain, options, wide}, 2);
}

constexpr auto kRunForward = [](const RelatedCase& x, const Context& c) { return support::forward(x, c, true); };
constexpr auto kRunBackward = [](const RelatedCase& x, const Context& c) { return support::backward(x, c); };

class Contract : public ::testing::TestWithParam<RelatedOp> {
 protected:
  const std::vector<std::string> forwards_ = implementations(GetParam(), "forward");
  const std::vector<std::string> backwards_ = implementations(GetParam(), "backward");
};

TEST_P(Contract, SameBitsForEveryThreadCount) {
  for (RelatedSpec spec : specs(GetParam(), reduced() ? 69 : 133)) {
    spec.B = 3;
    for (const RelatedSpec& one : {spec, with_lengths(spec, {5, 0, 64, 1, 63})}) {
      const RelatedCase problem = draw(one, 81);
      expect_same_for_every_thread_count(problem, forwards_, "forward", kRunForward);
      expect_same_for_every_thread_count(problem, backwards_, "backward", kRunBackward);
    }
  }
}

TEST_P(Contract, SameBitsAloneAndInABatch) {
  for (RelatedSpec spec : specs(GetParam(), 69)) {
    spec.B = 3;
    for (const RelatedSpec& one : {spec, with_lengths(spec, {5, 0, 64, 1, 70})}) {
      const RelatedCase problem = draw(one, 82);
      expect_same_alone(problem, forwards_, "forward", kRunForward);
      expect_same_alone(problem, backwards_, "backward", kRunBackward);
    }
  }
}

// Whatever a token holds, the tokens before it do not see it; in the backward, those after it do not see its gradient.
TEST_P(Contract, SameBitsBeforeWhatIsNotANumber) {
  constexpr int64_t kTokens = 75;
  for (const RelatedSpec& spec : specs(GetParam(), kTokens)) {
    const RelatedCase problem = draw(spec, 86);
    for (int64_t token : first<int64_t>({25, 72, 47, 16}, 1)) {
      expect_not_reached(problem,
                         {&RelatedCase::q, &RelatedCase::k, &RelatedCase::v, &RelatedCase::p, &RelatedCase::a,
                          &RelatedCase::b, &RelatedCase::beta},
                         token, 0, token, forwards_, "forward", kRunForward);
      expect_not_reached(problem, {&RelatedCase::v}, token, 0, token, backwards_, "backward", kRunBackward);
      expect_not_reached(problem, {&RelatedCase::d_o, &RelatedCase::q}, token, token + 1, kTokens, backwards_,
                         "backward", kRunBackward);
    }
  }
}

TEST_P(Contract, SameBitsWhenCut) {
  size_t turn = 0;
  for (const Cut& cut : cuts()) {
    const std::vector<RelatedSpec> all = specs(GetParam(), cut.tokens);
    RelatedSpec spec = all[turn++ % all.size()];
    spec.chunk_size = cut.chunk_size;
    const RelatedCase problem = draw(spec, 83);
    for (const std::string& name : and_automatic(forwards_)) expect_same_when_forward_is_cut(problem, cut.at, name);
    for (const std::string& name : and_automatic(backwards_)) {
      expect_same_when_backward_is_cut(problem, cut.at, name, forwards_);
    }
  }
}

TEST_P(Contract, SameBitsFromChunkStates) {
  for (const RelatedSpec& spec : specs(GetParam(), 200)) {
    const RelatedCase problem = draw(spec, 84);
    for (const std::string& name : and_automatic(forwards_)) expect_same_chunk_by_chunk(problem, spec.chunk_size, name);
    for (const std::string& name : and_automatic(backwards_)) expect_same_from_saved_states(problem, name, forwards_);
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Contract, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
