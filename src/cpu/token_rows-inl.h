// Rows of [B, T, heads, width] tensors, one per token, to and from fp32 buffers. Re-included once per instruction set.
#if defined(FW_CPU_TOKEN_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_TOKEN_ROWS_INL_H_
#undef FW_CPU_TOKEN_ROWS_INL_H_
#else
#define FW_CPU_TOKEN_ROWS_INL_H_
#endif

#include <cstring>

#include "cpu/element.h"
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
  const int64_t step = x.strides[1] * element_size(x.dtype);
  for (int64_t i = 0; i < n; ++i) load_row(src + i * step, x.dtype, x.strides[3], width, dst + i * padded, padded);
  std::memset(dst + n * padded, 0, static_cast<size_t>((rows - n) * padded) * sizeof(float));
}

HWY_INLINE void store_rows(const float* src, int64_t ld, const TensorView& x, int64_t batch, int64_t token,
                           int64_t head, int64_t n, int64_t first, int64_t width) {
  char* dst = row_of(x, batch, token, head) + first * x.strides[3] * element_size(x.dtype);
  const int64_t step = x.strides[1] * element_size(x.dtype);
  for (int64_t i = 0; i < n; ++i) store_row(src + i * ld, dst + i * step, x.dtype, x.strides[3], width);
}

// Rows that will be needed soon, brought into the second-level cache a few at a time between pieces of arithmetic. A
// head's rows lie heads * width elements apart, often one to a page, where hardware prefetchers give up; and asking for
// all rows of a block at once fills the queue of outstanding misses and stalls as the loads would: at K = V = 128 fp32
// with 16 heads a quarter of the forward's samples stood there.
class RowPrefetcher {
 public:
  void clear() { count_ = next_ = 0; }

  // Columns [first, first + width) of tokens [from, to).
  void add(const TensorView& x, int64_t batch, int64_t from, int64_t to, int64_t head, int64_t first, int64_t width) {
    if (!x.present() || x.strides[3] != 1) return;
    const int64_t size = element_size(x.dtype);
    for (int64_t t = from; t < to && count_ < kMost; ++t) {
      rows_[count_++] = {row_of(x, batch, t, head) + first * size, width * size};
    }
  }

  // An equal share of what is left, when this is the first of `calls` calls.
  void issue(int64_t calls) {
    const int64_t end = next_ + (count_ - next_ + calls - 1) / calls;
    for (; next_ < end; ++next_) {
      for (int64_t byte = 0; byte < rows_[next_].bytes; byte += 64) {
        __builtin_prefetch(rows_[next_].data + byte, 0, 2);
      }
    }
  }

 private:
  static constexpr int64_t kMost = 256;
  struct Row {
    const char* data;
    int64_t bytes;
  };
  Row rows_[kMost];
  int64_t count_ = 0, next_ = 0;
};

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
