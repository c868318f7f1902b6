// The entry points of the building blocks: check the arguments, build the problem, walk the implementation list.
#include "fastweight/blocks.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "core/blocks_fields.h"
#include "core/blocks_problem.h"
#include "core/check.h"
#include "core/parameters.h"
#include "cpu/blocks/registry.h"
#include "cuda/blocks/registry.h"
#include "ops/dispatch.h"
#include "ops/entry.h"

namespace fastweight {
namespace {

using check::Argument;
using check::invalid;
using check::Shape;

constexpr int64_t kMaxHeadDim = 256;

// ---- Checks, one function per concern -----------------------------------------------------------------------------

Shape shape_of(const TensorView& view) {
  Shape shape{};
  shape.extents = view.shape;
  shape.rank = view.rank;
  return shape;
}

// A tensor that is read: there, floating and of this shape.
void check_input(const char* name, const TensorView& view, const Shape& shape) {
  check::present(name, view);
  check::floating(name, view);
  check::shape(name, view, shape);
}

// A tensor that is written and has to be there: like another one, of its type or fp32.
void check_output_like(const char* name, const TensorView& output, const TensorView& input) {
  check::present(name, output);
  check::like(name, output, input);
}

// An fp32 output, or fp64 in an fp64 problem.
void check_wide(const char* name, const TensorView& view, const TensorView& input) {
  check::dtype(name, view, {DType::kF32, input.dtype == DType::kF64 ? DType::kF64 : DType::kF32});
}

void check_sequences(const char* name, const TensorView& cu_seqlens, const BlockSizes& sizes) {
  const int64_t num_sequences = check::num_sequences(cu_seqlens, sizes.batch, sizes.tokens);
  // Blocks have no states; their multiply-adds per token and head are counted in 64 bits too.
  constexpr int64_t kNarrowest = 64, kWidest = int64_t{1} << 28;
  const int64_t width = std::clamp(sizes.head_dim_k, kNarrowest, kWidest);
  check::scratch_extent(sizes.batch, sizes.tokens, num_sequences, sizes.num_value_heads, width * width, name);
}

// A gate of [B, T, HV] or [B, T, HV, K], with at least one head and channel; sets the sizes.
void check_gate_rows(const char* name, const TensorView& view, BlockSizes& sizes) {
  check::present(name, view);
  check::floating(name, view);
  if (view.rank != 3 && view.rank != 4) invalid(name, "rank 3 or 4", "shape " + check::shape_text(view));
  sizes.batch = view.shape[0];
  sizes.tokens = view.shape[1];
  sizes.num_heads = sizes.num_value_heads = view.shape[2];
  sizes.gate = view.rank == 4 ? Gate::kPerChannel : Gate::kPerHead;
  if (sizes.num_value_heads < 1) invalid(name, "at least one head", "shape " + check::shape_text(view));
  if (view.rank == 4) {
    sizes.head_dim_k = view.shape[3];
    if (sizes.head_dim_k < 1) invalid(name, "at least one channel", "shape " + check::shape_text(view));
  }
}

// A chunk matrix [B, T, HV, C] that the sizes are read off.
void check_chunk_matrix(const char* name, const TensorView& view, BlockSizes& sizes) {
  check::present(name, view);
  check::floating(name, view);
  check::rank(name, view, 4);
  sizes.chunk_size = view.shape[3];
  if (sizes.chunk_size != 16 && sizes.chunk_size != 32 && sizes.chunk_size != 64) {
    invalid(name, "a last axis of 16, 32 or 64", "shape " + check::shape_text(view));
  }
  sizes.batch = view.shape[0];
  sizes.tokens = view.shape[1];
  sizes.num_heads = sizes.num_value_heads = view.shape[2];
  if (sizes.num_value_heads < 1) invalid(name, "at least one head", "shape " + check::shape_text(view));
}

// k beside a chunk matrix that has given B, T, HV and C; sets H, group and K.
void check_keys(const TensorView& k, const char* matrix_name, BlockSizes& sizes) {
  check::present("k", k);
  check::floating("k", k);
  check::rank("k", k, 4);
  sizes.num_heads = k.shape[2];
  sizes.head_dim_k = k.shape[3];
  check::shape("k", k, {sizes.batch, sizes.tokens, sizes.num_heads, sizes.head_dim_k});
  if (sizes.num_heads < 1) invalid("k", "at least one head", "shape " + check::shape_text(k));
  if (sizes.num_value_heads % sizes.num_heads != 0) {
    invalid("k", "a divisor of the " + std::to_string(sizes.num_value_heads) + " heads of " + matrix_name,
            std::to_string(sizes.num_heads) + " heads");
  }
  sizes.group = sizes.num_value_heads / sizes.num_heads;
  check::in_range("k: head width K", sizes.head_dim_k, 1, kMaxHeadDim);
}

// Sets the gate.
void check_beta_and_gamma(const TensorView& beta, const TensorView& gamma, BlockSizes& sizes) {
  if (beta.present()) check_input("beta", beta, {sizes.batch, sizes.tokens, sizes.num_value_heads});
  if (!gamma.present()) return;
  if (gamma.rank == 4) {
    check_input("gamma", gamma, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_k});
    sizes.gate = Gate::kPerChannel;
  } else {
    check_input("gamma", gamma, {sizes.batch, sizes.tokens, sizes.num_value_heads});
    sizes.gate = Gate::kPerHead;
  }
}

// ---- The blocks ---------------------------------------------------------------------------------------------------

BlockSizes check_block(const ChunkLocalCumsum& args) {
  BlockSizes sizes;
  check::chunk_size(args.chunk_size);
  sizes.chunk_size = args.chunk_size;
  check_gate_rows("x", args.x, sizes);
  check_sequences("x", args.cu_seqlens, sizes);
  check_output_like("y", args.y, args.x);
  return sizes;
}

BlockSizes check_inputs(const ScaledDotKktInputs& in, const char* matrix_name, const TensorView& matrix) {
  BlockSizes sizes;
  check_chunk_matrix(matrix_name, matrix, sizes);
  check_keys(in.k, matrix_name, sizes);
  check_sequences("k", in.cu_seqlens, sizes);
  check_beta_and_gamma(in.beta, in.gamma, sizes);
  return sizes;
}

BlockSizes check_block(const ScaledDotKktForward& args) {
  const BlockSizes sizes = check_inputs(args.in, "a", args.a);
  check_wide("a", args.a, args.in.k);
  return sizes;
}

BlockSizes check_block(const ScaledDotKktBackward& args) {
  const BlockSizes sizes = check_inputs(args.in, "da", args.da);
  check_gradients(args);
  return sizes;
}

BlockSizes check_block(const SolveTrilForward& args) {
  BlockSizes sizes;
  check_chunk_matrix("a", args.a, sizes);
  check_sequences("a", args.cu_seqlens, sizes);
  check_input("j", args.j, shape_of(args.a));
  return sizes;
}

BlockSizes check_block(const SolveTrilBackward& args) {
  BlockSizes sizes;
  check_chunk_matrix("j", args.j, sizes);
  check_sequences("j", args.cu_seqlens, sizes);
  check_input("dj", args.dj, shape_of(args.j));
  check_input("da", args.da, shape_of(args.j));
  return sizes;
}

BlockSizes check_inputs(const WyInputs& in) {
  BlockSizes sizes;
  check_chunk_matrix("j", in.j, sizes);
  check_keys(in.k, "j", sizes);
  check::present("v", in.v);
  check::rank("v", in.v, 4);
  sizes.head_dim_v = in.v.shape[3];
  check::shape("v", in.v, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_v});
  check::dtype("v", in.v, {in.k.dtype});
  check::in_range("v: head width V", sizes.head_dim_v, 1, kMaxHeadDim);
  check_sequences("k", in.cu_seqlens, sizes);
  check_beta_and_gamma(in.beta, in.gamma, sizes);
  return sizes;
}

BlockSizes check_block(const WyForward& args) {
  const BlockSizes sizes = check_inputs(args.in);
  if (args.w.present()) {
    check::shape("w", args.w, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_k});
    check::dtype("w", args.w, {args.in.k.dtype, DType::kF32});
  }
  if (args.u.present()) check::like("u", args.u, args.in.v);
  return sizes;
}

BlockSizes check_block(const WyBackward& args) {
  const BlockSizes sizes = check_inputs(args.in);
  if (args.dw.present()) {
    check_input("dw", args.dw, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_k});
  }
  if (args.du.present()) check_input("du", args.du, shape_of(args.in.v));
  check_gradients(args);
  if (args.da.present()) {
    check::shape("da", args.da, shape_of(args.in.j));
    check_wide("da", args.da, args.in.k);
  }
  return sizes;
}

// A tensor of rows [.., D]; the shape of one number per row.
Shape check_norm_rows(const char* name, const TensorView& view) {
  check::present(name, view);
  check::floating(name, view);
  if (view.rank < 2) invalid(name, "rank 2 to 5", "shape " + check::shape_text(view));
  Shape numbers = shape_of(view);
  --numbers.rank;
  if (view.shape[static_cast<size_t>(numbers.rank)] < 1) {
    invalid(name, "at least one element per row", "shape " + check::shape_text(view));
  }
  return numbers;
}

BlockSizes check_block(const L2NormForward& args) {
  check::eps(args.eps);
  const Shape numbers = check_norm_rows("x", args.x);
  check_output_like("y", args.y, args.x);
  if (args.rstd.present()) {
    check::shape("rstd", args.rstd, numbers);
    check_wide("rstd", args.rstd, args.x);
  }
  return {};
}

BlockSizes check_block(const L2NormBackward& args) {
  check_input("rstd", args.rstd, check_norm_rows("y", args.y));
  check_input("dy", args.dy, shape_of(args.y));
  check_output_like("dx", args.dx, args.y);
  return {};
}

void check_dt_bias(const char* name, const TensorView& view, const BlockSizes& sizes) {
  if (sizes.gate == Gate::kPerChannel && view.rank == 2) {
    check_input(name, view, {sizes.num_value_heads, sizes.head_dim_k});
  } else {
    check::parameter(name, view, sizes.num_value_heads * (sizes.gate == Gate::kPerChannel ? sizes.head_dim_k : 1));
  }
}

BlockSizes check_inputs(const GateActivationInputs& in, const GateActivationOptions& options) {
  BlockSizes sizes;
  check_gate_rows("x", in.x, sizes);
  const bool bounded = options.lower_bound != GateActivationOptions::kUnset;
  if (bounded) {
    const double bound = options.lower_bound;
    if (!std::isfinite(bound) || bound >= 0) invalid("lower_bound", "a finite number below 0", check::text(bound));
    if (sizes.gate != Gate::kPerChannel) invalid("lower_bound", "none without a gate per channel", check::text(bound));
  }
  if (options.chunk_size != 0) check::chunk_size(options.chunk_size);
  sizes.chunk_size = options.chunk_size;
  check_sequences("x", in.cu_seqlens, sizes);
  if (in.a_log.present()) {
    check::parameter("a_log", in.a_log, sizes.num_value_heads);
  } else if (!bounded) {
    invalid("a_log", "a tensor without lower_bound", "none");
  }
  if (in.dt_bias.present()) check_dt_bias("dt_bias", in.dt_bias, sizes);
  return sizes;
}

BlockSizes check_block(const GateActivationForward& args) {
  const BlockSizes sizes = check_inputs(args.in, args.options);
  check_output_like("g", args.g, args.in.x);
  return sizes;
}

BlockSizes check_block(const GateActivationBackward& args) {
  const BlockSizes sizes = check_inputs(args.in, args.options);
  check_input("dg", args.dg, shape_of(args.in.x));
  check_gradients(args);
  if (args.da_log.present()) check::parameter("da_log", args.da_log, sizes.num_value_heads);
  if (args.ddt_bias.present()) check_dt_bias("ddt_bias", args.ddt_bias, sizes);
  return sizes;
}

void check_inputs(const RmsNormInputs& in, const RmsNormOptions& options) {
  check::eps_or_zero(options.eps);
  if (options.activation != NormGate::kSilu && options.activation != NormGate::kSigmoid) {
    invalid("activation", "silu (0) or sigmoid (1)", std::to_string(static_cast<int32_t>(options.activation)));
  }
  check_norm_rows("x", in.x);
  if (in.gate.present()) check_input("gate", in.gate, shape_of(in.x));
  if (in.weight.present()) check_input("weight", in.weight, {in.x.shape[static_cast<size_t>(in.x.rank - 1)]});
}

BlockSizes check_block(const RmsNormForward& args) {
  check_inputs(args.in, args.options);
  check_output_like("y", args.y, args.in.x);
  return {};
}

BlockSizes check_block(const RmsNormBackward& args) {
  check_inputs(args.in, args.options);
  check_input("dy", args.dy, shape_of(args.in.x));
  check_gradients(args);
  return {};
}

// A norm in place writes over the x that it reads, element by element.
template <class Args>
std::vector<Argument> apart_in_memory(const Args&, const std::vector<Argument>& arguments) {
  return arguments;
}
std::vector<Argument> apart_in_memory(const RmsNormForward& args, std::vector<Argument> arguments) {
  const TensorView &x = args.in.x, &y = args.y;
  const bool in_place = x.data == y.data && x.dtype == y.dtype && x.strides == y.strides;
  if (in_place) std::erase_if(arguments, [&](const Argument& argument) { return argument.view == &x; });
  return arguments;
}

// ---- The problem --------------------------------------------------------------------------------------------------

// [B, T, HV] as [B, T, 1, HV].
void as_rows(TensorView& view) {
  if (view.rank != 3) return;
  view.shape[3] = view.shape[2];
  view.strides[3] = view.strides[2];
  view.shape[2] = 1;
  view.strides[2] = 0;
  view.rank = 4;
}

template <class Args>
void unify(Args&, const BlockSizes&) {}
void unify(ChunkLocalCumsum& args, const BlockSizes&) {
  as_rows(args.x);
  as_rows(args.y);
}
void unify(TensorView& a_log, TensorView& dt_bias, const BlockSizes& sizes) {
  unify_parameters(a_log, dt_bias, sizes.gate == Gate::kPerChannel, sizes.num_value_heads, sizes.head_dim_k);
}
void unify(GateActivationForward& args, const BlockSizes& sizes) {
  as_rows(args.in.x);
  as_rows(args.g);
  unify(args.in.a_log, args.in.dt_bias, sizes);
}
void unify(GateActivationBackward& args, const BlockSizes& sizes) {
  as_rows(args.in.x);
  as_rows(args.dg);
  as_rows(args.dx);
  unify(args.in.a_log, args.in.dt_bias, sizes);
  unify(args.da_log, args.ddt_bias, sizes);
}

// Without tokens there are no chunks, however many sequences there are.
template <class Args>
std::vector<Sequence> sequences_of(const Args& args, const BlockSizes& sizes) {
  if (sizes.tokens == 0) return {};
  TensorView cu_seqlens;
  if constexpr (requires { args.cu_seqlens; }) cu_seqlens = args.cu_seqlens;
  if constexpr (requires { args.in.cu_seqlens; }) cu_seqlens = args.in.cu_seqlens;
  return sequence_table(sizes.batch, sizes.tokens, sizes.chunk_size == 0 ? TensorView() : cu_seqlens, sizes.chunk_size);
}

// ---- The run ------------------------------------------------------------------------------------------------------

template <class Args>
std::string describe(const BlockProblem<Args>& problem) {
  const std::vector<Argument> arguments = arguments_of(problem.args);
  std::string text;
  for (const Argument& argument : arguments) {
    if (!argument.view->present()) continue;
    text += (text.empty() ? "" : " ") + std::string(argument.name) + check::shape_text(*argument.view);
  }
  return text + ", " + check::text(arguments[0].view->dtype);
}

template <class Args>
std::string run(const char* entry, const Context& context, const Args& args) {
  return entry_point(entry, [&] {
    check::context(context);
    const std::vector<Argument> arguments = arguments_of(args);
    check::views(arguments, context.device);
    BlockProblem<Args> problem;
    problem.sizes = check_block(args);
    check::memory(apart_in_memory(args, arguments));
    if (context.device.type == DeviceType::kCuda) cuda::check_arguments(context, arguments);
    problem.has_fp64 = check::any_fp64(arguments);
    problem.args = args;
    unify(problem.args, problem.sizes);
    const bool work = check::any_written(arguments);
    if (work && context.device.type == DeviceType::kCpu) problem.sequences = sequences_of(args, problem.sizes);
    return dispatch(entry, context, cpu::block_list<Args>(), problem, work, describe<Args>, cuda::block_list<Args>());
  });
}

template <class Forward, class... Backward>
std::vector<ImplementationInfo> infos() {
  std::vector<ImplementationInfo> list;
  append_infos(cpu::block_list<Forward>(), "forward", "cpu", list);
  (append_infos(cpu::block_list<Backward>(), "backward", "cpu", list), ...);
  append_infos(cuda::block_list<Forward>(), "forward", "cuda", list);
  (append_infos(cuda::block_list<Backward>(), "backward", "cuda", list), ...);
  return list;
}

}  // namespace

std::string chunk_local_cumsum(const Context& context, const ChunkLocalCumsum& args) {
  return run("chunk_local_cumsum", context, args);
}
std::string scaled_dot_kkt_forward(const Context& context, const ScaledDotKktForward& args) {
  return run("scaled_dot_kkt_forward", context, args);
}
std::string scaled_dot_kkt_backward(const Context& context, const ScaledDotKktBackward& args) {
  return run("scaled_dot_kkt_backward", context, args);
}
std::string solve_tril_forward(const Context& context, const SolveTrilForward& args) {
  return run("solve_tril_forward", context, args);
}
std::string solve_tril_backward(const Context& context, const SolveTrilBackward& args) {
  return run("solve_tril_backward", context, args);
}
std::string wy_forward(const Context& context, const WyForward& args) { return run("wy_forward", context, args); }
std::string wy_backward(const Context& context, const WyBackward& args) { return run("wy_backward", context, args); }
std::string l2norm_forward(const Context& context, const L2NormForward& args) {
  return run("l2norm_forward", context, args);
}
std::string l2norm_backward(const Context& context, const L2NormBackward& args) {
  return run("l2norm_backward", context, args);
}
std::string gate_activation_forward(const Context& context, const GateActivationForward& args) {
  return run("gate_activation_forward", context, args);
}
std::string gate_activation_backward(const Context& context, const GateActivationBackward& args) {
  return run("gate_activation_backward", context, args);
}

std::string rms_norm_forward(const Context& context, const RmsNormForward& args) {
  return run("rms_norm_forward", context, args);
}
std::string rms_norm_backward(const Context& context, const RmsNormBackward& args) {
  return run("rms_norm_backward", context, args);
}

std::vector<ImplementationInfo> block_implementations(Block block) {
  switch (block) {
    case Block::kChunkLocalCumsum:
      return infos<ChunkLocalCumsum>();
    case Block::kScaledDotKkt:
      return infos<ScaledDotKktForward, ScaledDotKktBackward>();
    case Block::kSolveTril:
      return infos<SolveTrilForward, SolveTrilBackward>();
    case Block::kWy:
      return infos<WyForward, WyBackward>();
    case Block::kL2Norm:
      return infos<L2NormForward, L2NormBackward>();
    case Block::kGateActivation:
      return infos<GateActivationForward, GateActivationBackward>();
    case Block::kRmsNorm:
      return infos<RmsNormForward, RmsNormBackward>();
  }
  return {};
}

}  // namespace fastweight
