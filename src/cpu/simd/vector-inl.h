// The vector vocabulary of the kernels: fp32 vectors of at most 16 lanes. Re-included once per instruction set.
#if defined(FW_CPU_SIMD_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_SIMD_VECTOR_INL_H_
#undef FW_CPU_SIMD_VECTOR_INL_H_
#else
#define FW_CPU_SIMD_VECTOR_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

#ifndef FW_UNROLL
#ifdef __clang__
#define FW_UNROLL _Pragma("unroll")
#else
#define FW_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using Vec = hn::Vec<F32>;
inline constexpr F32 kF32Tag{};
inline constexpr int64_t kLanes = HWY_LANES(float) < 16 ? HWY_LANES(float) : 16;

// Rows and inner dimensions of matrices are padded to this.
inline constexpr int64_t kRowMultiple = kLanes < 4 ? 4 : kLanes;

// Two vectors: the width of a register tile, and of the panels in which states are stored.
inline constexpr int64_t kPanel = 2 * kLanes;

HWY_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

HWY_INLINE Vec load(const float* p) { return hn::LoadU(kF32Tag, p); }
HWY_INLINE void store(Vec x, float* p) { hn::StoreU(x, kF32Tag, p); }
HWY_INLINE Vec broadcast(float x) { return hn::Set(kF32Tag, x); }
HWY_INLINE Vec zero() { return hn::Zero(kF32Tag); }
HWY_INLINE Vec fma(Vec a, Vec b, Vec c) { return hn::MulAdd(a, b, c); }      // a b + c
HWY_INLINE Vec fnma(Vec a, Vec b, Vec c) { return hn::NegMulAdd(a, b, c); }  // c - a b
HWY_INLINE float sum_of_lanes(Vec x) { return hn::GetLane(hn::SumOfLanes(kF32Tag, x)); }

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
