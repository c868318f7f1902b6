// Products of chunk-sized matrices in fp32: slabs of operands in shared memory, 4 x 4 results in each thread.
//
// A slab holds up to 64 rows of a chunk, transposed: [depth][64]. The four rows of a group lie together, so that an
// operand of a thread is one load of 16 bytes, and group g of depth d lies at g ^ (d / 4 % 16): a warp that stores 16
// neighbouring vec4s of two rows, as they come from memory, meets every bank twice instead of 16 times.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/sequences.h"

namespace fastweight::cuda {

inline constexpr int kTileRows = 64;

struct Slab {
  float* data;

  __device__ __forceinline__ static int group_offset(int d, int group) {
    return d * kTileRows + ((group ^ ((d >> 2) & 15)) << 2);
  }
  __device__ __forceinline__ float& at(int d, int row) const { return data[group_offset(d, row >> 2) + (row & 3)]; }
  __device__ __forceinline__ float4& group(int d, int group) const {
    return *reinterpret_cast<float4*>(data + group_offset(d, group));
  }
};

// Numbers to the places of a slab that belong to four columns of a row.
__device__ __forceinline__ void put_columns(const Slab& slab, int row, int column, const float (&values)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) slab.at(column + e, row) = values[e];
}

__device__ __forceinline__ void unpack(const float4& x, float (&values)[4]) {
  values[0] = x.x;
  values[1] = x.y;
  values[2] = x.z;
  values[3] = x.w;
}

// c += a b^T
__device__ __forceinline__ void outer_product(const float (&a)[4], const float (&b)[4], float (&c)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = fmaf(a[i], b[j], c[i][j]);
  }
}

// Four elements from column `column` on of a row that begins at `offset`; 0 where it has no more.
__device__ __forceinline__ void load_row_vec4(const DeviceTensor& x, int64_t offset, int column, int width,
                                              float (&values)[4]) {
  const int64_t at = offset + column * x.strides[3];
  with_type(x.dtype, [&](auto type) {
    decode_vec4<type.value>(x.aligned_vec4 && column < width
                                ? load_vec4<type.value>(element_at(x.data, type.value, at))
                                : gather_vec4(x.data, type.value, at, x.strides[3], width - column),
                            values);
  });
}

// The same to a tensor.
__device__ __forceinline__ void store_row_vec4(const DeviceTensor& x, int64_t offset, int column, int width,
                                               const float (&values)[4]) {
  const int64_t at = offset + column * x.strides[3];
  if (x.aligned_vec4 && column < width) {
    with_type(x.dtype, [&](auto type) { store_vec4<type.value>(element_at(x.data, type.value, at), values); });
  } else {
    scatter_vec4(x.data, x.dtype, at, x.strides[3], width - column, values);
  }
}

// Calls use(row, column, values) for the vec4s of `rows` rows from column `first` on, as many columns as a row has in
// `columns`; what lies beyond `width` is 0. start(row) is the offset of a row of x, or below 0 for a row of zeros.
// Neighbouring threads have neighbouring vec4s, and the loads of kBatch vec4s of a thread are on their way at once.
template <class Start, class Use>
__device__ __forceinline__ void read_vec4s(const DeviceTensor& x, int rows, int first, int columns, int width,
                                           const Start& start, const Use& use) {
  constexpr int kBatch = 4;
  const int across = columns / 4, count = rows * across, step = blockDim.x;
  with_type(x.dtype, [&](auto type) {
    for (int base = threadIdx.x; base < count; base += kBatch * step) {
      RawVec4 raw[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int at = base + u * step, row = at / across, column = first + (at - row * across) * 4;
        raw[u] = {};
        const int64_t offset = at < count && column < width ? start(row) : int64_t{-1};
        if (offset < 0) continue;
        raw[u] = x.aligned_vec4
                     ? load_vec4<type.value>(element_at(x.data, type.value, offset + column))
                     : gather_vec4(x.data, type.value, offset + column * x.strides[3], x.strides[3], width - column);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int at = base + u * step, row = at / across;
        if (at >= count) continue;
        float values[4];
        decode_vec4<type.value>(raw[u], values);
        use(row, (at - row * across) * 4, values);
      }
    }
  });
}

// Where a chunk's rows of a tensor begin; below 0 beyond the chunk, and of an absent tensor.
__device__ __forceinline__ auto rows_of(const DeviceTensor& x, const ChunkSpan& span, int64_t head) {
  return [&x, &span, head](int row) {
    return x.present() && row < span.length ? row_offset(x, span.batch, span.begin + row, head) : int64_t{-1};
  };
}

// One number per token; `otherwise` where the tensor is absent, 0 beyond the chunk.
__device__ __forceinline__ void stage_numbers(const DeviceTensor& x, const ChunkSpan& span, int64_t head,
                                              float otherwise, int rows, float* numbers) {
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    float value = 0;
    if (row < span.length) {
      value = x.present() ? load_float(x.data, x.dtype, row_offset(x, span.batch, span.begin + row, head)) : otherwise;
    }
    numbers[row] = value;
  }
}

}  // namespace fastweight::cuda
