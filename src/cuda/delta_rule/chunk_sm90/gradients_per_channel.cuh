// The gradients of every chunk on Hopper, for one decay per key channel and K <= 128. See ../chunk_16bit/gradient.cuh
// for the equations, and ../chunk_16bit/gradients_per_channel.cuh for the sums X and F of tiles of 16 tokens, the rows
// that rise and fall in them, and why dg may be taken from them: this kernel computes the same where all tiles are mild.
//
// A block takes one pair of a chunk and a key head after the other, of each the value heads of the group, and of a head up
// to 128 value columns at a time, 64 with K <= 64, which go through the steps as if they were a head: all that these give are
// sums over value columns. Other warps bring operands by TMA while four warpgroups work on a range. Each has one side, 64
// channels or value columns, of one half of the tokens:
//
//     1   of its value columns and tokens:       R^T = bD^T J^T,   bD^T = beta (v^T - S^T reader^T), what its rounding took
//         added to the product
//     2   on the one side P = scale d_o R^T, on the other A = Y R^T, below the diagonal, of 32 columns of pairs
//     3   of its channels and tokens:            X_q = S d_o^T,   X_k = S Y^T,   F = G R^T
//         while these run, of the gates: the rising rows of q and -beta k and the falling rows of k, rounded
//     4   tile by tile, X forward and F back:
//             X_q, X_k of tiles >= r:   times total_r,       plus falling_r^T P_:r^T,   falling_r^T A_:r^T
//             F of tiles <= r:          times total_r,       plus rising_r^T P_r: and A_r:
//         which for its own two tiles begins with X of the two before, or with F of the two behind
//     5   dq, dk, dg and dbeta of X, F and the rows, as
//             dq = 2^(c - total) X_q + P_ii k,     dk = 2^-c F - beta 2^(c - total) X_k + P_ii q
//             dg_m = dg_m+1 + (rising_q X_q + rising_k X_k - falling F)_m / total
//
// with c_i the sum of log2 of the decays of a tile through token i, and after the last token dg = e_n <S, G> + what all
// tokens wrote to the state after the chunk. Channels are the rows of all sums from step 3 on: a thread has two channels
// of 8 tokens of X_q, X_k and F, and what is computed of them stays in its registers. Two warpgroups with 64 tokens each, in
// twice the registers, would have more code to fetch, which runs once for a head, and half the warps to run while others wait.
//
// c has an error below 2^-20 of it, so that no power of c is further off than half the rounding of an operand. dg runs
// through the whole chunk; per token the argument for a tile holds for a chunk of mild tiles as well: its error is some
// 2^-20 of the terms that pass the chunk, and those that exp(g_m) multiplies are not smaller than 2^-7.5 of such terms,
// unless the keys make them so.
//
// With K <= 64 there is one side, whose two warpgroups make both P and A, and two blocks are on a multiprocessor: one works
// while the other waits, also for the operands, which its warps bring themselves, the next ones as places become free.
//
// A pair of a chunk and a key head with a strong tile, of any value head, is left to chunk_16bit's kernel.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/gradient_gates.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

enum {
  kDifferencesReady = 5,
  kChannelWritesReady,
  kChannelPairsReady,
  kRoundsDone,
  kPartsReady,
  kTotalsReady,
  kSharesReady
};

// Among the warpgroups of a side.
__device__ __forceinline__ void side_barrier(int side) {
  side == 0 ? named_barrier<3>(kSideThreads) : named_barrier<4>(kSideThreads);
}

// kNorm: q and k have an l2 norm. kRanges: a head has several items, each with a range of its value columns.
template <DType kType, class Block, bool kNorm, bool kRanges>
struct ChannelGradientGroup {
  static constexpr int kWidth = Block::kWidth, kSides = Block::kSides, kWorkers = Block::kWorkers;
  using Keys = typename Block::Keys;
  using StatesTile = typename Block::StatesTile;
  using WrittenTile = typename Block::WrittenTile;
  const GradientArgs& args;
  const ChannelGradientMaps& maps;
  typename Block::Shared& s;
  uint32_t state;  // the thread of all that work, and how many items came before
  int thread = 0, lane = 0;
  int side = 0, half = 0, warp = 0;  // the warp within the warpgroup
  uint32_t turn = 0;

  // What is known of the thread and of the turn from here on is computed here, from one register.
  __device__ __forceinline__ void forget() {
    state = static_cast<uint32_t>(opaque(static_cast<int>(state)));
    thread = static_cast<int>(state % kWorkers);
    lane = thread % kWarpSize;
    turn = state / kWorkers;
    const int at = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
    side = at / kGroupWarps % kSides;
    half = at / (kSides * kGroupWarps);
    warp = at % kGroupWarps;
  }

  __device__ __forceinline__ const Item& item_now() const { return s.items[turn % 2]; }
  __device__ __forceinline__ const ChannelNumbers& numbers_now() const { return s.numbers[turn % 2]; }

  // Where its tokens begin, its 64 channels or value columns, and of the channels the warp's 16; tile m of its tokens.
  __device__ __forceinline__ int first_token() const { return kHalfRows * half; }
  __device__ __forceinline__ int first_of_side() const { return kGroupColumns * side; }
  __device__ __forceinline__ int block_of_channels() const { return kGroupWarps * side + warp; }
  __device__ __forceinline__ int tile_row(int m) const { return first_token() + kTileRows * m; }

  // Two numbers per token, of C tile n.
  __device__ __forceinline__ float2 pair_of(const float* numbers, int n) const {
    return column_pair(numbers + first_token(), n, lane);
  }
  __device__ __forceinline__ float2 norm_of(const float* rstd, int n) const {
    return kNorm ? pair_of(rstd, n) : make_float2(1, 1);
  }
  __device__ __forceinline__ OwnGates own_gates(const Item& item) const {
    const int channel = 16 * block_of_channels() + lane / 4, token = first_token() + 2 * (lane % 4);
    const int tokens = static_cast<int>(item.span.length), K = args.chunk.problem.head_dim_k;
    return {channel, token, tokens - token, K - channel, tokens == kChunkRows && K == kWidth};
  }

  // In a block that serves itself, a warp that has nothing else to do while the first products run.
  __device__ __forceinline__ bool serves() const { return half == 1 && warp == 2; }
  __device__ __forceinline__ OwnBringer<Block, kRanges> bringer(uint32_t of_turn) const {
    return {args, maps, s, lane, of_turn};
  }
  __device__ __forceinline__ void release_pairs() const {
    release(s.pairs_free, lane);
    if constexpr (Block::kServesItself) {
      if (serves()) bringer(turn + 1).bring_pairs();
    }
  }

  // Y . v over a side's value columns: the diagonal of a product, for the warp's 16 tokens of all.
  __device__ __forceinline__ void dot_values() const {
    const PanelOfTokens v(s.v + side * PanelOfTokens::kBytes);
    const WrittenTile Y(s.Y);
    float c[2][4] = {};
#pragma unroll
    for (int m = 0; m < kGroupColumns / 16; ++m) {
      uint32_t a[4], b[4];
      v.load_a(16 * warp, m, lane, a);
      Y.load_b_transposed(first_of_side() + 16 * m, warp, lane, b);
      mma<kType>(c[0], a, b[0], b[1]);
      mma<kType>(c[1], a, b[2], b[3]);
    }
    if (lane / 8 != lane % 4) return;  // rows g and g + 8, columns 2t and 2t + 1
    const bool odd = lane / 4 % 2 == 1;
    float* yv = s.yv[side] + 16 * warp + lane / 4;
    yv[0] = odd ? c[0][1] : c[0][0];
    yv[8] = odd ? c[1][3] : c[1][2];
  }

  // Step 1, and the gates where maps bring them: the rows of step 3 take their place.
  __device__ __forceinline__ void writes(const ChannelNumbers& numbers, ChannelSums& gates) const {
    const StatesTile S(s.S);
    const Keys reader(s.reader), bD(s.v);
    const LowerTile J(s.pairs.A);
    const WrittenTile R(s.reader);
    ChannelSums X;
    wgmma_fence(X);
#pragma unroll
    for (int m = 0; m < kKeySteps<kWidth>; ++m) {
      wgmma<kType, kHalfRows>(X, S.along_rows(first_of_side(), m), reader.along_rows(first_token(), m), m > 0);
    }
    wgmma_commit();
    if (stores_side()) wait_stores_read<0>();  // dg of the item before, in whose place rows go after the next barriers
    if (half == 0) dot_values();
    if constexpr (Block::kServesItself) {
      if (serves()) bringer(turn + 1).name();
    }
    uint32_t v[kHalfTiles][4];
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) bD.load_c_transposed(tile_row(m), block_of_channels(), lane, v[m]);
    wgmma_wait<0>(X);
    side_barrier(side);  // all warps have read v, in whose place bD goes
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int n = 2 * m + w / 2, e = w % 2 * 2;
        const float2 beta = pair_of(numbers.beta, n), value = unpack<kType>(v[m][w]);
        X[n][e] = beta.x * (value.x - X[n][e]);
        X[n][e + 1] = beta.y * (value.y - X[n][e + 1]);
      }
      pack_a<kType>(X[2 * m], X[2 * m + 1], v[m]);
      subtract_a<kType>(v[m], X[2 * m], X[2 * m + 1]);  // the diagonal of J, 1, meets bD in fp32
      bD.store_c_transposed(tile_row(m), block_of_channels(), lane, v[m]);
    }
    fence_async_proxy();
    named_barrier<kDifferencesReady>(kWorkers);
    wgmma_fence(X);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      wgmma<kType, kHalfRows>(X, bD.along_columns(first_of_side(), m), J.along_rows(first_token(), m));
    }
    wgmma_commit();
    if (maps.has_gates) {
      s.gates_filled.wait(turn % 2);
      read_gates(gates_place(true), gates);
    }
    wgmma_wait<0>(X);
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) {
      uint32_t a[4];
      pack_a<kType>(X[2 * m], X[2 * m + 1], a);
      R.store_a(first_of_side() + 16 * warp, kHalfTiles * half + m, lane, a);
    }
  }

  // Step 2: the operand P or A, columns [32 half, +32), zeros on the diagonal and above; the diagonal of P in fp32.
  __device__ __forceinline__ void make_pairs(bool of_P, const ChannelPairs& x) const {
    const LowerTile tile(of_P ? s.pairs.P : s.pairs.A);
    const float scale = of_P ? args.chunk.problem.scale : 1.0f;
#pragma unroll
    for (int block = 0; block < kHalfTiles; ++block) {
      float y[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = 2 * block + h, i = 16 * warp + lane / 4 + e / 2 * 8;
          const int j = first_token() + 8 * n + 2 * (lane % 4) + e % 2;
          const float scaled = scale * x[n][e];
          if (i == j && of_P) s.diagonal[i] = scaled;
          y[h][e] = i > j ? scaled : 0.0f;
        }
      }
      uint32_t words[4];
      pack_a<kType>(y[0], y[1], words);
      tile.store_a(16 * warp, kHalfTiles * half + block, lane, words);
    }
  }

  // Step 3: c in place of the gates, and the totals of the warpgroup's tiles. Returns whether all of the thread's are mild.
  __device__ __forceinline__ bool sum_gates(const Item& item, const ChannelGate& gate, ChannelSums& c,
                                            OfChannels (&total)[kHalfTiles]) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const OwnGates own = own_gates(item);
    chunk_16bit::with_gate_kind(p, [&](auto kind) {
      const float rate = decltype(kind)::value == GateKind::kGiven ? 0.0f : gate.rate();
#pragma unroll
      for (auto& tile : c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          tile[e] = log2_of_gate<decltype(kind)::value>(p, rate, gate.bias[e / 2], tile[e]);
        }
      }
    });
    own.clear_others(c);
    float least = 0;
    bool mild = true;
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) {
      float(&left)[4] = c[2 * m], (&right)[4] = c[2 * m + 1];
#pragma unroll
      for (int e = 0; e < 4; ++e) least = fminf(least, fminf(left[e], right[e]));
      sum_tile(left, right, lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        total[m][h] = __shfl_sync(kAllLanes, right[2 * h + 1], 3, 4);
        mild = mild && is_mild<kType>(total[m][h]);  // no NaN is
        if (lane % 4 == 0) s.totals[kHalfTiles * half + m][own.channel + 8 * h] = total[m][h];
      }
    }
    return mild && least >= kLeastOfToken;
  }

  // Of the tiles of the other half.
  __device__ __forceinline__ void take_totals(OfChannels (&other)[kHalfTiles]) const {
    const int channel = 16 * block_of_channels() + lane / 4;
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) other[m][h] = s.totals[kHalfTiles * (1 - half) + m][channel + 8 * h];
    }
  }

  // The rising and falling rows of the warpgroup's channels and tokens.
  __device__ __forceinline__ void make_rows(const ChannelNumbers& numbers, const ChannelSums& c,
                                            const OfChannels (&total)[kHalfTiles]) const {
    const Keys q(s.q), k(s.k), rising_q(s.rows[kRisingQ]), rising_k(s.rows[kRisingK]), falling(s.rows[kFalling]);
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) {
      TileWords of_q, of_k, of_fall;
      q.load_c_transposed(tile_row(m), block_of_channels(), lane, of_q);
      k.load_c_transposed(tile_row(m), block_of_channels(), lane, of_k);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int n = 2 * m + w / 2, h = w % 2;
        const float2 rstd_q = norm_of(numbers.rstd_q, n), rstd_k = norm_of(numbers.rstd_k, n);
        const float2 beta = pair_of(numbers.beta, n);
        const float2 raw_q = unpack<kType>(of_q[w]), raw_k = unpack<kType>(of_k[w]);
        const float2 key = make_float2(rstd_k.x * raw_k.x, rstd_k.y * raw_k.y);
        const float c0 = c[n][2 * h], c1 = c[n][2 * h + 1];
        const float2 rise = make_float2(exp2_approx(c0), exp2_approx(c1));
        const float2 fall = make_float2(exp2_approx(total[m][h] - c0), exp2_approx(total[m][h] - c1));
        of_q[w] = pack<kType>(rise.x * (rstd_q.x * raw_q.x), rise.y * (rstd_q.y * raw_q.y));
        of_k[w] = pack<kType>(rise.x * (beta.x * key.x), rise.y * (beta.y * key.y)) ^ kBothSigns;
        of_fall[w] = pack<kType>(fall.x * key.x, fall.y * key.y);
      }
      rising_q.store_c_transposed(tile_row(m), block_of_channels(), lane, of_q);
      rising_k.store_c_transposed(tile_row(m), block_of_channels(), lane, of_k);
      falling.store_c_transposed(tile_row(m), block_of_channels(), lane, of_fall);
    }
  }

  // <S, G> of the lane's channels, over half of the value columns: the diagonal of S G^T.
  __device__ __forceinline__ void dot_states(OfChannels& dots) const {
    const StatesTile S(s.S), G(s.G);
    float c[2][4] = {};
#pragma unroll 2
    for (int m = 0; m < kWidth / kHalves / 16; ++m) {
      const int row = kWidth / kHalves * half + 16 * m;
      uint32_t a[4], b[4];  // an A fragment of channels by columns is also a B fragment of columns by channels
      S.load_c_transposed(row, block_of_channels(), lane, a);
      G.load_c_transposed(row, block_of_channels(), lane, b);
      mma<kType>(c[0], a, b[0], b[2]);
      mma<kType>(c[1], a, b[1], b[3]);
    }
    const int g = lane / 4, source = 4 * g + g / 2;  // has column g of row g
    dots[0] = __shfl_sync(kAllLanes, g % 2 == 0 ? c[0][0] : c[0][1], source);
    dots[1] = __shfl_sync(kAllLanes, g % 2 == 0 ? c[1][2] : c[1][3], source);
  }

  // The half's share of dg after the last token, from its share of <S, G> and F = G R^T.
  __device__ __forceinline__ void end_gradients(const OfChannels (&total)[kHalfTiles],
                                                const OfChannels (&other)[kHalfTiles], const ChannelSums& F,
                                                OfChannels& dg) const {
    const Keys falling(s.rows[kFalling]);
    OfChannels written = {0, 0};
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) {
      TileWords words;
      falling.load_c_transposed(tile_row(m), block_of_channels(), lane, words);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 first = unpack<kType>(words[h]), second = unpack<kType>(words[2 + h]);
        const float(&left)[4] = F[2 * m], (&right)[4] = F[2 * m + 1];
        float sum = fmaf(first.y, left[2 * h + 1], first.x * left[2 * h]);
        sum = fmaf(second.y, right[2 * h + 1], fmaf(second.x, right[2 * h], sum));
        written[h] = m == 0 ? sum : fmaf(written[h], exp2_approx(total[m][h]), sum);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float behind = other[0][h] + other[1][h];
      const float on_written = half == 0 ? exp2_approx(behind) : 1.0f;
      const float all = exp2_approx(total[0][h] + total[1][h] + behind);
      dg[h] = fmaf(all, dg[h], on_written * sum_over_lanes<4>(written[h]));
    }
  }

  // x of the tiles [kFrom, kTo) times a number of the channel, the others times `one`, which nobody knows to be 1: ptxas
  // waits for every product into sums of which some were computed and others are as a product left them (C7511).
  template <int kFrom, int kTo>
  __device__ __forceinline__ static void scale_tiles(float low, float high, float one, ChannelSums& x) {
#pragma unroll
    for (int n = 0; n < 2 * kHalfTiles; ++n) {
      const bool within = n >= 2 * kFrom && n < 2 * kTo;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= within ? (e < 2 ? low : high) : one;
    }
  }

  // Step 4 of X from tile kFrom of the half on, and of F up to tile kTo - 1: tile r of all meets them. A group of products
  // each, of which the sums have come.
  template <int kFrom>
  __device__ __forceinline__ void read_tile(int r, const OfChannels& total, float scale, float one, ChannelSums& X_q,
                                            ChannelSums& X_k) const {
    const Keys falling(s.rows[kFalling]);
    const float low = exp2_approx(total[0]), high = exp2_approx(total[1]);
    scale_tiles<kFrom, kHalfTiles>(scale * low, scale * high, one, X_q);
    scale_tiles<kFrom, kHalfTiles>(low, high, one, X_k);
    const auto of_tile = falling.along_columns(first_of_side(), r);
    wgmma_fence(X_q, X_k);
    wgmma<kType, kHalfRows>(X_q, of_tile, LowerTile(s.pairs.P).along_rows(first_token(), r));
    wgmma<kType, kHalfRows>(X_k, of_tile, LowerTile(s.pairs.A).along_rows(first_token(), r));
    wgmma_commit();
  }
  template <int kTo>
  __device__ __forceinline__ void write_tile(int r, const OfChannels& total, float one, ChannelSums& F) const {
    const int channel = first_of_side(), column = first_token();
    scale_tiles<0, kTo>(exp2_approx(total[0]), exp2_approx(total[1]), one, F);
    wgmma_fence(F);
    wgmma<kType, kHalfRows>(F, Keys(s.rows[kRisingQ]).along_columns(channel, r),
                            LowerTile(s.pairs.P).along_columns(column, r));
    wgmma<kType, kHalfRows>(F, Keys(s.rows[kRisingK]).along_columns(channel, r),
                            LowerTile(s.pairs.A).along_columns(column, r));
    wgmma_commit();
  }

  // Step 4: what tiles of the other half bring comes first, to X of the second half and to F of the first. F of the own tiles
  // is scaled while the products of X run, and X while those of F do.
  __device__ __forceinline__ void add_tiles(const OfChannels (&total)[kHalfTiles],
                                            const OfChannels (&other)[kHalfTiles], ChannelSums& X_q, ChannelSums& X_k,
                                            ChannelSums& F) const {
    const float one = __uint_as_float(static_cast<uint32_t>(opaque(0x3f800000)));
    const float scale = args.chunk.problem.scale;
    if (half == 1) {
      read_tile<0>(0, other[0], scale, one, X_q, X_k);
      wgmma_wait<0>(X_q, X_k);
      read_tile<0>(1, other[1], 1.0f, one, X_q, X_k);
      wgmma_wait<0>(X_q, X_k);
    } else {
      write_tile<kHalfTiles>(3, other[1], one, F);
      wgmma_wait<0>(F);
      write_tile<kHalfTiles>(2, other[0], one, F);
      wgmma_wait<0>(F);
    }
    const int first = kHalfTiles * half;
    read_tile<0>(first, total[0], half == 0 ? scale : 1.0f, one, X_q, X_k);
    write_tile<2>(first + 1, total[1], one, F);
    wgmma_wait<1>(X_q, X_k);
    read_tile<1>(first + 1, total[1], 1.0f, one, X_q, X_k);
    wgmma_wait<1>(F);
    write_tile<1>(first, total[0], one, F);
    wgmma_wait<0>(X_q, X_k, F);
  }

  // Step 5 ------------------------------------------------------------------------------------------------------------

  // Where sums over items so far are, as the threads have them.
  __device__ __forceinline__ static int64_t place_of(KeptSum which) {
    constexpr int kSums = kRanges ? kRangeSums : chunk_16bit::kKeySumsPerChannel;
    return (blockIdx.x * int64_t{kSums} + which) * (kChunkRows * kWidth);
  }
  // Adds what the items before this one have. `first` and `last` are of a key head or of a head, and read where they count.
  __device__ __forceinline__ void add_items(const bool& first, const bool& last, KeptSum which, ChannelSums& x) const {
    if (first && last) return;
    float4* kept = reinterpret_cast<float4*>(args.key_sums + place_of(which)) + thread;
#pragma unroll
    for (int n = 0; n < 2 * kHalfTiles; ++n, kept += kWorkers) {
      if (!first) {
        const float4 y = *kept;
        x[n][0] += y.x, x[n][1] += y.y, x[n][2] += y.z, x[n][3] += y.w;
      }
      if (!last) *kept = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
    }
  }

  // The sums of a tile's tokens over the warp's channels: of the lane's tokens, 2 i + e % 2 of C tile i.
  __device__ __forceinline__ void leave_sums(int m, const float (&of_beta)[4], const float (&along)[8]) const {
    const auto place = [&](int which, int number) -> float& {
      const int token = tile_row(m) + 8 * (number / 2) + 2 * (lane % 4) + number % 2;
      return s.exchange.part[which][block_of_channels()][token];
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

  // dg of a tile in place of what its tokens add; dg after the tile becomes that before it.
  __device__ __forceinline__ void sum_back(float (&terms)[2][4], OfChannels& dg) const {
    float left[4] = {dg[0], dg[0], dg[1], dg[1]}, right[4] = {dg[0], dg[0], dg[1], dg[1]};
    sum_tokens<false>(terms[1], terms[0], lane, right, left);
#pragma unroll
    for (int h = 0; h < 2; ++h) dg[h] = __shfl_sync(kAllLanes, left[2 * h], 0, 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) terms[0][e] = left[e], terms[1][e] = right[e];
  }

  // What the tokens of a tile add to dg.
  __device__ __forceinline__ void add_terms(int m, const OfChannels& total, const ChannelSums& X_q,
                                            const ChannelSums& X_k, const ChannelSums& F, float (&terms)[2][4]) const {
    TileWords rising_q, rising_k, falling;
    Keys(s.rows[kRisingQ]).load_c_transposed(tile_row(m), block_of_channels(), lane, rising_q);
    Keys(s.rows[kRisingK]).load_c_transposed(tile_row(m), block_of_channels(), lane, rising_k);
    Keys(s.rows[kFalling]).load_c_transposed(tile_row(m), block_of_channels(), lane, falling);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = exp2_approx(-total[h]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = 2 * m + i, w = 2 * i + h;
        const float2 up_q = unpack<kType>(rising_q[w]), up_k = unpack<kType>(rising_k[w]);
        const float2 down = unpack<kType>(falling[w]);
        const auto term = [&](int e, float on_q, float on_k, float on_down) {
          return inverse * fmaf(on_q, X_q[n][e], fmaf(on_k, X_k[n][e], -(on_down * F[n][e])));
        };
        terms[i][2 * h] = term(2 * h, up_q.x, up_k.x, down.x);
        terms[i][2 * h + 1] = term(2 * h + 1, up_q.y, up_k.y, down.y);
      }
    }
  }

  // What a tile's sums give: dq in place of X_q, dk in place of F, and the terms of -dbeta and of q . dq and k . dk of its
  // tokens.
  __device__ __forceinline__ void finish_tile(int m, const ChannelNumbers& numbers, const ChannelSums& c,
                                              const OfChannels& total, ChannelSums& X_q, const ChannelSums& X_k,
                                              ChannelSums& F, float (&of_beta)[4], float (&along)[8]) const {
    TileWords of_q, of_k;
    Keys(s.q).load_c_transposed(tile_row(m), block_of_channels(), lane, of_q);
    Keys(s.k).load_c_transposed(tile_row(m), block_of_channels(), lane, of_k);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = 2 * m + i;
      const float2 rstd_q = norm_of(numbers.rstd_q, n), rstd_k = norm_of(numbers.rstd_k, n);
      const float2 beta = pair_of(numbers.beta, n), P = pair_of(s.diagonal, n);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 raw_q = unpack<kType>(of_q[2 * i + h]), raw_k = unpack<kType>(of_k[2 * i + h]);
        const auto finish = [&](int e, float q, float k, float b, float P_ii) {
          const float up = exp2_approx(c[n][e] - total[h]), read = up * X_k[n][e];
          X_q[n][e] = fmaf(P_ii, k, up * X_q[n][e]);
          F[n][e] = fmaf(P_ii, q, fmaf(-b, read, exp2_approx(-c[n][e]) * F[n][e]));
          const int token = 2 * i + e % 2;
          of_beta[token] = h == 0 ? k * read : fmaf(k, read, of_beta[token]);
          if constexpr (kNorm) {
            along[token] = h == 0 ? q * X_q[n][e] : fmaf(q, X_q[n][e], along[token]);
            along[4 + token] = h == 0 ? k * F[n][e] : fmaf(k, F[n][e], along[4 + token]);
          }
        };
        finish(2 * h, rstd_q.x * raw_q.x, rstd_k.x * raw_k.x, beta.x, P.x);
        finish(2 * h + 1, rstd_q.y * raw_q.y, rstd_k.y * raw_k.y, beta.y, P.y);
      }
    }
  }

  __device__ __forceinline__ unsigned char* gates_place(bool first) const {
    return s.gates(args.chunk.problem.g.dtype == DType::kF32, first);
  }
  // The gates as the maps have brought them to `place`, and dg as it leaves from there. Of 32 bits, four elements lie where
  // eight of 16 bits do.
  template <class Body>
  __device__ __forceinline__ void for_each_wide(unsigned char* place, const Body& body) const {
    const int block = block_of_channels();
    const uint32_t own = static_cast<uint32_t>(block / 2 * kPanelBytes);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_token() + 2 * (lane % 4) + e % 2, segment = 4 * (block % 2) + e / 2 * 2 + lane / 16;
      const uint32_t at = own + static_cast<uint32_t>(128 * row + ((segment ^ row) & 7) * 16 + lane / 4 % 4 * 4);
#pragma unroll
      for (int n = 0; n < kHalfRows / 8; ++n) body(n, e, *reinterpret_cast<float*>(place + at + 8 * 128 * n));
    }
  }
  __device__ __forceinline__ void read_gates(unsigned char* place, ChannelSums& x) const {
    with_type(args.chunk.problem.g.dtype, [&](auto type) {
      constexpr DType kGate = decltype(type)::value;
      if constexpr (kGate == DType::kF32) {
        for_each_wide(place, [&](int n, int e, const float& gate) { x[n][e] = gate; });
      } else {
#pragma unroll
        for (int m = 0; m < kHalfTiles; ++m) {
          TileWords words;
          Keys(place).load_c_transposed(tile_row(m), block_of_channels(), lane, words);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 pair = unpack<kGate>(words[w]);
            x[2 * m + w / 2][w % 2 * 2] = pair.x;
            x[2 * m + w / 2][w % 2 * 2 + 1] = pair.y;
          }
        }
      }
    });
  }
  __device__ __forceinline__ void write_gates(unsigned char* place, const ChannelSums& x) const {
    with_type(args.chunk.problem.g.dtype, [&](auto type) {
      constexpr DType kGate = decltype(type)::value;
      if constexpr (kGate == DType::kF32) {
        for_each_wide(place, [&](int n, int e, float& gate) { gate = x[n][e]; });
      } else {
#pragma unroll
        for (int m = 0; m < kHalfTiles; ++m) {
          TileWords words;
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float(&tile)[4] = x[2 * m + w / 2];
            words[w] = pack<kGate>(tile[w % 2 * 2], tile[w % 2 * 2 + 1]);
          }
          Keys(place).store_c_transposed(tile_row(m), block_of_channels(), lane, words);
        }
      }
    });
  }

  // By one thread of a side, when all of it have written dg, and have read the gates.
  __device__ __forceinline__ void store_gates(const Item& item) const {
    fence_async_proxy();
    side_barrier(side);
    if (!stores_side()) return;
    const bool wide = args.chunk.problem.g.dtype == DType::kF32;
    if (args.dg.present()) {
      const RowsPlace at = rows_of(item, item.head);
      const uint32_t from =
          shared_address(gates_place(false)) + static_cast<uint32_t>(side * (wide ? 2 : 1) * kPanelBytes);
      const int column = first_of_side(), K = args.chunk.problem.head_dim_k;
      if (column < K) store_box(maps.dg, {column, at.head, at.missing, at.end, at.batch}, from);
      if (wide && column + kGroupColumns / 2 < K) {
        store_box(maps.dg, {column + kGroupColumns / 2, at.head, at.missing, at.end, at.batch}, from + kPanelBytes);
      }
    }
    commit_stores();
    if (wide) {
      wait_stores_read<0>();
      s.gates_free.arrive();
    }
  }

  // Of an item that leaves no dg: the gates' place becomes free without it.
  __device__ __forceinline__ void pass_gates() const {
    if (maps.has_gates && args.chunk.problem.gate_in_kernel) s.gates_again.wait(turn % 2);
    if (stores_side()) {
      if (item_now().last) s.keys_free.arrive();
      if (maps.has_gates && args.chunk.problem.g.dtype == DType::kF32) s.gates_free.arrive();
    }
  }

  // From dg to the gradient of what the gate tensor holds, and the chunk's share of the gate's parameters.
  __device__ __forceinline__ void finish_gates(const Item& item, const ChannelGate& gate, ChannelSums& dg) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const OwnGates own = own_gates(item);
    OfChannels bias = {0, 0};
    float a_log = 0;
    if (p.gate_in_kernel) {
      ChannelSums x;
      if (maps.has_gates) {
        s.gates_again.wait(turn % 2);
        read_gates(gates_place(false), x);
        __syncwarp();
      } else {
        load_channel_gates(p, item, own, x);
      }
      own.clear_others(dg);
      const float rate = gate.rate();
      chunk_16bit::with_gate_kind(p, [&](auto kind) {
#pragma unroll
        for (int n = 0; n < 2 * kHalfTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const GateTerms terms = chunk_16bit::gate_of<decltype(kind)::value>(p, x[n][e], rate, gate.bias[e / 2]);
            a_log = fmaf(terms.a_log, dg[n][e], a_log);
            dg[n][e] *= terms.dx;
            bias[e / 2] += dg[n][e];
          }
        }
      });
    }
    const DeviceTensor& out = args.dg;
    if (maps.has_gates) {
      if (out.present()) write_gates(gates_place(false), dg);
      store_gates(item);
    } else if (out.present()) {
      with_type(out.dtype, [&](auto type) {
        constexpr DType kOut = decltype(type)::value;
        own.for_each<kOut>(out, item, [&](int n, int e, char* at) { store_float(at, kOut, 0, dg[n][e]); });
      });
    }
    if (args.parameter_parts != nullptr) leave_parameters(item, own, bias, a_log);
  }

  // The chunk's share of the gate's parameters: one warp adds what all have left, and the others do not wait for it.
  __device__ __forceinline__ void leave_parameters(const Item& item, const OwnGates& own, OfChannels& bias,
                                                   float a_log) const {
#pragma unroll
    for (int distance = 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) bias[h] += __shfl_xor_sync(kAllLanes, bias[h], distance);
      a_log += __shfl_xor_sync(kAllLanes, a_log, distance);
    }
    a_log += __shfl_xor_sync(kAllLanes, a_log, 4);
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) s.exchange.bias[half][own.channel + 8 * h] = bias[h];
      if (lane % 8 == 0) s.exchange.a_log[thread / 8] = a_log;
    }
    if (thread < kWorkers - kWarpSize) return arrive_at_named_barrier<kSharesReady>(kWorkers);
    named_barrier<kSharesReady>(kWorkers);
    const int64_t K = args.chunk.problem.head_dim_k;
    double* parts = args.parameter_parts + item.at * (1 + K) + 1;
#pragma unroll
    for (int i = 0; i < kWidth / kWarpSize; ++i) {
      const int channel = kWarpSize * i + lane;
      if (channel < K) parts[channel] = double{s.exchange.bias[0][channel]} + s.exchange.bias[1][channel];
    }
    double sum = s.exchange.a_log[lane];
    if constexpr (kSides == 2) sum += s.exchange.a_log[kWarpSize + lane];
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (lane == 0) parts[-1] = sum;
  }

  // The totals of the tokens' sums, by a thread each; with them, after a head's last item, dbeta.
  __device__ __forceinline__ void finish_sums(const Item& item, const ChannelNumbers& numbers) const {
    const int which = thread / kChunkRows, i = thread % kChunkRows;
    if (which >= (kNorm ? kNumRowSums : kAlongQ)) return;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < Block::kChannelBlocks; ++w) sum += s.exchange.part[which][w][i];
    if (which != kOfBeta) {
      if (!item.first || !item.last) {
        float& kept = args.key_sums[place_of(kOfTokens) + thread];
        if (!item.first) sum += kept;
        kept = sum;
      }
      const float rstd = which == kAlongQ ? numbers.rstd_q[i] : numbers.rstd_k[i];
      s.exchange.total[which][i] = rstd * rstd * sum;
    } else if (args.dbeta.present() && i < item.span.length) {
      if constexpr (kRanges) {  // the ranges before are added to Y . v
        float &kept = args.key_sums[place_of(kOfTokens) + thread], &yv = s.exchange.total[kOfBeta][i];
        if (!item.opens) yv += kept;
        kept = yv - sum;
        if (!item.closes) return;
      }
      const DeviceTensor& out = args.dbeta;
      store_float(out.data, out.dtype, row_offset(out, item.span.batch, item.span.begin + i, item.head),
                  beta_adjoint(args.chunk.problem, numbers.beta[i], s.exchange.total[kOfBeta][i] - sum));
    }
  }

  // What the thread has of q or k, which the norm needs.
  using Rows = TileWords[kHalfTiles];
  __device__ __forceinline__ void load_rows(const Keys& rows, Rows& words) const {
    if constexpr (kNorm) {
#pragma unroll
      for (int m = 0; m < kHalfTiles; ++m) rows.load_c_transposed(tile_row(m), block_of_channels(), lane, words[m]);
    }
  }

  // dq or dk, through the norm, to the place of q or k. `along` has the factors rstd^2 x . dx.
  __device__ __forceinline__ void leave(const Keys& rows, const float* rstd, const float* along, const ChannelSums& y,
                                        Rows& words) const {
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = 2 * m + i;
        const float2 on = norm_of(rstd, n), sum = norm_of(along, n);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t& word = words[m][2 * i + h];
          float2 dx = make_float2(y[n][2 * h], y[n][2 * h + 1]);
          if constexpr (kNorm) {
            const float2 x = unpack<kType>(word);
            dx = make_float2(fmaf(-sum.x, x.x, on.x * dx.x), fmaf(-sum.y, x.y, on.y * dx.y));
          }
          word = pack<kType>(dx.x, dx.y);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kHalfTiles; ++m) rows.store_c_transposed(tile_row(m), block_of_channels(), lane, words[m]);
  }

  // By one thread of a side.
  __device__ __forceinline__ bool stores_side() const { return half == 0 && thread % kGroupThreads == 0; }
  __device__ __forceinline__ void store_keys(const Item& item) const {
    fence_async_proxy();
    side_barrier(side);
    if (!stores_side()) return;
    const RowsPlace at = rows_of(item, item.key_head);
    const int column = first_of_side();
    const bool stores = column < args.chunk.problem.head_dim_k;
    if (stores && args.dq.present()) {
      store_box(maps.dq, {column, at.head, at.missing, at.end, at.batch}, Keys(s.q).panel(side));
    }
    if (stores && args.dk.present()) {
      store_box(maps.dk, {column, at.head, at.missing, at.end, at.batch}, Keys(s.k).panel(side));
    }
    commit_stores();
  }

  // A half's share of dg after the last token, or what the second half's tokens add to dg before them.
  __device__ __forceinline__ void leave(float (&place)[kWidth], const OfChannels& x) const {
    if (lane % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) place[16 * block_of_channels() + lane / 4 + 8 * h] = x[h];
  }

  // dg after the half's last token.
  __device__ __forceinline__ void add_ends(ChannelSums& dg) const {
    OfChannels after;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = 16 * block_of_channels() + lane / 4 + 8 * h;
      after[h] = s.exchange.end[0][channel] + s.exchange.end[1][channel];
      if (half == 0) after[h] += s.exchange.after_first[channel];
    }
#pragma unroll
    for (auto& tile : dg) {
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[e] += after[e / 2];
    }
  }

  // Step 5. `end`: the half's share of dg after the last token.
  __device__ __forceinline__ void finish(const ChannelSums& c, const OfChannels (&total)[kHalfTiles],
                                         const OfChannels& end, ChannelSums& X_q, ChannelSums& X_k, ChannelSums& F) {
    // Here, because `yv` may be that of the next item when the sums are complete.
    if (thread < kChunkRows) {
      float sum = s.yv[0][thread];
      if constexpr (kSides == 2) sum += s.yv[1][thread];
      s.exchange.total[kOfBeta][thread] = sum;
    }
    leave(s.exchange.end[half], end);
    forget();
    OfChannels added = {0, 0};
#pragma unroll
    for (int m = kHalfTiles - 1; m >= 0; --m) {
      float of_beta[4] = {}, along[8] = {};
      if (tile_row(m) < item_now().span.length) {  // else all sums are 0
        float terms[2][4];
        add_terms(m, total[m], X_q, X_k, F, terms);
        forget();
        sum_back(terms, added);
        finish_tile(m, numbers_now(), c, total[m], X_q, X_k, F, of_beta, along);
#pragma unroll
        for (int e = 0; e < 4; ++e) X_k[2 * m][e] = terms[0][e], X_k[2 * m + 1][e] = terms[1][e];
      }
      leave_sums(m, of_beta, along);
    }
    forget();
    if (half == 1) leave(s.exchange.after_first, added);
    add_items(item_now().first, item_now().last, kOfQueries, X_q);
    add_items(item_now().first, item_now().last, kOfKeys, F);
    named_barrier<kPartsReady>(kWorkers);
    // It comes while dq and dk leave.
    const ChannelGate gate(args.chunk.problem, item_now().head, own_gates(item_now()));
    add_ends(X_k);
    fence_async_proxy();
    release_pairs();
    finish_sums(item_now(), numbers_now());
    if (item_now().last) {
      Rows q, k;  // on their way while the warps meet
      load_rows(Keys(s.q), q);
      load_rows(Keys(s.k), k);
      if constexpr (kNorm) named_barrier<kTotalsReady>(kWorkers);
      forget();
      leave(Keys(s.q), numbers_now().rstd_q, s.exchange.total[kAlongQ], X_q, q);
      leave(Keys(s.k), numbers_now().rstd_k, s.exchange.total[kAlongK], F, k);
      store_keys(item_now());
    }
    forget();
    if constexpr (kRanges) {
      add_items(item_now().opens, item_now().closes, kOfGates, X_k);
      if (!item_now().closes) return pass_gates();
    }
    finish_gates(item_now(), gate, X_k);
    if (item_now().last && stores_side()) {  // dq and dk have long been read; dg may be on its way
      maps.has_gates ? wait_stores_read<1>() : wait_stores_read<0>();
      s.keys_free.arrive();
    }
  }

  // Steps 2 to 5, of the gates in `c`. Returns whether the item is strong, and nothing of it was finished.
  __device__ __forceinline__ bool gradients(const ChannelGate& gate, ChannelSums& c) {
    const Keys d_o(s.d_o);
    const StatesTile S(s.S), G(s.G);
    const WrittenTile Y(s.Y), R(s.reader);
    ChannelSums X_q, X_k, F;
    OfChannels total[kHalfTiles], other[kHalfTiles], end;
    {
      ChannelPairs x;
      if (side == 0) {
        wgmma_fence(x);
#pragma unroll
        for (int m = 0; m < kKeySteps<kWidth>; ++m) {
          wgmma<kType, 32>(x, d_o.along_rows(0, m), R.along_columns(first_token(), m), m > 0);
        }
        wgmma_commit();
      } else {
        wgmma_fence(x);
#pragma unroll
        for (int m = 0; m < kKeySteps<kWidth>; ++m) {
          wgmma<kType, 32>(x, Y.along_columns(0, m), R.along_columns(first_token(), m), m > 0);
        }
        wgmma_commit();
      }
      ChannelPairs A;  // where x of all is P
      if constexpr (kSides == 1) {
        wgmma_fence(A);
#pragma unroll
        for (int m = 0; m < kKeySteps<kWidth>; ++m) {
          wgmma<kType, 32>(A, Y.along_columns(0, m), R.along_columns(first_token(), m), m > 0);
        }
        wgmma_commit();
      }
      wgmma_fence(X_q, X_k);
#pragma unroll
      for (int m = 0; m < kKeySteps<kWidth>; ++m) {
        wgmma<kType, kHalfRows>(X_q, S.along_columns(first_of_side(), m), d_o.along_rows(first_token(), m), m > 0);
      }
#pragma unroll
      for (int m = 0; m < kKeySteps<kWidth>; ++m) {
        wgmma<kType, kHalfRows>(X_k, S.along_columns(first_of_side(), m), Y.along_columns(first_token(), m), m > 0);
      }
      wgmma_commit();
      if (!sum_gates(item_now(), gate, c, total)) s.strong[turn % 2] = 1;
      forget();
      if constexpr (kSides == 1) {
        wgmma_wait<1>(x, A);
        make_pairs(true, x);
        make_pairs(false, A);
      } else {
        wgmma_wait<1>(x);
        make_pairs(side == 0, x);
      }
    }
    if (thread == 0) s.strong[(turn + 1) % 2] = 0;
    const bool waits =
        item_now().first;  // read before the products, behind which loads from shared memory stand in line
    const uint32_t keys = s.keys[turn % 2] % 2;
    s.third_filled.wait(turn % 2);
    wgmma_fence(F);
#pragma unroll
    for (int m = 0; m < kKeySteps<kWidth>; ++m) {
      wgmma<kType, kHalfRows>(F, G.along_columns(first_of_side(), m), R.along_columns(first_token(), m), m > 0);
    }
    wgmma_commit();
    if (waits) s.keys_filled.wait(keys);
    forget();
    make_rows(numbers_now(), c, total);
    dot_states(end);
    fence_async_proxy();
    named_barrier<kChannelPairsReady>(kWorkers);
    const bool strong = s.strong[turn % 2] != 0;
    take_totals(other);
    wgmma_wait<0>(X_q, X_k, F);
    release(s.states_free, lane);
    forget();
    end_gradients(total, other, F, end);
    add_tiles(total, other, X_q, X_k, F);
    named_barrier<kRoundsDone>(kWorkers);
    forget();
    if constexpr (Block::kServesItself) {
      if (serves()) bringer(turn + 1).bring_states();
      forget();
    }
    if (!strong) {
      finish(c, total, end, X_q, X_k, F);
    } else {
      fence_async_proxy();
      release_pairs();
      pass_gates();
    }
    return strong;
  }

  __device__ __forceinline__ void run() {
    if constexpr (Block::kServesItself) {
      forget();
      if (half == 0 && warp == 0) {
        const OwnBringer<Block, kRanges> first = bringer(0);
        first.name();
        first.bring_states();
        first.bring_pairs();
        first.bring_rest();
      }
    }
    for (;; state += kWorkers) {
      forget();
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      if (item_now().span.sequence < 0) break;
      const Item& item = item_now();
      ChannelSums c;
      const OwnGates own = own_gates(item);
      const ChannelGate gate(args.chunk.problem, item.head, own);  // it and the gates come while step 1 works
      if (!maps.has_gates) load_channel_gates(args.chunk.problem, item, own, c);
      s.first_filled.wait(turn % 2);
      writes(numbers_now(), c);
      fence_async_proxy();
      named_barrier<kChannelWritesReady>(kWorkers);
      forget();
      s.second_filled.wait(turn % 2);
      const bool strong = gradients(gate, c);
      if (thread == 0 && (strong || item_now().first)) args.left[item_now().pair] = strong;
      if constexpr (Block::kServesItself) {  // by the warp that stores
        if (half == 0 && warp == 0) bringer(turn + 1).bring_rest();
      }
      release(s.numbers_free[turn % 2], lane);
    }
    if (stores_side()) wait_stores_read<0>();
  }
};

template <DType kType, class Block, bool kNorm, bool kRanges>
__global__ void __launch_bounds__(Block::kThreads, Block::kBlocksOnOne)
    channel_gradients_kernel(const __grid_constant__ GradientArgs args,
                             const __grid_constant__ ChannelGradientMaps maps) {
  auto& s = aligned_shared<typename Block::Shared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      s.numbers_filled[i].init(1);
      // Of those that bring, less the one that names the items, and the one of the gates.
      s.numbers_free[i].init(Block::kWorkerWarps + (Block::kServesItself ? 0 : kBringers));
      s.strong[i] = 0;
    }
    s.keys_filled.init(1);
    s.keys_free.init(Block::kSides);
    s.first_filled.init(2);
    s.second_filled.init(1);
    s.third_filled.init(1);
    s.states_free.init(Block::kWorkerWarps);
    s.pairs_free.init(Block::kWorkerWarps);
    s.gates_filled.init(1);
    s.gates_again.init(1);
    s.gates_free.init(Block::kSides);
    fence_barrier_init();
  }
  wait_for_previous_kernels();
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if constexpr (Block::kServesItself) {
    ChannelGradientGroup<kType, Block, kNorm, kRanges>{args, maps, s, threadIdx.x}.run();
  } else if (warp >= Block::kWorkerWarps) {
    give_registers<Block::kOtherRegisters>();
    const int role = warp - Block::kWorkerWarps;
    if (role == kBringers) {
      GateBringer<Block>{args, maps, s, lane}.run();
    } else if (elect_one()) {
      ChannelBringer<Block, kRanges>{args, maps, s}.run(role);
    }
  } else {
    take_registers<Block::kWorkRegisters>();
    ChannelGradientGroup<kType, Block, kNorm, kRanges>{args, maps, s, threadIdx.x}.run();
  }
}

}  // namespace

template <DType kType>
void launch_channel_gradients(const GradientArgs& args, const ChannelGradientMaps& maps, int64_t blocks,
                              const Context& context) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const auto of = [&]<class Block, bool kNorm>() {
    const LaunchShape shape{static_cast<unsigned>(blocks), Block::kThreads, sizeof(typename Block::Shared), true};
    constexpr const char* kName = "delta_rule chunk_sm90 gradients per channel";
    p.head_dim_v > Block::kWidth
        ? launch<channel_gradients_kernel<kType, Block, kNorm, true>>(kName, context, shape, args, maps)
        : launch<channel_gradients_kernel<kType, Block, kNorm, false>>(kName, context, shape, args, maps);
  };
  const auto with = [&]<class Block>() {
    p.qk_l2norm ? of.template operator()<Block, true>() : of.template operator()<Block, false>();
  };
  padded_k(p.head_dim_k) == 64 ? with.template operator()<ChannelGradientBlock<64>>()
                               : with.template operator()<ChannelGradientBlock<128>>();
}

}  // namespace fastweight::cuda::chunk_sm90
