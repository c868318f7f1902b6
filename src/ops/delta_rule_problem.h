// What the implementations of the delta-rule family receive: validated arguments and the sizes read off them.
#pragma once

#include <cstdint>

#include "fastweight/delta_rule.h"

namespace fastweight {

struct DeltaRuleSizes {
  int64_t batch = 0;            // B
  int64_t tokens = 0;           // T
  int64_t num_heads = 0;        // H
  int64_t num_value_heads = 0;  // HV
  int64_t group = 1;            // HV / H
  int64_t head_dim_k = 0;       // K
  int64_t head_dim_v = 0;       // V
  int64_t num_sequences = 0;    // N
  int64_t num_chunks = 0;       // NT; on CUDA with cu_seqlens an upper bound
};

// Args is DeltaRuleForward, DeltaRuleBackward or DeltaRuleStep. Validated: kernels trust it. The scale is resolved;
// A_log and its gradient are [HV], dt_bias and its gradient [HV], or [HV, K] per channel.
template <class Args>
struct DeltaRuleProblem {
  DeltaRuleSizes sizes;
  Args args;
  double scale = 1;
  bool has_fp64 = false;  // any tensor, input or output
};

using DeltaRuleForwardProblem = DeltaRuleProblem<DeltaRuleForward>;
using DeltaRuleBackwardProblem = DeltaRuleProblem<DeltaRuleBackward>;
using DeltaRuleStepProblem = DeltaRuleProblem<DeltaRuleStep>;

}  // namespace fastweight
