// The inverse J of a unit lower triangular matrix I + A of 64 rows by a warpgroup: A comes as C tiles, and J leaves block by
// block.
//
//     [ X 0 ]                  [ X^-1           0    ]
//     [ Z Y ]        is        [ -Y^-1 Z X^-1   Y^-1 ]
//
// goes up from 8 rows to 64: up to 16 within a warp in fp32, then in split products (common/split.cuh). Who runs the steps
// puts barriers of the warpgroup between them and says where the blocks of J go:
//
//     store_A
//     -- invert_diagonal    without a barrier before it where the warp itself stored its block
//     -- merge_16           by warps 1 and 3; store_diagonal by warps 0 and 2
//     -- multiply_Z
//     -- merge_32
#pragma once

#include "cuda/common/unit_lower.cuh"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda::chunk_sm90 {

// A block of 16 x 16 numbers in shared memory, transposed: element (i, j) in row j. Places differ by constants, which takes
// fewer instructions than a pattern without any conflicts; what is read across rows has none, what is read along them few.
struct TransposedBlock {
  static constexpr int kPitch = 20, kFloats = 16 * kPitch;
  float* data;

  // Block n of those that begin at `memory`.
  __device__ __forceinline__ TransposedBlock(float* memory, int n) : data(memory + n * kFloats) {}

  __device__ __forceinline__ float& at(int i, int j) const { return data[j * kPitch + i]; }
  // Elements (i, j) and (i + 1, j), i even; four of them, i a multiple of 4.
  __device__ __forceinline__ float2& pair(int i, int j) const { return *reinterpret_cast<float2*>(&at(i, j)); }
  __device__ __forceinline__ float4& vec4(int i, int j) const { return *reinterpret_cast<float4*>(&at(i, j)); }

  // C tiles of a warp: the block's columns [8 n, 8 n + 8).
  __device__ __forceinline__ float& at_tile(int n, int lane, int e) const {
    return at(lane / 4 + e / 2 * 8, 8 * n + 2 * (lane % 4) + e % 2);
  }
  __device__ __forceinline__ void store(int n, int lane, const float (&c)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) at_tile(n, lane, e) = c[e];
  }
  __device__ __forceinline__ void load(int n, int lane, float (&c)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] = at_tile(n, lane, e);
  }
};

__device__ __forceinline__ void load_left(const TransposedBlock& block, int lane, LeftBlock& left) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float c[4];
    block.load(m, lane, c);
    left[m] = split_tile(c);
  }
}

// sum += left right
__device__ __forceinline__ void multiply(BlockSum& sum, const LeftBlock& left, const TransposedBlock& right, int lane) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply(sum[n], left[m], right.pair(8 * m + 2 * (lane % 4), 8 * n + lane / 4));
  }
}

template <int kSign>
__device__ __forceinline__ void totals(const BlockSum& sum, float (&c)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = kSign * sum[n].total(e);
  }
}

// The inverse of I + A in place of A, of which only what lies below the diagonal is read, by one warp. Eight lanes have a
// column each: first of the two blocks of 8 on the diagonal, then two rows each of the block below.
__device__ __forceinline__ void invert_block(const TransposedBlock& A, int lane) {
  const int column = lane % 8, quarter = lane / 8, half = quarter % 2 * 8;
  float x[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) x[r] = r == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < 7; ++j) {
    const float4 low = A.vec4(half, half + j), high = A.vec4(half + 4, half + j);
    const float a[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int r = j + 1; r < 8; ++r) x[r] = fmaf(-a[r], x[j], x[r]);
  }
  float2 z = make_float2(0, 0), y = make_float2(0, 0);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float x_j = __shfl_sync(kAllLanes, x[j], column);
    const float2 a = A.pair(8 + 2 * quarter, j);
    z.x = fmaf(a.x, x_j, z.x);
    z.y = fmaf(a.y, x_j, z.y);
  }
  __syncwarp();  // all lanes have read A
  if (quarter < 3) {
    const bool above = quarter == 2;  // the diagonal: zeros
    const int i = above ? 0 : half, j = (above ? 8 : half) + column;
    A.vec4(i, j) = above ? make_float4(0, 0, 0, 0) : make_float4(x[0], x[1], x[2], x[3]);
    A.vec4(i + 4, j) = above ? make_float4(0, 0, 0, 0) : make_float4(x[4], x[5], x[6], x[7]);
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float z_j = __shfl_sync(kAllLanes, j % 2 == 0 ? z.x : z.y, column + j / 2 * 8);
    const float2 a = A.pair(8 + 2 * quarter, 8 + j);
    y.x = fmaf(-a.x, z_j, y.x);
    y.y = fmaf(-a.y, z_j, y.y);
  }
  A.pair(8 + 2 * quarter, column) = y;
  __syncwarp();
}

struct alignas(16) InverseScratch {
  float4 A[12][kWarpSize];                       // C tiles below the diagonal blocks, a number for every lane
  float diagonal[4 * TransposedBlock::kFloats];  // blocks of A, then of J
  float below[2 * TransposedBlock::kFloats];     // J_10 and J_32
  float product[4 * TransposedBlock::kFloats];   // Z X^-1: those of 16 rows in blocks 0 and 2, then all four of 32

  // Where J_ij lies, i and j less than two blocks apart.
  __device__ __forceinline__ TransposedBlock block_of_J(int i, int j) {
    return i == j ? TransposedBlock(diagonal, i) : TransposedBlock(below, i / 2);
  }
};

// Results is a type with J(i, j, tiles), which takes two C tiles of a block of 16 x 16.
struct InverseSteps {
  InverseScratch& s;
  int warp, lane;  // within the warpgroup

  // Two C tiles of block (i, j) of A. Of blocks on the diagonal only what is below it counts.
  template <bool kOnDiagonal>
  __device__ __forceinline__ void store_A(int i, int j, const float (&c)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (kOnDiagonal) {
        TransposedBlock(s.diagonal, i).store(n, lane, c[n]);
      } else {
        tile_of_A(i, 2 * j + n) = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
      }
    }
  }

  // The warp's block on the diagonal.
  __device__ __forceinline__ void invert_diagonal() const {
    __syncwarp();
    invert_block(TransposedBlock(s.diagonal, warp), lane);
  }

  // All of them leave, two by either of warps 0 and 2.
  template <class Results>
  __device__ __forceinline__ void store_diagonal(const Results& results) const {
#pragma unroll 1
    for (int i = warp; i < warp + 2; ++i) {
      float c[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) s.block_of_J(i, i).load(n, lane, c[n]);
      results.J(i, i, c);
    }
  }

  // J_10 and J_32, by warps 1 and 3.
  template <class Results>
  __device__ __forceinline__ void merge_16(const Results& results) const {
    const TransposedBlock product(s.product, warp - 1);
    LeftBlock left;
    load_A(warp, warp - 1, left);
    BlockSum sum;
    multiply(sum, left, s.block_of_J(warp - 1, warp - 1), lane);
    float c[2][4];
    totals<1>(sum, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) product.store(n, lane, c[n]);
    __syncwarp();
    BlockSum last;
    load_left(s.block_of_J(warp, warp), lane, left);
    multiply(last, left, product, lane);
    totals<-1>(last, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) s.block_of_J(warp, warp - 1).store(n, lane, c[n]);
    results.J(warp, warp - 1, c);
  }

  // The four blocks of Z X^-1, one by each warp.
  __device__ __forceinline__ void multiply_Z() const {
    const int i = 2 + warp % 2, j = warp < 2 ? 1 : 0;
    BlockSum sum;
#pragma unroll 1
    for (int b = j; b < 2; ++b) {
      LeftBlock left;
      load_A(i, b, left);
      multiply(sum, left, s.block_of_J(b, j), lane);
    }
    float c[2][4];
    totals<1>(sum, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) TransposedBlock(s.product, 2 * (i - 2) + j).store(n, lane, c[n]);
  }

  // J_30, J_31, J_20 and J_21, by the four warps.
  template <class Results>
  __device__ __forceinline__ void merge_32(const Results& results) const {
    const int i = 3 - warp / 2, j = warp % 2;
    BlockSum sum;
#pragma unroll 1
    for (int b = 2; b <= i; ++b) {
      LeftBlock left;
      load_left(s.block_of_J(i, b), lane, left);
      multiply(sum, left, TransposedBlock(s.product, 2 * (b - 2) + j), lane);
    }
    float c[2][4];
    totals<-1>(sum, c);
    results.J(i, j, c);
  }

 private:
  // Tile n of 16 rows of A, below their diagonal block.
  __device__ __forceinline__ float4& tile_of_A(int rows, int n) const { return s.A[rows * (rows - 1) + n][lane]; }

  __device__ __forceinline__ void load_A(int i, int j, LeftBlock& left) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float4 x = tile_of_A(i, 2 * j + m);
      const float c[4] = {x.x, x.y, x.z, x.w};
      left[m] = split_tile(c);
    }
  }
};

}  // namespace fastweight::cuda::chunk_sm90
