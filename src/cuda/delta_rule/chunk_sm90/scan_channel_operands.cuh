// The operands of the scan with a decay per key channel (scan_per_channel.cuh): what a block has in shared memory, and the warps
// that bring it and store what leaves.
#pragma once

#include "cuda/delta_rule/chunk_sm90/scan_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/state_columns.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// What a scan leaves behind: maps of segments, or outputs, with states before chunks in shared memory or without.
enum class ChannelMakes { kMaps, kOutputs, kOutputsAndStates };

// A block has kGroups ranges of columns, each of one warpgroup or of two halves, and a warpgroup that serves them.
template <int kK, int kGroups, ChannelMakes kMakes>
struct ChannelBlock {
  static constexpr bool kMaps = kMakes == ChannelMakes::kMaps, kSends = kMakes == ChannelMakes::kOutputsAndStates;
  static_assert(kK == 128 || (kGroups == 1 && !kMaps && !kSends));
  static constexpr bool kMakesMaps = kMaps, kSendsStates = kSends, kHalves = kK == 256;
  static constexpr int kWidth = kK, kRanges = kGroups, kStateGroups = kHalves ? 2 : kGroups;
  static constexpr int kStateWarps = kStateGroups * kGroupWarps, kThreads = (kStateGroups + 1) * kGroupThreads;
  static constexpr int kColumns = kGroups * kGroupColumns;
  static constexpr int kBlocksOnOne = kK == 64 ? 2 : 1;  // multiprocessor
  // A warpgroup that has a multiprocessor for itself and the one that serves it needs no more registers.
  static constexpr bool kTakesRegisters = kK == 64 || kStateGroups == 2;
  static constexpr int kStateRegisters = kK == 64 ? 216 : 232, kOtherRegisters = 40;
  static_assert(kStateGroups * kStateRegisters + kOtherRegisters <= (kStateGroups == 2 ? 3 * 168 : 512 / kBlocksOnOne));
  static constexpr int kReadDepth = kK != 128 || kSends ? 2 : 3;
  static constexpr int kDepth = kHalves ? 1 : kK == 64 || kGroups == 2 ? 2 : 3;

  struct Read {
    unsigned char reader[KeyTile<kK>::kBytes], v[kGroups][ValueTile::kBytes];
  };
  struct Solve {
    unsigned char query[kMaps ? 1024 : KeyTile<kK>::kBytes], J[LowerTile::kBytes];
  };
  struct Write {
    unsigned char writer[KeyTile<kK>::kBytes], sP[kMaps ? 1024 : LowerTile::kBytes];
  };
  static constexpr uint32_t kBetaBytes = kChunkRows * sizeof(float), kTotalBytes = kK * sizeof(float);
  static constexpr uint32_t kReadBytes = sizeof(Read) + kBetaBytes + kTotalBytes;
  static constexpr uint32_t kSolveBytes = LowerTile::kBytes + (kMaps ? 0 : KeyTile<kK>::kBytes);
  static constexpr uint32_t kWriteBytes = KeyTile<kK>::kBytes + (kMaps ? 0 : LowerTile::kBytes);

  // `there` and `taken`: phases of every o, which has the next chunk's state with it, and of the first state.
  struct Handed {
    TransactionBarrier there, taken;
  };

  struct alignas(1024) Shared {
    Read read[kReadDepth];
    Solve solve[kDepth];
    Write write[kDepth];
    unsigned char o[kGroups][ValueTile::kBytes];
    unsigned char S[kGroups][kSends ? StateTile<kK>::kBytes : 16];
    alignas(16) float beta[kReadDepth][kChunkRows];
    alignas(16) float total[kReadDepth][kK];
    RingBarriers<kReadDepth> of_read;
    RingBarriers<kDepth> of_solve, of_write;
    Handed handed[kGroups];
    ScanWork work;
    int first_item, first_copy;  // of the factors, and of the copies of the keys
    WalkFlags flags[3];          // of the threads that fill the rings
    float4 halves[kHalves ? 2 : 1][kHalves ? kTokenTiles : 1]
                 [kHalves ? kGroupThreads : 1];  // of X, then O, of a thread
  };
  static_assert(kBlocksOnOne * (sizeof(Shared) + 1024) <= 228 * 1024);

  struct Turns {
    RingTurn<kReadDepth> read;
    RingTurn<kDepth> other;
    uint32_t handed = 0;  // how often a warpgroup handed something over

    __device__ __forceinline__ void next() {
      read.next();
      other.next();
    }
  };
};

// The warps that bring the operands, by one lane each: a ring for every one. See bring_share of scan_operands.cuh for why not
// one thread for all.
template <class Shape>
struct ChannelScanBringer {
  static constexpr int kRings = 3;
  const ForwardArgs& args;
  const ChannelScanMaps& maps;
  typename Shape::Shared& s;

  __device__ __forceinline__ void bring_read(int item, int copy, int column, const RowsPlace& values,
                                             const RingTurn<Shape::kReadDepth>& turn) const {
    const int at = turn.at;
    TransactionBarrier& filled = s.of_read.filled[at];
    s.of_read.free[at].wait(turn.parity ^ 1);
    filled.arrive_expecting(Shape::kReadBytes);
    load_copy<Shape::kWidth>(s.read[at].reader, maps.keys, kReader, copy, filled);
#pragma unroll
    for (int i = 0; i < Shape::kRanges; ++i) {
      load_panels(ValueTile(s.read[at].v[i]), maps.v, column + i * kGroupColumns, value_columns(args), values, filled);
    }
    load_bytes(shared_address(s.beta[at]), args.factors.token + int64_t{item} * kChunkRows, Shape::kBetaBytes, filled);
    load_bytes(shared_address(s.total[at]), args.factors.total + int64_t{copy} * Shape::kWidth, Shape::kTotalBytes,
               filled);
  }

  __device__ __forceinline__ void bring_solve(int item, int copy, const RingTurn<Shape::kDepth>& turn) const {
    const int at = turn.at;
    TransactionBarrier& filled = s.of_solve.filled[at];
    s.of_solve.free[at].wait(turn.parity ^ 1);
    filled.arrive_expecting(Shape::kSolveBytes);
    if constexpr (!Shape::kMakesMaps) {
      load_copy<Shape::kWidth>(s.solve[at].query, maps.keys, kQuery, copy, filled);
    }
    load_lower(s.solve[at].J, maps.lower, kLowerJ, item, filled);
  }

  __device__ __forceinline__ void bring_write(int item, int copy, const RingTurn<Shape::kDepth>& turn) const {
    const int at = turn.at;
    TransactionBarrier& filled = s.of_write.filled[at];
    s.of_write.free[at].wait(turn.parity ^ 1);
    filled.arrive_expecting(Shape::kWriteBytes);
    load_copy<Shape::kWidth>(s.write[at].writer, maps.keys, kWriter, copy, filled);
    if constexpr (!Shape::kMakesMaps) load_lower(s.write[at].sP, maps.lower, kLowerP, item, filled);
  }

  __device__ __forceinline__ void run(int ring) const {
    const auto& [part, walk, is_tail] = s.work;
    typename Shape::Turns turn;
    for (int c = 0; c < walk.chunks; ++c, turn.next()) {
      if (!Shape::kMakesMaps && args.published != nullptr) s.flags[ring].wait();
      const int item = s.first_item + c * args.problem.num_value_heads;
      const int copy = s.first_copy + c * args.problem.num_value_heads;
      if (ring == 0) {
        bring_read(item, copy, part.column, rows_of(args, walk, c, part.head), turn.read);
      } else if (ring == 1) {
        bring_solve(item, copy, turn.other);
      } else {
        bring_write(item, copy, turn.other);
      }
    }
  }
};

// The warp that stores o and states, by one lane.
template <class Shape>
struct ChannelScanStorer {
  const ForwardArgs& args;
  const ChannelScanMaps& maps;
  typename Shape::Shared& s;

  __device__ __forceinline__ void store_state(int group, const ScanPart& part, const Walk& walk, int c) const {
    const int64_t chunk = first_chunk_of(args.chunked, part.sequence) + walk.position + c;
    if (chunk >= args.state_chunks) return;
    const StateTile<Shape::kWidth> tile(s.S[group]);
#pragma unroll
    for (int p = 0; p < tile.kPanels; ++p) {
      if (p * tile.kPanelColumns >= args.state_width) continue;
      store_box(maps.S,
                {p * tile.kPanelColumns, part.column + group * kGroupColumns, part.head, static_cast<int>(chunk),
                 static_cast<int>(walk.span.batch)},
                tile.panel(p));
    }
  }
  __device__ __forceinline__ void store_output(int group, const ScanPart& part, const Walk& walk, int c) const {
    if (!args.o.present()) return;
    const RowsPlace at = rows_of(args, walk, c, part.head);
    store_box(maps.o, {part.column + group * kGroupColumns, at.head, at.missing, at.end, at.batch},
              ValueTile(s.o[group]).panel(0));
  }

  __device__ __forceinline__ void run() const {
    const auto& [part, walk, is_tail] = s.work;
    if (walk.chunks == 0) return;
    uint32_t parity = 0;
    for (int c = Shape::kSendsStates ? 0 : 1; c <= walk.chunks; ++c, parity ^= 1) {
#pragma unroll
      for (int i = 0; i < Shape::kRanges; ++i) {
        typename Shape::Handed& handed = s.handed[i];
        handed.there.wait(parity);
        if (part.column + i * kGroupColumns < args.problem.head_dim_v) {
          if (c > 0) store_output(i, part, walk, c - 1);
          if constexpr (Shape::kSendsStates) {
            if (c < walk.chunks) store_state(i, part, walk, c);
          }
          commit_stores();
          wait_stores_read<0>();
        }
        handed.taken.arrive();
      }
    }
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
