// Rows of q and k, and of their gradients, in the gradients with one decay per head or none (gradients.cuh).
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_operands.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// A warpgroup's channels of q or k: a panel of the tile, or half of it.
template <class Block>
struct OwnChannels {
  PanelOfTokens tile;
  int first;  // of the panel's steps of 16

  __device__ __forceinline__ OwnChannels(const unsigned char* memory, int group)
      : tile(memory + (Block::kSharesPanel ? 0 : group * PanelOfTokens::kBytes)),
        first(Block::kSharesPanel ? group * (Block::kChannels / 16) : 0) {}

  __device__ __forceinline__ void load(int m, int warp, int lane, uint32_t (&x)[4]) const {
    tile.load_a(16 * warp, first + m, lane, x);
  }
  __device__ __forceinline__ void store(int m, int warp, int lane, const uint32_t (&x)[4]) const {
    tile.store_a(16 * warp, first + m, lane, x);
  }
};

// The lane's two rows of them, kept in registers or loaded each time.
template <class Block, bool kKept>
struct OwnRows {
  uint32_t kept[kKept ? Block::kChannels / 16 : 1][4];

  __device__ __forceinline__ void load(const OwnChannels<Block>& own, int warp, int lane) {
    if constexpr (kKept) {
#pragma unroll
      for (int m = 0; m < Block::kChannels / 16; ++m) own.load(m, warp, lane, kept[m]);
    }
  }
  __device__ __forceinline__ void get(const OwnChannels<Block>& own, int m, int warp, int lane,
                                      uint32_t (&x)[4]) const {
    if constexpr (kKept) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = kept[m][e];
    } else {
      own.load(m, warp, lane, x);
    }
  }
};

// Scales the lane's two rows, and puts their inner products with those of the channels into `dots`.
template <DType kType, class Block, bool kKept>
__device__ __forceinline__ void scale_and_dot(const OwnChannels<Block>& own, const OwnRows<Block, kKept>& rows,
                                              const float* factors, float sign, int warp, int lane,
                                              typename Block::Rows& sums, float* dots) {
  const int i = 16 * warp + lane / 4;
  const float factor[2] = {sign * factors[i], sign * factors[i + 8]};
  float dot[2] = {0, 0};
#pragma unroll
  for (int m = 0; m < Block::kChannels / 16; ++m) {
    uint32_t x[4];
    rows.get(own, m, warp, lane, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int half = e % 2;
      float* sum = &sums[2 * m + e / 2][2 * half];
      const float2 y = unpack<kType>(x[e]);
      sum[0] *= factor[half];
      sum[1] *= factor[half];
      dot[half] = fmaf(y.y, sum[1], fmaf(y.x, sum[0], dot[half]));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_over_lanes<4>(dot[half]);
    if (lane % 4 == 0) dots[i + 8 * half] = sum;
  }
}

// A head's share of dbeta of token i but for Y . v.
template <int kGroups>
__device__ __forceinline__ float reading(const GradientSums<kGroups>& s, int i) {
  return s.a_k.at(i) + s.row_of_A.at(i);
}

// q . dq and k . dk of two rows, over the heads of a group.
struct Along {
  float2 q = {}, k = {};

  template <int kGroups>
  __device__ __forceinline__ void add(const GradientSums<kGroups>& s, const GradientNumbers& numbers, int i,
                                      bool first) {
    if (first) q = k = make_float2(0, 0);
    const float* beta = numbers.token + kOnValue * kChunkRows;
    const auto q_at = [&](int at) { return s.row_of_P.at(at) + s.a_q.at(at); };
    const auto k_at = [&](int at) {
      float writing = s.b.at(at);
#pragma unroll
      for (int row = 0; row < chunk_16bit::kBlocks; ++row) writing += row >= at / 16 ? s.columns[row][at] : 0.0f;
      return fmaf(beta[at], reading(s, at), writing);
    };
    q = make_float2(q.x + q_at(i), q.y + q_at(i + 8));
    k = make_float2(k.x + k_at(i), k.y + k_at(i + 8));
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
