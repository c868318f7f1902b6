// The entry points of the CPU implementations, one trio per form.
#pragma once

#include "core/ttt_linear_problem.h"

namespace fastweight::cpu::ttt {

void reference_forward(const TttLinearForwardProblem& problem, const Context& context);
void reference_backward(const TttLinearBackwardProblem& problem, const Context& context);
void reference_step(const TttLinearStepProblem& problem, const Context& context);

void chunk_forward(const TttLinearForwardProblem& problem, const Context& context);
void chunk_backward(const TttLinearBackwardProblem& problem, const Context& context);
void chunk_step(const TttLinearStepProblem& problem, const Context& context);

}  // namespace fastweight::cpu::ttt
