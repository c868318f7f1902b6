// The gate activations: from raw values to log decays, and back. Re-included once per instruction set.
//
//     g = -a softplus(z)                  z = x + dt_bias,  a = exp(A_log)
//     g = bound sigmoid(a z)              with a lower bound
#if defined(FW_CPU_GATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_GATE_INL_H_
#undef FW_CPU_GATE_INL_H_
#else
#define FW_CPU_GATE_INL_H_
#endif

#include "cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

HWY_INLINE Vec log_decay(Vec z, Vec a, bool bounded, Vec bound) {
  return bounded ? hn::Mul(bound, sigmoid(hn::Mul(a, z))) : hn::Neg(hn::Mul(a, softplus(z)));
}

struct GateGradient {
  Vec x;
  Vec a_log;  // this element's term of the sum
};

//     dx = -a sigmoid(z) dg,         dA_log: dg g
//     dx = bound sigmoid'(a z) a dg, dA_log: dx z
HWY_INLINE GateGradient log_decay_adjoint(Vec z, Vec a, bool bounded, Vec bound, Vec dg) {
  if (bounded) {
    const Vec dx = hn::Mul(hn::Mul(bound, sigmoid_slope(hn::Mul(a, z))), hn::Mul(a, dg));
    return {dx, hn::Mul(dx, z)};
  }
  return {hn::Neg(hn::Mul(hn::Mul(a, sigmoid(z)), dg)), hn::Neg(hn::Mul(hn::Mul(a, softplus(z)), dg))};
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
