#include "support/delta_rule_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace fastweight::support {
namespace {

DeltaRuleSpec kda() {
  DeltaRuleSpec spec;
  spec.options.gate = Gate::kPerChannel;
  spec.T = 200;
  return spec;
}

TEST(DeltaRuleCase, TheSeedDecides) {
  const DeltaRuleCase a = draw(kda(), 1), b = draw(kda(), 1), c = draw(kda(), 2);
  EXPECT_TRUE(same_bits(a.q, b.q) && same_bits(a.g, b.g) && same_bits(a.d_final_state, b.d_final_state));
  EXPECT_FALSE(same_bits(a.q, c.q));
  EXPECT_FALSE(same_bits(a.q, a.k));
  DeltaRuleSpec other = kda();
  other.beta_absent = true;
  EXPECT_TRUE(same_bits(draw(other, 1).d_o, a.d_o));
}

// The streams are the same on every machine and in every version.
TEST(DeltaRuleCase, KnownDraw) {
  const DeltaRuleCase a = draw(kda(), 1);
  EXPECT_NEAR(a.v[0], 0.0322994739, 1e-8);
  EXPECT_NEAR(a.g[0], -1.19216013, 1e-7);
}

TEST(DeltaRuleCase, Distributions) {
  DeltaRuleSpec spec = kda();
  spec.gate_divisor = 0.1;
  spec.hard_gate_fraction = 0.25;
  const DeltaRuleCase a = draw(spec, 3);
  for (int64_t row = 0; row < a.k.size(); row += spec.K) {
    double squares = 0;
    for (int64_t i = row; i < row + spec.K; ++i) squares += a.k[i] * a.k[i];
    ASSERT_NEAR(squares, 1, 1e-6);
  }
  double sum = 0, squares = 0;
  for (double value : a.v.values()) {
    sum += value;
    squares += value * value;
  }
  const double count = static_cast<double>(a.v.size());
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 10 / std::sqrt(count));
  const std::vector<double> gates = a.g.values();
  const double hard = static_cast<double>(std::count(gates.begin(), gates.end(), -1000));
  EXPECT_NEAR(hard / static_cast<double>(gates.size()), 0.25, 0.05);
  EXPECT_LT(*std::max_element(gates.begin(), gates.end()), 0);
  for (double value : a.beta.values()) ASSERT_TRUE(value > 0 && value < 1);

  spec.options.safe_gate = true;
  for (double value : draw(spec, 3).g.values()) ASSERT_GE(value, -5);
}

TEST(DeltaRuleCase, ShapesAndTypes) {
  DeltaRuleSpec spec = kda();
  spec.T = 7;
  spec.H = 2;
  spec.HV = 4;
  spec.V = 5;
  spec.cu_seqlens = {0, 3, 3, 7};
  spec.dtype = DType::kBF16;
  spec.options.gate_in_kernel = spec.options.state_v_first = true;
  const DeltaRuleCase a = draw(spec, 4);
  EXPECT_EQ(a.q.shape(), (std::vector<int64_t>{1, 7, 2, 16}));
  EXPECT_EQ(a.g.shape(), (std::vector<int64_t>{1, 7, 4, 16}));
  EXPECT_EQ(a.dt_bias.shape(), (std::vector<int64_t>{64}));
  EXPECT_EQ(a.initial_state.shape(), (std::vector<int64_t>{3, 4, 5, 16}));
  EXPECT_EQ(a.q.dtype(), DType::kBF16);
  EXPECT_EQ(a.initial_state.dtype(), DType::kF32);
  EXPECT_STREQ(name_of(a.spec.options.gate), "kda");

  const DeltaRuleCase exact = in_double(a);
  EXPECT_EQ(exact.q.values(), a.q.values());
  const DeltaRuleResults results = forward(exact, Context{}, true);
  EXPECT_EQ(results.o.dtype(), DType::kF64);
  EXPECT_EQ(results.chunk_states.shape(), (std::vector<int64_t>{1, 2, 4, 5, 16}));
  EXPECT_EQ(results.named().size(), 3u);
  EXPECT_EQ(backward(a, Context{}).named().size(), 8u);
}

}  // namespace
}  // namespace fastweight::support
