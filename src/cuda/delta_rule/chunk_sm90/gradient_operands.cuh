// The operands of the gradients on Hopper (gradients.cuh): what a block has in shared memory, and the warps that bring it.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_tokens.cuh"
#include "cuda/delta_rule/chunk_sm90/gradients.h"
#include "cuda/delta_rule/chunk_sm90/head_values.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::GradientArgs;
using chunk_16bit::Item;
using chunk_16bit::kRowNumbers;

using PanelOfTokens = PanelTile<kChunkRows, 64>;  // of a tile of tokens

struct GradientNumbers {
  float row[kRowNumbers * kChunkRows], token[kTokenFactors * kChunkRows];
};

// A number per token, in the shares of the warpgroups: of columns of pairs, of channels or of value columns.
template <int kGroups>
struct SharedSums {
  float of[kGroups][kChunkRows];

  __device__ __forceinline__ float at(int i) const { return kGroups == 2 ? of[0][i] + of[kGroups - 1][i] : of[0][i]; }
};

// What the warpgroups leave for the numbers of a token: the sums of gradients_tokens.cuh, with M = M^P + beta M^A.
template <int kGroups>
struct GradientSums {
  float columns[chunk_16bit::kBlocks][kChunkRows];  // of M, over the rows of a block
  SharedSums<kGroups> row_of_P, row_of_A;           // of M^P and M^A
  SharedSums<kGroups> row_below;                    // of M, without the diagonal block
  float within[kChunkRows];
  SharedSums<kGroups> a_q, a_k, b;
  SharedSums<kGroups> yv[2];  // Y . v, of this item and the next
  float state_dot[kGroups * kGroupWarps];
};

// Barriers `filled` and `free` as in TransactionBarrier. What is free together is brought together:
//
//     numbers   the item and its numbers per token; free when the item is done. The warp that brings the others waits
//               for `named`: the item alone
//     keys      k and q, for all items of a key head; free when dq and dk have left, which is found out in the item after
//     first     v and J: free after step 1
//     states    S, Y, d_o and G: free after the products of step 3 with them
//     pairs     sP, then P': free after the products of step 3 with it
//     sums      the other way: filled when the warpgroups have left all sums of an item
//
// Step 1 waits for `first_filled`: v, J, S and Y; step 2 for `second_filled`: d_o and sP, and `third_filled`: G.
//
// The kernel may start beside the scan back and, where that one waits late, beside the gradients of the window before.
// Until it waits, for G and Y, it reads the places of the chunks, k, q, v, d_o, the factors with their numbers per row, and
// S, all complete before the first of these scans back, and writes no global memory. Then the scan back over the next window
// may start if it follows, which finds free multiprocessors when the first blocks have no pairs left. Or it waits for G and Y
// of one item after the other (BackProgress), on multiprocessors that the scan back leaves idle; then none follows early.
//
// For a padded K and kGroups warpgroups that work.
template <int kK, int kGroups>
struct GradientBlock {
  static constexpr int kWidth = kK, kWorkGroups = kGroups;
  static constexpr int kWorkers = kGroups * kGroupThreads, kThreads = kWorkers + kGroupThreads;
  static constexpr int kBlocksOnOne = kGroups == 1 ? 2 : 1;  // multiprocessor
  static constexpr int kOtherRegisters = kGroups == 1 ? 56 : 88, kWorkRegisters = kGroups == 1 ? 200 : 208;
  static_assert(kGroups * kWorkRegisters + kOtherRegisters <= (kGroups == 2 ? 3 * 168 : 2 * 128));
  static constexpr int kColumns = kGroups * kGroupColumns;   // of values, of all warpgroups
  static constexpr int kChannels = kK / kGroups;             // of a warpgroup
  static constexpr int kPairColumns = kChunkRows / kGroups;  // of a warpgroup
  static constexpr bool kSharesPanel = kChannels < 64;       // the channels of both are one panel

  using Keys = KeyTile<kK>;
  using ValuesTile = PanelTile<kChunkRows, kColumns>;   // v and d_o
  using StatesTile = PanelTile<kColumns, kK>;           // S^T and G^T: a row per value column
  using WrittenTile = PanelTile<kColumns, kChunkRows>;  // Y^T and R^T
  using Pairs = float[kPairColumns / 8][4];             // [64 tokens x kPairColumns] as C tiles of a warp's 16 tokens
  using Rows = float[kChannels / 8][4];                 // [64 tokens x kChannels]

  struct alignas(1024) Shared {
    unsigned char k[2][Keys::kBytes], q[2][Keys::kBytes];
    unsigned char S[StatesTile::kBytes], G[StatesTile::kBytes];
    unsigned char v[ValuesTile::kBytes], d_o[ValuesTile::kBytes];
    unsigned char Y[WrittenTile::kBytes], R[WrittenTile::kBytes];
    unsigned char J[LowerTile::kBytes], P[LowerTile::kBytes], A[LowerTile::kBytes];
    GradientNumbers numbers[2];
    GradientSums<kGroups> sums;
    double halves[4];  // of finish_head
    Item items[2];
    Item next[2];      // of the warp that names the items: here they take no registers
    uint32_t keys[2];  // the turn of k and q of an item: so do these
    TransactionBarrier named[2], numbers_filled[2], numbers_free[2], keys_filled[2], keys_free[2];
    TransactionBarrier first_filled, second_filled, third_filled, first_free, states_free, pairs_free;
    TransactionBarrier sums_filled, sums_free;
  };
  static_assert(kBlocksOnOne * (sizeof(Shared) + 1024) <= 228 * 1024);
};

__device__ __forceinline__ RowsPlace rows_of(const Item& item, int head) {
  const auto length = static_cast<int>(item.span.length);
  return {head, kChunkRows - length, static_cast<int>(item.span.begin) + length, static_cast<int>(item.span.batch)};
}

// The warps that bring the operands, by one lane each: one names the items and brings what they begin with, one the others
// ------------------------------------------------------------------------------------

// Which of the states before the chunks of its row an item reads. Offsets out of order may name a chunk that the caller has
// none of; it gets another.
__device__ __forceinline__ int state_chunk(const ChunkArgs& args, const Item& item) {
  const int64_t chunk = first_chunk_of(args.chunked, item.span.sequence) + item.span.position;
  return static_cast<int>(min(chunk, args.state_chunks - 1));
}

// Of G or Y, which have so many `rows`: those from `first` on, zeros beyond them.
template <class Tile>
__device__ __forceinline__ void load_rows(const Tile& tile, const TensorMap& map, int first, int rows, int slot,
                                          TransactionBarrier& filled) {
  constexpr int kBoxes = Tile::kPanelBytes / sizeof(zero_panel);  // of 64 rows
#pragma unroll
  for (int at = 0; at < kBoxes * Tile::kPanels; ++at) {
    const int p = at / kBoxes, within = at % kBoxes * kGroupColumns, row = first + within;
    const uint32_t to = tile.panel(p) + static_cast<uint32_t>(within * Tile::kRowBytes);
    if (row < rows) {
      load_box(to, map, {p * Tile::kPanelColumns, row, slot}, filled);
    } else {
      load_bytes(to, zero_panel, sizeof(zero_panel), filled);
    }
  }
}

// Until the scan back has left G and Y of the item, where it runs beside.
__device__ __forceinline__ void wait_until_left(const GradientArgs& args, const Item& item) {
  if (!args.progress.present()) return;
  while (!chunk_16bit::is_ready(args, item)) continue;
  fence_async_proxy_global();
}

// The first value column of the item. kRanges: a head has several items, each with a range of its columns.
template <bool kRanges>
__device__ __forceinline__ int column_of(const Item& item) {
  return kRanges ? item.column : 0;
}

template <class Block, bool kRanges>
struct Bringer {
  using Keys = typename Block::Keys;
  using ValuesTile = typename Block::ValuesTile;
  using StatesTile = typename Block::StatesTile;
  using WrittenTile = typename Block::WrittenTile;
  const GradientArgs& args;
  const GradientMaps& maps;
  typename Block::Shared& s;

  __device__ __forceinline__ void bring_keys(const Item& item, uint32_t turn) const {
    const RowsPlace at = rows_of(item, item.key_head);
    TransactionBarrier& filled = s.keys_filled[turn % 2];
    s.keys_free[turn % 2].wait(turn / 2 % 2 ^ 1);
    filled.arrive_expecting(2 * Keys::kBytes);
    load_panels(Keys(s.k[turn % 2]), maps.k, 0, args.chunk.problem.head_dim_k, at, filled);
    load_panels(Keys(s.q[turn % 2]), maps.q, 0, args.chunk.problem.head_dim_k, at, filled);
  }

  // `keys`: the turn of the item's k and q.
  __device__ __forceinline__ void bring_numbers(const Item& item, uint32_t turn, uint32_t keys) const {
    TransactionBarrier& filled = s.numbers_filled[turn % 2];
    GradientNumbers& numbers = s.numbers[turn % 2];
    s.numbers_free[turn % 2].wait(turn / 2 % 2 ^ 1);
    s.items[turn % 2] = item;
    s.keys[turn % 2] = keys;
    s.named[turn % 2].arrive();
    if (item.span.sequence < 0) return filled.arrive();
    filled.arrive_expecting(sizeof(GradientNumbers));
    const chunk_16bit::ChunkFactors& factors = args.chunk.factors;
    load_bytes(shared_address(numbers.row), factors.row + item.factors * kRowNumbers * kChunkRows, sizeof(numbers.row),
               filled);
    load_bytes(shared_address(numbers.token), factors.token + item.factors * kTokenFactors * kChunkRows,
               sizeof(numbers.token), filled);
  }

  __device__ __forceinline__ void bring_first(const Item& item, uint32_t turn) const {
    const uint32_t busy = turn % 2 ^ 1;
    const RowsPlace at = rows_of(item, item.head);
    s.first_free.wait(busy);
    s.first_filled.arrive_expecting(ValuesTile::kBytes + LowerTile::kBytes + StatesTile::kBytes + WrittenTile::kBytes);
    const int column = column_of<kRanges>(item);
    load_panels(ValuesTile(s.v), maps.v, column, args.chunk.problem.head_dim_v, at, s.first_filled);
    load_lower(s.J, maps.lower, kLowerJ, static_cast<int>(item.factors), s.first_filled);
    s.states_free.wait(busy);
    const int chunk = state_chunk(args.chunk, item);
    const StatesTile S(s.S);
#pragma unroll
    for (int p = 0; p < StatesTile::kPanels; ++p) {
      load_box(S.panel(p), maps.S, {p * StatesTile::kPanelColumns, column, item.head, chunk, at.batch}, s.first_filled);
    }
    if (turn == 0 && !args.progress.present()) {
      wait_for_previous_kernels();
      if (args.next_waits_late) let_next_kernel_start();
    }
    wait_until_left(args, item);
    load_rows(WrittenTile(s.Y), maps.Y, column, args.padded_v, static_cast<int>(item.slot), s.first_filled);
  }

  __device__ __forceinline__ void bring_others(const Item& item, uint32_t turn) const {
    const uint32_t busy = turn % 2 ^ 1;
    s.states_free.wait(busy);
    s.second_filled.arrive_expecting(ValuesTile::kBytes + LowerTile::kBytes);
    const int column = column_of<kRanges>(item);
    load_panels(ValuesTile(s.d_o), maps.d_o, column, args.chunk.problem.head_dim_v, rows_of(item, item.head),
                s.second_filled);
    s.third_filled.arrive_expecting(StatesTile::kBytes);
    if (turn == 0 && !args.progress.present()) wait_for_previous_kernels();
    wait_until_left(args, item);
    load_rows(StatesTile(s.G), maps.G, column, args.padded_v, static_cast<int>(item.slot), s.third_filled);
    s.pairs_free.wait(busy);
    load_lower(s.P, maps.lower, kLowerP, static_cast<int>(item.factors), s.second_filled);
  }

  __device__ __forceinline__ void follow_items() const {
    for (uint32_t turn = 0;; ++turn) {
      s.named[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      if (item.span.sequence < 0) return;
      bring_others(item, turn);
      s.numbers_free[turn % 2].arrive();
    }
  }

  __device__ __forceinline__ void name_items() const {
    chunk_16bit::first_item<Block::kColumns, int>(args.chunk, chunk_16bit::first_pair<int>(args), s.next[0]);
    uint32_t keys = 0;
    for (uint32_t turn = 0;; ++turn) {
      const Item& item = s.next[turn % 2];
      const bool exists = item.span.sequence >= 0;
      const bool takes_keys = exists && item.first;
      bring_numbers(item, turn, takes_keys ? keys : keys - 1);
      if (!exists) return;
      if (takes_keys) bring_keys(item, keys++);
      bring_first(item, turn);
      chunk_16bit::find_next<Block::kColumns, int>(args.chunk, item, chunk_16bit::pair_after<int>(args, item),
                                                   s.next[(turn + 1) % 2]);
    }
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
