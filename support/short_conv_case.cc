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

ShortConvResults forward(const ShortConvCase& problem, const Context& context) {
  const ShortConvSpec& spec = problem.spec;
  ShortConvResults results;
  results.y = poisoned_like(problem.x);
  results.final_state = poisoned(spec.dtype, state_shape(spec));
  ShortConvForward args;
  args.in = problem.inputs();
  args.options = spec.options;
  args.residual = problem.residual.view();
  args.y = results.y.view();
  args.final_state = results.final_state.view();
  results.implementation = run(context, args);
  return results;
}

ShortConvResults backward(const ShortConvCase& problem, const Context& context) {
  ShortConvResults results;
  results.dx = poisoned_like(problem.x);
  results.dw = poisoned_like(problem.w);
  results.dbias = poisoned_like(problem.bias);
  results.d_initial_state = poisoned_like(problem.initial_state);
  ShortConvBackward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.dy = problem.dy.view();
  args.d_final_state = problem.d_final_state.view();
  args.dx = results.dx.view();
  args.dw = results.dw.view();
  args.dbias = results.dbias.view();
  args.d_initial_state = results.d_initial_state.view();
  results.implementation = run(context, args);
  return results;
}

ShortConvResults step(const ShortConvCase& problem, const Context& context) {
  const ShortConvSpec& spec = problem.spec;
  ShortConvResults results;
  results.y = poisoned_like(problem.x);
  results.final_state = problem.initial_state.present() ? problem.initial_state : Tensor(spec.dtype, state_shape(spec));
  ShortConvStep args;
  args.in = problem.inputs();
  args.in.initial_state = {};
  args.options = spec.options;
  args.residual = problem.residual.view();
  args.state = results.final_state.view();
  args.y = results.y.view();
  results.implementation = run(context, args);
  return results;
}

}  // namespace fastweight::support
