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
#include "cuda/delta_rule/chunk_sm90/gradient_channel_products.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// Step 5, and all of them in order. The others are in gradient_channel_products.cuh.
template <DType kType, class Block, bool kNorm, bool kRanges>
struct ChannelGradientGroup : ChannelProducts<kType, Block, kNorm, kRanges> {
  using Products = ChannelProducts<kType, Block, kNorm, kRanges>;
  using Products::args, Products::maps, Products::s, Products::state, Products::thread, Products::lane;
  using Products::dot_states, Products::end_gradients, Products::add_tiles;
  using Products::finish_gates, Products::pass_gates;
  using Products::first_token, Products::first_of_side, Products::block_of_channels, Products::tile_row;
  using Products::item_now, Products::numbers_now, Products::own_gates, Products::pair_of, Products::norm_of;
  using Products::kWidth, Products::kSides, Products::kWorkers;
  using Products::serves, Products::bringer, Products::release_pairs, Products::stores_side;
  using Products::side, Products::half, Products::warp, Products::turn, Products::forget;
  using Products::writes, Products::make_pairs, Products::sum_gates, Products::take_totals, Products::make_rows;
  using Keys = typename Block::Keys;
  using StatesTile = typename Block::StatesTile;
  using WrittenTile = typename Block::WrittenTile;

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
  if (!args.progress.present()) wait_for_previous_kernels();
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if constexpr (Block::kServesItself) {
    ChannelGradientGroup<kType, Block, kNorm, kRanges>{{{args, maps, s, threadIdx.x}}}.run();
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
    ChannelGradientGroup<kType, Block, kNorm, kRanges>{{{args, maps, s, threadIdx.x}}}.run();
  }
  if (!args.progress.present()) return;
  __syncthreads();  // a warp that waits for the kernel before keeps its other lanes from working
  wait_for_previous_kernels();
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
