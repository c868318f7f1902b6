// TTT-Linear as PyTorch operators. What the arguments mean stands in fastweight/ttt_linear.h; autograd and shape
// functions in python/fastweight/_ttt_linear.py.
#include "fastweight/ttt_linear.h"

#include "convert.h"
#include "core/ttt_linear_fields.h"
#include "observe.h"

namespace fastweight::bindings {
namespace {

constexpr const char* kOptionSchema = "float? scale, float eps, int mini_batch";

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
    const TensorArguments<TttLinearInputs> in(arguments);
    const Options options(arguments);
    const bool output_final_state = arguments.take<bool>();
    const auto kept_words = arguments.take<int64_t>();
    TttLinearForward args;
    args.options = options.resolved();
    in.view_as(args.in);

    const TensorView& q = args.in.q;
    Tensor o = dense_like(q, args.o), final_state, final_state_bias, kept;
    const int64_t count = num_sequences(q, args.in.cu_seqlens), heads = extent(q, 2), width = extent(q, 3);
    if (output_final_state) {
      final_state = dense(q, state_dtype(q), {count, heads, width, width}, args.final_state);
      final_state_bias = dense(q, state_dtype(q), {count, heads, 1, width}, args.final_state_bias);
    }
    if (kept_words > 0) {
      const int64_t T = extent(q, 1), C = args.options.mini_batch;
      const int64_t mini_batches = args.in.cu_seqlens.present() ? T / C + count : (T + C - 1) / C;
      kept = dense(q, DType::kI32, {extent(q, 0), mini_batches, heads, kept_words}, args.kept);
    }
    call("ttt_linear_forward", fastweight::ttt_linear_forward, ContextOf(q), args);
    give(stack, o, final_state, final_state_bias, kept);
  });
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<TttLinearBackward> own(arguments);
    const TensorArguments<TttLinearInputs> in(arguments);
    const Options options(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    TttLinearBackward args;
    args.options = options.resolved();
    in.view_as(args.in);
    own.view_as(args);
    GradientResults<TttLinearBackward> gradients(args, args.in.q, asked_for);
    call("ttt_linear_backward", fastweight::ttt_linear_backward, ContextOf(args.in.q), args);
    gradients.give(stack);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<TttLinearStep> own(arguments);
    const TensorArguments<TttLinearInputs> in(arguments);
    const Options options(arguments);
    TttLinearStep args;
    args.options = options.resolved();
    in.view_as(args.in);
    own.view_as(args);
    Tensor o = dense_like(args.in.q, args.o);
    call("ttt_linear_step", fastweight::ttt_linear_step, ContextOf(args.in.q), args);
    give(stack, o);
  });
}

}  // namespace

std::span<const Operator> ttt_linear_operators() {
  const std::string inputs = argument_schema<TttLinearInputs>() + kOptionSchema;
  const std::string forward_schema =
      "(" + inputs + ", bool output_final_state, int kept_words) -> " + result_schema<TttLinearForward>();
  static const Operator operators[] = {
      {"ttt_linear_forward" + forward_schema, &forward},
      {"ttt_linear_differentiable" + forward_schema, &forward},
      {"ttt_linear_backward(" + argument_schema<TttLinearBackward>() + inputs + ", int gradients) -> " +
           result_schema<TttLinearBackward>(),
       &backward},
      {"ttt_linear_step(" + argument_schema<TttLinearStep>() + inputs + ") -> " + result_schema<TttLinearStep>(),
       &step},
  };
  return operators;
}

}  // namespace fastweight::bindings
