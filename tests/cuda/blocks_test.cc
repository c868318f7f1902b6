// What is special about the building blocks on a CUDA device: graphs, contents that the host cannot check, many
// sequences. The cases of tests/blocks run on the device as well, see tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/blocks/grid.h"
#include "tests/cuda/testing.h"

namespace fastweight::test {
namespace {

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

TEST_P(CudaBlocks, GraphReplaysWithOtherLengths) {
  if (GetParam() == Block::kL2Norm || GetParam() == Block::kRmsNorm) GTEST_SKIP() << "knows no sequences";
  for (Gate gate : gates()) {
    const BlockSpec spec = with_lengths(spec_of(GetParam(), 0, 16, gate), {30, 30, 15, 15});
    expect_replays_with_other_lengths(
        Mode::kForward, draw(with_heads(spec, 1, 2), 1),
        {{0, 30, 60, 75, 90}, {0, 0, 1, 89, 90}, {0, 16, 16, 16, 17}, {0, 0, 0, 0, 0}, {0, 3, 35, 67, 70}});
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
  check(draw(spec, 5));
}

// Along two of its dimensions a grid ends at 65535 blocks.
TEST_P(CudaBlocks, MoreThan65535SequencesOrHeads) {
  if (reduced()) GTEST_SKIP() << "a reduced run has no time for so many blocks";
  for (const auto& [B, H] : std::vector<std::pair<int64_t, int64_t>>{{66000, 1}, {1, 66000}}) {
    BlockSpec spec = spec_of(GetParam(), 1, 16);
    spec.B = B;
    spec.H = spec.HV = H;
    spec.K = spec.V = 4;
    check(draw(spec, 8));
  }
}

TEST_P(CudaBlocks, MalformedOffsetsStayInside) {
  if (GetParam() == Block::kL2Norm || GetParam() == Block::kRmsNorm) GTEST_SKIP() << "knows no sequences";
  for (Gate gate : gates()) {
    expect_malformed_offsets_stay_inside(draw(with_lengths(spec_of(GetParam(), 0, 16, gate), {20, 20, 29}), 6));
  }
}

// Activations, sums and norms of what is not a number are none either, in the forms of every width.
TEST(CudaBlockValues, WhatIsNotANumberStays) {
  for (Block block : {Block::kChunkLocalCumsum, Block::kGateActivation, Block::kL2Norm, Block::kRmsNorm}) {
    for (bool lower_bound : {false, true}) {
      for (int64_t K : {5, 256}) {
        BlockSpec spec = spec_of(block, 20, 16, Gate::kPerChannel);
        spec.K = K;
        spec.lower_bound = lower_bound && block == Block::kGateActivation;
        BlockCase problem = draw(spec, 9);
        const int64_t width = problem.x.size() / spec.T, token = 7;
        for (int64_t i = 0; i < width; ++i) problem.x.set(token * width + i, std::nan(""));
        const Tensor y = *support::forward(problem, context_for("direct")).named()[0].second;
        for (double value : slice(y, 1, 0, token).values()) ASSERT_FALSE(std::isnan(value)) << describe(spec);
        for (double value : slice(y, 1, token, token + 1).values()) ASSERT_TRUE(std::isnan(value)) << describe(spec);
      }
    }
  }
}

TEST(CudaBlockErrors, WhatIsNotThere) {
  const BlockCase problem = draw(spec_of(Block::kSolveTril, 20, 16), 7);
  expect_refused(ErrorCode::kInvalidArgument, "implementation: expected one of direct",
                 [&] { support::forward(problem, context_for("simd")); });
  SolveTrilForward args;
  Tensor j = problem.a;
  args.a = problem.a.view();
  args.j = j.view();
  args.a.device = args.j.device = kCuda;
  expect_refused(ErrorCode::kInvalidArgument, "a: expected a pointer into memory of cuda:0, got plain host memory",
                 [&] { solve_tril_forward(context_for(""), args); });
}

}  // namespace
}  // namespace fastweight::test
