// Checks, problem and dispatch of the delta rule and of the families that are the same recurrence.
#include "ops/recurrence.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "core/delta_rule_fields.h"
#include "core/delta_rule_map_fields.h"
#include "core/parameters.h"
#include "cpu/delta_rule/registry.h"
#include "cuda/backend.h"
#include "cuda/delta_rule/registry.h"
#include "ops/dispatch.h"
#include "ops/entry.h"

namespace fastweight {
namespace {

using check::Argument;
using check::invalid;
using check::Shape;

// Value columns do not touch each other: what limits their number on the CPU is that sizes are products of them.
constexpr int64_t kMaxHeadDim = 256, kMaxValueDim = int64_t{1} << 24;
constexpr double kSafeLowerBound = -5;

// ---- The tensors of a call -------------------------------------------------------------------------------

bool is_low_rank(const Transition& transition) { return transition.correction == Correction::kLowRank; }
const char* reader_name(const Transition& transition) { return is_low_rank(transition) ? "a" : "p"; }

// The outputs that only some families have.
void append_outputs(const Transition& transition, std::vector<Argument>& list) {
  list.push_back({is_low_rank(transition) ? "da" : "dp", &transition.d_reader, true});
  list.push_back({"db", &transition.d_writer, true});
}

template <class Args>
std::vector<Argument> all_arguments(const Args& args, const Transition& transition) {
  std::vector<Argument> list = arguments_of(args);
  if (!transition.reader_is_key) list.push_back({reader_name(transition), &transition.reader, false});
  list.push_back({"b", &transition.writer, false});
  append_outputs(transition, list);
  return list;
}

// ---- Checks, one function per concern -----------------------------------------------------------------------------

std::string gate_text(Gate gate) {
  switch (gate) {
    case Gate::kNone:
      return "none";
    case Gate::kPerHead:
      return "per head";
    case Gate::kPerChannel:
      return "per channel";
  }
  return std::to_string(static_cast<int32_t>(gate));
}

void check_lower_bound(const DeltaRuleOptions& options) {
  const double bound = options.lower_bound;
  if (bound == DeltaRuleOptions::kUnset) {
    if (options.safe_gate && options.gate_in_kernel) {
      invalid("lower_bound", "a number with safe_gate and gate_in_kernel", "none");
    }
    return;
  }
  if (!std::isfinite(bound) || bound >= 0) invalid("lower_bound", "a finite number below 0", check::text(bound));
  if (!options.gate_in_kernel || options.gate != Gate::kPerChannel) {
    invalid("lower_bound", "none without gate_in_kernel and a gate per channel", check::text(bound));
  }
  if (options.safe_gate && bound < kSafeLowerBound) {
    invalid("lower_bound", "a number in [-5, 0) with safe_gate", check::text(bound));
  }
}

void check_options(const DeltaRuleOptions& options) {
  const Gate gate = options.gate;
  if (gate != Gate::kNone && gate != Gate::kPerHead && gate != Gate::kPerChannel) {
    invalid("gate", "none (0), per head (1) or per channel (2)", gate_text(gate));
  }
  if (!std::isfinite(options.scale) && options.scale != DeltaRuleOptions::kUnset) {
    invalid("scale", "a finite number", check::text(options.scale));
  }
  check::chunk_size(options.chunk_size);
  if (options.allow_neg_eigval && !options.beta_sigmoid) {
    invalid("allow_neg_eigval", "false without beta_sigmoid", "true");
  }
  if (options.gate_in_kernel && gate == Gate::kNone) invalid("gate_in_kernel", "false without a gate", "true");
  if (options.safe_gate && gate != Gate::kPerChannel) {
    invalid("safe_gate", "false unless the gate is per channel", "true");
  }
  check_lower_bound(options);
}

// Operators that write what a read of the state left of v, as the delta rule: they have groups of value heads for one
// head of keys, and may have one beta per value channel.
bool corrects_values(Correction correction) {
  return correction == Correction::kKey || correction == Correction::kFeedback;
}

// Sets B, T, H, HV, group, K and V.
void check_qkv(const DeltaRuleInputs& in, Correction correction, DeltaRuleSizes& sizes) {
  check::present("q", in.q);
  check::present("k", in.k);
  check::present("v", in.v);
  check::rank("q", in.q, 4);
  check::floating("q", in.q);
  sizes.batch = in.q.shape[0];
  sizes.tokens = in.q.shape[1];
  sizes.num_heads = in.q.shape[2];
  sizes.head_dim_k = in.q.shape[3];
  if (sizes.num_heads < 1) invalid("q", "at least one head", "shape " + check::shape_text(in.q));
  check::in_range("q: head width K", sizes.head_dim_k, 1, kMaxHeadDim);

  check::shape("k", in.k, {sizes.batch, sizes.tokens, sizes.num_heads, sizes.head_dim_k});
  check::dtype("k", in.k, {in.q.dtype});

  check::rank("v", in.v, 4);
  sizes.num_value_heads = in.v.shape[2];
  sizes.head_dim_v = in.v.shape[3];
  check::shape("v", in.v, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_v});
  check::dtype("v", in.v, {in.q.dtype});
  if (sizes.num_value_heads < 1 || sizes.num_value_heads % sizes.num_heads != 0) {
    invalid("v", "a positive multiple of the " + std::to_string(sizes.num_heads) + " heads of q",
            std::to_string(sizes.num_value_heads) + " heads");
  }
  if (!corrects_values(correction) && sizes.num_value_heads != sizes.num_heads) {
    invalid("v", std::to_string(sizes.num_heads) + " heads as q", std::to_string(sizes.num_value_heads) + " heads");
  }
  const bool on_cpu = in.v.device.type == DeviceType::kCpu;
  check::in_range("v: head width V", sizes.head_dim_v, 1, on_cpu ? kMaxValueDim : kMaxHeadDim);
  sizes.group = sizes.num_value_heads / sizes.num_heads;
}

// Sets N and NT.
void check_sequences(const DeltaRuleInputs& in, const DeltaRuleOptions& options, DeltaRuleSizes& sizes) {
  sizes.num_sequences = check::num_sequences(in.cu_seqlens, sizes.batch, sizes.tokens);
  sizes.num_chunks = count_chunks(sizes.tokens, in.cu_seqlens, options.chunk_size);
}

void check_beta(const DeltaRuleInputs& in, const DeltaRuleOptions& options, Correction correction,
                const DeltaRuleSizes& sizes) {
  if (!in.beta.present()) {
    if (options.beta_sigmoid) invalid("beta", "a tensor with beta_sigmoid", "none");
    return;
  }
  check::floating("beta", in.beta);
  if (in.beta.rank == 4 && corrects_values(correction)) {
    check::shape("beta", in.beta, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_v});
  } else {
    check::shape("beta", in.beta, {sizes.batch, sizes.tokens, sizes.num_value_heads});
  }
}

void check_gate(const DeltaRuleInputs& in, const DeltaRuleOptions& options, const DeltaRuleSizes& sizes) {
  if (options.gate == Gate::kNone) {
    check::absent("g", in.g, "without a gate");
    return;
  }
  check::present("g", in.g);
  check::floating("g", in.g);
  if (options.gate == Gate::kPerHead) {
    check::shape("g", in.g, {sizes.batch, sizes.tokens, sizes.num_value_heads});
  } else {
    check::shape("g", in.g, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_k});
  }
}

void check_dt_bias(const char* name, const TensorView& view, Gate gate, const DeltaRuleSizes& sizes) {
  if (gate == Gate::kPerChannel && view.rank == 2) {
    check::floating(name, view);
    check::shape(name, view, {sizes.num_value_heads, sizes.head_dim_k});
  } else {
    check::parameter(name, view, sizes.num_value_heads * (gate == Gate::kPerChannel ? sizes.head_dim_k : 1));
  }
}

void check_gate_parameters(const DeltaRuleInputs& in, const DeltaRuleOptions& options, const DeltaRuleSizes& sizes) {
  if (!options.gate_in_kernel) {
    check::absent("a_log", in.a_log, "without gate_in_kernel");
    check::absent("dt_bias", in.dt_bias, "without gate_in_kernel");
    return;
  }
  if (in.a_log.present()) {
    check::parameter("a_log", in.a_log, sizes.num_value_heads);
  } else if (options.lower_bound == DeltaRuleOptions::kUnset) {
    invalid("a_log", "a tensor with gate_in_kernel and no lower_bound", "none");
  }
  if (in.dt_bias.present()) check_dt_bias("dt_bias", in.dt_bias, options.gate, sizes);
}

Shape state_shape(int64_t count, const DeltaRuleOptions& options, const DeltaRuleSizes& sizes) {
  const bool v_first = options.state_v_first;
  return {count, sizes.num_value_heads, v_first ? sizes.head_dim_v : sizes.head_dim_k,
          v_first ? sizes.head_dim_k : sizes.head_dim_v};
}

// The type of a state that is written: fp32, or fp64 in an fp64 problem.
void check_state_dtype(const char* name, const TensorView& view, const DeltaRuleInputs& in) {
  check::dtype(name, view, {DType::kF32, in.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32});
}

// Where the lengths are in device memory, the caller may know that there are fewer chunks than the bound.
void check_chunk_states(const TensorView& view, const DeltaRuleInputs& in, const DeltaRuleOptions& options,
                        DeltaRuleSizes& sizes) {
  const Shape state = state_shape(sizes.num_sequences, options, sizes);
  const bool bound_only = in.cu_seqlens.present() && in.cu_seqlens.device.type != DeviceType::kCpu;
  if (bound_only && view.rank == 5) sizes.num_chunks = std::min(sizes.num_chunks, view.shape[1]);
  check::shape("chunk_states", view,
               {sizes.batch, sizes.num_chunks, state.extents[1], state.extents[2], state.extents[3]});
  check::dtype("chunk_states", view, {DType::kF32, in.k.dtype});
}

int64_t kept_words(const Context& context, const DeltaRuleOptions& options, DType dtype, int64_t K, bool all) {
  if (context.device.type != DeviceType::kCuda) return 0;
  return cuda::delta_rule_kept_words(context.device, options.gate, dtype, K, all);
}

// Counted anew: NT may be that of the chunk states, which may be fewer.
void check_kept(const Context& context, const TensorView& view, const DeltaRuleInputs& in,
                const DeltaRuleOptions& options, const DeltaRuleSizes& sizes) {
  int64_t words = kept_words(context, options, in.q.dtype, sizes.head_dim_k, true);
  if (words == 0)
    invalid("kept", "none: " + check::text(in.q.dtype) + " on " + check::text(context.device) + " keeps nothing",
            "a tensor");
  const int64_t least = kept_words(context, options, in.q.dtype, sizes.head_dim_k, false);
  if (view.rank == 4 && view.shape[3] == least) words = least;
  check::shape(
      "kept", view,
      {sizes.batch, count_chunks(sizes.tokens, in.cu_seqlens, options.chunk_size), sizes.num_value_heads, words});
  check::dtype("kept", view, {DType::kI32});
  if (!check::is_dense(view)) invalid("kept", "a dense tensor", "strides with gaps");
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) invalid("kept", "memory at a multiple of 16 bytes", "another");
}

void check_output(const DeltaRuleInputs& in, const TensorView& o, const DeltaRuleSizes& sizes) {
  check::present("o", o);
  check::shape("o", o, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_v});
  check::dtype("o", o, {in.q.dtype, DType::kF32});
}

// The rows of keys that a family has beside k.
void check_transition(const DeltaRuleInputs& in, const Transition& transition, const DeltaRuleSizes& sizes) {
  const auto check_rows = [&](const char* name, const TensorView& view) {
    check::present(name, view);
    check::shape(name, view, {sizes.batch, sizes.tokens, sizes.num_heads, sizes.head_dim_k});
    check::dtype(name, view, {in.q.dtype});
  };
  if (is_low_rank(transition)) check_rows("b", transition.writer);
  if (is_low_rank(transition) || transition.correction == Correction::kFeedback) {
    check_rows(reader_name(transition), transition.reader);
  }
}

DeltaRuleSizes check_inputs(const DeltaRuleInputs& in, const DeltaRuleOptions& options, const Transition& transition) {
  DeltaRuleSizes sizes;
  check_qkv(in, transition.correction, sizes);
  check_transition(in, transition, sizes);
  check_sequences(in, options, sizes);
  check::scratch_extent(sizes.batch, sizes.tokens, sizes.num_sequences, sizes.num_value_heads,
                        kMaxHeadDim * std::max(kMaxHeadDim, sizes.head_dim_v));
  if (options.total_value_heads != 0 && options.total_value_heads < sizes.num_value_heads) {
    invalid("total_value_heads", "0, or at least the " + std::to_string(sizes.num_value_heads) + " heads of v",
            std::to_string(options.total_value_heads));
  }
  check_beta(in, options, transition.correction, sizes);
  check_gate(in, options, sizes);
  check_gate_parameters(in, options, sizes);
  if (in.initial_state.present()) {
    check::floating("initial_state", in.initial_state);
    check::shape("initial_state", in.initial_state, state_shape(sizes.num_sequences, options, sizes));
  }
  return sizes;
}

void check_rest(const Context& context, const DeltaRuleForward& args, DeltaRuleSizes& sizes) {
  check_output(args.in, args.o, sizes);
  if (args.final_state.present()) {
    check::shape("final_state", args.final_state, state_shape(sizes.num_sequences, args.options, sizes));
    check_state_dtype("final_state", args.final_state, args.in);
  }
  if (args.kept.present()) check_kept(context, args.kept, args.in, args.options, sizes);
  if (args.chunk_states.present()) {
    check_chunk_states(args.chunk_states, args.in, args.options, sizes);
  }
}

// d_o and d_final_state.
template <class Args>
void check_output_gradients(const Args& args, const DeltaRuleSizes& sizes) {
  if (args.d_o.present()) {
    check::shape("d_o", args.d_o, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_v});
    check::dtype("d_o", args.d_o, {args.in.q.dtype, DType::kF32});
  }
  if (args.d_final_state.present()) {
    check::shape("d_final_state", args.d_final_state, state_shape(sizes.num_sequences, args.options, sizes));
    check::floating("d_final_state", args.d_final_state);
  }
}

void check_rest(const Context& context, const DeltaRuleBackward& args, DeltaRuleSizes& sizes) {
  const DeltaRuleInputs& in = args.in;
  check_output_gradients(args, sizes);
  if (args.kept.present()) check_kept(context, args.kept, in, args.options, sizes);
  if (args.chunk_states.present()) {
    check_chunk_states(args.chunk_states, args.in, args.options, sizes);
  }
  check_gradients(args);
  if (args.da_log.present()) check::parameter("da_log", args.da_log, sizes.num_value_heads);
  if (args.ddt_bias.present()) check_dt_bias("ddt_bias", args.ddt_bias, args.options.gate, sizes);
  if (args.d_initial_state.present()) {
    check::shape("d_initial_state", args.d_initial_state, state_shape(sizes.num_sequences, args.options, sizes));
    check_state_dtype("d_initial_state", args.d_initial_state, in);
  }
}

// A beta per value channel would make an M for each of them.
void check_map(const char* square, const TensorView& matrix, const char* rectangle, const TensorView& state,
               const DeltaRuleInputs& in, const DeltaRuleOptions& options, const DeltaRuleSizes& sizes) {
  if (in.beta.present()) check::shape("beta", in.beta, {sizes.batch, sizes.tokens, sizes.num_value_heads});
  if (matrix.present()) {
    check::shape(square, matrix, {sizes.num_sequences, sizes.num_value_heads, sizes.head_dim_k, sizes.head_dim_k});
    check_state_dtype(square, matrix, in);
  }
  if (state.present()) {
    check::shape(rectangle, state, state_shape(sizes.num_sequences, options, sizes));
    check_state_dtype(rectangle, state, in);
  }
}

void check_rest(const Context&, const DeltaRuleMapForward& args, DeltaRuleSizes& sizes) {
  check_map("m", args.m, "h", args.h, args.in, args.options, sizes);
}

void check_rest(const Context&, const DeltaRuleMapBackward& args, DeltaRuleSizes& sizes) {
  check::absent("initial_state", args.in.initial_state, "in the map of a backward");
  check_output_gradients(args, sizes);
  check_map("mt", args.mt, "e", args.e, args.in, args.options, sizes);
}

// dp is asked for with p alone: without p, dk holds both.
void check_gradients(const Transition& transition) {
  if (transition.d_reader.present()) {
    if (transition.reader_is_key) invalid("dp", "none without p", "a tensor");
    check::like(is_low_rank(transition) ? "da" : "dp", transition.d_reader, transition.reader);
  }
  if (transition.d_writer.present()) check::like("db", transition.d_writer, transition.writer);
}

void check_rest(const Context&, const DeltaRuleStep& args, const DeltaRuleSizes& sizes) {
  check::absent("initial_state", args.in.initial_state, "in a step");
  check_output(args.in, args.o, sizes);
  check::present("state", args.state);
  check::rank("state", args.state, 4);
  const int64_t slots = args.state_indices.present() ? args.state.shape[0] : sizes.num_sequences;
  check::shape("state", args.state, state_shape(slots, args.options, sizes));
  check::dtype("state", args.state,
               {DType::kF32, DType::kBF16, args.in.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32});
  if (args.state_indices.present()) check::state_indices(args.state_indices, sizes.num_sequences, slots);
}

// ---- The problem --------------------------------------------------------------------------------------------------

// Kernels see the parameters in one form each.
void unify(TensorView& a_log, TensorView& dt_bias, Gate gate, const DeltaRuleSizes& sizes) {
  unify_parameters(a_log, dt_bias, gate == Gate::kPerChannel, sizes.num_value_heads, sizes.head_dim_k);
}

// A step without tokens leaves its states as they are.
bool has_work(const DeltaRuleStep& args, std::span<const Argument>) { return !check::is_empty(args.o); }

template <class Args>
bool has_work(const Args&, std::span<const Argument> arguments) {
  return check::any_written(arguments);
}

// `work`: whether there is anything to compute.
template <class Args>
DeltaRuleProblem<Args> make_problem(const Context& context, const Args& args, const Transition& transition,
                                    bool& work) {
  check::context(context);
  const std::vector<Argument> arguments = all_arguments(args, transition);
  check::views(arguments, context.device);
  check_options(args.options);
  DeltaRuleProblem<Args> problem;
  problem.sizes = check_inputs(args.in, args.options, transition);
  check_rest(context, args, problem.sizes);
  check_gradients(transition);
  check::memory(arguments);
  if (context.device.type == DeviceType::kCuda) cuda::check_arguments(context, arguments);

  work = has_work(args, arguments);
  problem.has_fp64 = check::any_fp64(arguments);
  problem.args = args;
  problem.transition = transition;
  problem.scale = args.options.scale;
  if (problem.scale == DeltaRuleOptions::kUnset) {
    problem.scale = 1 / std::sqrt(static_cast<double>(problem.sizes.head_dim_k));
  }
  unify(problem.args.in.a_log, problem.args.in.dt_bias, args.options.gate, problem.sizes);
  if constexpr (requires { problem.args.da_log; }) {
    unify(problem.args.da_log, problem.args.ddt_bias, args.options.gate, problem.sizes);
  }
  return problem;
}

// ---- The run ------------------------------------------------------------------------------------------------------

template <class Problem>
std::string describe(const Problem& problem) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const std::string text = check::sizes_text({{"B", problem.args.in.q.shape[0]},
                                              {"T", sizes.tokens},
                                              {"H", sizes.num_heads},
                                              {"HV", sizes.num_value_heads},
                                              {"K", sizes.head_dim_k},
                                              {"V", sizes.head_dim_v},
                                              {"N", sizes.num_sequences},
                                              {"C", problem.args.options.chunk_size}});
  return text + ", gate " + gate_text(problem.args.options.gate) + ", " + check::text(problem.args.in.q.dtype);
}

}  // namespace

template <class Args>
std::string run_recurrence(const char* entry, const Context& context, const Args& args, const Transition& transition,
                           ImplementationList<Args> cpu_list, ImplementationList<Args> cuda_list) {
  return entry_point(entry, [&] {
    bool work = false;
    DeltaRuleProblem<Args> problem = make_problem(context, args, transition, work);
    // However many empty sequences there are, they cost nothing.
    if (!work) problem.sizes.batch = problem.sizes.num_sequences = 0;
    if (work && context.device.type == DeviceType::kCpu) {
      problem.sequences =
          sequence_table(problem.sizes.batch, problem.sizes.tokens, args.in.cu_seqlens, args.options.chunk_size);
    }
    return dispatch(entry, context, cpu_list, problem, work, describe<DeltaRuleProblem<Args>>, cuda_list);
  });
}

template std::string run_recurrence(const char*, const Context&, const DeltaRuleForward&, const Transition&,
                                    ImplementationList<DeltaRuleForward>, ImplementationList<DeltaRuleForward>);
template std::string run_recurrence(const char*, const Context&, const DeltaRuleBackward&, const Transition&,
                                    ImplementationList<DeltaRuleBackward>, ImplementationList<DeltaRuleBackward>);
template std::string run_recurrence(const char*, const Context&, const DeltaRuleStep&, const Transition&,
                                    ImplementationList<DeltaRuleStep>, ImplementationList<DeltaRuleStep>);
template std::string run_recurrence(const char*, const Context&, const DeltaRuleMapForward&, const Transition&,
                                    ImplementationList<DeltaRuleMapForward>, ImplementationList<DeltaRuleMapForward>);
template std::string run_recurrence(const char*, const Context&, const DeltaRuleMapBackward&, const Transition&,
                                    ImplementationList<DeltaRuleMapBackward>, ImplementationList<DeltaRuleMapBackward>);

int64_t delta_rule_num_chunks(int64_t tokens, const TensorView& cu_seqlens, int32_t chunk_size) {
  return entry_point("delta_rule_num_chunks", [&] {
    if (tokens < 0) invalid("tokens", "0 or more", std::to_string(tokens));
    check::chunk_size(chunk_size);
    check::well_formed("cu_seqlens", cu_seqlens);
    if (cu_seqlens.present()) check::cu_seqlens(cu_seqlens, tokens);
    return count_chunks(tokens, cu_seqlens, chunk_size);
  });
}

int64_t delta_rule_kept_words(const Context& context, const DeltaRuleOptions& options, DType dtype, int64_t head_dim_k,
                              bool all) {
  return entry_point("delta_rule_kept_words", [&] {
    check::context(context);
    check_options(options);
    check::in_range("head_dim_k", head_dim_k, 1, kMaxHeadDim);
    return kept_words(context, options, dtype, head_dim_k, all);
  });
}

std::vector<ImplementationInfo> related_implementations() {
  std::vector<ImplementationInfo> infos;
  append_infos(cpu::delta_rule_forward_list(), cpu::related_backward_list(), cpu::delta_rule_step_list(), "cpu", infos);
  return infos;
}

}  // namespace fastweight
