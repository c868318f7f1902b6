// Products with a lower triangular matrix L, or its transpose, between the tokens of a block: four rows at a time, and
// of the terms only those of the triangle. A later token then reaches no earlier one, even if it is inf or NaN, which
// times 0 is not 0. Re-included once per instruction set.
#if defined(FW_CPU_SIMD_TRIANGLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_SIMD_TRIANGLE_INL_H_
#undef FW_CPU_SIMD_TRIANGLE_INL_H_
#else
#define FW_CPU_SIMD_TRIANGLE_INL_H_
#endif

#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// L is a type with size(), a multiple of 4, and L(i, j).

// acc_m += sum over j <= top + m of L(top + m, j) x_j.
template <class Matrix, int kVecs>
HWY_INLINE void add_lower_rows(const Matrix& L, const float* x, int64_t stride, int64_t top, Vec (&acc)[4][kVecs]) {
  for (int64_t j = 0; j < top; ++j) {
    Vec row[kVecs];
    FW_UNROLL
    for (int n = 0; n < kVecs; ++n) row[n] = load(x + j * stride + n * kLanes);
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      const Vec l = broadcast(L(top + m, j));
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) acc[m][n] = fma(l, row[n], acc[m][n]);
    }
  }
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    Vec row[kVecs];
    FW_UNROLL
    for (int n = 0; n < kVecs; ++n) row[n] = load(x + (top + j) * stride + n * kLanes);
    FW_UNROLL
    for (int m = j; m < 4; ++m) {
      const Vec l = broadcast(L(top + m, top + j));
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) acc[m][n] = fma(l, row[n], acc[m][n]);
    }
  }
}

// acc_m += sum over i >= top + m of L(i, top + m) x_i.
template <class Matrix, int kVecs>
HWY_INLINE void add_upper_rows(const Matrix& L, const float* x, int64_t stride, int64_t top, Vec (&acc)[4][kVecs]) {
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    Vec row[kVecs];
    FW_UNROLL
    for (int n = 0; n < kVecs; ++n) row[n] = load(x + (top + i) * stride + n * kLanes);
    FW_UNROLL
    for (int m = 0; m <= i; ++m) {
      const Vec l = broadcast(L(top + i, top + m));
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) acc[m][n] = fma(l, row[n], acc[m][n]);
    }
  }
  for (int64_t i = top + 4; i < L.size(); ++i) {
    Vec row[kVecs];
    FW_UNROLL
    for (int n = 0; n < kVecs; ++n) row[n] = load(x + i * stride + n * kLanes);
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      const Vec l = broadcast(L(i, top + m));
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) acc[m][n] = fma(l, row[n], acc[m][n]);
    }
  }
}

enum class Triangle { kLower, kUpper };  // L, or its transpose

template <Triangle kTriangle, int kVecs, class Matrix>
HWY_INLINE void add_triangular_columns(const Matrix& L, const float* x, int64_t x_stride, float* y, int64_t y_stride) {
  for (int64_t top = 0; top < L.size(); top += 4) {
    Vec acc[4][kVecs];
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) acc[m][n] = load(y + (top + m) * y_stride + n * kLanes);
    }
    if constexpr (kTriangle == Triangle::kLower) {
      add_lower_rows(L, x, x_stride, top, acc);
    } else {
      add_upper_rows(L, x, x_stride, top, acc);
    }
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) store(acc[m][n], y + (top + m) * y_stride + n * kLanes);
    }
  }
}

// y += L x or L^T x; x and y are [size][columns], columns a multiple of kLanes.
template <Triangle kTriangle, class Matrix>
HWY_NOINLINE void add_triangular(const Matrix& L, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                                 int64_t columns) {
  int64_t column = 0;
  for (; column + kPanel <= columns; column += kPanel) {
    add_triangular_columns<kTriangle, 2>(L, x + column, x_stride, y + column, y_stride);
  }
  if (column < columns) add_triangular_columns<kTriangle, 1>(L, x + column, x_stride, y + column, y_stride);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
