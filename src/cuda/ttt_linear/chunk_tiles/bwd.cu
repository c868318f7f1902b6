// Backward by mini-batches of 32 or 64 tokens: the states are those of the forward on tensor cores, the way back is that
// of chunk_fp32.
#include <string>

#include "core/workspace.h"
#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk_tiles/tiles.cuh"
#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda::ttt {
namespace {

TilesConfig config_of(const TttLinearBackwardProblem& problem) {
  const int device = problem.args.in.q.device.index;
  return tiles_config(problem.sizes.head_dim, problem.args.options.mini_batch,
                      static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
}

void take_scratch(ScratchLayout& layout, const DeviceProblem& p, KeptTiles& kept) {
  const int64_t count = most_mini_batches(p.sequences, p.mini_batch) * p.num_heads;
  kept.data = layout.take<int32_t>(count * KeptTiles::words(kept.padded_dim));
}

}  // namespace

// What the forward declines.
std::string declines_chunk_tiles_backward(const TttLinearBackwardProblem& problem) {
  if (const std::string reason = beyond_all_kernels(problem); !reason.empty()) return reason;
  const TensorView& q = problem.args.in.q;
  const int32_t mini_batch = problem.args.options.mini_batch;
  if (q.dtype != DType::kBF16 && q.dtype != DType::kF16) return "q, k and v must be bf16 or fp16";
  if (mini_batch == kTileRows) return "takes mini-batches of 32 or 64 tokens, got " + std::to_string(mini_batch);
  return lacks_shared_memory(config_of(problem).shared_bytes, q.device.index);
}

std::string chunk_tiles_backward_config(const TttLinearBackwardProblem& problem) {
  return "in fp32, " + chunk_fp32_backward_config(problem);
}

void chunk_tiles_backward(const TttLinearBackwardProblem& problem, const Context& context) {
  const TttLinearInputs& in = problem.args.in;
  const TilesConfig config = config_of(problem);
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vectors = has_vectors(in.k) && has_vectors(in.v);
  args.initial_state = device_states(in.initial_state, false);
  args.initial_state_bias = device_tensor(in.initial_state_bias);
  KeptTiles kept;
  kept.padded_dim = config.padded_dim;
  ScratchLayout measure;
  take_scratch(measure, args.problem, kept);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  take_scratch(layout, args.problem, kept);
  if (in.q.dtype == DType::kBF16) {
    launch_tile_states<DType::kBF16>(config, args, kept, context);
  } else {
    launch_tile_states<DType::kF16>(config, args, kept, context);
  }
  backward_in_fp32(problem, kept, context);
}

}  // namespace fastweight::cuda::ttt
