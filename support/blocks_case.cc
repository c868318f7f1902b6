#include "support/blocks_case.h"

#include <cmath>
#include <initializer_list>
#include <memory>
#include <stdexcept>

#include "support/random.h"

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

std::vector<PlacedView> placed_views(std::initializer_list<TensorView*> inputs,
                                     std::initializer_list<TensorView*> outputs) {
  std::vector<PlacedView> views;
  for (TensorView* view : inputs) views.push_back({view, false});
  for (TensorView* view : outputs) views.push_back({view, true});
  return views;
}

std::vector<PlacedView> views_of(ChunkLocalCumsum& x) { return placed_views({&x.x, &x.cu_seqlens}, {&x.y}); }
std::vector<PlacedView> views_of(ScaledDotKktForward& x) {
  return placed_views({&x.in.k, &x.in.beta, &x.in.gamma, &x.in.cu_seqlens}, {&x.a});
}
std::vector<PlacedView> views_of(ScaledDotKktBackward& x) {
  return placed_views({&x.in.k, &x.in.beta, &x.in.gamma, &x.in.cu_seqlens, &x.da}, {&x.dk, &x.dbeta, &x.dgamma});
}
std::vector<PlacedView> views_of(SolveTrilForward& x) { return placed_views({&x.a, &x.cu_seqlens}, {&x.j}); }
std::vector<PlacedView> views_of(SolveTrilBackward& x) { return placed_views({&x.j, &x.dj, &x.cu_seqlens}, {&x.da}); }
std::vector<PlacedView> views_of(WyForward& x) {
  return placed_views({&x.in.k, &x.in.v, &x.in.beta, &x.in.gamma, &x.in.j, &x.in.cu_seqlens}, {&x.w, &x.u});
}
std::vector<PlacedView> views_of(WyBackward& x) {
  return placed_views({&x.in.k, &x.in.v, &x.in.beta, &x.in.gamma, &x.in.j, &x.in.cu_seqlens, &x.dw, &x.du},
                      {&x.dk, &x.dv, &x.dbeta, &x.dgamma, &x.da});
}
std::vector<PlacedView> views_of(L2NormForward& x) { return placed_views({&x.x}, {&x.y, &x.rstd}); }
std::vector<PlacedView> views_of(L2NormBackward& x) { return placed_views({&x.y, &x.rstd, &x.dy}, {&x.dx}); }
std::vector<PlacedView> views_of(GateActivationForward& x) {
  return placed_views({&x.in.x, &x.in.a_log, &x.in.dt_bias, &x.in.cu_seqlens}, {&x.g});
}
std::vector<PlacedView> views_of(GateActivationBackward& x) {
  return placed_views({&x.in.x, &x.in.a_log, &x.in.dt_bias, &x.in.cu_seqlens, &x.dg}, {&x.dx, &x.da_log, &x.ddt_bias});
}

template <class Args>
std::string run_on(const Context& context, std::string (*entry)(const Context&, const Args&), const Args& args) {
  return run_placed(context, args, entry, [](Args& x) { return views_of(x); });
}

template <class Args>
BlockCall placed(std::string (*entry)(const Context&, const Args&), Args args, Device device) {
  const auto placement = std::make_shared<Placement>(views_of(args), device);
  return [entry, args, placement](const Context& context) { return entry(context, args); };
}

// What the runs below write, as a list of poisoned tensors.
class Outputs {
 public:
  explicit Outputs(const ViewOf& view_of) : view_of_(view_of) {}

  TensorView like(const char* name, const Tensor& x) {
    return x.present() ? make(name, x.dtype(), x.shape()) : TensorView();
  }
  TensorView make(const char* name, DType dtype, std::vector<int64_t> shape) {
    return view_of_(results_.tensors.emplace_back(name, poisoned(dtype, std::move(shape))).second, true);
  }
  template <class Args>
  PreparedBlock with(std::string (*entry)(const Context&, const Args&), const Args& args) {
    return {std::move(results_), [entry, args](const Context& context) { return run_on(context, entry, args); },
            [entry, args](const Context& context) { return entry(context, args); },
            [entry, args](Device device) { return placed(entry, args, device); }};
  }

 private:
  const ViewOf& view_of_;
  BlockResults results_;  // moving a tensor keeps its memory, so the views stay good while the vector grows
};

ScaledDotKktInputs kkt_inputs(const BlockCase& problem, const ViewOf& view_of) {
  ScaledDotKktInputs in;
  in.k = view_of(problem.k, false);
  in.beta = view_of(problem.beta, false);
  in.gamma = view_of(problem.gamma, false);
  in.cu_seqlens = view_of(problem.cu_seqlens, false);
  return in;
}

WyInputs wy_inputs(const BlockCase& problem, const ViewOf& view_of) {
  WyInputs in;
  in.k = view_of(problem.k, false);
  in.v = view_of(problem.v, false);
  in.beta = view_of(problem.beta, false);
  in.gamma = view_of(problem.gamma, false);
  in.j = view_of(problem.j, false);
  in.cu_seqlens = view_of(problem.cu_seqlens, false);
  return in;
}

GateActivationInputs gate_inputs(const BlockCase& problem, const ViewOf& view_of) {
  GateActivationInputs in;
  in.x = view_of(problem.x, false);
  in.a_log = view_of(problem.a_log, false);
  in.dt_bias = view_of(problem.dt_bias, false);
  in.cu_seqlens = view_of(problem.cu_seqlens, false);
  return in;
}

GateActivationOptions gate_options(const BlockSpec& spec) {
  GateActivationOptions options;
  options.chunk_size = static_cast<int32_t>(spec.C);
  if (spec.lower_bound) options.lower_bound = -5;
  return options;
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
  kkt.in = kkt_inputs(result, dense_view);
  kkt.in.k = k.view();
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

BlockCase draw(const BlockSpec& spec, uint64_t seed) {
  BlockCase result;
  result.spec = spec;
  result.cu_seqlens = offsets_tensor(spec.cu_seqlens);
  const auto gradient = [&](DType dtype, std::vector<int64_t> shape, Stream stream) {
    return normals(dtype, std::move(shape), seed, stream);
  };
  switch (spec.block) {
    case Block::kChunkLocalCumsum:
      result.x = log_decays(spec, spec.dtype, seed);
      break;
    case Block::kScaledDotKkt:
      draw_chunk_tensors(spec, seed, result);
      result.d_first = gradient(wide(spec), matrix_shape(spec), kDFirst);
      break;
    case Block::kSolveTril:
      draw_chunk_tensors(spec, seed, result);
      result.d_first = gradient(wide(spec), matrix_shape(spec), kDFirst);
      break;
    case Block::kWy:
      draw_chunk_tensors(spec, seed, result);
      result.d_first = gradient(spec.dtype, {spec.B, spec.T, spec.HV, spec.K}, kDFirst);
      result.d_second = gradient(spec.dtype, {spec.B, spec.T, spec.HV, spec.V}, kDSecond);
      break;
    case Block::kL2Norm:
      draw_norm_tensors(spec, seed, result);
      result.d_first = gradient(spec.dtype, result.x.shape(), kDFirst);
      break;
    case Block::kGateActivation:
      draw_gate_tensors(spec, seed, result);
      result.d_first = gradient(spec.dtype, result.x.shape(), kDFirst);
      break;
  }
  return result;
}

BlockCase in_double(const BlockCase& problem) {
  BlockCase result = problem;
  result.spec.dtype = DType::kF64;
  for (Tensor* tensor : {&result.x, &result.k, &result.v, &result.beta, &result.gamma, &result.a, &result.j,
                         &result.a_log, &result.dt_bias, &result.y, &result.rstd, &result.d_first, &result.d_second}) {
    *tensor = tensor->to(DType::kF64);
  }
  return result;
}

const Tensor& BlockResults::operator[](const std::string& name) const {
  for (const auto& [known, tensor] : tensors) {
    if (known == name) return tensor;
  }
  throw std::out_of_range("no result " + name);
}

std::vector<std::pair<std::string, const Tensor*>> BlockResults::named() const {
  std::vector<std::pair<std::string, const Tensor*>> result;
  for (const auto& [name, tensor] : tensors) result.emplace_back(name, &tensor);
  return result;
}

PreparedBlock prepare_forward(const BlockCase& problem, const ViewOf& view_of) {
  const BlockSpec& spec = problem.spec;
  Outputs outputs(view_of);
  switch (spec.block) {
    case Block::kChunkLocalCumsum: {
      ChunkLocalCumsum args;
      args.x = view_of(problem.x, false);
      args.cu_seqlens = view_of(problem.cu_seqlens, false);
      args.chunk_size = static_cast<int32_t>(spec.C);
      args.reverse = spec.reverse;
      args.y = outputs.make("y", wide(spec), problem.x.shape());
      return outputs.with(chunk_local_cumsum, args);
    }
    case Block::kScaledDotKkt: {
      ScaledDotKktForward args;
      args.in = kkt_inputs(problem, view_of);
      args.a = outputs.make("a", wide(spec), matrix_shape(spec));
      return outputs.with(scaled_dot_kkt_forward, args);
    }
    case Block::kSolveTril: {
      SolveTrilForward args;
      args.a = view_of(problem.a, false);
      args.cu_seqlens = view_of(problem.cu_seqlens, false);
      args.j = outputs.make("j", spec.dtype, matrix_shape(spec));
      return outputs.with(solve_tril_forward, args);
    }
    case Block::kWy: {
      WyForward args;
      args.in = wy_inputs(problem, view_of);
      args.w = outputs.make("w", spec.dtype, {spec.B, spec.T, spec.HV, spec.K});
      args.u = outputs.like("u", problem.v);
      return outputs.with(wy_forward, args);
    }
    case Block::kL2Norm: {
      L2NormForward args;
      args.x = view_of(problem.x, false);
      args.y = outputs.like("y", problem.x);
      args.rstd = outputs.like("rstd", problem.rstd);
      return outputs.with(l2norm_forward, args);
    }
    case Block::kGateActivation:
      break;
  }
  GateActivationForward args;
  args.in = gate_inputs(problem, view_of);
  args.options = gate_options(spec);
  args.g = outputs.make("g", wide(spec), problem.x.shape());
  return outputs.with(gate_activation_forward, args);
}

PreparedBlock prepare_backward(const BlockCase& problem, const ViewOf& view_of) {
  const BlockSpec& spec = problem.spec;
  Outputs outputs(view_of);
  switch (spec.block) {
    case Block::kScaledDotKkt: {
      ScaledDotKktBackward args;
      args.in = kkt_inputs(problem, view_of);
      args.da = view_of(problem.d_first, false);
      args.dk = outputs.like("dk", problem.k);
      args.dbeta = outputs.like("dbeta", problem.beta);
      args.dgamma = outputs.like("dgamma", problem.gamma);
      return outputs.with(scaled_dot_kkt_backward, args);
    }
    case Block::kSolveTril: {
      SolveTrilBackward args;
      args.j = view_of(problem.j, false);
      args.dj = view_of(problem.d_first, false);
      args.cu_seqlens = view_of(problem.cu_seqlens, false);
      args.da = outputs.make("da", wide(spec), matrix_shape(spec));
      return outputs.with(solve_tril_backward, args);
    }
    case Block::kWy: {
      WyBackward args;
      args.in = wy_inputs(problem, view_of);
      args.dw = view_of(problem.d_first, false);
      args.du = view_of(problem.d_second, false);
      args.dk = outputs.like("dk", problem.k);
      args.dv = outputs.like("dv", problem.v);
      args.dbeta = outputs.like("dbeta", problem.beta);
      args.dgamma = outputs.like("dgamma", problem.gamma);
      args.da = outputs.make("da", wide(spec), matrix_shape(spec));
      return outputs.with(wy_backward, args);
    }
    case Block::kL2Norm: {
      L2NormBackward args;
      args.y = view_of(problem.y, false);
      args.rstd = view_of(problem.rstd, false);
      args.dy = view_of(problem.d_first, false);
      args.dx = outputs.like("dx", problem.x);
      return outputs.with(l2norm_backward, args);
    }
    case Block::kGateActivation: {
      GateActivationBackward args;
      args.in = gate_inputs(problem, view_of);
      args.options = gate_options(spec);
      args.dg = view_of(problem.d_first, false);
      args.dx = outputs.like("dx", problem.x);
      args.da_log = outputs.like("da_log", problem.a_log);
      args.ddt_bias = outputs.like("ddt_bias", problem.dt_bias);
      return outputs.with(gate_activation_backward, args);
    }
    case Block::kChunkLocalCumsum:
      break;
  }
  throw std::invalid_argument("chunk_local_cumsum has no backward of its own");
}

std::string run(const Context& context, const ChunkLocalCumsum& args) {
  return run_on(context, chunk_local_cumsum, args);
}
std::string run(const Context& context, const SolveTrilForward& args) {
  return run_on(context, solve_tril_forward, args);
}
std::string run(const Context& context, const L2NormForward& args) { return run_on(context, l2norm_forward, args); }
std::string run(const Context& context, const L2NormBackward& args) { return run_on(context, l2norm_backward, args); }
std::string run(const Context& context, const GateActivationForward& args) {
  return run_on(context, gate_activation_forward, args);
}
std::string run(const Context& context, const GateActivationBackward& args) {
  return run_on(context, gate_activation_backward, args);
}

BlockResults forward(const BlockCase& problem, const Context& context, const ViewOf& view_of) {
  PreparedBlock prepared = prepare_forward(problem, view_of);
  prepared.results.implementation = prepared.run(context);
  return std::move(prepared.results);
}

BlockResults backward(const BlockCase& problem, const Context& context, const ViewOf& view_of) {
  PreparedBlock prepared = prepare_backward(problem, view_of);
  prepared.results.implementation = prepared.run(context);
  return std::move(prepared.results);
}

}  // namespace fastweight::support
