// Rows of [B, T, heads, width] tensors, one per token, to and from fp32 buffers. Re-included once per instruction set.
#if defined(FW_CPU_TOKEN_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_TOKEN_ROWS_INL_H_
#undef FW_CPU_TOKEN_ROWS_INL_H_
#else
#define FW_CPU_TOKEN_ROWS_INL_H_
#endif

#include <cstring>

#include "cpu/element.h"
#include "cpu/simd/prefetch.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// Where element (batch, token, head) of a [B, T, heads, ..] tensor begins.
HWY_INLINE char* row_of(const TensorView& x, int64_t batch, int64_t token, int64_t head) {
  const int64_t offset = batch * x.strides[0] + token * x.strides[1] + head * x.strides[2];
  return static_cast<char*>(x.data) + offset * element_size(x.dtype);
}

// `rows` rows of length `padded`: columns [first, first + width) of tokens [token, token + n), zero beyond.
HWY_INLINE void load_rows(const TensorView& x, int64_t batch, int64_t token, int64_t head, int64_t n, int64_t first,
                          int64_t width, float* dst, int64_t padded, int64_t rows) {
  const char* src = row_of(x, batch, token, head) + first * x.strides[3] * element_size(x.dtype);
  load_rows(src, x.dtype, x.strides[1], x.strides[3], n, width, dst, padded);
  std::memset(dst + n * padded, 0, static_cast<size_t>((rows - n) * padded) * sizeof(float));
}

HWY_INLINE void store_rows(const float* src, int64_t ld, const TensorView& x, int64_t batch, int64_t token,
                           int64_t head, int64_t n, int64_t first, int64_t width) {
  char* dst = row_of(x, batch, token, head) + first * x.strides[3] * element_size(x.dtype);
  store_rows(src, ld, dst, x.dtype, x.strides[1], x.strides[3], n, width);
}

// Columns [first, first + width) of tokens [from, to), where they are contiguous.
HWY_NOINLINE inline void prefetch_rows(const TensorView& x, int64_t batch, int64_t from, int64_t to, int64_t head,
                                       int64_t first, int64_t width, RowPrefetcher& prefetcher) {
  if (!x.present() || x.strides[3] != 1) return;
  const int64_t size = element_size(x.dtype);
  for (int64_t t = from; t < to; ++t) prefetcher.add(row_of(x, batch, t, head) + first * size, width * size);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
