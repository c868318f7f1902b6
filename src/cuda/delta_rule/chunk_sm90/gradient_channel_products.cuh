// Steps 1 to 4 of the gradients with a decay per channel (gradients_per_channel.cuh): products, and the rows between.
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_channel_group.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

template <DType kType, class Block, bool kNorm, bool kRanges>
struct ChannelProducts : ChannelGroup<kType, Block, kNorm, kRanges> {
  using Group = ChannelGroup<kType, Block, kNorm, kRanges>;
  using Group::args, Group::maps, Group::s, Group::lane, Group::side, Group::half, Group::warp, Group::turn;
  using Group::first_token, Group::first_of_side, Group::block_of_channels, Group::tile_row;
  using Group::kWidth, Group::kWorkers;
  using Group::pair_of, Group::norm_of, Group::own_gates, Group::read_gates, Group::gates_place;
  using Group::serves, Group::bringer, Group::stores_side;
  using Keys = typename Block::Keys;
  using StatesTile = typename Block::StatesTile;
  using WrittenTile = typename Block::WrittenTile;

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
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
