// dw and db of a call from those of its sequences.
#pragma once

#include "cuda/ttt_linear/device_problem.h"
#include "fastweight/context.h"

namespace fastweight::cuda::ttt {

// sums: [N, H, 2, D], dw and db of every head of every sequence. Writes dw and db, [H, D], where they are present.
void add_parameter_sums(const double* sums, const DeviceProblem& problem, const DeviceTensor& dw,
                        const DeviceTensor& db, const Context& context);

}  // namespace fastweight::cuda::ttt
