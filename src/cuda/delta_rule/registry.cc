#include "cuda/delta_rule/registry.h"

#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda {
namespace {

constexpr Implementation<DeltaRuleForwardProblem> kForward[] = {
    {"chunk_16bit", chunk_16bit::declines_forward, always, chunk_16bit::forward, chunk_16bit::config_text},
    {"chunk_fp32", chunk_fp32::declines_forward, always, chunk_fp32::forward, chunk_fp32::config_text},
    {"recurrent", beyond_all_kernels, always, recurrent::forward},
};
constexpr Implementation<DeltaRuleBackwardProblem> kBackward[] = {
    {"chunk_16bit", chunk_16bit::declines_backward, always, chunk_16bit::backward, chunk_16bit::config_text},
    {"chunk_fp32", chunk_fp32::declines_backward, always, chunk_fp32::backward, chunk_fp32::config_text},
    {"recurrent", beyond_all_kernels, always, recurrent::backward},
};
constexpr Implementation<DeltaRuleStepProblem> kStep[] = {
    {"recurrent", beyond_all_kernels, always, recurrent::step},
};

constexpr Implementation<DeltaRuleMapForwardProblem> kMapForward[] = {
    {"chunk_fp32", chunk_fp32::declines_map_forward, always, chunk_fp32::map_forward},
};
constexpr Implementation<DeltaRuleMapBackwardProblem> kMapBackward[] = {
    {"chunk_fp32", chunk_fp32::declines_map_backward, always, chunk_fp32::map_backward},
};

}  // namespace

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list() { return kForward; }
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list() { return kBackward; }
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list() { return kStep; }
std::span<const Implementation<DeltaRuleMapForwardProblem>> delta_rule_map_forward_list() { return kMapForward; }
std::span<const Implementation<DeltaRuleMapBackwardProblem>> delta_rule_map_backward_list() { return kMapBackward; }

}  // namespace fastweight::cuda
