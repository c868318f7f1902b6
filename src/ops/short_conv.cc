// The entry points of the short convolution: check the arguments, build the problem, walk the implementation list.
#include "fastweight/short_conv.h"

#include <span>
#include <vector>

#include "core/check.h"
#include "core/implementation.h"
#include "core/short_conv_fields.h"
#include "core/short_conv_problem.h"
#include "cpu/short_conv/registry.h"
#include "cuda/short_conv/registry.h"
#include "ops/dispatch.h"
#include "ops/entry.h"

namespace fastweight {
namespace {

using check::Argument;
using check::invalid;

constexpr int64_t kMaxWidth = 16;

// ---- Checks, one function per concern -----------------------------------------------------------------------------

void check_options(const ShortConvOptions& options) {
  if (options.activation != Activation::kNone && options.activation != Activation::kSilu) {
    invalid("activation", "none (0) or silu (1)", std::to_string(static_cast<int32_t>(options.activation)));
  }
}

// The initial state is checked by the entry points that take one.
ShortConvSizes check_inputs(const ShortConvInputs& in) {
  ShortConvSizes sizes;
  check::present("x", in.x);
  check::present("w", in.w);
  check::rank("x", in.x, 3);
  check::floating("x", in.x);
  sizes.batch = in.x.shape[0];
  sizes.tokens = in.x.shape[1];
  sizes.channels = in.x.shape[2];
  if (sizes.channels < 1) invalid("x", "at least one channel", "shape " + check::shape_text(in.x));
  check::rank("w", in.w, 2);
  check::floating("w", in.w);
  sizes.width = in.w.shape[1];
  check::in_range("w: width W", sizes.width, 1, kMaxWidth);
  check::shape("w", in.w, {sizes.channels, sizes.width});
  if (in.bias.present()) {
    check::floating("bias", in.bias);
    check::shape("bias", in.bias, {sizes.channels});
  }
  sizes.num_sequences = check::num_sequences(in.cu_seqlens, sizes.batch, sizes.tokens);
  check::scratch_extent(sizes.batch, sizes.tokens, sizes.num_sequences, sizes.channels, kMaxWidth * kMaxWidth, "x");
  return sizes;
}

// A state that is read, where given: any floating type.
void check_input_state(const char* name, const TensorView& state, const ShortConvSizes& sizes) {
  if (!state.present()) return;
  check::floating(name, state);
  check::shape(name, state, {sizes.num_sequences, sizes.channels, sizes.width});
}

// A tensor of x's type or fp32.
void check_like_x(const char* name, const TensorView& view, const ShortConvInputs& in, const check::Shape& shape) {
  check::shape(name, view, shape);
  check::dtype(name, view, {in.x.dtype, DType::kF32});
}

void check_residual_and_y(const ShortConvInputs& in, const TensorView& residual, const TensorView& y,
                          const ShortConvSizes& sizes) {
  if (residual.present()) {
    check::floating("residual", residual);
    check::shape("residual", residual, {sizes.batch, sizes.tokens, sizes.channels});
  }
  check::present("y", y);
  check_like_x("y", y, in, {sizes.batch, sizes.tokens, sizes.channels});
}

void check_rest(const ShortConvForward& args, const ShortConvSizes& sizes) {
  check_input_state("initial_state", args.in.initial_state, sizes);
  check_residual_and_y(args.in, args.residual, args.y, sizes);
  if (args.final_state.present()) {
    check_like_x("final_state", args.final_state, args.in, {sizes.num_sequences, sizes.channels, sizes.width});
  }
}

void check_rest(const ShortConvBackward& args, const ShortConvSizes& sizes) {
  const ShortConvInputs& in = args.in;
  check_input_state("initial_state", in.initial_state, sizes);
  if (args.dy.present()) check_like_x("dy", args.dy, in, {sizes.batch, sizes.tokens, sizes.channels});
  check_input_state("d_final_state", args.d_final_state, sizes);
  check_gradients(args);
}

void check_rest(const ShortConvStep& args, const ShortConvSizes& sizes) {
  check::absent("initial_state", args.in.initial_state, "in a step");
  check_residual_and_y(args.in, args.residual, args.y, sizes);
  check::present("state", args.state);
  check::rank("state", args.state, 3);
  const int64_t slots = args.state_indices.present() ? args.state.shape[0] : sizes.num_sequences;
  check_like_x("state", args.state, args.in, {slots, sizes.channels, sizes.width});
  if (args.state_indices.present()) check::state_indices(args.state_indices, sizes.num_sequences, slots);
}

// ---- The problem --------------------------------------------------------------------------------------------------

template <class Args>
ShortConvProblem<Args> make_problem(const Context& context, const Args& args) {
  check::context(context);
  const std::vector<Argument> arguments = arguments_of(args);
  check::views(arguments, context.device);
  check_options(args.options);
  ShortConvProblem<Args> problem;
  problem.sizes = check_inputs(args.in);
  check_rest(args, problem.sizes);
  check::memory(arguments);
  if (context.device.type == DeviceType::kCuda) cuda::check_arguments(context, arguments);
  problem.has_fp64 = check::any_fp64(arguments);
  problem.args = args;
  return problem;
}

// Whether the sequences have anything to do: without tokens, only their states do. A step without tokens leaves its
// states as they are.
bool has_sequences(const ShortConvForward& args) {
  return !check::is_empty(args.in.x) || !check::is_empty(args.final_state);
}
bool has_sequences(const ShortConvBackward& args) {
  return !check::is_empty(args.in.x) || !check::is_empty(args.d_initial_state);
}
bool has_sequences(const ShortConvStep& args) { return !check::is_empty(args.in.x); }

// Weights have gradients, of 0, even without sequences.
template <class Args>
bool has_work(const Args& args) {
  return has_sequences(args);
}
bool has_work(const ShortConvBackward& args) {
  return has_sequences(args) || !check::is_empty(args.dw) || !check::is_empty(args.dbias);
}

// ---- The run ------------------------------------------------------------------------------------------------------

template <class Problem>
std::string describe(const Problem& problem) {
  const ShortConvSizes& sizes = problem.sizes;
  const std::string text = check::sizes_text({{"B", problem.args.in.x.shape[0]},
                                              {"T", sizes.tokens},
                                              {"D", sizes.channels},
                                              {"W", sizes.width},
                                              {"N", sizes.num_sequences}});
  return text + ", " + check::text(problem.args.in.x.dtype);
}

template <class Args>
using ImplementationList = std::span<const Implementation<ShortConvProblem<Args>>>;

template <class Args>
std::string run(const char* entry, const Context& context, const Args& args, ImplementationList<Args> cpu_list,
                ImplementationList<Args> cuda_list) {
  return entry_point(entry, [&] {
    ShortConvProblem<Args> problem = make_problem(context, args);
    // However many empty sequences there are, they cost nothing.
    const bool sequences = has_sequences(args);
    if (!sequences) problem.sizes.batch = problem.sizes.num_sequences = 0;
    if (sequences && context.device.type == DeviceType::kCpu) {
      problem.sequences = sequence_table(problem.sizes.batch, problem.sizes.tokens, args.in.cu_seqlens, 1);
    }
    return dispatch(entry, context, cpu_list, problem, has_work(args), describe<ShortConvProblem<Args>>, cuda_list);
  });
}

}  // namespace

std::string short_conv_forward(const Context& context, const ShortConvForward& args) {
  return run("short_conv_forward", context, args, cpu::short_conv_forward_list(), cuda::short_conv_forward_list());
}

std::string short_conv_backward(const Context& context, const ShortConvBackward& args) {
  return run("short_conv_backward", context, args, cpu::short_conv_backward_list(), cuda::short_conv_backward_list());
}

std::string short_conv_step(const Context& context, const ShortConvStep& args) {
  return run("short_conv_step", context, args, cpu::short_conv_step_list(), cuda::short_conv_step_list());
}

std::vector<ImplementationInfo> short_conv_implementations() {
  std::vector<ImplementationInfo> infos;
  append_infos(cpu::short_conv_forward_list(), cpu::short_conv_backward_list(), cpu::short_conv_step_list(), "cpu",
               infos);
  append_infos(cuda::short_conv_forward_list(), cuda::short_conv_backward_list(), cuda::short_conv_step_list(), "cuda",
               infos);
  return infos;
}

}  // namespace fastweight
