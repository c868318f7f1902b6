// The l2 norm of rows and its adjoint. Re-included once per instruction set.
#if defined(FW_CPU_L2NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_L2NORM_INL_H_
#undef FW_CPU_L2NORM_INL_H_
#else
#define FW_CPU_L2NORM_INL_H_
#endif

#include <cmath>

#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

inline constexpr float kL2Epsilon = 1e-6f;

// n rows x = x rstd,  rstd = 1 / sqrt(sum x^2 + eps); ld is a multiple of kLanes, padding is 0.
HWY_NOINLINE inline void normalise_rows(float* x, int64_t ld, int64_t n, float* rstd, float eps = kL2Epsilon) {
  for (int64_t i = 0; i < n; ++i) {
    float* row = x + i * ld;
    Vec sum = zero();
    for (int64_t d = 0; d < ld; d += kLanes) sum = fma(load(row + d), load(row + d), sum);
    rstd[i] = 1.0f / std::sqrt(sum_of_lanes(sum) + eps);
    const Vec r = broadcast(rstd[i]);
    for (int64_t d = 0; d < ld; d += kLanes) store(hn::Mul(load(row + d), r), row + d);
  }
}

// Through y = x rstd, x's norm included:  dx = rstd (dy - y (y . dy)). Overwrites dy.
HWY_NOINLINE inline void l2_adjoint(const float* y, const float* rstd, int64_t ld, int64_t n, float* dy) {
  for (int64_t i = 0; i < n; ++i, y += ld, dy += ld) {
    Vec sum = zero();
    for (int64_t d = 0; d < ld; d += kLanes) sum = fma(load(y + d), load(dy + d), sum);
    const Vec along = broadcast(sum_of_lanes(sum));
    const Vec r = broadcast(rstd[i]);
    for (int64_t d = 0; d < ld; d += kLanes) {
      store(hn::Mul(r, fnma(load(y + d), along, load(dy + d))), dy + d);
    }
  }
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
