// Products with the lower triangular matrices of chunks, skipping what is 0 in steps of 16 rows. Re-included once per
// instruction set.
#if defined(FW_CPU_BLOCKS_MATRIX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_BLOCKS_MATRIX_INL_H_
#undef FW_CPU_BLOCKS_MATRIX_INL_H_
#else
#define FW_CPU_BLOCKS_MATRIX_INL_H_
#endif

#include "cpu/blocks/chunk-inl.h"
#include "cpu/simd/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {

// out = M x;  M is [rows][kMatrix], x and out are [rows][ld].
HWY_NOINLINE inline void lower_product(const float* M, int64_t rows, const float* x, int64_t ld, float* out) {
  for (int64_t top = 0; top < rows; top += kRowBlock) {
    const int64_t end = std::min(top + kRowBlock, rows);
    product<MatrixRows, Start::kZero>({.rows = end - top,
                                       .columns = ld,
                                       .depth = end,
                                       .a = M + top * kMatrix,
                                       .b = x,
                                       .b_stride = ld,
                                       .c_in = out + top * ld,
                                       .c_out = out + top * ld,
                                       .c_stride = ld});
  }
}

// out = M^T x, the first `columns` columns.
HWY_NOINLINE inline void transposed_lower_product(const float* M, int64_t rows, const float* x, int64_t ld,
                                                  int64_t columns, float* out) {
  for (int64_t top = 0; top < rows; top += kRowBlock) {
    const int64_t end = std::min(top + kRowBlock, rows);
    product<Columns, Start::kZero>({.rows = end - top,
                                    .columns = columns,
                                    .depth = rows - top,
                                    .a = M + top * kMatrix + top,
                                    .a_stride = kMatrix,
                                    .b = x + top * ld,
                                    .b_stride = ld,
                                    .c_in = out + top * ld,
                                    .c_out = out + top * ld,
                                    .c_stride = ld});
  }
}

// The lower part of  out = x y^T (+ out)  from transposed factors, [depth][kMatrix] each; 16 x 16 blocks on the
// diagonal are computed whole.
template <Start kStart>
HWY_INLINE void lower_gram(const float* x_columns, const float* y_columns, int64_t rows, int64_t depth, float* out) {
  for (int64_t top = 0; top < rows; top += kRowBlock) {
    const int64_t end = std::min(top + kRowBlock, rows);
    product<Columns, kStart>({.rows = end - top,
                              .columns = end,
                              .depth = depth,
                              .a = x_columns + top,
                              .a_stride = kMatrix,
                              .b = y_columns,
                              .b_stride = kMatrix,
                              .c_in = out + top * kMatrix,
                              .c_out = out + top * kMatrix,
                              .c_stride = kMatrix});
  }
}

// Row i of M without its columns i, i + 1, ..
HWY_NOINLINE inline void keep_strictly_lower(float* M, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    float* row = M + i * kMatrix;
    for (int64_t j = i / kLanes * kLanes; j < kMatrix; j += kLanes) {
      const Vec kept =
          j < i ? hn::IfThenElseZero(hn::FirstN(kF32Tag, static_cast<size_t>(i - j)), load(row + j)) : zero();
      store(kept, row + j);
    }
  }
}

// x [rows][ld] to columns [ld][kMatrix].
HWY_NOINLINE inline void to_columns(const float* x, int64_t rows, int64_t ld, float* columns) {
  transpose(x, ld, rows, ld, columns, kMatrix);
}

// dA = -slower(Z J^T), Z = J^T dJ, of which the lower part counts. `columns` is scratch memory for J^T.
HWY_NOINLINE inline void inverse_adjoint(const float* J, int64_t rows, const float* Z, float* columns, float* dA) {
  transpose(J, kMatrix, rows, rows, columns, kMatrix);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < rows; j += kLanes) {
      float* at = columns + i * kMatrix + j;
      store(hn::Neg(load(at)), at);
    }
  }
  for (int64_t top = 0; top < rows; top += kRowBlock) {
    const int64_t end = std::min(top + kRowBlock, rows);
    product<MatrixRows, Start::kZero>({.rows = end - top,
                                       .columns = end,
                                       .depth = end,
                                       .a = Z + top * kMatrix,
                                       .b = columns,
                                       .b_stride = kMatrix,
                                       .c_in = dA + top * kMatrix,
                                       .c_out = dA + top * kMatrix,
                                       .c_stride = kMatrix});
  }
  keep_strictly_lower(dA, rows);
}

}  // namespace blocks
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
