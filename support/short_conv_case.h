// A short convolution with its data, and the functions that run it through the public API.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fastweight/short_conv.h"
#include "support/placement.h"
#include "support/tensor.h"

namespace fastweight::support {

// What to draw.
struct ShortConvSpec {
  std::string name;
  int64_t B = 1, T = 64, D = 16, W = 4;
  std::vector<int64_t> cu_seqlens;  // empty: fixed length
  ShortConvOptions options;
  DType dtype = DType::kF32;            // x, y, residual and the states
  DType parameter_dtype = DType::kF32;  // w and bias
  bool bias = true;
  bool residual = true;
  bool initial_state = true;
};

struct ShortConvCase {
  ShortConvSpec spec;
  Tensor x, w, bias, residual, initial_state, cu_seqlens;
  Tensor dy, d_final_state;

  ShortConvInputs inputs() const;
};

// Draws the data, the same for the same seed on every machine: all of it N(0,1).
ShortConvCase draw(const ShortConvSpec& spec, uint64_t seed);

// The same values in fp64 throughout: what the reference is given to be the oracle.
ShortConvCase in_double(const ShortConvCase& problem);

// Results by name; a tensor that does not apply is absent.
struct ShortConvResults {
  std::string implementation;
  Tensor y, final_state;
  Tensor dx, dw, dbias, d_initial_state;

  // The present tensors with their names, in the order above.
  std::vector<std::pair<std::string, const Tensor*>> named() const;
};

// A call on host tensors on the context's device; for CUDA, the tensors are copied there and back (placement.h).
std::vector<PlacedView> views_of(ShortConvForward& args);
std::vector<PlacedView> views_of(ShortConvBackward& args);
std::vector<PlacedView> views_of(ShortConvStep& args);
std::string run(const Context& context, const ShortConvForward& args);
std::string run(const Context& context, const ShortConvBackward& args);
std::string run(const Context& context, const ShortConvStep& args);

// Outputs are poisoned with NaN and have the types of x, w, bias and the initial state; the state of a step starts as
// the initial state (absent: 0).
ShortConvResults forward_outputs(const ShortConvCase& problem);
ShortConvResults backward_outputs(const ShortConvCase& problem);
ShortConvResults step_outputs(const ShortConvCase& problem);

// The call on these tensors. A step decodes all T tokens in one call.
ShortConvForward forward_args(const ShortConvCase& problem, const ShortConvResults& outputs);
ShortConvBackward backward_args(const ShortConvCase& problem, const ShortConvResults& outputs);
ShortConvStep step_args(const ShortConvCase& problem, const ShortConvResults& outputs);

// All three: outputs, arguments, run.
ShortConvResults forward(const ShortConvCase& problem, const Context& context);
ShortConvResults backward(const ShortConvCase& problem, const Context& context);
ShortConvResults step(const ShortConvCase& problem, const Context& context);

}  // namespace fastweight::support
