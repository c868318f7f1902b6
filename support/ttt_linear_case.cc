#include "support/ttt_linear_case.h"

#include <array>

#include "support/random.h"

namespace fastweight::support {
namespace {

// Every tensor has its own stream: leaving one out does not change the others.
enum Stream : uint64_t {
  kQ = 1,
  kK,
  kV,
  kW,
  kB,
  kEta,
  kInitialState,
  kInitialStateBias,
  kDO,
  kDFinalState,
  kDFinalStateBias
};

DType wide(const TttLinearSpec& spec) { return accumulator_type(spec.dtype); }

std::vector<int64_t> state_shape(const TttLinearSpec& spec) { return {num_sequences(spec), spec.H, spec.D, spec.D}; }
std::vector<int64_t> bias_shape(const TttLinearSpec& spec) { return {num_sequences(spec), spec.H, 1, spec.D}; }

std::vector<PlacedView> with_inputs(TttLinearInputs& in, std::vector<PlacedView> views) {
  for (TensorView* view :
       {&in.q, &in.k, &in.v, &in.w, &in.b, &in.eta, &in.initial_state, &in.initial_state_bias, &in.cu_seqlens}) {
    views.push_back({view, false});
  }
  return views;
}

}  // namespace

std::vector<PlacedView> views_of(TttLinearForward& args) {
  return with_inputs(args.in, {{&args.o, true}, {&args.final_state, true}, {&args.final_state_bias, true}});
}

std::vector<PlacedView> views_of(TttLinearBackward& args) {
  return with_inputs(args.in, {{&args.d_o, false},
                               {&args.d_final_state, false},
                               {&args.d_final_state_bias, false},
                               {&args.dq, true},
                               {&args.dk, true},
                               {&args.dv, true},
                               {&args.dw, true},
                               {&args.db, true},
                               {&args.deta, true},
                               {&args.d_initial_state, true},
                               {&args.d_initial_state_bias, true}});
}

std::vector<PlacedView> views_of(TttLinearStep& args) {
  return with_inputs(args.in, {{&args.state, true},
                               {&args.state_bias, true},
                               {&args.gradient, true},
                               {&args.gradient_bias, true},
                               {&args.position, true},
                               {&args.state_indices, false},
                               {&args.o, true}});
}

std::string run(const Context& context, const TttLinearForward& args) {
  return run_placed(context, args, ttt_linear_forward, [](TttLinearForward& x) { return views_of(x); });
}
std::string run(const Context& context, const TttLinearBackward& args) {
  return run_placed(context, args, ttt_linear_backward, [](TttLinearBackward& x) { return views_of(x); });
}
std::string run(const Context& context, const TttLinearStep& args) {
  return run_placed(context, args, ttt_linear_step, [](TttLinearStep& x) { return views_of(x); });
}

TttLinearInputs TttLinearCase::inputs() const {
  TttLinearInputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  in.w = w.view();
  in.b = b.view();
  in.eta = eta.view();
  in.initial_state = initial_state.view();
  in.initial_state_bias = initial_state_bias.view();
  in.cu_seqlens = cu_seqlens.view();
  return in;
}

TttLinearCase draw(const TttLinearSpec& spec, uint64_t seed) {
  const std::vector<int64_t> rows{spec.B, spec.T, spec.H, spec.D};
  const auto uniforms = [&](DType dtype, std::vector<int64_t> shape, Stream stream) {
    Random random(seed, stream);
    return drawn(dtype, std::move(shape), [&] { return random.uniform(); });
  };
  TttLinearCase result;
  result.spec = spec;
  result.q = normals(spec.dtype, rows, seed, kQ);
  result.k = unit_rows(normals(DType::kF64, rows, seed, kK)).to(spec.dtype);
  result.v = normals(spec.dtype, rows, seed, kV);
  result.w = normals(spec.parameter_dtype, {spec.H, spec.D}, seed, kW);
  result.b = normals(spec.parameter_dtype, {spec.H, spec.D}, seed, kB);
  Random random(seed, kEta);
  result.eta = drawn(spec.parameter_dtype, {spec.B, spec.T, spec.H, 1}, [&] { return 0.005 * random.normal(); });
  if (spec.initial_state) result.initial_state = normals(wide(spec), state_shape(spec), seed, kInitialState);
  if (spec.initial_state_bias) {
    result.initial_state_bias = normals(wide(spec), bias_shape(spec), seed, kInitialStateBias);
  }
  result.cu_seqlens = offsets_tensor(spec.cu_seqlens);
  result.d_o = uniforms(spec.dtype, rows, kDO);
  result.d_final_state = uniforms(wide(spec), state_shape(spec), kDFinalState);
  result.d_final_state_bias = uniforms(wide(spec), bias_shape(spec), kDFinalStateBias);
  return result;
}

TttLinearCase in_double(const TttLinearCase& problem) {
  TttLinearCase result = problem;
  result.spec.dtype = DType::kF64;
  result.spec.parameter_dtype = DType::kF64;
  for (Tensor* tensor : {&result.q, &result.k, &result.v, &result.w, &result.b, &result.eta, &result.initial_state,
                         &result.initial_state_bias, &result.d_o, &result.d_final_state, &result.d_final_state_bias}) {
    *tensor = tensor->to(DType::kF64);
  }
  return result;
}

std::vector<std::pair<std::string, const Tensor*>> TttLinearResults::named() const {
  const std::array<std::pair<const char*, const Tensor*>, 14> all{{{"o", &o},
                                                                   {"final_state", &final_state},
                                                                   {"final_state_bias", &final_state_bias},
                                                                   {"gradient", &gradient},
                                                                   {"gradient_bias", &gradient_bias},
                                                                   {"position", &position},
                                                                   {"dq", &dq},
                                                                   {"dk", &dk},
                                                                   {"dv", &dv},
                                                                   {"dw", &dw},
                                                                   {"db", &db},
                                                                   {"deta", &deta},
                                                                   {"d_initial_state", &d_initial_state},
                                                                   {"d_initial_state_bias", &d_initial_state_bias}}};
  std::vector<std::pair<std::string, const Tensor*>> result;
  for (const auto& [name, tensor] : all) {
    if (tensor->present()) result.emplace_back(name, tensor);
  }
  return result;
}

TttLinearOpen opened(const TttLinearCase& problem) {
  const TttLinearSpec& spec = problem.spec;
  TttLinearOpen open;
  open.state =
      problem.initial_state.present() ? problem.initial_state.to(wide(spec)) : Tensor(wide(spec), state_shape(spec));
  open.state_bias = problem.initial_state_bias.present() ? problem.initial_state_bias.to(wide(spec))
                                                         : Tensor(wide(spec), bias_shape(spec));
  open.gradient = Tensor(wide(spec), state_shape(spec));
  open.gradient_bias = Tensor(wide(spec), bias_shape(spec));
  open.position = Tensor(DType::kI32, {num_sequences(spec)});
  return open;
}

TttLinearResults forward_outputs(const TttLinearCase& problem) {
  const TttLinearSpec& spec = problem.spec;
  TttLinearResults outputs;
  outputs.o = poisoned(spec.dtype, problem.v.shape());
  outputs.final_state = poisoned(wide(spec), state_shape(spec));
  outputs.final_state_bias = poisoned(wide(spec), bias_shape(spec));
  return outputs;
}

TttLinearResults backward_outputs(const TttLinearCase& problem) {
  const TttLinearSpec& spec = problem.spec;
  TttLinearResults outputs;
  outputs.dq = poisoned_like(problem.q);
  outputs.dk = poisoned_like(problem.k);
  outputs.dv = poisoned_like(problem.v);
  outputs.dw = poisoned_like(problem.w);
  outputs.db = poisoned_like(problem.b);
  outputs.deta = poisoned_like(problem.eta);
  if (problem.initial_state.present()) outputs.d_initial_state = poisoned(wide(spec), state_shape(spec));
  if (problem.initial_state_bias.present()) outputs.d_initial_state_bias = poisoned(wide(spec), bias_shape(spec));
  return outputs;
}

TttLinearResults step_outputs(const TttLinearCase& problem, const TttLinearOpen& open) {
  TttLinearResults outputs;
  outputs.o = poisoned(problem.spec.dtype, problem.v.shape());
  outputs.final_state = open.state;
  outputs.final_state_bias = open.state_bias;
  outputs.gradient = open.gradient;
  outputs.gradient_bias = open.gradient_bias;
  outputs.position = open.position;
  return outputs;
}

TttLinearForward forward_args(const TttLinearCase& problem, const TttLinearResults& outputs) {
  TttLinearForward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.o = outputs.o.view();
  args.final_state = outputs.final_state.view();
  args.final_state_bias = outputs.final_state_bias.view();
  return args;
}

TttLinearBackward backward_args(const TttLinearCase& problem, const TttLinearResults& outputs) {
  TttLinearBackward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.d_o = problem.d_o.view();
  args.d_final_state = problem.d_final_state.view();
  args.d_final_state_bias = problem.d_final_state_bias.view();
  args.dq = outputs.dq.view();
  args.dk = outputs.dk.view();
  args.dv = outputs.dv.view();
  args.dw = outputs.dw.view();
  args.db = outputs.db.view();
  args.deta = outputs.deta.view();
  args.d_initial_state = outputs.d_initial_state.view();
  args.d_initial_state_bias = outputs.d_initial_state_bias.view();
  return args;
}

TttLinearStep step_args(const TttLinearCase& problem, const TttLinearResults& outputs) {
  TttLinearStep args;
  args.in = problem.inputs();
  args.in.initial_state = args.in.initial_state_bias = {};
  args.options = problem.spec.options;
  args.state = outputs.final_state.view();
  args.state_bias = outputs.final_state_bias.view();
  args.gradient = outputs.gradient.view();
  args.gradient_bias = outputs.gradient_bias.view();
  args.position = outputs.position.view();
  args.o = outputs.o.view();
  return args;
}

TttLinearResults forward(const TttLinearCase& problem, const Context& context) {
  TttLinearResults results = forward_outputs(problem);
  results.implementation = run(context, forward_args(problem, results));
  return results;
}

TttLinearResults backward(const TttLinearCase& problem, const Context& context) {
  TttLinearResults results = backward_outputs(problem);
  results.implementation = run(context, backward_args(problem, results));
  return results;
}

TttLinearResults step(const TttLinearCase& problem, const Context& context) {
  return step(problem, opened(problem), context);
}

TttLinearResults step(const TttLinearCase& problem, const TttLinearOpen& open, const Context& context) {
  TttLinearResults results = step_outputs(problem, open);
  results.implementation = run(context, step_args(problem, results));
  return results;
}

}  // namespace fastweight::support
