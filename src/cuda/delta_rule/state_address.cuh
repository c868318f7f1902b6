// Where the kernels of the family write states to.
#pragma once

#include <cstdint>

#include "cuda/common/sequences.h"
#include "cuda/common/tensor.h"

namespace fastweight::cuda {

// Where a state is written to, if anywhere. By value: a pointer to one of two kernel arguments would turn their fields
// into loads from memory.
struct StateAddress {
  DeviceStates states;
  int64_t offset;
  bool exists;
};

// Args have final_state, chunk_states, chunked and state_chunks, the number of chunks in chunk_states; a part has a
// sequence and a head.
template <class Args, class Part>
__device__ __forceinline__ StateAddress final_state_address(const Args& args, const Part& part, int64_t slot) {
  const DeviceStates& states = args.final_state;
  return {states, slot * states.outer_strides[0] + part.head * states.outer_strides[1], states.present()};
}

template <class Args, class Part>
__device__ __forceinline__ StateAddress final_state_address(const Args& args, const Part& part) {
  return final_state_address(args, part, part.sequence);
}

// The state before a chunk of the sequence: the chunk at `position`, or of a token there, if a chunk has `tokens`.
template <class Args, class Part>
__device__ __forceinline__ StateAddress chunk_state_address(const Args& args, const Part& part, int64_t batch,
                                                            int64_t position, int64_t tokens = 1) {
  const DeviceStates& states = args.chunk_states;
  const int64_t chunk = first_chunk_of(args.chunked, part.sequence) + position / tokens;
  const int64_t* strides = states.outer_strides;
  return {states, batch * strides[0] + chunk * strides[1] + part.head * strides[2], chunk < args.state_chunks};
}

}  // namespace fastweight::cuda
