// The entry points of the CUDA implementations. Each enqueues on the context's stream and returns; the context's device
// is current.
#pragma once

#include "core/short_conv_problem.h"

namespace fastweight::cuda::short_conv {

void direct_forward(const ShortConvForwardProblem& problem, const Context& context);
void direct_backward(const ShortConvBackwardProblem& problem, const Context& context);
void direct_step(const ShortConvStepProblem& problem, const Context& context);

}  // namespace fastweight::cuda::short_conv
