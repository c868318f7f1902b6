// The short convolution as PyTorch operators. What the arguments mean stands in fastweight/short_conv.h; autograd and
// shape functions in python/fastweight/_short_conv.py.
#include "fastweight/short_conv.h"

#include "convert.h"
#include "core/short_conv_fields.h"
#include "observe.h"

namespace fastweight::bindings {
namespace {

ShortConvOptions take_options(Arguments& arguments) { return {static_cast<Activation>(arguments.take<int64_t>())}; }

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<ShortConvInputs> in(arguments);
    ShortConvForward args;
    args.options = take_options(arguments);
    const TensorArguments<ShortConvForward> own(arguments);
    const bool output_final_state = arguments.take<bool>();
    in.view_as(args.in);
    own.view_as(args);
    const TensorView& x = args.in.x;
    Tensor y = dense_like(x, args.y), final_state;
    if (output_final_state) {
      final_state = dense(x, x.dtype, {num_sequences(x, args.in.cu_seqlens), extent(x, 2), extent(args.in.w, 1)},
                          args.final_state);
    }
    call("short_conv_forward", fastweight::short_conv_forward, ContextOf(x), args);
    give(stack, y, final_state);
  });
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<ShortConvBackward> own(arguments);
    const TensorArguments<ShortConvInputs> in(arguments);
    ShortConvBackward args;
    args.options = take_options(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    in.view_as(args.in);
    own.view_as(args);
    GradientResults<ShortConvBackward> gradients(args, args.in.x, asked_for);
    call("short_conv_backward", fastweight::short_conv_backward, ContextOf(args.in.x), args);
    gradients.give(stack);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<ShortConvStep> own(arguments);
    const TensorArguments<ShortConvInputs> in(arguments);
    ShortConvStep args;
    args.options = take_options(arguments);
    in.view_as(args.in);
    own.view_as(args);
    Tensor y = dense_like(args.in.x, args.y);
    call("short_conv_step", fastweight::short_conv_step, ContextOf(args.in.x), args);
    give(stack, y);
  });
}

}  // namespace

std::span<const Operator> short_conv_operators() {
  const std::string inputs = argument_schema<ShortConvInputs>() + "int activation";
  const std::string forward_schema = "(" + inputs + ", " + argument_schema<ShortConvForward>() +
                                     "bool output_final_state) -> " + result_schema<ShortConvForward>();
  static const Operator operators[] = {
      {"short_conv_forward" + forward_schema, &forward},
      {"short_conv_differentiable" + forward_schema, &forward},
      {"short_conv_backward(" + argument_schema<ShortConvBackward>() + inputs + ", int gradients) -> " +
           result_schema<ShortConvBackward>(),
       &backward},
      {"short_conv_step(" + argument_schema<ShortConvStep>() + inputs + ") -> " + result_schema<ShortConvStep>(),
       &step},
  };
  return operators;
}

}  // namespace fastweight::bindings
