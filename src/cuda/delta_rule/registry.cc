#include "cuda/delta_rule/registry.h"

#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/map.h"

namespace fastweight::cuda {
namespace {

// Of an implementation that leaves `kept` alone.
template <auto kDeclines>
std::string keeping_nothing(const DeltaRuleForwardProblem& problem) {
  return problem.args.kept.present() ? "keeps nothing for a backward" : kDeclines(problem);
}

constexpr Implementation<DeltaRuleForwardProblem> kForward[] = {
#ifdef FASTWEIGHT_SM90
    {"chunk_sm90", chunk_sm90::declines_forward, always, chunk_sm90::forward, chunk_sm90::config_text},
#endif
    {"chunk_16bit", chunk_16bit::declines_forward, always, chunk_16bit::forward, chunk_16bit::config_text},
    {"chunk_fp32", keeping_nothing<chunk_fp32::declines_forward>, always, chunk_fp32::forward, chunk_fp32::config_text},
    {"recurrent", keeping_nothing<beyond_all_kernels<DeltaRuleForwardProblem>>, always, recurrent::forward},
};
constexpr Implementation<DeltaRuleBackwardProblem> kBackward[] = {
#ifdef FASTWEIGHT_SM90
    {"chunk_sm90", chunk_sm90::declines_backward, always, chunk_sm90::backward, chunk_sm90::config_text},
#endif
    {"chunk_16bit", chunk_16bit::declines_backward, always, chunk_16bit::backward, chunk_16bit::config_text},
    {"chunk_fp32", chunk_fp32::declines_backward, always, chunk_fp32::backward, chunk_fp32::config_text},
    {"recurrent", beyond_all_kernels, always, recurrent::backward},
};
constexpr Implementation<DeltaRuleStepProblem> kStep[] = {
    {"recurrent", beyond_all_kernels, always, recurrent::step},
};

// The entries of a map that are a forward and a backward.
template <const Recurrence& kOf, class Problem>
std::string declines(const Problem& problem) {
  return declines_map(problem, kOf);
}
template <const Recurrence& kOf>
void forward_of(const DeltaRuleMapForwardProblem& problem, const Context& context) {
  map_forward(problem, kOf, context);
}
template <const Recurrence& kOf>
void backward_of(const DeltaRuleMapBackwardProblem& problem, const Context& context) {
  map_backward(problem, kOf, context);
}

constexpr Recurrence kChunk16Bit{chunk_16bit::declines_forward, chunk_16bit::forward, chunk_16bit::declines_backward,
                                 chunk_16bit::backward};
#ifdef FASTWEIGHT_SM90
constexpr Recurrence kChunkSm90{chunk_sm90::declines_forward, chunk_sm90::forward, chunk_sm90::declines_backward,
                                chunk_sm90::backward};
#endif

constexpr Implementation<DeltaRuleMapForwardProblem> kMapForward[] = {
#ifdef FASTWEIGHT_SM90
    {"chunk_sm90", declines<kChunkSm90>, always, forward_of<kChunkSm90>},
#endif
    {"chunk_16bit", declines<kChunk16Bit>, always, forward_of<kChunk16Bit>},
    {"chunk_fp32", chunk_fp32::declines_map_forward, always, chunk_fp32::map_forward},
};
constexpr Implementation<DeltaRuleMapBackwardProblem> kMapBackward[] = {
#ifdef FASTWEIGHT_SM90
    {"chunk_sm90", declines<kChunkSm90>, always, backward_of<kChunkSm90>},
#endif
    {"chunk_16bit", declines<kChunk16Bit>, always, backward_of<kChunk16Bit>},
    {"chunk_fp32", chunk_fp32::declines_map_backward, always, chunk_fp32::map_backward},
};

}  // namespace

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list() { return kForward; }
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list() { return kBackward; }
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list() { return kStep; }
std::span<const Implementation<DeltaRuleMapForwardProblem>> delta_rule_map_forward_list() { return kMapForward; }
std::span<const Implementation<DeltaRuleMapBackwardProblem>> delta_rule_map_backward_list() { return kMapBackward; }

int64_t delta_rule_kept_words(Device device, Gate gate, DType dtype, int64_t head_dim_k, bool all) {
  return chunk_16bit::kept_words(device, gate, dtype, head_dim_k, all);
}

}  // namespace fastweight::cuda
