// The delta-rule family as PyTorch operators. What the arguments mean stands in fastweight/delta_rule.h; autograd and
// shape functions in python/fastweight/_delta_rule.py.
#include "fastweight/delta_rule.h"

#include "convert.h"
#include "core/delta_rule_fields.h"
#include "core/delta_rule_map_fields.h"
#include "fastweight/delta_rule_map.h"
#include "observe.h"

namespace fastweight::bindings {
namespace {

// Switches are bits of one number: PyTorch takes 0.2 us for every argument that it converts, which adds up in a decoding
// step. The lowest two bits are the gate, those from kChunkSizeShift on the chunk size, those from kTotalHeadsShift on
// the total of value heads. Before them stand the switches among the options, in the order of their table, and three
// that Python alone has; delta_rule_switches() tells Python.
constexpr const char* kOptionSchema = "int options, float? scale, float? lower_bound";
constexpr int64_t kGateMask = 3;
constexpr int kFirstSwitch = 2;
constexpr int kChunkSizeShift = 16, kTotalHeadsShift = 32;

constexpr int kNumSwitches = [] {
  int count = 0;
  for_each_switch<DeltaRuleOptions>([&](const auto&) { ++count; });
  return count;
}();
constexpr int64_t kTokenByToken = int64_t{1} << (kFirstSwitch + kNumSwitches);
constexpr int64_t kOutputFinalState = kTokenByToken << 1;
constexpr int64_t kStatesForBackward = kOutputFinalState << 1;  // chunk states are no result, see make_chunk_states
static_assert(kStatesForBackward < int64_t{1} << kChunkSizeShift);

struct Options {
  explicit Options(Arguments& arguments)
      : bits(arguments.take<int64_t>()),
        scale(arguments.take<std::optional<double>>()),
        lower_bound(arguments.take<std::optional<double>>()) {}

  DeltaRuleOptions resolved() const {
    DeltaRuleOptions options;
    options.gate = static_cast<Gate>(bits & kGateMask);
    options.chunk_size = static_cast<int32_t>(bits >> kChunkSizeShift & 0xffff);
    options.total_value_heads = static_cast<int32_t>(bits >> kTotalHeadsShift);
    options.scale = number("scale", scale);
    options.lower_bound = number("lower_bound", lower_bound);
    int bit = kFirstSwitch;
    for_each_switch<DeltaRuleOptions>([&](const auto& row) { options.*row.value = bits >> bit++ & 1; });
    return options;
  }

  int64_t bits;
  std::optional<double> scale, lower_bound;
};

Tensor make_output(const DeltaRuleInputs& in, TensorView& o) {
  return dense(in.q, in.q.dtype, {extent(in.q, 0), extent(in.q, 1), extent(in.v, 2), extent(in.v, 3)}, o);
}

// The last axes of a state, K x V or V x K.
std::pair<int64_t, int64_t> state_axes(const DeltaRuleInputs& in, const DeltaRuleOptions& options) {
  const int64_t k = extent(in.q, 3), v = extent(in.v, 3);
  return options.state_v_first ? std::pair{v, k} : std::pair{k, v};
}

// `offsets` are cu_seqlens, or a copy of them in host memory, which tells how many chunks there are. Lengths on the
// device give a bound, and chunks that may not be there are zero: however T tokens are cut, they have at least
// ceil(T / C) chunks.
//
// States that only a backward will read lie as V x K in memory whatever the order of the caller's states, because the
// kernels on CUDA move them in rows of key channels, and chunks that are not there stay undefined.
Tensor make_chunk_states(const DeltaRuleInputs& in, const DeltaRuleOptions& options, const TensorView& offsets,
                         DType dtype, bool for_backward, TensorView& chunk_states) {
  const int64_t batch = extent(in.q, 0), tokens = extent(in.q, 1), heads = extent(in.v, 2);
  const int64_t count = delta_rule_num_chunks(tokens, offsets, options.chunk_size);
  const auto [rows, columns] = state_axes(in, options);
  const auto make = for_backward && !options.state_v_first ? dense_transposed : dense;
  Tensor states = make(in.q, dtype, {batch, count, heads, rows, columns}, chunk_states);
  if (!for_backward && offsets.present() && offsets.device.type == DeviceType::kCuda) {
    zero_from(states, 1, delta_rule_num_chunks(tokens, {}, options.chunk_size));
  }
  return states;
}

// On the CPU both forms give the bits of a short sequence, and the library takes the faster one.
void choose_form(const Options& options, ContextOf& context) {
  if (options.bits & kTokenByToken && context->device.type == DeviceType::kCuda) context->implementation = "recurrent";
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<DeltaRuleInputs> in(arguments);
    const Options options(arguments);
    const auto chunk_states_dtype = arguments.take<std::optional<int32_t>>();
    const Tensor cu_seqlens_cpu = arguments.optional_tensor();
    const auto kept_words = arguments.take<int64_t>();
    DeltaRuleForward args;
    args.options = options.resolved();
    in.view_as(args.in);

    const TensorView& q = args.in.q;
    Tensor o = make_output(args.in, args.o), final_state, chunk_states, kept;
    if (options.bits & kOutputFinalState) {
      const auto [rows, columns] = state_axes(args.in, args.options);
      const int64_t count = num_sequences(q, args.in.cu_seqlens);
      final_state = dense(q, state_dtype(q), {count, extent(args.in.v, 2), rows, columns}, args.final_state);
    }
    if (chunk_states_dtype.has_value()) {
      const TensorView known = view("cu_seqlens_cpu", cu_seqlens_cpu);
      chunk_states = make_chunk_states(args.in, args.options, known.present() ? known : args.in.cu_seqlens,
                                       dtype_of("chunk_states", *chunk_states_dtype),
                                       (options.bits & kStatesForBackward) != 0, args.chunk_states);
    }
    if (kept_words > 0) {
      const int64_t count = delta_rule_num_chunks(extent(q, 1), args.in.cu_seqlens, args.options.chunk_size);
      kept = dense(q, DType::kI32, {extent(q, 0), count, extent(args.in.v, 2), kept_words}, args.kept);
    }
    ContextOf context(q);
    choose_form(options, context);
    call("delta_rule_forward", fastweight::delta_rule_forward, std::move(context), args);
    give(stack, o, final_state, chunk_states, kept);
  });
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<DeltaRuleBackward> own(arguments);
    const TensorArguments<DeltaRuleInputs> in(arguments);
    const Options options(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    DeltaRuleBackward args;
    args.options = options.resolved();
    in.view_as(args.in);
    own.view_as(args);
    GradientResults<DeltaRuleBackward> gradients(args, args.in.q, asked_for);
    ContextOf context(args.in.q);
    choose_form(options, context);
    call("delta_rule_backward", fastweight::delta_rule_backward, std::move(context), args);
    gradients.give(stack);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<DeltaRuleStep> own(arguments);
    const TensorArguments<DeltaRuleInputs> in(arguments);
    const Options options(arguments);
    DeltaRuleStep args;
    args.options = options.resolved();
    in.view_as(args.in);
    own.view_as(args);
    Tensor o = make_output(args.in, args.o);
    call("delta_rule_step", fastweight::delta_rule_step, ContextOf(args.in.q), args);
    give(stack, o);
  });
}

// Of the two results of a map, those that `wanted` has a bit for: the square matrix, then the one with the shape of a
// state.
constexpr const char* kMapSchema = ", int wanted) -> ";

template <class Args>
struct MapResults {
  MapResults(const Args& args, int64_t wanted, TensorView& square_view, TensorView& state_view) {
    const TensorView& q = args.in.q;
    const int64_t count = num_sequences(q, args.in.cu_seqlens), heads = extent(args.in.v, 2), K = extent(q, 3);
    const auto [rows, columns] = state_axes(args.in, args.options);
    if (wanted & 1) square = dense(q, state_dtype(q), {count, heads, K, K}, square_view);
    if (wanted & 2) state = dense(q, state_dtype(q), {count, heads, rows, columns}, state_view);
  }

  Tensor square, state;
};

void map_forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<DeltaRuleInputs> in(arguments);
    const Options options(arguments);
    const int64_t wanted = arguments.take<int64_t>();
    DeltaRuleMapForward args;
    args.options = options.resolved();
    in.view_as(args.in);
    MapResults results(args, wanted, args.m, args.h);
    call("delta_rule_map_forward", fastweight::delta_rule_map_forward, ContextOf(args.in.q), args);
    give(stack, results.square, results.state);
  });
}

void map_backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<DeltaRuleMapBackward> own(arguments);
    const TensorArguments<DeltaRuleInputs> in(arguments);
    const Options options(arguments);
    const int64_t wanted = arguments.take<int64_t>();
    DeltaRuleMapBackward args;
    args.options = options.resolved();
    in.view_as(args.in);
    own.view_as(args);
    MapResults results(args, wanted, args.mt, args.e);
    call("delta_rule_map_backward", fastweight::delta_rule_map_backward, ContextOf(args.in.q), args);
    give(stack, results.square, results.state);
  });
}

}  // namespace

std::span<const Operator> delta_rule_operators() {
  const std::string inputs = argument_schema<DeltaRuleInputs>() + kOptionSchema;
  const std::string forward_schema = "(" + inputs +
                                     ", ScalarType? chunk_states_dtype, Tensor? cu_seqlens_cpu, int kept_words) -> " +
                                     result_schema<DeltaRuleForward>();
  static const Operator operators[] = {
      {"delta_rule_forward" + forward_schema, &forward},
      {"delta_rule_differentiable" + forward_schema, &forward},
      {"delta_rule_backward(" + argument_schema<DeltaRuleBackward>() + inputs + ", int gradients) -> " +
           result_schema<DeltaRuleBackward>(),
       &backward},
      {"delta_rule_step(" + argument_schema<DeltaRuleStep>() + inputs + ") -> " + result_schema<DeltaRuleStep>(),
       &step},
      {"delta_rule_map_forward(" + inputs + kMapSchema + result_schema<DeltaRuleMapForward>(), &map_forward},
      {"delta_rule_map_backward(" + argument_schema<DeltaRuleMapBackward>() + inputs + kMapSchema +
           result_schema<DeltaRuleMapBackward>(),
       &map_backward},
  };
  return operators;
}

std::vector<std::string> delta_rule_switches() {
  std::vector<std::string> names;
  for_each_switch<DeltaRuleOptions>([&](const auto& row) { names.push_back(row.name); });
  names.insert(names.end(), {"token_by_token", "output_final_state", "states_for_backward"});
  return names;
}

}  // namespace fastweight::bindings
