// Every block and implementation on the grid, where their bits may not change, and which of them runs.
#include "tests/blocks/grid.h"

#include <gtest/gtest.h>

#include "tests/contract.h"

namespace fastweight::test {
namespace {

using support::draw;

class Grid : public ::testing::TestWithParam<GridCase<BlockCase>> {};

TEST_P(Grid, EveryImplementation) { GetParam().run(); }

INSTANTIATE_TEST_SUITE_P(Blocks, Grid, ::testing::ValuesIn(BlockGrid().cases()), kCaseName);

class Blocks : public ::testing::TestWithParam<Block> {};

INSTANTIATE_TEST_SUITE_P(All, Blocks, ::testing::ValuesIn(kBlocks),
                         [](const auto& param) { return name_of(param.param); });

// A result does not depend on how its tensors lie.
TEST_P(Blocks, SameBitsInEveryLayout) {
  for (Gate gate : gates_of(GetParam())) {
    const BlockCase problem = draw(with_batch(with_heads(spec_of(GetParam(), 40, 32, gate), 2, 4), 2), 1);
    for (Mode mode : kModes) {
      for (const std::string& name : implementations(GetParam(), mode)) {
        const BlockResults dense = support::run(mode, problem, context_for(name));
        for (Layout layout : kLayouts) {
          expect_same_bits(run_strided(mode, problem, context_for(name), layout, outputs_of(mode, problem)), dense,
                           describe(problem.spec));
        }
      }
    }
  }
}

TEST_P(Blocks, BroadcastInputs) { expect_same_when_broadcast(draw(spec_of(GetParam(), 40, 16), 1)); }

TEST_P(Blocks, EachGradientAlone) {
  if (GetParam() == Block::kSolveTril || GetParam() == Block::kL2Norm) GTEST_SKIP() << "one gradient, not optional";
  for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
    expect_same_alone_among_outputs(Mode::kBackward, draw(spec_of(GetParam(), 40, 16, gate), 1));
  }
}

TEST_P(Blocks, SameBitsForEveryThreadCount) {
  const int64_t T = device().type != DeviceType::kCpu || reduced() ? 300 : 2300;
  for (Gate gate : gates_of(GetParam())) {
    expect_same_for_every_thread_count(draw(with_heads(spec_of(GetParam(), T, 32, gate), 2, 4, 24), 3));
  }
}

TEST_P(Blocks, SameBitsAloneAndPacked) {
  for (Gate gate : gates_of(GetParam())) {
    expect_same_alone(draw(with_lengths(spec_of(GetParam(), 0, 32, gate), {37, 0, 64, 1, 100}), 5));
    expect_same_alone(draw(with_batch(spec_of(GetParam(), 37, 32, gate), 3), 5));
  }
}

// fp64 tensors run on the reference, and the lists say so.
TEST_P(Blocks, OnlyTheReferenceTakesDoubles) {
  BlockSpec spec = spec_of(GetParam(), 20, 16);
  spec.dtype = DType::kF64;
  const BlockCase problem = draw(spec, 1);
  EXPECT_EQ(support::forward(problem, Context()).implementation, "reference");
  for (const std::string& name : implementations(GetParam(), Mode::kForward)) {
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
  const std::vector<std::string> names = implementations(GetParam(), Mode::kForward);
  EXPECT_EQ(support::forward(draw(spec_of(GetParam(), 20, 16), 1), context_for("")).implementation, names[0]);
  EXPECT_EQ(names[0], device().type == DeviceType::kCpu ? "simd" : "direct");
  if (device().type == DeviceType::kCpu) {
    EXPECT_EQ(names.back(), "reference");
  }
}

}  // namespace
}  // namespace fastweight::test
