// Some of the heads of a problem in a call of their own: the same bits, where the call knows how many there are.
#include <gtest/gtest.h>

#include "tests/delta_rule/grid.h"

namespace fastweight::test {
namespace {

using support::draw;

// Key heads [first, last) of the tensors that have one entry per token or per sequence.
template <class Tensors>
Tensors slice_heads(const Tensors& all, const DeltaRuleSpec& spec, int64_t first, int64_t last) {
  const int64_t group = spec.HV / spec.H;
  Tensors part = all;
  for (const auto& field : Tensors::fields()) {
    Tensor& x = part.*field.tensor;
    const bool per_token = field.part == Part::kTokens;
    if (!x.present() || field.part == Part::kCall) continue;
    const bool by_key = x.shape()[per_token ? 2 : 1] == spec.H;
    x = slice(x, per_token ? 2 : 1, by_key ? first : first * group, by_key ? last : last * group);
  }
  return part;
}

TEST(Heads, SameBitsInCallsOfTheirOwn) {
  if (device().type != DeviceType::kCpu) GTEST_SKIP() << "a promise of the CPU";
  for (Gate gate : kGates) {
    const int64_t H = 4;
    const DeltaRuleSpec spec = with_heads(spec_of(gate, 70, 20, 128), H, gate == Gate::kNone ? 1 : 2);
    const DeltaRuleCase problem = draw(spec, 71);
    for (const std::string& name : implementations(Mode::kBackward)) {
      const DeltaRuleResults forward = support::forward(problem, context_for(name));
      const DeltaRuleResults backward = support::backward(problem, context_for(name));
      for (int64_t first = 0; first < H; first += 3) {
        const int64_t last = std::min(first + 3, H);
        DeltaRuleCase part = slice_heads(problem, spec, first, last);
        part.spec.H = last - first;
        part.spec.HV = part.spec.H * spec.HV / H;
        part.spec.options.total_value_heads = static_cast<int32_t>(spec.HV);
        const std::string what = name + ", heads from " + std::to_string(first) + " of " + describe(spec);
        expect_same_bits(support::forward(part, context_for(name)), slice_heads(forward, spec, first, last), what);
        expect_same_bits(support::backward(part, context_for(name)), slice_heads(backward, spec, first, last), what);
      }
    }
  }
}

TEST(Heads, TheTotalIsNotBelowTheirNumber) {
  DeltaRuleSpec spec = with_heads(spec_of(Gate::kPerHead, 3, 4, 4), 2, 2);
  spec.options.total_value_heads = 3;
  try {
    support::forward(draw(spec, 72), context_for(""));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "total_value_heads: expected 0, or at least the 4 heads of v, got 3");
  }
}

}  // namespace
}  // namespace fastweight::test
