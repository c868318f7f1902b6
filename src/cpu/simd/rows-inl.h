// Rows of tensors of any floating type to and from padded fp32 buffers. Re-included once per instruction set.
#if defined(FW_CPU_SIMD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_SIMD_ROWS_INL_H_
#undef FW_CPU_SIMD_ROWS_INL_H_
#else
#define FW_CPU_SIMD_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/scalar_types.h"
#include "cpu/simd/vector-inl.h"
#include "fastweight/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

using U16 = hn::Rebind<uint16_t, F32>;

HWY_INLINE Vec load_bf16(const uint16_t* p) {
  const hn::Rebind<uint32_t, F32> wide;
  return hn::BitCast(kF32Tag, hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(U16(), p))));
}

// Round to nearest even on the bits; a NaN keeps its sign and becomes quiet.
HWY_INLINE void store_bf16(Vec x, uint16_t* p) {
  const hn::Rebind<uint32_t, F32> wide;
  const hn::Rebind<int32_t, F32> wide_signed;
  const auto bits = hn::BitCast(wide, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(wide, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7FFF))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(wide, 0x40));
  const auto is_nan = hn::RebindMask(wide, hn::IsNaN(x));
  const auto result = hn::BitCast(wide_signed, hn::IfThenElse(is_nan, quiet, rounded));
  // Values below 65536 in a signed lane: the saturating narrowing is exact.
  hn::StoreU(hn::DemoteTo(U16(), result), U16(), p);
}

// Highway converts fp16 without infinities and NaN, 1.0.3 also without rounding, where the hardware has no instruction.
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
HWY_INLINE Vec load_f16(const uint16_t* p) {
  alignas(64) float values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) values[i] = static_cast<float>(decode_bits16(p[i], kF16Format));
  return load(values);
}

HWY_INLINE void store_f16(Vec x, uint16_t* p) {
  alignas(64) float values[kLanes];
  store(x, values);
  for (int64_t i = 0; i < kLanes; ++i) p[i] = encode_bits16(static_cast<double>(values[i]), kF16Format);
}
#else
HWY_INLINE Vec load_f16(const uint16_t* p) {
  const hn::Rebind<hwy::float16_t, F32> half;
  return hn::PromoteTo(kF32Tag, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(p)));
}

HWY_INLINE void store_f16(Vec x, uint16_t* p) {
  const hn::Rebind<hwy::float16_t, F32> half;
  hn::StoreU(hn::DemoteTo(half, x), half, reinterpret_cast<hwy::float16_t*>(p));
}
#endif

// Rows of n elements, `row_stride` elements apart, to rows of `padded` floats with zeros at the end; `padded` is a
// multiple of kLanes. A row that is not contiguous, and the last few elements, are gathered into a vector's worth of
// their own type first: nothing outside the row is read.
template <class T, class LoadVector>
HWY_INLINE void load_rows_as(const T* src, int64_t row_stride, int64_t stride, int64_t rows, int64_t n, float* dst,
                             int64_t padded, LoadVector load_vector) {
  for (int64_t row = 0; row < rows; ++row, dst += padded) {
    const T* const x = src + row * row_stride;
    int64_t i = 0;
    if (stride == 1) {
      for (; i + kLanes <= n; i += kLanes) store(load_vector(x + i), dst + i);
    }
    for (; i < padded; i += kLanes) {
      alignas(64) T gathered[16] = {};
      for (int64_t lane = 0; lane < kLanes && i + lane < n; ++lane) gathered[lane] = x[(i + lane) * stride];
      store(load_vector(gathered), dst + i);
    }
  }
}

// A function of its own, as all that work on whole rows are: inlined where they are called, they made up most of the
// machine code and of the time to compile it.
HWY_NOINLINE inline void load_rows(const void* src, DType dtype, int64_t row_stride, int64_t stride, int64_t rows,
                                   int64_t n, float* dst, int64_t padded) {
  switch (dtype) {
    case DType::kF32:
      return load_rows_as(static_cast<const float*>(src), row_stride, stride, rows, n, dst, padded,
                          [](const float* p) HWY_ATTR { return load(p); });
    case DType::kBF16:
      return load_rows_as(static_cast<const uint16_t*>(src), row_stride, stride, rows, n, dst, padded,
                          [](const uint16_t* p) HWY_ATTR { return load_bf16(p); });
    default:
      return load_rows_as(static_cast<const uint16_t*>(src), row_stride, stride, rows, n, dst, padded,
                          [](const uint16_t* p) HWY_ATTR { return load_f16(p); });
  }
}

HWY_INLINE void load_row(const void* src, DType dtype, int64_t stride, int64_t n, float* dst, int64_t padded) {
  load_rows(src, dtype, 0, stride, 1, n, dst, padded);
}

// The way back: rows of n floats, ld apart and readable up to the next multiple of kLanes.
template <class T, class StoreVector>
HWY_INLINE void store_rows_as(const float* src, int64_t ld, T* dst, int64_t row_stride, int64_t stride, int64_t rows,
                              int64_t n, StoreVector store_vector) {
  for (int64_t row = 0; row < rows; ++row, src += ld) {
    T* const x = dst + row * row_stride;
    int64_t i = 0;
    if (stride == 1) {
      for (; i + kLanes <= n; i += kLanes) store_vector(load(src + i), x + i);
    }
    for (; i < n; i += kLanes) {
      alignas(64) T scattered[16];
      store_vector(load(src + i), scattered);
      for (int64_t lane = 0; lane < kLanes && i + lane < n; ++lane) x[(i + lane) * stride] = scattered[lane];
    }
  }
}

HWY_NOINLINE inline void store_rows(const float* src, int64_t ld, void* dst, DType dtype, int64_t row_stride,
                                    int64_t stride, int64_t rows, int64_t n) {
  switch (dtype) {
    case DType::kF32:
      return store_rows_as(src, ld, static_cast<float*>(dst), row_stride, stride, rows, n,
                           [](Vec x, float* p) HWY_ATTR { store(x, p); });
    case DType::kBF16:
      return store_rows_as(src, ld, static_cast<uint16_t*>(dst), row_stride, stride, rows, n,
                           [](Vec x, uint16_t* p) HWY_ATTR { store_bf16(x, p); });
    default:
      return store_rows_as(src, ld, static_cast<uint16_t*>(dst), row_stride, stride, rows, n,
                           [](Vec x, uint16_t* p) HWY_ATTR { store_f16(x, p); });
  }
}

HWY_INLINE void store_row(const float* src, void* dst, DType dtype, int64_t stride, int64_t n) {
  store_rows(src, 0, dst, dtype, 0, stride, 1, n);
}

// dst[j * dst_stride + i] = src[i * src_stride + j] for i < rows, j < columns, both multiples of 4.
HWY_NOINLINE inline void transpose(const float* src, int64_t src_stride, int64_t rows, int64_t columns, float* dst,
                                   int64_t dst_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) dst[j * dst_stride + i] = src[i * src_stride + j];
  }
#else
  const hn::CappedTag<float, 4> d4;
  const hn::RepartitionToWide<decltype(d4)> d2;
  for (int64_t i = 0; i < rows; i += 4) {
    for (int64_t j = 0; j < columns; j += 4) {
      const float* s = src + i * src_stride + j;
      const auto r0 = hn::LoadU(d4, s);
      const auto r1 = hn::LoadU(d4, s + src_stride);
      const auto r2 = hn::LoadU(d4, s + 2 * src_stride);
      const auto r3 = hn::LoadU(d4, s + 3 * src_stride);
      // Pairs (r0, r1) and (r2, r3) interleaved, then their halves joined.
      const auto a_lo = hn::BitCast(d2, hn::InterleaveLower(d4, r0, r1));
      const auto a_hi = hn::BitCast(d2, hn::InterleaveUpper(d4, r0, r1));
      const auto b_lo = hn::BitCast(d2, hn::InterleaveLower(d4, r2, r3));
      const auto b_hi = hn::BitCast(d2, hn::InterleaveUpper(d4, r2, r3));
      float* t = dst + j * dst_stride + i;
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, a_lo, b_lo)), d4, t);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, a_lo, b_lo)), d4, t + dst_stride);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, a_hi, b_hi)), d4, t + 2 * dst_stride);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, a_hi, b_hi)), d4, t + 3 * dst_stride);
    }
  }
#endif
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
