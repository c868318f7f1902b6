// The scan over the chunks of a sequence on Hopper, for one decay per head or none. See ../chunk.cuh for
// the equations; the factors: factors.cu.
//
// A block has 128 value columns of one (sequence, value head) or, where that leaves multiprocessors idle, 64. As in
// chunk_16bit the value side is transposed: S^T [columns x K] stays in the registers of a warpgroup, 64 columns each, as
// the fp32 sums of the product that advances it and, rounded, as the left operand of those that read it. Right operands
// lie in shared memory, where TMA brings them. With 128 columns two warpgroups go through a chunk with five groups of
// products:
//
//     X = S^T k^T                    while it runs, o of the chunk before goes to shared memory, and S if it is to be saved
//     O = S^T q^T                    while it runs, v and its numbers come to registers
//     X = bD^T J^T                   bD^T = beta (v^T - e X); while it runs, S is scaled by e_n, O by scale e
//     S = S + (w R)^T k              R^T = X, rounded, step by step while the product runs
//     O = O + R^T sP^T               while it runs, S is rounded for the next chunk
//
// q and v are needed until the third product begins, the other operands until the chunk's end: two rings. Both come three
// chunks ahead at most, the former two where the state on its way to memory needs room.
//
// With 64 columns there are few heads, and what counts is how long a chunk takes: one warpgroup does the three products
// that the next chunk waits for, and hands S^T and R^T, rounded, through shared memory to another, which makes O.
//
// With K <= 64 the state takes half of the registers and the operands half of the shared memory: a block has 64 columns, of
// which one warpgroup makes S and O as above, and two blocks are on a multiprocessor. While one waits for a product that its
// next one needs, the other multiplies; and they need not be of one length. Where there is a multiprocessor for every block,
// it may make sP as well.
//
// With K above 128 the registers of a warpgroup are too few for 64 columns: two have them, with half of the channels each,
// and X and O are sums of both, which they exchange in shared memory and add in one order. Both then go through the same
// products, the state's with their own half of k.
//
// The last warpgroup brings the operands and stores o. Where no head has two blocks there may be one more that makes sP
// (kMakesP): then the factors' kernel does not read q, and memory, which bounds the scan of many heads, moves less. What a
// caller keeps of the factors for a backward is complete when the scan has stored sP and the numbers of q too.
//
// Rows beyond the tokens of a chunk are zeros in k, q and v, whatever lies behind them in memory (token_map), and so are
// the blocks of J and sP above their diagonals (lower_maps), which are nowhere in memory.
//
// A scan of maps (segment_plan.h) has blocks of 128 columns of h or of M, whose values lie beyond the last column of v and are
// therefore zeros, and two warpgroups with the three products of the state.
//
// A column's sums do not depend on other columns, nor on who makes them: how many columns a block has changes no bit.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/scan_operands.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// The warpgroup that makes sP
// ----------------------------------------------------------------------------------------------------------

// sP in the stage of a chunk.
template <DType kType>
struct StageScores {
  LowerTile tile;
  int lane;

  __device__ __forceinline__ void sP(int i, int j, const float (&c)[2][4]) const {
    uint32_t a[4];
    pack_a<kType>(c[0], c[1], a);
    tile.store_a(16 * i, j, lane, a);
  }
};

template <DType kType, class Shape>
struct ScoreGroup {
  using Turn = typename Shape::Turn;
  const ForwardArgs& args;
  const ScanMaps& maps;
  typename Shape::Shared& s;
  int warp, lane;  // within the warpgroup

  // Blocks above the diagonals of sP, once.
  __device__ __forceinline__ void clear_scores() const {
    constexpr int kPieces = sizeof(s.late[0].sP) / sizeof(uint4);
    for (auto& late : s.late) {
      for (int i = kWarpSize * warp + lane; i < kPieces; i += kGroupThreads) {
        reinterpret_cast<uint4*>(late.sP)[i] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Whether the factors stay with the caller.
  __device__ __forceinline__ bool keeps() const { return !args.factors_of_window; }

  // The numbers of row i of q.
  __device__ __forceinline__ void keep_numbers(int64_t item, int i, float on_read, float rstd) const {
    args.factors.token[(item * kTokenFactors + kOnQueryRead) * kChunkRows + i] = on_read;
    args.factors.row[(item * kRowNumbers + chunk_16bit::kRstdOfQ) * kChunkRows + i] = rstd;
  }

  // The warp's rows of sP and of the factors on q S of chunk c.
  __device__ __forceinline__ void make_scores(int c, const Turn& turn) const {
    auto& late = s.late[turn.late.at];
    const float *gamma = late.row + chunk_16bit::kGamma * kChunkRows,
                *rstd_k = late.row + chunk_16bit::kRstdOfK * kChunkRows;
    const ScoreSteps<kType, Shape::kWidth> steps{{args.problem, s.squares, warp, lane}};
    Gram qk;
    s.of_late.filled[turn.late.at].wait(turn.late.parity);
    s.of_early.filled[turn.early.at].wait(turn.early.parity);
    steps.multiply(s.early[turn.early.at].q, late.k, qk);
    if (lane == 0) s.of_early.free[turn.early.at].arrive();
    if (keeps()) {
      if (lane == 0) wait_stores_read<0>();  // of these rows of sP, three chunks ago
      __syncwarp();
    }
    steps.apply_decays(gamma, rstd_k, qk, StageScores<kType>{LowerTile(late.sP), lane});
    const int i = steps.queries.own_row();
    const int64_t item = item_at(args, s, c);
    if (lane < 16) {
      const float on_read = steps.queries.on_read(i, gamma[i]);
      late.token[kOnQueryRead * kChunkRows + i] = on_read;
      if (keeps()) keep_numbers(item, i, on_read, steps.queries.rstd(i));
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) s.made[turn.late.at].arrive();
    if (keeps() && lane == 0) {
      store_lower_rows(late.sP, maps.lower, kLowerP, warp, static_cast<int>(item));
      commit_stores();
    }
  }

  __device__ __forceinline__ void run() const {
    Turn turn;
    clear_scores();
    for (int c = 0; c < s.work.walk.chunks; ++c, turn.next()) {
      // No address is computed before the loop and kept: registers are short.
      const ScoreGroup anew{args, maps, s, warp, opaque_below<kWarpSize>(lane)};
      anew.make_scores(c, turn);
    }
    if (keeps() && lane == 0) wait_stores_read<0>();
  }
};

// A warpgroup of the state
// ----------------------------------------------------------------------------------------------------------

// Tokens [16 m, 16 m + 16) of w R^T, rounded.
template <DType kType>
__device__ __forceinline__ void round_write(int m, float2 w_low, float2 w_high, const TokenSums& X, uint32_t (&wR)[4]) {
  float scaled[2][4];
  scale_tile(w_low, X[2 * m], scaled[0]);
  scale_tile(w_high, X[2 * m + 1], scaled[1]);
  pack_a<kType>(scaled[0], scaled[1], wR);
}

// A warpgroup that multiplies.
template <DType kType, class Shape>
struct WorkGroup {
  static constexpr int kParts = Shape::kHalves ? 2 : 1;  // of the channels
  static constexpr int kK = Shape::kWidth / kParts;      // of the warpgroup
  static constexpr int kGroups = Shape::kColumns / kGroupColumns;
  static constexpr int kAhead = Shape::kHalves ? 0 : 2;  // steps whose numbers are loaded before X is there
  // Whether X of the next chunk is on its way before O has ended. Where a third warpgroup makes sP, it takes the tensor cores from
  // that one, which then is what all wait for (measured on an H200: 0.362 instead of 0.355 ms for 96 heads of 8192 tokens; without
  // one 0.95 instead of 1.02 for 64 heads of 32768).
  static constexpr bool kStartsEarly = !Shape::kMakesP;
  using Turn = typename Shape::Turn;
  using Keys = KeyTile<kK>;
  using StateRows = Fragments<kKeySteps<kK>>;
  const ForwardArgs& args;
  const ScanMaps& maps;
  typename Shape::Shared& s;
  int group, warp, lane;  // the warp within the warpgroup

  __device__ __forceinline__ const ScanPart& part() const { return s.work.part; }
  __device__ __forceinline__ const Walk& walk() const { return s.work.walk; }

  // Which 64 columns of the block.
  __device__ __forceinline__ int range() const { return kGroups == 2 ? group : 0; }
  __device__ __forceinline__ StateColumns<kK, kGroups, kParts> columns() const {
    return {args, part(), walk(), s.work.is_tail, range(), warp, lane, kParts == 2 ? kK * group : 0};
  }
  // The warpgroup's channels of k or q.
  __device__ __forceinline__ Keys own_keys(const unsigned char* memory) const {
    return Keys(memory + (kParts == 2 ? group * Keys::kBytes : 0));
  }

  // o^T to shared memory, from where it is stored; give_away() follows.
  __device__ __forceinline__ void put_outputs(const Fragments<kTokenSteps>& o) const {
    if (Shape::kHalves && group == 1) return;  // its O lacks the other half's
    const ValueTile tile(s.o[range()]);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) tile.store_c_transposed(16 * m, warp, lane, o[m]);
  }
  __device__ __forceinline__ void put_state(const StateRows& rS) const {
    const StateTile<kK> tile(s.state[range()]);
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) tile.store_a(16 * warp, m, lane, rS[m]);
  }
  __device__ __forceinline__ void wait_taken(Turn& turn, bool taken) const {
    if (Shape::kHalves && group == 1) return;
    s.taken.wait(turn.leaving ^ 1, taken);
    turn.leaving ^= 1;
  }
  __device__ __forceinline__ void give_away() const {
    if (Shape::kHalves && group == 1) return;
    fence_async_proxy();
    arrive(s.there);
  }

  // The warp has done what a barrier counts by warps.
  __device__ __forceinline__ void arrive(TransactionBarrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  using Writes = float2[kTokenTiles];  // the factors on R

  // What products read, and what a chunk hands to the next one, rounded.
  struct Rounded {
    StateRows S;
    Fragments<kTokenSteps> o, R, wR;
  };

  // S and O by one warpgroup. ptxas lets no product be on its way from one turn of a loop to the next beside sums that are
  // read, so a turn ends where none is: with R^T in X, and O, and S, scaled, ready for the two products with R.
  __device__ __forceinline__ void run() const {
    Turn turn;
    StateSums<kK> S = {};
    columns().load_first_state(S);
    const int chunks = walk().chunks;
    if (chunks > 0) {
      Rounded rounded;
      TokenSums X, O;
      Writes on_write;
      round_sums<kType, kKeySteps<kK>>(S, rounded.S);
      s.of_late.filled[0].wait(0);
      start_chunk(0, turn, S, X, rounded);
      solve_chunk(0, turn, S, X, O, on_write, rounded);
      for (int c = 1; c < chunks; ++c) {
        TransactionBarrier& free = s.of_late.free[turn.late.at];
        advance(turn, on_write, S, X, O, rounded);
        turn.next();
        const bool filled = s.of_late.filled[turn.late.at].ask(turn.late.parity);
        wgmma_wait<1>(S);
        round_sums<kType, kKeySteps<kK>>(S, rounded.S);
        s.of_late.filled[turn.late.at].wait(turn.late.parity, filled);
        if constexpr (kStartsEarly) start_chunk(c, turn, S, X, rounded);
        wgmma_wait<kStartsEarly ? 1 : 0>(O);
        round_sums<kType, kTokenSteps>(O, rounded.o);
        arrive(free);
        if constexpr (!kStartsEarly) start_chunk(c, turn, S, X, rounded);
        solve_chunk(c, turn, S, X, O, on_write, rounded);
      }
      advance(turn, on_write, S, X, O, rounded);
      wgmma_wait<0>(S, O);
      round_sums<kType, kTokenSteps>(O, rounded.o);
      wait_taken(turn, false);
      put_outputs(rounded.o);
      give_away();
    }
    columns().save_state(chunks, true, S);
  }

  // X = S^T k^T, on its way after that.
  __device__ __forceinline__ void start_chunk(int c, const Turn& turn, StateSums<kK>& S, TokenSums& X,
                                              Rounded& rounded) const {
    if (args.chunk_states.present() && !saves_by_map<Shape>(maps)) [[unlikely]] {
      columns().save_chunk_state(c, rounded.S, S);
    }
    const Keys k = own_keys(s.late[turn.late.at].k);
    wgmma_fence(X, rounded.S);
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(X, rounded.S[m], k.along_rows(0, m), m > 0);
    wgmma_commit();
  }

  // From X on its way to R^T in its place; O = S^T q^T and S scaled. What waits for memory that this thread has just written,
  // or loads numbers, does so while a product runs.
  __device__ __forceinline__ void solve_chunk(int c, Turn& turn, StateSums<kK>& S, TokenSums& X, TokenSums& O,
                                              Writes& on_write, Rounded& rounded) const {
    auto& late = s.late[turn.late.at];
    auto& early = s.early[turn.early.at];
    const float* token = late.token;
    const Keys q = own_keys(early.q);
    const LowerTile J(late.J);
    const bool saves = saves_by_map<Shape>(maps), leaves = saves || c > 0;
    const bool taken = s.taken.ask(turn.leaving ^ 1);
    const bool early_filled = s.of_early.filled[turn.early.at].ask(turn.early.parity);
    if (leaves) wait_taken(turn, taken);
    // No address in shared memory is computed before the loop and kept: registers are short.
    const WorkGroup anew{args, maps, s, group, warp, opaque_below<kWarpSize>(lane)};
    if (c > 0) anew.put_outputs(rounded.o);
    if constexpr (Shape::kSavesByMap) {
      if (saves) anew.put_state(rounded.S);
    }
    s.of_early.filled[turn.early.at].wait(turn.early.parity, early_filled);
    Fragments<kTokenSteps> bD;
    Values values;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) values.load_rows(m, ValueTile(early.v[range()]), warp, lane);
    for (int m = 0; m < kAhead; ++m) values.load_numbers(m, token, lane);
    wgmma_fence(O);
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(O, rounded.S[m], q.along_rows(0, m), m > 0);
    wgmma_commit();
    wgmma_wait<1>(X);
    if constexpr (Shape::kHalves) exchange_halves(s.halves, group, kWarpSize * warp + lane, X);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      if (m + kAhead < kTokenSteps) values.load_numbers(m + kAhead, token, lane);
      values.template correct<kType>(m, X, bD[m]);
    }
    wgmma_fence(X, bD);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, bD[m], J.along_rows(0, m), m > 0);
    wgmma_commit();
    if (leaves) give_away();  // the fence waits for writes
    scale_state(turn, S);
    wgmma_wait<1>(O);
    if constexpr (Shape::kHalves) hand_half(s.halves, group, kWarpSize * warp + lane, O);
    arrive(s.of_early.free[turn.early.at]);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) on_write[n] = token_pair(token, kOnWrite, n, lane);
    wgmma_wait<0>(X);
  }

  // S = S + (w R)^T k and O = O + R^T sP, on their way after that.
  __device__ __forceinline__ void advance(const Turn& turn, const Writes& on_write, StateSums<kK>& S, TokenSums& X,
                                          TokenSums& O, Rounded& rounded) const {
    auto& late = s.late[turn.late.at];
    const Keys k = own_keys(late.k);
    const LowerTile sP(late.sP);
    auto &R = rounded.R, &wR = rounded.wR;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      round_write<kType>(m, on_write[2 * m], on_write[2 * m + 1], X, wR[m]);
      m == 0 ? wgmma_fence(S, wR[m]) : wgmma_fence(wR[m]);
      wgmma<kType, kK>(S, wR[m], k.along_columns(0, m));
    }
    wgmma_commit();
    round_sums<kType, kTokenSteps>(X, R);
    if constexpr (Shape::kMakesP) s.made[turn.late.at].wait(turn.late.parity);  // sP and the factors on q S
    scale_outputs(late.token, O);
    wgmma_fence(O, R);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R[m], sP.along_rows(0, m));
    wgmma_commit();
  }

  __device__ __forceinline__ void scale_state(const Turn& turn, StateSums<kK>& S) const {
    const float total = s.total[turn.late.at][0];
#pragma unroll
    for (int n = 0; n < kKeyTiles<kK>; ++n) scale_tile({total, total}, S[n], S[n]);
  }
  __device__ __forceinline__ void scale_outputs(const float* token, TokenSums& O) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) scale_tile(token_pair(token, kOnQueryRead, n, lane), O[n], O[n]);
  }

  // The warp's rows of S^T or R^T, to the warp that makes the same rows of O.
  template <class Handed, class Tile, int kSteps>
  __device__ __forceinline__ void hand(Handed& handed, const Tile& tile, const Turn& turn,
                                       const Fragments<kSteps>& rows) const {
    handed.taken.wait(turn.odd ^ 1);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) tile.store_a(16 * warp, m, lane, rows[m]);
    arrive(handed.there);
  }
  template <class Handed, class Tile, int kSteps>
  __device__ __forceinline__ void take(Handed& handed, const Tile& tile, const Turn& turn,
                                       Fragments<kSteps>& rows) const {
    handed.there.wait(turn.odd);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) tile.load_a(16 * warp, m, lane, rows[m]);
    arrive(handed.taken);
  }

  // Apart, and of maps: the products of the state. A product begins with the first 16 tokens of its left operand,
  // while the next ones are rounded.
  __device__ __forceinline__ void run_state() const {
    Turn turn;
    StateSums<kK> S = {};
    if constexpr (Shape::kMakesMaps) {
      columns().begin_map(S);
    } else {
      columns().load_first_state(S);
    }
    StateRows rS;
    round_sums<kType, kKeySteps<kK>>(S, rS);
    for (int c = 0; c < walk().chunks; ++c, turn.next()) {
      if constexpr (!Shape::kMakesMaps) columns().save_chunk_state(c, rS, S);
      auto& late = s.late[turn.late.at];
      const float* token = late.token;
      const Keys k(late.k);
      const LowerTile J(late.J);
      TokenSums X, Y;
      s.of_late.filled[turn.late.at].wait(turn.late.parity);
      wgmma_fence(X, rS);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(X, rS[m], k.along_rows(0, m), m > 0);
      wgmma_commit();
      Values values;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) values.load_numbers(m, token, lane);
      s.of_early.filled[turn.early.at].wait(turn.early.parity);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        values.load_rows(m, ValueTile(s.early[turn.early.at].v[range()]), warp, lane);
      }
      if constexpr (!Shape::kMakesMaps) hand(s.S, StateTile<kK>(s.S.tile), turn, rS);
      wgmma_wait<0>(X);
      Fragments<kTokenSteps> bD, wR;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        values.template correct<kType>(m, X, bD[m]);
        wgmma_fence(bD[m]);
        wgmma<kType, kChunkRows>(Y, bD[m], J.along_rows(0, m), m > 0);
      }
      wgmma_commit();
      arrive(s.of_early.free[turn.early.at]);
      scale_state(turn, S);
      float2 on_write[kTokenTiles];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) on_write[n] = token_pair(token, kOnWrite, n, lane);
      wgmma_wait<0>(Y);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        round_write<kType>(m, on_write[2 * m], on_write[2 * m + 1], Y, wR[m]);
        m == 0 ? wgmma_fence(S, wR[m]) : wgmma_fence(wR[m]);
        wgmma<kType, kK>(S, wR[m], k.along_columns(0, m));
      }
      wgmma_commit();
      if constexpr (!Shape::kMakesMaps) {
        Fragments<kTokenSteps> R;
        round_sums<kType, kTokenSteps>(Y, R);
        hand(s.R, WritesTile(s.R.tile), turn, R);
      }
      wgmma_wait<0>(S);
      round_sums<kType, kKeySteps<kK>>(S, rS);
      arrive(s.of_late.free[turn.late.at]);
    }
    if constexpr (Shape::kMakesMaps) {
      columns().end_map(S);
    } else {
      columns().save_state(walk().chunks, true, S);
    }
  }

  // Apart: the outputs.
  __device__ __forceinline__ void run_outputs() const {
    Turn turn;
    for (int c = 0; c < walk().chunks; ++c, turn.next()) {
      auto& late = s.late[turn.late.at];
      const Keys q(s.early[turn.early.at].q);
      const LowerTile sP(late.sP);
      StateRows rS;
      Fragments<kTokenSteps> R, rO;
      TokenSums O;
      s.of_early.filled[turn.early.at].wait(turn.early.parity);
      s.of_late.filled[turn.late.at].wait(turn.late.parity);
      take(s.S, StateTile<kK>(s.S.tile), turn, rS);
      wgmma_fence(O, rS);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(O, rS[m], q.along_rows(0, m), m > 0);
      wgmma_commit();
      wgmma_wait<0>(O);
      arrive(s.of_early.free[turn.early.at]);
      scale_outputs(late.token, O);
      take(s.R, WritesTile(s.R.tile), turn, R);
      wgmma_fence(O, R);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R[m], sP.along_rows(0, m));
      wgmma_commit();
      wgmma_wait<0>(O);
      arrive(s.of_late.free[turn.late.at]);
      round_sums<kType, kTokenSteps>(O, rO);
      wait_taken(turn, false);
      put_outputs(rO);
      give_away();
    }
  }
};

// A block per part.
template <DType kType, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksOnOne)
    scan_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ ScanMaps maps) {
  auto& s = aligned_shared<typename Shape::Shared>();
  if (threadIdx.x == 0) {
    s.of_late.init(Shape::kWarps);
    s.of_early.init(Shape::kWarps + Shape::kScoreWarps);
    for (TransactionBarrier& made : s.made) made.init(kGroupWarps);
    for (TransactionBarrier* barrier : {&s.S.there, &s.S.taken, &s.R.there, &s.R.taken}) barrier->init(kGroupWarps);
    s.there.init(Shape::kColumns / kGroupColumns * kGroupWarps);
    s.taken.init(1);
    fence_barrier_init();
  }
  // Otherwise the kernel before this one has waited for those before it, and its flags say what is there.
  if (args.published == nullptr) wait_for_previous_kernels();
  if (threadIdx.x == 0) {
    s.work = work_at<Shape::kWidth, Shape::kMakesMaps>(args, blockIdx.x, Shape::kColumns);
    s.first_item = args.factors_at(s.work.walk.first_chunk) + s.work.part.head;
    if (args.published != nullptr) {
      const ScanPart& part = s.work.part;
      const int64_t heads = args.problem.num_value_heads / args.problem.group;
      s.flags[0] = s.flags[1] = flags_of(args, part, s.work.walk, heads, part.key_head);
    }
  }
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  constexpr int kFirstServant = Shape::kWarps + Shape::kScoreWarps;
  if (warp >= kFirstServant) {
    give_registers<Shape::kOtherRegisters>();
    if (s.work.walk.exists) serve<Shape>(args, maps, s, warp - kFirstServant);
  } else if (warp >= Shape::kWarps) {
    if constexpr (Shape::kMakesP) {
      give_registers<Shape::kScoreRegisters>();
      const ScoreGroup<kType, Shape> scores{args, maps, s, warp - Shape::kWarps, lane};
      if (s.work.walk.exists) scores.run();
    }
  } else {
    take_registers<Shape::kWorkRegisters>();
    const WorkGroup<kType, Shape> work{args, maps, s, warp / kGroupWarps, warp % kGroupWarps, lane};
    if (s.work.walk.exists) {
      if constexpr (Shape::kMakesMaps) {
        work.run_state();
      } else if constexpr (Shape::kSplit) {
        warp < kGroupWarps ? work.run_state() : work.run_outputs();
      } else {
        work.run();
      }
    }
  }
  if (args.published == nullptr) return;
  __syncthreads();  // a warp that waits for the kernel before keeps its other lanes from working
  wait_for_previous_kernels();
}

template <DType kType, class Shape>
void launch_scan_of(const ForwardArgs& args, const ScanMaps& maps, const Context& context) {
  const auto parts = static_cast<unsigned>(count_forward_parts<Shape::kMakesMaps>(args, Shape::kColumns));
  launch<scan_kernel<kType, Shape>>("delta_rule chunk_sm90 scan", context,
                                    {parts, Shape::kThreads, sizeof(typename Shape::Shared), true}, args, maps);
}

}  // namespace

template <DType kType>
void launch_scan(const ForwardArgs& args, const ScanMaps& maps, int columns, bool with_sP, const Context& context) {
  const auto of = [&]<class Shape>() { launch_scan_of<kType, Shape>(args, maps, context); };
  const int K = padded_k(args.problem.head_dim_k);
  if (args.segments.chunks > 0) {
    of.template operator()<Block<128, 2, Makes::kMaps>>();
    launch_compose(args, context);
  }
  if (K == 256) {
    of.template operator()<Block<256, 1, Makes::kOutputs>>();
  } else if (K == 64) {
    with_sP ? of.template operator()<Block<64, 1, Makes::kOutputs>>()
            : of.template operator()<Block<64, 1, Makes::kOutputsAndP>>();
  } else if (columns == kGroupColumns) {
    of.template operator()<Block<128, 1, Makes::kOutputs>>();
  } else if (maps.has_states) {
    with_sP ? of.template operator()<Block<128, 2, Makes::kOutputs, true>>()
            : of.template operator()<Block<128, 2, Makes::kOutputsAndP, true>>();
  } else {
    with_sP ? of.template operator()<Block<128, 2, Makes::kOutputs>>()
            : of.template operator()<Block<128, 2, Makes::kOutputsAndP>>();
  }
}

}  // namespace fastweight::cuda::chunk_sm90
