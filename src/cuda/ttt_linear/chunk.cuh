// The mini-batch form: its equations, its arguments, and the operands of a mini-batch in shared memory. For one
// mini-batch with start state h, c (rows are tokens):
//
//     z = k h + c,   n = inner gradients of z                        over all C rows, extension rows among them
//     P = lower(scale q k^T + 1)
//     y = scale q h + c - eta (P n),   o = y + w LN(y) + b           real rows
//     h = h - eta_L k^T n,   c = c - eta_L sum n
//
// A block has one (sequence, head) for all its mini-batches, a warp 16 columns of everything. The state stays in the
// warp's registers, as C tiles of h^T in fp32. Rounded to 16 bits these registers are the right operands of k h and q h
// as they lie; n, transposed 8 x 8 within the warp, is both the left operand of n^T k and the right one of P n. The
// 16-bit operands are q, k, v, P, n and h; everything else is fp32. The norms couple the columns, so the warps exchange
// row sums through shared memory.
//
// Mini-batches of 16 tokens are short: chunk_chain gives the chain from state to state to warps of its own. Longer ones
// are chunk_tiles. A folder has the choice of its configuration (config.h), the kernel (kernel.cuh), the entry point
// (fwd.cu) and the instantiations.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/ttt_linear/device_problem.h"
#include "cuda/ttt_linear/kept_states.h"
#include "fastweight/context.h"

namespace fastweight::cuda::ttt {

inline constexpr int kWarpColumns = 16;
inline constexpr int kTileRows = 16;  // tokens of an A fragment

struct ChunkArgs {
  DeviceProblem problem;
  bool vectors = false;  // rows of q, k and v can be copied in 16-byte pieces
  DeviceTensor o;
  DeviceStates initial_state, final_state;
  DeviceTensor initial_state_bias, final_state_bias;
  KeptTiles kept;  // where the states before the mini-batches go, if anywhere
};

inline ChunkArgs chunk_args(const TttLinearForwardProblem& problem) {
  const TttLinearForward& forward = problem.args;
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vectors = has_vectors(forward.in.q) && has_vectors(forward.in.k) && has_vectors(forward.in.v);
  args.o = device_tensor(forward.o);
  args.initial_state = device_states(forward.in.initial_state, false);
  args.final_state = device_states(forward.final_state, false);
  args.initial_state_bias = device_tensor(forward.in.initial_state_bias);
  args.final_state_bias = device_tensor(forward.final_state_bias);
  return args;
}

// The widths of the kernels: D is rounded up to one of them. Calls body.template operator()<kD>().
template <class Body>
void with_padded_dim(int64_t head_dim, const Body& body) {
  if (head_dim <= 64) {
    body.template operator()<64>();
  } else {
    body.template operator()<128>();
  }
}

// Warps that D needs.
inline int column_warps(int64_t head_dim) { return static_cast<int>((head_dim + kWarpColumns - 1) / kWarpColumns); }

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

// Mean and variance of the warp's columns of z and of y; sums of the inner gradient.
template <int kD, int kC>
struct Sums {
  alignas(16) RowSums<kD, kC> inner, outer, gradient;

  // By all threads of the block.
  __device__ void clear() {
    float2* all = &inner[0][0];
    for (unsigned i = threadIdx.x; i < sizeof(*this) / sizeof(float2); i += blockDim.x) all[i] = make_float2(0, 0);
  }
};

}  // namespace fastweight::cuda::ttt
