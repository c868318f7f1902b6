// The entry points of the CPU implementations, one pair or trio per file of the same name.
#pragma once

#include "core/delta_rule_map_problem.h"
#include "core/delta_rule_problem.h"

namespace fastweight::cpu {

void reference_forward(const DeltaRuleForwardProblem& problem, const Context& context);
void reference_backward(const DeltaRuleBackwardProblem& problem, const Context& context);
void reference_step(const DeltaRuleStepProblem& problem, const Context& context);

void recurrent_forward(const DeltaRuleForwardProblem& problem, const Context& context);
void recurrent_backward(const DeltaRuleBackwardProblem& problem, const Context& context);
void recurrent_step(const DeltaRuleStepProblem& problem, const Context& context);

void chunk_forward(const DeltaRuleForwardProblem& problem, const Context& context);
void chunk_backward(const DeltaRuleBackwardProblem& problem, const Context& context);

void reference_map_forward(const DeltaRuleMapForwardProblem& problem, const Context& context);
void reference_map_backward(const DeltaRuleMapBackwardProblem& problem, const Context& context);

void chunk_map_forward(const DeltaRuleMapForwardProblem& problem, const Context& context);
void chunk_map_backward(const DeltaRuleMapBackwardProblem& problem, const Context& context);

}  // namespace fastweight::cpu
