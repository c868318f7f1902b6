// The entry points of the CUDA implementations. Each enqueues on the context's stream and returns; the context's device
// is current.
#pragma once

#include <string>

#include "core/ttt_linear_problem.h"

namespace fastweight::cuda::ttt {

void chunk_forward(const TttLinearForwardProblem& problem, const Context& context);
std::string declines_chunk_forward(const TttLinearForwardProblem& problem);
void recurrent_forward(const TttLinearForwardProblem& problem, const Context& context);
void recurrent_step(const TttLinearStepProblem& problem, const Context& context);

}  // namespace fastweight::cuda::ttt
