// The gradients of every chunk on Hopper, for one decay per key channel and K, V <= 128. See ../chunk_16bit/gradient.cuh
// for the equations, and ../chunk_16bit/gradients_per_channel.cuh for the sums X and F of tiles of 16 tokens, the rows
// that rise and fall in them, and why dg may be taken from them: this kernel computes the same where all tiles are mild.
//
// A block takes one pair of a chunk and a key head after the other, and of each the value heads of the group. One warp
// brings operands by TMA while two warpgroups work on a head:
//
//     1   a warpgroup has 64 value columns:      R^T = bD^T J^T,   bD^T = beta (v^T - S^T reader^T)
//     2   it has 32 columns of pairs:            P = scale d_o R^T,   A = Y R^T, below the diagonal
//     3   it has 64 channels:                    X_q = S d_o^T,   X_k = S Y^T,   F = G R^T
//         while these run, of the gates: the rising rows of q and -beta k and the falling rows of k, rounded
//     4   in four rounds, tiles forward and back:
//             X_q, X_k of tiles >= r:   times total_r,       plus falling_r^T P_:r^T,   falling_r^T A_:r^T
//             F of tiles <= 3 - r:      times total_3-r,     plus rising^T P_3-r: and A_3-r:
//     5   dq, dk, dg and dbeta of X, F and the rows, as
//             dq = 2^(c - total) X_q + P_ii k,     dk = 2^-c F - beta 2^(c - total) X_k + P_ii q
//             dg_m = dg_m+1 + (rising_q X_q + rising_k X_k - falling F)_m / total
//
// with c_i the sum of log2 of the decays of a tile through token i, and after the last token dg = e_n <S, G> + what all
// tokens wrote to the state after the chunk. Channels are the rows of all sums from step 3 on: a thread has two channels
// of 16 tokens of X_q, X_k and F, and what is computed of them stays in its registers.
//
// c has an error below 2^-17 of it, so that no power of c is further off than half the rounding of an operand. dg runs
// through the whole chunk; per token the argument for a tile holds for a chunk of mild tiles as well: its error is some
// 2^-20 of the terms that pass the chunk, and those that exp(g_m) multiplies are not smaller than 2^-7.5 of such terms,
// unless the keys make them so.
//
// A pair of a chunk and a key head with a strong tile, of any value head, is left to chunk_16bit's kernel.
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_gates.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

enum { kChannelWritesReady = 5, kChannelPairsReady, kRoundsDone, kPartsReady, kTotalsReady, kSharesReady };

// kNorm: q and k have an l2 norm.
template <DType kType, bool kNorm>
struct ChannelGradientGroup {
  const GradientArgs& args;
  const ChannelGradientMaps& maps;
  ChannelGradientShared& s;
  int group, warp, lane;  // the warp within the warpgroup
  int thread;             // of both

  // As GradientGroup's.
  __device__ __forceinline__ void forget() {
    lane = opaque_below<kWarpSize>(lane);
    thread = opaque_below<kWorkers>(thread);
    const int at = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
    group = at / 4;
    warp = at % 4;
  }

  __device__ __forceinline__ float2 norm_of(const float* rstd, int n) const {
    return kNorm ? column_pair(rstd, n, lane) : make_float2(1, 1);
  }
  __device__ __forceinline__ int block_of_channels() const { return 4 * group + warp; }
  __device__ __forceinline__ OwnGates own_gates(const Item& item) const {
    const int channel = 16 * block_of_channels() + lane / 4;
    const int tokens = static_cast<int>(item.span.length), K = args.chunk.problem.head_dim_k;
    return {channel, tokens - 2 * (lane % 4), K - channel, tokens == kChunkRows && K == kWidth};
  }

  // Y . v over the warpgroup's value columns: the diagonal of a product, for the warp's 16 tokens.
  __device__ __forceinline__ void dot_values() const {
    const PanelOfTokens v(s.v + group * PanelOfTokens::kBytes);
    const WrittenTile Y(s.Y);
    float c[2][4] = {};
#pragma unroll
    for (int m = 0; m < kGroupColumns / 16; ++m) {
      uint32_t a[4], b[4];
      v.load_a(16 * warp, m, lane, a);
      Y.load_b_transposed(kGroupColumns * group + 16 * m, warp, lane, b);
      mma<kType>(c[0], a, b[0], b[1]);
      mma<kType>(c[1], a, b[2], b[3]);
    }
    if (lane / 8 != lane % 4) return;  // rows g and g + 8, columns 2t and 2t + 1
    const bool odd = lane / 4 % 2 == 1;
    float* yv = s.yv[group] + 16 * warp + lane / 4;
    yv[0] = odd ? c[0][1] : c[0][0];
    yv[8] = odd ? c[1][3] : c[1][2];
  }

  // Step 1.
  __device__ __forceinline__ void writes(const ChannelNumbers& numbers) const {
    const StatesTile S(s.S);
    const Keys reader(s.reader);
    const LowerTile J(s.A);
    const WrittenTile R(s.v);
    TokenSums X;
    wgmma_fence(X);
#pragma unroll
    for (int m = 0; m < kKeySteps<kWidth>; ++m) {
      wgmma<kType, kChunkRows>(X, S.along_rows(kGroupColumns * group, m), reader.along_rows(0, m), m > 0);
    }
    wgmma_commit();
    dot_values();
    wgmma_wait<0>(X);
    release(s.reader_free, lane);
    Fragments<kTokenSteps> bD;
    correct_values<kType>(ValueTile(s.v + group * ValueTile::kBytes), numbers.beta, warp, lane, X, bD);
    wgmma_fence(X, bD);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, bD[m], J.along_rows(0, m), m > 0);
    wgmma_commit();
    half_barrier(group);  // all warps have read v, in whose place R goes
    wgmma_wait<0>(X);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      uint32_t a[4];
      pack_a<kType>(X[2 * m], X[2 * m + 1], a);
      R.store_a(kGroupColumns * group + 16 * warp, m, lane, a);
    }
  }

  // Step 2: the operands P and A, columns [32 group, +32), zeros on the diagonal and above; the diagonal of P in fp32.
  __device__ __forceinline__ void make_pairs(const Pairs& dP, const Pairs& dA) const {
    const LowerTile P(s.P), A(s.A);
    const float scale = args.chunk.problem.scale;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float p[2][4], a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = 2 * block + h, i = 16 * warp + lane / 4 + e / 2 * 8;
          const int j = 32 * group + 8 * n + 2 * (lane % 4) + e % 2;
          const float x = scale * dP[n][e];
          if (i == j) s.diagonal[i] = x;
          p[h][e] = i > j ? x : 0.0f;
          a[h][e] = i > j ? dA[n][e] : 0.0f;
        }
      }
      uint32_t words[4];
      pack_a<kType>(p[0], p[1], words);
      P.store_a(16 * warp, 2 * group + block, lane, words);
      pack_a<kType>(a[0], a[1], words);
      A.store_a(16 * warp, 2 * group + block, lane, words);
    }
  }

  // Step 3: c in place of the gates. Returns whether all of the thread's are mild.
  __device__ __forceinline__ bool sum_gates(const Item& item, ChannelSums& c, OfChannels (&total)[kRowTiles]) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const OwnGates own = own_gates(item);
    chunk_16bit::with_gate_kind(p, [&](auto kind) {
      const ChannelGate gate(p, item.head, own);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          c[n][e] = log2_of_gate<decltype(kind)::value>(p, gate.rate, gate.bias[e / 2], c[n][e]);
        }
      }
    });
    own.clear_others(c);
    float least = 0;
    bool mild = true;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float(&left)[4] = c[2 * tile], (&right)[4] = c[2 * tile + 1];
#pragma unroll
      for (int e = 0; e < 4; ++e) least = fminf(least, fminf(left[e], right[e]));
      sum_tile(left, right, lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        total[tile][h] = __shfl_sync(kAllLanes, right[2 * h + 1], 3, 4);
        mild = mild && is_mild<kType>(total[tile][h]);  // no NaN is
      }
    }
    return mild && least >= kLeastOfToken;
  }

  // The rising and falling rows of the warpgroup's channels.
  __device__ __forceinline__ void make_rows(const ChannelNumbers& numbers, const ChannelSums& c,
                                            const OfChannels (&total)[kRowTiles]) const {
    const Keys q(s.q), k(s.k), rising_q(s.rising_q), rising_k(s.rising_k), falling(s.falling);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      TileWords of_q, of_k, of_fall;
      q.load_c_transposed(16 * m, block_of_channels(), lane, of_q);
      k.load_c_transposed(16 * m, block_of_channels(), lane, of_k);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int n = 2 * m + w / 2, h = w % 2;
        const float2 rstd_q = norm_of(numbers.rstd_q, n), rstd_k = norm_of(numbers.rstd_k, n);
        const float2 beta = column_pair(numbers.beta, n, lane);
        const float2 raw_q = unpack<kType>(of_q[w]), raw_k = unpack<kType>(of_k[w]);
        const float2 key = make_float2(rstd_k.x * raw_k.x, rstd_k.y * raw_k.y);
        const float c0 = c[n][2 * h], c1 = c[n][2 * h + 1];
        const float2 rise = make_float2(exp2_approx(c0), exp2_approx(c1));
        const float2 fall = make_float2(exp2_approx(total[m][h] - c0), exp2_approx(total[m][h] - c1));
        of_q[w] = pack<kType>(rise.x * (rstd_q.x * raw_q.x), rise.y * (rstd_q.y * raw_q.y));
        of_k[w] = pack<kType>(rise.x * (beta.x * key.x), rise.y * (beta.y * key.y)) ^ kBothSigns;
        of_fall[w] = pack<kType>(fall.x * key.x, fall.y * key.y);
      }
      rising_q.store_c_transposed(16 * m, block_of_channels(), lane, of_q);
      rising_k.store_c_transposed(16 * m, block_of_channels(), lane, of_k);
      falling.store_c_transposed(16 * m, block_of_channels(), lane, of_fall);
    }
  }

  // <S, G> of the lane's channels: the diagonal of S G^T.
  __device__ __forceinline__ void dot_states(OfChannels& dots) const {
    const StatesTile S(s.S), G(s.G);
    float c[2][4] = {};
#pragma unroll 2
    for (int m = 0; m < kWidth / 16; ++m) {
      uint32_t a[4], b[4];  // an A fragment of channels by columns is also a B fragment of columns by channels
      S.load_c_transposed(16 * m, block_of_channels(), lane, a);
      G.load_c_transposed(16 * m, block_of_channels(), lane, b);
      mma<kType>(c[0], a, b[0], b[2]);
      mma<kType>(c[1], a, b[1], b[3]);
    }
    const int g = lane / 4, source = 4 * g + g / 2;  // has column g of row g
    dots[0] = __shfl_sync(kAllLanes, g % 2 == 0 ? c[0][0] : c[0][1], source);
    dots[1] = __shfl_sync(kAllLanes, g % 2 == 0 ? c[1][2] : c[1][3], source);
  }

  // dg after the last token, from <S, G> and F = G R^T.
  __device__ __forceinline__ void end_gradients(const OfChannels (&total)[kRowTiles], const ChannelSums& F,
                                                OfChannels& dg) const {
    const Keys falling(s.falling);
    OfChannels written = {0, 0}, all = {1, 1};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      TileWords words;
      falling.load_c_transposed(16 * m, block_of_channels(), lane, words);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float to = exp2_approx(total[m][h]);
        const float2 first = unpack<kType>(words[h]), second = unpack<kType>(words[2 + h]);
        const float(&left)[4] = F[2 * m], (&right)[4] = F[2 * m + 1];
        float sum = fmaf(first.y, left[2 * h + 1], first.x * left[2 * h]);
        sum = fmaf(second.y, right[2 * h + 1], fmaf(second.x, right[2 * h], sum));
        written[h] = fmaf(written[h], to, sum);
        all[h] *= to;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) dg[h] = fmaf(all[h], dg[h], sum_over_lanes<4>(written[h]));
  }

  // x of the tiles [kFrom, kTo) times a number of the channel, the others times `one`, which nobody knows to be 1: ptxas
  // waits for every product into sums of which some were computed and others are as a product left them (C7511).
  template <int kFrom, int kTo>
  __device__ __forceinline__ static void scale_tiles(float low, float high, float one, ChannelSums& x) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const bool within = n >= 2 * kFrom && n < 2 * kTo;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= within ? (e < 2 ? low : high) : one;
    }
  }

  // Step 4 of X, and of F: a group of products each, of which the sums have come.
  template <int kRound>
  __device__ __forceinline__ void read_tiles(const OfChannels (&total)[kRowTiles], float one, ChannelSums& X_q,
                                             ChannelSums& X_k) const {
    const Keys falling(s.falling);
    const int channel = group * PanelOfTokens::kPanelColumns;
    const float low = exp2_approx(total[kRound][0]), high = exp2_approx(total[kRound][1]);
    const float scale = kRound == 0 ? args.chunk.problem.scale : 1.0f;
    scale_tiles<kRound, kRowTiles>(scale * low, scale * high, one, X_q);
    scale_tiles<kRound, kRowTiles>(low, high, one, X_k);
    wgmma_fence(X_q, X_k);
    wgmma<kType, 64>(X_q, falling.along_columns(channel, kRound), LowerTile(s.P).along_rows(0, kRound));
    wgmma<kType, 64>(X_k, falling.along_columns(channel, kRound), LowerTile(s.A).along_rows(0, kRound));
    wgmma_commit();
  }
  template <int kRound>
  __device__ __forceinline__ void write_tiles(const OfChannels (&total)[kRowTiles], float one, ChannelSums& F) const {
    constexpr int kTile = kRowTiles - 1 - kRound;
    const int channel = group * PanelOfTokens::kPanelColumns;
    scale_tiles<0, kTile + 1>(exp2_approx(total[kTile][0]), exp2_approx(total[kTile][1]), one, F);
    wgmma_fence(F);
    wgmma<kType, 64>(F, Keys(s.rising_q).along_columns(channel, kTile), LowerTile(s.P).along_columns(0, kTile));
    wgmma<kType, 64>(F, Keys(s.rising_k).along_columns(channel, kTile), LowerTile(s.A).along_columns(0, kTile));
    wgmma_commit();
  }

  // Step 4: F is scaled while the products of X run, and X while those of F do.
  __device__ __forceinline__ void add_tiles(const OfChannels (&total)[kRowTiles], ChannelSums& X_q, ChannelSums& X_k,
                                            ChannelSums& F) const {
    const float one = __uint_as_float(static_cast<uint32_t>(opaque(0x3f800000)));
    read_tiles<0>(total, one, X_q, X_k);
    write_tiles<0>(total, one, F);
    wgmma_wait<1>(X_q, X_k);
    read_tiles<1>(total, one, X_q, X_k);
    wgmma_wait<1>(F);
    write_tiles<1>(total, one, F);
    wgmma_wait<1>(X_q, X_k);
    read_tiles<2>(total, one, X_q, X_k);
    wgmma_wait<1>(F);
    write_tiles<2>(total, one, F);
    wgmma_wait<1>(X_q, X_k);
    read_tiles<3>(total, one, X_q, X_k);
    wgmma_wait<1>(F);
    write_tiles<3>(total, one, F);
    wgmma_wait<0>(X_q, X_k, F);
  }

  // Step 5 ------------------------------------------------------------------------------------------------------------

  // The sums of dq and dk over the heads of a group so far, as the threads have them.
  __device__ __forceinline__ float4* kept_sums(int which) const {
    return reinterpret_cast<float4*>(args.key_sums + (blockIdx.x * int64_t{chunk_16bit::kKeySumsPerChannel} + which) *
                                                         (kChunkRows * kWidth)) +
           thread;
  }
  __device__ __forceinline__ void add_group(const Item& item, int which, ChannelSums& x) const {
    if (item.first && item.last) return;
    float4* kept = kept_sums(which);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n, kept += kWorkers) {
      if (!item.first) {
        const float4 y = *kept;
        x[n][0] += y.x, x[n][1] += y.y, x[n][2] += y.z, x[n][3] += y.w;
      }
      if (!item.last) *kept = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
    }
  }

  // The sums of a tile's tokens over the warp's channels: of the lane's tokens, 2 i + e % 2 of C tile i.
  __device__ __forceinline__ void leave_sums(int tile, const float (&of_beta)[4], const float (&along)[8]) const {
    const auto place = [&](int which, int number) -> float& {
      return s.sums.part[which][block_of_channels()][kTileRows * tile + 8 * (number / 2) + 2 * (lane % 4) + number % 2];
    };
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool high = (lane & 16) != 0;
      two[i] =
          (high ? of_beta[2 + i] : of_beta[i]) + __shfl_xor_sync(kAllLanes, high ? of_beta[i] : of_beta[2 + i], 16);
    }
    const bool high = (lane & 8) != 0;
    float sum = (high ? two[1] : two[0]) + __shfl_xor_sync(kAllLanes, high ? two[0] : two[1], 8);
    sum += __shfl_xor_sync(kAllLanes, sum, 4);
    if (lane % 8 < 4) place(kOfBeta, lane / 8) = sum;
    if constexpr (kNorm) place(lane / 16 == 0 ? kAlongQ : kAlongK, lane / 4 % 4) = sum_over_channels(along, lane);
  }

  // dg of a tile in `terms`, what a token adds; dg after the tile becomes that before it.
  __device__ __forceinline__ void sum_back(float (&terms)[2][4], OfChannels& dg) const {
#pragma unroll
    for (int i = 1; i >= 0; --i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float &first = terms[i][2 * h], &second = terms[i][2 * h + 1];
        const float2 others = sum_after(first + second, lane % 4);
        const float after = dg[h] + others.x;
        first = after + (first + second);
        second = after + second;
        dg[h] += others.y;
      }
    }
  }

  // What a tile's sums give: dq in place of X_q, dk in place of F, the terms of dg, and those of -dbeta and of q . dq and
  // k . dk of its tokens.
  __device__ __forceinline__ void finish_tile(int m, const ChannelNumbers& numbers, const ChannelSums& c,
                                              const OfChannels& total, ChannelSums& X_q, const ChannelSums& X_k,
                                              ChannelSums& F, float (&terms)[2][4], float (&of_beta)[4],
                                              float (&along)[8]) const {
    TileWords of_q, of_k, rising_q, rising_k, falling;
    Keys(s.q).load_c_transposed(16 * m, block_of_channels(), lane, of_q);
    Keys(s.k).load_c_transposed(16 * m, block_of_channels(), lane, of_k);
    Keys(s.rising_q).load_c_transposed(16 * m, block_of_channels(), lane, rising_q);
    Keys(s.rising_k).load_c_transposed(16 * m, block_of_channels(), lane, rising_k);
    Keys(s.falling).load_c_transposed(16 * m, block_of_channels(), lane, falling);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = 2 * m + i;
      const float2 rstd_q = norm_of(numbers.rstd_q, n), rstd_k = norm_of(numbers.rstd_k, n);
      const float2 beta = column_pair(numbers.beta, n, lane), P = column_pair(s.diagonal, n, lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float inverse = exp2_approx(-total[h]);
        const float2 raw_q = unpack<kType>(of_q[2 * i + h]), raw_k = unpack<kType>(of_k[2 * i + h]);
        const float2 up_q = unpack<kType>(rising_q[2 * i + h]), up_k = unpack<kType>(rising_k[2 * i + h]);
        const float2 down = unpack<kType>(falling[2 * i + h]);
        const auto finish = [&](int e, float q, float k, float b, float P_ii, float on_q, float on_k, float on_down) {
          const float X = X_q[n][e], x = X_k[n][e], f = F[n][e];
          terms[i][e] = inverse * fmaf(on_q, X, fmaf(on_k, x, -(on_down * f)));
          const float up = exp2_approx(c[n][e] - total[h]), read = up * x;
          X_q[n][e] = fmaf(P_ii, k, up * X);
          F[n][e] = fmaf(P_ii, q, fmaf(-b, read, exp2_approx(-c[n][e]) * f));
          const int token = 2 * i + e % 2;
          of_beta[token] = h == 0 ? k * read : fmaf(k, read, of_beta[token]);
          if constexpr (kNorm) {
            along[token] = h == 0 ? q * X_q[n][e] : fmaf(q, X_q[n][e], along[token]);
            along[4 + token] = h == 0 ? k * F[n][e] : fmaf(k, F[n][e], along[4 + token]);
          }
        };
        finish(2 * h, rstd_q.x * raw_q.x, rstd_k.x * raw_k.x, beta.x, P.x, up_q.x, up_k.x, down.x);
        finish(2 * h + 1, rstd_q.y * raw_q.y, rstd_k.y * raw_k.y, beta.y, P.y, up_q.y, up_k.y, down.y);
      }
    }
  }

  // From dg to the gradient of what the gate tensor holds, and the chunk's share of the gate's parameters.
  __device__ __forceinline__ void finish_gates(const Item& item, ChannelSums& dg) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const OwnGates own = own_gates(item);
    const bool parameters = args.parameter_parts != nullptr;
    OfChannels bias = {0, 0};
    float a_log = 0;
    if (p.gate_in_kernel) {
      ChannelSums x;
      load_channel_gates(p, item, own, lane, x);
      const ChannelGate gate(p, item.head, own);
      own.clear_others(dg);
      chunk_16bit::with_gate_kind(p, [&](auto kind) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const GateTerms terms =
                chunk_16bit::gate_of<decltype(kind)::value>(p, x[n][e], gate.rate, gate.bias[e / 2]);
            a_log = fmaf(terms.a_log, dg[n][e], a_log);
            dg[n][e] *= terms.dx;
            bias[e / 2] += dg[n][e];
          }
        }
      });
    }
    const DeviceTensor& out = args.dg;
    if (out.present()) {
      with_type(out.dtype, [&](auto type) {
        constexpr DType kOut = decltype(type)::value;
        own.for_each<kOut>(out, item, lane, [&](int n, int e, char* at) { store_float(at, kOut, 0, dg[n][e]); });
      });
    }
    if (!parameters) return;
    double* parts = args.parameter_parts + item.at * (1 + p.head_dim_k) + 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_over_lanes<4>(bias[h]);
      if (lane % 4 == 0 && 8 * h < own.columns) parts[own.channel + 8 * h] = sum;
    }
    a_log = sum_over_lanes<kWarpSize>(a_log);
    if (lane == 0) s.a_log[block_of_channels()] = a_log;
    named_barrier<kSharesReady>(kWorkers);
    if (thread != 0) return;
    double sum = 0;
    for (const float part : s.a_log) sum += part;
    parts[-1] = sum;
  }

  // The totals of the tokens' sums, by a thread each; with them dbeta.
  __device__ __forceinline__ void finish_sums(const Item& item, const ChannelNumbers& numbers) const {
    const int which = thread / kChunkRows, i = thread % kChunkRows;
    if (which >= (kNorm ? kNumRowSums : kAlongQ)) return;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWorkerWarps; ++w) sum += s.sums.part[which][w][i];
    if (which != kOfBeta) {
      if (!item.first || !item.last) {  // over the heads of a group
        float& kept =
            args.key_sums[(blockIdx.x * int64_t{chunk_16bit::kKeySumsPerChannel} + 2) * (kChunkRows * kWidth) + thread];
        if (!item.first) sum += kept;
        kept = sum;
      }
      const float rstd = which == kAlongQ ? numbers.rstd_q[i] : numbers.rstd_k[i];
      s.sums.total[which][i] = rstd * rstd * sum;
    } else if (args.dbeta.present() && i < item.span.length) {
      const DeviceTensor& out = args.dbeta;
      store_float(out.data, out.dtype, row_offset(out, item.span.batch, item.span.begin + i, item.head),
                  beta_adjoint(args.chunk.problem, numbers.beta[i], s.sums.total[kOfBeta][i] - sum));
    }
  }

  // dq or dk, through the norm, to the place of q or k. `along` has the factors rstd^2 x . dx.
  __device__ __forceinline__ void leave(const Keys& rows, const float* rstd, const float* along,
                                        const ChannelSums& y) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      TileWords words;
      if constexpr (kNorm) rows.load_c_transposed(16 * m, block_of_channels(), lane, words);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = 2 * m + i;
        const float2 on = column_pair(rstd, n, lane), sum = column_pair(along, n, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float2 dx = make_float2(y[n][2 * h], y[n][2 * h + 1]);
          if constexpr (kNorm) {
            const float2 x = unpack<kType>(words[2 * i + h]);
            dx = make_float2(fmaf(-sum.x, x.x, on.x * dx.x), fmaf(-sum.y, x.y, on.y * dx.y));
          }
          words[2 * i + h] = pack<kType>(dx.x, dx.y);
        }
      }
      __syncwarp();
      rows.store_c_transposed(16 * m, block_of_channels(), lane, words);
    }
  }

  __device__ __forceinline__ void store_keys(const Item& item) const {
    fence_async_proxy();
    half_barrier(group);
    if (thread % kGroupThreads != 0) return;
    const RowsPlace at = rows_of(item, item.key_head);
    const int column = group * PanelOfTokens::kPanelColumns;
    const bool stores = column < args.chunk.problem.head_dim_k;
    if (stores && args.dq.present()) {
      store_box(maps.dq, {column, at.head, at.missing, at.end, at.batch}, Keys(s.q).panel(group));
    }
    if (stores && args.dk.present()) {
      store_box(maps.dk, {column, at.head, at.missing, at.end, at.batch}, Keys(s.k).panel(group));
    }
    commit_stores();
    wait_stores_read<0>();
    s.keys_free.arrive();
  }

  // Step 5.
  __device__ __forceinline__ void finish(const Item& item, const ChannelNumbers& numbers, const ChannelSums& c,
                                         const OfChannels (&total)[kRowTiles], OfChannels& after, ChannelSums& X_q,
                                         ChannelSums& X_k, ChannelSums& F) {
    // Here, because `yv` may be that of the next item when the sums are complete.
    if (thread < kChunkRows) s.sums.total[kOfBeta][thread] = s.yv[0][thread] + s.yv[1][thread];
#pragma unroll
    for (int tile = kRowTiles - 1; tile >= 0; --tile) {
      float of_beta[4] = {}, along[8] = {};
      if (kTileRows * tile < item.span.length) {  // else all sums are 0
        float terms[2][4];
        finish_tile(tile, numbers, c, total[tile], X_q, X_k, F, terms, of_beta, along);
        sum_back(terms, after);
#pragma unroll
        for (int e = 0; e < 4; ++e) X_k[2 * tile][e] = terms[0][e], X_k[2 * tile + 1][e] = terms[1][e];
      }
      leave_sums(tile, of_beta, along);
    }
    forget();
    add_group(item, 0, X_q);
    add_group(item, 1, F);
    named_barrier<kPartsReady>(kWorkers);
    finish_sums(item, numbers);
    if (item.last) {
      if constexpr (kNorm) named_barrier<kTotalsReady>(kWorkers);
      forget();
      leave(Keys(s.q), numbers.rstd_q, s.sums.total[kAlongQ], X_q);
      leave(Keys(s.k), numbers.rstd_k, s.sums.total[kAlongK], F);
      store_keys(item);
    }
    forget();
    finish_gates(item, X_k);
  }

  // Steps 2 to 5. Returns whether the item is strong, and nothing of it was finished.
  __device__ __forceinline__ bool gradients(const Item& item, const ChannelNumbers& numbers, uint32_t turn) {
    const Keys d_o(s.d_o);
    const StatesTile S(s.S), G(s.G);
    const WrittenTile Y(s.Y), R(s.v);
    const int channel = group * PanelOfTokens::kPanelColumns, column = group * (kChunkRows / 2);
    ChannelSums X_q, X_k, F, c;
    OfChannels total[kRowTiles], after;
    {
      Pairs dP, dA;
      wgmma_fence(dP, dA);
#pragma unroll
      for (int m = 0; m < kKeySteps<kWidth>; ++m) {
        wgmma<kType, 32>(dP, d_o.along_rows(0, m), R.along_columns(column, m), m > 0);
      }
#pragma unroll
      for (int m = 0; m < kKeySteps<kWidth>; ++m) {
        wgmma<kType, 32>(dA, Y.along_columns(0, m), R.along_columns(column, m), m > 0);
      }
      wgmma_commit();
      wgmma_fence(X_q, X_k);
#pragma unroll
      for (int m = 0; m < kKeySteps<kWidth>; ++m) {
        wgmma<kType, 64>(X_q, S.along_columns(channel, m), d_o.along_rows(0, m), m > 0);
      }
#pragma unroll
      for (int m = 0; m < kKeySteps<kWidth>; ++m) {
        wgmma<kType, 64>(X_k, S.along_columns(channel, m), Y.along_columns(0, m), m > 0);
      }
      wgmma_commit();
      load_channel_gates(args.chunk.problem, item, own_gates(item), lane, c);
      if (!sum_gates(item, c, total)) s.strong[turn % 2] = 1;
      forget();
      wgmma_wait<1>(dP, dA);
      make_pairs(dP, dA);
    }
    if (thread == 0) s.strong[(turn + 1) % 2] = 0;
    s.third_filled.wait(turn % 2);
    wgmma_fence(F);
#pragma unroll
    for (int m = 0; m < kKeySteps<kWidth>; ++m) {
      wgmma<kType, 64>(F, G.along_columns(channel, m), R.along_columns(0, m), m > 0);
    }
    wgmma_commit();
    if (item.first) s.keys_filled.wait(s.keys[turn % 2] % 2);
    forget();
    make_rows(numbers, c, total);
    dot_states(after);
    fence_async_proxy();
    named_barrier<kChannelPairsReady>(kWorkers);
    const bool strong = s.strong[turn % 2] != 0;
    wgmma_wait<0>(X_q, X_k, F);
    release(s.states_free, lane);
    forget();
    end_gradients(total, F, after);
    add_tiles(total, X_q, X_k, F);
    release(s.pairs_free, lane);
    named_barrier<kRoundsDone>(kWorkers);
    forget();
    if (!strong) {
      finish(item, numbers, c, total, after, X_q, X_k, F);
    } else if (item.last && thread % kGroupThreads == 0) {
      s.keys_free.arrive();
    }
    return strong;
  }

  __device__ __forceinline__ void run() {
    for (uint32_t turn = 0;; ++turn) {
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      const ChannelNumbers& numbers = s.numbers[turn % 2];
      if (item.span.sequence < 0) return;
      forget();
      s.first_filled.wait(turn % 2);
      writes(numbers);
      fence_async_proxy();
      named_barrier<kChannelWritesReady>(kWorkers);
      forget();
      s.second_filled.wait(turn % 2);
      const bool strong = gradients(item, numbers, turn);
      if (thread == 0 && (strong || item.first)) args.left[item.pair] = strong;
      release(s.numbers_free[turn % 2], lane);
    }
  }
};

template <DType kType, bool kNorm>
__global__ void __launch_bounds__(kGradientThreads, 1)
    channel_gradients_kernel(const __grid_constant__ GradientArgs args,
                             const __grid_constant__ ChannelGradientMaps maps) {
  auto& s = aligned_shared<ChannelGradientShared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      s.numbers_filled[i].init(1);
      s.numbers_free[i].init(kWorkerWarps + 1);
      s.strong[i] = 0;
    }
    s.keys_filled.init(1);
    s.keys_free.init(2);
    s.first_filled.init(1);
    s.second_filled.init(1);
    s.third_filled.init(1);
    s.reader_free.init(kWorkerWarps);
    s.states_free.init(kWorkerWarps);
    s.pairs_free.init(kWorkerWarps);
    fence_barrier_init();
  }
  const auto thread = static_cast<int>(threadIdx.x);
  wait_for_previous_kernels();
  __syncthreads();
  const int warp = uniform_warp(), lane = thread % kWarpSize;
  if (warp >= kWorkerWarps) {
    give_registers<kChannelBringerRegisters>();
    const int role = warp - kWorkerWarps;
    if (role == 0 && elect_one()) ChannelBringer{args, maps, s}.run();
    if (role == 1) prefetch_gates(args, s, lane);
  } else {
    take_registers<kChannelGradientRegisters>();
    ChannelGradientGroup<kType, kNorm>{args, maps, s, warp / 4, warp % 4, lane, thread}.run();
  }
}

}  // namespace

template <DType kType>
void launch_channel_gradients(const GradientArgs& args, const ChannelGradientMaps& maps, int64_t blocks,
                              const Context& context) {
  const LaunchShape shape{static_cast<unsigned>(blocks), kGradientThreads, sizeof(ChannelGradientShared), true};
  constexpr const char* kName = "delta_rule chunk_sm90 gradients per channel";
  args.chunk.problem.qk_l2norm ? launch<channel_gradients_kernel<kType, true>>(kName, context, shape, args, maps)
                               : launch<channel_gradients_kernel<kType, false>>(kName, context, shape, args, maps);
}

}  // namespace fastweight::cuda::chunk_sm90
