// The entry points of the CPU implementations, one trio per form.
#pragma once

#include "core/short_conv_problem.h"

namespace fastweight::cpu::short_conv {

void reference_forward(const ShortConvForwardProblem& problem, const Context& context);
void reference_backward(const ShortConvBackwardProblem& problem, const Context& context);
void reference_step(const ShortConvStepProblem& problem, const Context& context);

void direct_forward(const ShortConvForwardProblem& problem, const Context& context);
void direct_backward(const ShortConvBackwardProblem& problem, const Context& context);
void direct_step(const ShortConvStepProblem& problem, const Context& context);

}  // namespace fastweight::cpu::short_conv
