// What the implementations of the delta rule and of the families related to it receive: validated arguments and the
// sizes read off them.
//
// All of them are one recurrence. A token reads the state before it with one row, makes u of what it read, and writes u
// with another row:
//
//     x_t = reader_t S_{t-1}
//     S_t = diag(exp(g_t)) S_{t-1} + writer_t^T u_t  (+ k_t^T v_t)
//     o_t = scale q_t S_t
//
//     Correction    family       reader_t      writer_t  u_t                 and k_t^T v_t
//     kKey          delta rule   exp(g_t) k_t  k_t       beta_t (v_t - x_t)
//     kNone         GLA          0             k_t       v_t
//     kFeedback     Comba        p_t           k_t       beta_t (v_t - x_t)
//     kLowRank      DPLR         a_t           b_t       x_t                 yes
//
// So four things tell a family from the others: whether it reads at all, whether the reader is the key or a row of its
// own, whether it reads before or after the decay (then the reader has the factor exp(g_t)), and whether it writes
// twice. A token that corrects the state several times before its read is as many tokens of this recurrence: the decay
// stands at the first of them, the query at the last.
#pragma once

#include <cstdint>
#include <vector>

#include "core/sequences.h"
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

enum class Correction { kKey, kNone, kFeedback, kLowRank };

// How a family differs from the delta rule: what the public structs of the delta rule have no field for.
struct Transition {
  Correction correction = Correction::kKey;
  TensorView reader;    // where it is a tensor of its own: p or a, [B, T, H, K]
  TensorView writer;    // where it is not k: b, [B, T, H, K]
  TensorView d_reader;  // outputs of a backward, optional
  TensorView d_writer;
  bool reader_is_key = false;  // p was left out: `reader` is k, and its gradient belongs to dk
};

// Args is DeltaRuleForward, DeltaRuleBackward or DeltaRuleStep. Validated: kernels trust it. The scale is resolved;
// A_log and its gradient are [HV], dt_bias and its gradient [HV], or [HV, K] per channel.
template <class Args>
struct DeltaRuleProblem {
  DeltaRuleSizes sizes;
  Args args;
  std::vector<Sequence> sequences;  // of host memory; empty on CUDA, and where there is nothing to do
  Transition transition{};
  double scale = 1;
  bool has_fp64 = false;  // any tensor, input or output
};

using DeltaRuleForwardProblem = DeltaRuleProblem<DeltaRuleForward>;
using DeltaRuleBackwardProblem = DeltaRuleProblem<DeltaRuleBackward>;
using DeltaRuleStepProblem = DeltaRuleProblem<DeltaRuleStep>;

}  // namespace fastweight
