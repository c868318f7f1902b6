// The operands of the scan on Hopper (scan.cuh): what a block has in shared memory, and the warpgroup that brings it and stores
// what leaves.
#pragma once

#include <algorithm>

#include "cuda/delta_rule/chunk_sm90/factor_steps.cuh"
#include "cuda/delta_rule/chunk_sm90/head_values.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::kRowNumbers;

// What a scan leaves behind: maps of segments, or outputs, for which sP is read or made.
enum class Makes { kMaps, kOutputs, kOutputsAndP };

// A block has warpgroups that multiply, kGroups of which have the state, one that makes sP if it is to be made, and one more.
// kSends: the states before the chunks leave by TMA, from memory that q and v of one more chunk have otherwise.
template <int kK, int kGroups, Makes kMakes, bool kSends = false>
struct Block {
  static constexpr int kWidth = kK;
  static constexpr bool kMakesMaps = kMakes == Makes::kMaps, kMakesP = kMakes == Makes::kOutputsAndP;
  static constexpr bool kSavesByMap = kSends;
  static_assert(!kSends || (kK == 128 && kGroups == 2 && !kMakesMaps));
  static constexpr int kLateDepth = scan_stages(kK), kEarlyDepth = kSends ? kLateDepth - 1 : kLateDepth;
  static constexpr bool kSplit = kK == 128 && kGroups == 1;  // one warpgroup makes S, another O
  static constexpr bool kHalves = kK == 256;                 // two warpgroups have half of K each
  static_assert(kK == 128 || kGroups == 1);
  static_assert(kMakes == Makes::kOutputs || kGroups == 2 || (kK == 64 && kMakesP));
  static constexpr int kWorkGroups = kSplit || kHalves ? 2 : kGroups,
                       kWarps = kWorkGroups * kGroupWarps;  // that multiply
  static constexpr int kScoreWarps = kMakesP ? kGroupWarps : 0;
  static constexpr int kAllGroups = kWorkGroups + (kMakesP ? 2 : 1), kThreads = kAllGroups * kGroupThreads;
  static constexpr int kColumns = kGroups * kGroupColumns;
  static constexpr int kBlocksOnOne = kK == 64 && !kMakesP ? 2 : 1;  // multiprocessor
  // All warpgroups share the registers evenly at first; for those that do not multiply fewer are enough.
  static constexpr int kEvenRegisters = 65536 / (kBlocksOnOne * kThreads) / 8 * 8;
  static constexpr int kScoreRegisters = kMakesP ? 72 : 0, kOtherRegisters = kMakesP ? 24 : 56;
  static constexpr int kWorkRegisters =
      std::min((kAllGroups * kEvenRegisters - kScoreRegisters - kOtherRegisters) / kWorkGroups / 8 * 8, 248);

  // The operands of a chunk that are needed until its end, and those that are not.
  struct alignas(1024) Late {
    unsigned char k[KeyTile<kK>::kBytes], J[LowerTile::kBytes];
    unsigned char sP[kMakesMaps ? 1024 : LowerTile::kBytes];  // no maps need q or sP
    float token[kTokenFactors * kChunkRows];
    float row[kRowNumbers * kChunkRows];  // where sP is made
  };
  struct alignas(1024) Early {
    unsigned char q[kMakesMaps ? 1024 : KeyTile<kK>::kBytes], v[kGroups][ValueTile::kBytes];
  };
  static constexpr uint32_t kLateBytes = KeyTile<kK>::kBytes + LowerTile::kBytes + sizeof(Late::token) + kTotalBytes +
                                         (kMakesMaps ? 0
                                          : kMakesP  ? sizeof(Late::row)
                                                     : LowerTile::kBytes);
  static constexpr uint32_t kEarlyBytes = (kMakesMaps ? 0 : KeyTile<kK>::kBytes) + kGroups * ValueTile::kBytes;

  // What one warpgroup hands to the other, if it does; `there` and `taken` are phases of every chunk.
  template <class Tile>
  struct alignas(1024) Handed {
    unsigned char tile[kSplit ? Tile::kBytes : 1024];
    TransactionBarrier there, taken;
  };

  // Where a block is in its rings.
  struct Turn {
    RingTurn<kLateDepth> late;
    RingTurn<kEarlyDepth> early;
    uint32_t odd = 0;      // the number of the chunk
    uint32_t leaving = 0;  // that of what leaves next

    __device__ __forceinline__ void next() {
      late.next();
      early.next();
      odd ^= 1;
    }
  };

  // `made`: sP of a chunk is there. `there`: what leaves in `o` and `state` is, `taken`: it has left.
  struct alignas(1024) Shared {
    Late late[kLateDepth];
    Early early[kEarlyDepth];
    unsigned char o[kGroups][ValueTile::kBytes];
    unsigned char state[kSavesByMap ? kGroups : 1][kSavesByMap ? StateTile<kK>::kBytes : 1024];
    TransactionBarrier there, taken;
    Handed<StateTile<kK>> S;
    Handed<WritesTile> R;
    float total[kLateDepth][4];
    QuerySquares squares;
    RingBarriers<kLateDepth> of_late;
    RingBarriers<kEarlyDepth> of_early;
    TransactionBarrier made[kLateDepth];
    ScanWork work;
    int64_t first_item;  // of the factors
    WalkFlags flags[2];  // of the threads that bring what the factors' kernel made
    float4 halves[kHalves ? 2 : 1][kHalves ? kTokenTiles : 1]
                 [kHalves ? kGroupThreads : 1];  // of X, then O, of a thread
  };
  static_assert(kBlocksOnOne * (sizeof(Shared) + 1024) <= 228 * 1024);
};

// Whether the states before the chunks leave by TMA. Asked at run time, though it is known: else ptxas spills.
template <class Shape>
__device__ __forceinline__ bool saves_by_map(const ScanMaps& maps) {
  return Shape::kSavesByMap && maps.has_states;
}

// The warpgroup that serves the others
// ----------------------------------------------------------------------------------------------------------

// Of the factors, that of chunk c of a walk, all of which lie in one row.
template <class Shared>
__device__ __forceinline__ int64_t item_at(const ForwardArgs& args, const Shared& s, int c) {
  return s.first_item + int64_t{c} * args.problem.num_value_heads;
}

// The operands of chunk c to the rings, a share of them by one thread of each of three warps: to start all copies takes one
// thread as long as a chunk takes the others. The first has a ring for itself; of the other two the first announces all.
template <class Shape>
__device__ __forceinline__ void bring_share(const ForwardArgs& args, const ScanMaps& maps, typename Shape::Shared& s,
                                            int share, int c, const typename Shape::Turn& turn) {
  if (share != 0 && args.published != nullptr) s.flags[share - 1].wait();
  const auto& [part, walk, is_tail] = s.work;
  const int64_t item = item_at(args, s, c);
  const RowsPlace keys = rows_of(args, walk, c, part.key_head);
  using Tile = KeyTile<Shape::kWidth>;
  if (share == 0) {
    const RowsPlace values = rows_of(args, walk, c, part.head);
    auto& early = s.early[turn.early.at];
    TransactionBarrier& filled = s.of_early.filled[turn.early.at];
    s.of_early.free[turn.early.at].wait(turn.early.parity ^ 1);
    filled.arrive_expecting(Shape::kEarlyBytes);
    if constexpr (!Shape::kMakesMaps) load_panels(Tile(early.q), maps.q, 0, args.problem.head_dim_k, keys, filled);
#pragma unroll
    for (int i = 0; i < Shape::kColumns / kGroupColumns; ++i) {
      load_panels(ValueTile(early.v[i]), maps.v, part.column + i * kGroupColumns, value_columns(args), values, filled);
    }
    return;
  }
  const int at = turn.late.at;
  auto& late = s.late[at];
  TransactionBarrier& filled = s.of_late.filled[at];
  s.of_late.free[at].wait(turn.late.parity ^ 1);
  if (share == 1) {
    filled.arrive_expecting(Shape::kLateBytes);
    load_panels(Tile(late.k), maps.k, 0, args.problem.head_dim_k, keys, filled);
    load_bytes(shared_address(late.token), args.factors.token + item * kTokenFactors * kChunkRows, sizeof(late.token),
               filled);
    load_bytes(shared_address(s.total[at]), args.factors.total + item * 4, kTotalBytes, filled);
    if constexpr (Shape::kMakesP) {
      load_bytes(shared_address(late.row), args.factors.row + item * kRowNumbers * kChunkRows, sizeof(late.row),
                 filled);
    }
  } else {
    load_lower(late.J, maps.lower, kLowerJ, static_cast<int>(item), filled);
    if constexpr (!Shape::kMakesMaps && !Shape::kMakesP)
      load_lower(late.sP, maps.lower, kLowerP, static_cast<int>(item), filled);
  }
}

// What leaves shared memory beside chunk c: the outputs of the chunk before, and the state before the chunk if it is saved.
template <class Shape>
__device__ __forceinline__ void store_leaving(const ForwardArgs& args, const ScanMaps& maps, typename Shape::Shared& s,
                                              int c, uint32_t parity) {
  const auto& [part, walk, is_tail] = s.work;
  s.there.wait(parity);
#pragma unroll
  for (int i = 0; i < Shape::kColumns / kGroupColumns; ++i) {
    const int column = part.column + i * kGroupColumns;
    if (column >= args.problem.head_dim_v) continue;
    if (args.o.present() && c > 0) {
      const RowsPlace at = rows_of(args, walk, c - 1, part.head);
      store_box(maps.o, {column, at.head, at.missing, at.end, at.batch}, ValueTile(s.o[i]).panel(0));
    }
    if constexpr (Shape::kSavesByMap) {
      const int64_t chunk = first_chunk_of(args.chunked, part.sequence) + walk.position + c;
      if (!saves_by_map<Shape>(maps) || c == walk.chunks || chunk >= args.state_chunks) continue;
      const StateTile<Shape::kWidth> S(s.state[i]);
#pragma unroll
      for (int p = 0; p < S.kPanels; ++p) {
        const int channel = p * S.kPanelColumns;
        if (channel >= args.state_width) continue;
        store_box(maps.states, {channel, column, part.head, static_cast<int>(chunk), static_cast<int>(walk.span.batch)},
                  S.panel(p));
      }
    }
  }
  commit_stores();
  wait_stores_read<0>();
  s.taken.arrive();
}

// Warps 0 to 2 bring, by one lane each; one of the last warp stores, unless maps are made.
template <class Shape>
__device__ __forceinline__ void serve(const ForwardArgs& args, const ScanMaps& maps, typename Shape::Shared& s,
                                      int warp) {
  constexpr int kShares = 3;
  if (!elect_one()) return;
  const int chunks = s.work.walk.chunks;
  if (warp < kShares) {
    typename Shape::Turn turn;
    for (int c = 0; c < chunks; ++c, turn.next()) bring_share<Shape>(args, maps, s, warp, c, turn);
  } else if constexpr (!Shape::kMakesMaps) {
    if (chunks == 0) return;
    uint32_t parity = 0;
    for (int c = saves_by_map<Shape>(maps) ? 0 : 1; c <= chunks; ++c, parity ^= 1) {
      store_leaving<Shape>(args, maps, s, c, parity);
    }
  }
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
