// Every kind of malformed call, for the three operators and the three modes: the error's code, its text, and that
// nothing was written. Then the unusual calls that are valid.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"
#include "support/tensor.h"

namespace fastweight {
namespace {

using support::Tensor;

enum Mode { kForward = 1, kBackward = 2, kStep = 4 };
enum GateSet { kUngated = 1, kGdn = 2, kKda = 4 };
constexpr int kAllModes = kForward | kBackward | kStep;
constexpr int kAllGates = kUngated | kGdn | kKda;
constexpr int kGated = kGdn | kKda;

constexpr double kPoison = 77;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A valid call of one mode with all its tensors, to be spoiled in one place. B = 2, T = 5, or, packed, B = 1, T = 10
// and three sequences of which the second is empty.
class Call {
 public:
  static constexpr int64_t H = 2, HV = 4, K = 8, V = 6;

  Call(Mode mode_, Gate gate, bool packed_, DType dtype = DType::kF32)
      : mode(mode_), packed(packed_), B(packed ? 1 : 2), T(packed ? 10 : 5), N(packed ? 3 : 2) {
    options.gate = gate;
    in.q = input(dtype, {B, T, H, K});
    in.k = input(dtype, {B, T, H, K});
    in.v = input(dtype, {B, T, HV, V});
    in.beta = input(DType::kF32, {B, T, HV});
    if (gate == Gate::kPerHead) in.g = input(DType::kF32, {B, T, HV});
    if (gate == Gate::kPerChannel) in.g = input(DType::kF32, {B, T, HV, K});
    if (packed) in.cu_seqlens = integers(DType::kI64, {0, 4, 4, 10});
    if (mode == kStep) {
      state = output(DType::kF32, {kSlots, HV, K, V});
      state_indices = integers(DType::kI32, packed ? std::vector<double>{3, -1, 0} : std::vector<double>{3, 0});
    } else {
      in.initial_state = input(DType::kF32, {N, HV, K, V});
    }
    const int64_t chunks = packed ? 2 : 1;
    if (mode == kBackward) {
      d_o = input(dtype, {B, T, HV, V});
      d_final_state = input(DType::kF32, {N, HV, K, V});
      chunk_states = input(DType::kF32, {B, chunks, HV, K, V});
      dq = output(dtype, {B, T, H, K});
      dk = output(dtype, {B, T, H, K});
      dv = output(dtype, {B, T, HV, V});
      if (in.g.present()) dg = like(in.g);
      dbeta = like(in.beta);
      d_initial_state = output(DType::kF32, {N, HV, K, V});
    } else {
      o = output(dtype, {B, T, HV, V});
    }
    if (mode == kForward) {
      final_state = output(DType::kF32, {N, HV, K, V});
      chunk_states = output(DType::kF32, {B, chunks, HV, K, V});
    }
  }

  // Raw gates with both parameters (and their gradients).
  void use_gate_in_kernel() {
    options.gate_in_kernel = true;
    in.a_log = input(DType::kF32, {HV});
    in.dt_bias =
        input(DType::kF32, options.gate == Gate::kPerChannel ? std::vector<int64_t>{HV, K} : std::vector<int64_t>{HV});
    if (mode == kBackward) {
      da_log = like(in.a_log);
      ddt_bias = like(in.dt_bias);
    }
  }

  TensorView input(DType dtype, const std::vector<int64_t>& shape) { return keep(inputs_, dtype, shape, 0.25); }
  TensorView output(DType dtype, const std::vector<int64_t>& shape) { return keep(outputs_, dtype, shape, kPoison); }
  TensorView integers(DType dtype, const std::vector<double>& values) {
    inputs_.emplace_back(dtype, std::vector<int64_t>{static_cast<int64_t>(values.size())}, values);
    return inputs_.back().view();
  }
  TensorView like(const TensorView& view) {
    return output(view.dtype, std::vector<int64_t>(view.shape.begin(), view.shape.begin() + view.rank));
  }

  std::string run() const {
    if (mode == kForward) return delta_rule_forward(context, {in, options, o, final_state, chunk_states});
    if (mode == kStep) return delta_rule_step(context, {in, options, state, state_indices, o});
    return delta_rule_backward(context, {in, options, d_o, d_final_state, chunk_states, dq, dk, dv, dg, dbeta, da_log,
                                         ddt_bias, d_initial_state});
  }

  std::vector<std::vector<double>> output_values() const {
    std::vector<std::vector<double>> values;
    for (const Tensor& tensor : outputs_) values.push_back(tensor.values());
    return values;
  }

  static constexpr int64_t kSlots = 5;
  Mode mode;
  bool packed;
  int64_t B, T, N;
  Context context;
  DeltaRuleInputs in;
  DeltaRuleOptions options;
  TensorView o, final_state, chunk_states, d_o, d_final_state, dq, dk, dv, dg, dbeta, da_log, ddt_bias;
  TensorView d_initial_state, state, state_indices;

 private:
  static TensorView keep(std::deque<Tensor>& tensors, DType dtype, const std::vector<int64_t>& shape, double value) {
    tensors.emplace_back(dtype, shape);
    tensors.back().fill(value);
    return tensors.back().view();
  }

  std::deque<Tensor> inputs_, outputs_;
};

struct Malformed {
  std::string name;
  std::string argument;  // that the message begins with
  std::function<void(Call&)> spoil;
  int modes = kAllModes;
  int gates = kAllGates;
  bool packed = false;
};

void shift(TensorView& view, int64_t bytes) { view.data = static_cast<std::byte*>(view.data) + bytes; }
TensorView* forward_output(Call& call) { return call.mode == kBackward ? &call.dv : &call.o; }

// What is wrong with any tensor, here with one input and one output of each mode.
std::vector<Malformed> malformed_views() {
  std::vector<Malformed> rows;
  const auto add = [&](const std::string& name, const std::function<void(TensorView&)>& spoil) {
    rows.push_back({name + " input", "k", [=](Call& c) { spoil(c.in.k); }});
    rows.push_back({name + " beta", "beta", [=](Call& c) { spoil(c.in.beta); }});
    rows.push_back({name + " output", "o", [=](Call& c) { spoil(c.o); }, kForward | kStep});
    rows.push_back({name + " gradient", "dv", [=](Call& c) { spoil(c.dv); }, kBackward});
    rows.push_back({name + " state", "state", [=](Call& c) { spoil(c.state); }, kStep});
    rows.push_back({name + " final state", "final_state", [=](Call& c) { spoil(c.final_state); }, kForward});
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  add("null", [](TensorView& x) { x.data = nullptr; });
  add("rank too small", [](TensorView& x) { --x.rank; });
  add("rank zero", [](TensorView& x) { x.rank = 0; });
  add("rank negative", [](TensorView& x) { x.rank = -1; });
  add("rank out of range", [](TensorView& x) { x.rank = kMaxRank + 1; });
  add("extent wrong", [](TensorView& x) { x.shape[2] -= 1; });
  add("extent negative", [](TensorView& x) { x.shape[1] = -1; });
  add("extent huge", [](TensorView& x) { x.shape[0] = kHuge; });
  add("extents overflow", [](TensorView& x) { x.shape[0] = x.shape[1] = kHuge; });
  add("stride negative", [](TensorView& x) { x.strides[0] = -1; });
  add("stride huge", [](TensorView& x) { x.strides[2] = kHuge; });
  add("past the address space", [](TensorView& x) { x.data = reinterpret_cast<void*>(~uintptr_t{7}); });
  add("type unknown", [](TensorView& x) { x.dtype = static_cast<DType>(17); });
  add("type negative", [](TensorView& x) { x.dtype = static_cast<DType>(-1); });
  add("type integer", [](TensorView& x) { x.dtype = DType::kI32; });
  add("unaligned", [](TensorView& x) { shift(x, 2); });
  add("on another device", [](TensorView& x) { x.device = {DeviceType::kCuda, 0}; });
  add("on an unknown device", [](TensorView& x) { x.device.type = static_cast<DeviceType>(9); });
  return rows;
}

std::vector<Malformed> malformed_inputs() {
  return {
      {"q absent", "q", [](Call& c) { c.in.q = {}; }},
      {"k absent", "k", [](Call& c) { c.in.k = {}; }},
      {"v absent", "v", [](Call& c) { c.in.v = {}; }},
      {"q and k of other types", "k",
       [](Call& c) {
         c.in.k = c.input(DType::kF64, {c.B, c.T, c.H, c.K});
       }},
      {"v of another type", "v",
       [](Call& c) {
         c.in.v = c.input(DType::kBF16, {c.B, c.T, c.HV, c.V});
       }},
      {"q without heads", "q",
       [](Call& c) {
         c.in.q = c.in.k = c.input(DType::kF32, {c.B, c.T, 0, c.K});
       }},
      {"K of 0", "q",
       [](Call& c) {
         c.in.q = c.in.k = c.input(DType::kF32, {c.B, c.T, c.H, 0});
       }},
      {"K of 257", "q",
       [](Call& c) {
         c.in.q = c.in.k = c.input(DType::kF32, {c.B, c.T, c.H, 257});
       }},
      {"V of 0", "v",
       [](Call& c) {
         c.in.v = c.input(DType::kF32, {c.B, c.T, c.HV, 0});
       }},
      {"V of 257", "v",
       [](Call& c) {
         c.in.v = c.input(DType::kF32, {c.B, c.T, c.HV, 257});
       }},
      {"no value heads", "v",
       [](Call& c) {
         c.in.v = c.input(DType::kF32, {c.B, c.T, 0, c.V});
       }},
      {"value heads not a multiple", "v",
       [](Call& c) {
         c.in.v = c.input(DType::kF32, {c.B, c.T, 3, c.V});
       }},
      {"v of another batch", "v",
       [](Call& c) {
         c.in.v = c.input(DType::kF32, {c.B + 1, c.T, c.HV, c.V});
       }},
      {"v of another length", "v",
       [](Call& c) {
         c.in.v = c.input(DType::kF32, {c.B, c.T + 1, c.HV, c.V});
       }},
      {"beta of rank 4 with K", "beta",
       [](Call& c) {
         c.in.beta = c.input(DType::kF32, {c.B, c.T, c.HV, c.K});
       }},
      {"scratch memory beyond 64 bits", "q",
       [](Call& c) {
         const auto spread = [](TensorView& view) {
           view.shape[0] = int64_t{1} << 50;
           view.strides[0] = 0;
         };
         spread(c.in.q);
         spread(c.in.k);
         spread(c.in.v);
       }},
      {"g without a gate", "g",
       [](Call& c) {
         c.in.g = c.input(DType::kF32, {c.B, c.T, c.HV});
       },
       kAllModes, kUngated},
      {"no g", "g", [](Call& c) { c.in.g = {}; }, kAllModes, kGated},
      {"g per channel", "g",
       [](Call& c) {
         c.in.g = c.input(DType::kF32, {c.B, c.T, c.HV, c.K});
       },
       kAllModes, kGdn},
      {"g per head", "g",
       [](Call& c) {
         c.in.g = c.input(DType::kF32, {c.B, c.T, c.HV});
       },
       kAllModes, kKda},
      {"g of the query heads", "g",
       [](Call& c) {
         c.in.g = c.input(DType::kF32, {c.B, c.T, c.H});
       },
       kAllModes, kGdn},
      {"g of integers", "g", [](Call& c) { c.in.g.dtype = DType::kI32; }, kAllModes, kGated},
      {"initial state of another count", "initial_state",
       [](Call& c) {
         c.in.initial_state = c.input(DType::kF32, {c.N + 1, c.HV, c.K, c.V});
       },
       kForward | kBackward},
      {"initial state transposed", "initial_state",
       [](Call& c) {
         c.in.initial_state = c.input(DType::kF32, {c.N, c.HV, c.V, c.K});
       },
       kForward | kBackward},
      {"initial state of integers", "initial_state", [](Call& c) { c.in.initial_state.dtype = DType::kI32; },
       kForward | kBackward},
      {"initial state in a step", "initial_state",
       [](Call& c) {
         c.in.initial_state = c.input(DType::kF32, {c.N, c.HV, c.K, c.V});
       },
       kStep},
  };
}

std::vector<Malformed> malformed_sequences() {
  const auto cu = [](std::vector<double> values) {
    return [=](Call& c) { c.in.cu_seqlens = c.integers(DType::kI32, values); };
  };
  std::vector<Malformed> rows = {
      {"batch of 2", "cu_seqlens", cu({0, 2, 5})},
      {"first not 0", "cu_seqlens", cu({1, 4, 4, 10}), kAllModes, kAllGates, true},
      {"first negative", "cu_seqlens", cu({-1, 4, 4, 10}), kAllModes, kAllGates, true},
      {"decreasing", "cu_seqlens", cu({0, 4, 3, 10}), kAllModes, kAllGates, true},
      {"beyond the tokens inside", "cu_seqlens", cu({0, 11, 4, 10}), kAllModes, kAllGates, true},
      {"last too small", "cu_seqlens", cu({0, 4, 4, 9}), kAllModes, kAllGates, true},
      {"last too large", "cu_seqlens", cu({0, 4, 4, 11}), kAllModes, kAllGates, true},
      {"no element", "cu_seqlens", [](Call& c) { c.in.cu_seqlens.shape[0] = 0; }, kAllModes, kAllGates, true},
      {"floating", "cu_seqlens", [](Call& c) { c.in.cu_seqlens.dtype = DType::kF64; }, kAllModes, kAllGates, true},
      {"rank 2", "cu_seqlens",
       [](Call& c) {
         c.in.cu_seqlens = c.input(DType::kI64, {1, 4});
       },
       kAllModes, kAllGates, true},
      {"broadcast", "cu_seqlens", [](Call& c) { c.in.cu_seqlens.strides[0] = 0; }, kAllModes, kAllGates, true},
  };
  for (Malformed& row : rows) row.name = "cu_seqlens " + row.name;
  return rows;
}

std::vector<Malformed> malformed_options() {
  const auto scale = [](double value) { return [=](Call& c) { c.options.scale = value; }; };
  const auto chunk_size = [](int32_t value) { return [=](Call& c) { c.options.chunk_size = value; }; };
  const auto bound = [](double value, bool safe) {
    return [=](Call& c) {
      c.use_gate_in_kernel();
      c.options.lower_bound = value;
      c.options.safe_gate = safe;
    };
  };
  return {
      {"scale NaN", "scale", scale(kNaN)},
      {"scale -inf", "scale", scale(-kInfinity)},
      {"chunk size 0", "chunk_size", chunk_size(0)},
      {"chunk size 48", "chunk_size", chunk_size(48)},
      {"chunk size 128", "chunk_size", chunk_size(128)},
      {"chunk size negative", "chunk_size", chunk_size(-64)},
      {"gate unknown", "gate", [](Call& c) { c.options.gate = static_cast<Gate>(3); }},
      {"gate negative", "gate", [](Call& c) { c.options.gate = static_cast<Gate>(-1); }},
      {"negative eigenvalues without a sigmoid", "allow_neg_eigval",
       [](Call& c) { c.options.allow_neg_eigval = true; }},
      {"sigmoid without beta", "beta",
       [](Call& c) {
         c.options.beta_sigmoid = true;
         c.in.beta = {};
       }},
      {"gate in kernel without a gate", "gate_in_kernel", [](Call& c) { c.use_gate_in_kernel(); }, kAllModes, kUngated},
      {"gate in kernel without A_log", "a_log",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.a_log = c.da_log = {};
       },
       kAllModes, kGated},
      {"A_log without gate in kernel", "a_log", [](Call& c) { c.in.a_log = c.input(DType::kF32, {c.HV}); }},
      {"dt_bias without gate in kernel", "dt_bias", [](Call& c) { c.in.dt_bias = c.input(DType::kF32, {c.HV}); }},
      {"A_log of the query heads", "a_log",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.a_log = c.input(DType::kF32, {c.H});
       },
       kAllModes, kGated},
      {"A_log of rank 2 with gaps", "a_log",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.a_log = c.input(DType::kF32, {2, 4});
         c.in.a_log.shape[1] = 2;
       },
       kAllModes, kGated},
      {"A_log of integers", "a_log",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.a_log.dtype = DType::kI32;
       },
       kAllModes, kGated},
      {"dt_bias per channel", "dt_bias",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.dt_bias = c.input(DType::kF32, {c.HV, c.K});
       },
       kAllModes, kGdn},
      {"dt_bias per head", "dt_bias",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.dt_bias = c.input(DType::kF32, {c.HV});
       },
       kAllModes, kKda},
      {"dt_bias transposed", "dt_bias",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.dt_bias = c.input(DType::kF32, {c.K, c.HV});
       },
       kAllModes, kKda},
      {"lower bound 0", "lower_bound", bound(0, false), kAllModes, kKda},
      {"lower bound positive", "lower_bound", bound(1, false), kAllModes, kKda},
      {"lower bound NaN", "lower_bound", bound(kNaN, false), kAllModes, kKda},
      {"lower bound -inf", "lower_bound", bound(-kInfinity, false), kAllModes, kKda},
      {"lower bound below the safe range", "lower_bound", bound(-5.5, true), kAllModes, kKda},
      {"safe gate in kernel without a lower bound", "lower_bound", bound(DeltaRuleOptions::kUnset, true), kAllModes,
       kKda},
      {"lower bound per head", "lower_bound", bound(-4, false), kAllModes, kGdn},
      {"lower bound without gate in kernel", "lower_bound", [](Call& c) { c.options.lower_bound = -4; }},
      {"safe gate per head or without a gate", "safe_gate", [](Call& c) { c.options.safe_gate = true; }, kAllModes,
       kUngated | kGdn},
  };
}

std::vector<Malformed> malformed_contexts() {
  return {
      {"threads negative", "num_threads", [](Call& c) { c.context.num_threads = -1; }},
      {"device unknown", "device", [](Call& c) { c.context.device.type = static_cast<DeviceType>(5); }},
      {"device index negative", "device", [](Call& c) { c.context.device.index = -1; }},
      {"second cpu", "device", [](Call& c) { c.context.device.index = 1; }},
      {"allocate without release", "workspace",
       [](Call& c) { c.context.workspace.allocate = [](void*, size_t) -> void* { return nullptr; }; }},
      {"release without allocate", "workspace",
       [](Call& c) { c.context.workspace.release = [](void*, void*, size_t) {}; }},
      {"implementation unknown", "implementation", [](Call& c) { c.context.implementation = "nonsense"; }},
      {"context on another device", "q",
       [](Call& c) {
         c.context.device = {DeviceType::kCuda, 0};
       }},
  };
}

std::vector<Malformed> malformed_outputs() {
  return {
      {"o absent", "o", [](Call& c) { c.o = {}; }, kForward | kStep},
      {"o of fp64", "o",
       [](Call& c) {
         c.o = c.output(DType::kF64, {c.B, c.T, c.HV, c.V});
       },
       kForward | kStep},
      {"o of the query heads", "o",
       [](Call& c) {
         c.o = c.output(DType::kF32, {c.B, c.T, c.H, c.V});
       },
       kForward | kStep},
      {"o broadcast", "o", [](Call& c) { c.o.strides[1] = 0; }, kForward | kStep},
      {"o with overlapping rows", "o", [](Call& c) { c.o.strides[2] = c.V - 1; }, kForward | kStep},
      {"o over v", "o", [](Call& c) { c.o = c.in.v; }, kForward | kStep},
      {"o over part of v", "o",
       [](Call& c) {
         c.o = c.in.v;
         shift(c.o, 4 * c.V);
       },
       kForward | kStep},
      {"final state over the initial state", "final_state", [](Call& c) { c.final_state = c.in.initial_state; },
       kForward},
      {"final state over o", "o", [](Call& c) { c.final_state.data = c.o.data; }, kForward},
      {"final state of bf16", "final_state",
       [](Call& c) {
         c.final_state = c.output(DType::kBF16, {c.N, c.HV, c.K, c.V});
       },
       kForward},
      {"final state of fp64", "final_state",
       [](Call& c) {
         c.final_state = c.output(DType::kF64, {c.N, c.HV, c.K, c.V});
       },
       kForward},
      {"final state transposed", "final_state",
       [](Call& c) {
         c.final_state = c.output(DType::kF32, {c.N, c.HV, c.V, c.K});
       },
       kForward},
      {"states not transposed", "initial_state", [](Call& c) { c.options.state_v_first = true; }, kForward | kBackward},
      {"state not transposed", "state", [](Call& c) { c.options.state_v_first = true; }, kStep},
      {"chunk states of another chunk count", "chunk_states",
       [](Call& c) {
         c.chunk_states = c.output(DType::kF32, {c.B, 3, c.HV, c.K, c.V});
       },
       kForward | kBackward},
      {"chunk states of bf16", "chunk_states",
       [](Call& c) {
         c.chunk_states = c.output(DType::kBF16, {c.B, 1, c.HV, c.K, c.V});
       },
       kForward | kBackward},
      {"d_o of bf16", "d_o",
       [](Call& c) {
         c.d_o = c.input(DType::kBF16, {c.B, c.T, c.HV, c.V});
       },
       kBackward},
      {"d_o of the query heads", "d_o",
       [](Call& c) {
         c.d_o = c.input(DType::kF32, {c.B, c.T, c.H, c.V});
       },
       kBackward},
      {"d_final_state of another count", "d_final_state",
       [](Call& c) {
         c.d_final_state = c.input(DType::kF32, {c.N + 1, c.HV, c.K, c.V});
       },
       kBackward},
      {"dq of the value heads", "dq",
       [](Call& c) {
         c.dq = c.output(DType::kF32, {c.B, c.T, c.HV, c.K});
       },
       kBackward},
      {"dk of bf16", "dk",
       [](Call& c) {
         c.dk = c.output(DType::kBF16, {c.B, c.T, c.H, c.K});
       },
       kBackward},
      {"dq over dk", "dq", [](Call& c) { c.dq = c.dk; }, kBackward},
      {"dv over d_o", "dv", [](Call& c) { c.dv = c.d_o; }, kBackward},
      {"dg without g", "dg",
       [](Call& c) {
         c.dg = c.output(DType::kF32, {c.B, c.T, c.HV});
       },
       kBackward, kUngated},
      {"dbeta without beta", "dbeta", [](Call& c) { c.in.beta = {}; }, kBackward},
      {"da_log without a_log", "da_log", [](Call& c) { c.da_log = c.output(DType::kF32, {c.HV}); }, kBackward},
      {"da_log with gaps", "da_log",
       [](Call& c) {
         c.use_gate_in_kernel();
         c.in.a_log = c.input(DType::kF32, {2, 2});
         c.da_log = c.output(DType::kF32, {2, 4});
         c.da_log.shape[1] = 2;
       },
       kBackward, kGated},
      {"ddt_bias without dt_bias", "ddt_bias", [](Call& c) { c.ddt_bias = c.output(DType::kF32, {c.HV}); }, kBackward},
      {"d_initial_state without initial_state", "d_initial_state", [](Call& c) { c.in.initial_state = {}; }, kBackward},
      {"d_initial_state of bf16", "d_initial_state",
       [](Call& c) {
         c.d_initial_state = c.output(DType::kBF16, {c.N, c.HV, c.K, c.V});
       },
       kBackward},
      {"state absent", "state", [](Call& c) { c.state = {}; }, kStep},
      {"state of fp16", "state",
       [](Call& c) {
         c.state = c.output(DType::kF16, {c.kSlots, c.HV, c.K, c.V});
       },
       kStep},
      {"state of another count without indices", "state", [](Call& c) { c.state_indices = {}; }, kStep},
      {"state broadcast", "state", [](Call& c) { c.state.strides[0] = 0; }, kStep},
      {"state indices of another count", "state_indices",
       [](Call& c) {
         c.state_indices = c.integers(DType::kI32, {0, 1, 2, 3});
       },
       kStep},
      {"state index below -1", "state_indices",
       [](Call& c) {
         c.state_indices = c.integers(DType::kI64, {0, -2});
       },
       kStep},
      {"state index beyond the slots", "state_indices",
       [](Call& c) {
         c.state_indices = c.integers(DType::kI64, {0, static_cast<double>(Call::kSlots)});
       },
       kStep},
      {"state index twice", "state_indices",
       [](Call& c) {
         c.state_indices = c.integers(DType::kI32, {2, 2});
       },
       kStep},
      {"state indices floating", "state_indices", [](Call& c) { c.state_indices = c.input(DType::kF32, {2}); }, kStep},
      {"state indices broadcast", "state_indices", [](Call& c) { c.state_indices.strides[0] = 0; }, kStep},
      {"state indices of rank 2", "state_indices",
       [](Call& c) {
         c.state_indices = c.input(DType::kI32, {2, 1});
       },
       kStep},
      {"state indices over the state", "state",
       [](Call& c) {
         const int32_t slots[2] = {0, 1};
         std::memcpy(c.state.data, slots, sizeof(slots));
         c.state_indices.data = c.state.data;
       },
       kStep},
  };
}

Gate gate_of(int set) { return set == kUngated ? Gate::kNone : set == kGdn ? Gate::kPerHead : Gate::kPerChannel; }
const char* name_of(int set) { return set == kUngated ? "delta_rule" : set == kGdn ? "gdn" : "kda"; }
const char* name_of(Mode mode) { return mode == kForward ? "forward" : mode == kBackward ? "backward" : "step"; }

void expect_invalid(const Malformed& row) {
  for (Mode mode : {kForward, kBackward, kStep}) {
    for (int gate : {kUngated, kGdn, kKda}) {
      if (!(row.modes & mode) || !(row.gates & gate)) continue;
      SCOPED_TRACE(row.name + ", " + name_of(gate) + " " + name_of(mode));
      Call call(mode, gate_of(gate), row.packed);
      row.spoil(call);
      const auto before = call.output_values();
      try {
        call.run();
        ADD_FAILURE() << "accepted";
      } catch (const Error& error) {
        const std::string message = error.what();
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << message;
        EXPECT_EQ(message.rfind(row.argument + ":", 0), 0u) << message << "; expected to name " << row.argument;
        EXPECT_NE(message.find("expected"), std::string::npos) << message;
        EXPECT_NE(message.find("got"), std::string::npos) << message;
      }
      EXPECT_TRUE(call.output_values() == before);
    }
  }
}

TEST(DeltaRuleErrors, Views) {
  for (const Malformed& row : malformed_views()) expect_invalid(row);
}
TEST(DeltaRuleErrors, Inputs) {
  for (const Malformed& row : malformed_inputs()) expect_invalid(row);
}
TEST(DeltaRuleErrors, Sequences) {
  for (const Malformed& row : malformed_sequences()) expect_invalid(row);
}
TEST(DeltaRuleErrors, Options) {
  for (const Malformed& row : malformed_options()) expect_invalid(row);
}
TEST(DeltaRuleErrors, Contexts) {
  for (const Malformed& row : malformed_contexts()) expect_invalid(row);
}
TEST(DeltaRuleErrors, Outputs) {
  for (const Malformed& row : malformed_outputs()) expect_invalid(row);
}

TEST(DeltaRuleErrors, MessageShowsBothShapes) {
  Call call(kForward, Gate::kNone, false);
  call.in.k = call.input(DType::kF32, {2, 5, 2, 4});
  try {
    call.run();
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "k: expected shape [2, 5, 2, 8], got [2, 5, 2, 4]");
  }
}

TEST(DeltaRuleErrors, NumChunks) {
  const auto code = [](int64_t tokens, const TensorView& cu_seqlens, int32_t chunk_size) {
    try {
      delta_rule_num_chunks(tokens, cu_seqlens, chunk_size);
    } catch (const Error& error) {
      return static_cast<int>(error.code());
    }
    return 0;
  };
  const Tensor lengths(DType::kI64, {3}, std::vector<double>{0, 4, 9});
  const int invalid = static_cast<int>(ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(-1, {}, 64), invalid);
  EXPECT_EQ(code(9, {}, 48), invalid);
  EXPECT_EQ(code(8, lengths.view(), 64), invalid);
  EXPECT_EQ(code(9, lengths.view(), 64), 0);
}

void expect_valid(const std::string& name, int modes, int gates, bool packed,
                  const std::function<void(Call&)>& change) {
  for (Mode mode : {kForward, kBackward, kStep}) {
    for (int gate : {kUngated, kGdn, kKda}) {
      if (!(modes & mode) || !(gates & gate)) continue;
      SCOPED_TRACE(name + ", " + name_of(gate) + " " + name_of(mode));
      Call call(mode, gate_of(gate), packed);
      change(call);
      EXPECT_NO_THROW(EXPECT_NE(call.run(), ""));
    }
  }
}

TEST(DeltaRuleValid, Unchanged) {
  expect_valid("dense", kAllModes, kAllGates, false, [](Call&) {});
  expect_valid("packed", kAllModes, kAllGates, true, [](Call&) {});
  expect_valid("gate in kernel", kAllModes, kGated, false, [](Call& c) { c.use_gate_in_kernel(); });
}

void empty_axis(Call& c, size_t axis) {
  for (TensorView* view :
       {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.o, &c.d_o, &c.dq, &c.dk, &c.dv, &c.dg, &c.dbeta}) {
    if (!view->present()) continue;
    view->shape[axis] = 0;
    view->data = nullptr;
  }
  if (c.chunk_states.present()) c.chunk_states.shape[axis] = 0;
}

TEST(DeltaRuleValid, EmptyBatch) {
  expect_valid("empty batch", kAllModes, kAllGates, false, [](Call& c) {
    empty_axis(c, 0);
    for (TensorView* view :
         {&c.in.initial_state, &c.final_state, &c.d_final_state, &c.d_initial_state, &c.state_indices}) {
      if (view->present()) view->shape[0] = 0;
    }
  });
}

TEST(DeltaRuleValid, NoTokens) {
  expect_valid("no tokens", kAllModes, kAllGates, false, [](Call& c) { empty_axis(c, 1); });
}

TEST(DeltaRuleValid, NoTokensKeepsTheState) {
  Call call(kForward, Gate::kPerHead, false);
  empty_axis(call, 1);
  call.run();
  const int64_t count = call.N * call.HV * call.K * call.V;
  for (int64_t i = 0; i < count; ++i) ASSERT_EQ(static_cast<const float*>(call.final_state.data)[i], 0.25f);

  Call backward(kBackward, Gate::kPerHead, false);
  empty_axis(backward, 1);
  backward.run();
  for (int64_t i = 0; i < count; ++i) ASSERT_EQ(static_cast<const float*>(backward.d_initial_state.data)[i], 0.25f);

  Call step(kStep, Gate::kPerHead, false);
  empty_axis(step, 1);
  const auto before = step.output_values();
  step.run();
  EXPECT_TRUE(step.output_values() == before);
}

TEST(DeltaRuleValid, NoSequences) {
  expect_valid("no sequences", kAllModes, kAllGates, true, [](Call& c) {
    empty_axis(c, 1);
    c.in.cu_seqlens = c.integers(DType::kI32, {0});
    for (TensorView* view :
         {&c.in.initial_state, &c.final_state, &c.d_final_state, &c.d_initial_state, &c.state_indices}) {
      if (view->present()) view->shape[0] = 0;
    }
  });
}

TEST(DeltaRuleValid, HugeBatchWithoutTokens) {
  expect_valid("huge batch", kForward, kUngated, false, [](Call& c) {
    empty_axis(c, 1);
    for (TensorView* view : {&c.in.q, &c.in.k, &c.in.v, &c.in.beta, &c.o}) view->shape[0] = int64_t{1} << 35;
    c.in.initial_state = c.final_state = c.chunk_states = {};
  });
}

TEST(DeltaRuleValid, PackedHeads) {
  expect_valid("slices of one buffer", kForward | kBackward, kAllGates, false, [](Call& c) {
    // [B, T, H K + H K + HV V] holds q, k and v; another holds their gradients, or o in the place of v.
    const int64_t row = 2 * c.H * c.K + c.HV * c.V;
    const auto slice = [&](const TensorView& buffer, int64_t first, int64_t heads, int64_t width) {
      TensorView view = buffer;
      shift(view, 4 * first);
      view.rank = 4;
      view.shape = {c.B, c.T, heads, width};
      view.strides = {c.T * row, row, width, 1};
      return view;
    };
    const TensorView inputs = c.input(DType::kF32, {c.B, c.T, row});
    const TensorView outputs = c.output(DType::kF32, {c.B, c.T, row});
    c.in.q = slice(inputs, 0, c.H, c.K);
    c.in.k = slice(inputs, c.H * c.K, c.H, c.K);
    c.in.v = slice(inputs, 2 * c.H * c.K, c.HV, c.V);
    *forward_output(c) = slice(outputs, 2 * c.H * c.K, c.HV, c.V);
    if (c.mode == kBackward) {
      c.dq = slice(outputs, 0, c.H, c.K);
      c.dk = slice(outputs, c.H * c.K, c.H, c.K);
    }
  });
}

TEST(DeltaRuleErrors, PackedHeadsThatOverlap) {
  Call call(kBackward, Gate::kNone, false);
  const int64_t row = 2 * call.H * call.K;
  call.dq = call.output(DType::kF32, {call.B, call.T, row});
  call.dq.rank = 4;
  call.dq.shape = {call.B, call.T, call.H, call.K};
  call.dq.strides = {call.T * row, row, call.K, 1};
  call.dk = call.dq;
  shift(call.dk, 4 * (call.H * call.K - 1));  // one column too early
  const auto before = call.output_values();
  EXPECT_THROW(call.run(), Error);
  EXPECT_TRUE(call.output_values() == before);
  shift(call.dk, 4);
  EXPECT_NO_THROW(call.run());
}

TEST(DeltaRuleValid, BroadcastInputs) {
  expect_valid("one token for all", kAllModes, kAllGates, false, [](Call& c) {
    c.in.q.strides = c.in.k.strides = c.in.v.strides = c.in.beta.strides = {};
    if (c.in.g.present()) c.in.g.strides = {};
  });
}

TEST(DeltaRuleValid, OptionalTensorsAbsent) {
  expect_valid("fewest tensors", kAllModes, kAllGates, false, [](Call& c) {
    c.in.beta = c.in.initial_state = c.final_state = c.chunk_states = c.d_o = c.d_final_state = {};
    c.dq = c.dk = c.dv = c.dg = c.dbeta = c.d_initial_state = {};
  });
}

TEST(DeltaRuleValid, ParameterShapes) {
  expect_valid("parameters of other shapes", kAllModes, kGated, false, [](Call& c) {
    c.use_gate_in_kernel();
    c.in.a_log = c.input(DType::kBF16, {1, 1, c.HV, 1});
    if (c.options.gate == Gate::kPerChannel) c.in.dt_bias = c.input(DType::kF16, {c.HV * c.K});
    if (c.mode == kBackward) {
      c.da_log = c.output(DType::kF32, {1, 1, c.HV, 1});
      c.ddt_bias = c.like(c.in.dt_bias);
    }
  });
}

TEST(DeltaRuleValid, LowerBoundWithoutALog) {
  expect_valid("lower bound", kAllModes, kKda, false, [](Call& c) {
    c.use_gate_in_kernel();
    c.in.a_log = c.da_log = {};
    c.options.lower_bound = -5;
    c.options.safe_gate = true;
  });
}

TEST(DeltaRuleValid, AnyFiniteScale) {
  for (double scale : {0.0, -0.5, 1e30}) {
    expect_valid("scale", kAllModes, kAllGates, false, [&](Call& c) { c.options.scale = scale; });
  }
}

TEST(DeltaRuleValid, Types) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    for (Mode mode : {kForward, kBackward, kStep}) {
      Call call(mode, Gate::kPerChannel, false, dtype);
      EXPECT_NO_THROW(call.run());
      call.o = mode == kBackward ? TensorView{} : call.output(DType::kF32, {call.B, call.T, call.HV, call.V});
      EXPECT_NO_THROW(call.run());
    }
  }
  Call call(kForward, Gate::kNone, false, DType::kF64);
  call.in.initial_state = call.input(DType::kBF16, {call.N, call.HV, call.K, call.V});
  call.final_state = call.output(DType::kF64, {call.N, call.HV, call.K, call.V});
  call.chunk_states = call.output(DType::kF64, {call.B, 1, call.HV, call.K, call.V});
  EXPECT_NO_THROW(call.run());
}

TEST(DeltaRuleUnsupported, CudaDevice) {
  Call call(kForward, Gate::kNone, true);
  const Device device{DeviceType::kCuda, 0};
  call.context.device = device;
  for (TensorView* view : {&call.in.q, &call.in.k, &call.in.v, &call.in.beta, &call.in.initial_state,
                           &call.in.cu_seqlens, &call.o, &call.final_state}) {
    view->device = device;
  }
  call.chunk_states = {};
  const auto before = call.output_values();
  try {
    call.run();
    FAIL();
  } catch (const Error& error) {
    // With CUDA: there is no device, or the pointers are not its own.
    EXPECT_EQ(error.code(), built_with_cuda() ? ErrorCode::kInvalidArgument : ErrorCode::kUnsupported);
    const std::string part = built_with_cuda() ? "cuda:0" : "without CUDA";
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  EXPECT_TRUE(call.output_values() == before);
}

}  // namespace
}  // namespace fastweight
