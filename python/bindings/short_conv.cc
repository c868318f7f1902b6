// The short convolution as PyTorch operators. What the arguments mean stands in fastweight/short_conv.h; autograd and
// shape functions in python/fastweight/_short_conv.py.
#include "fastweight/short_conv.h"

#include "convert.h"

// Inputs below reads these, in this order.
#define FW_INPUTS "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens"
#define FW_FORWARD \
  "(" FW_INPUTS ", int activation, Tensor? residual, bool output_final_state) -> (Tensor y, Tensor final_state)"

namespace fastweight::bindings {
namespace {

struct Inputs {
  explicit Inputs(Arguments& arguments)
      : x(arguments.tensor()),
        weight(arguments.tensor()),
        bias(arguments.optional_tensor()),
        initial_state(arguments.optional_tensor()),
        cu_seqlens(arguments.optional_tensor()) {}

  ShortConvInputs views() const {
    return {view("x", x), view("weight", weight), view("bias", bias), view("initial_state", initial_state),
            view("cu_seqlens", cu_seqlens)};
  }

  Tensor x, weight, bias, initial_state, cu_seqlens;
};

ShortConvOptions take_options(Arguments& arguments) { return {static_cast<Activation>(arguments.take<int64_t>())}; }

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Inputs in(arguments);
    ShortConvForward args;
    args.options = take_options(arguments);
    const Tensor residual = arguments.optional_tensor();
    const bool output_final_state = arguments.take<bool>();
    args.in = in.views();
    args.residual = view("residual", residual);
    const TensorView& x = args.in.x;
    Tensor y = dense_like(x, args.y), final_state;
    if (output_final_state) {
      final_state = dense(x, x.dtype, {num_sequences(x, args.in.cu_seqlens), extent(x, 2), extent(args.in.w, 1)},
                          args.final_state);
    }
    short_conv_forward(ContextOf(x), args);
    give(stack, y, final_state);
  });
}

// Bit i of `gradients` asks for the gradient of input i in the order of Inputs.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor dy = arguments.optional_tensor();
    const Tensor d_final_state = arguments.optional_tensor();
    const Inputs in(arguments);
    ShortConvBackward args;
    args.options = take_options(arguments);
    const int64_t gradients = arguments.take<int64_t>();
    args.in = in.views();
    args.dy = view("dy", dy);
    args.d_final_state = view("d_final_state", d_final_state);

    const Gradients output{args.in.x, gradients};
    Tensor dx = output(0, args.in.x, args.dx);
    Tensor dw = output(1, args.in.w, args.dw);
    Tensor dbias = output(2, args.in.bias, args.dbias);
    Tensor d_initial_state = output(3, args.in.initial_state, args.d_initial_state);
    short_conv_backward(ContextOf(args.in.x), args);
    give(stack, dx, dw, dbias, d_initial_state);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor state = arguments.tensor();
    const Tensor state_indices = arguments.optional_tensor();
    const Inputs in(arguments);
    ShortConvStep args;
    args.options = take_options(arguments);
    const Tensor residual = arguments.optional_tensor();
    args.in = in.views();
    args.residual = view("residual", residual);
    args.state = view("state", state);
    args.state_indices = view("state_indices", state_indices);
    Tensor y = dense_like(args.in.x, args.y);
    short_conv_step(ContextOf(args.in.x), args);
    give(stack, y);
  });
}

constexpr Operator kOperators[] = {
    {"short_conv_forward" FW_FORWARD, &forward},
    {"short_conv_differentiable" FW_FORWARD, &forward},
    {"short_conv_backward(Tensor? dy, Tensor? d_final_state, " FW_INPUTS
     ", int activation, int gradients) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor d_initial_state)",
     &backward},
    {"short_conv_step(Tensor(a!) state, Tensor? state_indices, " FW_INPUTS
     ", int activation, Tensor? residual) -> Tensor y",
     &step},
};

}  // namespace

std::span<const Operator> short_conv_operators() { return kOperators; }

}  // namespace fastweight::bindings
