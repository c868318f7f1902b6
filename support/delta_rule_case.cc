#include "support/delta_rule_case.h"

#include <array>
#include <cmath>

#include "support/random.h"

namespace fastweight::support {
namespace {

// Every tensor has its own stream: leaving one out does not change the others.
enum Stream : uint64_t { kQ = 1, kK, kV, kG, kBeta, kALog, kDtBias, kInitialState, kDO, kDFinalState };

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Tensor draw_gate(const DeltaRuleSpec& spec, std::vector<int64_t> shape, uint64_t seed) {
  if (spec.options.gate_in_kernel) return normals(spec.gate_dtype, std::move(shape), seed, kG);
  Tensor g = log_decays(spec.gate_dtype, std::move(shape), seed, kG, spec.gate_divisor, spec.hard_gate_fraction);
  for (int64_t i = 0; i < g.size() && spec.options.safe_gate; ++i) g.set(i, std::max(g[i], -5.0));
  return g;
}

DType wide(const DeltaRuleSpec& spec) { return accumulator_type(spec.dtype); }

std::vector<int64_t> state_shape(const DeltaRuleSpec& spec) {
  if (spec.options.state_v_first) return {num_sequences(spec), spec.HV, spec.V, spec.K};
  return {num_sequences(spec), spec.HV, spec.K, spec.V};
}

std::vector<PlacedView> with_inputs(DeltaRuleInputs& in, std::vector<PlacedView> views) {
  for (TensorView* view :
       {&in.q, &in.k, &in.v, &in.g, &in.beta, &in.a_log, &in.dt_bias, &in.initial_state, &in.cu_seqlens}) {
    views.push_back({view, false});
  }
  return views;
}

}  // namespace

std::vector<PlacedView> views_of(DeltaRuleForward& args) {
  return with_inputs(args.in, {{&args.o, true}, {&args.final_state, true}, {&args.chunk_states, true}});
}

std::vector<PlacedView> views_of(DeltaRuleBackward& args) {
  return with_inputs(args.in, {{&args.d_o, false},
                               {&args.d_final_state, false},
                               {&args.chunk_states, false},
                               {&args.dq, true},
                               {&args.dk, true},
                               {&args.dv, true},
                               {&args.dg, true},
                               {&args.dbeta, true},
                               {&args.da_log, true},
                               {&args.ddt_bias, true},
                               {&args.d_initial_state, true}});
}

std::vector<PlacedView> views_of(DeltaRuleStep& args) {
  return with_inputs(args.in, {{&args.state, true}, {&args.state_indices, false}, {&args.o, true}});
}

std::string run(const Context& context, const DeltaRuleForward& args) {
  return run_placed(context, args, delta_rule_forward, [](DeltaRuleForward& x) { return views_of(x); });
}
std::string run(const Context& context, const DeltaRuleBackward& args) {
  return run_placed(context, args, delta_rule_backward, [](DeltaRuleBackward& x) { return views_of(x); });
}
std::string run(const Context& context, const DeltaRuleStep& args) {
  return run_placed(context, args, delta_rule_step, [](DeltaRuleStep& x) { return views_of(x); });
}

std::string DeltaRuleCase::op() const {
  switch (spec.options.gate) {
    case Gate::kNone:
      return "delta_rule";
    case Gate::kPerHead:
      return "gdn";
    case Gate::kPerChannel:
      return "kda";
  }
  return "";
}

DeltaRuleInputs DeltaRuleCase::inputs() const {
  DeltaRuleInputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  in.g = g.view();
  in.beta = beta.view();
  in.a_log = a_log.view();
  in.dt_bias = dt_bias.view();
  in.initial_state = initial_state.view();
  in.cu_seqlens = cu_seqlens.view();
  return in;
}

DeltaRuleCase draw(const DeltaRuleSpec& spec, uint64_t seed) {
  const int64_t B = spec.B, T = spec.T, H = spec.H, HV = spec.HV, K = spec.K, V = spec.V;
  const DeltaRuleOptions& options = spec.options;
  const bool per_channel = options.gate == Gate::kPerChannel;
  DeltaRuleCase result;
  result.spec = spec;

  // Normalised before the rounding to the type of the tensor.
  const auto draw_qk = [&](Stream stream) {
    const Tensor raw = normals(DType::kF64, {B, T, H, K}, seed, stream);
    return (options.qk_l2norm ? raw : unit_rows(raw)).to(spec.dtype);
  };
  result.q = draw_qk(kQ);
  result.k = draw_qk(kK);
  result.v = normals(spec.dtype, {B, T, HV, V}, seed, kV);

  if (options.gate != Gate::kNone) {
    std::vector<int64_t> shape{B, T, HV};
    if (per_channel) shape.push_back(K);
    result.g = draw_gate(spec, std::move(shape), seed);
    if (options.gate_in_kernel) {
      if (!spec.a_log_absent) {
        Random random(seed, kALog);
        result.a_log = drawn(wide(spec), {HV}, [&] { return std::log((1 + 15 * random.uniform()) / 16); });
      }
      if (!spec.dt_bias_absent) {
        result.dt_bias = normals(wide(spec), {per_channel ? HV * K : HV}, seed, kDtBias);
      }
    }
  }
  if (!spec.beta_absent) {
    std::vector<int64_t> shape{B, T, HV};
    if (spec.beta_per_value) shape.push_back(V);
    Random random(seed, kBeta);
    result.beta = drawn(spec.gate_dtype, std::move(shape), [&] {
      const double x = random.normal();
      return options.beta_sigmoid ? x : sigmoid(x);
    });
  }
  if (spec.initial_state) result.initial_state = normals(wide(spec), state_shape(spec), seed, kInitialState);
  result.cu_seqlens = offsets_tensor(spec.cu_seqlens);
  result.d_o = normals(spec.dtype, {B, T, HV, V}, seed, kDO);
  result.d_final_state = normals(wide(spec), state_shape(spec), seed, kDFinalState);
  return result;
}

DeltaRuleCase in_double(const DeltaRuleCase& problem) {
  DeltaRuleCase result = problem;
  result.spec.dtype = DType::kF64;
  result.spec.gate_dtype = DType::kF64;
  for (Tensor* tensor : {&result.q, &result.k, &result.v, &result.g, &result.beta, &result.a_log, &result.dt_bias,
                         &result.initial_state, &result.d_o, &result.d_final_state}) {
    *tensor = tensor->to(DType::kF64);
  }
  return result;
}

std::vector<std::pair<std::string, const Tensor*>> DeltaRuleResults::named() const {
  const std::array<std::pair<const char*, const Tensor*>, 11> all{{{"o", &o},
                                                                   {"final_state", &final_state},
                                                                   {"chunk_states", &chunk_states},
                                                                   {"dq", &dq},
                                                                   {"dk", &dk},
                                                                   {"dv", &dv},
                                                                   {"dg", &dg},
                                                                   {"dbeta", &dbeta},
                                                                   {"da_log", &da_log},
                                                                   {"ddt_bias", &ddt_bias},
                                                                   {"d_initial_state", &d_initial_state}}};
  std::vector<std::pair<std::string, const Tensor*>> result;
  for (const auto& [name, tensor] : all) {
    if (tensor->present()) result.emplace_back(name, tensor);
  }
  return result;
}

DeltaRuleResults forward_outputs(const DeltaRuleCase& problem, bool chunk_states) {
  const DeltaRuleSpec& spec = problem.spec;
  DeltaRuleResults outputs;
  outputs.o = poisoned(spec.dtype, problem.v.shape());
  outputs.final_state = poisoned(wide(spec), state_shape(spec));
  if (chunk_states) {
    std::vector<int64_t> shape = state_shape(spec);
    shape[0] = delta_rule_num_chunks(spec.T, problem.cu_seqlens.view(), spec.options.chunk_size);
    shape.insert(shape.begin(), spec.B);
    outputs.chunk_states = poisoned(wide(spec), shape);
  }
  return outputs;
}

DeltaRuleResults backward_outputs(const DeltaRuleCase& problem) {
  const DeltaRuleSpec& spec = problem.spec;
  DeltaRuleResults outputs;
  outputs.dq = poisoned_like(problem.q);
  outputs.dk = poisoned_like(problem.k);
  outputs.dv = poisoned_like(problem.v);
  outputs.dg = poisoned_like(problem.g);
  outputs.dbeta = poisoned_like(problem.beta);
  outputs.da_log = poisoned_like(problem.a_log);
  outputs.ddt_bias = poisoned_like(problem.dt_bias);
  if (problem.initial_state.present()) outputs.d_initial_state = poisoned(wide(spec), state_shape(spec));
  return outputs;
}

DeltaRuleResults step_outputs(const DeltaRuleCase& problem) {
  const DeltaRuleSpec& spec = problem.spec;
  DeltaRuleResults outputs;
  outputs.o = poisoned(spec.dtype, problem.v.shape());
  outputs.final_state = problem.initial_state.present() ? problem.initial_state : Tensor(wide(spec), state_shape(spec));
  return outputs;
}

DeltaRuleForward forward_args(const DeltaRuleCase& problem, const DeltaRuleResults& outputs) {
  DeltaRuleForward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.o = outputs.o.view();
  args.final_state = outputs.final_state.view();
  args.chunk_states = outputs.chunk_states.view();
  return args;
}

DeltaRuleBackward backward_args(const DeltaRuleCase& problem, const DeltaRuleResults& outputs, const Tensor& saved) {
  DeltaRuleBackward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.d_o = problem.d_o.view();
  args.d_final_state = problem.d_final_state.view();
  args.chunk_states = saved.view();
  args.dq = outputs.dq.view();
  args.dk = outputs.dk.view();
  args.dv = outputs.dv.view();
  args.dg = outputs.dg.view();
  args.dbeta = outputs.dbeta.view();
  args.da_log = outputs.da_log.view();
  args.ddt_bias = outputs.ddt_bias.view();
  args.d_initial_state = outputs.d_initial_state.view();
  return args;
}

DeltaRuleStep step_args(const DeltaRuleCase& problem, const DeltaRuleResults& outputs) {
  DeltaRuleStep args;
  args.in = problem.inputs();
  args.in.initial_state = {};
  args.options = problem.spec.options;
  args.state = outputs.final_state.view();
  args.o = outputs.o.view();
  return args;
}

DeltaRuleResults forward(const DeltaRuleCase& problem, const Context& context, bool chunk_states) {
  DeltaRuleResults results = forward_outputs(problem, chunk_states);
  results.implementation = run(context, forward_args(problem, results));
  return results;
}

DeltaRuleResults backward(const DeltaRuleCase& problem, const Context& context, const Tensor& saved) {
  DeltaRuleResults results = backward_outputs(problem);
  results.implementation = run(context, backward_args(problem, results, saved));
  return results;
}

DeltaRuleResults step(const DeltaRuleCase& problem, const Context& context) {
  DeltaRuleResults results = step_outputs(problem);
  results.implementation = run(context, step_args(problem, results));
  return results;
}

}  // namespace fastweight::support
