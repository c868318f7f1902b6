// The scan from the last chunk of a sequence to the first on Hopper, for one decay per head or none, K <= 256 and any V. See
// ../chunk_16bit/gradient.cuh for the equations. What it reads and writes is what the scan back of chunk_16bit does.
//
// The mirror of scan.cuh: G^T [columns x K] stays in the registers of two warpgroups, or one, 64 columns each. Two more warps
// bring the operands by TMA, and one for each warpgroup stores what it leaves. A warpgroup goes through a chunk with five
// groups of products:
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
// With K above 128 two warpgroups have the same 64 columns and half of the channels each, as in scan.cuh. X = G^T k^T is the
// sum of both, which one makes and the other takes from it; all else but G both make, and one of them leaves Y and dv.
//
// A scan of maps (segment_plan.h) has blocks of 128 columns of e or of M, for which d_o is zeros, and leaves nothing.
//
// A column's sums do not depend on other columns: how many of them a block has changes no bit.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/gradient_columns.cuh"
#include "cuda/delta_rule/chunk_sm90/head_values.cuh"
#include "cuda/delta_rule/chunk_sm90/scan_back.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// With K <= 64 a block has 64 columns, and two are on a multiprocessor, as in scan.cuh.
template <int kK, int kRanges, bool kMaps = false>
struct BackBlock {
  static_assert(kK == 128 || kRanges == 1);
  static_assert(!kMaps || (kK == 128 && kRanges == 2));
  static constexpr int kWidth = kK, kParts = kK == 256 ? 2 : 1, kOwnChannels = kK / kParts;  // of a warpgroup
  static constexpr int kStateGroups = kRanges * kParts;
  static constexpr bool kMakesMaps = kMaps;
  // Chunks: of all operands but sP, and of sP.
  static constexpr int kBackStages = kK == 128 ? 3 : 2, kPairStages = kK == 256 ? 1 : 2;
  static constexpr int kStateWarps = kStateGroups * kGroupWarps, kThreads = (kStateGroups + 1) * kGroupThreads;
  static constexpr int kColumns = kRanges * kGroupColumns;
  static constexpr int kBlocksOnOne = kK == 64 ? 2 : 1;  // multiprocessor
  // All warpgroups share the registers evenly at first; for the last one fewer are enough. A warpgroup that has a
  // multiprocessor for itself and the last one needs no more.
  static constexpr bool kTakesRegisters = kK == 64 || kStateGroups == 2;
  static constexpr int kStateRegisters = kK == 64 ? 184 : 216, kOtherRegisters = 72;
  static_assert(kStateGroups * kStateRegisters + kOtherRegisters <= (kStateGroups == 2 ? 3 * 168 : 512 / kBlocksOnOne));

  struct alignas(1024) Stage {
    unsigned char k[KeyTile<kK>::kBytes], q[KeyTile<kK>::kBytes], d_o[kRanges][ValueTile::kBytes], J[LowerTile::kBytes];
    float token[kTokenFactors * kChunkRows];
  };
  static constexpr uint32_t kStageBytes =
      2 * KeyTile<kK>::kBytes + kRanges * ValueTile::kBytes + LowerTile::kBytes + sizeof(Stage::token) + kTotalBytes;

  // On the way out of a warpgroup: G, and then Y and dv.
  union alignas(1024) Leaving {
    unsigned char G[StateTile<kOwnChannels>::kBytes];
    struct {
      unsigned char Y[WritesTile::kBytes], dv[ValueTile::kBytes];
    };
  };

  // `filled`: the operands of a chunk are there. `free`: all warps of the state need them no more. sP is free first.
  struct alignas(1024) Shared {
    Stage stage[kBackStages];
    unsigned char sP[kPairStages][LowerTile::kBytes];
    Leaving leaving[kStateGroups];
    float4 X[kParts == 2 ? kTokenTiles : 1][kParts == 2 ? kGroupThreads : 1];  // of a thread, between parts
    float total[kBackStages][4];
    ScanWork work[kStateGroups];  // of a warpgroup: here it takes no registers
    TransactionBarrier filled[kBackStages], free[kBackStages];
    TransactionBarrier sP_filled[kPairStages], sP_free[kPairStages];
    LeavingBarriers<kStateGroups> barriers_of_leaving;
  };
  static_assert(kBlocksOnOne * (sizeof(Shared) + 1024) <= 228 * 1024);

  // Where a block is in its rings: turns go on from part to part.
  struct Turn {
    RingTurn<kBackStages> all;
    RingTurn<kPairStages> sP;
    uint32_t parity = 0;  // of `leaving`

    __device__ __forceinline__ void next() {
      all.next();
      sP.next();
      parity ^= 1;
    }
  };
};

// The warps that bring the operands, by one lane each: one the rows of tokens, which announces all operands of a stage, the
// other what belongs to pairs of a chunk and a head.
template <class Shape>
struct BackBringer {
  using Keys = KeyTile<Shape::kWidth>;
  const ScanArgs& args;
  const ScanBackMaps& maps;
  typename Shape::Shared& s;

  __device__ __forceinline__ void bring_rows(const ScanPart& part, const Walk& walk, int c, int at) const {
    const RowsPlace keys = rows_of(args, walk, c, part.key_head), values = rows_of(args, walk, c, part.head);
    auto& stage = s.stage[at];
    TransactionBarrier& filled = s.filled[at];
    filled.arrive_expecting(Shape::kStageBytes);
    load_panels(Keys(stage.k), maps.k, 0, args.problem.head_dim_k, keys, filled);
#pragma unroll
    for (int i = 0; i < Shape::kColumns / kGroupColumns; ++i) {
      load_panels(ValueTile(stage.d_o[i]), maps.d_o, part.column + i * kGroupColumns, args.problem.head_dim_v, values,
                  filled);
    }
    load_panels(Keys(stage.q), maps.q, 0, args.problem.head_dim_k, keys, filled);
  }

  __device__ __forceinline__ void bring_factors(int64_t item, int at, const RingTurn<Shape::kPairStages>& sP) const {
    auto& stage = s.stage[at];
    TransactionBarrier& filled = s.filled[at];
    load_bytes(shared_address(stage.token), args.factors.token + item * kTokenFactors * kChunkRows, sizeof(stage.token),
               filled);
    load_bytes(shared_address(s.total[at]), args.factors.total + item * 4, kTotalBytes, filled);
    load_lower(stage.J, maps.lower, kLowerJ, static_cast<int>(item), filled);
    s.sP_free[sP.at].wait(sP.parity ^ 1);
    s.sP_filled[sP.at].arrive_expecting(LowerTile::kBytes);
    load_lower(s.sP[sP.at], maps.lower, kLowerP, static_cast<int>(item), s.sP_filled[sP.at]);
  }

  __device__ __forceinline__ void run(const PartRange& parts, bool rows) const {
    typename Shape::Turn turn;
    for_each_chunk_back<Shape>(args, parts, [&](const ScanPart& part, const Walk& walk, int c) {
      const int at = turn.all.at;
      s.free[at].wait(turn.all.parity ^ 1);
      if (rows) {
        bring_rows(part, walk, c, at);
      } else {
        bring_factors(args.factors_at(walk.first_chunk + c) + part.head, at, turn.sP);
      }
      turn.next();
    });
  }
};

// A pair of 16-bit numbers of two tokens times their factors.
template <DType kType>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float2 factor) {
  const float2 x = unpack<kType>(pair);
  return pack<kType>(factor.x * x.x, factor.y * x.y);
}

template <DType kType, class Shape>
struct BackGroup {
  static constexpr int kK = Shape::kOwnChannels, kParts = Shape::kParts;
  GradientColumns<kK, Shape::kColumns / kGroupColumns, kParts> own;
  typename Shape::Shared& s;

  // The warpgroup's channels of k or q.
  __device__ __forceinline__ KeyTile<kK> own_keys(const unsigned char* memory) const {
    return KeyTile<kK>(memory + (kParts == 2 ? own.group * KeyTile<kK>::kBytes : 0));
  }

  // G^T of the chunk's end.
  __device__ __forceinline__ void leave_G(const Fragments<kKeySteps<kK>>& rG, uint32_t parity) const {
    if constexpr (Shape::kMakesMaps) return;
    auto& barriers = s.barriers_of_leaving;
    (own.share().leaves_Y() ? barriers.Y_left : barriers.G_left)[own.group].wait(parity ^ 1);
    own.write_G(s.leaving[own.group].G, rG);
    own.hand_over(s.barriers_of_leaving.G_ready[own.group]);
  }

  // Y^T = X and dv = beta Y.
  __device__ __forceinline__ void leave_Y(const float* token, const TokenSums& X, uint32_t parity) const {
    if (Shape::kMakesMaps || !own.share().leaves_Y()) return;
    auto& leaving = s.leaving[own.group];
    s.barriers_of_leaving.G_left[own.group].wait(parity);
    own.template write_Y<kType>(leaving.Y, leaving.dv, token + kOnValue * kChunkRows, X);
    own.hand_over(s.barriers_of_leaving.Y_ready[own.group]);
  }

  __device__ __forceinline__ void run(typename Shape::Turn& turn) const {
    const Walk& walk = own.walk;
    const int warp = own.warp, lane = own.lane;
    StateSums<kK> G = {};
    if constexpr (Shape::kMakesMaps) {
      own.begin_map(G);
    } else {
      own.load_last_gradient(G);
    }
    Fragments<kKeySteps<kK>> rG;
    round_sums<kType, kKeySteps<kK>>(G, rG);
    for (int c = walk.chunks - 1; c >= 0; --c, turn.next()) {
      auto& stage = s.stage[turn.all.at];
      const float* token = stage.token;
      const KeyTile<kK> k = own_keys(stage.k), q = own_keys(stage.q);
      const LowerTile J(stage.J), sP(s.sP[turn.sP.at]);
      TokenSums X, D;
      s.filled[turn.all.at].wait(turn.all.parity);
      wgmma_fence(X, rG);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(X, rG[m], k.along_rows(0, m), m > 0);
      wgmma_commit();
      Fragments<kTokenSteps> d_o, dR, bY;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) {
        ValueTile(stage.d_o[own.share().range()]).load_c_transposed(16 * m, warp, lane, d_o[m]);
      }
      s.sP_filled[turn.sP.at].wait(turn.sP.parity);
      wgmma_fence(D, d_o);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(D, d_o[m], sP.along_columns(0, m), m > 0);
      wgmma_commit();
      leave_G(rG, turn.parity);
      wgmma_wait<0>(X, D);
      if (lane == 0) s.sP_free[turn.sP.at].arrive();
      if constexpr (kParts == 2) exchange_sums(own, s.X, X);
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
      const float total = s.total[turn.all.at][0];
#pragma unroll
      for (int n = 0; n < kKeyTiles<kK>; ++n) scale_tile({total, total}, G[n], G[n]);
      wgmma_fence(G, d_o);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kK>(G, d_o[m], q.along_columns(0, m));
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
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kK>(G, bY[m], k.along_columns(0, m));
      wgmma_commit();
      leave_Y(token, X, turn.parity);
      wgmma_wait<0>(G);
      round_sums<kType, kKeySteps<kK>>(G, rG);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) s.free[turn.all.at].arrive();
    }
    if constexpr (Shape::kMakesMaps) {
      own.end_map(G);
    } else {
      own.store_first_gradient(G);
    }
  }
};

// A block per part; a smaller grid goes round.
template <DType kType, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksOnOne)
    scan_back_kernel(const __grid_constant__ GradientArgs args, const __grid_constant__ ScanBackMaps maps,
                     PartRange parts) {
  auto& s = aligned_shared<typename Shape::Shared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kBackStages; ++i) {
      s.filled[i].init(1);
      s.free[i].init(Shape::kStateWarps);
    }
    for (int i = 0; i < Shape::kPairStages; ++i) {
      s.sP_filled[i].init(1);
      s.sP_free[i].init(Shape::kStateWarps);
    }
    s.barriers_of_leaving.init();
    fence_barrier_init();
  }
  if (!args.waits_late) wait_for_previous_kernels();
  let_next_kernel_start();
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (warp >= Shape::kStateWarps) {
    if constexpr (Shape::kTakesRegisters) give_registers<Shape::kOtherRegisters>();
    const int role = warp - Shape::kStateWarps;
    if (role % 3 == 0 && elect_one()) BackBringer<Shape>{args.chunk, maps, s}.run(parts, role == 0);
    if constexpr (!Shape::kMakesMaps) {
      if (role >= 1 && role <= Shape::kStateGroups && elect_one()) {
        BackStorer<Shape, ScanBackMaps>{args, maps, s, role - 1}.run(parts);
      }
    }
  } else {
    if constexpr (Shape::kTakesRegisters) take_registers<Shape::kStateRegisters>();
    typename Shape::Turn turn;
    const int group = warp / 4;
    for_each_part_back<Shape>(args.chunk, parts, group, s.work[group], [&] {
      const auto& [part, walk, is_tail] = s.work[group];
      BackGroup<kType, Shape>{{args, part, walk, is_tail, group, warp % 4, lane}, s}.run(turn);
    });
  }
  if (!args.waits_late) return;
  __syncthreads();  // a warp that waits for the kernel before keeps its other lanes from working
  wait_for_previous_kernels();
}

template <DType kType, class Shape>
void launch_scan_back_of(const GradientArgs& args, const ScanBackMaps& maps, const PartRange& parts, int64_t most,
                         const Context& context) {
  const auto blocks = static_cast<unsigned>(std::min(parts.end - parts.begin, most));
  launch<scan_back_kernel<kType, Shape>>("delta_rule chunk_sm90 scan back", context,
                                         {blocks, Shape::kThreads, sizeof(typename Shape::Shared), true}, args, maps,
                                         parts);
}

}  // namespace

template <DType kType>
void launch_scan_back(const GradientArgs& args, const ScanBackMaps& maps, int columns, const Context& context) {
  const auto of = [&]<class Shape>(const GradientArgs& some, const PartRange& parts, int64_t most = kMostBlocks) {
    launch_scan_back_of<kType, Shape>(some, maps, parts, most, context);
  };
  const auto over = [&](const GradientArgs& some, const PartRange& parts) {
    const int K = padded_k(args.chunk.problem.head_dim_k);
    if (K != 128) {
      K == 64 ? of.template operator()<BackBlock<64, 1>>(some, parts)
              : of.template operator()<BackBlock<256, 1>>(some, parts);
    } else {
      columns == kGroupColumns ? of.template operator()<BackBlock<128, 1>>(some, parts)
                               : of.template operator()<BackBlock<128, 2>>(some, parts);
    }
  };
  const auto make_maps = [&](const GradientArgs& some, const PartRange& parts, int64_t most) {
    of.template operator()<BackBlock<128, 2, true>>(some, parts, most);
  };
  scan_back_in_parts(args, columns, over, make_maps, context);
}

}  // namespace fastweight::cuda::chunk_sm90
