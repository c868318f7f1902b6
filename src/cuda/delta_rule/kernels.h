// The entry points of the CUDA implementations, a namespace for each, which is also its folder. Each enqueues on the
// context's stream and returns; the context's device is current.
#pragma once

#include <string>

#include "core/delta_rule_map_problem.h"
#include "core/delta_rule_problem.h"
#include "cuda/decline_reasons.h"

namespace fastweight::cuda {

// What no kernel of the family takes.
template <class Problem>
std::string beyond_all_kernels(const Problem& problem) {
  const std::string reason = no_fp64(problem);
  return reason.empty() ? too_many_heads(problem.sizes.num_value_heads) : reason;
}

// Tensor cores with 16-bit operands: q, k, v and o have one 16-bit type, beta is a number per token. For the map of a segment
// (map.h) their forward runs without o, and without v, which stands for values of 0.
namespace chunk_16bit {
std::string declines_forward(const DeltaRuleForwardProblem& problem);
std::string config_text(const DeltaRuleForwardProblem& problem, const Context& context);
void forward(const DeltaRuleForwardProblem& problem, const Context& context);
std::string declines_backward(const DeltaRuleBackwardProblem& problem);
std::string config_text(const DeltaRuleBackwardProblem& problem, const Context& context);
void backward(const DeltaRuleBackwardProblem& problem, const Context& context);
int64_t kept_words(Device device, Gate gate, DType dtype, int64_t head_dim_k, bool all);  // 0: it declines them
}  // namespace chunk_16bit

// The same on Hopper's own instructions, where FASTWEIGHT_SM90 is defined: K up to 128, without decays per channel 256.
namespace chunk_sm90 {
std::string declines_forward(const DeltaRuleForwardProblem& problem);
std::string config_text(const DeltaRuleForwardProblem& problem, const Context& context);
void forward(const DeltaRuleForwardProblem& problem, const Context& context);
std::string declines_backward(const DeltaRuleBackwardProblem& problem);
std::string config_text(const DeltaRuleBackwardProblem& problem, const Context& context);
void backward(const DeltaRuleBackwardProblem& problem, const Context& context);
}  // namespace chunk_sm90

// Tensor cores with the accuracy of fp32.
namespace chunk_fp32 {
std::string declines_forward(const DeltaRuleForwardProblem& problem);
std::string declines_backward(const DeltaRuleBackwardProblem& problem);
std::string config_text(const DeltaRuleForwardProblem& problem, const Context& context);
std::string config_text(const DeltaRuleBackwardProblem& problem, const Context& context);
void forward(const DeltaRuleForwardProblem& problem, const Context& context);
void backward(const DeltaRuleBackwardProblem& problem, const Context& context);
std::string declines_map_forward(const DeltaRuleMapForwardProblem& problem);
std::string declines_map_backward(const DeltaRuleMapBackwardProblem& problem);
void map_forward(const DeltaRuleMapForwardProblem& problem, const Context& context);
void map_backward(const DeltaRuleMapBackwardProblem& problem, const Context& context);
}  // namespace chunk_fp32

// Token by token.
namespace recurrent {
void forward(const DeltaRuleForwardProblem& problem, const Context& context);
void backward(const DeltaRuleBackwardProblem& problem, const Context& context);
void step(const DeltaRuleStepProblem& problem, const Context& context);
}  // namespace recurrent

}  // namespace fastweight::cuda
