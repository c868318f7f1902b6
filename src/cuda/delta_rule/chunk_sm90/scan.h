// What the host gives the kernels of chunk_sm90.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_sm90/segments.h"
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

// What keeps the kernels of either direction from a problem: the device, or K and V; empty if nothing does.
std::string declines_widths(const DeltaRuleSizes& sizes, int device);

// Value columns of a block of a scan.
int scan_columns(int64_t heads, int device);

// .. of a scan forward, which may have segments for sequences.
int forward_columns(const ForwardArgs& args, int device);

// Of the chunks of a launch. `o` absent: only states are wanted.
ScanMaps scan_maps(const DeltaRuleInputs& in, const TensorView& o, const chunk_16bit::ChunkArgs& args);

// Warpgroups in a block of the factors, each with pairs of its own.
constexpr int factor_groups(bool with_sP) { return with_sP ? 4 : 6; }

// In which order the factors are made of the pairs of a chunk of the window and a key head, and by whom.
struct FactorOrder {
  bool with_sP = true;  // else the scan makes it, and q is not read
  int pairs = 0;
  int rows = 1;         // of the batch, whose chunks take turns
  int blocks = 0;       // one for a multiprocessor
  int first = 0;        // pairs that all blocks share; the others are left to
  int late_blocks = 0;  // so many, the first ones
  // Flags of the items, set when their factors can be read. Absent: the scan begins when all are there.
  uint32_t* ready = nullptr;
};

// One after the other, by all multiprocessors.
FactorOrder one_by_one(const chunk_16bit::ChunkArgs& args, bool with_sP, int multiprocessors);

// Of shared memory in a block, the widest.
size_t factors_bytes(bool with_sP);
size_t scan_bytes();

// The factors of all items, pairs of a chunk of the window and a value head, in one launch.
void launch_factors(const chunk_16bit::ChunkArgs& args, const ScanMaps& maps, const FactorOrder& order,
                    const Context& context);

// The factors that chunk_16bit would make, and any backward, of the problems that the kernel takes. One choice for all: what
// a forward of chunk_sm90 scans or keeps has the bits of what its backward makes again.
bool takes_head_factors(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes);
void launch_head_factors(const DeltaRuleInputs& in, const chunk_16bit::ChunkArgs& args, const Context& context);

// The scan forward, of blocks with 64 or 128 value columns, with the factors that were made in this order: one launch, or,
// where sequences are cut into segments, three. For bf16 and fp16, a file each.
template <DType kType>
void launch_scan(const ForwardArgs& args, const ScanMaps& maps, int columns, const FactorOrder& order,
                 const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
