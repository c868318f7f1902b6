// What the CUDA backend offers to `ops` for the TTT-linear family, most special first. Empty in a build without CUDA.
#pragma once

#include <span>

#include "core/implementation.h"
#include "core/ttt_linear_problem.h"

namespace fastweight::cuda {

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list();
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list();
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list();

// See fastweight/ttt_linear.h.
int64_t ttt_linear_kept_words(Device device, const TttLinearOptions& options, DType dtype, int64_t head_dim);

}  // namespace fastweight::cuda
