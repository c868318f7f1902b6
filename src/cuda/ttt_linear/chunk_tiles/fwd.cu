// Forward by mini-batches of 32 or 64 tokens: what it takes, its configuration, and the launch.
#include <string>

#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk_tiles/tiles.cuh"
#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda::ttt {
namespace {

TilesConfig config_for(const TttLinearForwardProblem& problem) {
  const int device = problem.args.in.q.device.index;
  return tiles_config(problem.sizes.head_dim, problem.args.options.mini_batch,
                      static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
}

}  // namespace

TilesConfig tiles_config(int64_t head_dim, int32_t mini_batch, size_t available_shared_bytes) {
  constexpr int kFewestStages = 2, kMostStages = 4;
  TilesConfig config;
  with_tile_shape(head_dim, mini_batch, [&]<int kD, int kC>() {
    using Shared = TilesShared<kD, kC>;
    config.padded_dim = kD;
    config.mini_batch = kC;
    config.stages = kMostStages;
    while (config.stages > kFewestStages && Shared::bytes(config.stages) > available_shared_bytes) --config.stages;
    config.shared_bytes = Shared::bytes(config.stages);
  });
  config.threads = column_warps(head_dim) * kWarpSize;
  return config;
}

std::string declines_chunk_tiles(const TttLinearForwardProblem& problem) {
  if (const std::string reason = keeps_nothing(problem); !reason.empty()) return reason;
  const TensorView& q = problem.args.in.q;
  const int32_t mini_batch = problem.args.options.mini_batch;
  if (q.dtype != DType::kBF16 && q.dtype != DType::kF16) return "q, k and v must be bf16 or fp16";
  if (mini_batch == kTileRows) return "takes mini-batches of 32 or 64 tokens, got " + std::to_string(mini_batch);
  return lacks_shared_memory(config_for(problem).shared_bytes, q.device.index);
}

std::string chunk_tiles_config(const TttLinearForwardProblem& problem) { return config_for(problem).text(); }

void chunk_tiles_forward(const TttLinearForwardProblem& problem, const Context& context) {
  const TilesConfig config = config_for(problem);
  const ChunkArgs args = chunk_args(problem);
  if (args.problem.q.dtype == DType::kBF16) {
    launch_tiles<DType::kBF16>(config, args, context);
  } else {
    launch_tiles<DType::kF16>(config, args, context);
  }
}

}  // namespace fastweight::cuda::ttt
