// The scan over the chunks of a sequence on Hopper, for one decay per head or none. See ../chunk.cuh for
// the equations; the factors: factors.cu.
//
// A block has 128 value columns of one (sequence, value head) or, where that leaves multiprocessors idle, 64. As in
// chunk_16bit the value side is transposed: S^T [columns x K] stays in the registers of a warpgroup, 64 columns each, as
// the fp32 sums of the product that advances it and, rounded, as the left operand of those that read it. Right operands
// lie in shared memory, where TMA brings them, three chunks ahead at most. With 128 columns two warpgroups go through a
// chunk with five groups of products:
//
//     X = S^T k^T                    while it runs, o of the chunk before goes to shared memory
//     O = S^T q^T
//     X = bD^T J^T                   bD^T = beta (v^T - e X); while it runs, S is scaled by e_n
//     S = S + (w R)^T k              R^T = X, rounded
//     O = scale e O + R^T sP^T       while it runs, S is rounded for the next chunk
//
// With 64 columns there are few heads, and what counts is how long a chunk takes: one warpgroup does the three products
// that the next chunk waits for, and hands S^T and R^T, rounded, through shared memory to another, which makes O.
//
// With K <= 64 the state takes half of the registers and the operands half of the shared memory: a block has 64 columns, of
// which one warpgroup makes S and O as above, and two blocks are on a multiprocessor. While one waits for a product that its
// next one needs, the other multiplies; and they need not be of one length.
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
// the blocks of J and sP above their diagonals (lower_map), which nobody wrote.
//
// A scan of maps (segment_plan.h) has blocks of 128 columns of h or of M, whose values lie beyond the last column of v and are
// therefore zeros, and two warpgroups with the three products of the state.
//
// A column's sums do not depend on other columns, nor on who makes them: how many columns a block has changes no bit.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/factor_steps.cuh"
#include "cuda/delta_rule/chunk_sm90/head_values.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::kRowNumbers;

// What a scan leaves behind: maps of segments, or outputs, for which sP is read or made.
enum class Makes { kMaps, kOutputs, kOutputsAndP };

// A block has warpgroups that multiply, kGroups of which have the state, one that makes sP if it is to be made, and one more.
template <int kK, int kGroups, Makes kMakes>
struct Block {
  static constexpr int kWidth = kK, kStages = scan_stages(kK);
  static constexpr bool kMakesMaps = kMakes == Makes::kMaps, kMakesP = kMakes == Makes::kOutputsAndP;
  static constexpr bool kSplit = kK == 128 && kGroups == 1;  // one warpgroup makes S, another O
  static constexpr bool kHalves = kK == 256;                 // two warpgroups have half of K each
  static_assert(kK == 128 || kGroups == 1);
  static_assert(kMakes == Makes::kOutputs || kGroups == 2);
  static constexpr int kWorkGroups = kSplit || kHalves ? 2 : kGroups,
                       kWarps = kWorkGroups * kGroupWarps;  // that multiply
  static constexpr int kScoreWarps = kMakesP ? kGroupWarps : 0;
  static constexpr int kAllGroups = kWorkGroups + (kMakesP ? 2 : 1), kThreads = kAllGroups * kGroupThreads;
  static constexpr int kColumns = kGroups * kGroupColumns;
  static constexpr int kBlocksOnOne = kK == 64 ? 2 : 1;  // multiprocessor
  // All warpgroups share the registers evenly at first; for those that do not multiply fewer are enough.
  static constexpr int kEvenRegisters = 65536 / (kBlocksOnOne * kThreads) / 8 * 8;
  static constexpr int kScoreRegisters = kMakesP ? 72 : 0, kOtherRegisters = kMakesP ? 24 : 56;
  static constexpr int kWorkRegisters =
      (kAllGroups * kEvenRegisters - kScoreRegisters - kOtherRegisters) / kWorkGroups / 8 * 8;

  // The operands of a chunk.
  struct alignas(1024) Stage {
    unsigned char k[KeyTile<kK>::kBytes], q[kMakesMaps ? 1024 : KeyTile<kK>::kBytes], v[kGroups][ValueTile::kBytes];
    unsigned char J[LowerTile::kBytes], sP[kMakesMaps ? 1024 : LowerTile::kBytes];  // no maps need q or sP
    float token[kTokenFactors * kChunkRows];
    float row[kRowNumbers * kChunkRows];  // where sP is made
  };
  static constexpr uint32_t kStageBytes = (kMakesMaps ? 1 : 2) * KeyTile<kK>::kBytes + kGroups * ValueTile::kBytes +
                                          LowerTile::kBytes + sizeof(Stage::token) + kTotalBytes +
                                          (kMakesMaps ? 0
                                           : kMakesP  ? sizeof(Stage::row)
                                                      : LowerTile::kBytes);

  // What one warpgroup hands to the other, if it does; `there` and `taken` are phases of every chunk.
  template <class Tile>
  struct alignas(1024) Handed {
    unsigned char tile[kSplit ? Tile::kBytes : 1024];
    TransactionBarrier there, taken;
  };

  // `filled`: the operands of a chunk are there. `made`: so is sP. `free`: all warps that multiply need them no more.
  struct alignas(1024) Shared {
    Stage stage[kStages];
    unsigned char o[kGroups][ValueTile::kBytes];
    TransactionBarrier o_there, o_taken;
    Handed<StateTile<kK>> S;
    Handed<WritesTile> R;
    float total[kStages][4];
    QuerySquares squares[kMakesP ? 2 : 1];
    TransactionBarrier filled[kStages], made[kStages], free[kStages];
    ForwardWork work;
    float4 halves[kHalves ? 2 : 1][kHalves ? kTokenTiles : 1]
                 [kHalves ? kGroupThreads : 1];  // of X, then O, of a thread
  };
  static_assert(kBlocksOnOne * (sizeof(Shared) + 1024) <= 228 * 1024);
};

// Where a block is in the ring of stages.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  uint32_t odd = 0;      // the number of the chunk
  uint32_t outputs = 0;  // that of the next o

  __device__ __forceinline__ void next() {
    odd ^= 1;
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// The warpgroup that serves the others
// ----------------------------------------------------------------------------------------------------------

// The operands of chunk c to the ring, a share of them by one thread of each of three warps: to start all copies takes one
// thread as long as a chunk takes the others. The first announces them all.
template <class Shape>
__device__ __forceinline__ void bring_share(const ForwardArgs& args, const ScanMaps& maps, typename Shape::Shared& s,
                                            int share, int c, const Turn<Shape::kStages>& turn) {
  const auto& [part, walk, ends] = s.work;
  const int64_t item = args.factors_at(walk.first_chunk + c) + part.head;
  const RowsPlace rows = rows_of(args, walk, c, share == 0 ? part.key_head : part.head);
  const int at = turn.stage;
  auto& stage = s.stage[at];
  TransactionBarrier& filled = s.filled[at];
  s.free[at].wait(turn.parity ^ 1);
  if (share == 0) {
    filled.arrive_expecting(Shape::kStageBytes);
    using Tile = KeyTile<Shape::kWidth>;
    load_panels(Tile(stage.k), maps.k, 0, args.problem.head_dim_k, rows, filled);
    if constexpr (!Shape::kMakesMaps) load_panels(Tile(stage.q), maps.q, 0, args.problem.head_dim_k, rows, filled);
  } else if (share == 1) {
#pragma unroll
    for (int i = 0; i < Shape::kColumns / kGroupColumns; ++i) {
      load_panels(ValueTile(stage.v[i]), maps.v, part.column + i * kGroupColumns, value_columns(args), rows, filled);
    }
    load_bytes(shared_address(stage.token), args.factors.token + item * kTokenFactors * kChunkRows, sizeof(stage.token),
               filled);
    load_bytes(shared_address(s.total[at]), args.factors.total + item * 4, kTotalBytes, filled);
    if constexpr (Shape::kMakesP) {
      load_bytes(shared_address(stage.row), args.factors.row + item * kRowNumbers * kChunkRows, sizeof(stage.row),
                 filled);
    }
  } else {
    load_lower(stage.J, maps.J, static_cast<int>(item), filled);
    if constexpr (!Shape::kMakesMaps && !Shape::kMakesP) load_lower(stage.sP, maps.sP, static_cast<int>(item), filled);
  }
}

// The outputs of chunk c from shared memory to its rows.
template <class Shape>
__device__ __forceinline__ void store_output(const ForwardArgs& args, const ScanMaps& maps, typename Shape::Shared& s,
                                             int c, Turn<Shape::kStages>& turn) {
  const auto& [part, walk, ends] = s.work;
  const RowsPlace at = rows_of(args, walk, c, part.head);
  s.o_there.wait(turn.outputs);
  turn.outputs ^= 1;
#pragma unroll
  for (int i = 0; i < Shape::kColumns / kGroupColumns; ++i) {
    const int column = part.column + i * kGroupColumns;
    if (!args.o.present() || column >= args.problem.head_dim_v) continue;
    store_box(maps.o, {column, at.head, at.missing, at.end, at.batch}, ValueTile(s.o[i]).panel(0));
  }
  commit_stores();
  wait_stores_read<0>();
  s.o_taken.arrive();
}

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

// Warps 0 to 2 bring, by one lane each; one of the last warp stores, unless maps are made.
template <class Shape>
__device__ __forceinline__ void serve(const ForwardArgs& args, const ScanMaps& maps, typename Shape::Shared& s,
                                      int warp) {
  constexpr int kShares = 3;
  if (!elect_one()) return;
  const int chunks = s.work.walk.chunks;
  Turn<Shape::kStages> turn;
  if (warp < kShares) {
    for (int c = 0; c < chunks; ++c, turn.next()) bring_share<Shape>(args, maps, s, warp, c, turn);
  } else if constexpr (!Shape::kMakesMaps) {
    for (int c = 0; c < chunks; ++c) store_output<Shape>(args, maps, s, c, turn);
  }
}

// The warpgroup that makes sP
// ----------------------------------------------------------------------------------------------------------

template <DType kType, class Shape>
struct ScoreGroup {
  using Turn = chunk_sm90::Turn<Shape::kStages>;
  const ForwardArgs& args;
  const ScanMaps& maps;
  typename Shape::Shared& s;
  int warp, lane;  // within the warpgroup

  // Blocks above the diagonals of sP, once.
  __device__ __forceinline__ void clear_scores() const {
    constexpr int kPieces = sizeof(s.stage[0].sP) / sizeof(uint4);
    for (auto& stage : s.stage) {
      for (int i = kWarpSize * warp + lane; i < kPieces; i += kGroupThreads) {
        reinterpret_cast<uint4*>(stage.sP)[i] = make_uint4(0, 0, 0, 0);
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

  // sP and the factor on q S of chunk c, whose operands are there. Two turns use different squares.
  __device__ __forceinline__ void make_scores(int c, const Turn& turn) const {
    auto& stage = s.stage[turn.stage];
    const float *gamma = stage.row + chunk_16bit::kGamma * kChunkRows,
                *rstd_k = stage.row + chunk_16bit::kRstdOfK * kChunkRows;
    const ScoreSteps<kType, Shape::kWidth> steps{{args.problem, s.squares[turn.odd], warp, lane}};
    Gram qk;
    s.filled[turn.stage].wait(turn.parity);
    steps.multiply(stage.q, stage.k, qk);
    if (keeps() && lane == 0) wait_stores_read<0>();  // of the warp's rows of sP, three chunks ago
    named_barrier<3>(kGroupThreads);
    steps.apply_decays(gamma, rstd_k, qk, StageScores<kType>{LowerTile(stage.sP), lane});
    const int i = kWarpSize * warp + lane;
    const int64_t item = args.factors_at(s.work.walk.first_chunk + c) + s.work.part.head;
    if (i < kChunkRows) {
      const float on_read = steps.queries.on_read(i, gamma[i]);
      stage.token[kOnQueryRead * kChunkRows + i] = on_read;
      if (keeps()) keep_numbers(item, i, on_read, steps.queries.rstd(i));
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) s.made[turn.stage].arrive();
    if (keeps() && lane == 0) {
      store_lower_rows(stage.sP, maps.sP, warp, static_cast<int>(item));
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
  using Turn = chunk_sm90::Turn<Shape::kStages>;
  using Keys = KeyTile<kK>;
  using StateRows = Fragments<kKeySteps<kK>>;
  const ForwardArgs& args;
  typename Shape::Shared& s;
  int group, warp, lane;  // the warp within the warpgroup

  __device__ __forceinline__ const ScanPart& part() const { return s.work.part; }
  __device__ __forceinline__ const Walk& walk() const { return s.work.walk; }

  // Which 64 columns of the block.
  __device__ __forceinline__ int range() const { return kGroups == 2 ? group : 0; }
  __device__ __forceinline__ StateColumns<kK, kGroups, kParts> columns() const {
    return {args, part(), walk(), s.work.ends, range(), warp, lane, kParts == 2 ? kK * group : 0};
  }
  // The warpgroup's channels of k or q.
  __device__ __forceinline__ Keys own_keys(const unsigned char* memory) const {
    return Keys(memory + (kParts == 2 ? group * Keys::kBytes : 0));
  }

  // Sums of the other half from the thread that has the same tiles, or to it.
  __device__ __forceinline__ void put_sums(int half, const TokenSums& sums) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      s.halves[half][n][kWarpSize * warp + lane] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    }
  }
  __device__ __forceinline__ void add_sums(int half, TokenSums& sums) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float4 x = s.halves[half][n][kWarpSize * warp + lane];
      sums[n][0] += x.x, sums[n][1] += x.y, sums[n][2] += x.z, sums[n][3] += x.w;
    }
  }

  // X of both halves to both: the same bits, for a + b is b + a.
  __device__ __forceinline__ void exchange_X(TokenSums& X) const {
    put_sums(group, X);
    named_barrier<1>(2 * kGroupThreads);
    add_sums(1 - group, X);
  }
  // O of the second half to the first, through the place that the first half's X had: this thread has read it. The barrier
  // also tells the second that the first has read its X.
  __device__ __forceinline__ void hand_O(TokenSums& O) const {
    if (group == 1) put_sums(0, O);
    named_barrier<2>(2 * kGroupThreads);
    if (group == 0) add_sums(0, O);
  }

  // o^T to shared memory, from where it is stored.
  __device__ __forceinline__ void give_outputs(const Fragments<kTokenSteps>& o, Turn& turn) const {
    if (Shape::kHalves && group == 1) return;  // its O lacks the other half's
    const ValueTile tile(s.o[range()]);
    s.o_taken.wait(turn.outputs ^ 1);
    turn.outputs ^= 1;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) tile.store_c_transposed(16 * m, warp, lane, o[m]);
    fence_async_proxy();
    arrive(s.o_there);
  }

  // The warp has done what a barrier counts by warps.
  __device__ __forceinline__ void arrive(TransactionBarrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  // S and O by one warpgroup. S and O of a chunk are handed to the next one rounded: ptxas lets no sums pass from one
  // turn of the loop to the next beside a product on its way.
  __device__ __forceinline__ void run() const {
    Turn turn;
    StateSums<kK> S = {};
    columns().load_first_state(S);
    StateRows rS;
    round_sums<kType, kKeySteps<kK>>(S, rS);
    Fragments<kTokenSteps> rO;
    for (int c = 0; c < walk().chunks; ++c, turn.next()) {
      columns().save_chunk_state(c, rS, S);
      auto& stage = s.stage[turn.stage];
      const float* token = stage.token;
      const Keys k = own_keys(stage.k), q = own_keys(stage.q);
      const LowerTile J(stage.J), sP(stage.sP);
      TokenSums X, O;
      s.filled[turn.stage].wait(turn.parity);
      wgmma_fence(X, rS);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(X, rS[m], k.along_rows(0, m), m > 0);
      wgmma_commit();
      if (c > 0) give_outputs(rO, turn);
      wgmma_fence(O);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(O, rS[m], q.along_rows(0, m), m > 0);
      wgmma_commit();
      wgmma_wait<1>(X);
      if constexpr (Shape::kHalves) exchange_X(X);
      Fragments<kTokenSteps> bD, R, wR;
      Values values;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        values.load(m, ValueTile(stage.v[range()]), token, warp, lane);
        values.template correct<kType>(m, X, bD[m]);
      }
      wgmma_fence(X, bD);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, bD[m], J.along_rows(0, m), m > 0);
      wgmma_commit();
      scale_state(turn, S);
      wgmma_wait<0>(X, O);
      round_sums<kType, kTokenSteps>(X, R);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        round_write<kType>(m, token_pair(token, kOnWrite, 2 * m, lane), token_pair(token, kOnWrite, 2 * m + 1, lane), X,
                           wR[m]);
      }
      wgmma_fence(S, wR);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kK>(S, wR[m], k.along_columns(0, m));
      wgmma_commit();
      if constexpr (Shape::kHalves) hand_O(O);
      if constexpr (Shape::kMakesP) s.made[turn.stage].wait(turn.parity);
      scale_outputs(token, O);
      wgmma_fence(O, R);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R[m], sP.along_rows(0, m));
      wgmma_commit();
      wgmma_wait<1>(S);
      round_sums<kType, kKeySteps<kK>>(S, rS);
      wgmma_wait<0>(O);
      round_sums<kType, kTokenSteps>(O, rO);
      arrive(s.free[turn.stage]);
    }
    if (walk().chunks > 0) give_outputs(rO, turn);
    columns().save_state(walk().chunks, true, S);
  }

  __device__ __forceinline__ void scale_state(const Turn& turn, StateSums<kK>& S) const {
    const float total = s.total[turn.stage][0];
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
      auto& stage = s.stage[turn.stage];
      const float* token = stage.token;
      const Keys k(stage.k);
      const LowerTile J(stage.J);
      TokenSums X, Y;
      s.filled[turn.stage].wait(turn.parity);
      wgmma_fence(X, rS);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(X, rS[m], k.along_rows(0, m), m > 0);
      wgmma_commit();
      Values values;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) values.load(m, ValueTile(stage.v[range()]), token, warp, lane);
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
      arrive(s.free[turn.stage]);
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
      auto& stage = s.stage[turn.stage];
      const Keys q(stage.q);
      const LowerTile sP(stage.sP);
      StateRows rS;
      Fragments<kTokenSteps> R, rO;
      TokenSums O;
      s.filled[turn.stage].wait(turn.parity);
      take(s.S, StateTile<kK>(s.S.tile), turn, rS);
      wgmma_fence(O, rS);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(O, rS[m], q.along_rows(0, m), m > 0);
      wgmma_commit();
      wgmma_wait<0>(O);
      scale_outputs(stage.token, O);
      take(s.R, WritesTile(s.R.tile), turn, R);
      wgmma_fence(O, R);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R[m], sP.along_rows(0, m));
      wgmma_commit();
      wgmma_wait<0>(O);
      arrive(s.free[turn.stage]);
      round_sums<kType, kTokenSteps>(O, rO);
      give_outputs(rO, turn);
    }
  }
};

// A block per part.
template <DType kType, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksOnOne)
    scan_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ ScanMaps maps) {
  auto& s = aligned_shared<typename Shape::Shared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      s.filled[i].init(1);
      s.made[i].init(kGroupWarps);
      s.free[i].init(Shape::kWarps);
    }
    for (TransactionBarrier* barrier : {&s.S.there, &s.S.taken, &s.R.there, &s.R.taken}) barrier->init(kGroupWarps);
    s.o_there.init(Shape::kColumns / kGroupColumns * kGroupWarps);
    s.o_taken.init(1);
    fence_barrier_init();
  }
  wait_for_previous_kernels();
  if (threadIdx.x == 0) {
    s.work = forward_part_at<Shape::kWidth, Shape::kMakesMaps>(args, blockIdx.x, Shape::kColumns);
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
    const WorkGroup<kType, Shape> work{args, s, warp / kGroupWarps, warp % kGroupWarps, lane};
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
    of.template operator()<Block<64, 1, Makes::kOutputs>>();
  } else if (columns == kGroupColumns) {
    of.template operator()<Block<128, 1, Makes::kOutputs>>();
  } else {
    with_sP ? of.template operator()<Block<128, 2, Makes::kOutputs>>()
            : of.template operator()<Block<128, 2, Makes::kOutputsAndP>>();
  }
}

}  // namespace fastweight::cuda::chunk_sm90
