// The entry points of the CUDA implementations. Each enqueues on the context's stream and returns; the context's device
// is current.
#pragma once

#include <string>

#include "core/ttt_linear_problem.h"
#include "cuda/decline_reasons.h"
#include "cuda/ttt_linear/kept_states.h"

namespace fastweight::cuda::ttt {

// What no kernel of the family takes.
template <class Problem>
std::string beyond_all_kernels(const Problem& problem) {
  const std::string reason = no_fp64(problem);
  return reason.empty() ? too_many_heads(problem.sizes.num_heads) : reason;
}

// Mini-batches of 16 tokens, then of 32 and 64: tensor cores with 16-bit operands.
// The first of them keeps its states where it is told to: words of a state, or 0.
int64_t kept_words(Device device, const TttLinearOptions& options, DType dtype, int64_t head_dim);
void chunk_chain_forward(const TttLinearForwardProblem& problem, const Context& context);
std::string declines_chunk_chain(const TttLinearForwardProblem& problem);
std::string chunk_chain_config(const TttLinearForwardProblem& problem);
void chunk_chain_backward(const TttLinearBackwardProblem& problem, const Context& context);
std::string declines_chunk_chain_backward(const TttLinearBackwardProblem& problem);
std::string chunk_chain_backward_config(const TttLinearBackwardProblem& problem);
void chunk_tiles_forward(const TttLinearForwardProblem& problem, const Context& context);
std::string declines_chunk_tiles(const TttLinearForwardProblem& problem);
std::string chunk_tiles_config(const TttLinearForwardProblem& problem);
void chunk_tiles_backward(const TttLinearBackwardProblem& problem, const Context& context);
std::string declines_chunk_tiles_backward(const TttLinearBackwardProblem& problem);
std::string chunk_tiles_backward_config(const TttLinearBackwardProblem& problem);

// What the forwards that keep nothing decline.
inline std::string keeps_nothing(const TttLinearForwardProblem& problem) {
  if (problem.args.kept.present()) return "keeps no states for a backward";
  return beyond_all_kernels(problem);
}

// By mini-batches of any length in fp32, on the multiply-add units.
void chunk_fp32_forward(const TttLinearForwardProblem& problem, const Context& context);
std::string chunk_fp32_forward_config(const TttLinearForwardProblem& problem);
void chunk_fp32_backward(const TttLinearBackwardProblem& problem, const Context& context);
std::string chunk_fp32_backward_config(const TttLinearBackwardProblem& problem);
// The same from states that another forward has kept; without them it makes its own.
void backward_in_fp32(const TttLinearBackwardProblem& problem, const KeptTiles& tiles, const Context& context);

// Token by token.
void recurrent_forward(const TttLinearForwardProblem& problem, const Context& context);
void recurrent_step(const TttLinearStepProblem& problem, const Context& context);

}  // namespace fastweight::cuda::ttt
