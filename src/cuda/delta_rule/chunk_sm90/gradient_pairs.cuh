// Step 2 of the gradients with one decay per head or none (gradients.cuh): pairs of tokens.
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_operands.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// What a warpgroup makes of its columns of pairs. kFollows: factors and sP come when they are needed, not before.
template <DType kType, class Block, bool kFollows>
struct GradientPairs {
  static constexpr int kPairBlocks = Block::kPairColumns / 16;
  using Pairs = typename Block::Pairs;
  const GradientArgs& args;
  typename Block::Shared& s;
  int group, warp, lane;  // the warp within the warpgroup

  // By what the products of step 2 are multiplied: numbers of the lane's two rows, and, of its pairs, the decay from
  // one token to the other and the norm of the latter. Also sP of these pairs.
  struct PairFactors {
    float2 gamma, rstd, beta, on_P;
    Pairs of_pair;
    Fragments<kPairBlocks> sP;
  };

  __device__ __forceinline__ void load_row_factors(const GradientNumbers& numbers, PairFactors& factors) const {
    const int i = 16 * warp + lane / 4;
    const auto rows = [&](const float* of) { return make_float2(of[i], of[i + 8]); };
    factors.gamma = rows(numbers.row + chunk_16bit::kGamma * kChunkRows);
    factors.rstd = rows(numbers.row + chunk_16bit::kRstdOfK * kChunkRows);
    factors.beta = rows(numbers.token + kOnValue * kChunkRows);
    const float2 rstd_of_q = rows(numbers.row + chunk_16bit::kRstdOfQ * kChunkRows);
    const float scale = args.chunk.problem.scale;
    factors.on_P = make_float2(scale * rstd_of_q.x, scale * rstd_of_q.y);
  }

  __device__ __forceinline__ void make_pair_factors(const GradientNumbers& numbers, int block,
                                                    PairFactors& factors) const {
    const float* row = numbers.row + Block::kPairColumns * group;
    const float2 gamma_i = factors.gamma;
#pragma unroll
    for (int n = 2 * block; n < 2 * block + 2; ++n) {
      const float2 gamma_j = column_pair(row + chunk_16bit::kGamma * kChunkRows, n, lane);
      const float2 rstd_j = column_pair(row + chunk_16bit::kRstdOfK * kChunkRows, n, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool right = e % 2 == 1, lower = e / 2 == 1;
        factors.of_pair[n][e] = (right ? rstd_j.y : rstd_j.x) *
                                exp2_approx((lower ? gamma_i.y : gamma_i.x) - (right ? gamma_j.y : gamma_j.x));
      }
    }
  }

  // M of the warpgroup's columns of pairs, and what the lane's two rows have of the sums.
  struct PairSums {
    Pairs M;
    float2 of_P = {}, of_A = {}, below = {};
  };

  // Step 2 for blocks [kFrom, kTo) of the warpgroup's columns of pairs: dP becomes P' in the place of sP, dA becomes A' + A'^T,
  // and both become sums of M. Without a branch on what products on their way have to do with: columns above the diagonal
  // give zeros.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void make_pairs(const GradientNumbers& numbers, PairFactors& factors, const Pairs& dP,
                                             const Pairs& dA, const Pairs& kk, PairSums& sums) const {
    const LowerTile P(s.P), A(s.A);
    const int i = 16 * warp + lane / 4;
    const float2 rstd_i = factors.rstd, on_P = factors.on_P, beta = factors.beta;
#pragma unroll
    for (int block = kFrom; block < kTo; ++block) {
      const int m = kPairBlocks * group + block;
      if constexpr (kFollows) {
        make_pair_factors(numbers, block, factors);
        P.load_a(16 * warp, m, lane, factors.sP[block]);
      }
      uint32_t p[4], a[4];
      float p_operand[2][4], a_operand[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = 2 * block + h, j = 16 * kPairBlocks * group + 8 * n + 2 * (lane % 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool right = e % 2 == 1, lower = e / 2 == 1;
          const int distance = i + (lower ? 8 : 0) - j - (right ? 1 : 0);
          const float2 pair = unpack<kType>(factors.sP[block][2 * h + e / 2]);
          const float f = factors.of_pair[n][e];
          p_operand[h][e] = distance >= 0 ? (lower ? on_P.y : on_P.x) * f * dP[n][e] : 0.0f;
          const float of_p = distance >= 0 ? dP[n][e] * (right ? pair.y : pair.x) : 0.0f;
          const float x = -(dA[n][e] * ((lower ? rstd_i.y : rstd_i.x) * f)), b = lower ? beta.y : beta.x;
          a_operand[h][e] = distance >= 1 ? b * x : 0.0f;
          const float of_a = distance >= 1 ? x * kk[n][e] : 0.0f;
          sums.M[n][e] = fmaf(b, of_a, of_p);
          (lower ? sums.of_P.y : sums.of_P.x) += of_p;
          (lower ? sums.of_A.y : sums.of_A.x) += of_a;
          (lower ? sums.below.y : sums.below.x) += m < warp ? sums.M[n][e] : 0.0f;
        }
      }
      pack_a<kType>(p_operand[0], p_operand[1], p);
      P.store_a(16 * warp, m, lane, p);
      pack_a<kType>(a_operand[0], a_operand[1], a);
      if (m < warp) {
        A.store_c_transposed(16 * m, warp, lane, a);
      } else {  // strictly lower: the transposed block has its elements where this one has zeros
        a[0] |= transpose_8x8(a[0]);
        a[2] = transpose_8x8(a[1]);
        a[3] |= transpose_8x8(a[3]);
      }
      if (m <= warp) A.store_a(16 * warp, m, lane, a);
    }
  }

  __device__ __forceinline__ void leave_sums(const PairSums& sums) const {
    const Pairs& M = sums.M;
    const int i = 16 * warp + lane / 4;
    chunk_16bit::store_column_sums<kPairBlocks>(s.sums.columns[warp] + 16 * kPairBlocks * group, kPairBlocks, lane, M);
    const auto leave_rows = [&](float2 x, float* to) {
      x = make_float2(sum_over_lanes<4>(x.x), sum_over_lanes<4>(x.y));
      if (lane % 4 == 0) to[i] = x.x, to[i + 8] = x.y;
    };
    leave_rows(sums.of_P, s.sums.row_of_P.of[group]);
    leave_rows(sums.of_A, s.sums.row_of_A.of[group]);
    leave_rows(sums.below, s.sums.row_below.of[group]);
    float diagonal[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        diagonal[h][e] = M[h][e];
#pragma unroll
        for (int block = 1; block < kPairBlocks; ++block) {
          const float x = M[2 * block + h][e];
          diagonal[h][e] = warp % kPairBlocks == block ? x : diagonal[h][e];
        }
      }
    }
    const float2 within = chunk_16bit::sums_within(diagonal[0], diagonal[1], lane);
    if (lane % 4 == 0 && warp / kPairBlocks == group) s.sums.within[i] = within.x, s.sums.within[i + 8] = within.y;
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
