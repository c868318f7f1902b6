#include "support/blocks_case.h"

#include <cmath>
#include <sstream>
#include <stdexcept>

namespace fastweight::support {
namespace {

// Every tensor has its own stream: leaving one out does not change the others.
enum Stream : uint64_t { kX = 1, kK, kV, kBeta, kGate, kALog, kDtBias, kDFirst, kDSecond };

DType wide(const BlockSpec& spec) { return spec.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

Context oracle() {
  Context context;
  context.implementation = "reference";
  return context;
}

std::vector<int64_t> gate_shape(const BlockSpec& spec) {
  if (spec.gate == Gate::kPerChannel) return {spec.B, spec.T, spec.HV, spec.K};
  return {spec.B, spec.T, spec.HV};
}

// Log decays: -a softplus(N(0,1)), with a from 0.05 to 0.55.
Tensor log_decays(const BlockSpec& spec, DType dtype, uint64_t seed) {
  Random random(seed, kGate);
  return drawn(dtype, gate_shape(spec), [&] {
    const double rate = 0.05 + 0.5 * random.uniform();
    return -spec.gate_scale * rate * std::log1p(std::exp(random.normal()));
  });
}

Tensor summed(const BlockSpec& spec, const Tensor& x, const Tensor& cu_seqlens) {
  Tensor y(DType::kF64, x.shape());
  ChunkLocalCumsum args;
  args.x = x.view();
  args.cu_seqlens = cu_seqlens.view();
  args.chunk_size = static_cast<int32_t>(spec.C);
  args.y = y.view();
  chunk_local_cumsum(oracle(), args);
  return y;
}

std::vector<int64_t> matrix_shape(const BlockSpec& spec) { return {spec.B, spec.T, spec.HV, spec.C}; }

// k, v, beta, gamma, and A and J that belong to them.
void draw_chunk_tensors(const BlockSpec& spec, uint64_t seed, BlockCase& result) {
  const DType dtype = spec.dtype;
  result.k = unit_rows(normals(DType::kF64, {spec.B, spec.T, spec.H, spec.K}, seed, kK)).to(dtype);
  if (spec.beta) {
    Random random(seed, kBeta);
    result.beta = drawn(wide(spec), {spec.B, spec.T, spec.HV}, [&] { return random.uniform(); });
  }
  if (spec.gate != Gate::kNone) {
    result.gamma = summed(spec, log_decays(spec, DType::kF64, seed), result.cu_seqlens).to(wide(spec));
  }
  if (spec.block == Block::kScaledDotKkt) return;

  Tensor a(DType::kF64, matrix_shape(spec)), j(DType::kF64, matrix_shape(spec));
  ScaledDotKktForward kkt;
  const Tensor k = result.k.to(DType::kF64);
  kkt.in = {k.view(), result.beta.view(), result.gamma.view(), result.cu_seqlens.view()};
  kkt.a = a.view();
  scaled_dot_kkt_forward(oracle(), kkt);
  result.a = a.to(wide(spec));
  SolveTrilForward solve;
  solve.a = result.a.view();
  solve.cu_seqlens = result.cu_seqlens.view();
  solve.j = j.view();
  solve_tril_forward(oracle(), solve);
  result.j = j.to(dtype);
  if (spec.block == Block::kWy) {
    result.v = normals(dtype, {spec.B, spec.T, spec.HV, spec.V}, seed, kV);
    result.a = {};
    return;
  }
  result.k = result.beta = result.gamma = {};
}

void draw_norm_tensors(const BlockSpec& spec, uint64_t seed, BlockCase& result) {
  result.x = normals(spec.dtype, {spec.B, spec.T, spec.H, spec.K}, seed, kX);
  Tensor y(DType::kF64, result.x.shape()), rstd(DType::kF64, {spec.B, spec.T, spec.H});
  const Tensor x = result.x.to(DType::kF64);
  L2NormForward args;
  args.x = x.view();
  args.y = y.view();
  args.rstd = rstd.view();
  l2norm_forward(oracle(), args);
  result.y = y.to(spec.dtype);
  result.rstd = rstd.to(wide(spec));
}

void draw_gate_tensors(const BlockSpec& spec, uint64_t seed, BlockCase& result) {
  result.x = normals(spec.dtype, gate_shape(spec), seed, kX);
  if (spec.a_log) {
    Random random(seed, kALog);
    result.a_log = drawn(wide(spec), {spec.HV}, [&] { return std::log(0.2 + random.uniform()); });
  }
  if (!spec.dt_bias) return;
  result.dt_bias = spec.gate == Gate::kPerChannel ? normals(wide(spec), {spec.HV, spec.K}, seed, kDtBias)
                                                  : normals(wide(spec), {spec.HV}, seed, kDtBias);
}

}  // namespace

// What a block has beside its tensors.
template <class Args>
void set_options(const BlockSpec& spec, Args& args) {
  if constexpr (requires { args.reverse; }) {
    args.chunk_size = static_cast<int32_t>(spec.C);
    args.reverse = spec.reverse;
  }
  if constexpr (requires { args.options.lower_bound; }) {
    args.options.chunk_size = static_cast<int32_t>(spec.C);
    if (spec.lower_bound) args.options.lower_bound = -5;
  }
  if constexpr (requires { args.options.activation; }) {
    args.options.activation = spec.sigmoid ? NormGate::kSigmoid : NormGate::kSilu;
  }
}

const char* name_of(Block block) {
  constexpr const char* kNames[] = {"chunk_local_cumsum", "scaled_dot_kkt", "solve_tril", "wy", "l2norm",
                                    "gate_activation",    "rms_norm"};
  return kNames[static_cast<size_t>(block)];
}

std::string describe(const BlockSpec& spec) {
  std::ostringstream out;
  out << name_of(spec.block) << " B=" << spec.B << " T=" << spec.T << " H=" << spec.H << " HV=" << spec.HV
      << " K=" << spec.K << " V=" << spec.V << " C=" << spec.C << " gate=" << static_cast<int>(spec.gate) << " "
      << name_of(spec.dtype);
  out << describe_lengths(spec.cu_seqlens);
  if (!spec.beta) out << " no_beta";
  if (spec.reverse) out << " reverse";
  if (spec.lower_bound) out << " lower_bound";
  if (spec.block == Block::kRmsNorm) {
    out << (spec.gated ? spec.sigmoid ? " sigmoid" : " silu" : " no_gate") << (spec.weight ? "" : " no_weight");
  }
  if (!spec.a_log) out << " no_a_log";
  if (!spec.dt_bias) out << " no_dt_bias";
  if (spec.gate_scale != 1) out << " gate_scale=" << spec.gate_scale;
  return out.str();
}

std::span<const CaseTensor<BlockCase>> BlockCase::fields() {
  using Self = BlockCase;
  static constexpr CaseTensor<Self> kFields[] = {
      {"x", &Self::x},
      {"k", &Self::k},
      {"v", &Self::v},
      {"beta", &Self::beta},
      {"gamma", &Self::gamma},
      {"a", &Self::a},
      {"j", &Self::j},
      {"a_log", &Self::a_log, Part::kCall},
      {"dt_bias", &Self::dt_bias, Part::kCall},
      {"gate", &Self::gate},
      {"weight", &Self::weight, Part::kCall},
      {"cu_seqlens", &Self::cu_seqlens, Part::kCall},
      {"y", &Self::y},
      {"rstd", &Self::rstd},
      {"da", &Self::da},
      {"dj", &Self::dj},
      {"dw", &Self::dw},
      {"du", &Self::du},
      {"dy", &Self::dy},
      {"dg", &Self::dg},
  };
  return kFields;
}

std::span<const CaseTensor<BlockResults>> BlockResults::fields() {
  using Self = BlockResults;
  static constexpr CaseTensor<Self> kFields[] = {
      {"y", &Self::y},
      {"rstd", &Self::rstd},
      {"a", &Self::a},
      {"j", &Self::j},
      {"w", &Self::w},
      {"u", &Self::u},
      {"g", &Self::g},
      {"dx", &Self::dx},
      {"dk", &Self::dk},
      {"dv", &Self::dv},
      {"dbeta", &Self::dbeta},
      {"dgamma", &Self::dgamma},
      {"da", &Self::da},
      {"da_log", &Self::da_log, Part::kCall},
      {"ddt_bias", &Self::ddt_bias, Part::kCall},
      {"dgate", &Self::dgate},
      {"dweight", &Self::dweight, Part::kCall},
  };
  return kFields;
}

BlockCase draw(const BlockSpec& spec, uint64_t seed) {
  BlockCase result;
  result.spec = spec;
  result.cu_seqlens = offsets_tensor(spec.cu_seqlens);
  const auto gradient = [&](DType dtype, std::vector<int64_t> shape, Stream stream = kDFirst) {
    return normals(dtype, std::move(shape), seed, stream);
  };
  switch (spec.block) {
    case Block::kChunkLocalCumsum:
      result.x = log_decays(spec, spec.dtype, seed);
      break;
    case Block::kScaledDotKkt:
      draw_chunk_tensors(spec, seed, result);
      result.da = gradient(wide(spec), matrix_shape(spec));
      break;
    case Block::kSolveTril:
      draw_chunk_tensors(spec, seed, result);
      result.dj = gradient(wide(spec), matrix_shape(spec));
      break;
    case Block::kWy:
      draw_chunk_tensors(spec, seed, result);
      result.dw = gradient(spec.dtype, {spec.B, spec.T, spec.HV, spec.K});
      result.du = gradient(spec.dtype, {spec.B, spec.T, spec.HV, spec.V}, kDSecond);
      break;
    case Block::kL2Norm:
      draw_norm_tensors(spec, seed, result);
      result.dy = gradient(spec.dtype, result.x.shape());
      break;
    case Block::kGateActivation:
      draw_gate_tensors(spec, seed, result);
      result.dg = gradient(spec.dtype, result.x.shape());
      break;
    case Block::kRmsNorm:
      result.x = normals(spec.dtype, {spec.B, spec.T, spec.H, spec.K}, seed, kX);
      if (spec.gated) result.gate = normals(spec.dtype, result.x.shape(), seed, kV);
      if (spec.weight) result.weight = normals(wide(spec), {spec.K}, seed, kDtBias);
      result.dy = gradient(spec.dtype, result.x.shape());
      break;
  }
  return result;
}

BlockResults outputs_of(Mode mode, const BlockCase& problem) {
  const BlockSpec& spec = problem.spec;
  const bool forward = mode == Mode::kForward;
  BlockResults outputs;
  if (!forward) {
    for (const auto& [output, input] : {std::pair(&BlockResults::dx, &BlockCase::x),
                                        {&BlockResults::dk, &BlockCase::k},
                                        {&BlockResults::dv, &BlockCase::v},
                                        {&BlockResults::dbeta, &BlockCase::beta},
                                        {&BlockResults::dgamma, &BlockCase::gamma},
                                        {&BlockResults::da_log, &BlockCase::a_log},
                                        {&BlockResults::ddt_bias, &BlockCase::dt_bias},
                                        {&BlockResults::dgate, &BlockCase::gate},
                                        {&BlockResults::dweight, &BlockCase::weight}}) {
      outputs.*output = poisoned_like(problem.*input);
    }
    const bool has_da = spec.block == Block::kSolveTril || spec.block == Block::kWy;
    if (has_da) outputs.da = poisoned(wide(spec), matrix_shape(spec));
    return outputs;
  }
  switch (spec.block) {
    case Block::kChunkLocalCumsum:
      outputs.y = poisoned(wide(spec), problem.x.shape());
      break;
    case Block::kScaledDotKkt:
      outputs.a = poisoned(wide(spec), matrix_shape(spec));
      break;
    case Block::kSolveTril:
      outputs.j = poisoned(spec.dtype, matrix_shape(spec));
      break;
    case Block::kWy:
      outputs.w = poisoned(spec.dtype, {spec.B, spec.T, spec.HV, spec.K});
      outputs.u = poisoned_like(problem.v);
      break;
    case Block::kL2Norm:
      outputs.y = poisoned_like(problem.x);
      outputs.rstd = poisoned_like(problem.rstd);
      break;
    case Block::kGateActivation:
      outputs.g = poisoned(wide(spec), problem.x.shape());
      break;
    case Block::kRmsNorm:
      outputs.y = poisoned_like(problem.x);
      break;
  }
  return outputs;
}

Call call_of(Mode mode, const BlockCase& problem, const BlockResults& outputs) {
  const auto either = [&](auto forward, auto backward) {
    return mode == Mode::kForward ? bound_call(forward, problem, outputs) : bound_call(backward, problem, outputs);
  };
  switch (problem.spec.block) {
    case Block::kChunkLocalCumsum:
      if (mode == Mode::kForward) return bound_call(chunk_local_cumsum, problem, outputs);
      throw std::invalid_argument("chunk_local_cumsum has no backward of its own");
    case Block::kScaledDotKkt:
      return either(scaled_dot_kkt_forward, scaled_dot_kkt_backward);
    case Block::kSolveTril:
      return either(solve_tril_forward, solve_tril_backward);
    case Block::kWy:
      return either(wy_forward, wy_backward);
    case Block::kL2Norm:
      return either(l2norm_forward, l2norm_backward);
    case Block::kRmsNorm:
      return either(rms_norm_forward, rms_norm_backward);
    case Block::kGateActivation:
      break;
  }
  return either(gate_activation_forward, gate_activation_backward);
}

BlockResults forward(const BlockCase& problem, const Context& context) { return run(Mode::kForward, problem, context); }
BlockResults backward(const BlockCase& problem, const Context& context) {
  return run(Mode::kBackward, problem, context);
}

Tolerance tolerance(const BlockCase& problem, const BlockResults&, const std::string& tensor, DType result_type) {
  const double smallest = problem.spec.dtype == DType::kF64 ? 1e-14 : 1e-7;
  if (result_type == DType::kBF16) return {3e-3, smallest};
  if (result_type == DType::kF16) return {1e-3, smallest};
  if (result_type == DType::kF64) return {1e-12, smallest};
  if (tensor == "da_log" || tensor == "ddt_bias" || tensor == "dweight") return {3e-5, smallest};
  if (problem.spec.block == Block::kL2Norm && problem.spec.K == 1) return {1e-4, smallest};
  // One number, normalised, hardly depends on itself: what is left of two terms is of the size of eps.
  if (problem.spec.block == Block::kRmsNorm && problem.spec.K == 1 && tensor == "dx") return {2e-2, smallest};
  return {tensor == "dgamma" ? 4e-6 : 1e-6, smallest};
}

}  // namespace fastweight::support
