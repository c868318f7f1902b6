// Copies of operands to shared memory that the kernels of chunk_sm90 have in common. One thread starts one for all.
#pragma once

#include "cuda/delta_rule/chunk_sm90/tiles.cuh"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// A place of token_map, but for the column.
struct RowsPlace {
  int head, missing, end, batch;
};

// A panel of zeros: no box begins beyond the columns of its tensor (tma.cuh).
__device__ const uint4 zero_panel[ValueTile::kPanelBytes / sizeof(uint4)] = {};

// Columns from `column` on to a tile, of a tensor that has so many `columns`: zeros beyond them.
template <class Tile>
__device__ __forceinline__ void load_panels(const Tile& tile, const TensorMap& map, int column, int columns,
                                            const RowsPlace& at, TransactionBarrier& barrier) {
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p) {
    const int first = column + p * Tile::kPanelColumns;
    if (first < columns) {
      load_box(tile.panel(p), map, {first, at.head, at.missing, at.end, at.batch}, barrier);
    } else {
      static_assert(Tile::kPanelBytes == sizeof(zero_panel));
      load_bytes(tile.panel(p), zero_panel, sizeof(zero_panel), barrier);
    }
  }
}

// A copy of the keys with their decays. See ChannelScanMaps.
template <int kK>
__device__ __forceinline__ void load_copy(const void* memory, const TensorMap& map, KeyCopy copy, int item,
                                          TransactionBarrier& barrier) {
  const KeyTile<kK> tile(memory);
#pragma unroll
  for (int p = 0; p < tile.kPanels; ++p) {
    load_box(tile.panel(p), map, {p * tile.kPanelColumns, 0, copy, item}, barrier);
  }
}

// J or sP to a tile, with zeros above the blocks on the diagonal.
__device__ __forceinline__ void load_lower(const void* memory, const LowerMaps& maps, LowerMatrix matrix, int item,
                                           TransactionBarrier& barrier) {
  const uint32_t to = shared_address(memory);
#pragma unroll
  for (int block = 0; block < kTokenSteps; ++block) {
    load_box(to + static_cast<uint32_t>(block * kLowerBytes), maps.rows[block], {0, 0, matrix, item}, barrier);
  }
}

// Rows [16 block, +16) of one, without what is above the diagonal block; the caller commits.
__device__ __forceinline__ void store_lower_rows(const void* memory, const LowerMaps& maps, LowerMatrix matrix,
                                                 int block, int item) {
  store_box(maps.rows[block], {0, 0, matrix, item},
            shared_address(memory) + static_cast<uint32_t>(block * kLowerBytes));
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
