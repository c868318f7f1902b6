// Shared memory of the tiles kernel, and its launch.
#pragma once

#include "cuda/ttt_linear/chunk.cuh"
#include "cuda/ttt_linear/chunk_tiles/config.h"
#include "cuda/ttt_linear/kept_states.h"

namespace fastweight::cuda::ttt {

// The stages follow it.
template <int kD, int kC>
struct TilesShared {
  static constexpr int kPitchOfP = 64;

  alignas(128) uint16_t P[2][kC * kPitchOfP];
  Sums<kD, kC> sums;

  static constexpr size_t bytes(int stages) {
    return sizeof(TilesShared) + static_cast<size_t>(stages) * sizeof(Stage<kD, kC>);
  }
};

// Calls body.template operator()<kD, kC>() for the padded width and the mini-batch.
template <class Body>
void with_tile_shape(int64_t head_dim, int32_t mini_batch, const Body& body) {
  with_padded_dim(head_dim, [&]<int kD>() {
    if (mini_batch == 32) {
      body.template operator()<kD, 32>();
    } else {
      body.template operator()<kD, 64>();
    }
  });
}

// For bf16 and fp16, a file each.
template <DType kType>
void launch_tiles(const TilesConfig& config, const ChunkArgs& args, const Context& context);

// The chain alone, which keeps the state before every mini-batch.
template <DType kType>
void launch_tile_states(const TilesConfig& config, const ChunkArgs& args, const KeptTiles& kept,
                        const Context& context);

}  // namespace fastweight::cuda::ttt
