// What the CUDA backend offers to `ops` for the TTT-linear family, most special first. Empty in a build without CUDA.
#pragma once

#include <span>

#include "core/implementation.h"
#include "core/ttt_linear_problem.h"

namespace fastweight::cuda {

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list();
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list();
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list();

}  // namespace fastweight::cuda
