// The scan over the chunks of a sequence on Hopper, for one decay per head or none and K, V <= 128. See ../chunk.cuh for
// the equations; the factors: factors.cu.
//
// A block has 128 value columns of one (sequence, value head) or, where that leaves multiprocessors idle, 64. As in
// chunk_16bit the value side is transposed: S^T [columns x K] stays in the registers of a warpgroup, 64 columns each, as
// the fp32 sums of the product that advances it and, rounded, as the left operand of those that read it. Right operands
// lie in shared memory, where one more warp brings them by TMA, three chunks ahead at most. With 128 columns two
// warpgroups go through a chunk with five groups of products:
//
//     X = S^T k^T                    while it runs, o of the chunk before leaves
//     O = S^T q^T
//     X = bD^T J^T                   bD^T = beta (v^T - e X); while it runs, S is scaled by e_n
//     S = S + (w R)^T k              R^T = X, rounded
//     O = scale e O + R^T sP^T       while it runs, S is rounded for the next chunk
//
// With 64 columns there are few heads, and what counts is how long a chunk takes: one warpgroup does the three products
// that the next chunk waits for, and hands S^T and R^T, rounded, through shared memory to another, which makes O.
//
// Rows beyond the tokens of a chunk are zeros in k, q and v, whatever lies behind them in memory (token_map), and so are
// the blocks of J and sP above their diagonals (lower_map), which nobody wrote.
//
// A column's sums do not depend on other columns, nor on who makes them: how many columns a block has changes no bit.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/chunk_16bit/window.cuh"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/panel_tile.cuh"
#include "cuda/sm90/tma.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkArgs;
using chunk_16bit::kChunkRows;
using chunk_16bit::Walk;

constexpr int kGroupThreads = 128, kGroupWarps = 4, kGroupColumns = 64;
constexpr int kTokenSteps = kChunkRows / 16, kKeySteps = kWidth / 16;
constexpr int kTokenTiles = kChunkRows / 8, kKeyTiles = kWidth / 8;
constexpr int kTokenFactors = chunk_16bit::kTokenFactors<false>;

using KeyTile = PanelTile<kChunkRows, kWidth>;           // k and q
using LowerTile = PanelTile<kChunkRows, kChunkRows>;     // J and sP
using ValueTile = PanelTile<kChunkRows, kGroupColumns>;  // a warpgroup's columns of v and o
using StateTile = PanelTile<kGroupColumns, kWidth>;      // S^T
using WriteTile = PanelTile<kGroupColumns, kChunkRows>;  // R^T
constexpr int kLowerBytes = LowerTile::kRowBytes * 16;   // of a row of blocks
constexpr uint32_t kTotalBytes = 4 * sizeof(float);

// A block has two warpgroups that multiply and one more, of which one warp has work. kGroups of the two have the state.
template <int kGroups>
struct Block {
  static_assert(kGroups == 1 || kGroups == 2);
  static constexpr int kWarps = 2 * kGroupThreads / kWarpSize;  // that multiply
  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kColumns = kGroups * kGroupColumns;
  // Three warpgroups share the registers evenly at first, 168 for a thread; for two of them there are enough.
  static constexpr int kWorkRegisters = 224, kOtherRegisters = 56;
  static_assert(2 * kWorkRegisters + kOtherRegisters <= 3 * 168);

  // The operands of a chunk.
  struct alignas(1024) Stage {
    unsigned char k[KeyTile::kBytes], q[KeyTile::kBytes], v[kGroups][ValueTile::kBytes];
    unsigned char J[LowerTile::kBytes], sP[LowerTile::kBytes];
    float token[kTokenFactors * kChunkRows];
  };
  static constexpr uint32_t kStageBytes =
      2 * KeyTile::kBytes + kGroups * ValueTile::kBytes + 2 * LowerTile::kBytes + sizeof(Stage::token) + kTotalBytes;

  // What one warpgroup hands to the other, if it does; `there` and `taken` are phases of every chunk.
  template <class Tile>
  struct alignas(1024) Handed {
    unsigned char tile[kGroups == 1 ? Tile::kBytes : 1024];
    TransactionBarrier there, taken;
  };

  // `filled`: the operands of a chunk are there. `free`: all warps that multiply need them no more.
  struct alignas(1024) Shared {
    Stage stage[kStages];
    unsigned char o[kGroups][ValueTile::kBytes];
    Handed<StateTile> S;
    Handed<WriteTile> R;
    float total[kStages][4];
    TransactionBarrier filled[kStages], free[kStages];
  };
};

// Where a block is in the ring of stages: turns go on from part to part.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  uint32_t odd = 0;  // the number of the chunk

  __device__ __forceinline__ void next() {
    odd ^= 1;
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// body(part, walk) for the parts of this block of which anything is to be done in the window.
template <class Body>
__device__ __forceinline__ void for_each_part(const ChunkArgs& args, int parts, int columns, const Body& body) {
  for (int at = static_cast<int>(blockIdx.x); at < parts; at += static_cast<int>(gridDim.x)) {
    const ScanPart part = scan_part_at(args.problem, args.chunked, at, columns);
    const Walk walk = chunk_16bit::walk_of(args, part);
    if (walk.exists) body(part, walk);
  }
}

// A place of token_map, but for the column and the head: the tokens of chunk c of a walk.
struct RowsPlace {
  int missing, end, batch;
};
__device__ __forceinline__ RowsPlace rows_of(const ChunkArgs& args, const Walk& walk, int c) {
  const int64_t C = args.chunked.chunk_size, first = c * C, tokens = min(walk.span.length - first, C);
  return {kChunkRows - static_cast<int>(tokens), static_cast<int>(walk.span.begin + first + tokens),
          static_cast<int>(walk.span.batch)};
}

// The warp that brings the operands, by one lane
// ------------------------------------------------------------------------------------

// Columns from `column` on to a tile.
template <class Tile>
__device__ __forceinline__ void load_panels(const Tile& tile, const TensorMap& map, int column, int head,
                                            const RowsPlace& at, TransactionBarrier& barrier) {
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p) {
    load_box(tile.panel(p), map, {column + p * Tile::kPanelColumns, head, at.missing, at.end, at.batch}, barrier);
  }
}

// Row blocks of a lower triangular matrix. See lower_map.
__device__ __forceinline__ void load_lower(const void* memory, const TensorMap& map, int item,
                                           TransactionBarrier& barrier) {
  const uint32_t to = shared_address(memory);
#pragma unroll
  for (int block = 0; block < kTokenSteps; ++block) {
    load_box(to + static_cast<uint32_t>(block * kLowerBytes), map,
             {kChunkRows - 16 * (block + 1), block, 16 * block, item}, barrier);
  }
}

// Until the factors of an item can be copied, where flags tell.
__device__ __forceinline__ void wait_for_factors(const uint32_t* ready, int64_t item) {
  if (ready == nullptr) return;
  while (!is_published(ready + item)) {
  }
  fence_async_proxy_of_global();
}

template <int kGroups>
__device__ __forceinline__ void bring_operands(const ChunkArgs& args, const ScanMaps& maps, const uint32_t* ready,
                                               int parts, typename Block<kGroups>::Shared& s) {
  Turn turn;
  for_each_part(args, parts, Block<kGroups>::kColumns, [&](const ScanPart& part, const Walk& walk) {
    for (int c = 0; c < walk.chunks; ++c, turn.next()) {
      const int64_t item = args.factors_at(walk.first_chunk + c) + part.head;
      const RowsPlace rows = rows_of(args, walk, c);
      auto& stage = s.stage[turn.stage];
      TransactionBarrier& filled = s.filled[turn.stage];
      wait_for_factors(ready, item);
      s.free[turn.stage].wait(turn.parity ^ 1);
      filled.arrive_expecting(Block<kGroups>::kStageBytes);
      load_panels(KeyTile(stage.k), maps.k, 0, part.key_head, rows, filled);
      load_panels(KeyTile(stage.q), maps.q, 0, part.key_head, rows, filled);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        load_panels(ValueTile(stage.v[i]), maps.v, part.column + i * kGroupColumns, part.head, rows, filled);
      }
      load_bytes(shared_address(stage.token), args.factors.token + item * kTokenFactors * kChunkRows,
                 sizeof(stage.token), filled);
      load_bytes(shared_address(s.total[turn.stage]), args.factors.total + item * 4, kTotalBytes, filled);
      load_lower(stage.J, maps.J, static_cast<int>(item), filled);
      load_lower(stage.sP, maps.sP, static_cast<int>(item), filled);
    }
  });
}

// A warpgroup of the state
// ----------------------------------------------------------------------------------------------------------

// [64 value columns x 64 tokens] and [64 value columns x K], as C tiles of a warp's 16 columns.
using TokenSums = float[kTokenTiles][4];
using StateSums = float[kKeyTiles][4];
template <int kSteps>
using Fragments = uint32_t[kSteps][4];

// The columns of a C tile are tokens: its elements 0 and 2 belong to one, 1 and 3 to the next.
__device__ __forceinline__ float2 token_pair(const float* token, TokenFactor factor, int tile, int lane) {
  return *reinterpret_cast<const float2*>(token + factor * kChunkRows + 8 * tile + 2 * (lane % 4));
}

__device__ __forceinline__ void scale_tile(const float2& by, const float (&c)[4], float (&scaled)[4]) {
  scaled[0] = by.x * c[0];
  scaled[1] = by.y * c[1];
  scaled[2] = by.x * c[2];
  scaled[3] = by.y * c[3];
}

template <DType kType, int kSteps>
__device__ __forceinline__ void round_sums(const float (&c)[2 * kSteps][4], Fragments<kSteps>& a) {
#pragma unroll
  for (int m = 0; m < kSteps; ++m) pack_a<kType>(c[2 * m], c[2 * m + 1], a[m]);
}

// What bD^T = beta (v^T - e X) is made of beside X.
struct Values {
  Fragments<kTokenSteps> v;
  float2 on_x[kTokenTiles], beta[kTokenTiles];

  __device__ __forceinline__ void load(int m, const ValueTile& values, const float* token, int warp, int lane) {
    values.load_c_transposed(16 * m, warp, lane, v[m]);
#pragma unroll
    for (int n = 2 * m; n < 2 * m + 2; ++n) {
      on_x[n] = token_pair(token, kOnKeyRead, n, lane);
      beta[n] = token_pair(token, kOnValue, n, lane);
    }
  }

  // Tokens [16 m, 16 m + 16) of bD^T, rounded.
  template <DType kType>
  __device__ __forceinline__ void correct(int m, const TokenSums& X, uint32_t (&bD)[4]) const {
    float D[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * m + h;
      const float2 low = unpack<kType>(v[m][2 * h]), high = unpack<kType>(v[m][2 * h + 1]);
      D[h][0] = beta[n].x * fmaf(-on_x[n].x, X[n][0], low.x);
      D[h][1] = beta[n].y * fmaf(-on_x[n].y, X[n][1], low.y);
      D[h][2] = beta[n].x * fmaf(-on_x[n].x, X[n][2], high.x);
      D[h][3] = beta[n].y * fmaf(-on_x[n].y, X[n][3], high.y);
    }
    pack_a<kType>(D[0], D[1], bD);
  }
};

// Tokens [16 m, 16 m + 16) of w R^T, rounded.
template <DType kType>
__device__ __forceinline__ void round_write(int m, const float* token, int lane, const TokenSums& X,
                                            uint32_t (&wR)[4]) {
  float scaled[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) scale_tile(token_pair(token, kOnWrite, 2 * m + h, lane), X[2 * m + h], scaled[h]);
  pack_a<kType>(scaled[0], scaled[1], wR);
}

// A barrier among the threads of a warpgroup.
__device__ __forceinline__ void group_barrier(int group) {
  group == 0 ? named_barrier<1>(kGroupThreads) : named_barrier<2>(kGroupThreads);
}

// A warpgroup that multiplies.
template <DType kType, int kGroups>
struct WorkGroup {
  const ChunkArgs& args;
  const ScanMaps& maps;
  typename Block<kGroups>::Shared& s;
  const ScanPart& part;
  const Walk& walk;
  int group, warp, lane;  // the warp within the warpgroup
  bool leader;            // the thread that stores o

  // Which 64 columns of the block.
  __device__ __forceinline__ int range() const { return kGroups == 2 ? group : 0; }
  __device__ __forceinline__ int first_column() const { return part.column + range() * kGroupColumns; }
  __device__ __forceinline__ int column() const { return first_column() + 16 * warp; }

  // The thread's share of the states between windows.
  static constexpr int kStateThreads = kGroups * kGroupThreads;
  template <class Float>
  __device__ __forceinline__ Float* carried(Float* states) const {
    constexpr int kColumns = Block<kGroups>::kColumns;
    return chunk_16bit::carried_at(args, states, part, walk, kColumns, kColumns * kWidth,
                                   static_cast<int>(threadIdx.x));
  }

  // o^T through shared memory to the rows of a chunk. The tile is free when the store before has read it.
  __device__ __forceinline__ void store_outputs(const Fragments<kTokenSteps>& o, int c) const {
    const ValueTile tile(s.o[range()]);
    if (leader) wait_stores_read<0>();
    group_barrier(group);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) tile.store_c_transposed(16 * m, warp, lane, o[m]);
    fence_async_proxy();
    group_barrier(group);
    if (leader) {
      const RowsPlace at = rows_of(args, walk, c);
      store_box(maps.o, {first_column(), part.head, at.missing, at.end, at.batch}, tile.panel(0));
      commit_stores();
    }
  }

  __device__ __forceinline__ void load_first_state(StateSums& S) const {
    if (!walk.opens) {
      chunk_16bit::take_tiles<kStateThreads>(carried(args.carried.taken), S);
    } else if (args.initial_state.present()) {
      load_state<kWidth>(args.initial_state, state_offset(args.initial_state, part), column(), args.problem.head_dim_k,
                         args.problem.head_dim_v, lane, S);
    }
  }

  // The state before chunk c of the walk, or after the last one.
  __device__ __forceinline__ void save_state(int c, bool last, StateSums& S) const {
    if (last && !walk.closes) return chunk_16bit::give_tiles<kStateThreads>(carried(args.carried.given), S);
    const StateAddress place =
        last ? final_state_address(args, part) : chunk_state_address(args, part, walk.span.batch, walk.position + c);
    if (!place.exists) return;
    store_state<kWidth>(place.states, place.offset, column(), args.problem.head_dim_k, args.problem.head_dim_v, lane,
                        S);
  }

  // The same before chunk c from the rounded state, where states have its type and rows along K. Neighbouring lanes
  // exchange pairs: of 16 channels a lane has four that lie together, and four lanes have 32 bytes of a row.
  __device__ __forceinline__ void save_rounded_state(int c, const Fragments<kKeySteps>& rS) const {
    const StateAddress place = chunk_state_address(args, part, walk.span.batch, walk.position + c);
    if (!place.exists) return;
    const bool odd = lane % 2 == 1;
    const int row = column() + lane / 4, first = 2 * (lane % 4) + (odd ? 6 : 0);
    uint16_t* to = static_cast<uint16_t*>(place.states.data) + place.offset + row * place.states.v_stride + first;
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t low = rS[m][h], high = rS[m][2 + h];
        const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
        if (row + 8 * h >= args.problem.head_dim_v || 16 * m + first >= args.state_width) continue;
        *reinterpret_cast<uint2*>(to + 16 * m + 8 * h * place.states.v_stride) =
            odd ? make_uint2(other, high) : make_uint2(low, other);
      }
    }
  }

  __device__ __forceinline__ void save_chunk_state(int c, const Fragments<kKeySteps>& rS, StateSums& S) const {
    if (args.state_width > 0) {
      save_rounded_state(c, rS);
    } else if (args.chunk_states.present()) {
      save_state(c, false, S);
    }
  }

  // The warp has done what a barrier counts by warps.
  __device__ __forceinline__ void arrive(TransactionBarrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  // One part, with 128 columns. S and O of a chunk are handed to the next one rounded: ptxas lets no sums pass from one
  // turn of the loop to the next beside a product on its way.
  __device__ __forceinline__ void run(Turn& turn) const {
    StateSums S = {};
    load_first_state(S);
    Fragments<kKeySteps> rS;
    round_sums<kType, kKeySteps>(S, rS);
    Fragments<kTokenSteps> rO;
    for (int c = 0; c < walk.chunks; ++c, turn.next()) {
      save_chunk_state(c, rS, S);
      auto& stage = s.stage[turn.stage];
      const float* token = stage.token;
      const KeyTile k(stage.k), q(stage.q);
      const LowerTile J(stage.J), sP(stage.sP);
      TokenSums X, O;
      s.filled[turn.stage].wait(turn.parity);
      wgmma_fence(X, rS);
#pragma unroll
      for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(X, rS[m], k.along_rows(0, m), m > 0);
      wgmma_commit();
      if (c > 0) store_outputs(rO, c - 1);
      wgmma_fence(O);
#pragma unroll
      for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(O, rS[m], q.along_rows(0, m), m > 0);
      wgmma_commit();
      wgmma_wait<1>(X);
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
      for (int m = 0; m < kTokenSteps; ++m) round_write<kType>(m, token, lane, X, wR[m]);
      wgmma_fence(S, wR);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kWidth>(S, wR[m], k.along_columns(0, m));
      wgmma_commit();
      scale_outputs(token, O);
      wgmma_fence(O, R);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R[m], sP.along_rows(0, m));
      wgmma_commit();
      wgmma_wait<1>(S);
      round_sums<kType, kKeySteps>(S, rS);
      wgmma_wait<0>(O);
      round_sums<kType, kTokenSteps>(O, rO);
      arrive(s.free[turn.stage]);
    }
    if (walk.chunks > 0) store_outputs(rO, walk.chunks - 1);
    save_state(walk.chunks, true, S);
  }

  __device__ __forceinline__ void scale_state(const Turn& turn, StateSums& S) const {
    const float total = s.total[turn.stage][0];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) scale_tile({total, total}, S[n], S[n]);
  }
  __device__ __forceinline__ void scale_outputs(const float* token, TokenSums& O) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) scale_tile(token_pair(token, kOnQueryRead, n, lane), O[n], O[n]);
  }

  // The warp's rows of S^T or R^T, to the warpgroup that makes O.
  template <class Tile, int kSteps>
  __device__ __forceinline__ void hand(typename Block<kGroups>::template Handed<Tile>& handed, const Turn& turn,
                                       const Fragments<kSteps>& rows) const {
    const Tile tile(handed.tile);
    handed.taken.wait(turn.odd ^ 1);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) tile.store_a(16 * warp, m, lane, rows[m]);
    fence_async_proxy();
    arrive(handed.there);
  }

  // One part, with 64 columns: the products of the state. A product begins with the first 16 tokens of its left operand,
  // while the next ones are rounded.
  __device__ __forceinline__ void run_state(Turn& turn) const {
    StateSums S = {};
    load_first_state(S);
    Fragments<kKeySteps> rS;
    round_sums<kType, kKeySteps>(S, rS);
    for (int c = 0; c < walk.chunks; ++c, turn.next()) {
      save_chunk_state(c, rS, S);
      auto& stage = s.stage[turn.stage];
      const float* token = stage.token;
      const KeyTile k(stage.k);
      const LowerTile J(stage.J);
      TokenSums X, Y;
      s.filled[turn.stage].wait(turn.parity);
      wgmma_fence(X, rS);
#pragma unroll
      for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(X, rS[m], k.along_rows(0, m), m > 0);
      wgmma_commit();
      hand(s.S, turn, rS);
      Values values;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) values.load(m, ValueTile(stage.v[0]), token, warp, lane);
      wgmma_wait<0>(X);
      Fragments<kTokenSteps> bD, R, wR;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        values.template correct<kType>(m, X, bD[m]);
        wgmma_fence(bD[m]);
        wgmma<kType, kChunkRows>(Y, bD[m], J.along_rows(0, m), m > 0);
      }
      wgmma_commit();
      scale_state(turn, S);
      wgmma_wait<0>(Y);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        round_write<kType>(m, token, lane, Y, wR[m]);
        m == 0 ? wgmma_fence(S, wR[m]) : wgmma_fence(wR[m]);
        wgmma<kType, kWidth>(S, wR[m], k.along_columns(0, m));
      }
      wgmma_commit();
      round_sums<kType, kTokenSteps>(Y, R);
      hand(s.R, turn, R);
      wgmma_wait<0>(S);
      round_sums<kType, kKeySteps>(S, rS);
      arrive(s.free[turn.stage]);
    }
    save_state(walk.chunks, true, S);
  }

  // The same part: its outputs.
  __device__ __forceinline__ void run_outputs(Turn& turn) const {
    for (int c = 0; c < walk.chunks; ++c, turn.next()) {
      auto& stage = s.stage[turn.stage];
      const KeyTile q(stage.q);
      const LowerTile sP(stage.sP);
      const StateTile S(s.S.tile);
      const WriteTile R(s.R.tile);
      TokenSums O;
      s.filled[turn.stage].wait(turn.parity);
      s.S.there.wait(turn.odd);
      wgmma_fence(O);
#pragma unroll
      for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(O, S.along_rows(0, m), q.along_rows(0, m), m > 0);
      wgmma_commit();
      wgmma_wait<0>(O);
      arrive(s.S.taken);
      scale_outputs(stage.token, O);
      s.R.there.wait(turn.odd);
      wgmma_fence(O);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R.along_rows(0, m), sP.along_rows(0, m));
      wgmma_commit();
      wgmma_wait<0>(O);
      arrive(s.R.taken);
      arrive(s.free[turn.stage]);
      Fragments<kTokenSteps> rO;
      round_sums<kType, kTokenSteps>(O, rO);
      store_outputs(rO, c);
    }
  }
};

// A block per part; a smaller grid goes round.
template <DType kType, int kGroups>
__global__ void __launch_bounds__(Block<kGroups>::kThreads, 1)
    scan_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ ScanMaps maps, const uint32_t* ready,
                int parts) {
  using Shape = Block<kGroups>;
  auto& s = aligned_shared<typename Shape::Shared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      s.filled[i].init(1);
      s.free[i].init(Shape::kWarps);
    }
    for (TransactionBarrier* barrier : {&s.S.there, &s.S.taken, &s.R.there, &s.R.taken}) barrier->init(kGroupWarps);
    fence_barrier_init();
  }
  // Beside the factors: their blocks have waited for all kernels before them when this one begins.
  if (ready == nullptr) wait_for_previous_kernels();
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (warp >= Shape::kWarps) {
    give_registers<Shape::kOtherRegisters>();
    if (warp == Shape::kWarps && elect_one()) bring_operands<kGroups>(args, maps, ready, parts, s);
  } else {
    take_registers<Shape::kWorkRegisters>();
    const bool leader = threadIdx.x % kGroupThreads == 0;
    Turn turn;
    for_each_part(args, parts, Shape::kColumns, [&](const ScanPart& part, const Walk& walk) {
      const WorkGroup<kType, kGroups> work{args, maps, s, part, walk, warp / 4, warp % 4, lane, leader};
      if constexpr (kGroups == 2) {
        work.run(turn);
      } else {
        warp < kGroupWarps ? work.run_state(turn) : work.run_outputs(turn);
      }
    });
    if (leader) wait_stores_read<0>();
  }
  wait_for_previous_kernels();
}

template <DType kType, int kGroups>
void launch_scan(const ChunkArgs& args, const ScanMaps& maps, const uint32_t* ready, const Context& context) {
  using Shape = Block<kGroups>;
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t ranges = (p.head_dim_v + Shape::kColumns - 1) / Shape::kColumns;
  const auto parts = static_cast<int>(p.sequences.count * p.num_value_heads * ranges);
  launch<scan_kernel<kType, kGroups>>(
      "delta_rule chunk_sm90 scan", context,
      {static_cast<unsigned>(std::min(parts, 1 << 30)), Shape::kThreads, sizeof(typename Shape::Shared), true},
      args, maps, ready, parts);
}

}  // namespace

template <DType kType>
void launch_scan(const ChunkArgs& args, const ScanMaps& maps, int columns, const uint32_t* ready,
                 const Context& context) {
  columns == Block<1>::kColumns ? launch_scan<kType, 1>(args, maps, ready, context)
                                : launch_scan<kType, 2>(args, maps, ready, context);
}

}  // namespace fastweight::cuda::chunk_sm90
