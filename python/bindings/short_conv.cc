// The short convolution as PyTorch operators. What the arguments mean stands in fastweight/short_conv.h; autograd and
// shape functions in python/fastweight/_short_conv.py.
#include "fastweight/short_conv.h"

#include "convert.h"

// Inputs below reads these, in this order.
#define FW_INPUTS "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens"
#define FW_FORWARD \
  FW_INPUTS ", int activation, Tensor? residual, bool output_final_state) -> (Tensor y, Tensor final_state)"

namespace fastweight::bindings {
namespace {

struct Inputs {
  explicit Inputs(Arguments& arguments)
      : x(arguments.take<Tensor>()),
        weight(arguments.take<Tensor>()),
        bias(arguments.take<OptionalTensor>()),
        initial_state(arguments.take<OptionalTensor>()),
        cu_seqlens(arguments.take<OptionalTensor>()) {}

  ShortConvInputs views() const {
    return {view("x", x), view("weight", weight), view("bias", bias), view("initial_state", initial_state),
            view("cu_seqlens", cu_seqlens)};
  }

  Tensor x, weight;
  OptionalTensor bias, initial_state, cu_seqlens;
};

ShortConvOptions take_options(Arguments& arguments) { return {static_cast<Activation>(arguments.take<int64_t>())}; }

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Inputs in(arguments);
    ShortConvForward args;
    args.options = take_options(arguments);
    const auto residual = arguments.take<OptionalTensor>();
    const bool output_final_state = arguments.take<bool>();
    args.in = in.views();
    args.residual = view("residual", residual);
    const Tensor y = dense_like(in.x);
    args.y = view("y", y);
    Tensor final_state = nothing();
    if (output_final_state) {
      final_state =
          dense(in.x, {num_sequences(in.x, in.cu_seqlens), extent(in.x, 2), extent(in.weight, 1)}, in.x.scalar_type());
      args.final_state = view("final_state", final_state);
    }
    short_conv_forward(ContextOf(in.x), args);
    give(stack, y, final_state);
  });
}

// Bit i of `gradients` asks for the gradient of input i in the order of Inputs.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto dy = arguments.take<OptionalTensor>();
    const auto d_final_state = arguments.take<OptionalTensor>();
    const Inputs in(arguments);
    ShortConvBackward args;
    args.options = take_options(arguments);
    const int64_t gradients = arguments.take<int64_t>();
    args.in = in.views();
    args.dy = view("dy", dy);
    args.d_final_state = view("d_final_state", d_final_state);

    const Gradients output{in.x, gradients};
    const Tensor dx = output(0, "dx", in.x, args.dx);
    const Tensor dw = output(1, "dweight", in.weight, args.dw);
    const Tensor dbias = output(2, "dbias", in.bias, args.dbias);
    const Tensor d_initial_state = output(3, "d_initial_state", in.initial_state, args.d_initial_state);
    short_conv_backward(ContextOf(in.x), args);
    give(stack, dx, dw, dbias, d_initial_state);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor state = arguments.take<Tensor>();
    const auto state_indices = arguments.take<OptionalTensor>();
    const Inputs in(arguments);
    ShortConvStep args;
    args.options = take_options(arguments);
    const auto residual = arguments.take<OptionalTensor>();
    args.in = in.views();
    args.residual = view("residual", residual);
    args.state = view("state", state);
    args.state_indices = view("state_indices", state_indices);
    const Tensor y = dense_like(in.x);
    args.y = view("y", y);
    short_conv_step(ContextOf(in.x), args);
    give(stack, y);
  });
}

// For every device: the library says what it can do where.
void implement(Library& m) {
  m.impl("short_conv_forward", &forward);
  m.impl("short_conv_differentiable", &forward);
  m.impl("short_conv_backward", &backward);
  m.impl("short_conv_step", &step);
}

}  // namespace
}  // namespace fastweight::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(fastweight, m) {
  m.def("short_conv_forward(" FW_FORWARD);
  m.def("short_conv_differentiable(" FW_FORWARD);
  m.def("short_conv_backward(Tensor? dy, Tensor? d_final_state, " FW_INPUTS
        ", int activation, int gradients)"
        " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor d_initial_state)");
  m.def("short_conv_step(Tensor(a!) state, Tensor? state_indices, " FW_INPUTS
        ", int activation, Tensor? residual) -> Tensor y");
}

STABLE_TORCH_LIBRARY_IMPL(fastweight, CPU, m) { fastweight::bindings::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fastweight, CUDA, m) { fastweight::bindings::implement(m); }
