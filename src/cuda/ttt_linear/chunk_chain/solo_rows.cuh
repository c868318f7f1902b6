// Rows of which four lanes of a warp have all columns, and what a lane's numbers are made of.
#pragma once

#include "cuda/ttt_linear/chunk_chain/chain.cuh"
#include "cuda/ttt_linear/chunk_rows.cuh"

namespace fastweight::cuda::ttt {
namespace {

__device__ __forceinline__ void load_four(const float4& from, float (&values)[4]) {
  values[0] = from.x;
  values[1] = from.y;
  values[2] = from.z;
  values[3] = from.w;
}
__device__ __forceinline__ float4 four_of(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }

// Sums over the four lanes of a row of numbers of tokens g and g + 8; the lane gets those of the half that is returned.
template <int kCount>
__device__ __forceinline__ int sum_over_quad(const float (&own)[2][kCount], const Lane& at, float (&total)[kCount]) {
  const int half = at.t % 2;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    total[i] = half == 0 ? own[0][i] : own[1][i];
    total[i] += __shfl_xor_sync(kAllLanes, half == 0 ? own[1][i] : own[0][i], 1);
    total[i] += __shfl_xor_sync(kAllLanes, total[i], 2);
  }
  return half;
}

constexpr int kSoloTiles = kSoloDim / kWarpColumns;  // of 16 columns, in the order of LaneRows

// What a lane has of a matrix [16 tokens x 64]; column 4t + e of tile w of tokens g and g + 8.
using SoloRows = float[kSoloTiles][2][4];
__device__ __forceinline__ float& element(SoloRows& x, int w, int half, int e) { return x[w][e / 2][2 * half + e % 2]; }

// The lane's columns of a tile of a row in shared memory.
__device__ __forceinline__ void four_of_tile(const float* row, int tile, const Lane& at, float (&values)[4]) {
  load_four(*reinterpret_cast<const float4*>(&row[kWarpColumns * tile + 4 * at.t]), values);
}

// The norm's parameters to shared memory, by all threads of the block.
__device__ __forceinline__ void load_norm(const DeviceProblem& p, int head, float* w, float* b) {
  for (int i = static_cast<int>(threadIdx.x); i < kSoloDim; i += static_cast<int>(blockDim.x)) {
    w[i] = load_float(p.w.data, p.w.dtype, head * p.w.strides[0] + i * p.w.strides[1]);
    b[i] = load_float(p.b.data, p.b.dtype, head * p.b.strides[0] + i * p.b.strides[1]);
  }
}

// Sums over the columns of rows g and g + 8 of numbers that the lane has in parts.
template <int kCount>
__device__ __forceinline__ void sum_over_columns(const Lane& at, float (&sums)[2][kCount]) {
  float total[kCount];
  const int half = sum_over_quad(sums, at, total);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float other = __shfl_xor_sync(kAllLanes, total[i], 1);
    sums[0][i] = half == 0 ? total[i] : other;
    sums[1][i] = half == 0 ? other : total[i];
  }
}

// What the lane has of both rows, less the rows' means.
__device__ __forceinline__ void subtract_means(const float (&sums)[2], SoloRows& x) {
#pragma unroll
  for (int i = 0; i < 8 * kSoloTiles; ++i) {
    float& value = element(x, i / 8, i / 4 % 2, i % 4);
    value = fmaf(-1.0f / kSoloDim, sums[i / 4 % 2], value);
  }
}

// x - m(x); m(x) and 1 / sqrt(variance + eps) of both rows.
__device__ __forceinline__ void center(const Lane& at, float eps, SoloRows& x, float (&means)[2], float (&r)[2]) {
  float sums[2][1] = {}, squares[2][1] = {};
#pragma unroll
  for (int i = 0; i < 8 * kSoloTiles; ++i) sums[i / 4 % 2][0] += element(x, i / 8, i / 4 % 2, i % 4);
  sum_over_columns(at, sums);
  subtract_means({sums[0][0], sums[1][0]}, x);
#pragma unroll
  for (int i = 0; i < 8 * kSoloTiles; ++i) {
    const float d = element(x, i / 8, i / 4 % 2, i % 4);
    squares[i / 4 % 2][0] = fmaf(d, d, squares[i / 4 % 2][0]);
  }
  sum_over_columns(at, squares);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    means[half] = 1.0f / kSoloDim * sums[half][0];
    r[half] = rsqrt_approx(fmaf(squares[half][0], 1.0f / kSoloDim, eps));
  }
}

}  // namespace
}  // namespace fastweight::cuda::ttt
