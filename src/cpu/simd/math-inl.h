// Elementary functions. Re-included once per instruction set.
#if defined(FW_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_SIMD_MATH_INL_H_
#undef FW_CPU_SIMD_MATH_INL_H_
#else
#define FW_CPU_SIMD_MATH_INL_H_
#endif

#include "cpu/simd/vector-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// Highway's exp is defined up to 104, where fp32 has overflowed long since; below its range it gives 0. NaN stays NaN.
HWY_INLINE Vec exp(Vec x) {
  const Vec e = hn::Exp(kF32Tag, hn::Min(x, broadcast(100.0f)));
  return hn::IfThenElse(hn::IsNaN(x), x, e);
}

HWY_INLINE Vec sigmoid(Vec x) { return hn::Div(broadcast(1.0f), hn::Add(broadcast(1.0f), exp(hn::Neg(x)))); }

// sigmoid'(x) = sigmoid(x) sigmoid(-x), from which nothing cancels where the sigmoid is close to 1.
HWY_INLINE Vec sigmoid_slope(Vec x) {
  const Vec e = exp(hn::Neg(hn::Abs(x))), below = hn::Add(broadcast(1.0f), e);
  return hn::Div(e, hn::Mul(below, below));
}

// log(1 + exp(x)); x itself above 20, where the difference is below fp32's resolution.
HWY_INLINE Vec softplus(Vec x) {
  const Vec limit = broadcast(20.0f);
  const Vec log = hn::Log1p(kF32Tag, exp(hn::Min(x, limit)));
  return hn::IfThenElse(hn::Or(hn::Gt(x, limit), hn::IsNaN(x)), x, log);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
