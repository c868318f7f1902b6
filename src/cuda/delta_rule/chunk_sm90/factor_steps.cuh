// The factors of a chunk for one value head by a warpgroup, step by step: J, sP and the numbers of the tokens from k and q
// in shared memory. See ../chunk.cuh for the equations. Who runs the steps puts barriers of the warpgroup between them and
// says where results go:
//
//     multiply_keys      k k^T and q k^T by wgmma into registers; the norms of k are the diagonal of the former
//     -- apply_decays    A and sP, whose decays are the same; then the steps of lower_inverse.cuh
//     -- merge_16        beside it by warps 0 and 2 the numbers of the tokens, of this item and of the next
//     -- ..
//
// sP may be left to the scan (ScoreSteps), which reads q anyway. The bits do not depend on who runs the steps.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gate_sums.cuh"
#include "cuda/delta_rule/chunk_sm90/lower_inverse.cuh"
#include "cuda/delta_rule/chunk_sm90/tiles.cuh"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace fastweight::cuda::chunk_sm90 {

using Gram = float[kTokenTiles][4];  // rows of k k^T or q k^T of a warp, as C tiles

using GramBlock = float[2][4];  // 16 columns of them

// Calls body(on_diagonal, j, blocks) for the blocks j of a warp's rows below the diagonal and, with std::true_type, on it:
// one block of every Gram.
template <class Body, class... Grams>
__device__ __forceinline__ void for_each_block(int warp, const Body& body, const Grams&... grams) {
  const float(*const first[])[4] = {grams...};
  constexpr int kGrams = sizeof...(grams);
#pragma unroll
  for (int j = 0; j < kTokenSteps; ++j) {
    GramBlock blocks[kGrams];
#pragma unroll
    for (int at = 0; at < 8 * kGrams; ++at)
      blocks[at / 8][at / 4 % 2][at % 4] = first[at / 8][2 * j + at / 4 % 2][at % 4];
    if (j < warp) body(std::false_type(), j, blocks);
    if (j == warp) body(std::true_type(), j, blocks);
  }
}

// The numbers of the tokens of a chunk for a value head.
struct Tokens {
  float gamma[kChunkRows];  // in log2
  float beta[kChunkRows];
};

// Sums of squares of the rows of q.
using QuerySquares = float[kChunkRows];

struct FactorScratch {
  InverseScratch inverse;
  Tokens tokens[2];  // of this item and of the next
  float rstd_k[kChunkRows];
  QuerySquares squares_q;
};

// Rows a_i b_j of all i and j, on their way after it; the caller commits and waits.
template <DType kType, int kK>
__device__ __forceinline__ void start_gram(const unsigned char* a, const unsigned char* b, Gram& sums) {
  const KeyTile<kK> left(a), right(b);
  wgmma_fence(sums);
#pragma unroll
  for (int m = 0; m < kKeySteps<kK>; ++m) {
    wgmma<kType, kChunkRows>(sums, left.along_rows(0, m), right.along_rows(0, m), m > 0);
  }
}

__device__ __forceinline__ float rstd_of(const DeltaRuleDeviceProblem& problem, float squares) {
  return problem.qk_l2norm ? rsqrt_approx(squares + kL2NormEps) : 1.0f;
}

// What has to do with q: of a warpgroup that makes all factors, and of one that makes sP for the scan.
template <DType kType, int kK>
struct QuerySteps {
  const DeltaRuleDeviceProblem& problem;
  QuerySquares& squares;
  int warp, lane;  // within the warpgroup

  // The 16 rows of q whose products with k the warp has, half a row by a lane: no other warp waits for it. The eight rows that
  // lanes read at once are in different banks.
  __device__ __forceinline__ int own_row() const { return 16 * warp + lane % 16; }
  __device__ __forceinline__ void sum_squares(const unsigned char* q) const {
    if (!problem.qk_l2norm) return;
    const int row = own_row(), half = lane / 16;
    constexpr int kSegments = kK == 64 ? 4 : 8;  // of eight channels, of a panel
    constexpr int kPanels = (kK + 127) / 128;
    const int first = kK == 64 ? half * kSegments : 0, panel = kK == 64 ? 0 : half * kPanels;
    const unsigned char* start = q + panel * KeyTile<kK>::kPanelBytes + row * KeyTile<kK>::kRowBytes;
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPanels * kSegments; ++i) {
      const int at = i / kSegments * KeyTile<kK>::kPanelBytes + ((first + i % kSegments) ^ row % 8) * 16;
      const uint4 words = *reinterpret_cast<const uint4*>(start + at);
      for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
        const float2 x = unpack<kType>(word);
        sum[0] = fmaf(x.x, x.x, sum[0]);
        sum[1] = fmaf(x.y, x.y, sum[1]);
      }
    }
    const float of_half = sum[0] + sum[1], of_row = of_half + __shfl_xor_sync(kAllLanes, of_half, 16);
    if (half == 0) squares[row] = of_row;
  }
  __device__ __forceinline__ float rstd(int row) const { return rstd_of(problem, squares[row]); }

  // The factor of row i on q_i S.
  __device__ __forceinline__ float on_read(int i, float gamma) const {
    return problem.scale * exp2_approx(gamma) * rstd(i);
  }
};

// The decays exp2(gamma_i - gamma_j) and norms of k_j for a C tile: rows i of the lane, columns j and j + 1.
struct DecayTile {
  float d[4];

  __device__ __forceinline__ DecayTile(const float (&gamma_i)[2], const float* gamma, const float* rstd_k, int j) {
    const float2 from = *reinterpret_cast<const float2*>(gamma + j);
    const float2 on_j = *reinterpret_cast<const float2*>(rstd_k + j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d[e] = exp2_approx(gamma_i[e / 2] - (e % 2 == 0 ? from.x : from.y)) * (e % 2 == 0 ? on_j.x : on_j.y);
    }
  }

  __device__ __forceinline__ void apply(const float (&on_i)[2], const float (&c)[4], float (&result)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) result[e] = on_i[e / 2] * d[e] * c[e];
  }
};

// Zeros above the diagonal in a C tile of a block on it, half 0 or 1.
__device__ __forceinline__ void clear_above(int half, int lane, float (&c)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (8 * half + 2 * (lane % 4) + e % 2 > lane / 4 + 8 * (e / 2)) c[e] = 0;
  }
}

// J and sP of an item in global memory.
template <DType kType>
struct GlobalResults {
  uint16_t* lower;  // both
  int lane;

  __device__ __forceinline__ void J(int i, int j, const float (&c)[2][4]) const { store(kLowerJ, i, j, c); }
  __device__ __forceinline__ void sP(int i, int j, const float (&c)[2][4]) const { store(kLowerP, i, j, c); }

 private:
  // Neighbouring lanes exchange pairs: four lanes then have 32 bytes of a row.
  __device__ __forceinline__ void store(LowerMatrix matrix, int i, int j, const float (&c)[2][4]) const {
    const bool odd = lane % 2 == 1;
    uint16_t* to = lower + matrix * kLowerElements + lower_offset(i, lane / 4, 16 * j + 2 * (lane % 4)) + (odd ? 6 : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t low = pack<kType>(c[0][2 * h], c[0][2 * h + 1]), high = pack<kType>(c[1][2 * h], c[1][2 * h + 1]);
      const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
      const int below = h == 0 ? 0 : 8 * lower_pitch(opaque(i));  // no second address is kept for many blocks
      *reinterpret_cast<uint2*>(to + below) = odd ? make_uint2(other, high) : make_uint2(low, other);
    }
  }
};

// Results is a type with J(i, j, tiles) and sP(i, j, tiles), which take two C tiles of a block of 16 x 16.
template <DType kType, int kK>
struct FactorSteps {
  const DeltaRuleDeviceProblem& problem;
  FactorScratch& s;
  int warp, lane;  // within the warpgroup

  // The same thread, of whose places in shared memory nothing is known: they are computed where they are needed, not
  // before a loop and kept.
  __device__ __forceinline__ FactorSteps anew() const { return {problem, s, warp, opaque_below<kWarpSize>(lane)}; }
  __device__ __forceinline__ QuerySteps<kType, kK> queries() const { return {problem, s.squares_q, warp, lane}; }
  __device__ __forceinline__ InverseSteps inverse() const { return {s.inverse, warp, lane}; }

  // Of a chunk, as they lay in memory: gates of two tokens by warp 0, beta of two by warp 2.
  __device__ __forceinline__ chunk_16bit::RawGates load_tokens(const ChunkSpan& span, int head) const {
    if (warp == 0) return chunk_16bit::load_gates(problem, span, head, lane);
    chunk_16bit::RawGates raw;
    if (!problem.beta.present()) return raw;
    const DeviceTensor& beta = problem.beta;
    const char* first = element_at(beta.data, beta.dtype, row_offset(beta, span.batch, span.begin + lane, head));
    if (lane < span.length) raw.bits[0] = load_bits(first, beta.dtype);
    if (lane + kWarpSize < span.length) {
      raw.bits[1] = load_bits(first + byte_offset(beta.dtype, kWarpSize * beta.strides[1]), beta.dtype);
    }
    return raw;
  }
  __device__ __forceinline__ void finish_tokens(const chunk_16bit::RawGates& raw, int length, int head,
                                                Tokens& tokens) const {
    if (warp == 0) return chunk_16bit::sum_gates(problem, raw, length, head, lane, tokens.gamma);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + i * kWarpSize;
      const float given = problem.beta.present() ? beta_of(problem, decode(raw.bits[i], problem.beta.dtype)) : 1.0f;
      tokens.beta[row] = row < length ? given : 0.0f;
    }
  }

  // k k^T and the norms of k; with q also q k^T and its squares.
  template <bool kWithP>
  __device__ __forceinline__ void multiply_keys(const unsigned char* keys, const unsigned char* of_q, Gram& kk,
                                                Gram& qk) const {
    start_gram<kType, kK>(keys, keys, kk);
    if constexpr (kWithP) {
      start_gram<kType, kK>(of_q, keys, qk);
      wgmma_commit();
      queries().sum_squares(of_q);
      wgmma_wait<0>(kk, qk);
    } else {
      wgmma_commit();
      wgmma_wait<0>(kk);
    }
    const bool odd = lane / 4 % 2 == 1, on_diagonal = lane % 4 == lane / 8;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      if (n / 2 != warp || !on_diagonal) continue;
      const int e = n % 2 * 2;
      s.rstd_k[8 * n + lane / 4] = rstd_of(problem, odd ? kk[n][e + 1] : kk[n][e]);
    }
  }

  // A from k k^T, and sP from q k^T; blocks beyond the diagonal are left alone.
  template <bool kWithP, class Results>
  __device__ __forceinline__ void apply_decays(const Tokens& tokens, const Gram& kk, const Gram& qk,
                                               const Results& results) const {
    const int row = 16 * warp + lane / 4;
    float gamma[2], on_A[2], on_P[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = row + 8 * h;
      gamma[h] = tokens.gamma[i];
      on_A[h] = tokens.beta[i] * s.rstd_k[i];
      on_P[h] = kWithP ? problem.scale * queries().rstd(i) : 0.0f;
    }
    const auto make_block = [&](auto on_diagonal, int j, auto& blocks) {
      constexpr bool kOnDiagonal = decltype(on_diagonal)::value;
      GramBlock A, P;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const DecayTile decay(gamma, tokens.gamma, s.rstd_k, 16 * j + 8 * n + 2 * (lane % 4));
        decay.apply(on_A, blocks[0][n], A[n]);
        if constexpr (kWithP) decay.apply(on_P, blocks[1][n], P[n]);
        if constexpr (kWithP && kOnDiagonal) clear_above(n, lane, P[n]);
      }
      inverse().template store_A<kOnDiagonal>(warp, j, A);
      if constexpr (kWithP) results.sP(warp, j, P);
    };
    if constexpr (kWithP) {
      for_each_block(warp, make_block, kk, qk);
    } else {
      for_each_block(warp, make_block, kk);
    }
  }

  // The numbers of row `token_row()` and e_n, by warps 0 and 2; that of q with it alone.
  __device__ __forceinline__ int token_row() const { return lane + warp / 2 * kWarpSize; }
  template <bool kWithP>
  __device__ __forceinline__ void token_factors(const Tokens& tokens, float* token, float* total) const {
    const int i = token_row();
    const float gamma = tokens.gamma[i], last = tokens.gamma[kChunkRows - 1];
    token[kOnKeyRead * kChunkRows + i] = exp2_approx(gamma) * s.rstd_k[i];
    token[kOnQueryRead * kChunkRows + i] = kWithP ? queries().on_read(i, gamma) : 0.0f;  // the scan makes it
    token[kOnWrite * kChunkRows + i] = exp2_approx(last - gamma) * s.rstd_k[i];
    token[kOnValue * kChunkRows + i] = tokens.beta[i];
    if (i < 4) total[i] = exp2_approx(last);
  }
};

// sP of a chunk, from gamma and the norms of k. A warp has 16 rows of it, and waits for no other.
template <DType kType, int kK>
struct ScoreSteps {
  QuerySteps<kType, kK> queries;

  __device__ __forceinline__ void multiply(const unsigned char* of_q, const unsigned char* of_k, Gram& qk) const {
    start_gram<kType, kK>(of_q, of_k, qk);
    wgmma_commit();
    queries.sum_squares(of_q);
    wgmma_wait<0>(qk);
    __syncwarp();
  }

  template <class Results>
  __device__ __forceinline__ void apply_decays(const float* gamma_of, const float* rstd_k, const Gram& qk,
                                               const Results& results) const {
    const int warp = queries.warp, lane = queries.lane, row = 16 * warp + lane / 4;
    const float gamma[2] = {gamma_of[row], gamma_of[row + 8]};
    const float on_P[2] = {queries.problem.scale * queries.rstd(row), queries.problem.scale * queries.rstd(row + 8)};
    for_each_block(
        warp,
        [&](auto on_diagonal, int j, auto& blocks) {
          GramBlock P;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const DecayTile decay(gamma, gamma_of, rstd_k, 16 * j + 8 * n + 2 * (lane % 4));
            decay.apply(on_P, blocks[0][n], P[n]);
            if constexpr (decltype(on_diagonal)::value) clear_above(n, lane, P[n]);
          }
          results.sP(warp, j, P);
        },
        qk);
  }
};

}  // namespace fastweight::cuda::chunk_sm90
