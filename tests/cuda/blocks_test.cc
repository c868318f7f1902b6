// What is special about the building blocks on a CUDA device: graphs, contents that the host cannot check, many
// sequences. The cases of tests/blocks run on the device as well, see tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/blocks/cases.h"
#include "tests/cuda/testing.h"

namespace fastweight::test {
namespace {

using support::DeviceCopy;
using support::DeviceGraph;
using support::DeviceStream;
using support::draw;

class CudaBlocks : public ::testing::TestWithParam<Block> {
 protected:
  static std::vector<Gate> gates() {
    const bool gamma = GetParam() == Block::kScaledDotKkt || GetParam() == Block::kWy;
    return gamma ? std::vector<Gate>{Gate::kNone, Gate::kPerHead, Gate::kPerChannel}
                 : std::vector<Gate>{Gate::kPerHead, Gate::kPerChannel};
  }
};

INSTANTIATE_TEST_SUITE_P(All, CudaBlocks, ::testing::ValuesIn(kBlocks),
                         [](const auto& param) { return name_of(param.param); });

// The problem of the first tokens, cut at these offsets.
BlockCase first_tokens(const BlockCase& problem, const std::vector<int64_t>& offsets) {
  BlockCase part = problem;
  part.spec.T = offsets.back();
  part.spec.cu_seqlens = offsets;
  part.cu_seqlens = offsets_of(offsets);
  for (Tensor* tensor : {&part.x, &part.k, &part.v, &part.beta, &part.gamma, &part.a, &part.j, &part.y, &part.rstd,
                         &part.d_first, &part.d_second}) {
    *tensor = slice(*tensor, 1, 0, offsets.back());
  }
  return part;
}

// One capture serves any lengths that fit: the same bits as a call of its own, and nothing else written.
TEST_P(CudaBlocks, GraphReplaysWithOtherLengths) {
  if (GetParam() == Block::kL2Norm) return;  // knows no sequences
  constexpr int64_t kTokens = 90;
  for (Gate gate : gates()) {
    BlockSpec spec = with_lengths(spec_of(GetParam(), 0, 16, gate), {30, 30, 15, 15});
    spec.H = 1;
    spec.HV = 2;
    const BlockCase problem = draw(spec, 1);
    std::vector<std::unique_ptr<DeviceCopy>> copies;
    std::vector<DeviceCopy*> outputs;
    DeviceCopy* offsets = nullptr;
    const support::PreparedBlock call = support::prepare_forward(problem, [&](const Tensor& tensor, bool written) {
      DeviceCopy* copy = copies.emplace_back(std::make_unique<DeviceCopy>(tensor, kCuda)).get();
      if (written) outputs.push_back(copy);
      if (&tensor == &problem.cu_seqlens) offsets = copy;
      return copy->view();
    });
    const DeviceStream stream;
    Context context = context_for("direct");
    context.stream = stream.get();
    const DeviceGraph graph(stream, [&] { EXPECT_EQ(call.enqueue(context), "direct"); });
    for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
             {0, 30, 60, 75, 90}, {0, 0, 1, 89, 90}, {0, 16, 16, 16, 17}, {0, 0, 0, 0, 0}, {0, 3, 35, 67, 70}}) {
      offsets->set(offsets_of(lengths));
      for (DeviceCopy* output : outputs) poison(*output);
      graph.launch(stream);
      stream.wait();
      const BlockResults expected = support::forward(first_tokens(problem, lengths), context_for("direct"));
      for (size_t i = 0; i < outputs.size(); ++i) {
        const Tensor all = outputs[i]->get();
        const auto& [name, wanted] = expected.tensors[i];
        EXPECT_TRUE(support::same_bits(slice(all, 1, 0, lengths.back()), wanted))
            << name << " of " << lengths.back() << " tokens\n  " << describe(spec);
        for (double value : slice(all, 1, lengths.back(), kTokens).values()) ASSERT_TRUE(std::isnan(value)) << name;
      }
    }
  }
}

// More sequences than one tile of the chunk count, many of them empty.
TEST_P(CudaBlocks, ThousandsOfSequences) {
  Dice dice(5);
  std::vector<int64_t> lengths;
  for (int n = 0; n < 1500; ++n) lengths.push_back(dice.chance(30) ? 0 : dice.chance(5) ? 20 : dice.between(1, 3));
  BlockSpec spec = with_lengths(spec_of(GetParam(), 0, 16), lengths);
  spec.K = 4;
  spec.V = 8;
  check(spec, 5);
}

// Along two of its dimensions a grid ends at 65535 blocks.
TEST_P(CudaBlocks, MoreThan65535SequencesOrHeads) {
  if (reduced()) GTEST_SKIP() << "a reduced run has no time for so many blocks";
  for (const auto& [B, H] : std::vector<std::pair<int64_t, int64_t>>{{66000, 1}, {1, 66000}}) {
    BlockSpec spec = spec_of(GetParam(), 1, 16);
    spec.B = B;
    spec.H = spec.HV = H;
    spec.K = spec.V = 4;
    check(spec, 8);
  }
}

// What the host cannot refuse touches nothing outside the tensors: the calls look at the memory around them.
TEST_P(CudaBlocks, MalformedOffsetsStayInside) {
  if (GetParam() == Block::kL2Norm) return;
  for (Gate gate : gates()) {
    const BlockCase drawn = draw(with_lengths(spec_of(GetParam(), 0, 16, gate), {20, 20, 29}), 6);
    for (const std::vector<int64_t>& offsets : std::vector<std::vector<int64_t>>{
             {0, 200, 10, 69}, {-5, -1, 30, 1000000}, {60, 50, 40, 30}, {0, 69, 0, 69}, {int64_t{1} << 40, 0, 1, 2}}) {
      BlockCase problem = drawn;
      problem.cu_seqlens = offsets_of(offsets);
      EXPECT_NO_THROW(support::forward(problem, context_for("direct")));
      if (GetParam() == Block::kChunkLocalCumsum) continue;
      EXPECT_NO_THROW(support::backward(problem, context_for("direct")));
    }
  }
}

// Activations, sums and norms of what is not a number are none either, in the forms of every width.
TEST(CudaBlockValues, WhatIsNotANumberStays) {
  for (Block block : {Block::kChunkLocalCumsum, Block::kGateActivation, Block::kL2Norm}) {
    for (bool lower_bound : {false, true}) {
      for (int64_t K : {5, 256}) {
        BlockSpec spec = spec_of(block, 20, 16, Gate::kPerChannel);
        spec.K = K;
        spec.lower_bound = lower_bound && block == Block::kGateActivation;
        BlockCase problem = draw(spec, 9);
        const int64_t width = problem.x.size() / spec.T, token = 7;
        for (int64_t i = 0; i < width; ++i) problem.x.set(token * width + i, std::nan(""));
        const Tensor y = support::forward(problem, context_for("direct")).tensors[0].second;
        for (double value : slice(y, 1, 0, token).values()) ASSERT_FALSE(std::isnan(value)) << describe(spec);
        for (double value : slice(y, 1, token, token + 1).values()) ASSERT_TRUE(std::isnan(value)) << describe(spec);
      }
    }
  }
}

TEST(CudaBlockErrors, WhatIsNotThere) {
  const BlockCase problem = draw(spec_of(Block::kSolveTril, 20, 16), 7);
  const auto expect_refused = [](const auto& run, ErrorCode code, const std::string& text) {
    try {
      run();
      ADD_FAILURE() << "accepted; expected: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  expect_refused([&] { support::forward(problem, context_for("simd")); }, ErrorCode::kInvalidArgument,
                 "implementation: expected one of direct");
  SolveTrilForward args;
  Tensor j = problem.a;
  args.a = problem.a.view();
  args.j = j.view();
  args.a.device = args.j.device = kCuda;
  expect_refused([&] { solve_tril_forward(context_for(""), args); }, ErrorCode::kInvalidArgument,
                 "a: expected a pointer into memory of cuda:0, got plain host memory");
}

}  // namespace
}  // namespace fastweight::test
