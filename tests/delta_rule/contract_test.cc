// What tests/contract.h promises, for the delta-rule family.
#include <gtest/gtest.h>

#include "tests/contract.h"
#include "tests/delta_rule/grid.h"

namespace fastweight::test {
namespace {

using support::draw;

std::vector<DeltaRuleSpec> specs(Gate gate, int64_t T) {
  const int64_t group = gate == Gate::kNone ? 1 : 2;
  DeltaRuleSpec plain = with_heads(spec_of(gate, T, 20, 36), emulated() ? 2 / group : 2, group);
  DeltaRuleSpec options = plain;
  options.options.qk_l2norm = options.options.beta_sigmoid = options.options.state_v_first = true;
  options.options.gate_in_kernel = gate != Gate::kNone;
  DeltaRuleSpec half = options;  // wide enough for the kernels of Hopper, which have decays per head
  if (gate != Gate::kPerChannel) half.K = 72, half.V = 80;
  half.dtype = DType::kBF16;
  DeltaRuleSpec wide = spec_of(gate, T, 128, 128);
  wide.dtype = DType::kBF16;
  return first<DeltaRuleSpec>({plain, half, options, wide}, 2);
}

class Contract : public ::testing::TestWithParam<Gate> {};

TEST_P(Contract, SameBitsForEveryThreadCount) {
  for (const DeltaRuleSpec& spec : specs(GetParam(), reduced() ? 69 : 133)) {
    if (!emulated()) expect_same_for_every_thread_count(draw(with_batch(spec, 3), 81));
    expect_same_for_every_thread_count(draw(with_lengths(spec, {5, 0, 64, 1, 63}), 81));
  }
}

TEST_P(Contract, SameBitsAloneAndInABatch) {
  for (const DeltaRuleSpec& spec : specs(GetParam(), 69)) {
    expect_same_alone(draw(with_batch(spec, emulated() ? 2 : 3), 82));
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

// A gate that is not a number is no decay of 0: it reaches the outputs of its head from its token on, and the final
// state. It reaches no other head, and no token before it; on a device, where a chunk is one product, no earlier chunk.
void expect_gate_arrives(Mode mode, const DeltaRuleCase& problem, int64_t token) {
  const DeltaRuleSpec& spec = problem.spec;
  const int64_t head = spec.HV - 1, gates = problem.g.size() / (spec.T * spec.HV);
  DeltaRuleCase changed = problem;
  changed.g.set((token * spec.HV + head) * gates + gates / 2, std::nan(""));
  const int64_t reach = device().type == DeviceType::kCpu ? 1 : 64;
  for (const std::string& name : and_automatic(implementations(mode))) {
    const auto expected = unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name)); });
    if (!expected) continue;
    const DeltaRuleResults results = support::run(mode, changed, context_for(name));
    int64_t lost = 0, strayed = 0;
    const auto count = [&](const Tensor& x, const Tensor& before, int64_t i, bool reached, bool spared) {
      if (reached && !std::isnan(x[i])) ++lost;
      if (spared && x[i] != before[i]) ++strayed;
    };
    for (int64_t i = 0; i < results.o.size(); ++i) {
      const int64_t t = i / (spec.HV * spec.V), h = i / spec.V % spec.HV;
      count(results.o, expected->o, i, h == head && t >= token, h != head || t < token / reach * reach);
    }
    for (int64_t i = 0; i < results.final_state.size(); ++i) {
      const int64_t h = i / (spec.K * spec.V) % spec.HV;
      count(results.final_state, expected->final_state, i, h == head, h != head);
    }
    EXPECT_EQ(lost, 0) << name_of(mode) << " " << results.implementation << ", token " << token << " "
                       << describe(spec);
    EXPECT_EQ(strayed, 0) << name_of(mode) << " " << results.implementation << ", token " << token << " "
                          << describe(spec);
  }
}

TEST_P(Contract, AGateThatIsNotANumberArrives) {
  if (GetParam() == Gate::kNone) GTEST_SKIP() << "no gate";
  for (const DeltaRuleSpec& spec : specs(GetParam(), 140)) {
    for (int64_t token : first<int64_t>({70, 25, 127, 64}, 2)) {
      const DeltaRuleCase problem = draw(spec, 87);
      expect_gate_arrives(Mode::kForward, problem, token);
      expect_gate_arrives(Mode::kStep, problem, token);
    }
  }
}

TEST_P(Contract, SameBitsFromChunkStates) {
  for (const DeltaRuleSpec& spec : specs(GetParam(), emulated() ? 133 : 200)) {
    expect_same_from_chunk_states(draw(spec, 84), spec.options.chunk_size);
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Contract, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
