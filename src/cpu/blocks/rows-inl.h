// Tensors of rows [.., D], row by row. Re-included once per instruction set.
#if defined(FW_CPU_BLOCKS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_BLOCKS_ROWS_INL_H_
#undef FW_CPU_BLOCKS_ROWS_INL_H_
#else
#define FW_CPU_BLOCKS_ROWS_INL_H_
#endif

#include "cpu/element.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {

HWY_INLINE int64_t width_of(const TensorView& x) { return x.shape[static_cast<size_t>(x.rank - 1)]; }

// Row i of a tensor of rows.
HWY_INLINE char* nth_row(const TensorView& x, int64_t i) {
  return static_cast<char*>(x.data) + element_offset(x, i * width_of(x)) * element_size(x.dtype);
}
HWY_INLINE void load_nth(const TensorView& x, int64_t i, float* row, int64_t ld) {
  load_row(nth_row(x, i), x.dtype, x.strides[static_cast<size_t>(x.rank - 1)], width_of(x), row, ld);
}
HWY_INLINE void store_nth(const float* row, const TensorView& x, int64_t i) {
  store_row(row, nth_row(x, i), x.dtype, x.strides[static_cast<size_t>(x.rank - 1)], width_of(x));
}

HWY_INLINE int64_t count_rows(const TensorView& x) {
  int64_t rows = 1;
  for (size_t axis = 0; axis + 1 < static_cast<size_t>(x.rank); ++axis) rows *= x.shape[axis];
  return rows;
}

}  // namespace blocks
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
