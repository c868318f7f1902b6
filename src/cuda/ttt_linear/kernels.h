// The entry points of the CUDA implementations. Each enqueues on the context's stream and returns; the context's device
// is current.
#pragma once

#include <string>

#include "core/ttt_linear_problem.h"

namespace fastweight::cuda::ttt {

// Mini-batches of 16 tokens; of 32 and 64.
void chunk_chain_forward(const TttLinearForwardProblem& problem, const Context& context);
std::string declines_chunk_chain(const TttLinearForwardProblem& problem);
void chunk_tiles_forward(const TttLinearForwardProblem& problem, const Context& context);
std::string declines_chunk_tiles(const TttLinearForwardProblem& problem);

void recurrent_forward(const TttLinearForwardProblem& problem, const Context& context);
void recurrent_step(const TttLinearStepProblem& problem, const Context& context);

}  // namespace fastweight::cuda::ttt
