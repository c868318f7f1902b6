// What the gradients with a decay per channel (gradients_per_channel.cuh) have in shared memory, and the warps that serve the
// two warpgroups: one brings the operands, one asks for the gates.
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradients.cuh"
#include "cuda/delta_rule/chunk_sm90/gradients_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/scan_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using Wide = GradientBlock<128, 2>;
using Keys = Wide::Keys;
using StatesTile = Wide::StatesTile;
using WrittenTile = Wide::WrittenTile;
using Pairs = Wide::Pairs;
constexpr int kWidth = Wide::kWidth, kWorkers = Wide::kWorkers, kGradientThreads = Wide::kThreads;
constexpr int kChannelGradientRegisters = 224, kChannelBringerRegisters = 56;
constexpr int kTileRows = 16, kRowTiles = kChunkRows / kTileRows;
constexpr int kWorkerWarps = kWorkers / kWarpSize;

// [64 channels x 64 tokens] of a warpgroup as C tiles. Element e of tile n of a lane: channel g + 8 (e / 2) of the warp's
// 16, token 8 n + 2 t + e % 2, with g = lane / 4 and t = lane % 4.
using ChannelSums = float[kTokenTiles][4];
// The same of a warp as 16-bit pairs of tokens, of a tile of 16: word w belongs to C tile w / 2 of it, channel g + 8 (w %
// 2).
using TileWords = uint32_t[4];
constexpr uint32_t kBothSigns = 0x80008000;  // of a pair
// Of channels g and g + 8.
using OfChannels = float[2];

// Sums over channels of a token, by the warps that have them.
enum RowSum { kOfBeta, kAlongQ, kAlongK, kNumRowSums };
struct RowSums {
  float part[kNumRowSums][kWorkerWarps][kChunkRows];
  float total[kNumRowSums][kChunkRows];
};

struct ChannelNumbers {
  float rstd_q[kChunkRows], rstd_k[kChunkRows], beta[kChunkRows];
};

// Barriers `filled` and `free` as in TransactionBarrier. What is free together is brought together:
//
//     numbers   the item and its numbers per token; free when the item is done
//     reader    free after step 1
//     states    S, Y, v, d_o and G: free after step 3
//     pairs     J: free after step 4
//     keys      q and k, for all heads of a group; free when dq and dk have left
//
// Step 1 waits for `first_filled`: reader, S, Y, v and J; step 2 for `second_filled`: d_o; step 3 for `third_filled`: G.
struct alignas(1024) ChannelGradientShared {
  unsigned char S[StatesTile::kBytes], G[StatesTile::kBytes];
  unsigned char Y[WrittenTile::kBytes], d_o[Keys::kBytes];
  unsigned char v[Keys::kBytes];  // then R
  unsigned char reader[Keys::kBytes];
  unsigned char q[Keys::kBytes], k[Keys::kBytes];  // then dq, dk
  unsigned char rising_q[Keys::kBytes], rising_k[Keys::kBytes], falling[Keys::kBytes];
  union {
    unsigned char P[LowerTile::kBytes];  // steps 2 to 4
    RowSums sums;                        // step 5
  };
  unsigned char A[LowerTile::kBytes];  // J in step 1
  ChannelNumbers numbers[2];
  float diagonal[kChunkRows];  // of P
  float yv[2][kChunkRows];     // Y . v of the warpgroups' columns
  float a_log[kWorkerWarps];   // the warps' shares of dA_log
  uint32_t strong[2];          // a tile of this item, or of the next, is strong
  uint32_t keys[2];            // how many times q and k came before those of this item, and of the next
  Item items[2];
  Item next[2];  // of the warp that brings the operands: here they take no registers
  TransactionBarrier numbers_filled[2], numbers_free[2], keys_filled, keys_free;
  TransactionBarrier first_filled, second_filled, third_filled, reader_free, states_free, pairs_free;
};

// The warp that brings the operands, by one lane.
struct ChannelBringer {
  const GradientArgs& args;
  const ChannelGradientMaps& maps;
  ChannelGradientShared& s;

  __device__ __forceinline__ void bring_numbers(const Item& item, uint32_t turn, uint32_t keys) const {
    TransactionBarrier& filled = s.numbers_filled[turn % 2];
    ChannelNumbers& numbers = s.numbers[turn % 2];
    s.numbers_free[turn % 2].wait(turn / 2 % 2 ^ 1);
    s.items[turn % 2] = item;
    s.keys[turn % 2] = keys;
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

  __device__ __forceinline__ void bring_operands(const Item& item, uint32_t turn) const {
    const uint32_t busy = turn % 2 ^ 1;
    const RowsPlace at = rows_of(item, item.head);
    const auto factors = static_cast<int>(item.factors), slot = static_cast<int>(item.slot);
    s.reader_free.wait(busy);
    s.first_filled.arrive_expecting(2 * Keys::kBytes + StatesTile::kBytes + WrittenTile::kBytes + LowerTile::kBytes);
    load_copy<kWidth>(s.reader, maps.keys, kReader, factors, s.first_filled);
    s.states_free.wait(busy);
    const int chunk = state_chunk(args.chunk, item);
    const StatesTile S(s.S);
#pragma unroll
    for (int p = 0; p < StatesTile::kPanels; ++p) {
      load_box(S.panel(p), maps.S, {p * StatesTile::kPanelColumns, 0, item.head, chunk, at.batch}, s.first_filled);
    }
    load_panels(Keys(s.v), maps.v, 0, args.chunk.problem.head_dim_v, at, s.first_filled);
    Bringer<Wide>::load_rows(WrittenTile(s.Y), maps.Y, args.padded_v, slot, s.first_filled);
    s.second_filled.arrive_expecting(Keys::kBytes);
    load_panels(Keys(s.d_o), maps.d_o, 0, args.chunk.problem.head_dim_v, at, s.second_filled);
    s.third_filled.arrive_expecting(StatesTile::kBytes);
    Bringer<Wide>::load_rows(StatesTile(s.G), maps.G, args.padded_v, slot, s.third_filled);
    s.pairs_free.wait(busy);
    load_lower(s.A, maps.J, factors, s.first_filled);
  }

  __device__ __forceinline__ void bring_keys(const Item& item, uint32_t turn) const {
    const RowsPlace at = rows_of(item, item.key_head);
    s.keys_free.wait(turn % 2 ^ 1);
    s.keys_filled.arrive_expecting(2 * Keys::kBytes);
    load_panels(Keys(s.q), maps.q, 0, args.chunk.problem.head_dim_k, at, s.keys_filled);
    load_panels(Keys(s.k), maps.k, 0, args.chunk.problem.head_dim_k, at, s.keys_filled);
  }

  __device__ __forceinline__ void run() const {
    chunk_16bit::first_item<kWidth>(args.chunk, blockIdx.x, s.next[0]);
    uint32_t keys = 0;
    for (uint32_t turn = 0;; ++turn) {
      const Item& item = s.next[turn % 2];
      bring_numbers(item, turn, keys);
      if (item.span.sequence < 0) return;
      bring_operands(item, turn);
      if (item.first) bring_keys(item, keys++);
      chunk_16bit::find_next<kWidth>(args.chunk, item, item.pair + gridDim.x, s.next[(turn + 1) % 2]);
    }
  }
};

// A warp that asks the L2 cache for the gates of an item before the warpgroups load them.
__device__ __forceinline__ void prefetch_gates(const GradientArgs& args, ChannelGradientShared& s, int lane) {
  const DeviceTensor& g = args.chunk.problem.g;
  const int line = 128 / static_cast<int>(byte_offset(g.dtype, 1));
  for (uint32_t turn = 0;; ++turn) {
    s.numbers_filled[turn % 2].wait(turn / 2 % 2);
    const Item& item = s.items[turn % 2];
    if (item.span.sequence < 0) return;
    for (int row = lane; row < item.span.length; row += kWarpSize) {
      const int64_t start = row_offset(g, item.span.batch, item.span.begin + row, item.head);
      for (int at = 0; at < args.chunk.problem.head_dim_k; at += line) {
        prefetch(element_at(static_cast<const char*>(g.data), g.dtype, start + at * g.strides[3]));
      }
    }
    release(s.numbers_free[turn % 2], lane);
  }
}

static_assert(sizeof(ChannelGradientShared) <= 227 * 1024);

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
