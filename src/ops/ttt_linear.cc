// The entry points of the TTT-linear family: check the arguments, build the problem, walk the implementation list.
#include "fastweight/ttt_linear.h"

#include <cmath>
#include <span>
#include <vector>

#include "core/check.h"
#include "core/implementation.h"
#include "core/ttt_linear_fields.h"
#include "core/ttt_linear_problem.h"
#include "cpu/ttt_linear/registry.h"
#include "cuda/ttt_linear/registry.h"
#include "ops/dispatch.h"
#include "ops/entry.h"

namespace fastweight {
namespace {

using check::Argument;
using check::invalid;
using check::Shape;

constexpr int64_t kMaxHeadDim = 128;

// ---- Checks, one function per concern -----------------------------------------------------------------------------

void check_options(const TttLinearOptions& options) {
  const double scale = options.scale;
  if (scale != TttLinearOptions::kUnset && !(std::isfinite(scale) && scale > 0)) {
    invalid("scale", "a finite number above 0", check::text(scale));
  }
  if (options.mini_batch != 16 && options.mini_batch != 32 && options.mini_batch != 64) {
    invalid("mini_batch", "16, 32 or 64", std::to_string(options.mini_batch));
  }
  check::eps(options.eps);
}

// Sets B, T, H and D.
void check_qkv(const TttLinearInputs& in, TttLinearSizes& sizes) {
  check::present("q", in.q);
  check::present("k", in.k);
  check::present("v", in.v);
  check::rank("q", in.q, 4);
  check::floating("q", in.q);
  sizes.batch = in.q.shape[0];
  sizes.tokens = in.q.shape[1];
  sizes.num_heads = in.q.shape[2];
  sizes.head_dim = in.q.shape[3];
  if (sizes.num_heads < 1) invalid("q", "at least one head", "shape " + check::shape_text(in.q));
  check::in_range("q: head width D", sizes.head_dim, 1, kMaxHeadDim);
  for (const Argument& argument : {Argument{"k", &in.k, false}, Argument{"v", &in.v, false}}) {
    check::shape(argument.name, *argument.view, {sizes.batch, sizes.tokens, sizes.num_heads, sizes.head_dim});
    check::dtype(argument.name, *argument.view, {in.q.dtype});
  }
}

// Sets N.
void check_sequences(const TttLinearInputs& in, TttLinearSizes& sizes) {
  sizes.num_sequences = check::num_sequences(in.cu_seqlens, sizes.batch, sizes.tokens);
  check::scratch_extent(sizes.batch, sizes.tokens, sizes.num_sequences, sizes.num_heads, kMaxHeadDim * kMaxHeadDim);
}

void check_norm_and_eta(const TttLinearInputs& in, const TttLinearSizes& sizes) {
  for (const Argument& argument : {Argument{"w", &in.w, false}, Argument{"b", &in.b, false}}) {
    check::present(argument.name, *argument.view);
    check::floating(argument.name, *argument.view);
    check::shape(argument.name, *argument.view, {sizes.num_heads, sizes.head_dim});
  }
  check::present("eta", in.eta);
  check::floating("eta", in.eta);
  if (in.eta.rank == 4) {
    check::shape("eta", in.eta, {sizes.batch, sizes.tokens, sizes.num_heads, 1});
  } else {
    check::shape("eta", in.eta, {sizes.batch, sizes.tokens, sizes.num_heads});
  }
}

Shape state_shape(int64_t count, const TttLinearSizes& sizes) {
  return {count, sizes.num_heads, sizes.head_dim, sizes.head_dim};
}

void check_bias_shape(const char* name, const TensorView& view, int64_t count, const TttLinearSizes& sizes) {
  if (view.rank == 4) {
    check::shape(name, view, {count, sizes.num_heads, 1, sizes.head_dim});
  } else {
    check::shape(name, view, {count, sizes.num_heads, sizes.head_dim});
  }
}

// A state that is read, where given: any floating type.
void check_input_state(const char* name, const TensorView& state, const char* bias_name, const TensorView& bias,
                       const TttLinearSizes& sizes) {
  if (state.present()) {
    check::floating(name, state);
    check::shape(name, state, state_shape(sizes.num_sequences, sizes));
  }
  if (bias.present()) {
    check::floating(bias_name, bias);
    check_bias_shape(bias_name, bias, sizes.num_sequences, sizes);
  }
}

// The type of a state that is written: fp32, or fp64 in an fp64 problem.
void check_state_dtype(const char* name, const TensorView& view, const TttLinearInputs& in) {
  check::dtype(name, view, {DType::kF32, in.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32});
}

// A state that is written, where asked for.
void check_output_state(const char* name, const TensorView& state, int64_t count, const TttLinearInputs& in,
                        const TttLinearSizes& sizes) {
  if (!state.present()) return;
  check::shape(name, state, state_shape(count, sizes));
  check_state_dtype(name, state, in);
}

void check_output_bias(const char* name, const TensorView& bias, int64_t count, const TttLinearInputs& in,
                       const TttLinearSizes& sizes) {
  if (!bias.present()) return;
  check_bias_shape(name, bias, count, sizes);
  check_state_dtype(name, bias, in);
}

void check_output(const TttLinearInputs& in, const TensorView& o, const TttLinearSizes& sizes) {
  check::present("o", o);
  check::shape("o", o, {sizes.batch, sizes.tokens, sizes.num_heads, sizes.head_dim});
  check::dtype("o", o, {in.q.dtype, DType::kF32});
}

int64_t kept_words(const Context& context, const TttLinearOptions& options, DType dtype, int64_t head_dim) {
  if (context.device.type != DeviceType::kCuda) return 0;
  return cuda::ttt_linear_kept_words(context.device, options, dtype, head_dim);
}

// What a forward keeps, where given.
void check_kept(const Context& context, const TensorView& view, const TttLinearInputs& in,
                const TttLinearOptions& options, const TttLinearSizes& sizes) {
  if (!view.present()) return;
  const int64_t words = kept_words(context, options, in.q.dtype, sizes.head_dim), C = options.mini_batch;
  if (words == 0) {
    invalid("kept",
            "none: mini-batches of " + std::to_string(C) + " of " + check::text(in.q.dtype) + " on " +
                check::text(context.device) + " keep nothing",
            "a tensor");
  }
  const int64_t count = in.cu_seqlens.present() ? sizes.tokens / C + sizes.num_sequences : (sizes.tokens + C - 1) / C;
  check::shape("kept", view, {sizes.batch, count, sizes.num_heads, words});
  check::dtype("kept", view, {DType::kI32});
  if (!check::is_dense(view)) invalid("kept", "a dense tensor", "strides with gaps");
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) invalid("kept", "memory at a multiple of 16 bytes", "another");
}

TttLinearSizes check_inputs(const TttLinearInputs& in) {
  TttLinearSizes sizes;
  check_qkv(in, sizes);
  check_sequences(in, sizes);
  check_norm_and_eta(in, sizes);
  check_input_state("initial_state", in.initial_state, "initial_state_bias", in.initial_state_bias, sizes);
  return sizes;
}

void check_rest(const Context& context, const TttLinearForward& args, const TttLinearSizes& sizes) {
  check_output(args.in, args.o, sizes);
  check_output_state("final_state", args.final_state, sizes.num_sequences, args.in, sizes);
  check_output_bias("final_state_bias", args.final_state_bias, sizes.num_sequences, args.in, sizes);
  check_kept(context, args.kept, args.in, args.options, sizes);
}

void check_rest(const Context& context, const TttLinearBackward& args, const TttLinearSizes& sizes) {
  const TttLinearInputs& in = args.in;
  if (args.d_o.present()) {
    check::shape("d_o", args.d_o, {sizes.batch, sizes.tokens, sizes.num_heads, sizes.head_dim});
    check::dtype("d_o", args.d_o, {in.q.dtype, DType::kF32});
  }
  check_input_state("d_final_state", args.d_final_state, "d_final_state_bias", args.d_final_state_bias, sizes);
  check_kept(context, args.kept, in, args.options, sizes);
  check_gradients(args);
  check_output_state("d_initial_state", args.d_initial_state, sizes.num_sequences, in, sizes);
  check_output_bias("d_initial_state_bias", args.d_initial_state_bias, sizes.num_sequences, in, sizes);
}

// Only the slots that the call uses: the others of a pool may be uninitialised.
void check_positions(const TttLinearStep& args, int64_t num_sequences) {
  if (args.position.device.type != DeviceType::kCpu) return;
  const int32_t mini_batch = args.options.mini_batch;
  for (int64_t n = 0; n < num_sequences; ++n) {
    const int64_t slot = args.state_indices.present() ? check::integer_at(args.state_indices, n) : n;
    if (slot < 0) continue;
    const int64_t value = check::integer_at(args.position, slot);
    if (value >= 0 && value < mini_batch) continue;
    invalid("position", "a count from 0 to " + std::to_string(mini_batch - 1) + " in slot " + std::to_string(slot),
            std::to_string(value));
  }
}

void check_rest(const Context&, const TttLinearStep& args, const TttLinearSizes& sizes) {
  check::absent("initial_state", args.in.initial_state, "in a step");
  check::absent("initial_state_bias", args.in.initial_state_bias, "in a step");
  check_output(args.in, args.o, sizes);
  check::present("state", args.state);
  check::present("state_bias", args.state_bias);
  check::present("gradient", args.gradient);
  check::present("gradient_bias", args.gradient_bias);
  check::present("position", args.position);
  check::rank("state", args.state, 4);
  const int64_t slots = args.state_indices.present() ? args.state.shape[0] : sizes.num_sequences;
  check_output_state("state", args.state, slots, args.in, sizes);
  check_output_bias("state_bias", args.state_bias, slots, args.in, sizes);
  check_output_state("gradient", args.gradient, slots, args.in, sizes);
  check_output_bias("gradient_bias", args.gradient_bias, slots, args.in, sizes);
  check::shape("position", args.position, {slots});
  check::dtype("position", args.position, {DType::kI32});
  if (args.state_indices.present()) check::state_indices(args.state_indices, sizes.num_sequences, slots);
  check_positions(args, sizes.num_sequences);
}

// ---- The problem --------------------------------------------------------------------------------------------------

void drop_axis(TensorView& view, size_t axis) {
  if (!view.present() || view.rank != 4) return;
  for (size_t i = axis; i < 3; ++i) {
    view.shape[i] = view.shape[i + 1];
    view.strides[i] = view.strides[i + 1];
  }
  view.rank = 3;
}

void unify_rest(TttLinearForward& args) { drop_axis(args.final_state_bias, 2); }

void unify_rest(TttLinearBackward& args) {
  drop_axis(args.deta, 3);
  drop_axis(args.d_final_state_bias, 2);
  drop_axis(args.d_initial_state_bias, 2);
}

void unify_rest(TttLinearStep& args) {
  drop_axis(args.state_bias, 2);
  drop_axis(args.gradient_bias, 2);
}

// Kernels see eta and the biases of states in one form each, without their axis of extent 1.
template <class Args>
void unify(Args& args) {
  drop_axis(args.in.eta, 3);
  drop_axis(args.in.initial_state_bias, 2);
  unify_rest(args);
}

// A step without tokens leaves its states as they are.
bool has_work(const TttLinearStep& args) { return !check::is_empty(args.o); }

template <class Args>
bool has_work(const Args& args) {
  return check::any_written(arguments_of(args));
}

template <class Args>
TttLinearProblem<Args> make_problem(const Context& context, const Args& args) {
  check::context(context);
  const std::vector<Argument> arguments = arguments_of(args);
  check::views(arguments, context.device);
  check_options(args.options);
  TttLinearProblem<Args> problem;
  problem.sizes = check_inputs(args.in);
  check_rest(context, args, problem.sizes);
  check::memory(arguments);
  if (context.device.type == DeviceType::kCuda) cuda::check_arguments(context, arguments);

  problem.has_fp64 = check::any_fp64(arguments);
  problem.args = args;
  unify(problem.args);
  problem.scale = args.options.scale;
  if (problem.scale == TttLinearOptions::kUnset) {
    problem.scale = 1 / std::sqrt(static_cast<double>(problem.sizes.head_dim));
  }
  return problem;
}

// ---- The run ------------------------------------------------------------------------------------------------------

template <class Problem>
std::string describe(const Problem& problem) {
  const TttLinearSizes& sizes = problem.sizes;
  const std::string text = check::sizes_text({{"B", problem.args.in.q.shape[0]},
                                              {"T", sizes.tokens},
                                              {"H", sizes.num_heads},
                                              {"D", sizes.head_dim},
                                              {"N", sizes.num_sequences},
                                              {"C", problem.args.options.mini_batch}});
  return text + ", " + check::text(problem.args.in.q.dtype);
}

template <class Args>
using ImplementationList = std::span<const Implementation<TttLinearProblem<Args>>>;

template <class Args>
std::string run(const char* entry, const Context& context, const Args& args, ImplementationList<Args> cpu_list,
                ImplementationList<Args> cuda_list) {
  return entry_point(entry, [&] {
    TttLinearProblem<Args> problem = make_problem(context, args);
    // However many empty sequences there are, they cost nothing.
    const bool work = has_work(args);
    if (!work) problem.sizes.batch = problem.sizes.num_sequences = 0;
    if (work && context.device.type == DeviceType::kCpu) {
      problem.sequences =
          sequence_table(problem.sizes.batch, problem.sizes.tokens, args.in.cu_seqlens, args.options.mini_batch);
    }
    return dispatch(entry, context, cpu_list, problem, work, describe<TttLinearProblem<Args>>, cuda_list);
  });
}

}  // namespace

std::string ttt_linear_forward(const Context& context, const TttLinearForward& args) {
  return run("ttt_linear_forward", context, args, cpu::ttt_linear_forward_list(), cuda::ttt_linear_forward_list());
}

std::string ttt_linear_backward(const Context& context, const TttLinearBackward& args) {
  return run("ttt_linear_backward", context, args, cpu::ttt_linear_backward_list(), cuda::ttt_linear_backward_list());
}

std::string ttt_linear_step(const Context& context, const TttLinearStep& args) {
  return run("ttt_linear_step", context, args, cpu::ttt_linear_step_list(), cuda::ttt_linear_step_list());
}

int64_t ttt_linear_kept_words(const Context& context, const TttLinearOptions& options, DType dtype, int64_t head_dim) {
  return entry_point("ttt_linear_kept_words", [&] {
    check::context(context);
    check_options(options);
    check::in_range("head_dim", head_dim, 1, kMaxHeadDim);
    return kept_words(context, options, dtype, head_dim);
  });
}

std::vector<ImplementationInfo> ttt_linear_implementations() {
  std::vector<ImplementationInfo> infos;
  append_infos(cpu::ttt_linear_forward_list(), cpu::ttt_linear_backward_list(), cpu::ttt_linear_step_list(), "cpu",
               infos);
  append_infos(cuda::ttt_linear_forward_list(), cuda::ttt_linear_backward_list(), cuda::ttt_linear_step_list(), "cuda",
               infos);
  return infos;
}

}  // namespace fastweight
