// Of the kernels of chunk_sm90 for one decay per head or none: the numbers of a token, and values less what the state
// returns.
#pragma once

#include "cuda/delta_rule/chunk_sm90/state_columns.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

constexpr int kTokenFactors = chunk_16bit::kTokenFactors<false>;
constexpr uint32_t kTotalBytes = 4 * sizeof(float);  // of e_n

// The columns of a C tile are tokens: its elements 0 and 2 belong to one, 1 and 3 to the next.
__device__ __forceinline__ float2 token_pair(const float* token, TokenFactor factor, int tile, int lane) {
  return column_pair(token + factor * kChunkRows, tile, lane);
}

// What bD^T = beta (v^T - e X) is made of beside X.
struct Values {
  Fragments<kTokenSteps> v;
  float2 on_x[kTokenTiles], beta[kTokenTiles];

  __device__ __forceinline__ void load(int m, const ValueTile& values, const float* token, int warp, int lane) {
    load_rows(m, values, warp, lane);
    load_numbers(m, token, lane);
  }
  __device__ __forceinline__ void load_rows(int m, const ValueTile& values, int warp, int lane) {
    values.load_c_transposed(16 * m, warp, lane, v[m]);
  }
  __device__ __forceinline__ void load_numbers(int m, const float* token, int lane) {
#pragma unroll
    for (int n = 2 * m; n < 2 * m + 2; ++n) {
      on_x[n] = token_pair(token, kOnKeyRead, n, lane);
      beta[n] = token_pair(token, kOnValue, n, lane);
    }
  }

  // Tokens [16 m, 16 m + 16) of bD^T, rounded.
  template <DType kType>
  __device__ __forceinline__ void correct(int m, const TokenSums& X, uint32_t (&bD)[4]) const {
    float D[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * m + h;
      const float2 low = unpack<kType>(v[m][2 * h]), high = unpack<kType>(v[m][2 * h + 1]);
      D[h][0] = beta[n].x * fmaf(-on_x[n].x, X[n][0], low.x);
      D[h][1] = beta[n].y * fmaf(-on_x[n].y, X[n][1], low.y);
      D[h][2] = beta[n].x * fmaf(-on_x[n].x, X[n][2], high.x);
      D[h][3] = beta[n].y * fmaf(-on_x[n].y, X[n][3], high.y);
    }
    pack_a<kType>(D[0], D[1], bD);
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
