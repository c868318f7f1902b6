#include "support/short_conv_case.h"

#include <sstream>

namespace fastweight::support {
namespace {

// Every tensor has its own stream: leaving one out does not change the others.
enum Stream : uint64_t { kX = 1, kW, kBias, kResidual, kInitialState, kDY, kDFinalState };

std::vector<int64_t> state_shape(const ShortConvSpec& spec) { return {num_sequences(spec), spec.D, spec.W}; }

}  // namespace

std::string describe(const ShortConvSpec& spec) {
  std::ostringstream out;
  out << "short_conv B=" << spec.B << " T=" << spec.T << " D=" << spec.D << " W=" << spec.W << " "
      << name_of(spec.dtype) << " parameters " << name_of(spec.parameter_dtype);
  out << describe_lengths(spec.cu_seqlens);
  if (spec.options.activation == Activation::kSilu) out << " silu";
  if (!spec.bias) out << " no_bias";
  if (!spec.residual) out << " no_residual";
  if (!spec.initial_state) out << " no_initial_state";
  return out.str();
}

std::span<const CaseTensor<ShortConvCase>> ShortConvCase::fields() {
  using Self = ShortConvCase;
  static constexpr CaseTensor<Self> kFields[] = {
      {"x", &Self::x},
      {"w", &Self::w, Part::kCall},
      {"bias", &Self::bias, Part::kCall},
      {"residual", &Self::residual},
      {"initial_state", &Self::initial_state, Part::kStart},
      {"cu_seqlens", &Self::cu_seqlens, Part::kCall},
      {"dy", &Self::dy},
      {"d_final_state", &Self::d_final_state, Part::kEnd},
  };
  return kFields;
}

std::span<const CaseTensor<ShortConvResults>> ShortConvResults::fields() {
  using Self = ShortConvResults;
  static constexpr CaseTensor<Self> kFields[] = {
      {"y", &Self::y},
      {"final_state", &Self::final_state, Part::kEnd},
      {"dx", &Self::dx},
      {"dw", &Self::dw, Part::kCall},
      {"dbias", &Self::dbias, Part::kCall},
      {"d_initial_state", &Self::d_initial_state, Part::kStart},
  };
  return kFields;
}

ShortConvInputs ShortConvCase::inputs() const { return bound<ShortConvForward>(*this, ShortConvResults()).in; }

ShortConvCase draw(const ShortConvSpec& spec, uint64_t seed) {
  const std::vector<int64_t> rows{spec.B, spec.T, spec.D};
  ShortConvCase result;
  result.spec = spec;
  result.x = normals(spec.dtype, rows, seed, kX);
  result.w = normals(spec.parameter_dtype, {spec.D, spec.W}, seed, kW);
  if (spec.bias) result.bias = normals(spec.parameter_dtype, {spec.D}, seed, kBias);
  if (spec.residual) result.residual = normals(spec.dtype, rows, seed, kResidual);
  if (spec.initial_state) result.initial_state = normals(spec.dtype, state_shape(spec), seed, kInitialState);
  result.cu_seqlens = offsets_tensor(spec.cu_seqlens);
  result.dy = normals(spec.dtype, rows, seed, kDY);
  result.d_final_state = normals(spec.dtype, state_shape(spec), seed, kDFinalState);
  return result;
}

ShortConvResults outputs_of(Mode mode, const ShortConvCase& problem) {
  const ShortConvSpec& spec = problem.spec;
  ShortConvResults outputs;
  if (mode == Mode::kBackward) {
    add_gradients<ShortConvBackward>(problem, outputs);
    return outputs;
  }
  outputs.y = poisoned_like(problem.x);
  if (mode == Mode::kForward) {
    outputs.final_state = poisoned(spec.dtype, state_shape(spec));
  } else {
    outputs.final_state =
        problem.initial_state.present() ? problem.initial_state : Tensor(spec.dtype, state_shape(spec));
  }
  return outputs;
}

Call call_of(Mode mode, const ShortConvCase& problem, const ShortConvResults& outputs) {
  if (mode == Mode::kForward) return bound_call(short_conv_forward, problem, outputs);
  if (mode == Mode::kBackward) return bound_call(short_conv_backward, problem, outputs);
  return bound_call(short_conv_step, problem, outputs);
}

ShortConvResults forward(const ShortConvCase& problem, const Context& context) {
  return run(Mode::kForward, problem, context);
}

ShortConvResults backward(const ShortConvCase& problem, const Context& context) {
  return run(Mode::kBackward, problem, context);
}

ShortConvResults step(const ShortConvCase& problem, const Context& context) {
  return run(Mode::kStep, problem, context);
}

Tolerance tolerance(const ShortConvCase& problem, const ShortConvResults&, const std::string&, DType result_type) {
  constexpr double kSmallest = 1e-12;
  if (result_type == DType::kBF16) return {3e-3, kSmallest};
  if (result_type == DType::kF16) return {4e-4, kSmallest};
  const bool in_double = problem.spec.dtype == DType::kF64 && result_type == DType::kF64;
  return {in_double ? 1e-12 : 2e-6, kSmallest};
}

}  // namespace fastweight::support
