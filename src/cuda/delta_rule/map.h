// The map of a segment on CUDA: what its implementations share, and those that are a forward and a backward of which
// nothing but a state is wanted.
#pragma once

#include <cstdint>
#include <string>

#include "core/delta_rule_map_problem.h"
#include "fastweight/context.h"

namespace fastweight::cuda {

// What M begins with: writes the identity, [K, K].
void fill_identity(float* identity, int64_t K, const Context& context);

// An implementation of the delta rule whose forward may be asked for without o, and without v: values that are all 0. Maps
// from it have its rounding: h and e are bit for bit its final state and its gradient of the initial state.
struct Recurrence {
  std::string (*declines_forward)(const DeltaRuleForwardProblem&);
  void (*forward)(const DeltaRuleForwardProblem&, const Context&);
  std::string (*declines_backward)(const DeltaRuleBackwardProblem&);
  void (*backward)(const DeltaRuleBackwardProblem&, const Context&);
};

std::string declines_map(const DeltaRuleMapForwardProblem& problem, const Recurrence& of);
std::string declines_map(const DeltaRuleMapBackwardProblem& problem, const Recurrence& of);
void map_forward(const DeltaRuleMapForwardProblem& problem, const Recurrence& of, const Context& context);
void map_backward(const DeltaRuleMapBackwardProblem& problem, const Recurrence& of, const Context& context);

}  // namespace fastweight::cuda
