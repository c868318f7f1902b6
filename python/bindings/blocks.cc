// Building blocks as PyTorch operators. What the arguments mean stands in fastweight/blocks.h; autograd and shape
// functions in python/fastweight/_blocks.py.
#include "fastweight/blocks.h"

#include "convert.h"

#define FW_CUMSUM "Tensor x, Tensor? cu_seqlens, int chunk_size, bool reverse, ScalarType dtype) -> Tensor y"
#define FW_SOLVE_TRIL "Tensor A, Tensor? cu_seqlens, ScalarType dtype) -> Tensor J"
#define FW_L2NORM "Tensor x, float eps, ScalarType dtype) -> (Tensor y, Tensor rstd)"
#define FW_GATE_INPUTS \
  "Tensor x, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, float? lower_bound, int chunk_size"
#define FW_GATE FW_GATE_INPUTS ", ScalarType dtype) -> Tensor g"

namespace fastweight::bindings {
namespace {

std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// ---- Sums within chunks -------------------------------------------------------------------------------------------

Tensor cumsum(const Tensor& x, const OptionalTensor& cu_seqlens, int64_t chunk_size, bool reverse, ScalarType dtype) {
  const Tensor y = dense(x, shape_of(x), dtype);
  ChunkLocalCumsum args;
  args.x = view("g", x);
  args.cu_seqlens = view("cu_seqlens", cu_seqlens);
  args.chunk_size = static_cast<int32_t>(chunk_size);
  args.reverse = reverse;
  args.y = view("y", y);
  chunk_local_cumsum(ContextOf(x), args);
  return y;
}

void cumsum_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto x = arguments.take<Tensor>();
    const auto cu_seqlens = arguments.take<OptionalTensor>();
    const auto chunk_size = arguments.take<int64_t>();
    const auto reverse = arguments.take<bool>();
    const auto dtype = arguments.take<ScalarType>();
    give(stack, cumsum(x, cu_seqlens, chunk_size, reverse, dtype));
  });
}

// The adjoint of a sum over the tokens before is the sum over the tokens after.
void cumsum_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto dy = arguments.take<Tensor>();
    const auto cu_seqlens = arguments.take<OptionalTensor>();
    const auto chunk_size = arguments.take<int64_t>();
    const auto reverse = arguments.take<bool>();
    arguments.take<int64_t>();
    give(stack, cumsum(dy, cu_seqlens, chunk_size, !reverse, dy.scalar_type()));
  });
}

// ---- The triangular inverse ---------------------------------------------------------------------------------------

void solve_tril_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto a = arguments.take<Tensor>();
    const auto cu_seqlens = arguments.take<OptionalTensor>();
    const auto dtype = arguments.take<ScalarType>();
    const Tensor j = dense(a, shape_of(a), dtype);
    SolveTrilForward args;
    args.a = view("A", a);
    args.cu_seqlens = view("cu_seqlens", cu_seqlens);
    args.j = view("J", j);
    solve_tril_forward(ContextOf(a), args);
    give(stack, j);
  });
}

void solve_tril_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto dj = arguments.take<Tensor>();
    const auto j = arguments.take<Tensor>();
    const auto cu_seqlens = arguments.take<OptionalTensor>();
    arguments.take<int64_t>();
    const Tensor da = dense(j, shape_of(j), state_dtype(j));
    SolveTrilBackward args;
    args.j = view("J", j);
    args.dj = view("dJ", dj);
    args.cu_seqlens = view("cu_seqlens", cu_seqlens);
    args.da = view("dA", da);
    solve_tril_backward(ContextOf(j), args);
    give(stack, da);
  });
}

// ---- The l2 norm --------------------------------------------------------------------------------------------------

void l2norm_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto x = arguments.take<Tensor>();
    L2NormForward args;
    args.eps = arguments.take<double>();
    const auto dtype = arguments.take<ScalarType>();
    std::vector<int64_t> shape = shape_of(x);
    const Tensor y = dense(x, shape, dtype);
    if (!shape.empty()) shape.pop_back();
    const Tensor rstd = dense(x, shape, state_dtype(x));
    args.x = view("x", x);
    args.y = view("y", y);
    args.rstd = view("rstd", rstd);
    l2norm_forward(ContextOf(x), args);
    give(stack, y, rstd);
  });
}

void l2norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto dy = arguments.take<Tensor>();
    const auto y = arguments.take<Tensor>();
    const auto rstd = arguments.take<Tensor>();
    arguments.take<int64_t>();
    const Tensor dx = dense_like(y);
    L2NormBackward args;
    args.y = view("y", y);
    args.rstd = view("rstd", rstd);
    args.dy = view("dy", dy);
    args.dx = view("dx", dx);
    l2norm_backward(ContextOf(y), args);
    give(stack, dx);
  });
}

// ---- Gate activations ---------------------------------------------------------------------------------------------

struct GateInputs {
  explicit GateInputs(Arguments& arguments)
      : x(arguments.take<Tensor>()),
        a_log(arguments.take<OptionalTensor>()),
        dt_bias(arguments.take<OptionalTensor>()),
        cu_seqlens(arguments.take<OptionalTensor>()) {
    options.lower_bound = number("lower_bound", arguments.take<std::optional<double>>());
    options.chunk_size = static_cast<int32_t>(arguments.take<int64_t>());
  }

  GateActivationInputs views() const {
    return {view("g", x), view("A_log", a_log), view("dt_bias", dt_bias), view("cu_seqlens", cu_seqlens)};
  }

  Tensor x;
  OptionalTensor a_log, dt_bias, cu_seqlens;
  GateActivationOptions options;
};

void gate_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const GateInputs in(arguments);
    const auto dtype = arguments.take<ScalarType>();
    const Tensor g = dense(in.x, shape_of(in.x), dtype);
    GateActivationForward args;
    args.in = in.views();
    args.options = in.options;
    args.g = view("output", g);
    gate_activation_forward(ContextOf(in.x), args);
    give(stack, g);
  });
}

void gate_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto dg = arguments.take<Tensor>();
    const GateInputs in(arguments);
    const Gradients output{in.x, arguments.take<int64_t>()};
    GateActivationBackward args;
    args.in = in.views();
    args.options = in.options;
    args.dg = view("d_output", dg);
    const Tensor dx = output(0, "dg", in.x, args.dx);
    const Tensor da_log = output(1, "dA_log", in.a_log, args.da_log);
    const Tensor ddt_bias = output(2, "ddt_bias", in.dt_bias, args.ddt_bias);
    gate_activation_backward(ContextOf(in.x), args);
    give(stack, dx, da_log, ddt_bias);
  });
}

// For every device: the library says what it can do where.
void implement(Library& m) {
  m.impl("chunk_local_cumsum_forward", &cumsum_forward);
  m.impl("chunk_local_cumsum_differentiable", &cumsum_forward);
  m.impl("chunk_local_cumsum_backward", &cumsum_backward);
  m.impl("solve_tril_forward", &solve_tril_forward);
  m.impl("solve_tril_differentiable", &solve_tril_forward);
  m.impl("solve_tril_backward", &solve_tril_backward);
  m.impl("l2norm_forward", &l2norm_forward);
  m.impl("l2norm_differentiable", &l2norm_forward);
  m.impl("l2norm_backward", &l2norm_backward);
  m.impl("gate_activation_forward", &gate_forward);
  m.impl("gate_activation_differentiable", &gate_forward);
  m.impl("gate_activation_backward", &gate_backward);
}

}  // namespace
}  // namespace fastweight::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(fastweight, m) {
  m.def("chunk_local_cumsum_forward(" FW_CUMSUM);
  m.def("chunk_local_cumsum_differentiable(" FW_CUMSUM);
  m.def(
      "chunk_local_cumsum_backward(Tensor dy, Tensor? cu_seqlens, int chunk_size, bool reverse, int gradients)"
      " -> Tensor dx");
  m.def("solve_tril_forward(" FW_SOLVE_TRIL);
  m.def("solve_tril_differentiable(" FW_SOLVE_TRIL);
  m.def("solve_tril_backward(Tensor dJ, Tensor J, Tensor? cu_seqlens, int gradients) -> Tensor dA");
  m.def("l2norm_forward(" FW_L2NORM);
  m.def("l2norm_differentiable(" FW_L2NORM);
  m.def("l2norm_backward(Tensor dy, Tensor y, Tensor rstd, int gradients) -> Tensor dx");
  m.def("gate_activation_forward(" FW_GATE);
  m.def("gate_activation_differentiable(" FW_GATE);
  m.def("gate_activation_backward(Tensor dg, " FW_GATE_INPUTS
        ", int gradients) -> (Tensor dx, Tensor dA_log, Tensor ddt_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(fastweight, CPU, m) { fastweight::bindings::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fastweight, CUDA, m) { fastweight::bindings::implement(m); }
