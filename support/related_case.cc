#include "support/related_case.h"

#include <cmath>
#include <sstream>

namespace fastweight::support {
namespace {

// Every tensor has its own stream: leaving one out does not change the others.
enum Stream : uint64_t { kQ = 1, kK, kV, kG, kBeta, kP, kA, kAStep, kB, kInitialState, kDO, kDFinalState };

std::vector<int64_t> state_shape(const RelatedSpec& spec) {
  const int64_t N = num_sequences(spec);
  if (spec.state_v_first) return {N, spec.HV(), spec.V, spec.K};
  return {N, spec.HV(), spec.K, spec.V};
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

}  // namespace

template <class Args>
void set_options(const RelatedSpec& spec, Args& args) {
  args.options.scale = spec.scale;
  args.options.chunk_size = spec.chunk_size;
  args.options.state_v_first = spec.state_v_first;
  if constexpr (requires { args.options.gate; }) args.options.gate = gate_of(spec.op);
  if constexpr (requires { args.options.qk_l2norm; }) args.options.qk_l2norm = spec.qk_l2norm;
}

std::string describe(const RelatedSpec& spec) {
  std::ostringstream out;
  out << name_of(spec.op) << " B=" << spec.B << " T=" << spec.T << " H=" << spec.H << " K=" << spec.K << " V=" << spec.V
      << " C=" << spec.chunk_size << " " << name_of(spec.dtype) << " gates " << name_of(spec.gate_dtype);
  out << describe_lengths(spec.cu_seqlens);
  if (spec.scale != GlaOptions::kUnset) out << " scale=" << spec.scale;
  if (spec.state_v_first) out << " state_v_first";
  if (spec.qk_l2norm) out << " qk_l2norm";
  if (!spec.initial_state) out << " no_initial_state";
  if (spec.g_gamma) out << " g_gamma";
  if (spec.p_absent) out << " p_absent";
  if (spec.beta_absent) out << " beta_absent";
  if (spec.beta_per_value) out << " beta_per_value";
  if (spec.group != 1) out << " group=" << spec.group;
  if (spec.gate_divisor != 1) out << " gate_divisor=" << spec.gate_divisor;
  if (spec.hard_gate_fraction > 0) out << " hard_gate_fraction=" << spec.hard_gate_fraction;
  return out.str();
}

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

std::span<const CaseTensor<RelatedCase>> RelatedCase::fields() {
  using Self = RelatedCase;
  static constexpr CaseTensor<Self> kFields[] = {
      {"q", &Self::q},
      {"k", &Self::k},
      {"v", &Self::v},
      {"p", &Self::p},
      {"a", &Self::a},
      {"b", &Self::b},
      {"g", &Self::g},
      {"beta", &Self::beta},
      {"initial_state", &Self::initial_state, Part::kStart},
      {"g_gamma", &Self::g_gamma, Part::kCall},
      {"cu_seqlens", &Self::cu_seqlens, Part::kCall},
      {"d_o", &Self::d_o},
      {"d_final_state", &Self::d_final_state, Part::kEnd},
  };
  return kFields;
}

std::span<const CaseTensor<RelatedResults>> RelatedResults::fields() {
  using Self = RelatedResults;
  static constexpr CaseTensor<Self> kFields[] = {
      {"o", &Self::o},
      {"final_state", &Self::final_state, Part::kEnd},
      {"chunk_states", &Self::chunk_states, Part::kCall},
      {"dq", &Self::dq},
      {"dk", &Self::dk},
      {"dv", &Self::dv},
      {"dp", &Self::dp},
      {"da", &Self::da},
      {"db", &Self::db},
      {"dg", &Self::dg},
      {"dbeta", &Self::dbeta},
      {"d_initial_state", &Self::d_initial_state, Part::kStart},
  };
  return kFields;
}

RelatedCase draw(const RelatedSpec& spec, uint64_t seed) {
  const int64_t B = spec.B, T = spec.T, H = spec.H, HV = spec.HV(), K = spec.K, V = spec.V;
  const DType wide = accumulator_type(spec.dtype);
  RelatedCase result;
  result.spec = spec;

  // Normalised before the rounding to the type of the tensor.
  const auto raw = [&](Stream stream) { return normals(DType::kF64, {B, T, H, K}, seed, stream); };
  const auto keys = [&](const Tensor& x) { return (spec.qk_l2norm ? x : unit_rows(x)).to(spec.dtype); };
  result.q = keys(raw(kQ));
  result.k = keys(raw(kK));
  result.v = normals(spec.dtype, {B, T, HV, V}, seed, kV);
  if (spec.op == RelatedOp::kComba) {
    if (!spec.p_absent) result.p = keys(leaning(raw(kK), raw(kP)));
    std::vector<int64_t> shape{B, T, HV};
    if (spec.beta_per_value) shape.push_back(V);
    if (!spec.beta_absent) result.beta = sigmoids(spec.gate_dtype, std::move(shape), seed, kBeta);
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
    std::vector<int64_t> shape{B, T, HV};
    if (gate_of(spec.op) == Gate::kPerChannel) shape.push_back(K);
    result.g = log_decays(spec.gate_dtype, std::move(shape), seed, kG, spec.gate_divisor, spec.hard_gate_fraction);
  }
  if (spec.initial_state) result.initial_state = normals(wide, state_shape(spec), seed, kInitialState);
  result.cu_seqlens = offsets_tensor(spec.cu_seqlens);
  result.d_o = normals(spec.dtype, {B, T, HV, V}, seed, kDO);
  result.d_final_state = normals(wide, state_shape(spec), seed, kDFinalState);
  return result;
}

RelatedResults outputs_of(Mode mode, const RelatedCase& problem) {
  const RelatedSpec& spec = problem.spec;
  const DType wide = accumulator_type(spec.dtype);
  std::vector<int64_t> shape = state_shape(spec);
  RelatedResults results;
  if (mode != Mode::kBackward) results.o = poisoned_like(problem.v);
  if (mode == Mode::kStep) {
    results.final_state = problem.initial_state.present() ? problem.initial_state : Tensor(wide, shape);
    return results;
  }
  if (mode == Mode::kForward) {
    results.final_state = poisoned(wide, shape);
    shape[0] = delta_rule_num_chunks(spec.T, problem.cu_seqlens.view(), spec.chunk_size);
    shape.insert(shape.begin(), spec.B);
    results.chunk_states = poisoned(wide, shape);
    return results;
  }
  if (is_gla(spec.op)) add_gradients<GlaBackward>(problem, results);
  if (is_dplr(spec.op)) add_gradients<DplrBackward>(problem, results);
  if (spec.op == RelatedOp::kComba) add_gradients<CombaBackward>(problem, results);
  return results;
}

Call call_of(Mode mode, const RelatedCase& problem, const RelatedResults& outputs) {
  const RelatedOp op = problem.spec.op;
  if (mode == Mode::kForward) {
    if (is_gla(op)) return bound_call(gla_forward, problem, outputs);
    return is_dplr(op) ? bound_call(dplr_forward, problem, outputs) : bound_call(comba_forward, problem, outputs);
  }
  if (mode == Mode::kStep) {
    if (is_gla(op)) return bound_call(gla_step, problem, outputs);
    return is_dplr(op) ? bound_call(dplr_step, problem, outputs) : bound_call(comba_step, problem, outputs);
  }
  if (is_gla(op)) return bound_call(gla_backward, problem, outputs);
  return is_dplr(op) ? bound_call(dplr_backward, problem, outputs) : bound_call(comba_backward, problem, outputs);
}

RelatedResults forward(const RelatedCase& problem, const Context& context, bool chunk_states) {
  RelatedResults results = outputs_of(Mode::kForward, problem);
  if (!chunk_states) results.chunk_states = {};
  results.implementation = call_of(Mode::kForward, problem, results).run(context);
  return results;
}

RelatedResults backward(const RelatedCase& problem, const Context& context, const Tensor& saved) {
  RelatedResults results = outputs_of(Mode::kBackward, problem);
  const Call call = call_of(Mode::kBackward, problem, results);
  call["chunk_states"] = saved.view();
  results.implementation = call.run(context);
  return results;
}

RelatedResults step(const RelatedCase& problem, const Context& context) { return run(Mode::kStep, problem, context); }

Tolerance tolerance(const RelatedCase& problem, const RelatedResults&, const std::string& tensor, DType result_type) {
  const DType dtype = problem.spec.dtype;
  if (dtype == DType::kF64 && result_type == DType::kF64) return {1e-10, 1e-13};
  if (is_16_bit(dtype) || is_16_bit(result_type)) return {tensor == "dg" || tensor == "dbeta" ? 2e-2 : 8e-3, 1e-6};
  return {tensor == "dbeta" ? 3e-5 : 1e-5, 1e-6};  // dbeta is the difference of two sums, over v and over what was read
}

}  // namespace fastweight::support
