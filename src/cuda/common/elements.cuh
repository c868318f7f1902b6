// Elements between memory and fp32. The element type is a run-time property of a tensor, the same for all threads;
// `with_type` turns it into a compile-time one around a group of accesses.
//
// A vec4 is four consecutive elements. Loading is apart from decoding: a vec4 that is only loaded does not make its
// thread wait, so that many loads are on their way before the first is used.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/tensor.h"

namespace fastweight::cuda {

// Bits as they lay in memory: four words for fp32, two for the 16-bit types. All zeros decode to 0.
struct RawVec4 {
  uint32_t words[4];
};

// body(std::integral_constant<DType, dtype>) for fp32, bf16 and fp16.
template <class Body>
__device__ __forceinline__ void with_type(DType dtype, const Body& body) {
  if (dtype == DType::kF32) {
    body(std::integral_constant<DType, DType::kF32>());
  } else if (dtype == DType::kBF16) {
    body(std::integral_constant<DType, DType::kBF16>());
  } else {
    body(std::integral_constant<DType, DType::kF16>());
  }
}

// The same on the host, for a template parameter: body.template operator()<dtype>().
template <class Body>
void with_element_type(DType dtype, const Body& body) {
  if (dtype == DType::kF32) {
    body.template operator()<DType::kF32>();
  } else if (dtype == DType::kBF16) {
    body.template operator()<DType::kBF16>();
  } else {
    body.template operator()<DType::kF16>();
  }
}

// Bytes before element `offset`.
FW_HOST_DEVICE inline int64_t byte_offset(DType dtype, int64_t offset) {
  return offset << (dtype == DType::kF32 ? 2 : 1);
}

__device__ __forceinline__ const char* element_at(const void* data, DType dtype, int64_t offset) {
  return static_cast<const char*>(data) + byte_offset(dtype, offset);
}
__device__ __forceinline__ char* element_at(void* data, DType dtype, int64_t offset) {
  return static_cast<char*>(data) + byte_offset(dtype, offset);
}

// The offset of x[batch, token, head] in elements.
__device__ __forceinline__ int64_t row_offset(const DeviceTensor& x, int64_t batch, int64_t token, int64_t head) {
  return batch * x.strides[0] + token * x.strides[1] + head * x.strides[2];
}

// One element ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float decode_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float decode_fp16(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ uint32_t encode_bf16(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ __forceinline__ uint32_t encode_fp16(float value) { return __half_as_ushort(__float2half_rn(value)); }

__device__ __forceinline__ uint32_t load_bits(const void* data, DType dtype) {
  return dtype == DType::kF32 ? *static_cast<const uint32_t*>(data) : *static_cast<const uint16_t*>(data);
}

__device__ __forceinline__ float decode(uint32_t bits, DType dtype) {
  return dtype == DType::kF32 ? __uint_as_float(bits) : dtype == DType::kBF16 ? decode_bf16(bits) : decode_fp16(bits);
}

__device__ __forceinline__ float load_float(const void* data, DType dtype, int64_t offset) {
  return decode(load_bits(element_at(data, dtype, offset), dtype), dtype);
}

__device__ __forceinline__ void store_float(void* data, DType dtype, int64_t offset, float value) {
  char* address = element_at(data, dtype, offset);
  if (dtype == DType::kF32) {
    *reinterpret_cast<float*>(address) = value;
  } else {
    const uint32_t bits = dtype == DType::kBF16 ? encode_bf16(value) : encode_fp16(value);
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(bits);
  }
}

// Vectors of four that lie together, aligned to their size
// ------------------------------------------------------------------------

template <DType kType>
__device__ __forceinline__ RawVec4 load_vec4(const void* address) {
  if constexpr (kType == DType::kF32) {
    const uint4 words = *static_cast<const uint4*>(address);
    return {words.x, words.y, words.z, words.w};
  } else {
    const uint2 words = *static_cast<const uint2*>(address);
    return {words.x, words.y, 0, 0};
  }
}

template <DType kType>
__device__ __forceinline__ void decode_vec4(const RawVec4& raw, float* values) {
  if constexpr (kType == DType::kF32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(raw.words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = raw.words[i] & 0xffffu, high = raw.words[i] >> 16;
      values[2 * i] = kType == DType::kBF16 ? decode_bf16(low) : decode_fp16(low);
      values[2 * i + 1] = kType == DType::kBF16 ? decode_bf16(high) : decode_fp16(high);
    }
  }
}

template <DType kType>
__device__ __forceinline__ void store_vec4(void* address, const float* values) {
  if constexpr (kType == DType::kF32) {
    *static_cast<float4*>(address) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = kType == DType::kBF16 ? encode_bf16(values[i]) : encode_fp16(values[i]);
    *static_cast<uint2*>(address) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
  }
}

// Four elements `stride` apart, of which the first `count` exist
// --------------------------------------------------------

// In the form of load_vec4.
__device__ __forceinline__ RawVec4 gather_vec4(const void* data, DType dtype, int64_t offset, int64_t stride,
                                               int count) {
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits[i] = i < count ? load_bits(element_at(data, dtype, offset + i * stride), dtype) : 0;
  }
  if (dtype == DType::kF32) return {bits[0], bits[1], bits[2], bits[3]};
  return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, 0, 0};
}

// Elements [first, first + 4) of a row of `width` that begins at `row`; zeros beyond the end. In the form of load_vec4.
__device__ __forceinline__ RawVec4 load_part(const DeviceTensor& x, const char* row, int first, int width) {
  RawVec4 raw{};
  if (first >= width) return raw;
  const int64_t stride = x.strides[3];
  if (x.aligned_vec4) {
    with_type(x.dtype, [&](auto type) { raw = load_vec4<type.value>(row + byte_offset(type.value, first)); });
  } else {
    raw = gather_vec4(row, x.dtype, first * stride, stride, width - first);
  }
  return raw;
}

__device__ __forceinline__ void scatter_vec4(void* data, DType dtype, int64_t offset, int64_t stride, int count,
                                             const float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) store_float(data, dtype, offset + i * stride, values[i]);
  }
}

}  // namespace fastweight::cuda
