// A problem of one of the families related to the delta rule (GLA, Comba, DPLR) with its data, and the functions that
// run it through the public API. Tests and the tool use this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/related_fields.h"
#include "fastweight/fastweight.h"
#include "support/case.h"

namespace fastweight::support {

enum class RelatedOp { kLinearAttention, kSimpleGla, kGla, kComba, kIplr, kDplr };
inline constexpr RelatedOp kRelatedOps[] = {RelatedOp::kLinearAttention, RelatedOp::kSimpleGla, RelatedOp::kGla,
                                            RelatedOp::kComba,           RelatedOp::kIplr,      RelatedOp::kDplr};

const char* name_of(RelatedOp op);  // linear_attention, simple_gla, gla, comba, iplr, dplr
Gate gate_of(RelatedOp op);

// What the operator's family has.
std::vector<ImplementationInfo> implementations_of(RelatedOp op);

// What to draw.
struct RelatedSpec {
  std::string name;
  RelatedOp op = RelatedOp::kSimpleGla;
  int64_t B = 1, T = 64, H = 1, K = 16, V = 16;
  int64_t group = 1;                // Comba: value heads per head
  std::vector<int64_t> cu_seqlens;  // empty: fixed length
  double scale = GlaOptions::kUnset;
  int32_t chunk_size = 64;
  bool state_v_first = false;
  bool qk_l2norm = false;          // Comba
  DType dtype = DType::kF32;       // q, k, v, p, a, b, o and their gradients
  DType gate_dtype = DType::kF32;  // g and beta
  bool initial_state = true;
  bool g_gamma = false;           // simple GLA: g_gamma in place of g
  bool p_absent = false;          // Comba
  bool beta_absent = false;       // Comba
  bool beta_per_value = false;    // Comba
  double gate_divisor = 1;        // gates are log sigmoid(N(0,1)) / divisor
  double hard_gate_fraction = 0;  // this share of the gates is -1000

  int64_t HV() const { return H * group; }
  void set_types(DType type) { dtype = gate_dtype = type; }
};

std::string describe(const RelatedSpec& spec);
inline std::vector<ImplementationInfo> implementations_of(const RelatedSpec& spec) {
  return implementations_of(spec.op);
}

// Those tensors that an operator does not have are absent.
struct RelatedCase : TensorsByName<RelatedCase> {
  RelatedSpec spec;
  Tensor q, k, v, p, a, b, g, beta, initial_state, g_gamma, cu_seqlens;
  Tensor d_o, d_final_state;

  static std::span<const CaseTensor<RelatedCase>> fields();
};

struct RelatedResults : TensorsByName<RelatedResults> {
  std::string implementation;
  Tensor o, final_state, chunk_states;
  Tensor dq, dk, dv, dp, da, db, dg, dbeta, d_initial_state;

  static std::span<const CaseTensor<RelatedResults>> fields();
};

// Draws the data, the same for the same seed on every machine. q, k, p and b have unit norm unless qk_l2norm is set; p
// leans towards k, and a away from b. g_gamma is log(3/4), log(7/8), .., beta is sigmoid(N(0,1)), all else N(0,1).
RelatedCase draw(const RelatedSpec& spec, uint64_t seed);

// Results have q's type (gradients of g and beta: theirs), the states fp32, or fp64 for a problem in double; the state of
// a step, which starts as the initial state, has that one's type. A forward has chunk states.
RelatedResults outputs_of(Mode mode, const RelatedCase& problem);
Call call_of(Mode mode, const RelatedCase& problem, const RelatedResults& outputs);

// `saved` may hold the forward's fp32 chunk states.
RelatedResults forward(const RelatedCase& problem, const Context& context, bool chunk_states = false);
RelatedResults backward(const RelatedCase& problem, const Context& context, const Tensor& saved = {});

// A step decodes all T tokens in one call.
RelatedResults step(const RelatedCase& problem, const Context& context);

// What a result in this type may be off the reference in double on the same rounded inputs.
Tolerance tolerance(const RelatedCase& problem, const RelatedResults& expected, const std::string& tensor,
                    DType result_type);

}  // namespace fastweight::support
