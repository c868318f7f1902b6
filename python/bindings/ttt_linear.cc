// TTT-Linear as PyTorch operators. What the arguments mean stands in fastweight/ttt_linear.h; autograd and shape
// functions in python/fastweight/_ttt_linear.py.
#include "fastweight/ttt_linear.h"

#include "convert.h"

// Inputs and take_options below read these, in this order.
#define FW_INPUTS                                                                         \
  "Tensor q, Tensor k, Tensor v, Tensor w, Tensor b, Tensor eta, Tensor? initial_state, " \
  "Tensor? initial_state_bias, Tensor? cu_seqlens"
#define FW_OPTIONS "float? scale, float eps, int mini_batch"
#define FW_FORWARD                                                       \
  "(" FW_INPUTS ", " FW_OPTIONS                                          \
  ", bool output_final_state) -> (Tensor o, Tensor final_state, Tensor " \
  "final_state_bias)"

namespace fastweight::bindings {
namespace {

struct Inputs {
  explicit Inputs(Arguments& arguments)
      : q(arguments.tensor()),
        k(arguments.tensor()),
        v(arguments.tensor()),
        w(arguments.tensor()),
        b(arguments.tensor()),
        eta(arguments.tensor()),
        initial_state(arguments.optional_tensor()),
        initial_state_bias(arguments.optional_tensor()),
        cu_seqlens(arguments.optional_tensor()) {}

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

  Tensor q, k, v, w, b, eta, initial_state, initial_state_bias, cu_seqlens;
};

struct Options {
  explicit Options(Arguments& arguments)
      : scale(arguments.take<std::optional<double>>()),
        eps(arguments.take<double>()),
        mini_batch(arguments.take<int64_t>()) {}

  TttLinearOptions resolved() const {
    TttLinearOptions options;
    options.scale = number("scale", scale);
    options.eps = eps;
    options.mini_batch = static_cast<int32_t>(mini_batch);
    return options;
  }

  std::optional<double> scale;
  double eps;
  int64_t mini_batch;
};

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Inputs in(arguments);
    const Options options(arguments);
    const bool output_final_state = arguments.take<bool>();
    TttLinearForward args;
    args.options = options.resolved();
    args.in = in.views();

    const TensorView& q = args.in.q;
    Tensor o = dense_like(q, args.o), final_state, final_state_bias;
    if (output_final_state) {
      const int64_t count = num_sequences(q, args.in.cu_seqlens), heads = extent(q, 2), width = extent(q, 3);
      final_state = dense(q, state_dtype(q), {count, heads, width, width}, args.final_state);
      final_state_bias = dense(q, state_dtype(q), {count, heads, 1, width}, args.final_state_bias);
    }
    ttt_linear_forward(ContextOf(q), args);
    give(stack, o, final_state, final_state_bias);
  });
}

// Bit i of `gradients` asks for the gradient of input i in the order of Inputs.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor d_o = arguments.optional_tensor();
    const Tensor d_final_state = arguments.optional_tensor();
    const Tensor d_final_state_bias = arguments.optional_tensor();
    const Inputs in(arguments);
    const Options options(arguments);
    const int64_t gradients = arguments.take<int64_t>();
    TttLinearBackward args;
    args.options = options.resolved();
    args.in = in.views();
    args.d_o = view("d_o", d_o);
    args.d_final_state = view("d_final_state", d_final_state);
    args.d_final_state_bias = view("d_final_state_bias", d_final_state_bias);

    const Gradients output{args.in.q, gradients};
    Tensor dq = output(0, args.in.q, args.dq);
    Tensor dk = output(1, args.in.k, args.dk);
    Tensor dv = output(2, args.in.v, args.dv);
    Tensor dw = output(3, args.in.w, args.dw);
    Tensor db = output(4, args.in.b, args.db);
    Tensor deta = output(5, args.in.eta, args.deta);
    Tensor d_initial_state = output.of_state(6, args.in.initial_state, args.d_initial_state);
    Tensor d_initial_state_bias = output.of_state(7, args.in.initial_state_bias, args.d_initial_state_bias);
    ttt_linear_backward(ContextOf(args.in.q), args);
    give(stack, dq, dk, dv, dw, db, deta, d_initial_state, d_initial_state_bias);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor state = arguments.tensor();
    const Tensor state_bias = arguments.tensor();
    const Tensor gradient = arguments.tensor();
    const Tensor gradient_bias = arguments.tensor();
    const Tensor position = arguments.tensor();
    const Tensor state_indices = arguments.optional_tensor();
    const Inputs in(arguments);
    const Options options(arguments);
    TttLinearStep args;
    args.options = options.resolved();
    args.in = in.views();
    args.state = view("state", state);
    args.state_bias = view("state_bias", state_bias);
    args.gradient = view("gradient", gradient);
    args.gradient_bias = view("gradient_bias", gradient_bias);
    args.position = view("position", position);
    args.state_indices = view("state_indices", state_indices);
    Tensor o = dense_like(args.in.q, args.o);
    ttt_linear_step(ContextOf(args.in.q), args);
    give(stack, o);
  });
}

constexpr Operator kOperators[] = {
    {"ttt_linear_forward" FW_FORWARD, &forward},
    {"ttt_linear_differentiable" FW_FORWARD, &forward},
    {"ttt_linear_backward(Tensor? d_o, Tensor? d_final_state, Tensor? d_final_state_bias, " FW_INPUTS ", " FW_OPTIONS
     ", int gradients) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dw, Tensor db, Tensor deta, Tensor d_initial_state, "
     "Tensor d_initial_state_bias)",
     &backward},
    {"ttt_linear_step(Tensor(a!) state, Tensor(b!) state_bias, Tensor(c!) gradient, Tensor(d!) gradient_bias, "
     "Tensor(e!) position, Tensor? state_indices, " FW_INPUTS ", " FW_OPTIONS ") -> Tensor o",
     &step},
};

}  // namespace

std::span<const Operator> ttt_linear_operators() { return kOperators; }

}  // namespace fastweight::bindings
