// A short convolution with its data, and the functions that run it through the public API.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/short_conv_fields.h"
#include "fastweight/short_conv.h"
#include "support/case.h"

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

  void set_types(DType type) { dtype = parameter_dtype = type; }
};

std::string describe(const ShortConvSpec& spec);
inline std::vector<ImplementationInfo> implementations_of(const ShortConvSpec&) { return short_conv_implementations(); }

struct ShortConvCase : TensorsByName<ShortConvCase> {
  ShortConvSpec spec;
  Tensor x, w, bias, residual, initial_state, cu_seqlens;
  Tensor dy, d_final_state;

  static std::span<const CaseTensor<ShortConvCase>> fields();
  ShortConvInputs inputs() const;
};

// Draws the data, the same for the same seed on every machine: all of it N(0,1).
ShortConvCase draw(const ShortConvSpec& spec, uint64_t seed);

// Results by name; a tensor that does not apply is absent.
struct ShortConvResults : TensorsByName<ShortConvResults> {
  std::string implementation;
  Tensor y, final_state;
  Tensor dx, dw, dbias, d_initial_state;

  static std::span<const CaseTensor<ShortConvResults>> fields();
};

// Calls of the public API with tensors in host memory, on whatever device the context names.
inline std::string run(const Context& context, const ShortConvForward& args) {
  return Call(short_conv_forward, args).run(context);
}
inline std::string run(const Context& context, const ShortConvBackward& args) {
  return Call(short_conv_backward, args).run(context);
}
inline std::string run(const Context& context, const ShortConvStep& args) {
  return Call(short_conv_step, args).run(context);
}

// Results have the types of x, w, bias and the initial state; the state of a step starts as the initial state (absent:
// 0).
ShortConvResults outputs_of(Mode mode, const ShortConvCase& problem);

// A step decodes all T tokens in one call.
Call call_of(Mode mode, const ShortConvCase& problem, const ShortConvResults& outputs);

ShortConvResults forward(const ShortConvCase& problem, const Context& context);
ShortConvResults backward(const ShortConvCase& problem, const Context& context);
ShortConvResults step(const ShortConvCase& problem, const Context& context);

// What a result in this type may be off the reference in double on the same rounded inputs: a few units of the type.
Tolerance tolerance(const ShortConvCase& problem, const ShortConvResults& expected, const std::string& tensor,
                    DType result_type);

}  // namespace fastweight::support
