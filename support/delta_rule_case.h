// A problem of the delta-rule family with its data, and the functions that run it through the public API. Tests,
// benches and `fastweight check` all use this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fastweight/delta_rule.h"
#include "support/placement.h"
#include "support/tensor.h"

namespace fastweight::support {

// What to draw. The gate decides the operator: none = delta_rule, per head = gdn, per channel = kda.
struct DeltaRuleSpec {
  std::string name;
  int64_t B = 1, T = 64, H = 1, HV = 1, K = 16, V = 16;
  std::vector<int64_t> cu_seqlens;  // empty: fixed length
  DeltaRuleOptions options;
  DType dtype = DType::kF32;       // q, k, v, o and their gradients
  DType gate_dtype = DType::kF32;  // g and beta
  bool initial_state = true;
  bool beta_absent = false;
  bool beta_per_value = false;  // beta is [B, T, HV, V]
  bool a_log_absent = false;    // with a lower bound
  bool dt_bias_absent = false;
  double gate_divisor = 1;        // precomputed gates are log sigmoid(N(0,1)) / divisor
  double hard_gate_fraction = 0;  // this share of the precomputed gates is -1000
};

struct DeltaRuleCase {
  DeltaRuleSpec spec;
  Tensor q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens;
  Tensor d_o, d_final_state;

  std::string op() const;  // delta_rule, gdn or kda
  DeltaRuleInputs inputs() const;

  std::vector<Tensor*> per_token() { return {&q, &k, &v, &g, &beta, &d_o}; }
  std::vector<Tensor*> initial_states() { return {&initial_state}; }
  std::vector<Tensor*> final_gradients() { return {&d_final_state}; }
};

// Draws the data, the same for the same seed on every machine. q and k have unit norm unless qk_l2norm is set. Raw
// gates and dt_bias are N(0,1), exp(A_log) is U(1/16, 1), beta is sigmoid(N(0,1)) or its logit, all else N(0,1).
DeltaRuleCase draw(const DeltaRuleSpec& spec, uint64_t seed);

// The same values in fp64 throughout: what the reference is given to be the oracle.
DeltaRuleCase in_double(const DeltaRuleCase& problem);

// Results by name; a tensor that does not apply is absent.
struct DeltaRuleResults {
  std::string implementation;
  Tensor o, final_state, chunk_states;
  Tensor dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state;

  // The present tensors with their names, in the order above.
  std::vector<std::pair<std::string, const Tensor*>> named() const;

  std::vector<Tensor*> per_token() { return {&o, &dq, &dk, &dv, &dg, &dbeta}; }
  std::vector<Tensor*> final_states() { return {&final_state}; }
  std::vector<Tensor*> initial_gradients() { return {&d_initial_state}; }
  std::vector<Tensor*> of_the_call() { return {&chunk_states, &da_log, &ddt_bias}; }
};

// The tensors of a call, and which of them it writes.
std::vector<PlacedView> views_of(DeltaRuleForward& args);
std::vector<PlacedView> views_of(DeltaRuleBackward& args);
std::vector<PlacedView> views_of(DeltaRuleStep& args);

// Calls of the public API with tensors in host memory, on whatever device the context names.
std::string run(const Context& context, const DeltaRuleForward& args);
std::string run(const Context& context, const DeltaRuleBackward& args);
std::string run(const Context& context, const DeltaRuleStep& args);

// Outputs are poisoned with NaN. Results have q's type (gradients of g, beta, parameters: theirs), the states fp32, or
// fp64 for a problem in double; the state of a step, which starts as the initial state, has that one's type.
DeltaRuleResults forward_outputs(const DeltaRuleCase& problem, bool chunk_states = false);
DeltaRuleResults backward_outputs(const DeltaRuleCase& problem);
DeltaRuleResults step_outputs(const DeltaRuleCase& problem);

// The call on these tensors. `saved` may hold the forward's fp32 chunk states. A step decodes all T tokens in one call.
DeltaRuleForward forward_args(const DeltaRuleCase& problem, const DeltaRuleResults& outputs);
DeltaRuleBackward backward_args(const DeltaRuleCase& problem, const DeltaRuleResults& outputs,
                                const Tensor& saved = {});
DeltaRuleStep step_args(const DeltaRuleCase& problem, const DeltaRuleResults& outputs);

// All three: outputs, arguments, run.
DeltaRuleResults forward(const DeltaRuleCase& problem, const Context& context, bool chunk_states = false);
DeltaRuleResults backward(const DeltaRuleCase& problem, const Context& context, const Tensor& saved = {});
DeltaRuleResults step(const DeltaRuleCase& problem, const Context& context);

}  // namespace fastweight::support
