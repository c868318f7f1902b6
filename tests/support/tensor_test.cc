#include "support/tensor.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace fastweight::support {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double rounded(DType dtype, double value) {
  Tensor x(dtype, {1});
  x.set(0, value);
  return x[0];
}

uint16_t bits(const Tensor& x, int64_t index) { return static_cast<const uint16_t*>(x.data())[index]; }

// All 65536 patterns: decoding is monotonous in the pattern, and encoding what was decoded gives the pattern back.
void check_all_patterns(DType dtype, uint16_t infinity) {
  Tensor x(dtype, {1}), y(dtype, {1});
  double previous = -1;
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const uint16_t narrow = static_cast<uint16_t>(pattern);
    std::memcpy(x.data(), &narrow, 2);
    const double value = x[0];
    const uint16_t magnitude = narrow & 0x7fff;
    ASSERT_EQ(std::signbit(value), pattern >= 0x8000) << pattern;
    ASSERT_EQ(std::isnan(value), magnitude > infinity) << pattern;
    ASSERT_EQ(std::isinf(value), magnitude == infinity) << pattern;
    if (std::isnan(value)) continue;
    if (pattern == 0x8000) previous = -1;
    ASSERT_GT(std::fabs(value), previous) << pattern;
    previous = std::fabs(value);
    y.set(0, value);
    ASSERT_EQ(bits(y, 0), narrow);
  }
}

// Between neighbours: below the middle goes down, above goes up, the middle goes to the even pattern.
void check_rounding(DType dtype, uint16_t infinity) {
  Tensor low(dtype, {1}), high(dtype, {1}), y(dtype, {1});
  for (uint16_t pattern = 0; pattern + 1 < infinity; ++pattern) {
    const uint16_t next = static_cast<uint16_t>(pattern + 1);
    std::memcpy(low.data(), &pattern, 2);
    std::memcpy(high.data(), &next, 2);
    const double middle = (low[0] + high[0]) / 2;
    y.set(0, std::nextafter(middle, 0));
    ASSERT_EQ(bits(y, 0), pattern);
    y.set(0, std::nextafter(middle, kInfinity));
    ASSERT_EQ(bits(y, 0), next);
    y.set(0, -middle);
    ASSERT_EQ(bits(y, 0), 0x8000 | (pattern % 2 == 0 ? pattern : next));
  }
}

TEST(Tensor, BF16Patterns) {
  check_all_patterns(DType::kBF16, 0x7f80);
  check_rounding(DType::kBF16, 0x7f80);
}

TEST(Tensor, F16Patterns) {
  check_all_patterns(DType::kF16, 0x7c00);
  check_rounding(DType::kF16, 0x7c00);
}

TEST(Tensor, KnownValues) {
  EXPECT_EQ(rounded(DType::kF16, 65504), 65504);
  EXPECT_EQ(rounded(DType::kF16, 65519.99), 65504);
  EXPECT_EQ(rounded(DType::kF16, 65520), kInfinity);
  EXPECT_EQ(rounded(DType::kF16, 0x1p-24), 0x1p-24);
  EXPECT_EQ(rounded(DType::kF16, 0x1p-25), 0);
  EXPECT_EQ(rounded(DType::kF16, std::nextafter(0x1p-25, 1)), 0x1p-24);
  EXPECT_EQ(rounded(DType::kBF16, 0x1p-133), 0x1p-133);
  EXPECT_EQ(rounded(DType::kBF16, 1e300), kInfinity);
  EXPECT_EQ(rounded(DType::kBF16, 1 + 0x1p-8), 1);
  EXPECT_EQ(rounded(DType::kBF16, 1 + 0x1p-8 + 0x1p-40), 1 + 0x1p-7);  // once, not by way of fp32
  EXPECT_EQ(rounded(DType::kF32, 1 + 0x1p-24), 1);
  EXPECT_EQ(rounded(DType::kI64, -7), -7);
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    EXPECT_TRUE(std::isnan(rounded(dtype, kNaN)));
    EXPECT_EQ(rounded(dtype, -kInfinity), -kInfinity);
    EXPECT_TRUE(std::signbit(rounded(dtype, -0.0)));
  }
}

TEST(Tensor, ShapeAndView) {
  const std::vector<double> values{1, 2, 3, 4, 5, 6};
  const Tensor x(DType::kF32, {2, 3}, values);
  EXPECT_EQ(x.size(), 6);
  EXPECT_EQ(x.values(), values);
  EXPECT_EQ(x.view().strides[0], 3);
  EXPECT_EQ(x.view().shape[1], 3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x.data()) % 64, 0u);
  EXPECT_EQ(x.to(DType::kBF16).values(), values);
  const Tensor copy = x;
  EXPECT_NE(copy.data(), x.data());
  EXPECT_TRUE(same_bits(copy, x));
  EXPECT_FALSE(same_bits(x.to(DType::kF64), x));
  EXPECT_FALSE(Tensor().present());
  EXPECT_FALSE(Tensor().view().present());
  EXPECT_TRUE(Tensor(DType::kF32, {0, 3}).present());
  EXPECT_THROW(Tensor(DType::kF32, {2}, values), std::invalid_argument);
}

TEST(Tensor, Compare) {
  const auto vector = [](std::vector<double> values) {
    return Tensor(DType::kF64, {static_cast<int64_t>(values.size())}, values);
  };
  const Difference difference = compare(vector({3, 4.1}), vector({3, 4}));
  EXPECT_NEAR(difference.max_abs, 0.1, 1e-12);
  EXPECT_NEAR(difference.relative_rms, 0.1 / 5, 1e-9);
  EXPECT_EQ(compare(vector({1, kNaN}), vector({1, 2})).relative_rms, kInfinity);
  EXPECT_EQ(compare(vector({1, 2}), vector({1, kNaN})).max_abs, kInfinity);
  EXPECT_EQ(compare(vector({1}), vector({1, 2})).max_abs, kInfinity);
  EXPECT_EQ(compare(Tensor(DType::kF32, {0}), Tensor(DType::kF64, {0})).relative_rms, 0);
}

}  // namespace
}  // namespace fastweight::support
