// Every block and implementation against the reference in double: lengths, widths, heads, types, options, strides.
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "tests/blocks/cases.h"

namespace fastweight::test {
namespace {

class Blocks : public ::testing::TestWithParam<Block> {};

INSTANTIATE_TEST_SUITE_P(All, Blocks, ::testing::ValuesIn(kBlocks),
                         [](const auto& param) { return name_of(param.param); });

bool has_gate(Block block) { return block != Block::kL2Norm; }

std::vector<Gate> gates_of(Block block) {
  if (block == Block::kL2Norm || block == Block::kSolveTril) return {Gate::kPerHead};
  if (block == Block::kChunkLocalCumsum || block == Block::kGateActivation) return {Gate::kPerHead, Gate::kPerChannel};
  return {Gate::kNone, Gate::kPerHead, Gate::kPerChannel};
}

TEST_P(Blocks, LengthsAroundChunks) {
  for (Gate gate : gates_of(GetParam())) {
    for (int64_t C : {16, 32, 64}) {
      for (int64_t T : first<int64_t>({0, 1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 150}, 6)) {
        BlockSpec spec = spec_of(GetParam(), T, C, gate);
        spec.B = 2;
        spec.K = 20;
        spec.V = 12;
        check(spec);
      }
    }
  }
}

TEST_P(Blocks, Widths) {
  for (Gate gate : gates_of(GetParam())) {
    for (int64_t K : first<int64_t>({1, 3, 8, 17, 64, 100, 256}, 4)) {
      BlockSpec spec = spec_of(GetParam(), 70, 64, gate);
      spec.K = K;
      spec.V = K == 256 ? 5 : 257 - K;
      spec.H = spec.HV = 2;
      check(spec);
    }
  }
}

TEST_P(Blocks, VariableLengths) {
  for (Gate gate : gates_of(GetParam())) {
    for (int64_t C : {16, 64}) {
      check(with_lengths(spec_of(GetParam(), 0, C, gate), {0, 1, 70, 0, 0, 16, 64, 5, 0}));
      check(with_lengths(spec_of(GetParam(), 0, C, gate), {0, 0}));
    }
  }
}

TEST_P(Blocks, GroupedHeads) {
  for (Gate gate : gates_of(GetParam())) {
    BlockSpec spec = spec_of(GetParam(), 50, 32, gate);
    spec.H = 2;
    spec.HV = 6;
    check(spec);
  }
}

TEST_P(Blocks, Types) {
  for (Gate gate : gates_of(GetParam())) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      BlockSpec spec = spec_of(GetParam(), 90, 64, gate);
      spec.K = 40;
      spec.H = spec.HV = 2;
      spec.dtype = dtype;
      check(spec);
    }
  }
}

TEST_P(Blocks, Options) {
  for (Gate gate : gates_of(GetParam())) {
    BlockSpec spec = spec_of(GetParam(), 70, 64, gate);
    spec.beta = false;
    spec.reverse = true;
    spec.dt_bias = false;
    check(spec);
    if (GetParam() != Block::kGateActivation) continue;
    spec.C = 0;  // no sum
    check(spec);
    check(with_lengths(spec, {3, 0, 100}));
    if (gate != Gate::kPerChannel) continue;
    for (bool a_log : {false, true}) {
      for (int64_t C : {0, 16}) {
        spec.lower_bound = true;
        spec.a_log = a_log;
        spec.dt_bias = true;
        spec.C = C;
        check(spec);
      }
    }
  }
}

// A thousandfold decay: factors run through the whole range of fp32 and reach 0; nothing becomes NaN.
TEST_P(Blocks, StrongGates) {
  if (!has_gate(GetParam())) return;
  for (Gate gate : gates_of(GetParam())) {
    for (double scale : {30.0, 3000.0}) {
      BlockSpec spec = spec_of(GetParam(), 70, 64, gate);
      spec.gate_scale = scale;
      check(spec);
    }
  }
}

TEST_P(Blocks, StridedTensors) {
  for (Gate gate : gates_of(GetParam())) {
    for (Layout layout : kLayouts) {
      BlockSpec spec = spec_of(GetParam(), 40, 32, gate);
      spec.B = 2;
      spec.H = 2;
      spec.HV = 4;
      const BlockCase problem = support::draw(spec, 1);
      for (const char* mode : {"forward", "backward"}) {
        if (GetParam() == Block::kChunkLocalCumsum && std::string(mode) == "backward") continue;
        const auto run = std::string(mode) == "forward" ? support::forward : support::backward;
        for (const std::string& name : implementations(GetParam(), mode)) {
          const BlockResults dense = run(problem, context_for(name), support::dense_view);
          std::deque<StridedTensor> inputs, outputs;
          run(problem, context_for(name), [&](const Tensor& tensor, bool written) {
            return (written ? outputs : inputs).emplace_back(tensor, layout).view();
          });
          ASSERT_EQ(outputs.size(), dense.tensors.size());
          for (size_t i = 0; i < outputs.size(); ++i) {
            EXPECT_TRUE(outputs[i].guards_intact()) << name << " wrote outside " << dense.tensors[i].first;
            EXPECT_TRUE(support::same_bits(outputs[i].dense(), dense.tensors[i].second))
                << name << " " << mode << " " << dense.tensors[i].first << "\n  " << describe(spec);
          }
        }
      }
    }
  }
}

// One number for all tokens, with strides of 0.
TEST_P(Blocks, BroadcastInputs) {
  BlockSpec spec = spec_of(GetParam(), 40, 16, Gate::kPerHead);
  const BlockCase problem = support::draw(spec, 1);
  for (const std::string& name : implementations(GetParam(), "forward")) {
    const auto broadcast = [](const Tensor& tensor, bool written) {
      TensorView view = tensor.view();
      if (!written && view.present() && view.dtype != DType::kI64) view.strides = {};
      return view;
    };
    BlockCase equal = problem;
    for (Tensor* tensor :
         {&equal.x, &equal.k, &equal.v, &equal.beta, &equal.gamma, &equal.a, &equal.j, &equal.a_log, &equal.dt_bias}) {
      if (tensor->present()) tensor->fill((*tensor)[0]);
    }
    const BlockResults expected = support::forward(equal, context_for(name));
    expect_same_bits(support::forward(problem, context_for(name), broadcast), expected);
  }
}

// Two runs, any number of threads, which on a device means: again.
TEST_P(Blocks, SameBitsOnAnyThreads) {
  const bool on_cpu = device().type == DeviceType::kCpu;
  for (Gate gate : gates_of(GetParam())) {
    BlockSpec spec = spec_of(GetParam(), on_cpu ? 2300 : 300, 32, gate);
    spec.H = 2;
    spec.HV = 4;
    spec.K = 24;
    const BlockCase problem = support::draw(spec, 3);
    for (const char* mode : {"forward", "backward"}) {
      if (GetParam() == Block::kChunkLocalCumsum && std::string(mode) == "backward") continue;
      const auto run = std::string(mode) == "forward" ? support::forward : support::backward;
      for (const std::string& name : implementations(GetParam(), mode)) {
        if (name == "reference" && reduced()) continue;
        const BlockResults expected = run(problem, context_for(name, 1), support::dense_view);
        for (int threads : on_cpu ? first<int>({5, 1, 2}, 1) : std::vector{1}) {
          expect_same_bits(run(problem, context_for(name, threads), support::dense_view), expected, mode);
        }
      }
    }
  }
}

// The sums over all tokens are another matter.
bool is_per_token(const std::string& name) { return name != "da_log" && name != "ddt_bias"; }

TEST_P(Blocks, SameBitsAloneAndPacked) {
  for (Gate gate : gates_of(GetParam())) {
    const std::vector<int64_t> lengths = {37, 0, 64, 1, 100};
    const BlockSpec packed_spec = with_lengths(spec_of(GetParam(), 0, 32, gate), lengths);
    const BlockCase packed = support::draw(packed_spec, 5);
    for (const char* mode : {"forward", "backward"}) {
      if (GetParam() == Block::kChunkLocalCumsum && std::string(mode) == "backward") continue;
      const auto run = std::string(mode) == "forward" ? support::forward : support::backward;
      for (const std::string& name : implementations(GetParam(), mode)) {
        const BlockResults whole = run(packed, context_for(name), support::dense_view);
        for (size_t n = 0; n < lengths.size(); ++n) {
          const int64_t begin = packed_spec.cu_seqlens[n], end = packed_spec.cu_seqlens[n + 1];
          BlockCase alone = packed;
          alone.spec.cu_seqlens.clear();
          alone.spec.T = end - begin;
          alone.cu_seqlens = {};
          for (Tensor* tensor : {&alone.x, &alone.k, &alone.v, &alone.beta, &alone.gamma, &alone.a, &alone.j, &alone.y,
                                 &alone.rstd, &alone.d_first, &alone.d_second}) {
            *tensor = slice(*tensor, 1, begin, end);
          }
          const BlockResults part = run(alone, context_for(name), support::dense_view);
          for (const auto& [tensor_name, tensor] : part.tensors) {
            if (!is_per_token(tensor_name)) continue;
            EXPECT_TRUE(support::same_bits(tensor, slice(whole[tensor_name], 1, begin, end)))
                << name << " " << tensor_name << " of sequence " << n << "\n  " << describe(packed_spec);
          }
        }
      }
    }
  }
}

// fp64 tensors run on the reference, and the lists say so.
TEST_P(Blocks, OnlyTheReferenceTakesDoubles) {
  BlockSpec spec = spec_of(GetParam(), 20, 16);
  spec.dtype = DType::kF64;
  const BlockCase problem = support::draw(spec, 1);
  EXPECT_EQ(support::forward(problem, Context()).implementation, "reference");
  for (const std::string& name : implementations(GetParam(), "forward")) {
    if (name == "reference") continue;
    try {
      support::forward(problem, context_for(name));
      FAIL() << name << " took fp64";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(error.what()).find("fp64"), std::string::npos) << error.what();
    }
  }
}

TEST_P(Blocks, ChoosesTheFirst) {
  const std::vector<std::string> names = implementations(GetParam(), "forward");
  EXPECT_EQ(support::forward(support::draw(spec_of(GetParam(), 20, 16), 1), context_for("")).implementation, names[0]);
  EXPECT_EQ(names[0], device().type == DeviceType::kCpu ? "simd" : "direct");
  if (device().type == DeviceType::kCpu) {
    EXPECT_EQ(names.back(), "reference");
  }
}

}  // namespace
}  // namespace fastweight::test
