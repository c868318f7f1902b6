// Malformed calls of every block: the error's code, its text, and that nothing was written. Then unusual calls that are
// valid.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fastweight/fastweight.h"
#include "support/random.h"
#include "tests/blocks/cases.h"

namespace fastweight::test {
namespace {

constexpr double kPoison = 77;

using Spoil = std::function<void(TensorView&)>;

struct NamedSpoil {
  const char* name;
  Spoil spoil;
  bool outputs_only = false;
};

// Each makes any view of any argument wrong.
const std::vector<NamedSpoil>& spoils() {
  static const std::vector<NamedSpoil> all = {
      {"another rank", [](TensorView& view) { view.rank = view.rank == 1 ? 2 : 1; }},
      {"a rank of 6", [](TensorView& view) { view.rank = 6; }},
      {"a negative rank", [](TensorView& view) { view.rank = -1; }},
      {"a longer axis", [](TensorView& view) { ++view.shape[view.rank > 1 ? 1 : 0]; }},
      {"a longer first axis", [](TensorView& view) { ++view.shape[0]; }},
      {"a negative extent", [](TensorView& view) { view.shape[0] = -3; }},
      {"a negative stride", [](TensorView& view) { view.strides[0] = -1; }},
      {"an unknown type", [](TensorView& view) { view.dtype = static_cast<DType>(9); }},
      {"bytes for numbers",
       [](TensorView& view) { view.dtype = view.dtype == DType::kI64 ? DType::kF32 : DType::kI32; }},
      {"no memory", [](TensorView& view) { view.data = nullptr; }},
      {"an odd address", [](TensorView& view) { view.data = static_cast<char*>(view.data) + 1; }},
      {"another device", [](TensorView& view) { view.device.type = DeviceType::kCuda; }},
      {"more than the address space",
       [](TensorView& view) { view.strides[view.rank > 1 ? 1 : 0] = std::numeric_limits<int64_t>::max(); }},
      {"elements that share memory", [](TensorView& view) { view.strides = {}; }, true},
  };
  return all;
}

using Entry = BlockResults (*)(const BlockCase&, const Context&, const support::ViewOf&);

// The call with its view number `position` spoiled; false if the call has fewer.
bool expect_refused(Entry run, const BlockCase& problem, size_t position, const NamedSpoil& spoil) {
  size_t count = 0;
  bool reached = false, spoiled = false;
  std::deque<Tensor> outputs;
  const support::ViewOf view_of = [&](const Tensor& tensor, bool written) {
    TensorView view = tensor.view();
    if (!view.present()) return view;
    if (written) {
      outputs.push_back(tensor);
      outputs.back().fill(kPoison);
      view.data = outputs.back().data();
    }
    if (count++ == position) {
      reached = true;
      spoiled = written || !spoil.outputs_only;
      if (spoiled) spoil.spoil(view);
    }
    return view;
  };
  const std::string what = describe(problem.spec) + ": tensor " + std::to_string(position) + " with " + spoil.name;
  try {
    run(problem, Context(), view_of);
    EXPECT_FALSE(spoiled) << what << " was taken";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_TRUE(spoiled) << what << ": " << text;
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << text;
    EXPECT_NE(text.find(": expected "), std::string::npos) << text;
    EXPECT_NE(text.find(", got "), std::string::npos) << text;
    for (const Tensor& output : outputs) {
      for (double value : output.values()) EXPECT_EQ(value, kPoison) << what;
    }
  }
  return reached;
}

TEST(BlockErrors, EveryTensorIsChecked) {
  for (Block block : kBlocks) {
    for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
      for (bool packed : {false, true}) {
        BlockSpec spec = spec_of(block, 20, 16, gate);
        spec.H = 2;
        spec.HV = 4;
        spec.K = 6;
        spec.V = 5;
        if (packed) spec = with_lengths(spec, {7, 0, 13});
        const BlockCase problem = support::draw(spec, 1);
        for (Entry run : {Entry(support::forward), Entry(support::backward)}) {
          if (block == Block::kChunkLocalCumsum && run == Entry(support::backward)) continue;
          for (const NamedSpoil& spoil : spoils()) {
            for (size_t position = 0; expect_refused(run, problem, position, spoil); ++position) {
            }
          }
        }
      }
    }
  }
}

// Exact words -------------------------------------------------------------------------------------------------------

template <class Call>
void expect_error(const Call& call, const std::string& message) {
  try {
    call();
    ADD_FAILURE() << "expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_EQ(std::string(error.what()), message);
  }
}

class BlockMessages : public ::testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 20, H = 2, HV = 4, K = 8, V = 6, C = 16;
  static Tensor make(std::vector<int64_t> shape, DType dtype = DType::kF32) { return Tensor(dtype, std::move(shape)); }

  void TearDown() override {
    for (const Tensor* output : {&a, &j, &w, &u, &y, &g}) {
      for (double value : output->values()) ASSERT_TRUE(std::isnan(value)) << "an output was written";
    }
  }

  const Context context{};
  Tensor k = make({B, T, H, K}), v = make({B, T, HV, V}), beta = make({B, T, HV}), gates = make({B, T, HV});
  Tensor channels = make({B, T, HV, K}), matrix = make({B, T, HV, C});
  Tensor a = support::poisoned(DType::kF32, {B, T, HV, C}), j = a, w = support::poisoned(DType::kF32, {B, T, HV, K}),
         u = support::poisoned(DType::kF32, {B, T, HV, V}), y = support::poisoned(DType::kF32, {B, T, HV}), g = y;
};

TEST_F(BlockMessages, ChunkLocalCumsum) {
  ChunkLocalCumsum args{gates.view(), {}, 48, false, y.view()};
  expect_error([&] { chunk_local_cumsum(context, args); }, "chunk_size: expected 16, 32 or 64, got 48");
  args.chunk_size = 16;
  args.y = {};
  expect_error([&] { chunk_local_cumsum(context, args); }, "y: expected a tensor, got none");
  args.y = a.view();
  expect_error([&] { chunk_local_cumsum(context, args); }, "y: expected shape [2, 20, 4], got [2, 20, 4, 16]");
  args.y = y.view();
  args.y.strides = {80, 2, 3};
  expect_error(
      [&] { chunk_local_cumsum(context, args); },
      "y: expected strides that step over the axes with smaller ones, got shape [2, 20, 4] with strides [80, 2, 3]");
  args.y = gates.view();
  expect_error([&] { chunk_local_cumsum(context, args); },
               "y: expected memory apart from x, or another slice of its rows, got an overlap of their address ranges");
  args.x = {};
  expect_error([&] { chunk_local_cumsum(context, args); }, "x: expected a tensor, got none");
  Tensor flat = make({B, T});
  args.x = flat.view();
  expect_error([&] { chunk_local_cumsum(context, args); }, "x: expected rank 3 or 4, got shape [2, 20]");
  const Tensor offsets = support::offsets_tensor({0, 20});
  expect_error(
      [&] {
        chunk_local_cumsum(context, {gates.view(), offsets.view(), 16, false, y.view()});
      },
      "cu_seqlens: expected a batch of 1, got a batch of 2");
  Context named;
  named.implementation = "chunk";
  expect_error(
      [&] {
        chunk_local_cumsum(named, {gates.view(), {}, 16, false, y.view()});
      },
      "implementation: expected one of simd, reference, got \"chunk\"");
}

TEST_F(BlockMessages, ScaledDotKkt) {
  ScaledDotKktForward args{{k.view(), beta.view(), gates.view(), {}}, a.view()};
  args.in.k = {};
  expect_error([&] { scaled_dot_kkt_forward(context, args); }, "k: expected a tensor, got none");
  const Tensor three = make({B, T, 3, K}), wide = make({B, T, H, 257});
  args.in.k = three.view();
  expect_error([&] { scaled_dot_kkt_forward(context, args); },
               "k: expected a divisor of the 4 heads of a, got 3 heads");
  args.in.k = wide.view();
  expect_error([&] { scaled_dot_kkt_forward(context, args); },
               "k: head width K: expected a value from 1 to 256, got 257");
  args.in.k = k.view();
  args.in.beta = channels.view();
  expect_error([&] { scaled_dot_kkt_forward(context, args); }, "beta: expected shape [2, 20, 4], got [2, 20, 4, 8]");
  args.in.beta = {};
  args.in.gamma = v.view();
  expect_error([&] { scaled_dot_kkt_forward(context, args); },
               "gamma: expected shape [2, 20, 4, 8], got [2, 20, 4, 6]");
  args.in.gamma = {};
  Tensor rounded = support::poisoned(DType::kBF16, {B, T, HV, C});
  args.a = rounded.view();
  expect_error([&] { scaled_dot_kkt_forward(context, args); }, "a: expected type fp32, got bf16");
  args.a = w.view();
  expect_error([&] { scaled_dot_kkt_forward(context, args); },
               "a: expected a last axis of 16, 32 or 64, got shape [2, 20, 4, 8]");
  ScaledDotKktBackward backward{{k.view(), {}, {}, {}}, matrix.view(), {}, g.view(), {}};
  expect_error([&] { scaled_dot_kkt_backward(context, backward); }, "dbeta: expected none without beta, got a tensor");
  backward.dbeta = {};
  backward.dgamma = g.view();
  expect_error([&] { scaled_dot_kkt_backward(context, backward); },
               "dgamma: expected none without gamma, got a tensor");
}

TEST_F(BlockMessages, SolveTril) {
  const Tensor integers = make({B, T, HV, C}, DType::kI32);
  expect_error(
      [&] {
        solve_tril_forward(context, {integers.view(), {}, j.view()});
      },
      "a: expected a floating type, got int32");
  expect_error(
      [&] {
        solve_tril_forward(context, {channels.view(), {}, j.view()});
      },
      "a: expected a last axis of 16, 32 or 64, got shape [2, 20, 4, 8]");
  expect_error(
      [&] {
        solve_tril_forward(context, {matrix.view(), {}, w.view()});
      },
      "j: expected shape [2, 20, 4, 16], got [2, 20, 4, 8]");
  expect_error(
      [&] {
        solve_tril_backward(context, {matrix.view(), {}, {}, j.view()});
      },
      "dj: expected a tensor, got none");
  const Tensor packed = make({1, T, HV, C}), offsets = support::offsets_tensor({0, 9, 7, T});
  Tensor out = support::poisoned(DType::kF32, {1, T, HV, C});
  expect_error(
      [&] {
        solve_tril_forward(context, {packed.view(), offsets.view(), out.view()});
      },
      "cu_seqlens: expected at least 9 at position 2, got 7");
}

TEST_F(BlockMessages, Wy) {
  WyForward args{{k.view(), v.view(), beta.view(), gates.view(), matrix.view(), {}}, w.view(), u.view()};
  const Tensor rounded = make({B, T, HV, V}, DType::kBF16);
  args.in.v = rounded.view();
  expect_error([&] { wy_forward(context, args); }, "v: expected type fp32, got bf16");
  args.in.v = v.view();
  args.in.j = {};
  expect_error([&] { wy_forward(context, args); }, "j: expected a tensor, got none");
  args.in.j = matrix.view();
  args.w = u.view();
  expect_error([&] { wy_forward(context, args); }, "w: expected shape [2, 20, 4, 8], got [2, 20, 4, 6]");
  WyBackward backward{args.in, w.view(), u.view(), {}, {}, {}, {}, y.view()};
  expect_error([&] { wy_backward(context, backward); }, "da: expected shape [2, 20, 4, 16], got [2, 20, 4]");
}

TEST_F(BlockMessages, L2Norm) {
  for (const auto& eps : {std::pair(0.0, "0"), std::pair(1e-39, "1e-39"), std::pair(1e-50, "1e-50")}) {
    expect_error(
        [&] {
          l2norm_forward(context, {gates.view(), eps.first, y.view(), {}});
        },
        std::string("eps: expected a finite number above 0 and normal in fp32 (at least 2^-126), got ") + eps.second);
  }
  const Tensor flat = make({B});
  expect_error(
      [&] {
        l2norm_forward(context, {flat.view(), 1e-6, y.view(), {}});
      },
      "x: expected rank 2 to 5, got shape [2]");
  const Tensor none = make({B, 0});
  expect_error(
      [&] {
        l2norm_forward(context, {none.view(), 1e-6, none.view(), {}});
      },
      "x: expected at least one element per row, got shape [2, 0]");
  expect_error(
      [&] {
        l2norm_forward(context, {gates.view(), 1e-6, y.view(), g.view()});
      },
      "rstd: expected shape [2, 20], got [2, 20, 4]");
  expect_error(
      [&] {
        l2norm_backward(context, {gates.view(), {}, beta.view(), y.view()});
      },
      "rstd: expected a tensor, got none");
}

// The smallest eps is one in fp32, too: a row of zeros stays one.
TEST(BlockValid, SmallestEps) {
  for (const std::string& name : implementations(Block::kL2Norm, "forward")) {
    const Tensor x(DType::kF32, {3, 20});
    Tensor y = support::poisoned(DType::kF32, {3, 20});
    l2norm_forward(context_for(name), {x.view(), std::numeric_limits<float>::min(), y.view(), {}});
    for (double value : y.values()) EXPECT_EQ(value, 0) << name;
  }
}

TEST_F(BlockMessages, GateActivation) {
  const Tensor a_log = make({HV}), dt_bias = make({HV, K}), small = make({K});
  GateActivationForward args{{gates.view(), {}, {}, {}}, {}, g.view()};
  expect_error([&] { gate_activation_forward(context, args); },
               "a_log: expected a tensor without lower_bound, got none");
  args.in.a_log = small.view();
  expect_error([&] { gate_activation_forward(context, args); }, "a_log: expected shape [4], got [8]");
  args.in.a_log = a_log.view();
  args.in.dt_bias = dt_bias.view();
  expect_error([&] { gate_activation_forward(context, args); }, "dt_bias: expected shape [4], got [4, 8]");
  args.in.dt_bias = {};
  args.options.lower_bound = -5;
  expect_error([&] { gate_activation_forward(context, args); },
               "lower_bound: expected none without a gate per channel, got -5");
  args.in.x = channels.view();
  args.options.lower_bound = 1;
  expect_error([&] { gate_activation_forward(context, args); }, "lower_bound: expected a finite number below 0, got 1");
  args.options.lower_bound = GateActivationOptions::kUnset;
  args.options.chunk_size = 17;
  expect_error([&] { gate_activation_forward(context, args); }, "chunk_size: expected 16, 32 or 64, got 17");
  GateActivationBackward backward{{channels.view(), a_log.view(), {}, {}}, {}, {}, {}, {}, {}};
  expect_error([&] { gate_activation_backward(context, backward); }, "dg: expected a tensor, got none");
  backward.dg = channels.view();
  backward.ddt_bias = dt_bias.view();
  expect_error([&] { gate_activation_backward(context, backward); },
               "ddt_bias: expected none without dt_bias, got a tensor");
}

// Unusual and valid -------------------------------------------------------------------------------------------------

TEST(BlockCorners, HugeEmptyBatchesCostNothing) {
  const int64_t kMany = int64_t{1} << 40;
  const TensorView none3 = TensorView::dense(static_cast<float*>(nullptr), {kMany, 0, 2});
  const TensorView none4 = TensorView::dense(static_cast<float*>(nullptr), {kMany, 0, 2, 16});
  for (const char* name : {"simd", "reference"}) {
    const Context context = context_for(name);
    EXPECT_EQ(chunk_local_cumsum(context, {none3, {}, 16, false, none3}), name);
    EXPECT_EQ(solve_tril_forward(context, {none4, {}, none4}), name);
    EXPECT_EQ(wy_forward(context, {{none4, none4, none3, {}, none4, {}}, none4, none4}), name);
    EXPECT_EQ(l2norm_forward(context, {none4, 1e-6, none4, none3}), name);
    // The sums over no tokens are 0.
    Tensor a_log(DType::kF32, {2}), da_log = support::poisoned(DType::kF32, {2});
    GateActivationBackward args;
    args.in.x = args.dg = none3;
    args.in.a_log = a_log.view();
    args.da_log = da_log.view();
    EXPECT_EQ(gate_activation_backward(context, args), name);
    EXPECT_EQ(da_log[0], 0);
    EXPECT_EQ(da_log[1], 0);
  }
}

TEST(BlockCorners, EachOutputAlone) {
  for (Block block : {Block::kScaledDotKkt, Block::kWy, Block::kGateActivation}) {
    for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
      const BlockCase problem = support::draw(spec_of(block, 40, 16, gate), 1);
      for (const std::string& name : implementations(block, "backward")) {
        const BlockResults all = support::backward(problem, context_for(name));
        for (size_t only = 0; only < all.tensors.size(); ++only) {
          size_t position = 0;
          const BlockResults one =
              support::backward(problem, context_for(name), [&](const Tensor& tensor, bool written) {
                return written && position++ != only ? TensorView() : tensor.view();
              });
          EXPECT_TRUE(support::same_bits(one.tensors[only].second, all.tensors[only].second))
              << name << " " << all.tensors[only].first << "\n  " << describe(problem.spec);
        }
      }
    }
  }
}

// One gradient of W and U left out is one of zeros.
TEST(BlockCorners, AbsentGradientsAreZero) {
  for (const std::string& name : implementations(Block::kWy, "backward")) {
    BlockCase problem = support::draw(spec_of(Block::kWy, 40, 16, Gate::kPerChannel), 1);
    for (Tensor BlockCase::*gradient : {&BlockCase::d_first, &BlockCase::d_second}) {
      BlockCase zero = problem, absent = problem;
      (zero.*gradient).fill(0);
      absent.*gradient = {};
      expect_same_bits(support::backward(absent, context_for(name)), support::backward(zero, context_for(name)));
    }
  }
}

}  // namespace
}  // namespace fastweight::test
