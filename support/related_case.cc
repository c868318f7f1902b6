#include "support/related_case.h"

#include <cmath>

#include "support/random.h"

namespace fastweight::support {
namespace {

// Every tensor has its own stream: leaving one out does not change the others.
enum Stream : uint64_t { kQ = 1, kK, kV, kG, kBeta, kP, kA, kAStep, kB, kInitialState, kDO, kDFinalState };

std::vector<int64_t> state_shape(const RelatedSpec& spec) {
  const int64_t N = num_sequences(spec);
  if (spec.state_v_first) return {N, spec.H, spec.V, spec.K};
  return {N, spec.H, spec.K, spec.V};
}

bool is_gla(RelatedOp op) {
  return op == RelatedOp::kLinearAttention || op == RelatedOp::kSimpleGla || op == RelatedOp::kGla;
}
bool is_dplr(RelatedOp op) { return op == RelatedOp::kDplr || op == RelatedOp::kIplr; }

// x + 0.5 y
Tensor leaning(const Tensor& x, const Tensor& y) {
  Tensor sum = x;
  for (int64_t i = 0; i < x.size(); ++i) sum.set(i, x[i] + 0.5 * y[i]);
  return sum;
}

// The fields that the public structs of all families share.
template <class Args>
void set_common(const RelatedSpec& spec, const RelatedInputs<TensorView>& in, Args& args) {
  args.in.q = in.q;
  args.in.k = in.k;
  args.in.v = in.v;
  args.in.g = in.g;
  args.in.initial_state = in.initial_state;
  args.in.cu_seqlens = in.cu_seqlens;
  args.options.scale = spec.scale;
  args.options.chunk_size = spec.chunk_size;
  args.options.state_v_first = spec.state_v_first;
}
void set_own(const RelatedSpec& spec, const RelatedInputs<TensorView>& in, GlaInputs& own, GlaOptions& options) {
  own.g_gamma = in.g_gamma;
  options.gate = gate_of(spec.op);
}
void set_own(const RelatedSpec& spec, const RelatedInputs<TensorView>& in, CombaInputs& own, CombaOptions& options) {
  own.p = in.p;
  own.beta = in.beta;
  options.qk_l2norm = spec.qk_l2norm;
}
void set_own(const RelatedSpec& spec, const RelatedInputs<TensorView>& in, DplrInputs& own, DplrOptions& options) {
  own.a = in.a;
  own.b = in.b;
  options.gate = gate_of(spec.op);
}

template <class Args>
Args forward_args(const RelatedSpec& spec, const RelatedInputs<TensorView>& in, const RelatedOutputs<TensorView>& out) {
  Args args;
  set_common(spec, in, args);
  set_own(spec, in, args.in, args.options);
  args.o = out.o;
  args.final_state = out.final_state;
  args.chunk_states = out.chunk_states;
  return args;
}

template <class Args>
Args backward_args(const RelatedSpec& spec, const RelatedInputs<TensorView>& in,
                   const RelatedOutputs<TensorView>& out) {
  Args args;
  set_common(spec, in, args);
  set_own(spec, in, args.in, args.options);
  args.d_o = in.d_o;
  args.d_final_state = in.d_final_state;
  args.chunk_states = in.saved_states;
  args.dq = out.dq;
  args.dk = out.dk;
  args.dv = out.dv;
  args.dg = out.dg;
  args.d_initial_state = out.d_initial_state;
  return args;
}

}  // namespace

const char* name_of(RelatedOp op) {
  constexpr const char* kNames[] = {"linear_attention", "simple_gla", "gla", "comba", "iplr", "dplr"};
  return kNames[static_cast<size_t>(op)];
}

Gate gate_of(RelatedOp op) {
  constexpr Gate kGates[] = {Gate::kNone,    Gate::kPerHead, Gate::kPerChannel,
                             Gate::kPerHead, Gate::kNone,    Gate::kPerChannel};
  return kGates[static_cast<size_t>(op)];
}

std::vector<ImplementationInfo> implementations_of(RelatedOp op) {
  if (is_gla(op)) return gla_implementations();
  return is_dplr(op) ? dplr_implementations() : comba_implementations();
}

RelatedCase draw(const RelatedSpec& spec, uint64_t seed) {
  const int64_t B = spec.B, T = spec.T, H = spec.H, K = spec.K, V = spec.V;
  const DType wide = accumulator_type(spec.dtype);
  RelatedCase result;
  result.spec = spec;

  // Normalised before the rounding to the type of the tensor.
  const auto raw = [&](Stream stream) { return normals(DType::kF64, {B, T, H, K}, seed, stream); };
  const auto keys = [&](const Tensor& x) { return (spec.qk_l2norm ? x : unit_rows(x)).to(spec.dtype); };
  result.q = keys(raw(kQ));
  result.k = keys(raw(kK));
  result.v = normals(spec.dtype, {B, T, H, V}, seed, kV);
  if (spec.op == RelatedOp::kComba) {
    if (!spec.p_absent) result.p = keys(leaning(raw(kK), raw(kP)));
    if (!spec.beta_absent) result.beta = sigmoids(spec.gate_dtype, {B, T, H}, seed, kBeta);
  }
  if (is_dplr(spec.op)) {
    result.b = keys(raw(kB));
    const Tensor away = unit_rows(leaning(raw(kB), raw(kA)));
    Random step(seed, kAStep);
    double size = 0;
    int64_t i = 0;
    result.a = drawn(spec.dtype, {B, T, H, K}, [&] {
      if (i % K == 0) size = step.uniform();
      return -size * away[i++];
    });
  }
  if (spec.g_gamma) {
    int64_t head = 0;
    result.g_gamma =
        drawn(spec.gate_dtype, {H}, [&] { return std::log(1 - std::exp2(-static_cast<double>(2 + head++))); });
  } else if (gate_of(spec.op) != Gate::kNone) {
    std::vector<int64_t> shape{B, T, H};
    if (gate_of(spec.op) == Gate::kPerChannel) shape.push_back(K);
    result.g = log_decays(spec.gate_dtype, std::move(shape), seed, kG, spec.gate_divisor, spec.hard_gate_fraction);
  }
  if (spec.initial_state) result.initial_state = normals(wide, state_shape(spec), seed, kInitialState);
  result.cu_seqlens = offsets_tensor(spec.cu_seqlens);
  result.d_o = normals(spec.dtype, {B, T, H, V}, seed, kDO);
  result.d_final_state = normals(wide, state_shape(spec), seed, kDFinalState);
  return result;
}

RelatedCase in_double(const RelatedCase& problem) {
  RelatedCase result = problem;
  result.spec.dtype = result.spec.gate_dtype = DType::kF64;
  for (Tensor* tensor : result.all()) {
    if (tensor != &result.cu_seqlens) *tensor = tensor->to(DType::kF64);
  }
  return result;
}

std::vector<std::pair<std::string, const Tensor*>> RelatedResults::named() const {
  std::vector<std::pair<std::string, const Tensor*>> result;
  const auto tensors = all();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]->present()) result.emplace_back(kNames[i], tensors[i]);
  }
  return result;
}

std::string run_forward(const RelatedSpec& spec, const Context& context, const RelatedInputs<TensorView>& in,
                        const RelatedOutputs<TensorView>& out) {
  if (is_gla(spec.op)) return gla_forward(context, forward_args<GlaForward>(spec, in, out));
  if (is_dplr(spec.op)) return dplr_forward(context, forward_args<DplrForward>(spec, in, out));
  return comba_forward(context, forward_args<CombaForward>(spec, in, out));
}

std::string run_backward(const RelatedSpec& spec, const Context& context, const RelatedInputs<TensorView>& in,
                         const RelatedOutputs<TensorView>& out) {
  if (is_gla(spec.op)) return gla_backward(context, backward_args<GlaBackward>(spec, in, out));
  if (is_dplr(spec.op)) {
    DplrBackward args = backward_args<DplrBackward>(spec, in, out);
    args.da = out.da;
    args.db = out.db;
    return dplr_backward(context, args);
  }
  CombaBackward args = backward_args<CombaBackward>(spec, in, out);
  args.dp = out.dp;
  args.dbeta = out.dbeta;
  return comba_backward(context, args);
}

RelatedInputs<TensorView> views_of(const RelatedInputs<Tensor>& tensors) {
  RelatedInputs<TensorView> views;
  for (size_t i = 0; i < tensors.all().size(); ++i) *views.all()[i] = tensors.all()[i]->view();
  return views;
}

RelatedOutputs<TensorView> views_of(const RelatedOutputs<Tensor>& tensors) {
  RelatedOutputs<TensorView> views;
  for (size_t i = 0; i < tensors.all().size(); ++i) *views.all()[i] = tensors.all()[i]->view();
  return views;
}

RelatedResults forward_outputs(const RelatedCase& problem, bool chunk_states) {
  const RelatedSpec& spec = problem.spec;
  const DType wide = accumulator_type(spec.dtype);
  RelatedResults results;
  results.o = poisoned_like(problem.v);
  results.final_state = poisoned(wide, state_shape(spec));
  if (chunk_states) {
    std::vector<int64_t> shape = state_shape(spec);
    shape[0] = delta_rule_num_chunks(spec.T, problem.cu_seqlens.view(), spec.chunk_size);
    shape.insert(shape.begin(), spec.B);
    results.chunk_states = poisoned(wide, shape);
  }
  return results;
}

RelatedResults backward_outputs(const RelatedCase& problem) {
  RelatedResults results;
  results.dq = poisoned_like(problem.q);
  results.dk = poisoned_like(problem.k);
  results.dv = poisoned_like(problem.v);
  results.dp = poisoned_like(problem.p);
  results.da = poisoned_like(problem.a);
  results.db = poisoned_like(problem.b);
  results.dg = poisoned_like(problem.g);
  results.dbeta = poisoned_like(problem.beta);
  if (problem.initial_state.present()) {
    results.d_initial_state = poisoned(accumulator_type(problem.spec.dtype), state_shape(problem.spec));
  }
  return results;
}

RelatedResults forward(const RelatedCase& problem, const Context& context, bool chunk_states) {
  RelatedResults results = forward_outputs(problem, chunk_states);
  results.implementation = run_forward(problem.spec, context, views_of(problem), views_of(results));
  return results;
}

RelatedResults backward(const RelatedCase& problem, const Context& context, const Tensor& saved) {
  RelatedResults results = backward_outputs(problem);
  RelatedInputs<TensorView> in = views_of(problem);
  in.saved_states = saved.view();
  results.implementation = run_backward(problem.spec, context, in, views_of(results));
  return results;
}

}  // namespace fastweight::support
