// A problem of the delta-rule family with its data, and the functions that run it through the public API. Tests,
// benches and `fastweight check` all use this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/delta_rule_fields.h"
#include "fastweight/delta_rule.h"
#include "support/case.h"

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

  void set_types(DType type) { dtype = gate_dtype = type; }
};

const char* name_of(Gate gate);  // delta_rule, gdn, kda
std::string describe(const DeltaRuleSpec& spec);
inline std::vector<ImplementationInfo> implementations_of(const DeltaRuleSpec&) { return delta_rule_implementations(); }

struct DeltaRuleCase : TensorsByName<DeltaRuleCase> {
  DeltaRuleSpec spec;
  Tensor q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens;
  Tensor d_o, d_final_state;

  static std::span<const CaseTensor<DeltaRuleCase>> fields();
  DeltaRuleInputs inputs() const;
};

// Draws the data, the same for the same seed on every machine. q and k have unit norm unless qk_l2norm is set. Raw
// gates and dt_bias are N(0,1), exp(A_log) is U(1/16, 1), beta is sigmoid(N(0,1)) or its logit, all else N(0,1).
DeltaRuleCase draw(const DeltaRuleSpec& spec, uint64_t seed);

// Results by name; a tensor that does not apply is absent.
struct DeltaRuleResults : TensorsByName<DeltaRuleResults> {
  std::string implementation;
  Tensor o, final_state, chunk_states;
  Tensor dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state;

  static std::span<const CaseTensor<DeltaRuleResults>> fields();
};

// Calls of the public API with tensors in host memory, on whatever device the context names.
inline std::string run(const Context& context, const DeltaRuleForward& args) {
  return Call(delta_rule_forward, args).run(context);
}
inline std::string run(const Context& context, const DeltaRuleBackward& args) {
  return Call(delta_rule_backward, args).run(context);
}
inline std::string run(const Context& context, const DeltaRuleStep& args) {
  return Call(delta_rule_step, args).run(context);
}

// Results have q's type (gradients of g, beta, parameters: theirs), the states fp32, or fp64 for a problem in double;
// the state of a step, which starts as the initial state, has that one's type. A forward has chunk states.
DeltaRuleResults outputs_of(Mode mode, const DeltaRuleCase& problem);

// A step decodes all T tokens in one call.
Call call_of(Mode mode, const DeltaRuleCase& problem, const DeltaRuleResults& outputs);

// `saved` may hold the forward's fp32 chunk states.
DeltaRuleResults forward(const DeltaRuleCase& problem, const Context& context, bool chunk_states = false);
DeltaRuleResults backward(const DeltaRuleCase& problem, const Context& context, const Tensor& saved = {});
DeltaRuleResults step(const DeltaRuleCase& problem, const Context& context);

// What a result in this type may be off the reference in double on the same rounded inputs. `on_tensor_cores` is for
// devices, where the operands of every product are rounded, which does not average out over few channels.
Tolerance tolerance(const DeltaRuleCase& problem, const DeltaRuleResults& expected, const std::string& tensor,
                    DType result_type, bool on_tensor_cores = false);

}  // namespace fastweight::support
