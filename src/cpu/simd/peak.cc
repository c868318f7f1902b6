#include "cpu/simd/peak.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/peak.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Two ports times a latency of 4 to 5 cycles need 8 to 10 independent chains; 12 and two constants also fit the 16
// registers of AVX2.
constexpr int kChains = 12;

// x -> x * factor + offset. The operands arrive through memory that the compiler cannot see into, the chains start from
// different values and all of them reach `sink`, so nothing can be folded, merged or dropped.
double fma_rounds(int64_t rounds, const float* operands, float* sink) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, operands[0]);
  const auto offset = hn::Set(d, operands[1]);
  const auto start = hn::Iota(d, operands[2]);
  auto x0 = start;
  auto x1 = hn::Add(x0, offset);
  auto x2 = hn::Add(x1, offset);
  auto x3 = hn::Add(x2, offset);
  auto x4 = hn::Add(x3, offset);
  auto x5 = hn::Add(x4, offset);
  auto x6 = hn::Add(x5, offset);
  auto x7 = hn::Add(x6, offset);
  auto x8 = hn::Add(x7, offset);
  auto x9 = hn::Add(x8, offset);
  auto x10 = hn::Add(x9, offset);
  auto x11 = hn::Add(x10, offset);
  for (int64_t round = 0; round < rounds; ++round) {
    x0 = hn::MulAdd(x0, factor, offset);
    x1 = hn::MulAdd(x1, factor, offset);
    x2 = hn::MulAdd(x2, factor, offset);
    x3 = hn::MulAdd(x3, factor, offset);
    x4 = hn::MulAdd(x4, factor, offset);
    x5 = hn::MulAdd(x5, factor, offset);
    x6 = hn::MulAdd(x6, factor, offset);
    x7 = hn::MulAdd(x7, factor, offset);
    x8 = hn::MulAdd(x8, factor, offset);
    x9 = hn::MulAdd(x9, factor, offset);
    x10 = hn::MulAdd(x10, factor, offset);
    x11 = hn::MulAdd(x11, factor, offset);
  }
  const auto sum0 = hn::Add(hn::Add(x0, x1), hn::Add(x2, x3));
  const auto sum1 = hn::Add(hn::Add(x4, x5), hn::Add(x6, x7));
  const auto sum2 = hn::Add(hn::Add(x8, x9), hn::Add(x10, x11));
  *sink = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), sum2)));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

}  // namespace HWY_NAMESPACE
}  // namespace fastweight::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(fma_rounds);

double run_fma_rounds(int64_t rounds) {
  // The factor is below 1: the chains settle near 1 and meet neither infinities nor denormals.
  volatile float factor = 0.999F, offset = 0.001F, start = 1.0F;
  const float operands[] = {factor, offset, start};
  float sink = 0;
  const double flop = HWY_DYNAMIC_DISPATCH(fma_rounds)(rounds, operands, &sink);
  volatile float kept = sink;
  static_cast<void>(kept);
  return flop;
}

}  // namespace fastweight::cpu
#endif  // HWY_ONCE
