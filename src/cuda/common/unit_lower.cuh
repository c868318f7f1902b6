// The inverse of unit lower triangular matrices: by forward substitution, and in blocks on tensor cores.
#pragma once

#include "cuda/common/split.cuh"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda {

// A transposed, so that 16 rows of a column are four loads: element (i, j) at [j][i]. Only i > j is read.
template <int kRows>
inline constexpr int kPitchOfLower = kRows + 4;

// J = (I + A)^-1: row i of a column is delta_ic - sum_{j < i} A_ij x_j. Warp w of kRows / 16 has
// columns [16 w, 16 w + 16), which are 0 above their diagonal block. Rows go in blocks of 16, whose first eight belong
// to a lane and the others to the lane 16 further on; a lane reads what itself or its partner wrote.
template <int kRows, int kPitch = kPitchOfLower<kRows>, int kPitchOfJ = kRows>
__device__ __forceinline__ void solve_unit_lower(const float* A, float* J, int warp, int lane) {
  constexpr int kStep = 16, kOwn = 8;
  const int column = kStep * warp + lane % kStep, half = lane / kStep;
#pragma unroll 1
  for (int top = 0; top < kRows; top += kStep) {
    const int own = top + half * kOwn;  // the lane's first row
    float x[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) x[r] = own + r == column ? 1.0f : 0.0f;
    const auto subtract = [&](int j, float x_j) {
      const float4 low = *reinterpret_cast<const float4*>(A + j * kPitch + own);
      const float4 high = *reinterpret_cast<const float4*>(A + j * kPitch + own + 4);
      const float a[kOwn] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int r = 0; r < kOwn; ++r) x[r] = fmaf(-a[r], x_j, x[r]);
    };
    // Within eight rows of one lane.
    const auto solve_own = [&]() {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
#pragma unroll
        for (int r = j + 1; r < kOwn; ++r) x[r] = fmaf(-A[(own + j) * kPitch + own + r], x[j], x[r]);
      }
    };
    if (top >= kStep * warp) {
#pragma unroll 4
      for (int j = kStep * warp; j < top; ++j) subtract(j, J[j * kPitchOfJ + column]);
      if (half == 0) solve_own();
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float x_j = __shfl_sync(kAllLanes, x[j], lane % kStep);
        if (half == 1) subtract(top + j, x_j);
      }
      if (half == 1) solve_own();
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) J[(own + r) * kPitchOfJ + column] = x[r];
    __syncwarp();
  }
}

// The pitches of A and J of 64 rows in blocks put into different banks what a warp reads at once: of A the pairs along
// a column, of J the elements of every second row.
inline constexpr int kPitchOfA64 = 72;
inline constexpr int kPitchOfJ64 = 68;

// Blocks of 16 x 16, as left operands of split products: a strip of two fragments. See split.cuh for the order of the
// inner index.
using LeftBlock = SplitTile[2];
using BlockSum = SplitSum[2];

__device__ __forceinline__ void load_left(const float* J, int row, int column, int lane, LeftBlock& left) {
  const float* x = J + (16 * row + lane / 4) * kPitchOfJ64 + 16 * column + 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 upper = *reinterpret_cast<const float2*>(x + 8 * m);
    const float2 lower = *reinterpret_cast<const float2*>(x + 8 * m + 8 * kPitchOfJ64);
    const float c[4] = {upper.x, upper.y, lower.x, lower.y};
    left[m] = split_tile(c);
  }
}

__device__ __forceinline__ void to_left(const BlockSum& sum, LeftBlock& left) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float c[4] = {sum[n].total(0), sum[n].total(1), sum[n].total(2), sum[n].total(3)};
    left[n] = split_tile(c);
  }
}

// sum += left times block (row, column) of A, or of J.
__device__ __forceinline__ void multiply_by_A(BlockSum& sum, const LeftBlock& left, const float* A, int row, int column,
                                              int lane) {
  const float* x = A + (16 * column + lane / 4) * kPitchOfA64 + 16 * row + 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply(sum[n], left[m], *reinterpret_cast<const float2*>(x + 8 * n * kPitchOfA64 + 8 * m));
    }
  }
}
__device__ __forceinline__ void multiply_by_J(BlockSum& sum, const LeftBlock& left, const float* J, int row, int column,
                                              int lane) {
  const float* x = J + (16 * row + 2 * (lane % 4)) * kPitchOfJ64 + 16 * column + lane / 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* pair = x + 8 * m * kPitchOfJ64 + 8 * n;
      multiply(sum[n], left[m], make_float2(pair[0], pair[kPitchOfJ64]));
    }
  }
}

__device__ __forceinline__ void store_negative(float* J, int row, int column, const BlockSum& sum, int lane) {
  float* x = J + (16 * row + lane / 4) * kPitchOfJ64 + 16 * column + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    *reinterpret_cast<float2*>(x + 8 * n) = make_float2(-sum[n].total(0), -sum[n].total(1));
    *reinterpret_cast<float2*>(x + 8 * n + 8 * kPitchOfJ64) = make_float2(-sum[n].total(2), -sum[n].total(3));
  }
}

// J = (I + A)^-1 of 64 rows, by a block of four warps or more. The blocks of 16 on the diagonal by substitution; then
// the inverse of
//
//     [ X 0 ]                  [ X^-1           0    ]
//     [ Z Y ]        is        [ -Y^-1 Z X^-1   Y^-1 ]
//
// once for the pairs of 16 and once for the 32 that they make, in split products. J is not written above its diagonal
// blocks. Reads what was written before a barrier; the caller's barrier follows.
__device__ __forceinline__ void invert_unit_lower(const float* A, float* J, int warp, int lane) {
  if (warp < 4) {
    solve_unit_lower<16, kPitchOfA64, kPitchOfJ64>(A + 16 * warp * (kPitchOfA64 + 1), J + 16 * warp * (kPitchOfJ64 + 1),
                                                   0, lane);
  }
  __syncthreads();
  if (warp < 2) {
    const int row = 2 * warp + 1, column = 2 * warp;
    LeftBlock left;
    BlockSum y, t;
    load_left(J, row, row, lane, left);
    multiply_by_A(y, left, A, row, column, lane);
    to_left(y, left);
    multiply_by_J(t, left, J, column, column, lane);
    store_negative(J, row, column, t, lane);
  }
  __syncthreads();
  if (warp < 4) {
    const int row = 2 + warp % 2, column = warp / 2;
    BlockSum t;
    for (int inner = column; inner < 2; ++inner) {
      LeftBlock left;
      BlockSum y;
      for (int b = 2; b <= row; ++b) {
        load_left(J, row, b, lane, left);
        multiply_by_A(y, left, A, b, inner, lane);
      }
      to_left(y, left);
      multiply_by_J(t, left, J, inner, column, lane);
    }
    store_negative(J, row, column, t, lane);
  }
}

}  // namespace fastweight::cuda
