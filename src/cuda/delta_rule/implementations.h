// The entry points of the CUDA implementations, one pair per file of the same name. Each enqueues on the context's
// stream and returns; the context's device is current.
#pragma once

#include <string>

#include "ops/delta_rule_problem.h"

namespace fastweight::cuda {

void chunk_forward(const DeltaRuleForwardProblem& problem, const Context& context);
std::string declines_chunk_forward(const DeltaRuleForwardProblem& problem);
void recurrent_forward(const DeltaRuleForwardProblem& problem, const Context& context);
void recurrent_step(const DeltaRuleStepProblem& problem, const Context& context);

}  // namespace fastweight::cuda
