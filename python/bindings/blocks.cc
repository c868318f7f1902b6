// Building blocks as PyTorch operators. What the arguments mean stands in fastweight/blocks.h; autograd and shape
// functions in python/fastweight/_blocks.py.
#include "fastweight/blocks.h"

#include "convert.h"

#define FW_CUMSUM "(Tensor x, Tensor? cu_seqlens, int chunk_size, bool reverse, ScalarType dtype) -> Tensor y"
#define FW_SOLVE_TRIL "(Tensor A, Tensor? cu_seqlens, ScalarType dtype) -> Tensor J"
#define FW_L2NORM "(Tensor x, float eps, ScalarType dtype) -> (Tensor y, Tensor rstd)"
#define FW_GATE_INPUTS \
  "Tensor x, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, float? lower_bound, int chunk_size"
#define FW_GATE "(" FW_GATE_INPUTS ", ScalarType dtype) -> Tensor g"

namespace fastweight::bindings {
namespace {

// ---- Sums within chunks -------------------------------------------------------------------------------------------

struct CumsumInputs {
  explicit CumsumInputs(Arguments& arguments)
      : x(arguments.tensor()),
        cu_seqlens(arguments.optional_tensor()),
        chunk_size(arguments.take<int64_t>()),
        reverse(arguments.take<bool>()) {}

  ChunkLocalCumsum views() const {
    ChunkLocalCumsum args;
    args.x = view("g", x);
    args.cu_seqlens = view("cu_seqlens", cu_seqlens);
    args.chunk_size = static_cast<int32_t>(chunk_size);
    args.reverse = reverse;
    return args;
  }

  Tensor x, cu_seqlens;
  int64_t chunk_size;
  bool reverse;
};

void cumsum_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const CumsumInputs in(arguments);
    const auto dtype = arguments.take<int32_t>();
    ChunkLocalCumsum args = in.views();
    Tensor y = dense_like(args.x, dtype_of("y", dtype), args.y);
    chunk_local_cumsum(ContextOf(args.x), args);
    give(stack, y);
  });
}

// The adjoint of a sum over the tokens before is the sum over the tokens after.
void cumsum_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const CumsumInputs in(arguments);
    ChunkLocalCumsum args = in.views();
    args.reverse = !args.reverse;
    Tensor dx = dense_like(args.x, args.y);
    chunk_local_cumsum(ContextOf(args.x), args);
    give(stack, dx);
  });
}

// ---- The triangular inverse ---------------------------------------------------------------------------------------

void solve_tril_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor a = arguments.tensor();
    const Tensor cu_seqlens = arguments.optional_tensor();
    const auto dtype = arguments.take<int32_t>();
    SolveTrilForward args;
    args.a = view("A", a);
    args.cu_seqlens = view("cu_seqlens", cu_seqlens);
    Tensor j = dense_like(args.a, dtype_of("J", dtype), args.j);
    solve_tril_forward(ContextOf(args.a), args);
    give(stack, j);
  });
}

void solve_tril_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor dj = arguments.tensor();
    const Tensor j = arguments.tensor();
    const Tensor cu_seqlens = arguments.optional_tensor();
    SolveTrilBackward args;
    args.j = view("J", j);
    args.dj = view("dJ", dj);
    args.cu_seqlens = view("cu_seqlens", cu_seqlens);
    Tensor da = dense_like(args.j, state_dtype(args.j), args.da);
    solve_tril_backward(ContextOf(args.j), args);
    give(stack, da);
  });
}

// ---- The l2 norm --------------------------------------------------------------------------------------------------

void l2norm_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor x = arguments.tensor();
    L2NormForward args;
    args.eps = arguments.take<double>();
    const auto dtype = arguments.take<int32_t>();
    args.x = view("x", x);
    TensorView rows = args.x;
    if (rows.rank > 0) --rows.rank;
    Tensor y = dense_like(args.x, dtype_of("y", dtype), args.y);
    Tensor rstd = dense_like(rows, state_dtype(args.x), args.rstd);
    l2norm_forward(ContextOf(args.x), args);
    give(stack, y, rstd);
  });
}

void l2norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor dy = arguments.tensor();
    const Tensor y = arguments.tensor();
    const Tensor rstd = arguments.tensor();
    L2NormBackward args;
    args.y = view("y", y);
    args.rstd = view("rstd", rstd);
    args.dy = view("dy", dy);
    Tensor dx = dense_like(args.y, args.dx);
    l2norm_backward(ContextOf(args.y), args);
    give(stack, dx);
  });
}

// ---- Gate activations ---------------------------------------------------------------------------------------------

struct GateInputs {
  explicit GateInputs(Arguments& arguments)
      : x(arguments.tensor()),
        a_log(arguments.optional_tensor()),
        dt_bias(arguments.optional_tensor()),
        cu_seqlens(arguments.optional_tensor()),
        lower_bound(arguments.take<std::optional<double>>()),
        chunk_size(arguments.take<int64_t>()) {}

  GateActivationInputs views() const {
    return {view("g", x), view("A_log", a_log), view("dt_bias", dt_bias), view("cu_seqlens", cu_seqlens)};
  }

  GateActivationOptions options() const {
    GateActivationOptions options;
    options.lower_bound = number("lower_bound", lower_bound);
    options.chunk_size = static_cast<int32_t>(chunk_size);
    return options;
  }

  Tensor x, a_log, dt_bias, cu_seqlens;
  std::optional<double> lower_bound;
  int64_t chunk_size;
};

void gate_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const GateInputs in(arguments);
    const auto dtype = arguments.take<int32_t>();
    GateActivationForward args;
    args.in = in.views();
    args.options = in.options();
    Tensor g = dense_like(args.in.x, dtype_of("output", dtype), args.g);
    gate_activation_forward(ContextOf(args.in.x), args);
    give(stack, g);
  });
}

void gate_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor dg = arguments.tensor();
    const GateInputs in(arguments);
    const int64_t gradients = arguments.take<int64_t>();
    GateActivationBackward args;
    args.in = in.views();
    args.options = in.options();
    args.dg = view("d_output", dg);
    const Gradients output{args.in.x, gradients};
    Tensor dx = output(0, args.in.x, args.dx);
    Tensor da_log = output(1, args.in.a_log, args.da_log);
    Tensor ddt_bias = output(2, args.in.dt_bias, args.ddt_bias);
    gate_activation_backward(ContextOf(args.in.x), args);
    give(stack, dx, da_log, ddt_bias);
  });
}

constexpr Operator kOperators[] = {
    {"chunk_local_cumsum_forward" FW_CUMSUM, &cumsum_forward},
    {"chunk_local_cumsum_differentiable" FW_CUMSUM, &cumsum_forward},
    {"chunk_local_cumsum_backward(Tensor dy, Tensor? cu_seqlens, int chunk_size, bool reverse, int gradients)"
     " -> Tensor dx",
     &cumsum_backward},
    {"solve_tril_forward" FW_SOLVE_TRIL, &solve_tril_forward},
    {"solve_tril_differentiable" FW_SOLVE_TRIL, &solve_tril_forward},
    {"solve_tril_backward(Tensor dJ, Tensor J, Tensor? cu_seqlens, int gradients) -> Tensor dA", &solve_tril_backward},
    {"l2norm_forward" FW_L2NORM, &l2norm_forward},
    {"l2norm_differentiable" FW_L2NORM, &l2norm_forward},
    {"l2norm_backward(Tensor dy, Tensor y, Tensor rstd, int gradients) -> Tensor dx", &l2norm_backward},
    {"gate_activation_forward" FW_GATE, &gate_forward},
    {"gate_activation_differentiable" FW_GATE, &gate_forward},
    {"gate_activation_backward(Tensor dg, " FW_GATE_INPUTS
     ", int gradients) -> (Tensor dx, Tensor dA_log, Tensor ddt_bias)",
     &gate_backward},
};

}  // namespace

std::span<const Operator> blocks_operators() { return kOperators; }

}  // namespace fastweight::bindings
