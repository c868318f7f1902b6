// The families related to the delta rule as PyTorch operators. What the arguments mean stands in fastweight/gla.h,
// fastweight/comba.h and fastweight/dplr.h; autograd and shape functions in python/fastweight/_related.py.
#include <string>
#include <utility>

#include "convert.h"
#include "core/related_fields.h"
#include "fastweight/delta_rule.h"
#include "observe.h"

namespace fastweight::bindings {
namespace {

// A family: its structs and entry points.
struct Gla {
  using Inputs = GlaInputs;
  using Options = GlaOptions;
  using Forward = GlaForward;
  using Backward = GlaBackward;
  using Step = GlaStep;
  static constexpr const char *kName = "gla", *kForwardName = "gla_forward", *kBackwardName = "gla_backward",
                              *kStepName = "gla_step";
  static constexpr auto kForward = gla_forward;
  static constexpr auto kBackward = gla_backward;
  static constexpr auto kStep = gla_step;
};

struct Comba {
  using Inputs = CombaInputs;
  using Options = CombaOptions;
  using Forward = CombaForward;
  using Backward = CombaBackward;
  using Step = CombaStep;
  static constexpr const char *kName = "comba", *kForwardName = "comba_forward", *kBackwardName = "comba_backward",
                              *kStepName = "comba_step";
  static constexpr auto kForward = comba_forward;
  static constexpr auto kBackward = comba_backward;
  static constexpr auto kStep = comba_step;
};

struct Dplr {
  using Inputs = DplrInputs;
  using Options = DplrOptions;
  using Forward = DplrForward;
  using Backward = DplrBackward;
  using Step = DplrStep;
  static constexpr const char *kName = "dplr", *kForwardName = "dplr_forward", *kBackwardName = "dplr_backward",
                              *kStepName = "dplr_step";
  static constexpr auto kForward = dplr_forward;
  static constexpr auto kBackward = dplr_backward;
  static constexpr auto kStep = dplr_step;
};

// The options one by one, in the order of their table.
template <class Options>
Options take_options(Arguments& arguments) {
  Options options;
  const auto take = [&](const auto& row) {
    auto& value = options.*row.value;
    using Value = std::remove_reference_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, double>) {
      value = number(row.name, arguments.take<std::optional<double>>());
    } else if constexpr (std::is_same_v<Value, bool>) {
      value = arguments.take<bool>();
    } else {
      value = static_cast<Value>(arguments.take<int64_t>());
    }
  };
  std::apply([&](const auto&... rows) { (take(rows), ...); }, kOptions<Options>);
  return options;
}

template <class Options>
std::string option_schema() {
  std::string schema;
  const auto add = [&](const auto& row) {
    using Value = std::remove_cvref_t<decltype(std::declval<Options>().*row.value)>;
    schema += std::is_same_v<Value, double> ? "float? " : std::is_same_v<Value, bool> ? "bool " : "int ";
    schema += std::string(row.name) + ", ";
  };
  std::apply([&](const auto&... rows) { (add(rows), ...); }, kOptions<Options>);
  return schema;
}

template <class Args>
Tensor make_output(Args& args) {
  return dense(args.in.q, args.in.q.dtype,
               {extent(args.in.q, 0), extent(args.in.q, 1), extent(args.in.v, 2), extent(args.in.v, 3)}, args.o);
}

// The last axes of a state, K x V or V x K.
template <class Args>
std::pair<int64_t, int64_t> state_axes(const Args& args) {
  const int64_t k = extent(args.in.q, 3), v = extent(args.in.v, 3);
  return args.options.state_v_first ? std::pair{v, k} : std::pair{k, v};
}

template <class Family>
void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<typename Family::Inputs> in(arguments);
    typename Family::Forward args;
    args.options = take_options<typename Family::Options>(arguments);
    const bool output_final_state = arguments.take<bool>();
    const auto chunk_states_dtype = arguments.take<std::optional<int32_t>>();
    in.view_as(args.in);

    const TensorView& q = args.in.q;
    const int64_t heads = extent(args.in.v, 2);
    const auto [rows, columns] = state_axes(args);
    Tensor o = make_output(args), final_state, chunk_states;
    if (output_final_state) {
      final_state =
          dense(q, state_dtype(q), {num_sequences(q, args.in.cu_seqlens), heads, rows, columns}, args.final_state);
    }
    if (chunk_states_dtype.has_value()) {
      const int64_t count = delta_rule_num_chunks(extent(q, 1), args.in.cu_seqlens, args.options.chunk_size);
      chunk_states = dense(q, dtype_of("chunk_states", *chunk_states_dtype),
                           {extent(q, 0), count, heads, rows, columns}, args.chunk_states);
    }
    call(Family::kForwardName, Family::kForward, ContextOf(q), args);
    give(stack, o, final_state, chunk_states);
  });
}

template <class Family>
void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<typename Family::Backward> own(arguments);
    const TensorArguments<typename Family::Inputs> in(arguments);
    typename Family::Backward args;
    args.options = take_options<typename Family::Options>(arguments);
    const int64_t asked_for = arguments.take<int64_t>();
    in.view_as(args.in);
    own.view_as(args);
    GradientResults<typename Family::Backward> gradients(args, args.in.q, asked_for);
    call(Family::kBackwardName, Family::kBackward, ContextOf(args.in.q), args);
    gradients.give(stack);
  });
}

template <class Family>
void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const TensorArguments<typename Family::Step> own(arguments);
    const TensorArguments<typename Family::Inputs> in(arguments);
    typename Family::Step args;
    args.options = take_options<typename Family::Options>(arguments);
    in.view_as(args.in);
    own.view_as(args);
    Tensor o = make_output(args);
    call(Family::kStepName, Family::kStep, ContextOf(args.in.q), args);
    give(stack, o);
  });
}

template <class Family>
void add_operators(std::vector<Operator>& operators) {
  const std::string name = Family::kName;
  const std::string inputs = argument_schema<typename Family::Inputs>() + option_schema<typename Family::Options>();
  const std::string forward_schema = "(" + inputs + "bool output_final_state, ScalarType? chunk_states_dtype) -> " +
                                     result_schema<typename Family::Forward>();
  operators.push_back({name + "_forward" + forward_schema, &forward<Family>});
  operators.push_back({name + "_differentiable" + forward_schema, &forward<Family>});
  operators.push_back({name + "_backward(" + argument_schema<typename Family::Backward>() + inputs +
                           "int gradients) -> " + result_schema<typename Family::Backward>(),
                       &backward<Family>});
  std::string step_inputs = inputs;
  step_inputs.resize(step_inputs.size() - 2);
  operators.push_back({name + "_step(" + argument_schema<typename Family::Step>() + step_inputs + ") -> " +
                           result_schema<typename Family::Step>(),
                       &step<Family>});
}

}  // namespace

std::span<const Operator> related_operators() {
  static const std::vector<Operator> operators = [] {
    std::vector<Operator> list;
    add_operators<Gla>(list);
    add_operators<Comba>(list);
    add_operators<Dplr>(list);
    return list;
  }();
  return operators;
}

}  // namespace fastweight::bindings
