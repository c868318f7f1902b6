// A problem of one of the families related to the delta rule (GLA, Comba, DPLR) with its data, and the functions that
// run it through the public API. Tests and the tool use this.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fastweight/fastweight.h"
#include "support/tensor.h"

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
  double gate_divisor = 1;        // gates are log sigmoid(N(0,1)) / divisor
  double hard_gate_fraction = 0;  // this share of the gates is -1000
};

// The tensors of a call by the names of the public structs, as tensors that own their data or as views. Those that an
// operator does not have are absent.
template <class T>
struct RelatedInputs {
  T q, k, v, p, a, b, g, beta, d_o;  // [B, T, ..]
  T initial_state, d_final_state;    // [N, ..]
  T g_gamma, cu_seqlens, saved_states;

  auto all() { return list(*this); }
  auto all() const { return list(*this); }
  std::vector<T*> per_token() { return {&q, &k, &v, &p, &a, &b, &g, &beta, &d_o}; }
  std::vector<T*> initial_states() { return {&initial_state}; }
  std::vector<T*> final_gradients() { return {&d_final_state}; }

 private:
  template <class Self>
  static auto list(Self& x) {
    return std::array{&x.q,
                      &x.k,
                      &x.v,
                      &x.p,
                      &x.a,
                      &x.b,
                      &x.g,
                      &x.beta,
                      &x.d_o,
                      &x.initial_state,
                      &x.d_final_state,
                      &x.g_gamma,
                      &x.cu_seqlens,
                      &x.saved_states};
  }
};

template <class T>
struct RelatedOutputs {
  T o, dq, dk, dv, dp, da, db, dg, dbeta;  // [B, T, ..]
  T final_state, d_initial_state;          // [N, ..]
  T chunk_states;

  static constexpr std::array<const char*, 12> kNames{
      "o", "dq", "dk", "dv", "dp", "da", "db", "dg", "dbeta", "final_state", "d_initial_state", "chunk_states"};
  auto all() { return list(*this); }
  auto all() const { return list(*this); }
  std::vector<T*> per_token() { return {&o, &dq, &dk, &dv, &dp, &da, &db, &dg, &dbeta}; }
  std::vector<T*> final_states() { return {&final_state}; }
  std::vector<T*> initial_gradients() { return {&d_initial_state}; }
  std::vector<T*> of_the_call() { return {&chunk_states}; }

 private:
  template <class Self>
  static auto list(Self& x) {
    return std::array{
        &x.o,           &x.dq, &x.dk, &x.dv, &x.dp, &x.da, &x.db, &x.dg, &x.dbeta, &x.final_state, &x.d_initial_state,
        &x.chunk_states};
  }
};

struct RelatedCase : RelatedInputs<Tensor> {
  RelatedSpec spec;
};

struct RelatedResults : RelatedOutputs<Tensor> {
  std::string implementation;

  // The present tensors with their names.
  std::vector<std::pair<std::string, const Tensor*>> named() const;
};

// Draws the data, the same for the same seed on every machine. q, k, p and b have unit norm unless qk_l2norm is set; p
// leans towards k, and a away from b. g_gamma is log(3/4), log(7/8), .., beta is sigmoid(N(0,1)), all else N(0,1).
RelatedCase draw(const RelatedSpec& spec, uint64_t seed);

// The same values in fp64 throughout: what the reference is given to be the oracle.
RelatedCase in_double(const RelatedCase& problem);

// One call of the public function. The views of what the mode does not have are ignored.
std::string run_forward(const RelatedSpec& spec, const Context& context, const RelatedInputs<TensorView>& in,
                        const RelatedOutputs<TensorView>& out);
std::string run_backward(const RelatedSpec& spec, const Context& context, const RelatedInputs<TensorView>& in,
                         const RelatedOutputs<TensorView>& out);

RelatedInputs<TensorView> views_of(const RelatedInputs<Tensor>& tensors);
RelatedOutputs<TensorView> views_of(const RelatedOutputs<Tensor>& tensors);

// Outputs of a mode, poisoned with NaN. Results have q's type (gradients of g and beta: theirs), the states fp32, or
// fp64 for a problem in double.
RelatedResults forward_outputs(const RelatedCase& problem, bool chunk_states);
RelatedResults backward_outputs(const RelatedCase& problem);

RelatedResults forward(const RelatedCase& problem, const Context& context, bool chunk_states = false);

// `saved` may hold the forward's fp32 chunk states.
RelatedResults backward(const RelatedCase& problem, const Context& context, const Tensor& saved = {});

}  // namespace fastweight::support
