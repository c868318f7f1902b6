// What the CPU backend offers to `ops` for the TTT-linear family, most special first. The last entry, the reference,
// takes every valid problem.
#pragma once

#include <span>

#include "core/implementation.h"
#include "core/ttt_linear_problem.h"

namespace fastweight::cpu {

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list();
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list();
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list();

}  // namespace fastweight::cpu
