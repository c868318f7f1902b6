// What the adjoints of products with chunk matrices share. Threads stand as C / 4 rows by 16 columns of 4 x 4 results:
// (threadIdx.x / 16, threadIdx.x % 16).
#pragma once

#include "core/blocks_problem.h"
#include "cuda/blocks/tile.cuh"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda {

inline constexpr int kAcross = 16;
inline constexpr int kPitch = 4 * kAcross;  // of matrices that lie as they are, [row][column]

struct GridPlace {
  int row, column;  // in units of 4
};
__device__ __forceinline__ GridPlace grid_place() {
  return {static_cast<int>(threadIdx.x) / kAcross, static_cast<int>(threadIdx.x) % kAcross};
}

__device__ __forceinline__ float4& vec4_at(float* matrix, int row, int column) {
  return *reinterpret_cast<float4*>(matrix + row * kPitch + column);
}

// ---- Value heads of a key head --------------------------------------------------------------------------------------

// A block has a chunk of a key head and takes the value heads of its group one after the other.
struct ValueHead {
  int64_t item, key, value;
  bool first, last;  // of its group
};

__device__ __forceinline__ ValueHead value_head(int64_t item, int64_t key, int64_t i, int64_t group) {
  return {item, key, key * group + i, i == 0, i == group - 1};
}

// dk is the sum over a group. Where it has several heads, what there is so far waits in fp32 in scratch memory.
struct KeyGradient {
  DeviceTensor dk;        // [B, T, H, K]; optional
  float* sums = nullptr;  // [chunks][H][C][padded K]
  int32_t chunk_size = 0, head_dim_k = 0, padded_k = 0;
};

inline KeyGradient key_gradient(const TensorView& dk, const BlockSizes& sizes) {
  const auto width = static_cast<int32_t>(sizes.head_dim_k);
  return {device_tensor(dk), nullptr, static_cast<int32_t>(sizes.chunk_size), width, (width + 3) / 4 * 4};
}

// Of the scratch memory for `items` chunks of key heads.
inline size_t sum_bytes(const KeyGradient& gradient, const BlockSizes& sizes, int64_t items) {
  if (sizes.group == 1 || !gradient.dk.present()) return 0;
  return static_cast<size_t>(items * gradient.chunk_size * gradient.padded_k) * sizeof(float);
}

// Adds a head's share of four channels. A channel belongs to the same thread for all heads.
__device__ __forceinline__ void add_to_dk(const KeyGradient& gradient, const ChunkSpan& span, const ValueHead& head,
                                          int row, int column, float (&values)[4]) {
  if (!gradient.dk.present()) return;
  if (!head.first || !head.last) {
    float* const sum = gradient.sums + (head.item * gradient.chunk_size + row) * gradient.padded_k + column;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!head.first) values[e] += sum[e];
      if (!head.last) sum[e] = values[e];
    }
  }
  if (!head.last || row >= span.length) return;
  const DeviceTensor& dk = gradient.dk;
  store_row_vec4(dk, row_offset(dk, span.batch, span.begin + row, head.key), column, gradient.head_dim_k, values);
}

// One number per row to the caller, from what the 16 threads of the row have.
__device__ __forceinline__ void store_numbers(const DeviceTensor& x, const ChunkSpan& span, int64_t head,
                                              const GridPlace& at, const float (&numbers)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = sum_over_lanes<kAcross>(numbers[i]);
    const int row = 4 * at.row + i;
    if (at.column == 0 && row < span.length && x.present()) {
      store_float(x.data, x.dtype, row_offset(x, span.batch, span.begin + row, head), sum);
    }
  }
}

// ---- Chunk matrices -------------------------------------------------------------------------------------------------

// A chunk matrix [B, T, HV, C] without what stands above the diagonal, or on it. use(row, column, values) for its
// vec4s.
template <class Use>
__device__ __forceinline__ void read_lower(const DeviceTensor& x, const ChunkSpan& span, int64_t head, int chunk_size,
                                           bool diagonal, const Use& use) {
  read_vec4s(x, chunk_size, 0, chunk_size, chunk_size, rows_of(x, span, head),
             [&](int row, int column, float(&values)[4]) {
#pragma unroll
               for (int e = 0; e < 4; ++e) {
                 const int last = diagonal ? row : row - 1;
                 values[e] = column + e > last ? 0.0f : values[e];
               }
               use(row, column, values);
             });
}

// c = J^T G of a thread's place, from the rows of J that are not 0 there.
__device__ __forceinline__ void transposed_product(float* J, float* G, int rows, const GridPlace& at,
                                                   float (&c)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0;
#pragma unroll 4
  for (int m = 4 * at.row; m < rows; ++m) {
    float a[4], b[4];
    unpack(vec4_at(J, m, 4 * at.row), a);
    unpack(vec4_at(G, m, 4 * at.column), b);
    outer_product(a, b, c);
  }
}

// dA = -slower(Z J^T) to the caller, where Z is in the registers of the threads on and below the diagonal. J_columns
// holds J^T; Z_columns is free when the function is entered. Two barriers.
__device__ __forceinline__ void store_inverse_adjoint(const DeviceTensor& da, const ChunkSpan& span, int64_t head,
                                                      int chunk_size, const GridPlace& at, const float (&Z)[4][4],
                                                      const Slab& J_columns, const Slab& Z_columns) {
  const bool in_matrix = 4 * at.column < chunk_size, computes = at.column <= at.row;
  if (computes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) Z_columns.at(4 * at.column + j, 4 * at.row + i) = Z[i][j];
    }
  }
  __syncthreads();
  float c[4][4] = {};
  if (computes) {
#pragma unroll 4
    for (int m = 0; m < 4 * at.column + 4; ++m) {
      float a[4], b[4];
      unpack(Z_columns.group(m, at.row), a);
      unpack(J_columns.group(m, at.column), b);
      outer_product(a, b, c);
    }
  }
  if (in_matrix) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * at.row + i;
      if (row >= span.length) continue;
      float values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] = 4 * at.column + j < row ? -c[i][j] : 0.0f;
      store_row_vec4(da, row_offset(da, span.batch, span.begin + row, head), 4 * at.column, chunk_size, values);
    }
  }
  __syncthreads();  // both slabs have been read
}

}  // namespace fastweight::cuda
