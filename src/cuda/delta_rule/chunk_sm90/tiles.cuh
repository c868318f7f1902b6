// The sizes and the tiles in shared memory that the kernels of chunk_sm90 have in common.
#pragma once

#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/panel_tile.cuh"

namespace fastweight::cuda::chunk_sm90 {

using chunk_16bit::ChunkArgs;
using chunk_16bit::kChunkRows;

inline constexpr int kGroupThreads = 128, kGroupWarps = 4;  // of a warpgroup
inline constexpr int kGroupColumns = 64;                    // of values, that one has of a state
inline constexpr int kTokenSteps = kChunkRows / 16, kKeySteps = kWidth / 16;
inline constexpr int kTokenTiles = kChunkRows / 8, kKeyTiles = kWidth / 8;

using KeyTile = PanelTile<kChunkRows, kWidth>;                 // k and q
using LowerTile = PanelTile<kChunkRows, kChunkRows>;           // J and sP
using ValueTile = PanelTile<kChunkRows, kGroupColumns>;        // a warpgroup's columns of v and o
using StateTile = PanelTile<kGroupColumns, kWidth>;            // .. of S^T or its gradient
using WritesTile = PanelTile<kGroupColumns, kChunkRows>;       // .. of R^T or Y^T
inline constexpr int kLowerBytes = LowerTile::kRowBytes * 16;  // of a row of blocks

}  // namespace fastweight::cuda::chunk_sm90
