#include "support/short_conv_case.h"

#include <array>

#include "support/random.h"

namespace fastweight::support {
namespace {

// Every tensor has its own stream: leaving one out does not change the others.
enum Stream : uint64_t { kX = 1, kW, kBias, kResidual, kInitialState, kDY, kDFinalState };

std::vector<int64_t> state_shape(const ShortConvSpec& spec) {
  const int64_t N = spec.cu_seqlens.empty() ? spec.B : static_cast<int64_t>(spec.cu_seqlens.size()) - 1;
  return {N, spec.D, spec.W};
}

std::vector<PlacedView> with_inputs(ShortConvInputs& in, std::vector<PlacedView> views) {
  for (TensorView* view : {&in.x, &in.w, &in.bias, &in.initial_state, &in.cu_seqlens}) views.push_back({view, false});
  return views;
}

}  // namespace

std::vector<PlacedView> views_of(ShortConvForward& args) {
  return with_inputs(args.in, {{&args.residual, false}, {&args.y, true}, {&args.final_state, true}});
}

std::vector<PlacedView> views_of(ShortConvBackward& args) {
  return with_inputs(args.in, {{&args.dy, false},
                               {&args.d_final_state, false},
                               {&args.dx, true},
                               {&args.dw, true},
                               {&args.dbias, true},
                               {&args.d_initial_state, true}});
}

std::vector<PlacedView> views_of(ShortConvStep& args) {
  return with_inputs(args.in,
                     {{&args.residual, false}, {&args.state, true}, {&args.state_indices, false}, {&args.y, true}});
}

std::string run(const Context& context, const ShortConvForward& args) {
  return run_placed(context, args, short_conv_forward, [](ShortConvForward& x) { return views_of(x); });
}
std::string run(const Context& context, const ShortConvBackward& args) {
  return run_placed(context, args, short_conv_backward, [](ShortConvBackward& x) { return views_of(x); });
}
std::string run(const Context& context, const ShortConvStep& args) {
  return run_placed(context, args, short_conv_step, [](ShortConvStep& x) { return views_of(x); });
}

ShortConvInputs ShortConvCase::inputs() const {
  ShortConvInputs in;
  in.x = x.view();
  in.w = w.view();
  in.bias = bias.view();
  in.initial_state = initial_state.view();
  in.cu_seqlens = cu_seqlens.view();
  return in;
}

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

ShortConvCase in_double(const ShortConvCase& problem) {
  ShortConvCase result = problem;
  result.spec.dtype = DType::kF64;
  result.spec.parameter_dtype = DType::kF64;
  for (Tensor* tensor : {&result.x, &result.w, &result.bias, &result.residual, &result.initial_state, &result.dy,
                         &result.d_final_state}) {
    *tensor = tensor->to(DType::kF64);
  }
  return result;
}

std::vector<std::pair<std::string, const Tensor*>> ShortConvResults::named() const {
  const std::array<std::pair<const char*, const Tensor*>, 6> all{{{"y", &y},
                                                                  {"final_state", &final_state},
                                                                  {"dx", &dx},
                                                                  {"dw", &dw},
                                                                  {"dbias", &dbias},
                                                                  {"d_initial_state", &d_initial_state}}};
  std::vector<std::pair<std::string, const Tensor*>> result;
  for (const auto& [name, tensor] : all) {
    if (tensor->present()) result.emplace_back(name, tensor);
  }
  return result;
}

ShortConvResults forward_outputs(const ShortConvCase& problem) {
  ShortConvResults outputs;
  outputs.y = poisoned_like(problem.x);
  outputs.final_state = poisoned(problem.spec.dtype, state_shape(problem.spec));
  return outputs;
}

ShortConvResults backward_outputs(const ShortConvCase& problem) {
  ShortConvResults outputs;
  outputs.dx = poisoned_like(problem.x);
  outputs.dw = poisoned_like(problem.w);
  outputs.dbias = poisoned_like(problem.bias);
  outputs.d_initial_state = poisoned_like(problem.initial_state);
  return outputs;
}

ShortConvResults step_outputs(const ShortConvCase& problem) {
  const ShortConvSpec& spec = problem.spec;
  ShortConvResults outputs;
  outputs.y = poisoned_like(problem.x);
  outputs.final_state = problem.initial_state.present() ? problem.initial_state : Tensor(spec.dtype, state_shape(spec));
  return outputs;
}

ShortConvForward forward_args(const ShortConvCase& problem, const ShortConvResults& outputs) {
  ShortConvForward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.residual = problem.residual.view();
  args.y = outputs.y.view();
  args.final_state = outputs.final_state.view();
  return args;
}

ShortConvBackward backward_args(const ShortConvCase& problem, const ShortConvResults& outputs) {
  ShortConvBackward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.dy = problem.dy.view();
  args.d_final_state = problem.d_final_state.view();
  args.dx = outputs.dx.view();
  args.dw = outputs.dw.view();
  args.dbias = outputs.dbias.view();
  args.d_initial_state = outputs.d_initial_state.view();
  return args;
}

ShortConvStep step_args(const ShortConvCase& problem, const ShortConvResults& outputs) {
  ShortConvStep args;
  args.in = problem.inputs();
  args.in.initial_state = {};
  args.options = problem.spec.options;
  args.residual = problem.residual.view();
  args.state = outputs.final_state.view();
  args.y = outputs.y.view();
  return args;
}

ShortConvResults forward(const ShortConvCase& problem, const Context& context) {
  ShortConvResults results = forward_outputs(problem);
  results.implementation = run(context, forward_args(problem, results));
  return results;
}

ShortConvResults backward(const ShortConvCase& problem, const Context& context) {
  ShortConvResults results = backward_outputs(problem);
  results.implementation = run(context, backward_args(problem, results));
  return results;
}

ShortConvResults step(const ShortConvCase& problem, const Context& context) {
  ShortConvResults results = step_outputs(problem);
  results.implementation = run(context, step_args(problem, results));
  return results;
}

}  // namespace fastweight::support
