// Building blocks as PyTorch operators. What the arguments mean stands in fastweight/blocks.h; autograd and shape
// functions in python/fastweight/_blocks.py.
#include "fastweight/blocks.h"

#include "convert.h"
#include "core/blocks_fields.h"
#include "observe.h"

namespace fastweight::bindings {
namespace {

// ---- Sums within chunks -------------------------------------------------------------------------------------------

struct CumsumArguments {
  explicit CumsumArguments(Arguments& arguments)
      : tensors(arguments), chunk_size(arguments.take<int64_t>()), reverse(arguments.take<bool>()) {}

  ChunkLocalCumsum resolved() const {
    ChunkLocalCumsum args;
    tensors.view_as(args);
    args.chunk_size = static_cast<int32_t>(chunk_size);
    args.reverse = reverse;
    return args;
  }

  TensorArguments<ChunkLocalCumsum> tensors;
  int64_t chunk_size;
  bool reverse;
};

void cumsum_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const CumsumArguments in(arguments);
    const auto dtype = arguments.take<int32_t>();
    ChunkLocalCumsum args = in.resolved();
    Tensor y = dense_like(args.x, dtype_of("y", dtype), args.y);
    call("chunk_local_cumsum", fastweight::chunk_local_cumsum, ContextOf(args.x), args);
    give(stack, y);
  });
}

// The adjoint of a sum over the tokens before is the sum over the tokens after.
void cumsum_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const CumsumArguments in(arguments);
    ChunkLocalCumsum args = in.resolved();
    args.reverse = !args.reverse;
    Tensor dx = dense_like(args.x, args.y);
    call("chunk_local_cumsum", fastweight::chunk_local_cumsum, ContextOf(args.x), args);
    give(stack, dx);
  });
}

// ---- The matrix of the keys ---------------------------------------------------------------------------------------

void kkt_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<ScaledDotKktInputs> in(arguments);
    const auto chunk_size = arguments.take<int64_t>();
    ScaledDotKktForward args;
    in.view_as(args.in);
    const TensorView& k = args.in.k;
    const TensorView& heads = args.in.beta.present() ? args.in.beta : args.in.gamma.present() ? args.in.gamma : k;
    Tensor a = dense(k, state_dtype(k), {extent(k, 0), extent(k, 1), extent(heads, 2), chunk_size}, args.a);
    call("scaled_dot_kkt_forward", fastweight::scaled_dot_kkt_forward, ContextOf(k), args);
    give(stack, a);
  });
}

void kkt_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<ScaledDotKktBackward> own(arguments);
    const TensorArguments<ScaledDotKktInputs> in(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    ScaledDotKktBackward args;
    in.view_as(args.in);
    own.view_as(args);
    GradientResults<ScaledDotKktBackward> gradients(args, args.in.k, asked_for);
    call("scaled_dot_kkt_backward", fastweight::scaled_dot_kkt_backward, ContextOf(args.in.k), args);
    gradients.give(stack);
  });
}

// ---- The WY factors -----------------------------------------------------------------------------------------------

void wy_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<WyInputs> in(arguments);
    WyForward args;
    in.view_as(args.in);
    const TensorView &k = args.in.k, &v = args.in.v;
    Tensor w = dense(k, k.dtype, {extent(k, 0), extent(k, 1), extent(v, 2), extent(k, 3)}, args.w);
    Tensor u = dense_like(v, k.dtype, args.u);
    call("wy_forward", fastweight::wy_forward, ContextOf(k), args);
    give(stack, w, u);
  });
}

void wy_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<WyBackward> own(arguments);
    const TensorArguments<WyInputs> in(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    WyBackward args;
    in.view_as(args.in);
    own.view_as(args);
    GradientResults<WyBackward> gradients(args, args.in.k, asked_for);
    Tensor da = dense_like(args.in.j, state_dtype(args.in.k), args.da);
    call("wy_backward", fastweight::wy_backward, ContextOf(args.in.k), args);
    gradients.give(stack);
    give(stack + GradientResults<WyBackward>::kCount, da);
  });
}

// ---- The triangular inverse ---------------------------------------------------------------------------------------

void solve_tril_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<SolveTrilForward> in(arguments);
    const auto dtype = arguments.take<int32_t>();
    SolveTrilForward args;
    in.view_as(args);
    Tensor j = dense_like(args.a, dtype_of("J", dtype), args.j);
    call("solve_tril_forward", fastweight::solve_tril_forward, ContextOf(args.a), args);
    give(stack, j);
  });
}

void solve_tril_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<SolveTrilBackward> in(arguments);
    SolveTrilBackward args;
    in.view_as(args);
    Tensor da = dense_like(args.j, state_dtype(args.j), args.da);
    call("solve_tril_backward", fastweight::solve_tril_backward, ContextOf(args.j), args);
    give(stack, da);
  });
}

// ---- The l2 norm --------------------------------------------------------------------------------------------------

void l2norm_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<L2NormForward> in(arguments);
    L2NormForward args;
    args.eps = arguments.take<double>();
    const auto dtype = arguments.take<int32_t>();
    in.view_as(args);
    TensorView rows = args.x;
    if (rows.rank > 0) --rows.rank;
    Tensor y = dense_like(args.x, dtype_of("y", dtype), args.y);
    Tensor rstd = dense_like(rows, state_dtype(args.x), args.rstd);
    call("l2norm_forward", fastweight::l2norm_forward, ContextOf(args.x), args);
    give(stack, y, rstd);
  });
}

void l2norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<L2NormBackward> in(arguments);
    L2NormBackward args;
    in.view_as(args);
    Tensor dx = dense_like(args.y, args.dx);
    call("l2norm_backward", fastweight::l2norm_backward, ContextOf(args.y), args);
    give(stack, dx);
  });
}

// ---- Gate activations ---------------------------------------------------------------------------------------------

struct GateOptions {
  explicit GateOptions(Arguments& arguments)
      : lower_bound(arguments.take<std::optional<double>>()), chunk_size(arguments.take<int64_t>()) {}

  GateActivationOptions resolved() const {
    GateActivationOptions options;
    options.lower_bound = number("lower_bound", lower_bound);
    options.chunk_size = static_cast<int32_t>(chunk_size);
    return options;
  }

  std::optional<double> lower_bound;
  int64_t chunk_size;
};

void gate_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<GateActivationInputs> in(arguments);
    const GateOptions options(arguments);
    const auto dtype = arguments.take<int32_t>();
    GateActivationForward args;
    in.view_as(args.in);
    args.options = options.resolved();
    Tensor g = dense_like(args.in.x, dtype_of("output", dtype), args.g);
    call("gate_activation_forward", fastweight::gate_activation_forward, ContextOf(args.in.x), args);
    give(stack, g);
  });
}

void gate_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<GateActivationBackward> own(arguments);
    const TensorArguments<GateActivationInputs> in(arguments);
    const GateOptions options(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    GateActivationBackward args;
    in.view_as(args.in);
    own.view_as(args);
    args.options = options.resolved();
    GradientResults<GateActivationBackward> gradients(args, args.in.x, asked_for);
    call("gate_activation_backward", fastweight::gate_activation_backward, ContextOf(args.in.x), args);
    gradients.give(stack);
  });
}

// ---- The RMS norm -------------------------------------------------------------------------------------------------

struct NormOptions {
  explicit NormOptions(Arguments& arguments) : eps(arguments.take<double>()), activation(arguments.take<int64_t>()) {}

  RmsNormOptions resolved() const { return {eps, static_cast<NormGate>(activation)}; }

  double eps;
  int64_t activation;
};

void rms_norm_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<RmsNormInputs> in(arguments);
    const NormOptions options(arguments);
    RmsNormForward args;
    in.view_as(args.in);
    args.options = options.resolved();
    Tensor y = dense_like(args.in.x, args.y);
    call("rms_norm_forward", fastweight::rms_norm_forward, ContextOf(args.in.x), args);
    give(stack, y);
  });
}

void rms_norm_in_place(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<RmsNormInputs> in(arguments);
    const NormOptions options(arguments);
    RmsNormForward args;
    in.view_as(args.in);
    args.options = options.resolved();
    args.y = args.in.x;
    call("rms_norm_forward", fastweight::rms_norm_forward, ContextOf(args.in.x), args);
  });
}

void rms_norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<RmsNormBackward> own(arguments);
    const TensorArguments<RmsNormInputs> in(arguments);
    const NormOptions options(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    RmsNormBackward args;
    in.view_as(args.in);
    own.view_as(args);
    args.options = options.resolved();
    GradientResults<RmsNormBackward> gradients(args, args.in.x, asked_for);
    call("rms_norm_backward", fastweight::rms_norm_backward, ContextOf(args.in.x), args);
    gradients.give(stack);
  });
}

}  // namespace

std::span<const Operator> blocks_operators() {
  const std::string cumsum = argument_schema<ChunkLocalCumsum>() + "int chunk_size, bool reverse";
  const std::string cumsum_schema = "(" + cumsum + ", ScalarType dtype) -> Tensor y";
  std::string wy = argument_schema<WyInputs>();
  wy.resize(wy.size() - 2);
  const std::string solve_tril_schema = "(" + argument_schema<SolveTrilForward>() + "ScalarType dtype) -> Tensor j";
  const std::string l2norm_schema =
      "(" + argument_schema<L2NormForward>() + "float eps, ScalarType dtype) -> " + result_schema<L2NormForward>();
  const std::string gate = argument_schema<GateActivationInputs>() + "float? lower_bound, int chunk_size";
  const std::string gate_schema = "(" + gate + ", ScalarType dtype) -> Tensor g";
  const std::string norm = argument_schema<RmsNormInputs>() + "float eps, int activation";
  static const Operator operators[] = {
      {"chunk_local_cumsum_forward" + cumsum_schema, &cumsum_forward},
      {"chunk_local_cumsum_differentiable" + cumsum_schema, &cumsum_forward},
      {"chunk_local_cumsum_backward(" + cumsum + ", int gradients) -> Tensor dx", &cumsum_backward},
      {"scaled_dot_kkt_forward(" + argument_schema<ScaledDotKktInputs>() + "int chunk_size) -> " +
           result_schema<ScaledDotKktForward>(),
       &kkt_forward},
      {"scaled_dot_kkt_backward(" + argument_schema<ScaledDotKktBackward>() + argument_schema<ScaledDotKktInputs>() +
           "int gradients) -> " + result_schema<ScaledDotKktBackward>(),
       &kkt_backward},
      {"wy_forward(" + wy + ") -> " + result_schema<WyForward>(), &wy_forward},
      {"wy_backward(" + argument_schema<WyBackward>() + wy + ", int gradients) -> " + result_schema<WyBackward>(),
       &wy_backward},
      {"solve_tril_forward" + solve_tril_schema, &solve_tril_forward},
      {"solve_tril_differentiable" + solve_tril_schema, &solve_tril_forward},
      {"solve_tril_backward(" + argument_schema<SolveTrilBackward>() + "int gradients) -> Tensor da",
       &solve_tril_backward},
      {"l2norm_forward" + l2norm_schema, &l2norm_forward},
      {"l2norm_differentiable" + l2norm_schema, &l2norm_forward},
      {"l2norm_backward(" + argument_schema<L2NormBackward>() + "int gradients) -> Tensor dx", &l2norm_backward},
      {"gate_activation_forward" + gate_schema, &gate_forward},
      {"gate_activation_differentiable" + gate_schema, &gate_forward},
      {"gate_activation_backward(" + argument_schema<GateActivationBackward>() + gate + ", int gradients) -> " +
           result_schema<GateActivationBackward>(),
       &gate_backward},
      {"rms_norm_forward(" + norm + ") -> Tensor y", &rms_norm_forward},
      {"rms_norm_differentiable(" + norm + ") -> Tensor y", &rms_norm_forward},
      {"rms_norm_in_place(Tensor(a!) x, Tensor? gate, Tensor? weight, float eps, int activation) -> ()",
       &rms_norm_in_place},
      {"rms_norm_backward(" + argument_schema<RmsNormBackward>() + norm + ", int gradients) -> " +
           result_schema<RmsNormBackward>(),
       &rms_norm_backward},
  };
  return operators;
}

}  // namespace fastweight::bindings
