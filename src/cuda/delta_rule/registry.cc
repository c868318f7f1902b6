#include "cuda/delta_rule/registry.h"

#include <string>

#include "cuda/decline_reasons.h"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda {
namespace {

template <class Problem>
std::string declines_recurrent(const Problem& problem) {
  const std::string reason = no_fp64(problem);
  return reason.empty() ? too_many_heads(problem.sizes.num_value_heads) : reason;
}

std::string declines_chunk_forward(const DeltaRuleForwardProblem& problem) {
  const std::string reason = declines_recurrent(problem);
  if (!reason.empty() || declines_chunk_forward_16(problem).empty()) return reason;
  return declines_chunk_forward_fp32(problem);
}

void chunk_forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  declines_chunk_forward_16(problem).empty() ? chunk_forward_16(problem, context)
                                             : chunk_forward_fp32(problem, context);
}

std::string form_of_chunk_forward(const DeltaRuleForwardProblem& problem) {
  const std::string reason = declines_chunk_forward_16(problem);
  return reason.empty() ? "with 16-bit operands" : "in fp32 (with 16-bit operands: " + reason + ")";
}

constexpr Implementation<DeltaRuleForwardProblem> kForward[] = {
    {"chunk", declines_chunk_forward, always, chunk_forward, form_of_chunk_forward},
    {"recurrent", declines_recurrent, always, recurrent_forward},
};
constexpr Implementation<DeltaRuleStepProblem> kStep[] = {
    {"recurrent", declines_recurrent, always, recurrent_step},
};

}  // namespace

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list() { return kForward; }
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list() { return {}; }
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list() { return kStep; }

}  // namespace fastweight::cuda
