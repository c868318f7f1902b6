// The delta-rule family as PyTorch operators. What the arguments mean stands in fastweight/delta_rule.h; autograd and
// shape functions in python/fastweight/_delta_rule.py.
#include "fastweight/delta_rule.h"

#include "convert.h"

// Inputs and Options below read these, in this order. Switches are bits of one number: PyTorch takes 0.2 us for every
// argument that it converts, which adds up in a decoding step.
#define FW_INPUTS                                                                                                  \
  "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, " \
  "Tensor? cu_seqlens"
#define FW_OPTIONS "int options, float? scale, float? lower_bound"
#define FW_FORWARD              \
  "(" FW_INPUTS ", " FW_OPTIONS \
  ", ScalarType? chunk_states_dtype, Tensor? cu_seqlens_cpu) -> (Tensor o, Tensor final_state, Tensor chunk_states)"

namespace fastweight::bindings {
namespace {

// Of `options`; python/fastweight/_delta_rule.py has the same. The lowest two bits are the gate, those from
// kChunkSizeShift on the chunk size.
enum Bit : int64_t {
  kStateVFirst = 1 << 2,
  kQkL2Norm = 1 << 3,
  kBetaSigmoid = 1 << 4,
  kAllowNegEigval = 1 << 5,
  kGateInKernel = 1 << 6,
  kSafeGate = 1 << 7,
  kTokenByToken = 1 << 8,
  kOutputFinalState = 1 << 9,
};
constexpr int64_t kGateMask = 3;
constexpr int kChunkSizeShift = 16;

struct Inputs {
  explicit Inputs(Arguments& arguments)
      : q(arguments.tensor()),
        k(arguments.tensor()),
        v(arguments.tensor()),
        g(arguments.optional_tensor()),
        beta(arguments.optional_tensor()),
        a_log(arguments.optional_tensor()),
        dt_bias(arguments.optional_tensor()),
        initial_state(arguments.optional_tensor()),
        cu_seqlens(arguments.optional_tensor()) {}

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

  Tensor q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens;
};

struct Options {
  explicit Options(Arguments& arguments)
      : bits(arguments.take<int64_t>()),
        scale(arguments.take<std::optional<double>>()),
        lower_bound(arguments.take<std::optional<double>>()) {}

  DeltaRuleOptions resolved() const {
    DeltaRuleOptions options;
    options.gate = static_cast<Gate>(bits & kGateMask);
    options.scale = number("scale", scale);
    options.chunk_size = static_cast<int32_t>(bits >> kChunkSizeShift);
    options.state_v_first = bits & kStateVFirst;
    options.qk_l2norm = bits & kQkL2Norm;
    options.beta_sigmoid = bits & kBetaSigmoid;
    options.allow_neg_eigval = bits & kAllowNegEigval;
    options.gate_in_kernel = bits & kGateInKernel;
    options.safe_gate = bits & kSafeGate;
    options.lower_bound = number("lower_bound", lower_bound);
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
Tensor make_chunk_states(const DeltaRuleInputs& in, const DeltaRuleOptions& options, const TensorView& offsets,
                         DType dtype, TensorView& chunk_states) {
  const int64_t tokens = extent(in.q, 1);
  const int64_t count = delta_rule_num_chunks(tokens, offsets, options.chunk_size);
  const auto [rows, columns] = state_axes(in, options);
  Tensor states = dense(in.q, dtype, {extent(in.q, 0), count, extent(in.v, 2), rows, columns}, chunk_states);
  if (offsets.present() && offsets.device.type == DeviceType::kCuda) {
    zero_from(states, 1, delta_rule_num_chunks(tokens, {}, options.chunk_size));
  }
  return states;
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Inputs in(arguments);
    const Options options(arguments);
    const auto chunk_states_dtype = arguments.take<std::optional<int32_t>>();
    const Tensor cu_seqlens_cpu = arguments.optional_tensor();
    DeltaRuleForward args;
    args.options = options.resolved();
    args.in = in.views();

    const TensorView& q = args.in.q;
    Tensor o = make_output(args.in, args.o), final_state, chunk_states;
    if (options.bits & kOutputFinalState) {
      const auto [rows, columns] = state_axes(args.in, args.options);
      const int64_t count = num_sequences(q, args.in.cu_seqlens);
      final_state = dense(q, state_dtype(q), {count, extent(args.in.v, 2), rows, columns}, args.final_state);
    }
    if (chunk_states_dtype.has_value()) {
      const TensorView known = view("cu_seqlens_cpu", cu_seqlens_cpu);
      chunk_states = make_chunk_states(args.in, args.options, known.present() ? known : args.in.cu_seqlens,
                                       dtype_of("chunk_states", *chunk_states_dtype), args.chunk_states);
    }
    ContextOf context(q);
    // On the CPU both forms give the bits of a short sequence, and the library takes the faster one.
    if (options.bits & kTokenByToken && q.device.type == DeviceType::kCuda) context->implementation = "recurrent";
    delta_rule_forward(context, args);
    give(stack, o, final_state, chunk_states);
  });
}

// Bit i of `gradients` asks for the gradient of input i in the order of Inputs.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor d_o = arguments.optional_tensor();
    const Tensor d_final_state = arguments.optional_tensor();
    const Tensor chunk_states = arguments.optional_tensor();
    const Inputs in(arguments);
    const Options options(arguments);
    const int64_t gradients = arguments.take<int64_t>();
    DeltaRuleBackward args;
    args.options = options.resolved();
    args.in = in.views();
    args.d_o = view("d_o", d_o);
    args.d_final_state = view("d_final_state", d_final_state);
    args.chunk_states = view("chunk_states", chunk_states);

    const Gradients output{args.in.q, gradients};
    Tensor dq = output(0, args.in.q, args.dq);
    Tensor dk = output(1, args.in.k, args.dk);
    Tensor dv = output(2, args.in.v, args.dv);
    Tensor dg = output(3, args.in.g, args.dg);
    Tensor dbeta = output(4, args.in.beta, args.dbeta);
    Tensor da_log = output(5, args.in.a_log, args.da_log);
    Tensor ddt_bias = output(6, args.in.dt_bias, args.ddt_bias);
    Tensor d_initial_state = output.of_state(7, args.in.initial_state, args.d_initial_state);
    delta_rule_backward(ContextOf(args.in.q), args);
    give(stack, dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state);
  });
}

void step(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    const Tensor state = arguments.tensor();
    const Tensor state_indices = arguments.optional_tensor();
    const Inputs in(arguments);
    const Options options(arguments);
    DeltaRuleStep args;
    args.options = options.resolved();
    args.in = in.views();
    args.state = view("state", state);
    args.state_indices = view("state_indices", state_indices);
    Tensor o = make_output(args.in, args.o);
    delta_rule_step(ContextOf(args.in.q), args);
    give(stack, o);
  });
}

constexpr Operator kOperators[] = {
    {"delta_rule_forward" FW_FORWARD, &forward},
    {"delta_rule_differentiable" FW_FORWARD, &forward},
    {"delta_rule_backward(Tensor? d_o, Tensor? d_final_state, Tensor? chunk_states, " FW_INPUTS ", " FW_OPTIONS
     ", int gradients) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor ddt_bias, "
     "Tensor d_initial_state)",
     &backward},
    {"delta_rule_step(Tensor(a!) state, Tensor? state_indices, " FW_INPUTS ", " FW_OPTIONS ") -> Tensor o", &step},
};

}  // namespace

std::span<const Operator> delta_rule_operators() { return kOperators; }

}  // namespace fastweight::bindings
