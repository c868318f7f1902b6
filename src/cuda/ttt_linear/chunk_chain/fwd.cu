// Forward by mini-batches of 16 tokens: what it takes, its configuration, and the launch.
#include <string>

#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk_chain/chain.cuh"
#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda::ttt {
namespace {

ChainConfig config_of(const TttLinearForwardProblem& problem) {
  const int device = problem.args.in.q.device.index;
  return forward_config(problem.sizes.head_dim,
                        static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
}

}  // namespace

ChainConfig chain_config(int64_t head_dim) {
  ChainConfig config;
  with_padded_dim(head_dim, [&]<int kD>() {
    config.padded_dim = kD;
    config.full = head_dim == kD;
    config.shared_bytes = sizeof(ChainShared<kD>);
  });
  config.threads = 2 * column_warps(head_dim) * kWarpSize;
  return config;
}

ChainConfig forward_config(int64_t head_dim, size_t shared_limit) {
  ChainConfig config = chain_config(head_dim);
  if (head_dim != kSoloDim || sizeof(SoloChainShared) > shared_limit) return config;
  config.solo = true;
  config.threads = 2 * kSoloDim + kSolos * kWarpSize;
  config.shared_bytes = sizeof(SoloChainShared);
  return config;
}

int64_t kept_words(Device device, const TttLinearOptions& options, DType dtype, int64_t head_dim) {
  const ChainConfig config = chain_config(head_dim);
  const bool takes = (dtype == DType::kBF16 || dtype == DType::kF16) && options.mini_batch == kTileRows &&
                     lacks_shared_memory(config.shared_bytes, device.index).empty();
  return takes ? KeptTiles::words(config.padded_dim) : 0;
}

std::string declines_chunk_chain(const TttLinearForwardProblem& problem) {
  if (const std::string reason = beyond_all_kernels(problem); !reason.empty()) return reason;
  const TensorView& q = problem.args.in.q;
  const int32_t mini_batch = problem.args.options.mini_batch;
  if (q.dtype != DType::kBF16 && q.dtype != DType::kF16) return "q, k and v must be bf16 or fp16";
  if (mini_batch != kTileRows) return "takes mini-batches of 16 tokens, got " + std::to_string(mini_batch);
  return lacks_shared_memory(chain_config(problem.sizes.head_dim).shared_bytes, q.device.index);
}

std::string chunk_chain_config(const TttLinearForwardProblem& problem) { return config_of(problem).text(); }

void chunk_chain_forward(const TttLinearForwardProblem& problem, const Context& context) {
  const ChainConfig config = config_of(problem);
  ChunkArgs args = chunk_args(problem);
  args.kept = kept_tiles(problem);
  if (args.problem.q.dtype == DType::kBF16) {
    launch_chain<DType::kBF16>(config, args, context);
  } else {
    launch_chain<DType::kF16>(config, args, context);
  }
}

}  // namespace fastweight::cuda::ttt
