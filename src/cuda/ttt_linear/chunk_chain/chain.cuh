// Shared memory of the chain kernel, and its launch.
#pragma once

#include "cuda/ttt_linear/chunk.cuh"
#include "cuda/ttt_linear/chunk_chain/config.h"

namespace fastweight::cuda::ttt {

// What two warps with the same columns hand to each other of one mini-batch, a lane to the same lane: the state in 16
// bits, its bias and n^T in fragments, and w (b - v + k) of rows g and g + 8.
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

// Where partners are single warps with a mini-batch each, kernel_solo.cuh.
inline constexpr int kSoloDim = 64, kSolos = 4;

struct SoloChainShared {
  Stage<kSoloDim, kTileRows> stages[kSolos][2];  // of the mini-batch in hand and of the next one
  WarpExchange<kSoloDim> exchange[kSolos][kSoloDim / kWarpColumns];
  Sums<kSoloDim, kTileRows> sums;
  alignas(16) float w[kSoloDim], b[kSoloDim];
};

// The caller's states, if there are any.
template <class Problem>
KeptTiles kept_tiles(const Problem& problem) {
  return {static_cast<int32_t*>(problem.args.kept.data), chain_config(problem.sizes.head_dim).padded_dim};
}

// For bf16 and fp16, a file each.
template <DType kType>
void launch_chain(const ChainConfig& config, const ChunkArgs& args, const Context& context);

}  // namespace fastweight::cuda::ttt
