// The factors of chunk_sm90 where decays are per channel, in one launch, and the shared memory that a block takes.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_sm90/scan.h"

namespace fastweight::cuda::chunk_sm90 {

struct FactorMaps {
  TensorMap k, q, g;   // token_map with boxes of 64 x 64
  TensorMap copies;    // as ChannelScanMaps::keys
  bool has_g = false;  // the gates have the type of the keys, and such a map
};

// Of the chunks of a launch.
FactorMaps factor_maps(const DeltaRuleInputs& in, const chunk_16bit::ChunkArgs& args);

void launch_channel_factors(const chunk_16bit::ChunkArgs& args, const FactorMaps& maps, const Context& context);
size_t channel_factors_bytes();

}  // namespace fastweight::cuda::chunk_sm90
