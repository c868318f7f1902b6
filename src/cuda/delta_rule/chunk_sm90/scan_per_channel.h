// What the host gives the scan of chunk_sm90 where decays are per channel.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_sm90/scan.h"

namespace fastweight::cuda::chunk_sm90 {

struct ChannelScanMaps {
  TensorMap keys;  // copies_map
  TensorMap v, o;  // token_map with boxes of 64 x 64
  LowerMaps lower;
  TensorMap S;  // states_map with boxes of 64 columns, if the states before the chunks have one
  bool has_states = false;
};

// Of the chunks of a launch. `o` absent: only states are wanted.
ChannelScanMaps channel_scan_maps(const DeltaRuleInputs& in, const TensorView& o, const chunk_16bit::ChunkArgs& args);

size_t channel_scan_bytes(int padded_k);  // of shared memory in the largest block

// As launch_scan of scan.h, K up to 64 or above 128 always with 64 columns. For bf16 and fp16, a file each.
template <DType kType>
void launch_channel_scan(const ForwardArgs& args, const ChannelScanMaps& maps, int columns, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
