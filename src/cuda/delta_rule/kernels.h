// The entry points of the CUDA implementations, one pair per file of the same name. Each enqueues on the context's
// stream and returns; the context's device is current.
#pragma once

#include <string>

#include "core/delta_rule_problem.h"

namespace fastweight::cuda {

// `chunk` has two forms: 16-bit operands where q, k, v and o all have one 16-bit type, beta is a number per token and a
// block finds the shared memory; fp32 for everything else.
void chunk_forward_16(const DeltaRuleForwardProblem& problem, const Context& context);
std::string declines_chunk_forward_16(const DeltaRuleForwardProblem& problem);
void chunk_forward_fp32(const DeltaRuleForwardProblem& problem, const Context& context);
std::string declines_chunk_forward_fp32(const DeltaRuleForwardProblem& problem);

void recurrent_forward(const DeltaRuleForwardProblem& problem, const Context& context);
void recurrent_step(const DeltaRuleStepProblem& problem, const Context& context);

}  // namespace fastweight::cuda
