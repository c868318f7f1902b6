// The forward kernel's arguments and launch: the call's own, and the first pass of the backward, which has no outputs
// and keeps the states.
#pragma once

#include "cuda/ttt_linear/chunk_fp32/mini_batch.cuh"

namespace fastweight::cuda::ttt::chunk_fp32 {

struct ForwardArgs {
  DeviceProblem problem;
  DeviceTensor o;
  DeviceStates initial_state, final_state;
  DeviceTensor initial_state_bias, final_state_bias;
  KeptStates kept;
  float* scratch = nullptr;    // of all blocks, where their matrices do not fit into shared memory
  int64_t scratch_floats = 0;  // of a block
};

// args.scratch is the launch's own where the configuration asks for it.
void launch_forward(const Config& config, ForwardArgs args, const Context& context);

// The memory of this block: shared, or its part of the scratch memory.
__device__ __forceinline__ float* block_memory(float* scratch, int64_t floats) {
  return scratch == nullptr ? &dynamic_shared<float>() : scratch + blockIdx.x * floats;
}

}  // namespace fastweight::cuda::ttt::chunk_fp32
