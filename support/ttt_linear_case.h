// A problem of the TTT-linear family with its data, and the functions that run it through the public API. Tests,
// benches and `fastweight check` all use this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/ttt_linear_fields.h"
#include "fastweight/ttt_linear.h"
#include "support/case.h"

namespace fastweight::support {

// What to draw.
struct TttLinearSpec {
  std::string name;
  int64_t B = 1, T = 64, H = 1, D = 16;
  std::vector<int64_t> cu_seqlens;  // empty: fixed length
  TttLinearOptions options;
  DType dtype = DType::kF32;            // q, k, v, o and their gradients
  DType parameter_dtype = DType::kF32;  // w, b and eta
  bool initial_state = true;
  bool initial_state_bias = true;

  void set_types(DType type) { dtype = parameter_dtype = type; }
};

std::string describe(const TttLinearSpec& spec);
inline std::vector<ImplementationInfo> implementations_of(const TttLinearSpec&) { return ttt_linear_implementations(); }

struct TttLinearCase : TensorsByName<TttLinearCase> {
  TttLinearSpec spec;
  Tensor q, k, v, w, b, eta, initial_state, initial_state_bias, cu_seqlens;
  Tensor d_o, d_final_state, d_final_state_bias;

  static std::span<const CaseTensor<TttLinearCase>> fields();
  TttLinearInputs inputs() const;
};

// Draws the data, the same for the same seed on every machine. k has unit norm, eta is 0.005 N(0,1), the gradients of
// the results are U(0,1), all else N(0,1). eta is [B, T, H, 1] and the biases of states are [N, H, 1, D].
TttLinearCase draw(const TttLinearSpec& spec, uint64_t seed);

// Results by name; a tensor that does not apply is absent.
struct TttLinearResults : TensorsByName<TttLinearResults> {
  std::string implementation;
  Tensor o, final_state, final_state_bias;
  Tensor gradient, gradient_bias, position;  // of a step
  Tensor dq, dk, dv, dw, db, deta, d_initial_state, d_initial_state_bias;

  static std::span<const CaseTensor<TttLinearResults>> fields();
};

// Calls of the public API with tensors in host memory, on whatever device the context names.
inline std::string run(const Context& context, const TttLinearForward& args) {
  return Call(ttt_linear_forward, args).run(context);
}
inline std::string run(const Context& context, const TttLinearBackward& args) {
  return Call(ttt_linear_backward, args).run(context);
}
inline std::string run(const Context& context, const TttLinearStep& args) {
  return Call(ttt_linear_step, args).run(context);
}

// What a step reads and writes of its sequences.
struct TttLinearOpen {
  Tensor state, state_bias, gradient, gradient_bias, position;
};

// The initial state of the problem (absent: 0), with no token in the open mini-batch.
TttLinearOpen opened(const TttLinearCase& problem);

// Results have q's type (gradients of w, b, eta: theirs), the states fp32, or fp64 for a problem in double. Those of a
// step hold opened(problem): after the call, the state and its bias at the start of the open mini-batch.
TttLinearResults outputs_of(Mode mode, const TttLinearCase& problem);

// A step decodes all T tokens in one call.
Call call_of(Mode mode, const TttLinearCase& problem, const TttLinearResults& outputs);

// A step starts from opened(problem) or from `open`.
TttLinearResults forward(const TttLinearCase& problem, const Context& context);
TttLinearResults backward(const TttLinearCase& problem, const Context& context);
TttLinearResults step(const TttLinearCase& problem, const Context& context);
TttLinearResults step(const TttLinearCase& problem, const TttLinearOpen& open, const Context& context);

// What a result in this type may be off the reference in double on the same rounded inputs. `on_tensor_cores` as in
// delta_rule_case.h.
Tolerance tolerance(const TttLinearCase& problem, const TttLinearResults& expected, const std::string& tensor,
                    DType result_type, bool on_tensor_cores = false);

}  // namespace fastweight::support
