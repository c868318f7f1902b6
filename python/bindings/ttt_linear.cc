// TTT-Linear as PyTorch operators. What the arguments mean stands in fastweight/ttt_linear.h; autograd and shape
// functions in python/fastweight/_ttt_linear.py.
#include "fastweight/ttt_linear.h"

#include "convert.h"

// Inputs and take_options below read these, in this order.
#define FW_INPUTS                                                                         \
  "Tensor q, Tensor k, Tensor v, Tensor w, Tensor b, Tensor eta, Tensor? initial_state, " \
  "Tensor? initial_state_bias, Tensor? cu_seqlens"
#define FW_OPTIONS "float? scale, float eps, int mini_batch"
#define FW_FORWARD                       \
  FW_INPUTS ", " FW_OPTIONS              \
            ", bool output_final_state)" \
            " -> (Tensor o, Tensor final_state, Tensor final_state_bias)"

namespace fastweight::bindings {
namespace {

struct Inputs {
  explicit Inputs(Arguments& arguments)
      : q(arguments.take<Tensor>()),
        k(arguments.take<Tensor>()),
        v(arguments.take<Tensor>()),
        w(arguments.take<Tensor>()),
        b(arguments.take<Tensor>()),
        eta(arguments.take<Tensor>()),
        initial_state(arguments.take<OptionalTensor>()),
        initial_state_bias(arguments.take<OptionalTensor>()),
        cu_seqlens(arguments.take<OptionalTensor>()) {}

  TttLinearInputs views() const {
    return {view("q", q),
            view("k", k),
            view("v", v),
            view("w", w),
            view("b", b),
            view("eta", eta),
            view("initial_state", initial_state),
            view("initial_state_bias", initial_state_bias),
            view("cu_seqlens", cu_seqlens)};
  }

  Tensor q, k, v, w, b, eta;
  OptionalTensor initial_state, initial_state_bias, cu_seqlens;
};

TttLinearOptions take_options(Arguments& arguments) {
  TttLinearOptions options;
  options.scale = number("scale", arguments.take<std::optional<double>>());
  options.eps = arguments.take<double>();
  options.mini_batch = static_cast<int32_t>(arguments.take<int64_t>());
  return options;
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Inputs in(arguments);
    TttLinearForward args;
    args.options = take_options(arguments);
    const bool output_final_state = arguments.take<bool>();
    args.in = in.views();

    const Tensor o = dense_like(in.q);
    args.o = view("o", o);
    Tensor final_state = nothing(), final_state_bias = nothing();
    if (output_final_state) {
      const int64_t count = num_sequences(in.q, in.cu_seqlens), heads = extent(in.q, 2), width = extent(in.q, 3);
      final_state = dense(in.q, {count, heads, width, width}, state_dtype(in.q));
      final_state_bias = dense(in.q, {count, heads, 1, width}, state_dtype(in.q));
      args.final_state = view("final_state", final_state);
      args.final_state_bias = view("final_state_bias", final_state_bias);
    }
    ttt_linear_forward(ContextOf(in.q), args);
    give(stack, o, final_state, final_state_bias);
  });
}

// Bit i of `gradients` asks for the gradient of input i in the order of Inputs.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto d_o = arguments.take<OptionalTensor>();
    const auto d_final_state = arguments.take<OptionalTensor>();
    const auto d_final_state_bias = arguments.take<OptionalTensor>();
    const Inputs in(arguments);
    TttLinearBackward args;
    args.options = take_options(arguments);
    const int64_t gradients = arguments.take<int64_t>();
    args.in = in.views();
    args.d_o = view("d_o", d_o);
    args.d_final_state = view("d_final_state", d_final_state);
    args.d_final_state_bias = view("d_final_state_bias", d_final_state_bias);

    const Gradients output{in.q, gradients};
    const Tensor dq = output(0, "dq", in.q, args.dq);
    const Tensor dk = output(1, "dk", in.k, args.dk);
    const Tensor dv = output(2, "dv", in.v, args.dv);
    const Tensor dw = output(3, "dw", in.w, args.dw);
    const Tensor db = output(4, "db", in.b, args.db);
    const Tensor deta = output(5, "deta", in.eta, args.deta);
    const Tensor d_initial_state = output.of_state(6, "d_initial_state", in.initial_state, args.d_initial_state);
    const Tensor d_initial_state_bias =
        output.of_state(7, "d_initial_state_bias", in.initial_state_bias, args.d_initial_state_bias);
    ttt_linear_backward(ContextOf(in.q), args);
    give(stack, dq, dk, dv, dw, db, deta, d_initial_state, d_initial_state_bias);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor state = arguments.take<Tensor>();
    const Tensor state_bias = arguments.take<Tensor>();
    const Tensor gradient = arguments.take<Tensor>();
    const Tensor gradient_bias = arguments.take<Tensor>();
    const Tensor position = arguments.take<Tensor>();
    const auto state_indices = arguments.take<OptionalTensor>();
    const Inputs in(arguments);
    TttLinearStep args;
    args.options = take_options(arguments);
    args.in = in.views();
    args.state = view("state", state);
    args.state_bias = view("state_bias", state_bias);
    args.gradient = view("gradient", gradient);
    args.gradient_bias = view("gradient_bias", gradient_bias);
    args.position = view("position", position);
    args.state_indices = view("state_indices", state_indices);
    const Tensor o = dense_like(in.q);
    args.o = view("o", o);
    ttt_linear_step(ContextOf(in.q), args);
    give(stack, o);
  });
}

// For every device: the library says what it can do where.
void implement(Library& m) {
  m.impl("ttt_linear_forward", &forward);
  m.impl("ttt_linear_differentiable", &forward);
  m.impl("ttt_linear_backward", &backward);
  m.impl("ttt_linear_step", &step);
}

}  // namespace
}  // namespace fastweight::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(fastweight, m) {
  m.def("ttt_linear_forward(" FW_FORWARD);
  m.def("ttt_linear_differentiable(" FW_FORWARD);
  m.def("ttt_linear_backward(Tensor? d_o, Tensor? d_final_state, Tensor? d_final_state_bias, " FW_INPUTS ", " FW_OPTIONS
        ", int gradients)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dw, Tensor db, Tensor deta, Tensor d_initial_state, "
        "Tensor d_initial_state_bias)");
  m.def(
      "ttt_linear_step(Tensor(a!) state, Tensor(b!) state_bias, Tensor(c!) gradient, Tensor(d!) gradient_bias, "
      "Tensor(e!) position, Tensor? state_indices, " FW_INPUTS ", " FW_OPTIONS ") -> Tensor o");
}

STABLE_TORCH_LIBRARY_IMPL(fastweight, CPU, m) { fastweight::bindings::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fastweight, CUDA, m) { fastweight::bindings::implement(m); }
