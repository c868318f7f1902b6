// Of the kernel in gradients_per_channel.cuh: step 5, what tiles read from before them and write to after them.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_per_channel_rows.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// Of channels g and g + 8 of a warp.
using TileTotals = float2[kTiles];

// The decays of the tiles between two.
__device__ __forceinline__ float2 between(const TileTotals& total, int first, int last) {
  float2 product = make_float2(1, 1);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (t > first && t < last) product = product * total[t];
  }
  return product;
}

__device__ __forceinline__ void scale_channels(float2 factor, float (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] *= e < 2 ? factor.x : factor.y;
}

// sum += the products of rows (an A fragment) with sums at the same places, by channel.
template <DType kType>
__device__ __forceinline__ void dot_tokens(const uint32_t (&rows)[4], const float (&left)[4], const float (&right)[4],
                                           float2& sum) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float(&x)[4] = n == 0 ? left : right;
    const float2 low = unpack<kType>(rows[2 * n]), high = unpack<kType>(rows[2 * n + 1]);
    sum.x = fmaf(low.y, x[1], fmaf(low.x, x[0], sum.x));
    sum.y = fmaf(high.y, x[3], fmaf(high.x, x[2], sum.y));
  }
}

// The rising rows of a tile with X at the same places, by channel.
template <DType kType, int kK>
__device__ __forceinline__ float2 dot_reads(Shared<kK>& s, int row, int warp, int lane, const ChannelTile& query,
                                            const ChannelTile& reader) {
  const TileColumns<kK> q(s.rising.q, warp), k(s.rising.k, warp);
  uint32_t a[4];  // anew for every column: unpacked and kept they would cost registers
  float2 sum = make_float2(0, 0);
  q.load_c_transposed(16 * row, 0, lane, a);
  dot_tokens<kType>(a, query[0], query[1], sum);
  k.load_c_transposed(16 * row, 0, lane, a);
  dot_tokens<kType>(a, reader[0], reader[1], sum);
  return sum;
}

// X += the block (row, column) of the pairs with the falling rows.
template <DType kType, int kK>
__device__ __forceinline__ void add_read(Shared<kK>& s, int row, int column, int warp, int lane, ChannelTile& query,
                                         ChannelTile& reader) {
  uint32_t a[4], b[4];
  TileColumns<kK>(s.tiles.falling, warp).load_c_transposed(16 * column, 0, lane, a);
  s.pairs.blocks[kPairsOfP].block(row, column).load_b(0, 0, lane, b);
  mma<kType>(query[0], a, b[0], b[1]);
  mma<kType>(query[1], a, b[2], b[3]);
  s.pairs.blocks[kPairsOfA].block(row, column).load_b(0, 0, lane, b);
  mma<kType>(reader[0], a, b[0], b[1]);
  mma<kType>(reader[1], a, b[2], b[3]);
}

__device__ __forceinline__ void add_to(float2& sum, float2 x) { sum = make_float2(sum.x + x.x, sum.y + x.y); }

__device__ __forceinline__ void scale_tile(float2 factor, ChannelTile& x) {
  scale_channels(factor, x[0]);
  scale_channels(factor, x[1]);
}

// The sums of the first tile to shared memory, or back.
template <bool kStore, int kK>
__device__ __forceinline__ void exchange_first(Shared<kK>& s, int warp, int lane, ChannelTile& query,
                                               ChannelTile& reader) {
  const int thread = kWarpSize * warp + lane;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float &kept_query = s.tiles.first[n][e][thread], &kept_reader = s.tiles.first[2 + n][e][thread];
      if constexpr (kStore) {
        kept_query = query[n][e];
        kept_reader = reader[n][e];
      } else {
        query[n][e] = kept_query;
        reader[n][e] = kept_reader;
      }
    }
  }
}

// X of one tile, in place of S d_o^T and S Y^T. Adds to `over` what the tile reads from before the tiles before it, and
// from before itself if it is mild.
template <DType kType, int kK>
__device__ __forceinline__ void add_reads(Shared<kK>& s, const TileTotals& total, int row, int warp, int lane,
                                          ChannelTile& query, ChannelTile& reader, TileTotals& over) {
#pragma unroll
  for (int column = 0; column < row; ++column) {
    scale_tile(total[column], query);
    scale_tile(total[column], reader);
    add_to(over[column], between(total, column, row) * dot_reads<kType>(s, row, warp, lane, query, reader));
    add_read<kType>(s, row, column, warp, lane, query, reader);
  }
  if (s.is_strong(row)) return;
  add_to(over[row], dot_reads<kType>(s, row, warp, lane, query, reader));
  scale_tile(total[row], query);
  scale_tile(total[row], reader);
  add_read<kType>(s, row, row, warp, lane, query, reader);
}

// F += the transposed block (row, column) of the pairs with the rising rows, after the decays of that tile.
template <DType kType, int kK>
__device__ __forceinline__ void add_write(Shared<kK>& s, float2 total, int row, int column, int warp, int lane,
                                          ChannelTile& F) {
  uint32_t a[4], b[4];
  scale_tile(total, F);
  TileColumns<kK>(s.rising.q, warp).load_c_transposed(16 * row, 0, lane, a);
  s.pairs.blocks[kPairsOfP].block(row, column).load_b_transposed(0, 0, lane, b);
  mma<kType>(F[0], a, b[0], b[1]);
  mma<kType>(F[1], a, b[2], b[3]);
  TileColumns<kK>(s.rising.k, warp).load_c_transposed(16 * row, 0, lane, a);
  s.pairs.blocks[kPairsOfA].block(row, column).load_b_transposed(0, 0, lane, b);
  mma<kType>(F[0], a, b[0], b[1]);
  mma<kType>(F[1], a, b[2], b[3]);
}

// F, in place of G R^T. Adds to `over` what the tiles before t wrote to the state after the chunk.
template <DType kType, int kK>
__device__ __forceinline__ void add_writes(Shared<kK>& s, const TileTotals& total, int warp, int lane,
                                           TileTotals& over) {
  const TileColumns<kK> falling(s.tiles.falling, warp);
  const OwnSums<kK> writer(s.writer, warp, lane);
  float2 written = make_float2(0, 0);
#pragma unroll
  for (int column = 0; column < kTiles; ++column) {
    ChannelTile F;
    writer.load(2 * column, F[0]);
    writer.load(2 * column + 1, F[1]);
    if (column < kTiles - 1) {
      uint32_t a[4];
      falling.load_c_transposed(16 * column, 0, lane, a);
      float2 sum = make_float2(0, 0);
      dot_tokens<kType>(a, F[0], F[1], sum);
      add_to(written, between(total, column, kTiles) * sum);
      add_to(over[column + 1], written);
    }
#pragma unroll
    for (int row = kTiles - 1; row > column; --row) {
      add_write<kType>(s, total[row], row, column, warp, lane, F);
    }
    if (!s.is_strong(column)) add_write<kType>(s, total[column], column, column, warp, lane, F);
    writer.store(2 * column, F[0]);
    writer.store(2 * column + 1, F[1]);
  }
}

// Both, and `over` with `states`, what passes over the whole chunk. The sums of the first tile lie in shared memory.
template <DType kType, int kK>
__device__ __forceinline__ void add_tiles(Shared<kK>& s, float2 states, int warp, int lane, TileSums& query,
                                          TileSums& reader) {
  const int channel = 16 * warp + lane / 4;
  TileTotals total, over;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    total[t] = make_float2(s.total[t][channel], s.total[t][channel + 8]);
    over[t] = make_float2(0, 0);
  }
#pragma unroll
  for (int row = 1; row < kTiles; ++row) {
    add_reads<kType>(s, total, row, warp, lane, query[row], reader[row], over);
  }
  add_writes<kType>(s, total, warp, opaque_below<kWarpSize>(lane), over);  // addresses are not worth their registers
  exchange_first<false>(s, warp, lane, query[0], reader[0]);
  add_reads<kType>(s, total, 0, warp, lane, query[0], reader[0], over);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float low = states.x + sum_over_lanes<4>(over[t].x), high = states.y + sum_over_lanes<4>(over[t].y);
    if (lane % 4 == 0) {
      s.over[t][channel] = low;
      s.over[t][channel + 8] = high;
    }
  }
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
