// The gradients of every chunk on Hopper, for one decay per head or none and K, V <= 128. See ../chunk_16bit/gradient.cuh
// for the equations, and ../chunk_16bit/gradients.cuh for how norms and sums of M go into them: this kernel computes the
// same.
//
// A block takes one pair of a chunk and a key head after the other, and of each the value heads of the group, whose dq and
// dk add up in registers. One warp brings the operands of the next head by TMA while two warpgroups work on one:
//
//     1   a warpgroup has 64 value columns:      X = S^T k^T,   R^T = bD^T J^T,   bD^T = beta (v^T - e X)
//     2   one has P, the other A:                dP = d_o R^T,  or  dA = -Y R^T and k k^T
//         with all decays and norms they become operands, P' in the place of sP, and A' + A'^T; and sums of M
//     3   a warpgroup has 64 channels:           dq = scale e (d_o S^T) + P' k
//                                                dk = -beta e (Y S^T) + (A' + A'^T) k + P'^T q + w (R G^T)
//
// dq and dk leave through the tiles of q and k. A warpgroup writes only the panel that it alone reads in step 3.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_tokens.cuh"
#include "cuda/delta_rule/chunk_sm90/gradients.h"
#include "cuda/delta_rule/chunk_sm90/scan.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::GradientArgs;
using chunk_16bit::Item;
using chunk_16bit::kRowNumbers;

constexpr int kGradientThreads = 3 * kGroupThreads, kWorkers = 2 * kGroupThreads;
constexpr int kGradientRegisters = 208, kBringerRegisters = 88;

using StatesTile = PanelTile<kWidth, kWidth>;        // S^T and G^T: a row per value column
using WrittenTile = PanelTile<kWidth, kChunkRows>;   // Y^T and R^T
using HalfTile = PanelTile<kChunkRows, kWidth / 2>;  // a panel of a tile of tokens
using Rows = float[kWidth / 16][4];                  // [64 tokens x 64 channels] as C tiles of a warp's 16 tokens

struct GradientNumbers {
  float row[kRowNumbers * kChunkRows], token[kTokenFactors * kChunkRows];
};

// Barriers `filled` and `free` as in TransactionBarrier. What is free together is brought together:
//
//     numbers   the item and its numbers per token; free when the item is done
//     keys      k and q, for all heads of a group; free when dq and dk have left
//     first     v and J: free after step 1
//     states    S, Y, d_o and G: free after the products of step 3 with them
//     pairs     sP, then P': free after the products of step 3 with it
//
// Step 1 waits for `first_filled`: v, J, S and Y; step 2 for `second_filled`: d_o and sP; step 3 for `third_filled`: G.
struct alignas(1024) GradientShared {
  unsigned char k[2][KeyTile::kBytes], q[2][KeyTile::kBytes];
  unsigned char S[StatesTile::kBytes], G[StatesTile::kBytes];
  unsigned char v[KeyTile::kBytes], d_o[KeyTile::kBytes];
  unsigned char Y[WrittenTile::kBytes], R[WrittenTile::kBytes];
  unsigned char J[LowerTile::kBytes], P[LowerTile::kBytes], A[LowerTile::kBytes];
  GradientNumbers numbers[2];

  // As in the Shared of chunk_16bit, but that rows of A have one part.
  float beta[kChunkRows];
  float yv[2][kChunkRows];
  float columns[2][chunk_16bit::kBlocks][kChunkRows];
  float row_of_P[kChunkRows], row_below_P[kChunkRows];
  float row_of_A[2][kChunkRows], row_below_A[2][kChunkRows];
  float within[2][kChunkRows];
  float a_q[2][kChunkRows], a_k[2][kChunkRows], b[2][kChunkRows];
  float along_q[kChunkRows], along_k[kChunkRows];
  float state_dot[kWorkers / kWarpSize];

  Item items[2];
  TransactionBarrier numbers_filled[2], numbers_free[2], keys_filled[2], keys_free[2];
  TransactionBarrier first_filled, second_filled, third_filled, first_free, states_free, pairs_free;
};

__device__ __forceinline__ RowsPlace rows_of(const Item& item, int head) {
  const auto length = static_cast<int>(item.span.length);
  return {head, kChunkRows - length, static_cast<int>(item.span.begin) + length, static_cast<int>(item.span.batch)};
}

// The warp that brings the operands, by one lane
// ------------------------------------------------------------------------------------

struct Bringer {
  const GradientArgs& args;
  const GradientMaps& maps;
  GradientShared& s;

  __device__ __forceinline__ void bring_keys(const Item& item, uint32_t turn) const {
    const RowsPlace at = rows_of(item, item.key_head);
    TransactionBarrier& filled = s.keys_filled[turn % 2];
    s.keys_free[turn % 2].wait(turn / 2 % 2 ^ 1);
    filled.arrive_expecting(2 * KeyTile::kBytes);
    load_panels(KeyTile(s.k[turn % 2]), maps.k, 0, at, filled);
    load_panels(KeyTile(s.q[turn % 2]), maps.q, 0, at, filled);
  }

  __device__ __forceinline__ void bring_numbers(const Item& item, uint32_t turn) const {
    TransactionBarrier& filled = s.numbers_filled[turn % 2];
    GradientNumbers& numbers = s.numbers[turn % 2];
    s.numbers_free[turn % 2].wait(turn / 2 % 2 ^ 1);
    s.items[turn % 2] = item;
    if (item.span.sequence < 0) return filled.arrive();
    filled.arrive_expecting(sizeof(GradientNumbers));
    const chunk_16bit::ChunkFactors& factors = args.chunk.factors;
    load_bytes(shared_address(numbers.row), factors.row + item.factors * kRowNumbers * kChunkRows, sizeof(numbers.row),
               filled);
    load_bytes(shared_address(numbers.token), factors.token + item.factors * kTokenFactors * kChunkRows,
               sizeof(numbers.token), filled);
  }

  template <int kColumns>
  __device__ __forceinline__ static void load_rows(const PanelTile<kWidth, kColumns>& tile, const TensorMap& map,
                                                   int slot, TransactionBarrier& filled) {
    using Tile = PanelTile<kWidth, kColumns>;
#pragma unroll
    for (int at = 0; at < 2 * Tile::kPanels; ++at) {
      const int p = at / 2, row = at % 2 * (kWidth / 2);
      load_box(tile.panel(p) + static_cast<uint32_t>(row * Tile::kRowBytes), map, {p * Tile::kPanelColumns, row, slot},
               filled);
    }
  }

  __device__ __forceinline__ void bring_operands(const Item& item, uint32_t turn) const {
    const uint32_t busy = turn % 2 ^ 1;
    const RowsPlace at = rows_of(item, item.head);
    const auto factors = static_cast<int>(item.factors), slot = static_cast<int>(item.slot);
    s.first_free.wait(busy);
    s.first_filled.arrive_expecting(KeyTile::kBytes + LowerTile::kBytes + StatesTile::kBytes + WrittenTile::kBytes);
    load_panels(KeyTile(s.v), maps.v, 0, at, s.first_filled);
    load_lower(s.J, maps.J, factors, s.first_filled);
    s.states_free.wait(busy);
    const auto chunk = static_cast<int>(first_chunk_of(args.chunk.chunked, item.span.sequence) + item.span.position);
    const StatesTile S(s.S), G(s.G);
#pragma unroll
    for (int p = 0; p < StatesTile::kPanels; ++p) {
      load_box(S.panel(p), maps.S, {p * StatesTile::kPanelColumns, 0, item.head, chunk, at.batch}, s.first_filled);
    }
    load_rows(WrittenTile(s.Y), maps.Y, slot, s.first_filled);
    s.second_filled.arrive_expecting(KeyTile::kBytes + LowerTile::kBytes);
    load_panels(KeyTile(s.d_o), maps.d_o, 0, at, s.second_filled);
    s.third_filled.arrive_expecting(StatesTile::kBytes);
    load_rows(G, maps.G, slot, s.third_filled);
    s.pairs_free.wait(busy);
    load_lower(s.P, maps.sP, factors, s.second_filled);
  }

  __device__ __forceinline__ void run() const {
    const chunk_16bit::BackProgress& progress = args.progress;
    Item item;
    chunk_16bit::first_item<kWidth>(args.chunk, chunk_16bit::first_pair(args), item);
    uint32_t keys = 0;
    for (uint32_t turn = 0;; ++turn) {
      const bool exists = item.span.sequence >= 0;
      if (exists && item.first) bring_keys(item, keys++);
      bring_numbers(item, turn);
      if (!exists) return;
      if (progress.present()) {
        while (!chunk_16bit::is_ready(args, item)) {
        }
        fence_async_proxy_global();
      }
      bring_operands(item, turn);
      Item next;
      const int64_t pair = !item.last           ? 0
                           : progress.present() ? chunk_16bit::pair_from_the_end(args.chunk, claim(progress.counter))
                                                : item.pair + gridDim.x;
      chunk_16bit::find_next<kWidth>(args.chunk, item, pair, next);
      item = next;
    }
  }
};

// The warpgroups
// --------------------------------------------------------------------------------------------------------------------

// Among the threads of a warpgroup, and among both. finish_head has barriers 1 and 2.
__device__ __forceinline__ void half_barrier(int group) {
  group == 0 ? named_barrier<3>(kGroupThreads) : named_barrier<4>(kGroupThreads);
}
enum { kWritesReady = 5, kPairsReady, kDotsReady, kAlongReady };

// Scales the lane's two rows, and puts their inner products with those of a panel into `dots`.
template <DType kType>
__device__ __forceinline__ void scale_and_dot(const HalfTile& tile, const float* factors, float sign, int warp,
                                              int lane, Rows& sums, float* dots) {
  const int i = 16 * warp + lane / 4;
  const float factor[2] = {sign * factors[i], sign * factors[i + 8]};
  float dot[2] = {0, 0};
#pragma unroll
  for (int m = 0; m < kWidth / 32; ++m) {
    uint32_t x[4];
    tile.load_a(16 * warp, m, lane, x);
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

template <DType kType>
struct GradientGroup {
  const GradientArgs& args;
  const GradientMaps& maps;
  GradientShared& s;
  int group, warp, lane;  // the warp within the warpgroup
  int thread;             // of both

  // After which nothing is known of the thread's numbers: what is computed from them is computed where it is needed, not
  // before the loop and kept. Registers are short.
  __device__ __forceinline__ void forget() {
    lane = opaque_below<kWarpSize>(lane);
    thread = opaque_below<kWorkers>(thread);
  }

  __device__ __forceinline__ bool has_token() const { return thread < kChunkRows; }
  __device__ __forceinline__ void release(TransactionBarrier& free) const {
    __syncwarp();
    if (lane == 0) free.arrive();
  }

  // Y . v over the warpgroup's value columns, of the warp's tokens.
  __device__ __forceinline__ void dot_values() const {
    const HalfTile v(s.v + group * HalfTile::kBytes);
    const WrittenTile Y(s.Y);
    float dot[2] = {0, 0};
#pragma unroll
    for (int m = 0; m < kGroupColumns / 16; ++m) {
      uint32_t x[4], y[4];
      v.load_a(16 * warp, m, lane, x);
      Y.load_c_transposed(kGroupColumns * group + 16 * m, warp, lane, y);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 left = unpack<kType>(x[e]), right = unpack<kType>(y[e]);
        dot[e % 2] = fmaf(left.y, right.y, fmaf(left.x, right.x, dot[e % 2]));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_over_lanes<4>(dot[half]);
      if (lane % 4 == 0) s.yv[group][16 * warp + lane / 4 + 8 * half] = sum;
    }
  }

  // Step 1.
  __device__ __forceinline__ void writes(const KeyTile& k, const GradientNumbers& numbers) const {
    const StatesTile S(s.S);
    const LowerTile J(s.J);
    const WrittenTile R(s.R);
    TokenSums X;
    wgmma_fence(X);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, kChunkRows>(X, S.along_rows(kGroupColumns * group, m), k.along_rows(0, m), m > 0);
    }
    wgmma_commit();
    dot_values();
    wgmma_wait<0>(X);
    Fragments<kTokenSteps> bD;
    correct<kType>(ValueTile(s.v + group * ValueTile::kBytes), numbers.token, warp, lane, X, bD);
    wgmma_fence(X, bD);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, bD[m], J.along_rows(0, m), m > 0);
    wgmma_commit();
    wgmma_wait<0>(X);
    release(s.first_free);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      uint32_t a[4];
      pack_a<kType>(X[2 * m], X[2 * m + 1], a);
      R.store_a(kGroupColumns * group + 16 * warp, m, lane, a);
    }
  }

  // Element e of tile n of pairs (i, j): body(j, f) where i - j is at least kBelow, with f = rstd_j exp(gamma_i - gamma_j).
  template <int kBelow, class Body>
  __device__ __forceinline__ void for_each_pair(const GradientNumbers& numbers, int n, const Body& body) const {
    const float* gamma = numbers.row + chunk_16bit::kGamma * kChunkRows;
    const float* rstd = numbers.row + chunk_16bit::kRstdOfK * kChunkRows;
    const int i = 16 * warp + lane / 4, j = 8 * n + 2 * (lane % 4);
    const float gamma_i[2] = {gamma[i], gamma[i + 8]};
    const float2 gamma_j = *reinterpret_cast<const float2*>(gamma + j);
    const float2 rstd_j = *reinterpret_cast<const float2*>(rstd + j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float f =
          (e % 2 == 0 ? rstd_j.x : rstd_j.y) * exp2_approx(gamma_i[e / 2] - (e % 2 == 0 ? gamma_j.x : gamma_j.y));
      body(e, i + 8 * (e / 2) >= j + e % 2 + kBelow, f);
    }
  }

  // Step 2, P: dP becomes P' in the place of sP, and M^P.
  __device__ __forceinline__ void pairs_of_P(const GradientNumbers& numbers) const {
    const KeyTile d_o(s.d_o);
    const WrittenTile R(s.R);
    const LowerTile P(s.P);
    TokenSums M;
    wgmma_fence(M);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, kChunkRows>(M, d_o.along_rows(0, m), R.along_columns(0, m), m > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(M);
    const float* rstd = numbers.row + chunk_16bit::kRstdOfQ * kChunkRows + 16 * warp + lane / 4;
    const float scale = args.chunk.problem.scale, on_rows[2] = {scale * rstd[0], scale * rstd[8]};
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      if (m > warp) continue;
      uint32_t sP[4];
      P.load_a(16 * warp, m, lane, sP);
      float operand[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float(&c)[4] = M[2 * m + h];
        for_each_pair<0>(numbers, 2 * m + h, [&](int e, bool there, float f) {
          const float2 pair = unpack<kType>(sP[2 * h + e / 2]);
          operand[h][e] = there ? on_rows[e / 2] * f * c[e] : 0.0f;
          c[e] = there ? c[e] * (e % 2 == 0 ? pair.x : pair.y) : 0.0f;
        });
      }
      pack_a<kType>(operand[0], operand[1], sP);
      P.store_a(16 * warp, m, lane, sP);
    }
    chunk_16bit::add_up<kTokenSteps>(s, {chunk_16bit::kPairsOfP, warp, 0, warp + 1}, 0, make_float2(1, 1), lane, M);
  }

  // Step 2, A: dA becomes A' + A'^T, and M^A.
  __device__ __forceinline__ void pairs_of_A(const KeyTile& k, const GradientNumbers& numbers) const {
    const WrittenTile Y(s.Y), R(s.R);
    const LowerTile A(s.A);
    TokenSums M, kk;
    wgmma_fence(M, kk);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, kChunkRows>(M, Y.along_columns(0, m), R.along_columns(0, m), m > 0);
    }
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(kk, k.along_rows(0, m), k.along_rows(0, m), m > 0);
    wgmma_commit();
    wgmma_wait<0>(M, kk);
    const int i = 16 * warp + lane / 4;
    const float* of_row = numbers.row + chunk_16bit::kRstdOfK * kChunkRows + i;
    const float* of_beta = numbers.token + kOnValue * kChunkRows + i;
    const float rstd[2] = {-of_row[0], -of_row[8]}, beta[2] = {of_beta[0], of_beta[8]};
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      if (m > warp) continue;
      float operand[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float(&c)[4] = M[2 * m + h];
        for_each_pair<1>(numbers, 2 * m + h, [&](int e, bool there, float f) {
          const float x = c[e] * (rstd[e / 2] * f);
          operand[h][e] = there ? beta[e / 2] * x : 0.0f;
          c[e] = there ? x * kk[2 * m + h][e] : 0.0f;
        });
      }
      uint32_t a[4];
      pack_a<kType>(operand[0], operand[1], a);
      if (m < warp) {
        A.store_c_transposed(16 * m, warp, lane, a);
      } else {  // strictly lower: the transposed block has its elements where this one has zeros
        a[0] |= transpose_8x8(a[0]);
        a[2] = transpose_8x8(a[1]);
        a[3] |= transpose_8x8(a[3]);
      }
      A.store_a(16 * warp, m, lane, a);
    }
    chunk_16bit::add_up<kTokenSteps>(s, {chunk_16bit::kPairsOfA, warp, 0, warp + 1}, 0, make_float2(beta[0], beta[1]),
                                     lane, M);
  }

  // <S, G>: a row of a panel for each thread.
  __device__ __forceinline__ void dot_states() const {
    float sum = 0;
#pragma unroll 2
    for (int at = 0; at < StatesTile::kRowBytes; at += 16) {
      const uint32_t offset =
          static_cast<uint32_t>(group * StatesTile::kPanelBytes) +
          swizzled(Swizzle::k128, static_cast<uint32_t>(thread % kWidth * StatesTile::kRowBytes + at));
      const uint4 x = *reinterpret_cast<const uint4*>(s.S + offset), y = *reinterpret_cast<const uint4*>(s.G + offset);
      const uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack<kType>(left[i]), b = unpack<kType>(right[i]);
        sum = fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
      }
    }
    sum = sum_over_lanes<kWarpSize>(sum);
    if (lane == 0) s.state_dot[thread / kWarpSize] = sum;
  }

  // The item's share of q . dq and k . dk of a row, and of dbeta but for Y . v.
  __device__ __forceinline__ float along_q(int i) const { return s.row_of_P[i] + s.a_q[0][i] + s.a_q[1][i]; }
  __device__ __forceinline__ float reading(int i) const { return s.a_k[0][i] + s.a_k[1][i] + s.row_of_A[0][i]; }
  __device__ __forceinline__ float along_k(int i) const {
    float writing = s.b[0][i] + s.b[1][i];
    for (int row = i / 16; row < chunk_16bit::kBlocks; ++row) {
      writing += s.columns[chunk_16bit::kPairsOfP][row][i] + s.columns[chunk_16bit::kPairsOfA][row][i];
    }
    return s.beta[i] * reading(i) + writing;
  }

  // The numbers of the thread's token, when all sums of the item are there.
  __device__ __forceinline__ void finish_token(const Item& item, const GradientNumbers& numbers,
                                               chunk_16bit::TokenSums& sums) const {
    if (item.first) sums.along_q = sums.along_k = 0;
    sums.dbeta = sums.yv + reading(thread);
    sums.along_q += along_q(thread);
    sums.along_k += along_k(thread);
    if (args.chunk.problem.gate != Gate::kNone) {
      float states = 0;
      for (float one : s.state_dot) states += one;
      const float last = numbers.row[chunk_16bit::kGamma * kChunkRows + kChunkRows - 1];
      sums.dg = chunk_16bit::gate_gradient(s, thread, lane) + exp2_approx(last) * states;
    }
    s.along_q[thread] = sums.along_q;
    s.along_k[thread] = sums.along_k;
    chunk_16bit::finish_head(args, item, s, thread, lane, sums);
  }

  // dq or dk to its panel, in the place of q or k.
  __device__ __forceinline__ void leave(const HalfTile& tile, const float* rstd, const float* along,
                                        const Rows& sums) const {
    const int i = 16 * warp + lane / 4;
    const bool norm = args.chunk.problem.qk_l2norm;
    const float factor[2] = {norm ? rstd[i] * rstd[i] * along[i] : 0.0f,
                             norm ? rstd[i + 8] * rstd[i + 8] * along[i + 8] : 0.0f};
#pragma unroll
    for (int m = 0; m < kWidth / 32; ++m) {
      uint32_t x[4];
      tile.load_a(16 * warp, m, lane, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* sum = &sums[2 * m + e / 2][e % 2 * 2];
        const float2 y = unpack<kType>(x[e]);
        x[e] = norm ? pack<kType>(fmaf(-factor[e % 2], y.x, sum[0]), fmaf(-factor[e % 2], y.y, sum[1]))
                    : pack<kType>(sum[0], sum[1]);
      }
      tile.store_a(16 * warp, m, lane, x);
    }
  }

  __device__ __forceinline__ void store_keys(const Item& item, const GradientNumbers& numbers, uint32_t keys,
                                             const Rows& dq, const Rows& dk) const {
    const HalfTile q(s.q[keys % 2] + group * HalfTile::kBytes), k(s.k[keys % 2] + group * HalfTile::kBytes);
    half_barrier(group);  // all warps have waited for the products that read the panels
    leave(q, numbers.row + chunk_16bit::kRstdOfQ * kChunkRows, s.along_q, dq);
    leave(k, numbers.row + chunk_16bit::kRstdOfK * kChunkRows, s.along_k, dk);
    fence_async_proxy();
    half_barrier(group);
    if (thread % kGroupThreads != 0) return;
    const RowsPlace at = rows_of(item, item.key_head);
    const int column = group * HalfTile::kPanelColumns;
    if (args.dq.present()) store_box(maps.dq, {column, at.head, at.missing, at.end, at.batch}, q.panel(0));
    if (args.dk.present()) store_box(maps.dk, {column, at.head, at.missing, at.end, at.batch}, k.panel(0));
    commit_stores();
    wait_stores_read<0>();
    s.keys_free[keys % 2].arrive();
  }

  // Step 3.
  __device__ __forceinline__ void key_gradients(const Item& item, const GradientNumbers& numbers, uint32_t keys,
                                                chunk_16bit::TokenSums& sums, Rows& dq_sum, Rows& dk_sum) {
    const KeyTile k(s.k[keys % 2]), q(s.q[keys % 2]), d_o(s.d_o);
    const HalfTile my_k(s.k[keys % 2] + group * HalfTile::kBytes), my_q(s.q[keys % 2] + group * HalfTile::kBytes);
    const StatesTile S(s.S), G(s.G);
    const WrittenTile Y(s.Y), R(s.R);
    const LowerTile P(s.P), A(s.A);
    const int channel = group * HalfTile::kPanelColumns;
    Rows dq, dk, x;
    wgmma_fence(dq, dk, x);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, 64>(dq, d_o.along_rows(0, m), S.along_columns(channel, m), m > 0);
    }
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, 64>(dk, Y.along_columns(0, m), S.along_columns(channel, m), m > 0);
    }
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, 64>(x, R.along_columns(0, m), G.along_columns(channel, m), m > 0);
    }
    wgmma_commit();
    if (args.chunk.problem.gate != Gate::kNone) dot_states();
    wgmma_wait<0>(dq, dk, x);
    release(s.states_free);
    forget();
    const int i = 16 * warp + lane / 4;
    scale_and_dot<kType>(my_q, numbers.token + kOnQueryRead * kChunkRows, 1.0f, warp, lane, dq, s.a_q[group]);
    scale_and_dot<kType>(my_k, numbers.token + kOnKeyRead * kChunkRows, -1.0f, warp, lane, dk, s.a_k[group]);
    scale_and_dot<kType>(my_k, numbers.token + kOnWrite * kChunkRows, 1.0f, warp, lane, x, s.b[group]);
    const float* beta = numbers.token + kOnValue * kChunkRows + i;
    const float beta_of[2] = {beta[0], beta[8]};
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] = fmaf(beta_of[e / 2], dk[n][e], x[n][e]);
    }
    wgmma_fence(dq, dk);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, 64>(dq, P.along_rows(0, m), k.along_columns(channel, m));
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, 64>(dk, A.along_rows(0, m), k.along_columns(channel, m));
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, 64>(dk, P.along_columns(0, m), q.along_columns(channel, m));
    wgmma_commit();
    named_barrier<kDotsReady>(kWorkers);
    forget();
    if (has_token()) finish_token(item, numbers, sums);
    if (item.last) named_barrier<kAlongReady>(kWorkers);
    wgmma_wait<0>(dq, dk);
    release(s.pairs_free);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dq_sum[n][e] += dq[n][e];
        dk_sum[n][e] += dk[n][e];
      }
    }
  }

  __device__ __forceinline__ void run() {
    chunk_16bit::TokenSums sums;
    Rows dq = {}, dk = {};
    uint32_t keys = 0;
    for (uint32_t turn = 0;; ++turn) {
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      const GradientNumbers& numbers = s.numbers[turn % 2];
      if (item.span.sequence < 0) return;
      if (item.first) s.keys_filled[keys % 2].wait(keys / 2 % 2);
      const KeyTile k(s.k[keys % 2]);
      s.first_filled.wait(turn % 2);
      forget();
      writes(k, numbers);
      fence_async_proxy();
      named_barrier<kWritesReady>(kWorkers);
      forget();
      if (has_token()) {
        sums.yv = s.yv[0][thread] + s.yv[1][thread];
        s.beta[thread] = numbers.token[kOnValue * kChunkRows + thread];
      }
      s.second_filled.wait(turn % 2);
      group == 0 ? pairs_of_P(numbers) : pairs_of_A(k, numbers);
      fence_async_proxy();
      named_barrier<kPairsReady>(kWorkers);
      forget();
      s.third_filled.wait(turn % 2);
      key_gradients(item, numbers, keys, sums, dq, dk);
      if (item.last) {
        forget();
        store_keys(item, numbers, keys, dq, dk);
        ++keys;
#pragma unroll
        for (int n = 0; n < kWidth / 16; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) dq[n][e] = dk[n][e] = 0;
        }
      }
      release(s.numbers_free[turn % 2]);
    }
  }
};

template <DType kType>
__global__ void __launch_bounds__(kGradientThreads, 1)
    gradients_kernel(const __grid_constant__ GradientArgs args, const __grid_constant__ GradientMaps maps) {
  auto& s = aligned_shared<GradientShared>();
  constexpr int kWarps = kWorkers / kWarpSize;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      s.numbers_filled[i].init(1);
      s.numbers_free[i].init(kWarps);
      s.keys_filled[i].init(1);
      s.keys_free[i].init(2);
    }
    s.first_filled.init(1);
    s.second_filled.init(1);
    s.third_filled.init(1);
    s.first_free.init(kWarps);
    s.states_free.init(kWarps);
    s.pairs_free.init(kWarps);
    fence_barrier_init();
  }
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < kChunkRows) s.row_of_A[1][thread] = s.row_below_A[1][thread] = 0;
  // With BackProgress the scan back lets this kernel start when it has waited for all kernels before itself, and what it
  // leaves is taken as it comes; that it ends before this kernel does is for those after.
  if (!args.progress.present()) wait_for_previous_kernels();
  __syncthreads();
  const int warp = uniform_warp(), lane = thread % kWarpSize;
  if (warp >= kWarps) {
    give_registers<kBringerRegisters>();
    if (warp == kWarps && elect_one()) Bringer{args, maps, s}.run();
  } else {
    take_registers<kGradientRegisters>();
    GradientGroup<kType>{args, maps, s, warp / 4, warp % 4, lane, thread}.run();
  }
  wait_for_previous_kernels();
}

}  // namespace

template <DType kType>
void launch_gradients(const GradientArgs& args, const GradientMaps& maps, int64_t blocks, const Context& context) {
  launch<gradients_kernel<kType>>("delta_rule chunk_sm90 gradients", context,
                                  {static_cast<unsigned>(blocks), kGradientThreads, sizeof(GradientShared), true}, args,
                                  maps);
}

}  // namespace fastweight::cuda::chunk_sm90
