// The mini-batch form: its arguments, its shared memory, and the choice of its shape. For one mini-batch with start
// state h, c (rows are tokens):
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
// Mini-batches of 16 tokens are short: chunk_fwd_chain.cuh gives the chain from state to state to warps of its own.
// Longer ones are in chunk_fwd_tiles.cuh. Both are launched by chunk_fwd.cuh, and the entry point is in chunk_fwd.cu.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/ttt_linear/device_problem.h"
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

// Of chunk_fwd_chain.cuh. What two warps with the same columns hand to each other of one mini-batch, a lane to the
// same lane: the state in 16 bits, its bias and n^T in fragments, and w (b - v + k) of rows g and g + 8.
template <int kD>
struct WarpExchange {
  uint4 h[kD / 16][kWarpSize];
  float4 c[4];
  uint4 n[kWarpSize];
  float4 residuals[2][kWarpSize];
};

template <int kD>
struct ChainShared {
  static constexpr int kStages = kD == 64 ? 6 : 4;

  Stage<kD, kTileRows> stages[kStages];
  Sums<kD, kTileRows> sums;
  WarpExchange<kD> exchange[2][kD / kWarpColumns];  // of mini-batches of even and odd number
};

// Of chunk_fwd_tiles.cuh; stages follow it.
template <int kD, int kC>
struct TilesShared {
  static constexpr int kPitchOfP = 64;
  static constexpr int kFewestStages = 2, kMostStages = 4;

  alignas(128) uint16_t P[2][kC * kPitchOfP];
  Sums<kD, kC> sums;

  static constexpr size_t bytes(int stages) {
    return sizeof(TilesShared) + static_cast<size_t>(stages) * sizeof(Stage<kD, kC>);
  }
};

template <int kD, int kC>
constexpr size_t least_shared_bytes() {
  if constexpr (kC == kTileRows) {
    return sizeof(ChainShared<kD>);
  } else {
    return TilesShared<kD, kC>::bytes(TilesShared<kD, kC>::kFewestStages);
  }
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
