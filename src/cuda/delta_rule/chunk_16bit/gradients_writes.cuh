// Of the kernel in gradients.cuh: step 1, R and the inner products Y . v.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_shared.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// [16 value columns x 64 tokens] as C tiles.
using Columns = float[kChunkRows / 8][4];

// bD^T of the warp's columns as A fragments.
template <DType kType, int kK>
__device__ __forceinline__ void residuals(Shared<kK>& s, int warp, int lane, uint32_t (&bD)[kBlocks][4]) {
  Columns X = {};
#pragma unroll 4
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[4], b[kBlocks][4];
    s.state_rows().load_a(16 * warp, m, lane, a);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) s.keys().load_b(16 * n, m, lane, b[n]);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      mma<kType>(X[2 * n], a, b[n][0], b[n][1]);
      mma<kType>(X[2 * n + 1], a, b[n][2], b[n][3]);
    }
  }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    uint32_t v[4];
    s.value_rows().load_c_transposed(16 * m, warp, lane, v);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 16 * m + 8 * h + 2 * (lane % 4), n = 2 * m + h;
      const float2 low = unpack<kType>(v[2 * h]), high = unpack<kType>(v[2 * h + 1]);
      const float2 e = *reinterpret_cast<const float2*>(s.on_read + j);
      const float2 beta = *reinterpret_cast<const float2*>(s.beta + j);
      X[n][0] = beta.x * fmaf(-e.x, X[n][0], low.x);
      X[n][1] = beta.y * fmaf(-e.y, X[n][1], low.y);
      X[n][2] = beta.x * fmaf(-e.x, X[n][2], high.x);
      X[n][3] = beta.y * fmaf(-e.y, X[n][3], high.y);
    }
    pack_a<kType>(X[2 * m], X[2 * m + 1], bD[m]);
  }
}

// Y . v: the diagonal of v Y^T, in blocks of 16 tokens and halves of the columns.
template <DType kType, int kK>
__device__ __forceinline__ void dot_values(Shared<kK>& s, int block, int half, int lane) {
  constexpr int kSteps = Shape<kK>::kColumns / 32;
  float c[2][4] = {};
#pragma unroll
  for (int m = half * kSteps; m < (half + 1) * kSteps; ++m) {
    uint32_t a[4], b[4];
    s.value_rows().load_a(16 * block, m, lane, a);
    s.Y_rows().load_b_transposed(16 * m, block, lane, b);
    mma<kType>(c[0], a, b[0], b[1]);
    mma<kType>(c[1], a, b[2], b[3]);
  }
  const int g = lane / 4;
  if (g / 2 == lane % 4) {
    s.yv[half][16 * block + g] = g % 2 == 0 ? c[0][0] : c[0][1];
    s.yv[half][16 * block + g + 8] = g % 2 == 0 ? c[1][2] : c[1][3];
  }
}

// R^T = bD^T J^T of the warp's columns.
template <DType kType, int kK>
__device__ __forceinline__ void writes(Shared<kK>& s, int warp, int lane, const uint32_t (&bD)[kBlocks][4]) {
  Columns R = {};
  const LowerBlocks J = s.P;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int n = m; n < kBlocks; ++n) {
      uint32_t b[4];
      J.load_b(16 * n, m, lane, b);
      mma<kType>(R[2 * n], bD[m], b[0], b[1]);
      mma<kType>(R[2 * n + 1], bD[m], b[2], b[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    uint32_t a[4];
    pack_a<kType>(R[2 * m], R[2 * m + 1], a);
    s.R_rows().store_a(16 * warp, m, lane, a);
  }
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
