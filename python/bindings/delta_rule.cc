// The delta-rule family as PyTorch operators. What the arguments mean stands in fastweight/delta_rule.h; autograd and
// shape functions in python/fastweight/_delta_rule.py.
#include "fastweight/delta_rule.h"

#include "convert.h"

// Inputs and Options below read these, in this order.
#define FW_INPUTS                                                                                                  \
  "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, " \
  "Tensor? cu_seqlens"
#define FW_OPTIONS                                                                                  \
  "int gate, float? scale, int chunk_size, bool state_v_first, bool qk_l2norm, bool beta_sigmoid, " \
  "bool allow_neg_eigval, bool gate_in_kernel, bool safe_gate, float? lower_bound"
#define FW_FORWARD                                                       \
  FW_INPUTS ", " FW_OPTIONS                                              \
            ", bool output_final_state, ScalarType? chunk_states_dtype)" \
            " -> (Tensor o, Tensor final_state, Tensor chunk_states)"

namespace fastweight::bindings {
namespace {

struct Inputs {
  explicit Inputs(Arguments& arguments)
      : q(arguments.take<Tensor>()),
        k(arguments.take<Tensor>()),
        v(arguments.take<Tensor>()),
        g(arguments.take<OptionalTensor>()),
        beta(arguments.take<OptionalTensor>()),
        a_log(arguments.take<OptionalTensor>()),
        dt_bias(arguments.take<OptionalTensor>()),
        initial_state(arguments.take<OptionalTensor>()),
        cu_seqlens(arguments.take<OptionalTensor>()) {}

  DeltaRuleInputs views() const {
    return {view("q", q),
            view("k", k),
            view("v", v),
            view("g", g),
            view("beta", beta),
            view("A_log", a_log),
            view("dt_bias", dt_bias),
            view("initial_state", initial_state),
            view("cu_seqlens", cu_seqlens)};
  }

  Tensor q, k, v;
  OptionalTensor g, beta, a_log, dt_bias, initial_state, cu_seqlens;
};

DeltaRuleOptions take_options(Arguments& arguments) {
  DeltaRuleOptions options;
  options.gate = static_cast<Gate>(arguments.take<int64_t>());
  options.scale = number("scale", arguments.take<std::optional<double>>());
  options.chunk_size = static_cast<int32_t>(arguments.take<int64_t>());
  options.state_v_first = arguments.take<bool>();
  options.qk_l2norm = arguments.take<bool>();
  options.beta_sigmoid = arguments.take<bool>();
  options.allow_neg_eigval = arguments.take<bool>();
  options.gate_in_kernel = arguments.take<bool>();
  options.safe_gate = arguments.take<bool>();
  options.lower_bound = number("lower_bound", arguments.take<std::optional<double>>());
  return options;
}

// [*leading, HV, K, V], or [.., V, K].
std::vector<int64_t> state_shape(std::vector<int64_t> leading, const Inputs& in, bool state_v_first) {
  const int64_t k = extent(in.q, 3), v = extent(in.v, 3);
  leading.insert(leading.end(), {extent(in.v, 2), state_v_first ? v : k, state_v_first ? k : v});
  return leading;
}

std::vector<int64_t> output_shape(const Inputs& in) {
  return {extent(in.q, 0), extent(in.q, 1), extent(in.v, 2), extent(in.v, 3)};
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Inputs in(arguments);
    DeltaRuleForward args;
    args.options = take_options(arguments);
    const bool output_final_state = arguments.take<bool>();
    const auto chunk_states_dtype = arguments.take<std::optional<ScalarType>>();
    args.in = in.views();

    const Tensor o = dense(in.q, output_shape(in), in.q.scalar_type());
    args.o = view("o", o);
    Tensor final_state = nothing(), chunk_states = nothing();
    if (output_final_state) {
      const int64_t count = num_sequences(in.q, in.cu_seqlens);
      final_state = dense(in.q, state_shape({count}, in, args.options.state_v_first), state_dtype(in.q));
      args.final_state = view("final_state", final_state);
    }
    if (chunk_states_dtype.has_value()) {
      const int64_t count = delta_rule_num_chunks(extent(in.q, 1), args.in.cu_seqlens, args.options.chunk_size);
      chunk_states =
          dense(in.q, state_shape({extent(in.q, 0), count}, in, args.options.state_v_first), *chunk_states_dtype);
      args.chunk_states = view("chunk_states", chunk_states);
    }
    delta_rule_forward(ContextOf(in.q), args);
    give(stack, o, final_state, chunk_states);
  });
}

// Bit i of `gradients` asks for the gradient of input i in the order of Inputs.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const auto d_o = arguments.take<OptionalTensor>();
    const auto d_final_state = arguments.take<OptionalTensor>();
    const auto chunk_states = arguments.take<OptionalTensor>();
    const Inputs in(arguments);
    DeltaRuleBackward args;
    args.options = take_options(arguments);
    const int64_t gradients = arguments.take<int64_t>();
    args.in = in.views();
    args.d_o = view("d_o", d_o);
    args.d_final_state = view("d_final_state", d_final_state);
    args.chunk_states = view("chunk_states", chunk_states);

    const Gradients output{in.q, gradients};
    const Tensor dq = output(0, "dq", in.q, args.dq);
    const Tensor dk = output(1, "dk", in.k, args.dk);
    const Tensor dv = output(2, "dv", in.v, args.dv);
    const Tensor dg = output(3, "dg", in.g, args.dg);
    const Tensor dbeta = output(4, "dbeta", in.beta, args.dbeta);
    const Tensor da_log = output(5, "dA_log", in.a_log, args.da_log);
    const Tensor ddt_bias = output(6, "ddt_bias", in.dt_bias, args.ddt_bias);
    const Tensor d_initial_state = output.of_state(7, "d_initial_state", in.initial_state, args.d_initial_state);
    delta_rule_backward(ContextOf(in.q), args);
    give(stack, dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor state = arguments.take<Tensor>();
    const auto state_indices = arguments.take<OptionalTensor>();
    const Inputs in(arguments);
    DeltaRuleStep args;
    args.options = take_options(arguments);
    args.in = in.views();
    args.state = view("state", state);
    args.state_indices = view("state_indices", state_indices);
    const Tensor o = dense(in.q, output_shape(in), in.q.scalar_type());
    args.o = view("o", o);
    delta_rule_step(ContextOf(in.q), args);
    give(stack, o);
  });
}

// For every device: the library says what it can do where.
void implement(Library& m) {
  m.impl("delta_rule_forward", &forward);
  m.impl("delta_rule_differentiable", &forward);
  m.impl("delta_rule_backward", &backward);
  m.impl("delta_rule_step", &step);
}

}  // namespace
}  // namespace fastweight::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(fastweight, m) {
  m.def("delta_rule_forward(" FW_FORWARD);
  m.def("delta_rule_differentiable(" FW_FORWARD);
  m.def("delta_rule_backward(Tensor? d_o, Tensor? d_final_state, Tensor? chunk_states, " FW_INPUTS ", " FW_OPTIONS
        ", int gradients)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor ddt_bias, "
        "Tensor d_initial_state)");
  m.def("delta_rule_step(Tensor(a!) state, Tensor? state_indices, " FW_INPUTS ", " FW_OPTIONS ") -> Tensor o");
}

STABLE_TORCH_LIBRARY_IMPL(fastweight, CPU, m) { fastweight::bindings::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fastweight, CUDA, m) { fastweight::bindings::implement(m); }
