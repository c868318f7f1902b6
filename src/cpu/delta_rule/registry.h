// What the CPU backend offers to `ops` for the delta-rule family and, with another correction in the problem, for the
// families related to it (GLA, Comba, DPLR), most special first. The last entry, the reference, takes every valid
// problem. Forward and step are the same lists for all; the recurrent backward knows the delta rule alone.
#pragma once

#include <span>

#include "core/delta_rule_map_problem.h"
#include "core/delta_rule_problem.h"
#include "core/implementation.h"

namespace fastweight::cpu {

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list();
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list();
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list();
std::span<const Implementation<DeltaRuleMapForwardProblem>> delta_rule_map_forward_list();
std::span<const Implementation<DeltaRuleMapBackwardProblem>> delta_rule_map_backward_list();

std::span<const Implementation<DeltaRuleBackwardProblem>> related_backward_list();

}  // namespace fastweight::cpu
