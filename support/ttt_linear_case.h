// A problem of the TTT-linear family with its data, and the functions that run it through the public API. Tests,
// benches and `fastweight check` all use this.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fastweight/ttt_linear.h"
#include "support/placement.h"
#include "support/tensor.h"

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
};

struct TttLinearCase {
  TttLinearSpec spec;
  Tensor q, k, v, w, b, eta, initial_state, initial_state_bias, cu_seqlens;
  Tensor d_o, d_final_state, d_final_state_bias;

  TttLinearInputs inputs() const;

  std::vector<Tensor*> per_token() { return {&q, &k, &v, &eta, &d_o}; }
  std::vector<Tensor*> initial_states() { return {&initial_state, &initial_state_bias}; }
  std::vector<Tensor*> final_gradients() { return {&d_final_state, &d_final_state_bias}; }
};

// Draws the data, the same for the same seed on every machine. k has unit norm, eta is 0.005 N(0,1), the gradients of
// the results are U(0,1), all else N(0,1). eta is [B, T, H, 1] and the biases of states are [N, H, 1, D].
TttLinearCase draw(const TttLinearSpec& spec, uint64_t seed);

// The same values in fp64 throughout: what the reference is given to be the oracle.
TttLinearCase in_double(const TttLinearCase& problem);

// Results by name; a tensor that does not apply is absent.
struct TttLinearResults {
  std::string implementation;
  Tensor o, final_state, final_state_bias;
  Tensor gradient, gradient_bias, position;  // of a step
  Tensor dq, dk, dv, dw, db, deta, d_initial_state, d_initial_state_bias;

  // The present tensors with their names, in the order above.
  std::vector<std::pair<std::string, const Tensor*>> named() const;

  std::vector<Tensor*> per_token() { return {&o, &dq, &dk, &dv, &deta}; }
  std::vector<Tensor*> final_states() {
    return {&final_state, &final_state_bias, &gradient, &gradient_bias, &position};
  }
  std::vector<Tensor*> initial_gradients() { return {&d_initial_state, &d_initial_state_bias}; }
  std::vector<Tensor*> of_the_call() { return {&dw, &db}; }
};

// The tensors of a call, and which of them it writes.
std::vector<PlacedView> views_of(TttLinearForward& args);
std::vector<PlacedView> views_of(TttLinearBackward& args);
std::vector<PlacedView> views_of(TttLinearStep& args);

// Calls of the public API with tensors in host memory, on whatever device the context names.
std::string run(const Context& context, const TttLinearForward& args);
std::string run(const Context& context, const TttLinearBackward& args);
std::string run(const Context& context, const TttLinearStep& args);

// What a step reads and writes of its sequences.
struct TttLinearOpen {
  Tensor state, state_bias, gradient, gradient_bias, position;
};

// The initial state of the problem (absent: 0), with no token in the open mini-batch.
TttLinearOpen opened(const TttLinearCase& problem);

// Outputs are poisoned with NaN. Results have q's type (gradients of w, b, eta: theirs), the states fp32, or fp64 for a
// problem in double. Those of a step hold `open`: after the call, the state and its bias at the start of the open
// mini-batch.
TttLinearResults forward_outputs(const TttLinearCase& problem);
TttLinearResults backward_outputs(const TttLinearCase& problem);
TttLinearResults step_outputs(const TttLinearCase& problem, const TttLinearOpen& open);

// The call on these tensors. A step decodes all T tokens in one call.
TttLinearForward forward_args(const TttLinearCase& problem, const TttLinearResults& outputs);
TttLinearBackward backward_args(const TttLinearCase& problem, const TttLinearResults& outputs);
TttLinearStep step_args(const TttLinearCase& problem, const TttLinearResults& outputs);

// All three: outputs, arguments, run. A step starts from opened(problem) or from `open`.
TttLinearResults forward(const TttLinearCase& problem, const Context& context);
TttLinearResults backward(const TttLinearCase& problem, const Context& context);
TttLinearResults step(const TttLinearCase& problem, const Context& context);
TttLinearResults step(const TttLinearCase& problem, const TttLinearOpen& open, const Context& context);

}  // namespace fastweight::support
