// The elementary functions on every instruction set of this processor, against the standard library in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/simd/math_test.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/simd/math-inl.h"
#include "hwy/tests/hwy_gtest.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

// Of `count` numbers, a multiple of 16.
void exp_of(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(exp(load(x + i)), y + i);
}
void sigmoid_of(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(sigmoid(load(x + i)), y + i);
}
void sigmoid_slope_of(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(sigmoid_slope(load(x + i)), y + i);
}
void softplus_of(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(softplus(load(x + i)), y + i);
}

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

class Math : public hwy::TestWithParamTarget {};
HWY_TARGET_INSTANTIATE_TEST_SUITE_P(Math);

HWY_EXPORT(exp_of);
HWY_EXPORT(sigmoid_of);
HWY_EXPORT(sigmoid_slope_of);
HWY_EXPORT(softplus_of);

using Function = void (*)(const float*, float*, int64_t);

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

// One number in every lane.
float value_of(Function function, float x) {
  const std::vector<float> in(16, x);
  std::vector<float> out(16);
  function(in.data(), out.data(), 16);
  for (float y : out) EXPECT_TRUE(y == out[0] || (std::isnan(y) && std::isnan(out[0]))) << x;
  return out[0];
}

// The distance in units of the last place of an fp32 number. Infinity counts as the power of two after the largest.
double ulps(float result, double exact) {
  if (std::isnan(result)) return std::numeric_limits<double>::infinity();
  const auto bounded = [](double x) { return std::clamp(x, -0x1p128, 0x1p128); };
  const int exponent = exact == 0 ? -126 : std::clamp(std::ilogb(exact), -126, 127);
  return std::fabs(bounded(result) - bounded(exact)) / std::ldexp(1, exponent - 23);
}

// The largest distance over an even grid, apart from results within `absolute` of the exact ones.
template <class Exact>
double worst_ulps(Function function, double low, double high, const Exact& exact, double absolute = 0) {
  constexpr int64_t kCount = 1 << 20;
  std::vector<float> x(kCount), y(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    x[static_cast<size_t>(i)] = static_cast<float>(low + (high - low) * static_cast<double>(i) / (kCount - 1));
  }
  function(x.data(), y.data(), kCount);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = exact(static_cast<double>(x[i]));
    if (!(std::fabs(y[i] - expected) <= absolute)) worst = std::max(worst, ulps(y[i], expected));
  }
  return worst;
}

TEST_P(Math, Exp) {
  const Function function = HWY_DYNAMIC_DISPATCH(exp_of);
  const auto exact = [](double x) { return std::exp(x); };
  EXPECT_LE(worst_ulps(function, -110, 90, exact), 1.5);
  EXPECT_LE(worst_ulps(function, -87, 88.7, exact), 1.5);
  EXPECT_LE(worst_ulps(function, -1, 1, exact), 1.5);

  EXPECT_EQ(value_of(function, 0.0f), 1.0f);
  EXPECT_EQ(value_of(function, -0.0f), 1.0f);
  for (float x : {-1000.0f, -kLargest, -kInfinity}) EXPECT_EQ(value_of(function, x), 0.0f) << x;
  for (float x : {89.0f, 100.0f, 104.0f, 1000.0f, kLargest, kInfinity})
    EXPECT_EQ(value_of(function, x), kInfinity) << x;
  EXPECT_TRUE(std::isnan(value_of(function, kNan)));
  EXPECT_TRUE(std::isnan(value_of(function, -kNan)));
}

TEST_P(Math, Sigmoid) {
  const Function function = HWY_DYNAMIC_DISPATCH(sigmoid_of);
  const auto exact = [](double x) { return 1 / (1 + std::exp(-x)); };
  EXPECT_LE(worst_ulps(function, -110, 110, exact, 0x1p-126), 3);
  EXPECT_LE(worst_ulps(function, -20, 20, exact), 3);
  EXPECT_LE(worst_ulps(function, -1, 1, exact), 3);

  EXPECT_EQ(value_of(function, 0.0f), 0.5f);
  for (float x : {-1000.0f, -kLargest, -kInfinity}) EXPECT_EQ(value_of(function, x), 0.0f) << x;
  for (float x : {1000.0f, kLargest, kInfinity}) EXPECT_EQ(value_of(function, x), 1.0f) << x;
  EXPECT_TRUE(std::isnan(value_of(function, kNan)));
}

TEST_P(Math, SigmoidSlope) {
  const Function function = HWY_DYNAMIC_DISPATCH(sigmoid_slope_of);
  const auto exact = [](double x) { return 1 / ((1 + std::exp(-x)) * (1 + std::exp(x))); };
  EXPECT_LE(worst_ulps(function, -110, 110, exact, 0x1p-126), 4);
  EXPECT_LE(worst_ulps(function, -20, 20, exact), 4);

  EXPECT_EQ(value_of(function, 0.0f), 0.25f);
  for (float x : {1000.0f, kLargest, kInfinity}) {
    EXPECT_EQ(value_of(function, x), 0.0f) << x;
    EXPECT_EQ(value_of(function, -x), 0.0f) << x;
  }
  EXPECT_TRUE(std::isnan(value_of(function, kNan)));
}

TEST_P(Math, Softplus) {
  const Function function = HWY_DYNAMIC_DISPATCH(softplus_of);
  const auto exact = [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); };
  EXPECT_LE(worst_ulps(function, -110, 110, exact), 3);
  EXPECT_LE(worst_ulps(function, -20, 21, exact), 3);
  EXPECT_LE(worst_ulps(function, -1, 1, exact), 3);

  for (float x : {-1000.0f, -kLargest, -kInfinity}) EXPECT_EQ(value_of(function, x), 0.0f) << x;
  for (float x : {30.0f, 1000.0f, kLargest, kInfinity}) EXPECT_EQ(value_of(function, x), x);
  EXPECT_TRUE(std::isnan(value_of(function, kNan)));
}

}  // namespace
}  // namespace fastweight::cpu
#endif
