// The scan over the chunks of a sequence on Hopper, for one decay per head or none and K, V <= 128. See ../chunk.cuh for
// the equations; the factors are those of chunk_16bit.
//
// A block has 128 value columns of one (sequence, value head) or, where that leaves multiprocessors idle, 64. As in
// chunk_16bit the value side is transposed: S^T [columns x K] stays in the registers of two warpgroups, or one, 64 columns
// each, as the fp32 sums of the product that advances it and, rounded, as the left operand of those that read it. Right
// operands lie in shared memory, where one more warp brings them by TMA, three chunks ahead at most. A state warpgroup
// goes through a chunk with five groups of products:
//
//     X = S^T k^T                    while it runs, o of the chunk before leaves
//     O = S^T q^T
//     X = bD^T J^T                   bD^T = beta (v^T - e X); while it runs, S is scaled by e_n
//     S = S + (w R)^T k              R^T = X, rounded
//     O = scale e O + R^T sP^T       while it runs, S is rounded for the next chunk
//
// Rows beyond the tokens of a chunk are zeros in k, q and v, whatever lies behind them in memory (token_map), and so are
// the blocks of J and sP above their diagonals (lower_map), which nobody wrote.
//
// A column's sums do not depend on other columns: how many of them a block has changes no bit.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/state_columns.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

constexpr int kTokenFactors = chunk_16bit::kTokenFactors<false>;
constexpr uint32_t kTotalBytes = 4 * sizeof(float);

// A block has kGroups warpgroups of the state, and one more, of which one warp has work.
template <int kGroups>
struct Block {
  static constexpr int kStateWarps = kGroups * kGroupThreads / kWarpSize;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kColumns = kGroups * kGroupColumns;
  // Three warpgroups share the registers evenly at first, 168 for a thread; for two of them there are enough.
  static constexpr int kStateRegisters = 232, kOtherRegisters = 40;
  static_assert(2 * kStateRegisters + kOtherRegisters <= 3 * 168);

  // The operands of a chunk.
  struct alignas(1024) Stage {
    unsigned char k[KeyTile::kBytes], q[KeyTile::kBytes], v[kGroups][ValueTile::kBytes];
    unsigned char J[LowerTile::kBytes], sP[LowerTile::kBytes];
    float token[kTokenFactors * kChunkRows];
  };
  static constexpr uint32_t kStageBytes =
      2 * KeyTile::kBytes + kGroups * ValueTile::kBytes + 2 * LowerTile::kBytes + sizeof(Stage::token) + kTotalBytes;

  // `filled`: the operands of a chunk are there. `free`: all warps of the state need them no more.
  struct alignas(1024) Shared {
    Stage stage[kStages];
    unsigned char o[kGroups][ValueTile::kBytes];
    float total[kStages][4];
    TransactionBarrier filled[kStages], free[kStages];
  };
};

// Where a block is in the ring of stages: turns go on from part to part.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// The warp that brings the operands, by one lane
// ------------------------------------------------------------------------------------

template <int kGroups>
__device__ __forceinline__ void bring_operands(const ChunkArgs& args, const ScanMaps& maps, int64_t parts,
                                               typename Block<kGroups>::Shared& s) {
  Turn turn;
  for_each_part(args, parts, Block<kGroups>::kColumns, [&](const ScanPart& part, const Walk& walk) {
    for (int c = 0; c < walk.chunks; ++c, turn.next()) {
      const int64_t item = args.factors_at(walk.first_chunk + c) + part.head;
      const RowsPlace keys = rows_of(args, walk, c, part.key_head), values = rows_of(args, walk, c, part.head);
      auto& stage = s.stage[turn.stage];
      TransactionBarrier& filled = s.filled[turn.stage];
      s.free[turn.stage].wait(turn.parity ^ 1);
      filled.arrive_expecting(Block<kGroups>::kStageBytes);
      load_panels(KeyTile(stage.k), maps.k, 0, keys, filled);
      load_panels(KeyTile(stage.q), maps.q, 0, keys, filled);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        load_panels(ValueTile(stage.v[i]), maps.v, part.column + i * kGroupColumns, values, filled);
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

// The columns of a C tile are tokens: its elements 0 and 2 belong to one, 1 and 3 to the next.
__device__ __forceinline__ float2 token_pair(const float* token, TokenFactor factor, int tile, int lane) {
  return *reinterpret_cast<const float2*>(token + factor * kChunkRows + 8 * tile + 2 * (lane % 4));
}

// bD^T = beta (v^T - e X), rounded.
template <DType kType>
__device__ __forceinline__ void correct(const ValueTile& values, const float* token, int warp, int lane,
                                        const TokenSums& X, Fragments<kTokenSteps>& bD) {
#pragma unroll
  for (int m = 0; m < kTokenSteps; ++m) {
    uint32_t v[4];
    values.load_c_transposed(16 * m, warp, lane, v);
    float D[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * m + h;
      const float2 on_x = token_pair(token, kOnKeyRead, n, lane), beta = token_pair(token, kOnValue, n, lane);
      const float2 low = unpack<kType>(v[2 * h]), high = unpack<kType>(v[2 * h + 1]);
      D[h][0] = beta.x * fmaf(-on_x.x, X[n][0], low.x);
      D[h][1] = beta.y * fmaf(-on_x.y, X[n][1], low.y);
      D[h][2] = beta.x * fmaf(-on_x.x, X[n][2], high.x);
      D[h][3] = beta.y * fmaf(-on_x.y, X[n][3], high.y);
    }
    pack_a<kType>(D[0], D[1], bD[m]);
  }
}

// R^T = X and w R^T, rounded.
template <DType kType>
__device__ __forceinline__ void round_writes(const float* token, int lane, const TokenSums& X,
                                             Fragments<kTokenSteps>& R, Fragments<kTokenSteps>& wR) {
  round_sums<kType, kTokenSteps>(X, R);
#pragma unroll
  for (int m = 0; m < kTokenSteps; ++m) {
    float scaled[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) scale_tile(token_pair(token, kOnWrite, 2 * m + h, lane), X[2 * m + h], scaled[h]);
    pack_a<kType>(scaled[0], scaled[1], wR[m]);
  }
}

template <DType kType, int kGroups>
struct StateGroup {
  const StateColumns<kGroups>& own;
  typename Block<kGroups>::Shared& s;

  // One part. S and O of a chunk are handed to the next one rounded: ptxas lets no sums pass from one turn of the loop to
  // the next beside a product on its way.
  __device__ __forceinline__ void run(Turn& turn) const {
    const ChunkArgs& args = own.args;
    const Walk& walk = own.walk;
    const int warp = own.warp, lane = own.lane;
    StateSums S = {};
    own.load_first_state(S);
    Fragments<kKeySteps> rS;
    round_sums<kType, kKeySteps>(S, rS);
    Fragments<kTokenSteps> rO;
    for (int c = 0; c < walk.chunks; ++c, turn.next()) {
      if (args.state_width > 0) {
        own.save_rounded_state(c, rS);
      } else if (args.chunk_states.present()) {
        own.save_state(c, false, S);
      }
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
      if (c > 0) own.store_outputs(rO, c - 1);
      wgmma_fence(O);
#pragma unroll
      for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(O, rS[m], q.along_rows(0, m), m > 0);
      wgmma_commit();
      wgmma_wait<1>(X);
      Fragments<kTokenSteps> bD, R, wR;
      correct<kType>(ValueTile(stage.v[own.group]), token, warp, lane, X, bD);
      wgmma_fence(X, bD);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, bD[m], J.along_rows(0, m), m > 0);
      wgmma_commit();
      const float total = s.total[turn.stage][0];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) scale_tile({total, total}, S[n], S[n]);
      wgmma_wait<0>(X, O);
      round_writes<kType>(token, lane, X, R, wR);
      wgmma_fence(S, wR);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kWidth>(S, wR[m], k.along_columns(0, m));
      wgmma_commit();
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) scale_tile(token_pair(token, kOnQueryRead, n, lane), O[n], O[n]);
      wgmma_fence(O, R);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R[m], sP.along_rows(0, m));
      wgmma_commit();
      wgmma_wait<1>(S);
      round_sums<kType, kKeySteps>(S, rS);
      wgmma_wait<0>(O);
      round_sums<kType, kTokenSteps>(O, rO);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) s.free[turn.stage].arrive();
    }
    if (walk.chunks > 0) own.store_outputs(rO, walk.chunks - 1);
    own.save_state(walk.chunks, true, S);
  }
};

// A block per part; a smaller grid goes round.
template <DType kType, int kGroups>
__global__ void __launch_bounds__(Block<kGroups>::kThreads, 1)
    scan_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ ScanMaps maps, int64_t parts) {
  using Shape = Block<kGroups>;
  auto& s = aligned_shared<typename Shape::Shared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      s.filled[i].init(1);
      s.free[i].init(Shape::kStateWarps);
    }
    fence_barrier_init();
  }
  wait_for_previous_kernels();
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (warp >= Shape::kStateWarps) {
    if constexpr (kGroups == 2) give_registers<Shape::kOtherRegisters>();
    if (warp == Shape::kStateWarps && elect_one()) bring_operands<kGroups>(args, maps, parts, s);
  } else {
    if constexpr (kGroups == 2) take_registers<Shape::kStateRegisters>();
    const bool leader = threadIdx.x % kGroupThreads == 0;
    Turn turn;
    for_each_part(args, parts, Shape::kColumns, [&](const ScanPart& part, const Walk& walk) {
      const StateColumns<kGroups> own{args, maps.o, part, walk, s.o[warp / 4], warp / 4, warp % 4, lane, leader};
      StateGroup<kType, kGroups>{own, s}.run(turn);
    });
    if (leader) wait_stores_read<0>();
  }
}

template <DType kType, int kGroups>
void launch_scan(const ChunkArgs& args, const ScanMaps& maps, const Context& context) {
  using Shape = Block<kGroups>;
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t ranges = (p.head_dim_v + Shape::kColumns - 1) / Shape::kColumns;
  const int64_t parts = p.sequences.count * p.num_value_heads * ranges;
  launch<scan_kernel<kType, kGroups>>(
      "delta_rule chunk_sm90 scan", context,
      {static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)), Shape::kThreads, sizeof(typename Shape::Shared), true},
      args, maps, parts);
}

}  // namespace

template <DType kType>
void launch_scan(const ChunkArgs& args, const ScanMaps& maps, int columns, const Context& context) {
  columns == Block<1>::kColumns ? launch_scan<kType, 1>(args, maps, context)
                                : launch_scan<kType, 2>(args, maps, context);
}

}  // namespace fastweight::cuda::chunk_sm90
