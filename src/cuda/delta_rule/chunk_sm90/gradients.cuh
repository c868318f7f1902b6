// The gradients of every chunk on Hopper, for one decay per head or none and K, V <= 128. See ../chunk_16bit/gradient.cuh
// for the equations, and ../chunk_16bit/gradients.cuh for how norms and sums of M go into them: this kernel computes the
// same.
//
// A block takes one pair of a chunk and a key head after the other, and of each the value heads of the group, whose dq and
// dk add up. One warp brings the operands of the next head by TMA while two warpgroups work on one:
//
//     1   a warpgroup has 64 value columns:      X = S^T k^T,   R^T = bD^T J^T,   bD^T = beta (v^T - e X)
//     2   it has 32 columns of pairs:            dP = d_o R^T,  dA = -Y R^T,  k k^T
//         with all decays and norms they become operands, P' in the place of sP, and A' + A'^T; and sums of M
//     3   it has 64 channels:                    dq = scale e (d_o S^T) + P' k
//                                                dk = -beta e (Y S^T) + w (R G^T) + (A' + A'^T) k + P'^T q
//
// The products of step 3 with states run while step 2 works on what its own gave. Two more warps make dg and dbeta of the
// sums that the warpgroups leave. dq and dk leave through the tiles of q and k: a warpgroup writes only the panel that it
// alone reads in step 3.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/gradients_tokens.cuh"
#include "cuda/delta_rule/chunk_sm90/gradients.h"
#include "cuda/delta_rule/chunk_sm90/head_values.cuh"

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
using Pairs = float[kChunkRows / 16][4];             // [64 tokens x 32 tokens], of a warp's 16
using Rows = float[kWidth / 16][4];                  // [64 tokens x 64 channels] as C tiles of a warp's 16 tokens

struct GradientNumbers {
  float row[kRowNumbers * kChunkRows], token[kTokenFactors * kChunkRows];
};

// What the warpgroups leave for the numbers of a token: the sums of gradients_tokens.cuh, with M = M^P + beta M^A, in
// halves of the columns of pairs, of the channels or of the value columns.
struct GradientSums {
  float columns[chunk_16bit::kBlocks][kChunkRows];         // of M, over the rows of a block
  float row_of_P[2][kChunkRows], row_of_A[2][kChunkRows];  // of M^P and M^A
  float row_below[2][kChunkRows];                          // of M, without the diagonal block
  float within[kChunkRows];
  float a_q[2][kChunkRows], a_k[2][kChunkRows], b[2][kChunkRows];
  float yv[2][2][kChunkRows];  // Y . v, of this item and the next
  float state_dot[kWorkers / kWarpSize];
};

// Barriers `filled` and `free` as in TransactionBarrier. What is free together is brought together:
//
//     numbers   the item and its numbers per token; free when the item is done
//     keys      k and q, for all heads of a group; free when dq and dk have left
//     first     v and J: free after step 1
//     states    S, Y, d_o and G: free after the products of step 3 with them
//     pairs     sP, then P': free after the products of step 3 with it
//     sums      the other way: filled when the warpgroups have left all sums of an item
//
// Step 1 waits for `first_filled`: v, J, S and Y; step 2 for `second_filled`: d_o and sP, and `third_filled`: G.
struct alignas(1024) GradientShared {
  unsigned char k[2][KeyTile::kBytes], q[2][KeyTile::kBytes];
  unsigned char S[StatesTile::kBytes], G[StatesTile::kBytes];
  unsigned char v[KeyTile::kBytes], d_o[KeyTile::kBytes];
  unsigned char Y[WrittenTile::kBytes], R[WrittenTile::kBytes];
  unsigned char J[LowerTile::kBytes], P[LowerTile::kBytes], A[LowerTile::kBytes];
  GradientNumbers numbers[2];
  GradientSums sums;
  double halves[4];  // of finish_head
  Item items[2];
  Item next[2];  // of the warp that brings the operands: here they take no registers
  TransactionBarrier numbers_filled[2], numbers_free[2], keys_filled[2], keys_free[2];
  TransactionBarrier first_filled, second_filled, third_filled, first_free, states_free, pairs_free;
  TransactionBarrier sums_filled, sums_free;
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
    chunk_16bit::first_item<kWidth>(args.chunk, chunk_16bit::first_pair(args), s.next[0]);
    uint32_t keys = 0;
    for (uint32_t turn = 0;; ++turn) {
      const Item& item = s.next[turn % 2];
      const bool exists = item.span.sequence >= 0;
      if (exists && item.first) bring_keys(item, keys++);
      bring_numbers(item, turn);
      if (!exists) return;
      bring_operands(item, turn);
      chunk_16bit::find_next<kWidth>(args.chunk, item, chunk_16bit::next_pair(args, item), s.next[(turn + 1) % 2]);
    }
  }
};

// The warpgroups
// --------------------------------------------------------------------------------------------------------------------

// Among the threads of a warpgroup, and among both; finish_head has barriers 1 and 2.
__device__ __forceinline__ void half_barrier(int group) {
  group == 0 ? named_barrier<3>(kGroupThreads) : named_barrier<4>(kGroupThreads);
}
enum { kWritesReady = 5, kPairsReady };

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

// A head's share of dbeta of token i but for Y . v.
__device__ __forceinline__ float reading(const GradientSums& s, int i) {
  return (s.a_k[0][i] + s.a_k[1][i]) + (s.row_of_A[0][i] + s.row_of_A[1][i]);
}

// q . dq and k . dk of two rows, over the heads of a group.
struct Along {
  float2 q = {}, k = {};

  __device__ __forceinline__ void add(const GradientSums& s, const GradientNumbers& numbers, int i, bool first) {
    if (first) q = k = make_float2(0, 0);
    const float* beta = numbers.token + kOnValue * kChunkRows;
    const auto q_at = [&](int at) { return (s.row_of_P[0][at] + s.row_of_P[1][at]) + (s.a_q[0][at] + s.a_q[1][at]); };
    const auto k_at = [&](int at) {
      float writing = s.b[0][at] + s.b[1][at];
#pragma unroll
      for (int row = 0; row < chunk_16bit::kBlocks; ++row) writing += row >= at / 16 ? s.columns[row][at] : 0.0f;
      return fmaf(beta[at], reading(s, at), writing);
    };
    q = make_float2(q.x + q_at(i), q.y + q_at(i + 8));
    k = make_float2(k.x + k_at(i), k.y + k_at(i + 8));
  }
};

// kGrouped: dq and dk are sums over the value heads of a group, in registers. They leave no room for the products of step 3
// beside those of step 2, which they then follow.
template <DType kType, bool kGrouped>
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
    const int at = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
    group = at / 4;
    warp = at % 4;
  }

  __device__ __forceinline__ void release(TransactionBarrier& free) const {
    __syncwarp();
    if (lane == 0) free.arrive();
  }

  // Y . v over the warpgroup's value columns, of the warp's tokens.
  __device__ __forceinline__ void dot_values(float* yv) const {
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
      if (lane % 4 == 0) yv[16 * warp + lane / 4 + 8 * half] = sum;
    }
  }

  // Step 1.
  __device__ __forceinline__ void writes(const KeyTile& k, const GradientNumbers& numbers, float* yv) const {
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
    dot_values(yv);
    wgmma_wait<0>(X);
    Fragments<kTokenSteps> bD;
    Values values;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      values.load(m, ValueTile(s.v + group * ValueTile::kBytes), numbers.token, warp, lane);
      values.correct<kType>(m, X, bD[m]);
    }
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

  // Step 2 for the columns [32 group, +32): dP becomes P' in the place of sP, dA becomes A' + A'^T, and both become sums
  // of M. Without a branch on what products on their way have to do with: columns above the diagonal give zeros.
  __device__ __forceinline__ void make_pairs(const GradientNumbers& numbers, const Pairs& dP, const Pairs& dA,
                                             const Pairs& kk) const {
    const LowerTile P(s.P), A(s.A);
    const int i = 16 * warp + lane / 4;
    const auto rows = [&](const float* of) { return make_float2(of[i], of[i + 8]); };
    const float* gamma = numbers.row + chunk_16bit::kGamma * kChunkRows;
    const float* rstd = numbers.row + chunk_16bit::kRstdOfK * kChunkRows;
    const float2 gamma_i = rows(gamma), rstd_i = rows(rstd), beta = rows(numbers.token + kOnValue * kChunkRows);
    float2 on_P = rows(numbers.row + chunk_16bit::kRstdOfQ * kChunkRows);
    on_P = make_float2(args.chunk.problem.scale * on_P.x, args.chunk.problem.scale * on_P.y);
    Pairs M;
    float2 of_P = make_float2(0, 0), of_A = of_P, below = of_P;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int m = 2 * group + block;
      uint32_t sP[4], a[4];
      P.load_a(16 * warp, m, lane, sP);
      float p_operand[2][4], a_operand[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = 2 * block + h, j = 32 * group + 8 * n + 2 * (lane % 4);
        const float2 gamma_j = *reinterpret_cast<const float2*>(gamma + j);
        const float2 rstd_j = *reinterpret_cast<const float2*>(rstd + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool right = e % 2 == 1, lower = e / 2 == 1;
          const int distance = i + (lower ? 8 : 0) - j - (right ? 1 : 0);
          const float2 pair = unpack<kType>(sP[2 * h + e / 2]);
          const float f = (right ? rstd_j.y : rstd_j.x) *
                          exp2_approx((lower ? gamma_i.y : gamma_i.x) - (right ? gamma_j.y : gamma_j.x));
          p_operand[h][e] = distance >= 0 ? (lower ? on_P.y : on_P.x) * f * dP[n][e] : 0.0f;
          const float of_p = distance >= 0 ? dP[n][e] * (right ? pair.y : pair.x) : 0.0f;
          const float x = -(dA[n][e] * ((lower ? rstd_i.y : rstd_i.x) * f)), b = lower ? beta.y : beta.x;
          a_operand[h][e] = distance >= 1 ? b * x : 0.0f;
          const float of_a = distance >= 1 ? x * kk[n][e] : 0.0f;
          M[n][e] = fmaf(b, of_a, of_p);
          (lower ? of_P.y : of_P.x) += of_p;
          (lower ? of_A.y : of_A.x) += of_a;
          (lower ? below.y : below.x) += m < warp ? M[n][e] : 0.0f;
        }
      }
      pack_a<kType>(p_operand[0], p_operand[1], sP);
      P.store_a(16 * warp, m, lane, sP);
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
    chunk_16bit::store_column_sums<2>(s.sums.columns[warp] + 32 * group, 2, lane, M);
    const auto leave_rows = [&](float2 x, float* to) {
      x = make_float2(sum_over_lanes<4>(x.x), sum_over_lanes<4>(x.y));
      if (lane % 4 == 0) to[i] = x.x, to[i + 8] = x.y;
    };
    leave_rows(of_P, s.sums.row_of_P[group]);
    leave_rows(of_A, s.sums.row_of_A[group]);
    leave_rows(below, s.sums.row_below[group]);
    float diagonal[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) diagonal[h][e] = warp % 2 == 0 ? M[h][e] : M[2 + h][e];
    }
    const float2 within = chunk_16bit::sums_within(diagonal[0], diagonal[1], lane);
    if (lane % 4 == 0 && warp / 2 == group) s.sums.within[i] = within.x, s.sums.within[i + 8] = within.y;
  }

  // <S, G>: a row of a panel for each thread.
  __device__ __forceinline__ void dot_states() const {
    float sum = 0;
#pragma unroll
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
    if (lane == 0) s.sums.state_dot[thread / kWarpSize] = sum;
  }

  // dq or dk to its panel, in the place of q or k. `along` is x . dx of the lane's two rows, for the norm.
  __device__ __forceinline__ void leave(const HalfTile& tile, const float* rstd, float2 along, const Rows& sums) const {
    const int i = 16 * warp + lane / 4;
    const bool norm = args.chunk.problem.qk_l2norm;
    const float factor[2] = {norm ? rstd[i] * rstd[i] * along.x : 0.0f,
                             norm ? rstd[i + 8] * rstd[i + 8] * along.y : 0.0f};
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
                                             const Along& along, const Rows& dq, const Rows& dk) const {
    const HalfTile q(s.q[keys % 2] + group * HalfTile::kBytes), k(s.k[keys % 2] + group * HalfTile::kBytes);
    half_barrier(group);  // all warps have waited for the products that read the panels
    leave(q, numbers.row + chunk_16bit::kRstdOfQ * kChunkRows, along.q, dq);
    leave(k, numbers.row + chunk_16bit::kRstdOfK * kChunkRows, along.k, dk);
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

  struct GroupSums {
    Rows q, k;
  };
  __device__ __forceinline__ static void add(bool first, const Rows& x, Rows& sum) {
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = first ? x[n][e] : sum[n][e] + x[n][e];
    }
  }

  // Steps 2 and 3.
  __device__ __forceinline__ void gradients(const Item& item, const GradientNumbers& numbers, uint32_t keys,
                                            Along& along, GroupSums& sums) {
    const KeyTile k(s.k[keys % 2]), q(s.q[keys % 2]), d_o(s.d_o);
    const HalfTile my_k(s.k[keys % 2] + group * HalfTile::kBytes), my_q(s.q[keys % 2] + group * HalfTile::kBytes);
    const StatesTile S(s.S), G(s.G);
    const WrittenTile Y(s.Y), R(s.R);
    const LowerTile P(s.P), A(s.A);
    const int channel = group * HalfTile::kPanelColumns, column = group * (kChunkRows / 2);
    Pairs dP, dA, kk;
    Rows dq, dk, x;
    wgmma_fence(dP, dA, kk);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, 32>(dP, d_o.along_rows(0, m), R.along_columns(column, m), m > 0);
    }
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
      wgmma<kType, 32>(dA, Y.along_columns(0, m), R.along_columns(column, m), m > 0);
    }
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) wgmma<kType, 32>(kk, k.along_rows(0, m), k.along_rows(column, m), m > 0);
    wgmma_commit();
    const auto read_states = [&] {
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
    };
    if constexpr (!kGrouped) read_states();
    wgmma_wait<kGrouped ? 0 : 1>(dP, dA, kk);
    make_pairs(numbers, dP, dA, kk);
    if constexpr (kGrouped) read_states();
    if (args.chunk.problem.gate != Gate::kNone) dot_states();
    wgmma_wait<0>(dq, dk, x);
    release(s.states_free);
    forget();
    scale_and_dot<kType>(my_q, numbers.token + kOnQueryRead * kChunkRows, 1.0f, warp, lane, dq, s.sums.a_q[group]);
    scale_and_dot<kType>(my_k, numbers.token + kOnKeyRead * kChunkRows, -1.0f, warp, lane, dk, s.sums.a_k[group]);
    scale_and_dot<kType>(my_k, numbers.token + kOnWrite * kChunkRows, 1.0f, warp, lane, x, s.sums.b[group]);
    const float* beta = numbers.token + kOnValue * kChunkRows + 16 * warp + lane / 4;
    const float beta_of[2] = {beta[0], beta[8]};
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] = fmaf(beta_of[e / 2], dk[n][e], x[n][e]);
    }
    release(s.sums_filled);
    fence_async_proxy();
    named_barrier<kPairsReady>(kWorkers);
    forget();
    wgmma_fence(dq, dk);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, 64>(dq, P.along_rows(0, m), k.along_columns(channel, m));
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, 64>(dk, A.along_rows(0, m), k.along_columns(channel, m));
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, 64>(dk, P.along_columns(0, m), q.along_columns(channel, m));
    wgmma_commit();
    if (args.chunk.problem.qk_l2norm) along.add(s.sums, numbers, 16 * warp + lane / 4, item.first);
    wgmma_wait<0>(dq, dk);
    release(s.pairs_free);
    if constexpr (kGrouped) {
      const bool first = item.first;
      add(first, dq, sums.q);
      add(first, dk, sums.k);
    }
    if (item.last) {
      forget();
      store_keys(item, numbers, keys, along, kGrouped ? sums.q : dq, kGrouped ? sums.k : dk);
    }
  }

  __device__ __forceinline__ void run() {
    Along along;
    GroupSums sums = {};
    uint32_t keys = 0;
    for (uint32_t turn = 0;; ++turn) {
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      const GradientNumbers& numbers = s.numbers[turn % 2];
      if (item.span.sequence < 0) return;
      if (item.first) s.keys_filled[keys % 2].wait(keys / 2 % 2);
      s.first_filled.wait(turn % 2);
      forget();
      writes(KeyTile(s.k[keys % 2]), numbers, s.sums.yv[turn % 2][group]);
      fence_async_proxy();
      named_barrier<kWritesReady>(kWorkers);
      forget();
      s.second_filled.wait(turn % 2);
      s.third_filled.wait(turn % 2);
      s.sums_free.wait(turn % 2 ^ 1);
      gradients(item, numbers, keys, along, sums);
      if (item.last) ++keys;
      release(s.numbers_free[turn % 2]);
    }
  }
};

// The two warps of the tokens: dg and dbeta, by a thread for each.
struct TokenGroup {
  const GradientArgs& args;
  GradientShared& s;
  int thread, lane;

  __device__ __forceinline__ void finish(const Item& item, const GradientNumbers& numbers, uint32_t turn) const {
    const GradientSums& sums = s.sums;
    const float* beta = numbers.token + kOnValue * kChunkRows;
    chunk_16bit::TokenSums token;
    token.dbeta = sums.yv[turn % 2][0][thread] + sums.yv[turn % 2][1][thread] + reading(sums, thread);
    if (args.chunk.problem.gate != Gate::kNone) {
      float states = 0;
      for (float one : sums.state_dot) states += one;
      const float last = numbers.row[chunk_16bit::kGamma * kChunkRows + kChunkRows - 1];
      token.dg =
          chunk_16bit::gate_gradient(
              sums.row_below[0][thread] + sums.row_below[1][thread], sums.within[thread],
              [&](int row, int j) { return sums.columns[row][j]; },
              [&](int i) { return (sums.a_q[0][i] + sums.a_q[1][i]) + beta[i] * (sums.a_k[0][i] + sums.a_k[1][i]); },
              [&](int j) { return sums.b[0][j] + sums.b[1][j]; }, thread, lane) +
          exp2_approx(last) * states;
    }
    chunk_16bit::finish_head(args, item, beta[thread], s.halves, thread, lane, token);
  }

  __device__ __forceinline__ void run() const {
    for (uint32_t turn = 0;; ++turn) {
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      if (item.span.sequence < 0) return;
      s.sums_filled.wait(turn % 2);
      finish(item, s.numbers[turn % 2], turn);
      __syncwarp();
      if (lane == 0) {
        s.sums_free.arrive();
        s.numbers_free[turn % 2].arrive();
      }
    }
  }
};

template <DType kType, bool kGrouped>
__global__ void __launch_bounds__(kGradientThreads, 1)
    gradients_kernel(const __grid_constant__ GradientArgs args, const __grid_constant__ GradientMaps maps) {
  auto& s = aligned_shared<GradientShared>();
  constexpr int kWarps = kWorkers / kWarpSize, kTokenWarps = kChunkRows / kWarpSize;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      s.numbers_filled[i].init(1);
      s.numbers_free[i].init(kWarps + kTokenWarps);
      s.keys_filled[i].init(1);
      s.keys_free[i].init(2);
    }
    s.first_filled.init(1);
    s.second_filled.init(1);
    s.third_filled.init(1);
    s.first_free.init(kWarps);
    s.states_free.init(kWarps);
    s.pairs_free.init(kWarps);
    s.sums_filled.init(kWarps);
    s.sums_free.init(kTokenWarps);
    fence_barrier_init();
  }
  const auto thread = static_cast<int>(threadIdx.x);
  chunk_16bit::wait_unless_beside_next(args);
  __syncthreads();
  const int warp = uniform_warp(), lane = thread % kWarpSize;
  if (warp >= kWarps) {
    give_registers<kBringerRegisters>();
    const int role = warp - kWarps;
    if (role == kTokenWarps && elect_one()) Bringer{args, maps, s}.run();
    if (role < kTokenWarps) TokenGroup{args, s, thread - kWorkers, lane}.run();
  } else {
    take_registers<kGradientRegisters>();
    GradientGroup<kType, kGrouped>{args, maps, s, warp / 4, warp % 4, lane, thread}.run();
  }
  wait_for_previous_kernels();
}

}  // namespace

template <DType kType>
void launch_gradients(const GradientArgs& args, const GradientMaps& maps, int64_t blocks, const Context& context) {
  const LaunchShape shape{static_cast<unsigned>(blocks), kGradientThreads, sizeof(GradientShared), true};
  constexpr const char* kName = "delta_rule chunk_sm90 gradients";
  args.chunk.problem.group > 1 ? launch<gradients_kernel<kType, true>>(kName, context, shape, args, maps)
                               : launch<gradients_kernel<kType, false>>(kName, context, shape, args, maps);
}

}  // namespace fastweight::cuda::chunk_sm90
