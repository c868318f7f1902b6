// The launch of the mini-batch form for one type of q, k and v.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk_fwd_chain.cuh"
#include "cuda/ttt_linear/chunk_fwd_tiles.cuh"

namespace fastweight::cuda::ttt {

template <DType kType>
void launch_chunk(const ChunkArgs& args, const Context& context) {
  const int64_t parts = args.problem.sequences.count * args.problem.num_heads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30));
  const auto threads = static_cast<unsigned>((args.problem.head_dim + kWarpColumns - 1) / kWarpColumns * kWarpSize);
  with_shape(args.problem.head_dim, args.problem.mini_batch, [&]<int kD, int kC>() {
    if constexpr (kC == kTileRows) {
      const LaunchShape shape{grid, 2 * threads, sizeof(ChainShared<kD>)};
      if (args.problem.head_dim == kD) {
        launch<chain_kernel<kType, kD, true>>("ttt_linear chunk", context, shape, args, parts);
      } else {
        launch<chain_kernel<kType, kD, false>>("ttt_linear chunk", context, shape, args, parts);
      }
    } else {
      using Shared = TilesShared<kD, kC>;
      const auto most =
          static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, context.device.index));
      int stages = Shared::kMostStages;
      while (stages > Shared::kFewestStages && Shared::bytes(stages) > most) --stages;
      launch<tiles_kernel<kType, kD, kC>>("ttt_linear chunk", context, {grid, threads, Shared::bytes(stages)}, args,
                                          stages, parts);
    }
  });
}

}  // namespace fastweight::cuda::ttt
