// Every kind of malformed call, for the three modes: the error's code, its text, and that nothing was written. Then the
// unusual calls that are valid.
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
constexpr int kAllModes = kForward | kBackward | kStep;

constexpr double kPoison = 77;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A valid call of one mode with all its tensors, to be spoiled in one place. B = 2, T = 5, or, packed, B = 1, T = 10
// and three sequences of which the second is empty.
class Call {
 public:
  static constexpr int64_t H = 3, D = 8, kSlots = 5;

  Call(Mode mode_, bool packed_, DType dtype = DType::kF32)
      : mode(mode_), packed(packed_), B(packed ? 1 : 2), T(packed ? 10 : 5), N(packed ? 3 : 2) {
    in.q = input(dtype, {B, T, H, D});
    in.k = input(dtype, {B, T, H, D});
    in.v = input(dtype, {B, T, H, D});
    in.w = input(DType::kF32, {H, D});
    in.b = input(DType::kF32, {H, D});
    in.eta = input(DType::kF32, {B, T, H, 1});
    if (packed) in.cu_seqlens = integers(DType::kI64, {0, 4, 4, 10});
    if (mode == kStep) {
      state = output(DType::kF32, {kSlots, H, D, D});
      state_bias = output(DType::kF32, {kSlots, H, 1, D});
      gradient = output(DType::kF32, {kSlots, H, D, D});
      gradient_bias = output(DType::kF32, {kSlots, H, 1, D});
      position = positions({0, 15, 3, 1, 7});
      state_indices = integers(DType::kI32, packed ? std::vector<double>{3, -1, 0} : std::vector<double>{3, 0});
    } else {
      in.initial_state = input(DType::kF32, {N, H, D, D});
      in.initial_state_bias = input(DType::kF32, {N, H, 1, D});
    }
    if (mode == kBackward) {
      d_o = input(dtype, {B, T, H, D});
      d_final_state = input(DType::kF32, {N, H, D, D});
      d_final_state_bias = input(DType::kF32, {N, H, 1, D});
      dq = output(dtype, {B, T, H, D});
      dk = output(dtype, {B, T, H, D});
      dv = output(dtype, {B, T, H, D});
      dw = like(in.w);
      db = like(in.b);
      deta = like(in.eta);
      d_initial_state = output(DType::kF32, {N, H, D, D});
      d_initial_state_bias = output(DType::kF32, {N, H, 1, D});
    } else {
      o = output(dtype, {B, T, H, D});
    }
    if (mode == kForward) {
      final_state = output(DType::kF32, {N, H, D, D});
      final_state_bias = output(DType::kF32, {N, H, 1, D});
    }
  }

  TensorView input(DType dtype, const std::vector<int64_t>& shape) { return keep(inputs_, dtype, shape, 0.25); }
  TensorView output(DType dtype, const std::vector<int64_t>& shape) { return keep(outputs_, dtype, shape, kPoison); }
  TensorView integers(DType dtype, const std::vector<double>& values) { return keep(inputs_, dtype, values); }
  TensorView positions(const std::vector<double>& values, DType dtype = DType::kI32) {
    return keep(outputs_, dtype, values);
  }
  TensorView like(const TensorView& view) {
    return output(view.dtype, std::vector<int64_t>(view.shape.begin(), view.shape.begin() + view.rank));
  }

  std::string run() const {
    if (mode == kForward) return ttt_linear_forward(context, {in, options, o, final_state, final_state_bias});
    if (mode == kStep) {
      return ttt_linear_step(context,
                             {in, options, state, state_bias, gradient, gradient_bias, position, state_indices, o});
    }
    return ttt_linear_backward(context, {in, options, d_o, d_final_state, d_final_state_bias, dq, dk, dv, dw, db, deta,
                                         d_initial_state, d_initial_state_bias});
  }

  std::vector<std::vector<double>> output_values() const {
    std::vector<std::vector<double>> values;
    for (const Tensor& tensor : outputs_) values.push_back(tensor.values());
    return values;
  }

  Mode mode;
  bool packed;
  int64_t B, T, N;
  Context context;
  TttLinearInputs in;
  TttLinearOptions options;
  TensorView o, final_state, final_state_bias, d_o, d_final_state, d_final_state_bias, dq, dk, dv, dw, db, deta;
  TensorView d_initial_state, d_initial_state_bias;
  TensorView state, state_bias, gradient, gradient_bias, position, state_indices;

 private:
  static TensorView keep(std::deque<Tensor>& tensors, DType dtype, const std::vector<int64_t>& shape, double value) {
    tensors.emplace_back(dtype, shape);
    tensors.back().fill(value);
    return tensors.back().view();
  }
  static TensorView keep(std::deque<Tensor>& tensors, DType dtype, const std::vector<double>& values) {
    tensors.emplace_back(dtype, std::vector<int64_t>{static_cast<int64_t>(values.size())}, values);
    return tensors.back().view();
  }

  std::deque<Tensor> inputs_, outputs_;
};

struct Malformed {
  std::string name;
  std::string argument;  // that the message begins with
  std::function<void(Call&)> spoil;
  int modes = kAllModes;
  bool packed = false;
};

void shift(TensorView& view, int64_t bytes) { view.data = static_cast<std::byte*>(view.data) + bytes; }

// An input or output of another type or shape in place of one of the call's.
std::function<void(Call&)> input_as(TensorView Call::*field, DType dtype, const std::vector<int64_t>& shape) {
  return [=](Call& c) { c.*field = c.input(dtype, shape); };
}
std::function<void(Call&)> input_as(TensorView TttLinearInputs::*field, DType dtype,
                                    const std::vector<int64_t>& shape) {
  return [=](Call& c) { c.in.*field = c.input(dtype, shape); };
}
std::function<void(Call&)> output_as(TensorView Call::*field, DType dtype, const std::vector<int64_t>& shape) {
  return [=](Call& c) { c.*field = c.output(dtype, shape); };
}

// What is wrong with any tensor.
std::vector<Malformed> malformed_views() {
  std::vector<Malformed> rows;
  const auto add = [&](const std::string& name, const std::function<void(TensorView&)>& spoil) {
    rows.push_back({name + " k", "k", [=](Call& c) { spoil(c.in.k); }});
    rows.push_back({name + " w", "w", [=](Call& c) { spoil(c.in.w); }});
    rows.push_back({name + " b", "b", [=](Call& c) { spoil(c.in.b); }});
    rows.push_back({name + " eta", "eta", [=](Call& c) { spoil(c.in.eta); }});
    rows.push_back({name + " initial state bias", "initial_state_bias",
                    [=](Call& c) { spoil(c.in.initial_state_bias); }, kForward | kBackward});
    rows.push_back({name + " output", "o", [=](Call& c) { spoil(c.o); }, kForward | kStep});
    rows.push_back({name + " dv", "dv", [=](Call& c) { spoil(c.dv); }, kBackward});
    rows.push_back({name + " dw", "dw", [=](Call& c) { spoil(c.dw); }, kBackward});
    rows.push_back({name + " state", "state", [=](Call& c) { spoil(c.state); }, kStep});
    rows.push_back({name + " gradient", "gradient", [=](Call& c) { spoil(c.gradient); }, kStep});
    rows.push_back({name + " gradient bias", "gradient_bias", [=](Call& c) { spoil(c.gradient_bias); }, kStep});
    rows.push_back({name + " final bias", "final_state_bias", [=](Call& c) { spoil(c.final_state_bias); }, kForward});
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  add("null", [](TensorView& x) { x.data = nullptr; });
  add("rank zero", [](TensorView& x) { x.rank = 0; });
  add("rank one", [](TensorView& x) { x.rank = 1; });
  add("rank negative", [](TensorView& x) { x.rank = -1; });
  add("rank out of range", [](TensorView& x) { x.rank = kMaxRank + 1; });
  add("extent wrong", [](TensorView& x) { x.shape[1] -= 1; });
  add("extent negative", [](TensorView& x) { x.shape[1] = -1; });
  add("extent huge", [](TensorView& x) { x.shape[0] = kHuge; });
  add("extents overflow", [](TensorView& x) { x.shape[0] = x.shape[1] = kHuge; });
  add("stride negative", [](TensorView& x) { x.strides[0] = -1; });
  add("stride huge", [](TensorView& x) { x.strides[1] = kHuge; });
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
  constexpr int64_t H = Call::H, D = Call::D;
  const auto all_qkv = [](int64_t heads, int64_t width) {
    return [=](Call& c) { c.in.q = c.in.k = c.in.v = c.input(DType::kF32, {c.B, c.T, heads, width}); };
  };
  return {
      {"q absent", "q", [](Call& c) { c.in.q = {}; }},
      {"k absent", "k", [](Call& c) { c.in.k = {}; }},
      {"v absent", "v", [](Call& c) { c.in.v = {}; }},
      {"w absent", "w", [](Call& c) { c.in.w = {}; }},
      {"b absent", "b", [](Call& c) { c.in.b = {}; }},
      {"eta absent", "eta", [](Call& c) { c.in.eta = {}; }},
      {"q of rank 3", "q", [](Call& c) { c.in.q.rank = 3; }},
      {"k of another type", "k", input_as(&TttLinearInputs::k, DType::kF64, {2, 5, H, D})},
      {"v of another type", "v", input_as(&TttLinearInputs::v, DType::kBF16, {2, 5, H, D})},
      {"no heads", "q", all_qkv(0, D)},
      {"D of 0", "q", all_qkv(H, 0)},
      {"D of 129", "q", all_qkv(H, 129)},
      {"k of another width", "k", input_as(&TttLinearInputs::k, DType::kF32, {2, 5, H, D - 1})},
      {"v of another width", "v", input_as(&TttLinearInputs::v, DType::kF32, {2, 5, H, D + 1})},
      {"v of more heads", "v", input_as(&TttLinearInputs::v, DType::kF32, {2, 5, 2 * H, D})},
      {"v of another length", "v", input_as(&TttLinearInputs::v, DType::kF32, {2, 6, H, D})},
      {"w for all heads", "w", input_as(&TttLinearInputs::w, DType::kF32, {D})},
      {"w transposed", "w", input_as(&TttLinearInputs::w, DType::kF32, {D, H})},
      {"b of another width", "b", input_as(&TttLinearInputs::b, DType::kF32, {H, D + 1})},
      {"b of rank 3", "b", input_as(&TttLinearInputs::b, DType::kF32, {1, H, D})},
      {"eta per channel", "eta", input_as(&TttLinearInputs::eta, DType::kF32, {2, 5, H, D})},
      {"eta of rank 2", "eta", input_as(&TttLinearInputs::eta, DType::kF32, {2, 5})},
      {"eta of other heads", "eta", input_as(&TttLinearInputs::eta, DType::kF32, {2, 5, 1})},
      {"scratch memory beyond 64 bits", "q",
       [](Call& c) {
         for (TensorView* view : {&c.in.q, &c.in.k, &c.in.v}) {
           view->shape[0] = int64_t{1} << 50;
           view->strides[0] = 0;
         }
       }},
      {"initial state of another count", "initial_state",
       input_as(&TttLinearInputs::initial_state, DType::kF32, {3, H, D, D}), kForward | kBackward},
      {"initial state of integers", "initial_state", [](Call& c) { c.in.initial_state.dtype = DType::kI32; },
       kForward | kBackward},
      {"initial bias of another count", "initial_state_bias",
       input_as(&TttLinearInputs::initial_state_bias, DType::kF32, {3, H, 1, D}), kForward | kBackward},
      {"initial bias of two rows", "initial_state_bias",
       input_as(&TttLinearInputs::initial_state_bias, DType::kF32, {2, H, 2, D}), kForward | kBackward},
      {"initial bias of rank 2", "initial_state_bias",
       input_as(&TttLinearInputs::initial_state_bias, DType::kF32, {H, D}), kForward | kBackward},
      {"initial state in a step", "initial_state", input_as(&TttLinearInputs::initial_state, DType::kF32, {2, H, D, D}),
       kStep},
      {"initial bias in a step", "initial_state_bias",
       input_as(&TttLinearInputs::initial_state_bias, DType::kF32, {2, H, 1, D}), kStep},
  };
}

std::vector<Malformed> malformed_sequences() {
  const auto cu = [](std::vector<double> values) {
    return [=](Call& c) { c.in.cu_seqlens = c.integers(DType::kI32, values); };
  };
  return {
      {"batch of 2", "cu_seqlens", cu({0, 2, 5})},
      {"first not 0", "cu_seqlens", cu({1, 4, 4, 10}), kAllModes, true},
      {"first negative", "cu_seqlens", cu({-1, 4, 4, 10}), kAllModes, true},
      {"decreasing", "cu_seqlens", cu({0, 4, 3, 10}), kAllModes, true},
      {"beyond the tokens inside", "cu_seqlens", cu({0, 11, 4, 10}), kAllModes, true},
      {"last too small", "cu_seqlens", cu({0, 4, 4, 9}), kAllModes, true},
      {"last too large", "cu_seqlens", cu({0, 4, 4, 11}), kAllModes, true},
      {"no element", "cu_seqlens", [](Call& c) { c.in.cu_seqlens.shape[0] = 0; }, kAllModes, true},
      {"floating", "cu_seqlens", [](Call& c) { c.in.cu_seqlens.dtype = DType::kF64; }, kAllModes, true},
      {"rank 2", "cu_seqlens", input_as(&TttLinearInputs::cu_seqlens, DType::kI64, {1, 4}), kAllModes, true},
      {"broadcast", "cu_seqlens", [](Call& c) { c.in.cu_seqlens.strides[0] = 0; }, kAllModes, true},
  };
}

std::vector<Malformed> malformed_options() {
  const auto scale = [](double value) { return [=](Call& c) { c.options.scale = value; }; };
  const auto eps = [](double value) { return [=](Call& c) { c.options.eps = value; }; };
  const auto mini_batch = [](int32_t value) { return [=](Call& c) { c.options.mini_batch = value; }; };
  return {
      {"scale NaN", "scale", scale(kNaN)},
      {"scale -inf", "scale", scale(-kInfinity)},
      {"scale 0", "scale", scale(0)},
      {"scale negative", "scale", scale(-0.5)},
      {"eps NaN", "eps", eps(kNaN)},
      {"eps inf", "eps", eps(kInfinity)},
      {"eps 0", "eps", eps(0)},
      {"eps negative", "eps", eps(-1e-6)},
      {"eps 0 in fp32", "eps", eps(1e-50)},
      {"eps subnormal in fp32", "eps", eps(1e-39)},
      {"mini-batch 0", "mini_batch", mini_batch(0)},
      {"mini-batch 8", "mini_batch", mini_batch(8)},
      {"mini-batch 48", "mini_batch", mini_batch(48)},
      {"mini-batch 128", "mini_batch", mini_batch(128)},
      {"mini-batch negative", "mini_batch", mini_batch(-16)},
  };
}

std::vector<Malformed> malformed_contexts() {
  return {
      {"threads negative", "num_threads", [](Call& c) { c.context.num_threads = -1; }},
      {"device unknown", "device", [](Call& c) { c.context.device.type = static_cast<DeviceType>(5); }},
      {"second cpu", "device", [](Call& c) { c.context.device.index = 1; }},
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
  constexpr int64_t H = Call::H, D = Call::D, kSlots = Call::kSlots;
  return {
      {"o absent", "o", [](Call& c) { c.o = {}; }, kForward | kStep},
      {"o of fp64", "o", output_as(&Call::o, DType::kF64, {2, 5, H, D}), kForward | kStep},
      {"o of another width", "o", output_as(&Call::o, DType::kF32, {2, 5, H, D + 1}), kForward | kStep},
      {"o broadcast", "o", [](Call& c) { c.o.strides[1] = 0; }, kForward | kStep},
      {"o with overlapping rows", "o", [](Call& c) { c.o.strides[2] = c.D - 1; }, kForward | kStep},
      {"o over v", "o", [](Call& c) { c.o = c.in.v; }, kForward | kStep},
      {"final state over the initial state", "final_state", [](Call& c) { c.final_state = c.in.initial_state; },
       kForward},
      {"final bias over the final state", "final_state", [](Call& c) { c.final_state_bias.data = c.final_state.data; },
       kForward},
      {"final state of bf16", "final_state", output_as(&Call::final_state, DType::kBF16, {2, H, D, D}), kForward},
      {"final state of fp64", "final_state", output_as(&Call::final_state, DType::kF64, {2, H, D, D}), kForward},
      {"final bias of bf16", "final_state_bias", output_as(&Call::final_state_bias, DType::kBF16, {2, H, 1, D}),
       kForward},
      {"final bias of two rows", "final_state_bias", output_as(&Call::final_state_bias, DType::kF32, {2, H, 2, D}),
       kForward},
      {"d_o of bf16", "d_o", input_as(&Call::d_o, DType::kBF16, {2, 5, H, D}), kBackward},
      {"d_o of other heads", "d_o", input_as(&Call::d_o, DType::kF32, {2, 5, H + 1, D}), kBackward},
      {"d_final_state of another count", "d_final_state", input_as(&Call::d_final_state, DType::kF32, {3, H, D, D}),
       kBackward},
      {"d_final_state_bias of another count", "d_final_state_bias",
       input_as(&Call::d_final_state_bias, DType::kF32, {3, H, 1, D}), kBackward},
      {"dk of bf16", "dk", output_as(&Call::dk, DType::kBF16, {2, 5, H, D}), kBackward},
      {"dq over dk", "dq", [](Call& c) { c.dq = c.dk; }, kBackward},
      {"dv over d_o", "dv", [](Call& c) { c.dv = c.d_o; }, kBackward},
      {"dw over db", "dw", [](Call& c) { c.dw = c.db; }, kBackward},
      {"dw of another shape", "dw", output_as(&Call::dw, DType::kF32, {D, H}), kBackward},
      {"db of fp64", "db", output_as(&Call::db, DType::kF64, {H, D}), kBackward},
      {"deta of another rank", "deta", output_as(&Call::deta, DType::kF32, {2, 5, H}), kBackward},
      {"d_initial_state without initial_state", "d_initial_state", [](Call& c) { c.in.initial_state = {}; }, kBackward},
      {"d_initial_state_bias without initial_state_bias", "d_initial_state_bias",
       [](Call& c) { c.in.initial_state_bias = {}; }, kBackward},
      {"d_initial_state of bf16", "d_initial_state", output_as(&Call::d_initial_state, DType::kBF16, {2, H, D, D}),
       kBackward},
      {"d_initial_state_bias of another width", "d_initial_state_bias",
       output_as(&Call::d_initial_state_bias, DType::kF32, {2, H, 1, D + 1}), kBackward},
      {"state absent", "state", [](Call& c) { c.state = {}; }, kStep},
      {"state bias absent", "state_bias", [](Call& c) { c.state_bias = {}; }, kStep},
      {"gradient absent", "gradient", [](Call& c) { c.gradient = {}; }, kStep},
      {"gradient bias absent", "gradient_bias", [](Call& c) { c.gradient_bias = {}; }, kStep},
      {"position absent", "position", [](Call& c) { c.position = {}; }, kStep},
      {"state of bf16", "state", output_as(&Call::state, DType::kBF16, {kSlots, H, D, D}), kStep},
      {"state of another count without indices", "state", [](Call& c) { c.state_indices = {}; }, kStep},
      {"state broadcast", "state", [](Call& c) { c.state.strides[0] = 0; }, kStep},
      {"state bias of another count", "state_bias", output_as(&Call::state_bias, DType::kF32, {kSlots - 1, H, 1, D}),
       kStep},
      {"gradient of another count", "gradient", output_as(&Call::gradient, DType::kF32, {kSlots + 1, H, D, D}), kStep},
      {"gradient over the state", "state", [](Call& c) { c.gradient = c.state; }, kStep},
      {"gradient bias of fp64", "gradient_bias", output_as(&Call::gradient_bias, DType::kF64, {kSlots, H, 1, D}),
       kStep},
      {"position of another count", "position",
       [](Call& c) {
         c.position = c.positions({0, 1});
       },
       kStep},
      {"position of int64", "position",
       [](Call& c) {
         c.position = c.positions({0, 15, 3, 1, 7}, DType::kI64);
       },
       kStep},
      {"position of floats", "position", output_as(&Call::position, DType::kF32, {kSlots}), kStep},
      {"position of rank 2", "position",
       [](Call& c) {
         c.position.rank = 2;
         c.position.shape = {kSlots, 1};
         c.position.strides = {1, 1};
       },
       kStep},
      {"position broadcast", "position", [](Call& c) { c.position.strides[0] = 0; }, kStep},
      {"position negative", "position",
       [](Call& c) {
         c.position = c.positions({-1, 0, 0, 0, 0});
       },
       kStep},
      {"position of a full mini-batch", "position",
       [](Call& c) {
         c.position = c.positions({0, 0, 0, 16, 0});
       },
       kStep},
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
         c.state_indices = c.integers(DType::kI64, {0, double{Call::kSlots}});
       },
       kStep},
      {"state index twice", "state_indices",
       [](Call& c) {
         c.state_indices = c.integers(DType::kI32, {2, 2});
       },
       kStep},
      {"state indices floating", "state_indices", input_as(&Call::state_indices, DType::kF32, {2}), kStep},
      {"state indices over the position", "position",
       [](Call& c) {
         c.position = c.positions({0, 1, 2, 3, 4});
         c.state_indices.data = c.position.data;
       },
       kStep},
  };
}

const char* name_of(Mode mode) { return mode == kForward ? "forward" : mode == kBackward ? "backward" : "step"; }

void expect_invalid(const std::vector<Malformed>& rows) {
  for (const Malformed& row : rows) {
    for (Mode mode : {kForward, kBackward, kStep}) {
      if (!(row.modes & mode)) continue;
      SCOPED_TRACE(row.name + ", " + name_of(mode));
      Call call(mode, row.packed);
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

TEST(TttLinearErrors, Views) { expect_invalid(malformed_views()); }
TEST(TttLinearErrors, Inputs) { expect_invalid(malformed_inputs()); }
TEST(TttLinearErrors, Sequences) { expect_invalid(malformed_sequences()); }
TEST(TttLinearErrors, Options) { expect_invalid(malformed_options()); }
TEST(TttLinearErrors, Contexts) { expect_invalid(malformed_contexts()); }
TEST(TttLinearErrors, Outputs) { expect_invalid(malformed_outputs()); }

void expect_message(const Call& call, const std::string& message) {
  try {
    call.run();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), message);
  }
}

TEST(TttLinearErrors, MessagesShowBothSides) {
  Call call(kForward, false);
  call.in.k = call.input(DType::kF32, {2, 5, 3, 4});
  expect_message(call, "k: expected shape [2, 5, 3, 8], got [2, 5, 3, 4]");
  Call step(kStep, false);
  step.position = step.positions({0, 0, 0, 16, 0});
  expect_message(step, "position: expected a count from 0 to 15 in slot 3, got 16");
}

// Without indices every slot belongs to a sequence.
TEST(TttLinearErrors, PositionsWithoutIndices) {
  for (size_t slot = 0; slot < 2; ++slot) {
    Call call(kStep, false);
    for (TensorView* x : {&call.state, &call.state_bias, &call.gradient, &call.gradient_bias}) x->shape[0] = call.N;
    std::vector<double> counts{0, 15};
    call.position = call.positions(counts);
    call.state_indices = {};
    EXPECT_NO_THROW(call.run());
    counts[slot] = 16;
    call.position = call.positions(counts);
    expect_message(call, "position: expected a count from 0 to 15 in slot " + std::to_string(slot) + ", got 16");
  }
}

TEST(TttLinearErrors, OutOfMemory) {
  for (Mode mode : {kForward, kBackward, kStep}) {
    Call call(mode, false);
    call.context.workspace.allocate = [](void*, size_t) -> void* { return nullptr; };
    call.context.workspace.release = [](void*, void*, size_t) {};
    const auto before = call.output_values();
    try {
      call.run();
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
    }
    EXPECT_TRUE(call.output_values() == before);
  }
}

void expect_valid(const std::string& name, int modes, bool packed, const std::function<void(Call&)>& change) {
  for (Mode mode : {kForward, kBackward, kStep}) {
    if (!(modes & mode)) continue;
    SCOPED_TRACE(name + ", " + name_of(mode));
    Call call(mode, packed);
    change(call);
    EXPECT_NO_THROW(EXPECT_NE(call.run(), ""));
  }
}

TEST(TttLinearValid, Unchanged) {
  expect_valid("dense", kAllModes, false, [](Call&) {});
  expect_valid("packed", kAllModes, true, [](Call&) {});
}

// The smallest eps is one in fp32, too: rows without variance have an LN of 0.
TEST(TttLinearValid, SmallestEps) {
  Call call(kForward, false);
  call.options.eps = std::numeric_limits<float>::min();
  EXPECT_NO_THROW(call.run());
  for (const std::vector<double>& values : call.output_values()) {
    for (double value : values) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(TttLinearValid, EmptyProblems) {
  for (const bool no_tokens : {false, true}) {
    expect_valid("empty", kForward | kBackward, false, [&](Call& c) {
      const int64_t B = no_tokens ? c.B : 0, T = no_tokens ? 0 : c.T, N = B;
      for (TensorView* x : {&c.in.q, &c.in.k, &c.in.v, &c.in.eta, &c.d_o, &c.o, &c.dq, &c.dk, &c.dv, &c.deta}) {
        x->shape[0] = B;
        x->shape[1] = T;
      }
      for (TensorView* x : {&c.in.initial_state, &c.in.initial_state_bias, &c.final_state, &c.final_state_bias,
                            &c.d_final_state, &c.d_final_state_bias, &c.d_initial_state, &c.d_initial_state_bias}) {
        x->shape[0] = N;
      }
      if (c.mode == kForward) {
        c.d_o = c.dq = c.dk = c.dv = c.deta = {};
      } else {
        c.o = {};
      }
    });
  }
  // The gradients of w and b are sums over nothing.
  Call call(kBackward, false);
  call.d_o = call.d_final_state = call.d_final_state_bias = call.in.initial_state = call.in.initial_state_bias = {};
  call.dq = call.dk = call.dv = call.deta = call.d_initial_state = call.d_initial_state_bias = {};
  for (TensorView* x : {&call.in.q, &call.in.k, &call.in.v, &call.in.eta}) x->shape[0] = 0;
  EXPECT_NO_THROW(call.run());
  for (int64_t i = 0; i < call.H * call.D; ++i) {
    EXPECT_EQ(static_cast<const float*>(call.dw.data)[i], 0);
    EXPECT_EQ(static_cast<const float*>(call.db.data)[i], 0);
  }
}

TEST(TttLinearValid, StepWithoutTokens) {
  Call call(kStep, false);
  for (TensorView* x : {&call.in.q, &call.in.k, &call.in.v, &call.in.eta, &call.o}) x->shape[1] = 0;
  const auto before = call.output_values();
  EXPECT_NO_THROW(call.run());
  EXPECT_TRUE(call.output_values() == before);
}

TEST(TttLinearValid, BroadcastInputs) {
  expect_valid("one token for all", kAllModes, false, [](Call& c) {
    c.in.q.strides = c.in.k.strides = c.in.v.strides = c.in.eta.strides = c.in.w.strides = c.in.b.strides = {};
  });
}

TEST(TttLinearValid, OptionalTensorsAbsent) {
  expect_valid("fewest tensors", kAllModes, false, [](Call& c) {
    c.in.initial_state = c.in.initial_state_bias = c.final_state = c.final_state_bias = {};
    c.d_o = c.d_final_state = c.d_final_state_bias = {};
    c.dq = c.dk = c.dv = c.dw = c.db = c.deta = c.d_initial_state = c.d_initial_state_bias = {};
  });
}

TEST(TttLinearValid, ShapesWithoutUnitAxes) {
  expect_valid("rank 3", kAllModes, false, [](Call& c) {
    c.in.eta = c.input(DType::kBF16, {c.B, c.T, c.H});
    if (c.mode == kStep) {
      c.state_bias = c.output(DType::kF32, {c.kSlots, c.H, c.D});
      c.gradient_bias = c.output(DType::kF32, {c.kSlots, c.H, c.D});
      return;
    }
    c.in.initial_state_bias = c.input(DType::kF32, {c.N, c.H, c.D});
    if (c.mode == kForward) {
      c.final_state_bias = c.output(DType::kF32, {c.N, c.H, c.D});
      return;
    }
    c.deta = c.like(c.in.eta);
    c.d_final_state_bias = c.input(DType::kF32, {c.N, c.H, c.D});
    c.d_initial_state_bias = c.output(DType::kF32, {c.N, c.H, c.D});
  });
}

TEST(TttLinearValid, Types) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    for (Mode mode : {kForward, kBackward, kStep}) {
      Call call(mode, false, dtype);
      EXPECT_NO_THROW(call.run());
      if (mode != kBackward) call.o = call.output(DType::kF32, {call.B, call.T, call.H, call.D});
      EXPECT_NO_THROW(call.run());
    }
  }
  Call call(kStep, false, DType::kF64);
  call.state = call.output(DType::kF64, {call.kSlots, call.H, call.D, call.D});
  call.gradient_bias = call.output(DType::kF64, {call.kSlots, call.H, 1, call.D});
  EXPECT_NO_THROW(call.run());
}

TEST(TttLinearUnsupported, CudaDevice) {
  Call call(kForward, true);
  const Device device{DeviceType::kCuda, 0};
  call.context.device = device;
  for (TensorView* view :
       {&call.in.q, &call.in.k, &call.in.v, &call.in.w, &call.in.b, &call.in.eta, &call.in.initial_state,
        &call.in.initial_state_bias, &call.in.cu_seqlens, &call.o, &call.final_state, &call.final_state_bias}) {
    view->device = device;
  }
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

TEST(TttLinearVerbose, OneLine) {
  std::string line;
  Call call(kForward, false);
  call.context.verbose = true;
  call.context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) += text; };
  call.context.log_user = &line;
  const std::string name = call.run();
  EXPECT_EQ(line.find("fastweight: ttt_linear_forward B=2 T=5 H=3 D=8 N=2 C=16, fp32: ran " + name), 0u) << line;
}

}  // namespace
}  // namespace fastweight
