// The factors of the chunk form where decays are per channel, on Hopper: what the forward of chunk_sm90, and chunk_16bit in
// both directions, make of the problems that it takes. One choice for all of them: what a forward keeps has the bits of what
// its backward would make again.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_sm90/beside.h"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda::chunk_sm90 {

struct FactorMaps {
  TensorMap k, q, g;          // token_map with boxes of 64 x 64
  TensorMap copies;           // copies_map
  bool has_g = false;         // the gates have the type of the keys, and such a map
  bool from_the_end = false;  // the last chunks of the window first
};

// The copies of the keys of `items` pairs of a chunk and a value head, [items][3][64][padded K], in boxes of 64 x 64:
// {column, 0, KeyCopy, item}.
TensorMap copies_map(const uint16_t* copies, DType dtype, int padded_k, int64_t items);

// Pairs of a chunk and a value head that there is scratch memory for.
int64_t count_items(const chunk_16bit::ChunkArgs& args);
int64_t count_copies(const chunk_16bit::ChunkArgs& args);

// Pairs that a multiprocessor works on.
constexpr int channel_factor_teams(int padded_k) { return padded_k == 64 ? 4 : 3; }

bool takes_channel_factors(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes);
// `from_the_end`: the last chunks of the window first, for who goes on with the first ones.
void launch_channel_factors(const DeltaRuleInputs& in, const chunk_16bit::ChunkArgs& args, bool from_the_end,
                            const Context& context);

// The same beside a scan (beside.h): the first pairs by a launch as above, the others by one of `plan.beside` blocks, which the
// scan overlaps with. Flags of all pairs, heads first, then rows of the batch, then chunks of a row, say what is there.
bool makes_channel_factors_beside(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes);
void launch_channel_factors_beside(const DeltaRuleInputs& in, const chunk_16bit::ChunkArgs& args,
                                   const BesidePlan& plan, uint32_t* flags, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
