// What the gradients with a decay per channel (gradients_per_channel.cuh) have in shared memory, and how it comes there: four
// warpgroups are served by three warps that bring operands and one that brings gates, two serve themselves.
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_operands.cuh"
#include "cuda/delta_rule/chunk_sm90/gradients_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/scan_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

constexpr int kTileRows = 16, kRowTiles = kChunkRows / kTileRows;
constexpr int kPanelBytes = PanelOfTokens::kBytes;

// A warpgroup that works has one of the sides of its block, 64 channels or value columns, and one of two halves, 32 tokens.
constexpr int kHalves = 2, kHalfRows = kChunkRows / kHalves, kHalfTiles = kRowTiles / kHalves;
constexpr int kSideThreads = kHalves * kGroupThreads;

// [64 channels x 32 tokens] of a warpgroup as C tiles. Element e of tile n of a lane: channel g + 8 (e / 2) of the warp's
// 16, token 8 n + 2 t + e % 2 of its half, with g = lane / 4 and t = lane % 4.
using ChannelSums = float[kHalfRows / 8][4];
// The same of a warp as 16-bit pairs of tokens, of a tile of 16: word w belongs to C tile w / 2 of it, channel g + 8 (w %
// 2).
using TileWords = uint32_t[4];
constexpr uint32_t kBothSigns = 0x80008000;  // of a pair
// Of channels g and g + 8.
using OfChannels = float[2];
// [64 x 32] pairs of tokens of a warpgroup.
using ChannelPairs = float[kHalfRows / 8][4];

// What a block leaves in GradientArgs::key_sums, a matrix each, between the items of a key head; dg between those of a head.
enum KeptSum { kOfQueries, kOfKeys, kOfTokens, kOfGates };
static_assert(kOfTokens < chunk_16bit::kKeySumsPerChannel && kOfGates < kRangeSums);

// Sums over channels of a token, by the blocks of 16 channels that the warps have.
enum RowSum { kOfBeta, kAlongQ, kAlongK, kNumRowSums };

// The gates of a chunk as tiles that maps bring.
template <DType kGate, int kWidth>
struct GatePanels {
  static constexpr int kPanelColumns = kGate == DType::kF32 ? 32 : 64, kPanels = kWidth / kPanelColumns;
  static constexpr int kPanelBytes = PanelOfTokens::kBytes;
  uint32_t start;

  __device__ __forceinline__ uint32_t panel(int p) const { return start + static_cast<uint32_t>(p * kPanelBytes); }
};

enum KeyRows { kRisingQ, kRisingK, kFalling, kNumRows };

struct ChannelNumbers {
  float rstd_q[kChunkRows], rstd_k[kChunkRows], beta[kChunkRows];
};

// Barriers `filled` and `free` as in TransactionBarrier. What is free together is brought together:
//
//     numbers   the item and its numbers per token; free when the item is done
//     states    reader, S, Y, v, d_o and G: free after step 3
//     pairs     J: free in step 5, when dg has its ends
//     keys      q and k, for all items of a key head; free when dq and dk have left
//     gates     in the place of rows, from when these have been read, in step 5, until the next item has some: where gates
//               are of 16 bits, together with `pairs`; of 32 bits, when dg has left. Step 5 has them brought again, where
//               it needs them, when `pairs` are free, and puts dg there
//
// Step 1 waits for `first_filled`, in two parts: reader, S, Y, v and J; step 2 for `second_filled`: d_o; step 3 for
// `third_filled`: G.
//
// For a padded K, and as many value columns at a time.
template <int kK>
struct ChannelGradientBlock {
  static constexpr int kWidth = channel_gradient_columns(kK), kSides = kK / kGroupColumns, kChannelBlocks = kK / 16;
  static constexpr int kWorkers = kSides * kSideThreads, kWorkerWarps = kWorkers / kWarpSize;
  static constexpr int kBlocksOnOne = channel_gradients_on_one(kK);  // multiprocessor
  // Of two blocks on a multiprocessor the warps that work bring their operands themselves: 8 warps may have 128 registers
  // each, but only 104 beside 4 more, which is too few.
  static constexpr bool kServesItself = kBlocksOnOne == 2;
  static constexpr int kThreads = kWorkers + (kServesItself ? 0 : kGroupThreads);
  static constexpr int kWorkRegisters = kServesItself ? 128 : 112, kOtherRegisters = 32;
  static_assert(kBlocksOnOne * (kWorkers * kWorkRegisters + (kThreads - kWorkers) * kOtherRegisters) <= 65536);

  using Keys = KeyTile<kK>;                            // and v, d_o
  using StatesTile = PanelTile<kK, kK>;                // S^T and G^T: a row per value column
  using WrittenTile = PanelTile<kK, kChunkRows>;       // Y^T and R^T
  static_assert(WrittenTile::kBytes == Keys::kBytes);  // R takes the place of reader

  // What the warps leave each other in step 5.
  struct Exchange {
    float part[kNumRowSums][kChannelBlocks][kChunkRows];
    float total[kNumRowSums][kChunkRows];
    float a_log[kWorkers / 8];    // shares of dA_log of eight lanes
    float bias[kHalves][kWidth];  // ddt_bias of a half
    float end[kHalves][kWidth];   // dg after the last token, of each half its share
    float after_first[kWidth];    // what the second half adds to dg before it
  };

  struct alignas(1024) Shared {
    unsigned char S[StatesTile::kBytes], G[StatesTile::kBytes];
    unsigned char Y[WrittenTile::kBytes], d_o[Keys::kBytes];
    union {
      unsigned char v[Keys::kBytes];    // then bD
      float totals[kRowTiles][kWidth];  // from step 3 on: log2 of the decays of tiles
    };
    unsigned char reader[Keys::kBytes];              // then R
    unsigned char q[Keys::kBytes], k[Keys::kBytes];  // then dq, dk
    unsigned char rows[kNumRows][Keys::kBytes];
    union {
      struct {
        unsigned char P[LowerTile::kBytes];
        unsigned char A[LowerTile::kBytes];  // J in step 1
      } pairs;                               // steps 1 to 4
      Exchange exchange;                     // step 5
    };
    ChannelNumbers numbers[2];
    float diagonal[kChunkRows];    // of P
    float yv[kSides][kChunkRows];  // Y . v of a side's columns
    uint32_t strong[2];            // a tile of this item, or of the next, is strong
    uint32_t keys[2];              // how many times q and k came before those of this item, and of the next
    Item items[2];
    Item next[2];  // of the warp that names the items: here they take no registers
    uint32_t next_keys;
    TransactionBarrier numbers_filled[2], numbers_free[2], keys_filled, keys_free;
    TransactionBarrier first_filled, second_filled, third_filled, states_free, pairs_free;
    TransactionBarrier gates_filled, gates_again, gates_free;

    // Where gates lie for step 3, or for step 5.
    __device__ __forceinline__ unsigned char* gates(bool wide, bool first) {
      return reinterpret_cast<unsigned char*>(rows) + (first && !wide ? Keys::kBytes : 0);
    }
  };
  // When J comes, nothing is needed any more of what lies in its place.
  static_assert(offsetof(Exchange, end) <= LowerTile::kBytes);
  static_assert(kBlocksOnOne * (sizeof(Shared) + 1024) <= 228 * 1024);
};

// Of the warps that serve, if there are any, the first names the items and brings their numbers, and two bring the operands. By
// one lane each: three have room for the places of all boxes in few registers.
template <class Block, bool kRanges>
struct ChannelBringer {
  static constexpr int kWidth = Block::kWidth;
  using Keys = typename Block::Keys;
  using StatesTile = typename Block::StatesTile;
  using WrittenTile = typename Block::WrittenTile;
  const GradientArgs& args;
  const ChannelGradientMaps& maps;
  typename Block::Shared& s;

  __device__ __forceinline__ void bring_numbers(const Item& item, uint32_t turn) const {
    TransactionBarrier& filled = s.numbers_filled[turn % 2];
    ChannelNumbers& numbers = s.numbers[turn % 2];
    s.numbers_free[turn % 2].wait(turn / 2 % 2 ^ 1);
    s.items[turn % 2] = item;
    s.keys[turn % 2] = s.next_keys;
    if (item.span.sequence < 0) return filled.arrive();
    filled.arrive_expecting(sizeof(ChannelNumbers));
    const chunk_16bit::ChunkFactors& factors = args.chunk.factors;
    const float* row = factors.row + item.factors * kRowNumbers * kChunkRows;
    load_bytes(shared_address(numbers.rstd_q), row + chunk_16bit::kRstdOfQ * kChunkRows, sizeof(numbers.rstd_q),
               filled);
    load_bytes(shared_address(numbers.rstd_k), row + chunk_16bit::kRstdOfK * kChunkRows, sizeof(numbers.rstd_k),
               filled);
    load_bytes(shared_address(numbers.beta), factors.token + item.factors * kChunkRows, sizeof(numbers.beta), filled);
  }

  __device__ __forceinline__ void bring_keys(const Item& item, uint32_t turn) const {
    const RowsPlace at = rows_of(item, item.key_head);
    s.keys_free.wait(turn % 2 ^ 1);
    s.keys_filled.arrive_expecting(2 * Keys::kBytes);
    load_panels(Keys(s.q), maps.q, 0, args.chunk.problem.head_dim_k, at, s.keys_filled);
    load_panels(Keys(s.k), maps.k, 0, args.chunk.problem.head_dim_k, at, s.keys_filled);
  }

  __device__ __forceinline__ void name_first() const {
    chunk_16bit::first_item<kWidth, int>(args.chunk, chunk_16bit::first_pair<int>(args), s.next[0]);
    s.next_keys = 0;
  }
  __device__ __forceinline__ void name_next(const Item& item, uint32_t turn) const {
    if (item.first) ++s.next_keys;
    // From a place that nobody knows: nothing of it is computed before the loop and kept in registers.
    const GradientArgs& anew = (&args)[opaque(0)];
    chunk_16bit::find_next<kWidth, int>(anew.chunk, item, chunk_16bit::pair_after<int>(anew, item),
                                        s.next[(turn + 1) % 2]);
  }
  __device__ __forceinline__ void name_items() const {
    name_first();
    for (uint32_t turn = 0;; ++turn) {
      const Item& item = s.next[turn % 2];
      bring_numbers(item, turn);
      if (item.span.sequence < 0) return;
      name_next(item, turn);
    }
  }

  // In the place of `states`, as bring_states.
  __device__ __forceinline__ void bring_values(const Item& item, uint32_t busy) const {
    const RowsPlace at = rows_of(item, item.head);
    s.states_free.wait(busy);
    s.first_filled.arrive_expecting(2 * Keys::kBytes + WrittenTile::kBytes + LowerTile::kBytes);
    load_copy<kWidth>(s.reader, maps.keys, kReader, static_cast<int>(chunk_16bit::copies_of(args.chunk, item)),
                      s.first_filled);
    const int column = column_of<kRanges>(item);
    load_panels(Keys(s.v), maps.v, column, args.chunk.problem.head_dim_v, at, s.first_filled);
    wait_until_left(args, item);
    load_rows(WrittenTile(s.Y), maps.Y, column, args.padded_v, static_cast<int>(item.slot), s.first_filled);
  }
  __device__ __forceinline__ void bring_states(const Item& item, uint32_t busy) const {
    s.states_free.wait(busy);
    s.first_filled.arrive_expecting(StatesTile::kBytes);
    const int chunk = state_chunk(args.chunk, item), batch = static_cast<int>(item.span.batch);
    const int column = column_of<kRanges>(item);
    const StatesTile S(s.S);
#pragma unroll
    for (int p = 0; p < StatesTile::kPanels; ++p) {
      load_box(S.panel(p), maps.S, {p * StatesTile::kPanelColumns, column, item.head, chunk, batch}, s.first_filled);
    }
    s.second_filled.arrive_expecting(Keys::kBytes);
    load_panels(Keys(s.d_o), maps.d_o, column, args.chunk.problem.head_dim_v, rows_of(item, item.head),
                s.second_filled);
    s.third_filled.arrive_expecting(StatesTile::kBytes);
    wait_until_left(args, item);
    load_rows(StatesTile(s.G), maps.G, column, args.padded_v, static_cast<int>(item.slot), s.third_filled);
  }
  __device__ __forceinline__ void bring_pairs(int factors, uint32_t busy) const {
    s.pairs_free.wait(busy);
    load_lower(s.pairs.A, maps.lower, kLowerJ, factors, s.first_filled);
  }

  __device__ __forceinline__ void bring_first(const Item& item, uint32_t busy) const {
    bring_values(item, busy);
    bring_pairs(static_cast<int>(item.factors), busy);
  }
  __device__ __forceinline__ void bring_others(const Item& item, uint32_t busy) const {
    bring_states(item, busy);
    if (item.first) bring_keys(item, s.keys[busy ^ 1]);
  }

  // body(item, turn) for all items.
  template <class Body>
  __device__ __forceinline__ void for_each_item(const Body& body) const {
    for (uint32_t turn = 0;; ++turn) {
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      if (item.span.sequence < 0) return;
      body(item, turn % 2 ^ 1);
      s.numbers_free[turn % 2].arrive();
    }
  }

  __device__ __forceinline__ void run(int role) const {
    if (role == 0) {
      name_items();
    } else if (role == 1) {
      for_each_item([&](const Item& item, uint32_t busy) { bring_first(item, busy); });
    } else {
      for_each_item([&](const Item& item, uint32_t busy) { bring_others(item, busy); });
    }
  }
};
constexpr int kBringers = 3;

// A warp that asks the L2 cache for the gates of an item before the warpgroups load them, or brings them.
template <class Block>
struct GateBringer {
  const GradientArgs& args;
  const ChannelGradientMaps& maps;
  typename Block::Shared& s;
  int lane;

  __device__ __forceinline__ void ask(const Item& item) const {
    const DeviceTensor& g = args.chunk.problem.g;
    const int line = 128 / static_cast<int>(byte_offset(g.dtype, 1));
    for (int row = lane; row < item.span.length; row += kWarpSize) {
      const int64_t start = row_offset(g, item.span.batch, item.span.begin + row, item.head);
      for (int at = 0; at < args.chunk.problem.head_dim_k; at += line) {
        prefetch(element_at(static_cast<const char*>(g.data), g.dtype, start + at * g.strides[3]));
      }
    }
  }

  template <DType kGate>
  __device__ __forceinline__ void load(const Item& item, const void* place, TransactionBarrier& filled) const {
    using Panels = GatePanels<kGate, Block::kWidth>;
    if (!elect_one()) return;
    filled.arrive_expecting(Panels::kPanels * Panels::kPanelBytes);
    load_panels(Panels{shared_address(place)}, maps.g, 0, args.chunk.problem.head_dim_k, rows_of(item, item.head),
                filled);
  }
  __device__ __forceinline__ void bring(const Item& item, bool first) const {
    TransactionBarrier& filled = first ? s.gates_filled : s.gates_again;
    const bool wide = args.chunk.problem.g.dtype == DType::kF32;
    wide ? load<DType::kF32>(item, s.gates(wide, first), filled)
         : load<DType::kBF16>(item, s.gates(wide, first), filled);
  }

  __device__ __forceinline__ void run() const {
    const bool wide = args.chunk.problem.g.dtype == DType::kF32;
    s.numbers_filled[0].wait(0);
    for (uint32_t turn = 0;; ++turn) {
      const Item& item = s.items[turn % 2];
      if (item.span.sequence < 0) return;
      if (maps.has_gates) {
        (wide ? s.gates_free : s.pairs_free).wait(turn % 2 ^ 1);
        bring(item, true);
      } else if (turn == 0) {
        ask(item);
      }
      const uint32_t next = turn + 1;
      s.numbers_filled[next % 2].wait(next / 2 % 2);
      if (s.items[next % 2].span.sequence >= 0) ask(s.items[next % 2]);
      if (maps.has_gates && args.chunk.problem.gate_in_kernel) {
        s.pairs_free.wait(turn % 2);
        bring(item, false);
      }
      release(s.numbers_free[turn % 2], lane);
    }
  }
};

// What the warps of a block that serves itself do to bring the item of a turn, while they work on the one before. All
// lanes of a warp call it.
template <class Block, bool kRanges>
struct OwnBringer {
  const GradientArgs& args;
  const ChannelGradientMaps& maps;
  typename Block::Shared& s;
  int lane;
  uint32_t turn;

  __device__ __forceinline__ const Item& item() const { return s.items[turn % 2]; }
  __device__ __forceinline__ bool exists() const { return item().span.sequence >= 0; }
  __device__ __forceinline__ uint32_t busy() const { return turn % 2 ^ 1; }
  __device__ __forceinline__ bool has_wide_gates() const {
    return maps.has_gates && args.chunk.problem.g.dtype == DType::kF32;
  }
  __device__ __forceinline__ ChannelBringer<Block, kRanges> operands() const { return {args, maps, s}; }
  __device__ __forceinline__ GateBringer<Block> gates() const { return {args, maps, s, lane}; }

  __device__ __forceinline__ void name() const {
    if (lane == 0) {
      turn == 0 ? operands().name_first() : operands().name_next(s.next[busy()], turn - 1);
      operands().bring_numbers(s.next[turn % 2], turn);
    }
    __syncwarp();
  }
  // What takes the place of `states`.
  __device__ __forceinline__ void bring_states() const {
    if (!exists()) return;
    gates().ask(item());
    if (lane == 0) {
      operands().bring_values(item(), busy());
      operands().bring_states(item(), busy());
    }
    __syncwarp();
  }
  // What takes the place of `pairs`, and gates that wait for it, those of the item before among them.
  __device__ __forceinline__ void bring_pairs() const {
    s.pairs_free.wait(busy());
    if (maps.has_gates && args.chunk.problem.gate_in_kernel && turn > 0) gates().bring(s.items[busy()], false);
    if (!exists()) return;
    if (lane == 0) operands().bring_pairs(static_cast<int>(item().factors), busy());
    __syncwarp();
    if (maps.has_gates && !has_wide_gates()) gates().bring(item(), true);
  }
  // What takes the places that the item before leaves last.
  __device__ __forceinline__ void bring_rest() const {
    if (!exists()) return;
    if (has_wide_gates()) {
      s.gates_free.wait(busy());
      gates().bring(item(), true);
    }
    if (lane == 0 && item().first) operands().bring_keys(item(), s.keys[turn % 2]);
    __syncwarp();
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
