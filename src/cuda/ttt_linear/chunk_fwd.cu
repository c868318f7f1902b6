// Forward by mini-batches: what it takes, and the launch. The kernels: chunk.cuh.
#include <string>

#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk.cuh"
#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda::ttt {

std::string declines_chunk_forward(const TttLinearForwardProblem& problem) {
  const DType dtype = problem.args.in.q.dtype;
  if (dtype != DType::kBF16 && dtype != DType::kF16) return "q, k and v must be bf16 or fp16";
  size_t bytes = 0;
  with_shape(problem.sizes.head_dim, problem.args.options.mini_batch,
             [&]<int kD, int kC>() { bytes = least_shared_bytes<kD, kC>(); });
  return lacks_shared_memory(bytes, problem.args.in.q.device.index);
}

void chunk_forward(const TttLinearForwardProblem& problem, const Context& context) {
  const TttLinearForward& forward = problem.args;
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vectors = has_vectors(forward.in.q) && has_vectors(forward.in.k) && has_vectors(forward.in.v);
  args.o = device_tensor(forward.o);
  args.initial_state = device_states(forward.in.initial_state, false);
  args.final_state = device_states(forward.final_state, false);
  args.initial_state_bias = device_tensor(forward.in.initial_state_bias);
  args.final_state_bias = device_tensor(forward.final_state_bias);
  if (forward.in.q.dtype == DType::kBF16) {
    launch_chunk<DType::kBF16>(args, context);
  } else {
    launch_chunk<DType::kF16>(args, context);
  }
}

}  // namespace fastweight::cuda::ttt
