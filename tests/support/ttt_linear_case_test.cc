#include "support/ttt_linear_case.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fastweight::support {
namespace {

TttLinearSpec spec_of(int64_t T) {
  TttLinearSpec spec;
  spec.T = T;
  return spec;
}

TEST(TttLinearCase, TheSeedDecides) {
  const TttLinearCase a = draw(spec_of(50), 1), b = draw(spec_of(50), 1), c = draw(spec_of(50), 2);
  EXPECT_TRUE(same_bits(a.q, b.q) && same_bits(a.eta, b.eta) && same_bits(a.d_final_state_bias, b.d_final_state_bias));
  EXPECT_FALSE(same_bits(a.q, c.q));
  EXPECT_FALSE(same_bits(a.q, a.v));
  TttLinearSpec other = spec_of(50);
  other.initial_state = false;
  EXPECT_FALSE(draw(other, 1).initial_state.present());
  EXPECT_TRUE(same_bits(draw(other, 1).d_o, a.d_o));
}

TEST(TttLinearCase, Distributions) {
  const TttLinearSpec spec = spec_of(500);
  const TttLinearCase a = draw(spec, 3);
  for (int64_t row = 0; row < a.k.size(); row += spec.D) {
    double squares = 0;
    for (int64_t i = row; i < row + spec.D; ++i) squares += a.k[i] * a.k[i];
    ASSERT_NEAR(squares, 1, 1e-6);
  }
  double squares = 0;
  for (double value : a.eta.values()) squares += value * value;
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(a.eta.size())), 0.005, 0.001);
  for (double value : a.d_o.values()) ASSERT_TRUE(value > 0 && value < 1);
}

TEST(TttLinearCase, ShapesAndTypes) {
  TttLinearSpec spec = spec_of(7);
  spec.H = 2;
  spec.cu_seqlens = {0, 3, 3, 7};
  spec.dtype = DType::kBF16;
  const TttLinearCase a = draw(spec, 4);
  EXPECT_EQ(a.q.shape(), (std::vector<int64_t>{1, 7, 2, 16}));
  EXPECT_EQ(a.w.shape(), (std::vector<int64_t>{2, 16}));
  EXPECT_EQ(a.eta.shape(), (std::vector<int64_t>{1, 7, 2, 1}));
  EXPECT_EQ(a.initial_state.shape(), (std::vector<int64_t>{3, 2, 16, 16}));
  EXPECT_EQ(a.initial_state_bias.shape(), (std::vector<int64_t>{3, 2, 1, 16}));
  EXPECT_EQ(a.q.dtype(), DType::kBF16);
  EXPECT_EQ(a.initial_state.dtype(), DType::kF32);

  const TttLinearCase exact = in_double(a);
  EXPECT_EQ(exact.q.values(), a.q.values());
  const TttLinearResults results = forward(exact, Context{});
  EXPECT_EQ(results.o.dtype(), DType::kF64);
  EXPECT_EQ(results.named().size(), 3u);
  EXPECT_EQ(backward(a, Context{}).named().size(), 8u);
  const TttLinearResults decoded = step(a, Context{});
  EXPECT_EQ(decoded.named().size(), 6u);
  EXPECT_EQ(decoded.position.values(), (std::vector<double>{3, 0, 4}));
}

}  // namespace
}  // namespace fastweight::support
