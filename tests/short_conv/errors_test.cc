// Every kind of malformed call, for the three modes: the error's code, its text, and that nothing was written. Then the
// unusual calls that are valid.
#include <gtest/gtest.h>

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
constexpr const char* name_of(Mode mode) {
  return mode == kForward ? "forward" : mode == kBackward ? "backward" : "step";
}

// A valid call of one mode with all its tensors, to be spoiled in one place. B = 2, T = 5, or, packed, B = 1, T = 10
// and three sequences of which the second is empty.
class Call {
 public:
  static constexpr int64_t D = 6, W = 4, kSlots = 5;

  explicit Call(Mode mode_, bool packed = false, DType dtype = DType::kF32)
      : mode(mode_), B(packed ? 1 : 2), T(packed ? 10 : 5), N(packed ? 3 : 2) {
    in.x = input(dtype, {B, T, D});
    in.w = input(DType::kF32, {D, W});
    in.bias = input(DType::kF32, {D});
    if (packed) in.cu_seqlens = integers(DType::kI64, {0, 4, 4, 10});
    if (mode == kStep) {
      state = output(dtype, {kSlots, D, W});
      state_indices = integers(DType::kI32, packed ? std::vector<double>{3, -1, 0} : std::vector<double>{3, 0});
    } else {
      in.initial_state = input(dtype, {N, D, W});
    }
    if (mode == kBackward) {
      dy = input(dtype, {B, T, D});
      d_final_state = input(dtype, {N, D, W});
      dx = output(dtype, {B, T, D});
      dw = output(DType::kF32, {D, W});
      dbias = output(DType::kF32, {D});
      d_initial_state = output(dtype, {N, D, W});
    } else {
      residual = input(dtype, {B, T, D});
      y = output(dtype, {B, T, D});
    }
    if (mode == kForward) final_state = output(dtype, {N, D, W});
  }

  TensorView input(DType dtype, const std::vector<int64_t>& shape) { return keep(inputs_, dtype, shape, 0.25); }
  TensorView output(DType dtype, const std::vector<int64_t>& shape) { return keep(outputs_, dtype, shape, 77); }
  TensorView integers(DType dtype, const std::vector<double>& values) {
    inputs_.emplace_back(dtype, std::vector<int64_t>{static_cast<int64_t>(values.size())}, values);
    return inputs_.back().view();
  }

  std::string run() const {
    if (mode == kForward) return short_conv_forward(context, {in, options, residual, y, final_state});
    if (mode == kStep) return short_conv_step(context, {in, options, residual, state, state_indices, y});
    return short_conv_backward(context, {in, options, dy, d_final_state, dx, dw, dbias, d_initial_state});
  }

  std::vector<std::vector<double>> output_values() const {
    std::vector<std::vector<double>> values;
    for (const Tensor& tensor : outputs_) values.push_back(tensor.values());
    return values;
  }

  Mode mode;
  int64_t B, T, N;
  Context context;
  ShortConvInputs in;
  ShortConvOptions options;
  TensorView residual, y, final_state, dy, d_final_state, dx, dw, dbias, d_initial_state, state, state_indices;

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
  bool packed = false;
};

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
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
        EXPECT_EQ(std::string(error.what()).find(row.argument + ":"), 0u) << error.what();
        EXPECT_NE(std::string(error.what()).find(": expected "), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find(", got "), std::string::npos) << error.what();
      }
      EXPECT_TRUE(call.output_values() == before);
    }
  }
}

std::function<void(Call&)> input_as(TensorView Call::*field, DType dtype, const std::vector<int64_t>& shape) {
  return [=](Call& c) { c.*field = c.input(dtype, shape); };
}
std::function<void(Call&)> input_as(TensorView ShortConvInputs::*field, DType dtype,
                                    const std::vector<int64_t>& shape) {
  return [=](Call& c) { c.in.*field = c.input(dtype, shape); };
}
std::function<void(Call&)> output_as(TensorView Call::*field, DType dtype, const std::vector<int64_t>& shape) {
  return [=](Call& c) { c.*field = c.output(dtype, shape); };
}

// What is wrong with any tensor.
TEST(ShortConvErrors, Views) {
  std::vector<Malformed> rows;
  const auto add = [&](const std::string& name, const std::function<void(TensorView&)>& spoil) {
    rows.push_back({name + " x", "x", [=](Call& c) { spoil(c.in.x); }});
    rows.push_back({name + " w", "w", [=](Call& c) { spoil(c.in.w); }});
    rows.push_back(
        {name + " initial state", "initial_state", [=](Call& c) { spoil(c.in.initial_state); }, kForward | kBackward});
    rows.push_back({name + " residual", "residual", [=](Call& c) { spoil(c.residual); }, kForward | kStep});
    rows.push_back({name + " y", "y", [=](Call& c) { spoil(c.y); }, kForward | kStep});
    rows.push_back({name + " final state", "final_state", [=](Call& c) { spoil(c.final_state); }, kForward});
    rows.push_back({name + " dy", "dy", [=](Call& c) { spoil(c.dy); }, kBackward});
    rows.push_back({name + " dx", "dx", [=](Call& c) { spoil(c.dx); }, kBackward});
    rows.push_back({name + " dw", "dw", [=](Call& c) { spoil(c.dw); }, kBackward});
    rows.push_back({name + " state", "state", [=](Call& c) { spoil(c.state); }, kStep});
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  add("null", [](TensorView& x) { x.data = nullptr; });
  add("rank zero", [](TensorView& x) { x.rank = 0; });
  add("rank one", [](TensorView& x) { x.rank = 1; });
  add("rank negative", [](TensorView& x) { x.rank = -1; });
  add("rank out of range", [](TensorView& x) { x.rank = kMaxRank + 1; });
  add("extent negative", [](TensorView& x) { x.shape[1] = -1; });
  add("extents overflow", [](TensorView& x) { x.shape[0] = x.shape[1] = kHuge; });
  add("stride negative", [](TensorView& x) { x.strides[0] = -1; });
  add("stride huge", [](TensorView& x) { x.strides[1] = kHuge; });
  add("type unknown", [](TensorView& x) { x.dtype = static_cast<DType>(17); });
  add("type integer", [](TensorView& x) { x.dtype = DType::kI32; });
  add("unaligned", [](TensorView& x) { x.data = static_cast<std::byte*>(x.data) + 2; });
  add("on another device", [](TensorView& x) { x.device = {DeviceType::kCuda, 0}; });
  expect_invalid(rows);
}

TEST(ShortConvErrors, Inputs) {
  constexpr int64_t D = Call::D, W = Call::W;
  expect_invalid({
      {"x absent", "x", [](Call& c) { c.in.x = {}; }},
      {"w absent", "w", [](Call& c) { c.in.w = {}; }},
      {"no channels", "x", input_as(&ShortConvInputs::x, DType::kF32, {2, 5, 0})},
      {"w of another count", "w", input_as(&ShortConvInputs::w, DType::kF32, {D + 1, W})},
      {"w transposed", "w", input_as(&ShortConvInputs::w, DType::kF32, {W, D})},
      {"w of rank 3", "w", input_as(&ShortConvInputs::w, DType::kF32, {D, 1, W})},
      {"W of 0", "w", input_as(&ShortConvInputs::w, DType::kF32, {D, 0})},
      {"W of 17", "w", input_as(&ShortConvInputs::w, DType::kF32, {D, 17})},
      {"bias of another count", "bias", input_as(&ShortConvInputs::bias, DType::kF32, {D + 1})},
      {"bias of integers", "bias", input_as(&ShortConvInputs::bias, DType::kI32, {D})},
      {"initial state of another count", "initial_state",
       input_as(&ShortConvInputs::initial_state, DType::kF32, {3, D, W}), kForward | kBackward},
      {"initial state of another width", "initial_state",
       input_as(&ShortConvInputs::initial_state, DType::kF32, {2, D, W - 1}), kForward | kBackward},
      {"initial state in a step", "initial_state", input_as(&ShortConvInputs::initial_state, DType::kF32, {2, D, W}),
       kStep},
      {"scratch memory beyond 64 bits", "x",
       [](Call& c) {
         c.in.x.shape[0] = int64_t{1} << 50;
         c.in.x.strides[0] = 0;
       }},
      {"activation unknown", "activation", [](Call& c) { c.options.activation = static_cast<Activation>(2); }},
      {"threads negative", "num_threads", [](Call& c) { c.context.num_threads = -1; }},
      {"implementation unknown", "implementation", [](Call& c) { c.context.implementation = "nonsense"; }},
  });
}

TEST(ShortConvErrors, Sequences) {
  const auto cu = [](std::vector<double> values) {
    return [=](Call& c) { c.in.cu_seqlens = c.integers(DType::kI32, values); };
  };
  expect_invalid({
      {"batch of 2", "cu_seqlens", cu({0, 2, 5})},
      {"first not 0", "cu_seqlens", cu({1, 4, 4, 10}), kAllModes, true},
      {"decreasing", "cu_seqlens", cu({0, 4, 3, 10}), kAllModes, true},
      {"last too small", "cu_seqlens", cu({0, 4, 4, 9}), kAllModes, true},
      {"last too large", "cu_seqlens", cu({0, 4, 4, 11}), kAllModes, true},
      {"floating", "cu_seqlens", [](Call& c) { c.in.cu_seqlens.dtype = DType::kF64; }, kAllModes, true},
  });
}

TEST(ShortConvErrors, Outputs) {
  constexpr int64_t D = Call::D, W = Call::W;
  const auto slots = [](std::vector<double> values) {
    return [=](Call& c) { c.state_indices = c.integers(DType::kI32, values); };
  };
  expect_invalid({
      {"y absent", "y", [](Call& c) { c.y = {}; }, kForward | kStep},
      {"y of fp64", "y", output_as(&Call::y, DType::kF64, {2, 5, D}), kForward | kStep},
      {"y of bf16", "y", output_as(&Call::y, DType::kBF16, {2, 5, D}), kForward | kStep},
      {"y of another shape", "y", output_as(&Call::y, DType::kF32, {2, 5, D + 1}), kForward | kStep},
      {"y broadcast", "y", [](Call& c) { c.y.strides[1] = 0; }, kForward | kStep},
      {"y over x", "y", [](Call& c) { c.y = c.in.x; }, kForward | kStep},
      {"residual of another shape", "residual", input_as(&Call::residual, DType::kF32, {2, 4, D}), kForward | kStep},
      {"final state over the initial state", "final_state", [](Call& c) { c.final_state = c.in.initial_state; },
       kForward},
      {"final state of bf16", "final_state", output_as(&Call::final_state, DType::kBF16, {2, D, W}), kForward},
      {"dy of another shape", "dy", input_as(&Call::dy, DType::kF32, {2, 5, D + 1}), kBackward},
      {"dy of bf16", "dy", input_as(&Call::dy, DType::kBF16, {2, 5, D}), kBackward},
      {"d_final_state of another count", "d_final_state", input_as(&Call::d_final_state, DType::kF32, {3, D, W}),
       kBackward},
      {"dx of bf16", "dx", output_as(&Call::dx, DType::kBF16, {2, 5, D}), kBackward},
      {"dx over dy", "dx", [](Call& c) { c.dx = c.dy; }, kBackward},
      {"dw of another shape", "dw", output_as(&Call::dw, DType::kF32, {D, W + 1}), kBackward},
      {"dbias without bias", "dbias", [](Call& c) { c.in.bias = {}; }, kBackward},
      {"d_initial_state without initial_state", "d_initial_state", [](Call& c) { c.in.initial_state = {}; }, kBackward},
      {"state absent", "state", [](Call& c) { c.state = {}; }, kStep},
      {"state of bf16", "state", output_as(&Call::state, DType::kBF16, {5, D, W}), kStep},
      {"state without indices", "state", [](Call& c) { c.state_indices = {}; }, kStep},
      {"slot twice", "state_indices", slots({1, 1}), kStep},
      {"slot too large", "state_indices", slots({1, 5}), kStep},
      {"slot below -1", "state_indices", slots({-2, 1}), kStep},
      {"slots of another count", "state_indices", slots({1, 2, 3}), kStep},
  });
}

TEST(ShortConvErrors, MessageShowsBothSides) {
  Call call(kForward);
  call.in.w = call.input(DType::kF32, {7, 4});
  try {
    call.run();
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "w: expected shape [6, 4], got [7, 4]");
  }
}

TEST(ShortConvErrors, OutOfMemory) {
  for (Mode mode : {kForward, kBackward, kStep}) {
    Call call(mode);
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

TEST(ShortConvErrors, Fp64RunsOnTheReferenceOnly) {
  for (Mode mode : {kForward, kBackward, kStep}) {
    Call call(mode, false, DType::kF64);
    EXPECT_EQ(call.run(), "reference");
    call.context.implementation = "direct";
    try {
      call.run();
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    }
  }
}

TEST(ShortConvValid, Unchanged) {
  for (bool packed : {false, true}) {
    for (Mode mode : {kForward, kBackward, kStep}) EXPECT_EQ(Call(mode, packed).run(), "direct");
  }
}

TEST(ShortConvValid, FewestTensors) {
  for (Mode mode : {kForward, kBackward, kStep}) {
    Call call(mode);
    call.in.bias = call.in.initial_state = call.residual = call.final_state = {};
    call.dy = call.d_final_state = call.dx = call.dw = call.dbias = call.d_initial_state = {};
    EXPECT_NO_THROW(call.run());
  }
}

TEST(ShortConvValid, NothingToDo) {
  for (const int64_t B : {int64_t{0}, int64_t{1} << 40}) {
    Call call(kBackward);
    call.in.initial_state = call.d_final_state = call.d_initial_state = call.dy = call.dx = {};
    call.in.x.shape = {B, 0, call.D};
    EXPECT_NO_THROW(call.run());
    for (int64_t i = 0; i < call.D * call.W; ++i) EXPECT_EQ(static_cast<const float*>(call.dw.data)[i], 0);
    for (int64_t i = 0; i < call.D; ++i) EXPECT_EQ(static_cast<const float*>(call.dbias.data)[i], 0);
  }
  Call step(kStep);
  for (TensorView* x : {&step.in.x, &step.residual, &step.y}) x->shape[1] = 0;
  const auto before = step.output_values();
  EXPECT_NO_THROW(step.run());
  EXPECT_TRUE(step.output_values() == before);
}

TEST(ShortConvVerbose, OneLine) {
  std::string line;
  Call call(kForward);
  call.context.verbose = true;
  call.context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) += text; };
  call.context.log_user = &line;
  call.run();
  EXPECT_EQ(line, "fastweight: short_conv_forward B=2 T=5 D=6 W=4 N=2, fp32: ran direct");
}

}  // namespace
}  // namespace fastweight
