// What the CPU backend offers to `ops` for the short convolution, most special first. The last entry, the reference,
// takes every valid problem.
#pragma once

#include <span>

#include "core/implementation.h"
#include "core/short_conv_problem.h"

namespace fastweight::cpu {

std::span<const Implementation<ShortConvForwardProblem>> short_conv_forward_list();
std::span<const Implementation<ShortConvBackwardProblem>> short_conv_backward_list();
std::span<const Implementation<ShortConvStepProblem>> short_conv_step_list();

}  // namespace fastweight::cpu
