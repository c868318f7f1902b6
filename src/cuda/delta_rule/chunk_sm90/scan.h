// What the host gives the scan of chunk_sm90.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda::chunk_sm90 {

inline constexpr int kWidth = 128;  // of K and V, padded
inline constexpr int kStages = 3;   // chunks in shared memory

struct ScanMaps {
  TensorMap k, q, v, o;  // token_map with boxes of 64 x 64
  TensorMap J, sP;       // lower_map
};

// The matrices J or sP of `items` pairs of a chunk and a value head, [items][64][64], of which only the blocks of 16 on
// and below the diagonal were written. A box is 16 rows; as in token_map, two dimensions go along the columns, and the
// place along one says how many columns there are, counted from its end:
//
//     {64 - 16 (block + 1), block, 16 block, item}      rows [16 block, +16): columns below 16 (block + 1), then zeros
TensorMap lower_map(const uint16_t* matrices, DType dtype, int64_t items);

// Of the chunks of a launch. `o` absent: only states are wanted.
ScanMaps scan_maps(const DeltaRuleInputs& in, const TensorView& o, const chunk_16bit::ChunkArgs& args);

// Value columns of a block, for so many heads of all sequences.
int scan_columns(int64_t heads, int device);

size_t scan_bytes();  // of shared memory in the widest block

// One launch, of blocks with 64 or 128 value columns. For bf16 and fp16, a file each.
template <DType kType>
void launch_scan(const chunk_16bit::ChunkArgs& args, const ScanMaps& maps, int columns, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
