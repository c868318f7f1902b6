#include "cpu/delta_rule/registry.h"

#include <algorithm>
#include <string>

#include "cpu/decline_reasons.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/partition.h"

namespace fastweight::cpu {
namespace {

template <class Problem>
std::string no_beta_per_value(const Problem& problem) {
  if (problem.args.in.beta.rank == 4) return "beta per value channel has no chunk form";
  return no_fp64(problem);
}

bool has_long_sequence(const DeltaRuleForwardProblem& problem) {
  if (!problem.args.in.cu_seqlens.present()) return problem.sizes.tokens >= kCrossoverTokens;
  return std::any_of(problem.sequences.begin(), problem.sequences.end(),
                     [](const Sequence& s) { return s.length >= kCrossoverTokens; });
}

constexpr Implementation<DeltaRuleForwardProblem> kForward[] = {
    {"chunk", no_beta_per_value, has_long_sequence, chunk_forward},
    {"recurrent", no_fp64, always, recurrent_forward},
    {"reference", takes_all, always, reference_forward},
};
constexpr Implementation<DeltaRuleBackwardProblem> kBackward[] = {
    {"chunk", no_beta_per_value, always, chunk_backward},
    {"recurrent", no_fp64, always, recurrent_backward},
    {"reference", takes_all, always, reference_backward},
};
constexpr Implementation<DeltaRuleStepProblem> kStep[] = {
    {"recurrent", no_fp64, always, recurrent_step},
    {"reference", takes_all, always, reference_step},
};

constexpr Implementation<DeltaRuleMapForwardProblem> kMapForward[] = {
    {"chunk", no_fp64, always, chunk_map_forward},
    {"reference", takes_all, always, reference_map_forward},
};
constexpr Implementation<DeltaRuleMapBackwardProblem> kMapBackward[] = {
    {"chunk", no_fp64, always, chunk_map_backward},
    {"reference", takes_all, always, reference_map_backward},
};

constexpr Implementation<DeltaRuleBackwardProblem> kRelatedBackward[] = {
    {"chunk", no_beta_per_value, always, chunk_backward},
    {"reference", takes_all, always, reference_backward},
};

}  // namespace

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list() { return kForward; }
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list() { return kBackward; }
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list() { return kStep; }
std::span<const Implementation<DeltaRuleMapForwardProblem>> delta_rule_map_forward_list() { return kMapForward; }
std::span<const Implementation<DeltaRuleMapBackwardProblem>> delta_rule_map_backward_list() { return kMapBackward; }
std::span<const Implementation<DeltaRuleBackwardProblem>> related_backward_list() { return kRelatedBackward; }

}  // namespace fastweight::cpu
