// The sizes and the tiles in shared memory that the kernels of chunk_sm90 have in common.
#pragma once

#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/panel_tile.cuh"

namespace fastweight::cuda::chunk_sm90 {

using chunk_16bit::ChunkArgs;
using chunk_16bit::kChunkRows;
using chunk_16bit::kLowerElements;
using chunk_16bit::kLowerJ;
using chunk_16bit::kLowerP;
using chunk_16bit::lower_offset;
using chunk_16bit::lower_pitch;
using chunk_16bit::LowerMatrix;

inline constexpr int kGroupThreads = 128, kGroupWarps = 4;  // of a warpgroup
inline constexpr int kTokenSteps = kChunkRows / 16, kTokenTiles = kChunkRows / 8;

using LowerTile = PanelTile<kChunkRows, kChunkRows>;           // J and sP
using ValueTile = PanelTile<kChunkRows, kGroupColumns>;        // a warpgroup's columns of v and o
using WritesTile = PanelTile<kGroupColumns, kChunkRows>;       // .. of R^T or Y^T
inline constexpr int kLowerBytes = LowerTile::kRowBytes * 16;  // of a row of blocks

// Of K, padded to 64 or 128.
template <int kK>
inline constexpr int kKeySteps = kK / 16;
template <int kK>
inline constexpr int kKeyTiles = kK / 8;
template <int kK>
using KeyTile = PanelTile<kChunkRows, kK>;  // k and q
template <int kK>
using StateTile = PanelTile<kGroupColumns, kK>;  // a warpgroup's columns of S^T or its gradient

}  // namespace fastweight::cuda::chunk_sm90
