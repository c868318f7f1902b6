// What tests/contract.h promises, for the delta-rule family.
#include <gtest/gtest.h>

#include "tests/contract.h"
#include "tests/delta_rule/grid.h"

namespace fastweight::test {
namespace {

using support::draw;

std::vector<DeltaRuleSpec> specs(Gate gate, int64_t T) {
  DeltaRuleSpec plain = with_heads(spec_of(gate, T, 20, 36), 2, gate == Gate::kNone ? 1 : 2);
  DeltaRuleSpec options = plain;
  options.options.qk_l2norm = options.options.beta_sigmoid = options.options.state_v_first = true;
  options.options.gate_in_kernel = gate != Gate::kNone;
  DeltaRuleSpec half = options;
  half.dtype = DType::kBF16;
  DeltaRuleSpec wide = spec_of(gate, T, 128, 128);
  wide.dtype = DType::kBF16;
  return first<DeltaRuleSpec>({plain, half, options, wide}, 2);
}

class Contract : public ::testing::TestWithParam<Gate> {};

TEST_P(Contract, SameBitsForEveryThreadCount) {
  for (const DeltaRuleSpec& spec : specs(GetParam(), reduced() ? 69 : 133)) {
    expect_same_for_every_thread_count(draw(with_batch(spec, 3), 81));
    expect_same_for_every_thread_count(draw(with_lengths(spec, {5, 0, 64, 1, 63}), 81));
  }
}

TEST_P(Contract, SameBitsAloneAndInABatch) {
  for (const DeltaRuleSpec& spec : specs(GetParam(), 69)) {
    expect_same_alone(draw(with_batch(spec, 3), 82));
    expect_same_alone(draw(with_lengths(spec, {5, 0, 64, 1, 70}), 82));
  }
}

TEST_P(Contract, SameBitsWhenCut) {
  for (const Cut& cut : cuts()) {
    for (DeltaRuleSpec spec : specs(GetParam(), cut.tokens)) {
      spec.options.chunk_size = cut.chunk_size;
      expect_same_when_cut(draw(spec, 83), cut.at);
    }
  }
}

// Whatever a token holds, the tokens before it do not see it; in the backward, those after it do not see its gradient.
TEST_P(Contract, SameBitsBeforeWhatIsNotANumber) {
  constexpr int64_t kTokens = 75;
  for (const DeltaRuleSpec& spec : specs(GetParam(), kTokens)) {
    const DeltaRuleCase problem = draw(spec, 86);
    for (int64_t token : first<int64_t>({25, 72, 47, 16}, 2)) {
      expect_not_reached(
          Mode::kForward, problem,
          {&DeltaRuleCase::q, &DeltaRuleCase::k, &DeltaRuleCase::v, &DeltaRuleCase::g, &DeltaRuleCase::beta}, token, 0,
          token);
      expect_not_reached(Mode::kBackward, problem, {&DeltaRuleCase::v}, token, 0, token);
      expect_not_reached(Mode::kBackward, problem, {&DeltaRuleCase::d_o, &DeltaRuleCase::q}, token, token + 1, kTokens);
    }
  }
}

TEST_P(Contract, SameBitsFromChunkStates) {
  for (const DeltaRuleSpec& spec : specs(GetParam(), 200)) {
    expect_same_from_chunk_states(draw(spec, 84), spec.options.chunk_size);
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Contract, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
