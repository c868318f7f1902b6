// The inverse of unit lower triangular matrices by forward substitution.
#pragma once

#include "cuda/common/warp.cuh"

namespace fastweight::cuda {

// A transposed, so that 16 rows of a column are four loads: element (i, j) at [j][i]. Only i > j is read.
template <int kRows>
inline constexpr int kPitchOfLower = kRows + 4;

// T = (I + A)^-1, [kRows][kRows]: row i of a column is delta_ic - sum_{j < i} A_ij x_j. Warp w of kRows / 16 has
// columns [16 w, 16 w + 16), which are 0 above their diagonal block. Rows go in blocks of 16, whose first eight belong
// to a lane and the others to the lane 16 further on; a lane reads what itself or its partner wrote.
template <int kRows>
__device__ __forceinline__ void solve_unit_lower(const float* A, float* T, int warp, int lane) {
  constexpr int kStep = 16, kOwn = 8, kPitch = kPitchOfLower<kRows>;
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
      for (int j = kStep * warp; j < top; ++j) subtract(j, T[j * kRows + column]);
      if (half == 0) solve_own();
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float x_j = __shfl_sync(kAllLanes, x[j], lane % kStep);
        if (half == 1) subtract(top + j, x_j);
      }
      if (half == 1) solve_own();
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) T[(own + r) * kRows + column] = x[r];
    __syncwarp();
  }
}

}  // namespace fastweight::cuda
