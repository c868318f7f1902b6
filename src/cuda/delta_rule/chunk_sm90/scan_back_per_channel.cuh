// The scan from the last chunk of a sequence to the first on Hopper, for one decay per key channel: as scan_back.cuh, with the decays and norms inside three copies of the keys. See ../chunk_16bit/gradient.cuh for the
// equations. A warpgroup goes through a chunk with five groups of products:
//
//     X = G^T writer^T               with G in two parts: what its rounding took is an operand as well
//     X = X + d_o^T sP               while both run, G leaves, rounded
//     X = X - dR^T + dR^T J          dR^T = X, rounded; while it runs, G is scaled by e_n, a number per channel
//     G = G + d_o^T query
//     G = G - (beta Y)^T reader      while both run, Y^T = X and dv = beta Y leave, rounded
//
// A chunk has 80 KB of operands and leaves 64 KB, with K <= 64 half of it, and memory is what binds. The operands come in
// two rings, so that the
// copies of a later chunk begin in the midst of this one:
//
//     write    writer, sP, d_o                      until dR is made; d_o stays in registers
//     read     J, query, reader, beta, e_n          until the chunk's end
//
// With K <= 64 a block has 64 columns, and two are on a multiprocessor, as in scan.cuh. For that `read` has room for one
// chunk: a block waits for it between its first two products and the third, while the other one multiplies. So it has with K
// above 128, where two warpgroups have half of the channels of 64 columns each, as in scan_back.cuh.
//
// Rows beyond the tokens of a chunk are zeros in the copies of the keys and in d_o, and so they are in Y. Maps are made as in
// scan_back.cuh.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/gradient_columns.cuh"
#include "cuda/delta_rule/chunk_sm90/scan_back_per_channel.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// A block has warpgroups of the state, and one more: its first and last warps bring operands, and one between them for each
// warpgroup stores what it leaves.
template <int kK, int kRanges, bool kMaps = false>
struct ChannelBackBlock {
  static_assert(kK == 128 || kRanges == 1);
  static_assert(!kMaps || (kK == 128 && kRanges == 2));
  static constexpr int kWidth = kK, kParts = kK == 256 ? 2 : 1, kOwnChannels = kK / kParts;  // of a warpgroup
  static constexpr int kStateGroups = kRanges * kParts;
  static constexpr bool kMakesMaps = kMaps;
  static constexpr int kStateWarps = kStateGroups * kGroupWarps, kThreads = (kStateGroups + 1) * kGroupThreads;
  static constexpr int kColumns = kRanges * kGroupColumns;
  static constexpr int kBlocksOnOne = kK == 64 ? 2 : 1;  // multiprocessor
  static constexpr bool kTakesRegisters = kK == 64 || kStateGroups == 2;
  static constexpr int kStateRegisters = kK == 64 ? 184 : 216, kOtherRegisters = 72;
  static_assert(kStateGroups * kStateRegisters + kOtherRegisters <= (kStateGroups == 2 ? 3 * 168 : 512 / kBlocksOnOne));
  static constexpr int kDepth = 2, kReadDepth = kK == 128 ? kDepth : 1;

  struct Write {
    unsigned char writer[KeyTile<kK>::kBytes], sP[LowerTile::kBytes], d_o[kRanges][ValueTile::kBytes];
  };
  struct Read {
    unsigned char J[LowerTile::kBytes], query[KeyTile<kK>::kBytes], reader[KeyTile<kK>::kBytes];
  };
  // On the way out of a warpgroup: G, and Y and dv, which have its place where there is no other.
  struct Both {
    unsigned char G[StateTile<kOwnChannels>::kBytes], Y[WritesTile::kBytes], dv[ValueTile::kBytes];
  };
  union OneAfterTheOther {
    unsigned char G[StateTile<kOwnChannels>::kBytes];
    struct {
      unsigned char Y[WritesTile::kBytes], dv[ValueTile::kBytes];
    };
  };
  using Leaving = std::conditional_t<kParts == 1, Both, OneAfterTheOther>;
  static constexpr uint32_t kBetaBytes = kChunkRows * sizeof(float), kTotalBytes = kK * sizeof(float);

  struct alignas(1024) Shared {
    Write write[kDepth];
    Read read[kReadDepth];
    Leaving leaving[kStateGroups];
    float4 X[kParts == 2 ? kTokenTiles : 1][kParts == 2 ? kGroupThreads : 1];  // of a thread, between parts
    alignas(16) float beta[kReadDepth][kChunkRows];
    alignas(16) float total[kReadDepth][kK];
    ScanWork work[kStateGroups];  // of a warpgroup: here it takes no registers
    RingBarriers<kDepth> of_write;
    RingBarriers<kReadDepth> of_read;
    LeavingBarriers<kStateGroups> barriers_of_leaving;
  };
  static_assert(kBlocksOnOne * (sizeof(Shared) + 1024) <= 228 * 1024);

  // Where a block is in both rings, and how often a warpgroup's tiles have left.
  struct Turn {
    RingTurn<kDepth> ring;
    uint32_t parity = 0;  // of `leaving`

    __device__ __forceinline__ int read_at() const { return kReadDepth == 1 ? 0 : ring.at; }
    __device__ __forceinline__ uint32_t read_parity() const { return kReadDepth == 1 ? parity : ring.parity; }

    __device__ __forceinline__ void next() {
      ring.next();
      parity ^= 1;
    }
  };
};

// The warps that bring the operands, by one lane each: one for either ring.
template <class Shape>
struct ChannelBackBringer {
  using Turn = typename Shape::Turn;
  const ScanArgs& args;
  const ChannelScanBackMaps& maps;
  typename Shape::Shared& s;

  __device__ __forceinline__ void bring_write(int item, int copy, int column, const RowsPlace& values,
                                              const Turn& turn) const {
    const int at = turn.ring.at;
    TransactionBarrier& filled = s.of_write.filled[at];
    s.of_write.free[at].wait(turn.ring.parity ^ 1);
    filled.arrive_expecting(sizeof(typename Shape::Write));
    load_copy<Shape::kWidth>(s.write[at].writer, maps.keys, kWriter, copy, filled);
#pragma unroll
    for (int i = 0; i < Shape::kColumns / kGroupColumns; ++i) {
      load_panels(ValueTile(s.write[at].d_o[i]), maps.d_o, column + i * kGroupColumns, args.problem.head_dim_v, values,
                  filled);
    }
    load_lower(s.write[at].sP, maps.lower, kLowerP, item, filled);
  }

  __device__ __forceinline__ void bring_read(int item, int copy, const Turn& turn) const {
    const int at = turn.read_at();
    TransactionBarrier& filled = s.of_read.filled[at];
    s.of_read.free[at].wait(turn.read_parity() ^ 1);
    filled.arrive_expecting(sizeof(typename Shape::Read) + Shape::kBetaBytes + Shape::kTotalBytes);
    load_lower(s.read[at].J, maps.lower, kLowerJ, item, filled);
    load_bytes(shared_address(s.total[at]), args.factors.total + int64_t{copy} * Shape::kWidth, Shape::kTotalBytes,
               filled);
    load_bytes(shared_address(s.beta[at]), args.factors.token + int64_t{item} * kChunkRows, Shape::kBetaBytes, filled);
    load_copy<Shape::kWidth>(s.read[at].query, maps.keys, kQuery, copy, filled);
    load_copy<Shape::kWidth>(s.read[at].reader, maps.keys, kReader, copy, filled);
  }

  __device__ __forceinline__ void run(const PartRange& parts, bool writes) const {
    Turn turn;
    for_each_chunk_back<Shape>(args, parts, [&](const ScanPart& part, const Walk& walk, int c) {
      const int item = static_cast<int>(args.factors_at(walk.first_chunk + c) + part.head);
      const int copy = static_cast<int>(args.copies_at(walk.first_chunk + c) + part.head);
      if (writes) {
        bring_write(item, copy, part.column, rows_of(args, walk, c, part.head), turn);
      } else {
        bring_read(item, copy, turn);
      }
      turn.next();
    });
  }
};

template <DType kType, class Shape>
struct ChannelBackGroup {
  static constexpr int kK = Shape::kOwnChannels, kParts = Shape::kParts;
  using Turn = typename Shape::Turn;
  using Columns = GradientColumns<kK, Shape::kColumns / kGroupColumns, kParts>;
  const Columns& own;
  typename Shape::Shared& s;

  // The warpgroup's channels of a copy of the keys.
  __device__ __forceinline__ KeyTile<kK> own_keys(const unsigned char* memory) const {
    return KeyTile<kK>(memory + (kParts == 2 ? own.group * KeyTile<kK>::kBytes : 0));
  }

  // G^T of the chunk's end.
  __device__ __forceinline__ void leave_G(const Fragments<kKeySteps<kK>>& rG, uint32_t parity) const {
    if constexpr (Shape::kMakesMaps) return;
    auto& barriers = s.barriers_of_leaving;
    const bool after_Y = kParts == 2 && own.share().leaves_Y();
    (after_Y ? barriers.Y_left : barriers.G_left)[own.group].wait(parity ^ 1);
    own.write_G(s.leaving[own.group].G, rG);
    own.hand_over(barriers.G_ready[own.group]);
  }

  // Y^T = X and dv = beta Y.
  __device__ __forceinline__ void leave_Y(const float* beta, const TokenSums& X, uint32_t parity) const {
    if (Shape::kMakesMaps || !own.share().leaves_Y()) return;
    auto& leaving = s.leaving[own.group];
    auto& barriers = s.barriers_of_leaving;
    if constexpr (kParts == 2) {
      barriers.G_left[own.group].wait(parity);
    } else {
      barriers.Y_left[own.group].wait(parity ^ 1);
    }
    own.template write_Y<kType>(leaving.Y, leaving.dv, beta, X);
    own.hand_over(barriers.Y_ready[own.group]);
  }

  // What the rounding took of G, rounded.
  static __device__ __forceinline__ void round_rest(const StateSums<kK>& G, const Fragments<kKeySteps<kK>>& rG,
                                                    Fragments<kKeySteps<kK>>& low) {
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* x = &G[2 * m + w / 2][w % 2 * 2];
        const float2 high = unpack<kType>(rG[m][w]);
        low[m][w] = pack<kType>(x[0] - high.x, x[1] - high.y);
      }
    }
  }

  // (-beta Y)^T, rounded.
  static __device__ __forceinline__ void scale_Y(const float* beta, const TokenSums& X, int lane,
                                                 Fragments<kTokenSteps>& bY) {
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      float scaled[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 factor = column_pair(beta, 2 * m + h, lane);
        scale_tile({-factor.x, -factor.y}, X[2 * m + h], scaled[h]);
      }
      pack_a<kType>(scaled[0], scaled[1], bY[m]);
    }
  }

  __device__ __forceinline__ void run(Turn& turn) const {
    const int lane = own.lane;
    StateSums<kK> G = {};
    if constexpr (Shape::kMakesMaps) {
      own.begin_map(G);
    } else {
      own.load_last_gradient(G);
    }
    Fragments<kKeySteps<kK>> rG;
    round_sums<kType, kKeySteps<kK>>(G, rG);
    for (int c = own.walk.chunks - 1; c >= 0; --c, turn.next()) {
      const int first = turn.ring.at, at = turn.read_at();
      const KeyTile<kK> writer = own_keys(s.write[first].writer);
      const KeyTile<kK> query = own_keys(s.read[at].query), reader = own_keys(s.read[at].reader);
      const LowerTile sP(s.write[first].sP), J(s.read[at].J);
      const ValueTile d_o_rows(s.write[first].d_o[own.share().range()]);
      TokenSums X;
      Fragments<kKeySteps<kK>> low;
      round_rest(G, rG, low);  // here, because ptxas waits for all products before it lets G be read (C7517)
      s.of_write.filled[first].wait(turn.ring.parity);
      wgmma_fence(X, rG, low);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(X, rG[m], writer.along_rows(0, m), m > 0);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) wgmma<kType, kChunkRows>(X, low[m], writer.along_rows(0, m));
      wgmma_commit();
      Fragments<kTokenSteps> d_o, dR, bY;
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) d_o_rows.load_c_transposed(16 * m, own.warp, lane, d_o[m]);
      if constexpr (kParts == 1) {
        wgmma_fence(d_o);
      } else {
        leave_G(rG, turn.parity);
        wgmma_wait<0>(X);
        exchange_sums(own, s.X, X);
        wgmma_fence(X, d_o);
      }
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, d_o[m], sP.along_columns(0, m));
      wgmma_commit();
      if constexpr (kParts == 1) leave_G(rG, turn.parity);
      wgmma_wait<0>(X);
      release(s.of_write.free[first], lane);
      round_sums<kType, kTokenSteps>(X, dR);
      subtract_rounded<kType, kTokenSteps>(dR, X);
      s.of_read.filled[at].wait(turn.read_parity());
      wgmma_fence(X, dR);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, dR[m], J.along_columns(0, m));
      wgmma_commit();
#pragma unroll
      for (int n = 0; n < kKeyTiles<kK>; ++n) {
        scale_tile(column_pair(s.total[at] + own.share().channel(), n, lane), G[n], G[n]);
      }
      wgmma_fence(G);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kK>(G, d_o[m], query.along_columns(0, m));
      wgmma_commit();
      wgmma_wait<1>(X);
      scale_Y(s.beta[at], X, lane, bY);
      wgmma_fence(bY);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kK>(G, bY[m], reader.along_columns(0, m));
      wgmma_commit();
      leave_Y(s.beta[at], X, turn.parity);
      wgmma_wait<0>(G);
      round_sums<kType, kKeySteps<kK>>(G, rG);
      release(s.of_read.free[at], lane);
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
    channel_scan_back_kernel(const __grid_constant__ GradientArgs args,
                             const __grid_constant__ ChannelScanBackMaps maps, PartRange parts) {
  auto& s = aligned_shared<typename Shape::Shared>();
  if (threadIdx.x == 0) {
    s.of_write.init(Shape::kStateWarps);
    s.of_read.init(Shape::kStateWarps);
    s.barriers_of_leaving.init();
    fence_barrier_init();
  }
  if (!args.waits_late) wait_for_previous_kernels();
  // The maps of segments beside the tails, or the gradients.
  if (args.chunk.segments.chunks > 0 || args.progress.present()) let_next_kernel_start();
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (warp >= Shape::kStateWarps) {
    if constexpr (Shape::kTakesRegisters) give_registers<Shape::kOtherRegisters>();
    const int role = warp - Shape::kStateWarps;
    if (role % 3 == 0 && elect_one()) ChannelBackBringer<Shape>{args.chunk, maps, s}.run(parts, role == 0);
    if constexpr (!Shape::kMakesMaps) {
      if (role >= 1 && role <= Shape::kStateGroups && elect_one()) {
        BackStorer<Shape, ChannelScanBackMaps>{args, maps, s, role - 1}.run(parts);
      }
    }
  } else {
    if constexpr (Shape::kTakesRegisters) take_registers<Shape::kStateRegisters>();
    typename Shape::Turn turn;
    const int group = warp / 4;
    for_each_part_back<Shape>(args.chunk, parts, group, s.work[group], [&] {
      const auto& [part, walk, is_tail] = s.work[group];
      using Group = ChannelBackGroup<kType, Shape>;
      const typename Group::Columns own{args, part, walk, is_tail, group, warp % 4, lane};
      Group{own, s}.run(turn);
    });
  }
  if (!args.waits_late) return;
  __syncthreads();  // a warp that waits for the kernel before keeps its other lanes from working
  wait_for_previous_kernels();
}

template <DType kType, class Shape>
void launch_channel_scan_back_of(const GradientArgs& args, const ChannelScanBackMaps& maps, const PartRange& parts,
                                 int64_t most, const Context& context) {
  const auto blocks = static_cast<unsigned>(std::min(parts.end - parts.begin, most));
  launch<channel_scan_back_kernel<kType, Shape>>("delta_rule chunk_sm90 scan back per channel", context,
                                                 {blocks, Shape::kThreads, sizeof(typename Shape::Shared), true}, args,
                                                 maps, parts);
}

}  // namespace

template <DType kType>
void launch_channel_scan_back(const GradientArgs& args, const ChannelScanBackMaps& maps, int columns,
                              const Context& context) {
  const auto of = [&]<class Shape>(const GradientArgs& some, const PartRange& parts, int64_t most = kMostBlocks) {
    launch_channel_scan_back_of<kType, Shape>(some, maps, parts, most, context);
  };
  const auto over = [&](const GradientArgs& some, const PartRange& parts) {
    const int K = padded_k(args.chunk.problem.head_dim_k);
    if (K != 128) {
      K == 64 ? of.template operator()<ChannelBackBlock<64, 1>>(some, parts)
              : of.template operator()<ChannelBackBlock<256, 1>>(some, parts);
    } else {
      columns == kGroupColumns ? of.template operator()<ChannelBackBlock<128, 1>>(some, parts)
                               : of.template operator()<ChannelBackBlock<128, 2>>(some, parts);
    }
  };
  const auto make_maps = [&](const GradientArgs& some, const PartRange& parts, int64_t most) {
    of.template operator()<ChannelBackBlock<128, 2, true>>(some, parts, most);
  };
  scan_back_in_parts(args, columns, over, make_maps, context);
}

}  // namespace fastweight::cuda::chunk_sm90
