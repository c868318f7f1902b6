// What the host gives the kernels of chunk_sm90.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_sm90/segments.h"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda::chunk_sm90 {

// Kernels have K padded to 64, 128 or 256: gradients, and factors with a decay per channel, only up to 128.
inline constexpr int kMostK = 128, kMostScanK = 256;

// Value columns that a warpgroup has of a state.
inline constexpr int kGroupColumns = 64;

// Chunks in the shared memory of a scan for a padded K.
constexpr int scan_stages(int padded_k) { return padded_k == 128 ? 3 : 2; }

// J and sP of `items` pairs of a chunk and a value head, [items][2][kLowerElements]: a map for each of the four rows of
// blocks, of boxes of 16 rows and 64 columns. Those above the diagonal are beyond the rows, which are dense: a load brings
// zeros for them, a store leaves them out.
//
//     rows[block] {0, 0, matrix, item}      rows [16 block, +16) of J or sP, by LowerMatrix
struct LowerMaps {
  TensorMap rows[chunk_16bit::kChunkRows / 16];
};
LowerMaps lower_maps(const uint16_t* lower, DType dtype, int64_t items);

struct ScanMaps {
  TensorMap k, q, v, o;  // token_map with boxes of 64 x 64
  LowerMaps lower;
  TensorMap states;  // states_map with boxes of 64 columns, if the states before the chunks have one
  bool has_states = false;
};

// States before chunks, in boxes of `columns` and 64 channels: {channel, column, head, chunk, batch}. Their rows have `width`
// channels in pieces of 16 bytes, and no stride is negative.
TensorMap states_map(const DeviceStates& states, int width, const chunk_16bit::ChunkArgs& args, int columns);
// Whether the states that a forward saves have one.
bool have_states_map(const chunk_16bit::ChunkArgs& args);

// What keeps the kernels of either direction from a device; empty if nothing does.
std::string declines_device(int device);

// Value columns of a block of a scan over sequences or segments.
int scan_columns(const DeltaRuleSizes& sizes, const ScanArgs& args, int device);
// Blocks of a scan over sequences.
inline int64_t count_blocks(const DeltaRuleSizes& sizes, int columns) {
  return sizes.num_sequences * sizes.num_value_heads * ((sizes.head_dim_v + columns - 1) / columns);
}

// Of the chunks of a launch. `o` absent: only states are wanted.
ScanMaps scan_maps(const DeltaRuleInputs& in, const TensorView& o, const chunk_16bit::ChunkArgs& args);

// Warpgroups in a block of the factors, each with pairs of its own: as many as registers allow or, with K above 128, shared
// memory.
constexpr int factor_groups(int padded_k, bool with_sP) { return padded_k == 256 ? 2 : with_sP ? 4 : 6; }

// How the factors are made of the pairs of a chunk of the window and a key head.
struct FactorOrder {
  bool with_sP = true;  // else the scan makes it, and q is not read
  int pairs = 0;
  int rows = 1;    // of the batch, whose chunks take turns
  int blocks = 0;  // which take one pair after the other
  // Beside a scan (beside.h): pairs from `before` on are left to the first `beside` blocks, and all have flags.
  int before = 0, beside = 0;
  uint32_t* flags = nullptr;
};

FactorOrder factor_order(const chunk_16bit::ChunkArgs& args, bool with_sP, int multiprocessors);

// Of shared memory in a block, the widest. With K above 128 there is none that leaves sP out.
size_t factors_bytes(int padded_k, bool with_sP);
size_t scan_bytes(int padded_k);

// The factors of all items, pairs of a chunk of the window and a value head, in one launch.
void launch_factors(const chunk_16bit::ChunkArgs& args, const ScanMaps& maps, const FactorOrder& order,
                    const Context& context);

// The factors that chunk_16bit would make, and any backward, of the problems that the kernel takes. One choice for all: what
// a forward of chunk_sm90 scans or keeps has the bits of what its backward makes again.
bool takes_head_factors(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes);
void launch_head_factors(const DeltaRuleInputs& in, const chunk_16bit::ChunkArgs& args, const Context& context);

// The scan forward, of blocks with 64 or 128 value columns, with K up to 64 or above 128 always 64, with factors
// with sP or, for blocks of 128, without. One launch, or, where sequences are cut into segments, three. For bf16 and fp16, a
// file each.
template <DType kType>
void launch_scan(const ForwardArgs& args, const ScanMaps& maps, int columns, bool with_sP, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
