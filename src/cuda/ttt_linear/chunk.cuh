// The mini-batch form: its arguments, its shared memory, and the choice of its shape. The kernel is in chunk_fwd.cuh,
// the entry point in chunk_fwd.cu.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/ttt_linear/device_problem.h"
#include "fastweight/context.h"

namespace fastweight::cuda::ttt {

inline constexpr int kWarpColumns = 16;
inline constexpr int kFewestStages = 2, kMostStages = 4;  // mini-batches in shared memory

struct ChunkArgs {
  DeviceProblem problem;
  bool vectors = false;  // rows of q, k and v can be copied in 16-byte pieces
  DeviceTensor o;
  DeviceStates initial_state, final_state;
  DeviceTensor initial_state_bias, final_state_bias;
};

// The operands of one mini-batch; rows beyond its tokens are 0.
template <int kD, int kC>
struct Stage {
  alignas(128) uint16_t rows[3][kC * kD];
  alignas(16) float eta[kC];

  __device__ SharedTile<kD> q() { return {rows[0]}; }
  __device__ SharedTile<kD> k() { return {rows[1]}; }
  __device__ SharedTile<kD> v() { return {rows[2]}; }
};

// Two numbers of every row by every warp; 0 of warps that D does not need.
template <int kD, int kC>
using RowSums = float2[kC][kD / kWarpColumns];

template <int kD, int kC>
struct Exchange {
  static constexpr int kPitchOfP = 64;
  alignas(128) uint16_t P[2][kC * kPitchOfP];
  // Mean, and squared distances from it, of the warp's columns of z and of y; sums of the inner gradient.
  alignas(16) RowSums<kD, kC> sums[3];

  __device__ RowSums<kD, kC>& inner() { return sums[0]; }
  __device__ RowSums<kD, kC>& outer() { return sums[1]; }
  __device__ RowSums<kD, kC>& gradient() { return sums[2]; }
};

template <int kD, int kC>
constexpr size_t shared_bytes(int stages) {
  return sizeof(Exchange<kD, kC>) + static_cast<size_t>(stages) * sizeof(Stage<kD, kC>);
}

// Calls body.template operator()<kD, kC>() for the padded width and the mini-batch of a problem.
template <class Body>
void with_shape(int64_t D, int32_t C, const Body& body) {
  const auto with_width = [&]<int kD>() {
    if (C == 16) {
      body.template operator()<kD, 16>();
    } else if (C == 32) {
      body.template operator()<kD, 32>();
    } else {
      body.template operator()<kD, 64>();
    }
  };
  if (D <= 64) {
    with_width.template operator()<64>();
  } else {
    with_width.template operator()<128>();
  }
}

// For bf16 and fp16, a file each.
template <DType kType>
void launch_chunk(const ChunkArgs& args, const Context& context);

}  // namespace fastweight::cuda::ttt
