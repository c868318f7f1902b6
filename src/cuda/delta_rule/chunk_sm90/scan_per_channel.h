// What the host gives the scan of chunk_sm90 where decays are per channel.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_sm90/scan.h"

namespace fastweight::cuda::chunk_sm90 {

struct ChannelScanMaps {
  TensorMap keys;   // copies_map
  TensorMap v, o;   // token_map with boxes of 64 x 64
  TensorMap J, sP;  // lower_map
  TensorMap S;      // chunk_states_map, where launch_channel_scan finds that there is one
};

// Of the chunks of a launch. `o` absent: only states are wanted.
ChannelScanMaps channel_scan_maps(const DeltaRuleInputs& in, const TensorView& o, const chunk_16bit::ChunkArgs& args);

size_t channel_scan_bytes(int padded_k);  // of shared memory in the largest block

// Whether the states before chunks are wanted, in the type of the operands and an order that a map can have.
bool has_states_map(const ForwardArgs& args);
// Their rows of K numbers, in boxes of 64 numbers of 64 value columns of one head and chunk.
TensorMap chunk_states_map(const ForwardArgs& args);

// As launch_scan of scan.h, K up to 64 always with 64 columns. For bf16 and fp16, a file each.
template <DType kType>
void launch_channel_scan(const ForwardArgs& args, const ChannelScanMaps& maps, int columns, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
