// What the CUDA backend offers to `ops` for the delta-rule family, most special first. Empty in a build without CUDA.
#pragma once

#include <span>

#include "core/delta_rule_map_problem.h"
#include "core/delta_rule_problem.h"
#include "core/implementation.h"

namespace fastweight::cuda {

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list();
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list();
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list();
std::span<const Implementation<DeltaRuleMapForwardProblem>> delta_rule_map_forward_list();
std::span<const Implementation<DeltaRuleMapBackwardProblem>> delta_rule_map_backward_list();

// How many 32-bit words a forward can keep of every chunk and value head for its backward; 0: none.
int64_t delta_rule_kept_words(Device device, Gate gate, DType dtype, int64_t head_dim_k, bool all);

}  // namespace fastweight::cuda
