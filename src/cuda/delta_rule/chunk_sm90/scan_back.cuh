// The scan from the last chunk of a sequence to the first on Hopper, for one decay per head or none and K, V <= 128. See
// ../chunk_16bit/gradient.cuh for the equations. What it reads and writes is what the scan back of chunk_16bit does.
//
// The mirror of scan.cuh: G^T [columns x K] stays in the registers of two warpgroups, or one, 64 columns each. One more warp
// brings the operands by TMA, and one for each warpgroup stores what it leaves. A warpgroup goes through a chunk with five groups of products:
//
//     X = G^T k^T                              while it runs, G leaves, rounded
//     D = d_o^T sP
//     X = dR^T J                               dR^T = w X + D, rounded; while it runs, G is scaled by e_n
//     G = G + (scale e d_o)^T q                while it runs, Y^T = X and dv = beta Y leave, rounded
//     G = G - (beta e Y)^T k
//
// Only the first, third and fifth wait for each other. Rows beyond the tokens of a chunk are zeros in k, q and d_o, and
// so they are in Y; the blocks of J and sP above their diagonals are zeros too.
//
// A column's sums do not depend on other columns: how many of them a block has changes no bit.
#pragma once

#include "cuda/delta_rule/chunk_sm90/scan.cuh"
#include "cuda/delta_rule/chunk_sm90/scan_back.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::GradientArgs;

constexpr int kBackStages = 3, kPairStages = 2;  // chunks in shared memory: of all operands but sP, and of sP

using StateTile = PanelTile<kGroupColumns, kWidth>;       // a warpgroup's rows of G
using WritesTile = PanelTile<kGroupColumns, kChunkRows>;  // and of Y
static_assert(StateTile::kBytes == WritesTile::kBytes + ValueTile::kBytes);

template <int kGroups>
struct BackBlock {
  // Of two warpgroups of the state and the third: see Block.
  static constexpr int kStateRegisters = 216, kOtherRegisters = 72;
  static_assert(2 * kStateRegisters + kOtherRegisters <= 3 * 168);

  struct alignas(1024) Stage {
    unsigned char k[KeyTile::kBytes], q[KeyTile::kBytes], d_o[kGroups][ValueTile::kBytes], J[LowerTile::kBytes];
    float token[kTokenFactors * kChunkRows];
  };
  static constexpr uint32_t kStageBytes =
      2 * KeyTile::kBytes + kGroups * ValueTile::kBytes + LowerTile::kBytes + sizeof(Stage::token) + kTotalBytes;

  // On the way out of a warpgroup: G, and then Y and dv.
  union alignas(1024) Leaving {
    unsigned char G[StateTile::kBytes];
    struct {
      unsigned char Y[WritesTile::kBytes], dv[ValueTile::kBytes];
    };
  };

  // `filled`: the operands of a chunk are there. `free`: all warps of the state need them no more. sP is free first.
  struct alignas(1024) Shared {
    Stage stage[kBackStages];
    unsigned char sP[kPairStages][LowerTile::kBytes];
    Leaving leaving[kGroups];
    float total[kBackStages][4];
    chunk_16bit::BlockWork work[kGroups];  // of a warpgroup: here it takes no registers
    TransactionBarrier filled[kBackStages], free[kBackStages];
    TransactionBarrier sP_filled[kPairStages], sP_free[kPairStages];
    // Of a warpgroup and the warp that stores for it: G, or Y and dv, are in `leaving`; they have been read from there.
    TransactionBarrier G_ready[kGroups], G_left[kGroups], Y_ready[kGroups], Y_left[kGroups];
  };
};

// Where a block is in its rings: turns go on from part to part.
template <int kStagesOfRing>
struct RingTurn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage < kStagesOfRing) return;
    stage = 0;
    parity ^= 1;
  }
};
struct BackTurn {
  RingTurn<kBackStages> all;
  RingTurn<kPairStages> sP;
  uint32_t parity = 0;  // of `leaving`

  __device__ __forceinline__ void next() {
    all.next();
    sP.next();
    parity ^= 1;
  }
};

template <int kGroups>
__device__ __forceinline__ void bring_back_operands(const ChunkArgs& args, const ScanBackMaps& maps, int64_t parts,
                                                    typename BackBlock<kGroups>::Shared& s) {
  BackTurn turn;
  for_each_part(args, parts, Block<kGroups>::kColumns, [&](const ScanPart& part, const Walk& walk) {
    for (int c = walk.chunks - 1; c >= 0; --c, turn.next()) {
      const int64_t item = args.factors_at(walk.first_chunk + c) + part.head;
      const RowsPlace keys = rows_of(args, walk, c, part.key_head), values = rows_of(args, walk, c, part.head);
      auto& stage = s.stage[turn.all.stage];
      TransactionBarrier& filled = s.filled[turn.all.stage];
      s.free[turn.all.stage].wait(turn.all.parity ^ 1);
      filled.arrive_expecting(BackBlock<kGroups>::kStageBytes);
      load_panels(KeyTile(stage.k), maps.k, 0, keys, filled);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        load_panels(ValueTile(stage.d_o[i]), maps.d_o, part.column + i * kGroupColumns, values, filled);
      }
      load_bytes(shared_address(stage.token), args.factors.token + item * kTokenFactors * kChunkRows,
                 sizeof(stage.token), filled);
      load_bytes(shared_address(s.total[turn.all.stage]), args.factors.total + item * 4, kTotalBytes, filled);
      load_lower(stage.J, maps.J, static_cast<int>(item), filled);
      load_panels(KeyTile(stage.q), maps.q, 0, keys, filled);
      s.sP_free[turn.sP.stage].wait(turn.sP.parity ^ 1);
      s.sP_filled[turn.sP.stage].arrive_expecting(LowerTile::kBytes);
      load_lower(s.sP[turn.sP.stage], maps.sP, static_cast<int>(item), s.sP_filled[turn.sP.stage]);
    }
  });
}

// The warps that store, by one lane each: for a warpgroup, which goes on meanwhile.
template <int kGroups>
struct BackStorer {
  const GradientArgs& args;
  const ScanBackMaps& maps;
  typename BackBlock<kGroups>::Shared& s;
  int group;

  __device__ __forceinline__ void run(int64_t parts) const {
    const StateTile G(s.leaving[group].G);
    const WritesTile Y(s.leaving[group].Y);
    const ValueTile dv(s.leaving[group].dv);
    uint32_t parity = 0;
    for_each_part(args.chunk, parts, Block<kGroups>::kColumns, [&](const ScanPart& part, const Walk& walk) {
      const int column = part.column + group * kGroupColumns;
      for (int c = walk.chunks - 1; c >= 0; --c, parity ^= 1) {
        const int64_t chunk = walk.first_chunk + c;
        const int slot =
            static_cast<int>(args.chunk.window.slot_of(chunk)) * args.chunk.problem.num_value_heads + part.head;
        s.G_ready[group].wait(parity);
#pragma unroll
        for (int p = 0; p < StateTile::kPanels; ++p) {
          store_box(maps.G, {p * StateTile::kPanelColumns, column, slot}, G.panel(p));
        }
        commit_stores();
        wait_stores_read<0>();
        s.G_left[group].arrive();
        s.Y_ready[group].wait(parity);
        store_box(maps.Y, {0, column, slot}, Y.panel(0));
        if (args.dv.present()) {
          const RowsPlace at = rows_of(args.chunk, walk, c, part.head);
          store_box(maps.dv, {column, at.head, at.missing, at.end, at.batch}, dv.panel(0));
        }
        commit_stores();
        wait_stores_read<0>();
        s.Y_left[group].arrive();
      }
    });
  }
};

// A pair of 16-bit numbers of two tokens times their factors.
template <DType kType>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float2 factor) {
  const float2 x = unpack<kType>(pair);
  return pack<kType>(factor.x * x.x, factor.y * x.y);
}

template <DType kType, int kGroups>
struct BackGroup {
  const GradientArgs& args;
  typename BackBlock<kGroups>::Shared& s;
  const ScanPart& part;
  const Walk& walk;
  int group, warp, lane;  // the warp within the warpgroup

  __device__ __forceinline__ int first_column() const { return part.column + group * kGroupColumns; }
  __device__ __forceinline__ int column() const { return first_column() + 16 * warp; }

  // The thread's share of what the windows hand each other.
  static constexpr int kStateThreads = kGroups * kGroupThreads;
  template <class Float>
  __device__ __forceinline__ Float* carried(Float* states) const {
    constexpr int kColumns = Block<kGroups>::kColumns;
    return chunk_16bit::carried_at(args.chunk, states, part, walk, kColumns, kColumns * kWidth,
                                   static_cast<int>(threadIdx.x));
  }

  __device__ __forceinline__ void load_last_gradient(StateSums& G) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (!walk.closes) {
      chunk_16bit::take_tiles<kStateThreads>(carried(args.chunk.carried.taken), G);
    } else if (args.d_final_state.present()) {
      load_state<kWidth>(args.d_final_state, state_offset(args.d_final_state, part), column(), p.head_dim_k,
                         p.head_dim_v, lane, G);
    }
  }

  __device__ __forceinline__ void store_first_gradient(StateSums& G) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (!walk.opens) {
      chunk_16bit::give_tiles<kStateThreads>(carried(args.chunk.carried.given), G);
    } else if (args.d_initial_state.present()) {
      store_state<kWidth>(args.d_initial_state, state_offset(args.d_initial_state, part), column(), p.head_dim_k,
                          p.head_dim_v, lane, G);
    }
  }

  // What the threads of the warp wrote can be stored.
  __device__ __forceinline__ void hand_over(TransactionBarrier& ready) const {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) ready.arrive();
  }

  // G^T of the chunk's end.
  __device__ __forceinline__ void leave_G(const Fragments<kKeySteps>& rG, uint32_t parity) const {
    const StateTile tile(s.leaving[group].G);
    s.Y_left[group].wait(parity ^ 1);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) tile.store_a(16 * warp, m, lane, rG[m]);
    hand_over(s.G_ready[group]);
  }

  // Y^T = X and dv = beta Y.
  __device__ __forceinline__ void leave_Y(const float* token, const TokenSums& X, uint32_t parity) const {
    const WritesTile Y(s.leaving[group].Y);
    const ValueTile dv(s.leaving[group].dv);
    s.G_left[group].wait(parity);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      uint32_t a[4];
      pack_a<kType>(X[2 * m], X[2 * m + 1], a);
      Y.store_a(16 * warp, m, lane, a);
      float scaled[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) scale_tile(token_pair(token, kOnValue, 2 * m + h, lane), X[2 * m + h], scaled[h]);
      pack_a<kType>(scaled[0], scaled[1], a);
      dv.store_c_transposed(16 * m, warp, lane, a);
    }
    hand_over(s.Y_ready[group]);
  }

  __device__ __forceinline__ void run(BackTurn& turn) const {
    StateSums G = {};
    load_last_gradient(G);
    Fragments<kKeySteps> rG;
    round_sums<kType, kKeySteps>(G, rG);
    for (int c = walk.chunks - 1; c >= 0; --c, turn.next()) {
      auto& stage = s.stage[turn.all.stage];
      const float* token = stage.token;
      const KeyTile k(stage.k), q(stage.q);
      const LowerTile J(stage.J), sP(s.sP[turn.sP.stage]);
      TokenSums X, D;
      s.filled[turn.all.stage].wait(turn.all.parity);
      wgmma_fence(X, rG);
#pragma unroll
      for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(X, rG[m], k.along_rows(0, m), m > 0);
      wgmma_commit();
      Fragments<kTokenSteps> d_o, dR, bY;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        ValueTile(stage.d_o[group]).load_c_transposed(16 * m, warp, lane, d_o[m]);
      }
      s.sP_filled[turn.sP.stage].wait(turn.sP.parity);
      wgmma_fence(D, d_o);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(D, d_o[m], sP.along_columns(0, m), m > 0);
      wgmma_commit();
      leave_G(rG, turn.parity);
      wgmma_wait<0>(X, D);
      if (lane == 0) s.sP_free[turn.sP.stage].arrive();
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const float2 w = token_pair(token, kOnWrite, n, lane);
#pragma unroll
        for (int e = 0; e < 4; ++e) X[n][e] = fmaf(e % 2 == 0 ? w.x : w.y, X[n][e], D[n][e]);
      }
      round_sums<kType, kTokenSteps>(X, dR);
      wgmma_fence(X, dR);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, dR[m], J.along_columns(0, m), m > 0);
      wgmma_commit();
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          d_o[m][e] = scaled_pair<kType>(d_o[m][e], token_pair(token, kOnQueryRead, 2 * m + e / 2, lane));
        }
      }
      const float total = s.total[turn.all.stage][0];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) scale_tile({total, total}, G[n], G[n]);
      wgmma_fence(G, d_o);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kWidth>(G, d_o[m], q.along_columns(0, m));
      wgmma_commit();
      wgmma_wait<1>(X);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        float scaled[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = 2 * m + h;
          const float2 beta = token_pair(token, kOnValue, n, lane), e = token_pair(token, kOnKeyRead, n, lane);
          scale_tile({-beta.x * e.x, -beta.y * e.y}, X[n], scaled[h]);
        }
        pack_a<kType>(scaled[0], scaled[1], bY[m]);
      }
      wgmma_fence(bY);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kWidth>(G, bY[m], k.along_columns(0, m));
      wgmma_commit();
      leave_Y(token, X, turn.parity);
      wgmma_wait<0>(G);
      round_sums<kType, kKeySteps>(G, rG);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) s.free[turn.all.stage].arrive();
    }
    store_first_gradient(G);
  }
};

// A block per part; a smaller grid goes round.
template <DType kType, int kGroups>
__global__ void __launch_bounds__(Block<kGroups>::kThreads, 1)
    scan_back_kernel(const __grid_constant__ GradientArgs args, const __grid_constant__ ScanBackMaps maps,
                     int64_t parts) {
  using Shape = Block<kGroups>;
  auto& s = aligned_shared<typename BackBlock<kGroups>::Shared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kBackStages; ++i) {
      s.filled[i].init(1);
      s.free[i].init(Shape::kStateWarps);
    }
    for (int i = 0; i < kPairStages; ++i) {
      s.sP_filled[i].init(1);
      s.sP_free[i].init(Shape::kStateWarps);
    }
    for (int i = 0; i < kGroups; ++i) {
      s.G_ready[i].init(Shape::kStateWarps / kGroups);
      s.G_left[i].init(1);
      s.Y_ready[i].init(Shape::kStateWarps / kGroups);
      s.Y_left[i].init(1);
    }
    fence_barrier_init();
  }
  wait_for_previous_kernels();
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (warp >= Shape::kStateWarps) {
    if constexpr (kGroups == 2) give_registers<BackBlock<kGroups>::kOtherRegisters>();
    const int role = warp - Shape::kStateWarps;
    if (role == 0 && elect_one()) bring_back_operands<kGroups>(args.chunk, maps, parts, s);
    if (role >= 1 && role <= kGroups && elect_one()) BackStorer<kGroups>{args, maps, s, role - 1}.run(parts);
  } else {
    if constexpr (kGroups == 2) take_registers<BackBlock<kGroups>::kStateRegisters>();
    BackTurn turn;
    const int group = warp / 4;
    chunk_16bit::BlockWork& work = s.work[group];
    for (int64_t at = blockIdx.x; at < parts; at += gridDim.x) {
      group_barrier(group);
      if (threadIdx.x % kGroupThreads == 0) {
        work.part = scan_part_at(args.chunk.problem, args.chunk.chunked, at, Shape::kColumns);
        work.walk = chunk_16bit::walk_of(args.chunk, work.part);
      }
      group_barrier(group);
      if (!work.walk.exists) continue;
      BackGroup<kType, kGroups>{args, s, work.part, work.walk, group, warp % 4, lane}.run(turn);
    }
  }
}

template <DType kType, int kGroups>
void launch_scan_back(const GradientArgs& args, const ScanBackMaps& maps, const Context& context) {
  using Shape = Block<kGroups>;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const int64_t ranges = (p.head_dim_v + Shape::kColumns - 1) / Shape::kColumns;
  const int64_t parts = p.sequences.count * p.num_value_heads * ranges;
  launch<scan_back_kernel<kType, kGroups>>("delta_rule chunk_sm90 scan back", context,
                                           {static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)), Shape::kThreads,
                                            sizeof(typename BackBlock<kGroups>::Shared), true},
                                           args, maps, parts);
}

}  // namespace

template <DType kType>
void launch_scan_back(const GradientArgs& args, const ScanBackMaps& maps, int columns, const Context& context) {
  columns == Block<1>::kColumns ? launch_scan_back<kType, 1>(args, maps, context)
                                : launch_scan_back<kType, 2>(args, maps, context);
}

}  // namespace fastweight::cuda::chunk_sm90
