// Steps of the factors with a decay per channel (factors_per_channel.cu): A and sP from the rows, and J from A.
#pragma once

#include "cuda/delta_rule/chunk_sm90/factor_rows.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// Tile (row, column) of rows falling^T for the rows of k and of q, by one warp. The powers belong to the falling rows.
template <DType kType, bool kWithPowers, int kK>
__device__ __forceinline__ void multiply_rows(const Shared<kK>& s, int row, int column, const ChannelPowers<kK>& powers,
                                              int lane, GramBlock& of_k, GramBlock& of_q) {
  const KeyTile<kK> k(s.k), q(s.q), falling(s.falling);
#pragma unroll
  for (int m = 0; m < kK / 16; m += 2) {
    uint4 d;
    if constexpr (kWithPowers) d = powers.load(m / 2, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4], b[4];
      falling.load_b(kRows * column, m + half, lane, b);
      if constexpr (kWithPowers) {
        const uint32_t on_channels[2] = {half == 0 ? d.x : d.z, half == 0 ? d.y : d.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) b[w] = times_powers<kType>(b[w], on_channels[w % 2]);
      }
      k.load_a(kRows * row, m + half, lane, a);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kType>(of_k[n], a, b[2 * n], b[2 * n + 1]);
      q.load_a(kRows * row, m + half, lane, a);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kType>(of_q[n], a, b[2 * n], b[2 * n + 1]);
    }
  }
}

// Of row i.
template <int kK>
__device__ __forceinline__ void store_token_factors(const Shared<kK>& s, const ChunkFactors& factors, int i) {
  const int64_t item = s.item.factors;
  factors.token[item * kChunkRows + i] = s.beta[i];
  if (factors.row == nullptr) return;
  float* row = factors.row + item * chunk_16bit::kRowNumbers * kChunkRows + i;
  row[chunk_16bit::kRstdOfQ * kChunkRows] = s.rstd_q[i];
  row[chunk_16bit::kRstdOfK * kChunkRows] = s.on_rows[i].x;
}

// A block of A to shared memory, or of sP.
template <bool kOnDiagonal, int kK>
__device__ __forceinline__ void store_A(const Shared<kK>& s, const InverseSteps& steps, int i, int j,
                                        GramBlock& block) {
  const int row = kRows * i + steps.lane / 4;
  const float beta[2] = {s.beta[row], s.beta[row + 8]};
#pragma unroll
  for (int e = 0; e < 8; ++e) block[e / 4][e % 4] *= beta[e / 2 % 2];
  steps.template store_A<kOnDiagonal>(i, j, block);
}
template <bool kOnDiagonal, DType kType>
__device__ __forceinline__ void store_sP(const GlobalResults<kType>& results, int i, int j, GramBlock& block) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if constexpr (kOnDiagonal) clear_above(n, results.lane, block[n]);
  }
  results.sP(i, j, block);
}

// With one anchor: all of A to shared memory, or sP, by a warpgroup.
template <DType kType, int kK>
__device__ __forceinline__ void make_lower(Shared<kK>& s, bool of_A, const InverseSteps& steps,
                                           const GlobalResults<kType>& results) {
  Gram sums;
  start_gram<kType, kK>(of_A ? s.k : s.q, s.falling, sums);
  wgmma_commit();
  wgmma_wait<0>(sums);
  const auto store = [&](auto on_diagonal, int j, auto& blocks) {
    constexpr bool kOnDiagonal = decltype(on_diagonal)::value;
    if (of_A) {
      store_A<kOnDiagonal>(s, steps, steps.warp, j, blocks[0]);
    } else {
      store_sP<kOnDiagonal>(results, steps.warp, j, blocks[0]);
    }
  };
  for_each_block(steps.warp, store, sums);
}

// The blocks of a warp on and below the diagonal, five bits each: 16 + 4 i + j. Next to the diagonal there are no
// powers: these are with others where a warp has more.
template <int kK>
__device__ __forceinline__ uint32_t blocks_of_warp(int warp) {
  constexpr auto block = [](uint64_t i, uint64_t j) { return 16 + 4 * i + j; };
  if constexpr (kWarps<kK> == kGroupWarps) {
    constexpr uint64_t kBlocks = (block(3, 0) | block(3, 2) << 5 | block(2, 1) << 10) |
                                 (block(2, 0) | block(3, 1) << 5 | block(1, 0) << 10) << 16 |
                                 (block(0, 0) | block(1, 1) << 5) << 32 | (block(2, 2) | block(3, 3) << 5) << 48;
    return static_cast<uint32_t>(kBlocks >> (16 * warp)) & 0xffff;
  } else {
    constexpr uint64_t kFirst = block(1, 0) | block(3, 2) << 5 | block(1, 1) << 10 | block(2, 2) << 15 |
                                block(3, 3) << 20 | block(2, 0) << 25 | block(3, 1) << 30 | block(3, 0) << 35;
    constexpr uint32_t kSecond = block(2, 1) | block(0, 0) << 5;
    return (static_cast<uint32_t>(kFirst >> (5 * warp)) & 31) | (warp < 2 ? (kSecond >> (5 * warp) & 31) << 5 : 0);
  }
}

// With two anchors: all of A to shared memory, and sP, by all warps. What is on the diagonal of strong tiles is there.
template <DType kType, int kK>
__device__ __forceinline__ void make_lower_apart(Shared<kK>& s, int warp, const InverseSteps& steps,
                                                 const GlobalResults<kType>& results) {
#pragma unroll 1
  for (uint32_t blocks = blocks_of_warp<kK>(warp); blocks != 0; blocks >>= 5) {
    const int i = blocks / 4 % 4, j = blocks % 4;
    if (i == j && s.strong[i]) continue;
    GramBlock of_k = {}, of_q = {};
    if (i == j + 1) {
      multiply_rows<kType, false>(s, i, j, s.between[0], steps.lane, of_k, of_q);
    } else {
      const ChannelPowers<kK>& powers = i == j ? s.inverse_decay[i] : s.between[i == j + 3 ? 3 : j + 1];
      multiply_rows<kType, true>(s, i, j, powers, steps.lane, of_k, of_q);
    }
    const auto store = [&]<bool kOnDiagonal>() {
      store_A<kOnDiagonal>(s, steps, i, j, of_k);
      store_sP<kOnDiagonal>(results, i, j, of_q);
    };
    i == j ? store.template operator()<true>() : store.template operator()<false>();
  }
}

// J from A, by the team's first warpgroup.
template <DType kType, class Team, int kK>
__device__ __forceinline__ void invert_A(Shared<kK>& s, const ChunkArgs& args) {
  const GlobalResults<kType> results = results_of<kType>(args, s.item.factors, lane_anew());
  const InverseSteps steps{s.inverse, Team::warp(), results.lane};
  Team::group_barrier();
  steps.invert_diagonal();
  Team::group_barrier();
  if (steps.warp % 2 == 1) {
    steps.merge_16(results);
  } else {
    steps.store_diagonal(results);
    store_token_factors(s, args.factors, steps.lane + steps.warp / 2 * kWarpSize);
  }
  Team::group_barrier();
  steps.multiply_Z();
  Team::group_barrier();
  steps.merge_32(results);
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
