// Every implementation of every mode on the grid and on random problems, and where its bits may not change.
#include "tests/short_conv/grid.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/contract.h"
#include "tests/random_problems.h"

namespace fastweight::test {
namespace {

using support::draw;

// The definition once more, for one sequence, with the inputs before its start in front.
TEST(ShortConv, ReferenceIsTheDefinition) {
  const ShortConvCase problem = support::in_double(draw(spec_of(9, 3, 4), 1));
  const ShortConvResults results = support::forward(problem, reference_context());
  const int64_t T = 9, D = 3, W = 4;
  for (int64_t d = 0; d < D; ++d) {
    std::vector<double> line;
    for (int64_t c = 0; c < W; ++c) line.push_back(problem.initial_state[d * W + c]);
    for (int64_t t = 0; t < T; ++t) line.push_back(problem.x[t * D + d]);
    for (int64_t t = 0; t < T; ++t) {
      double z = problem.bias[d];
      for (int64_t i = 0; i < W; ++i) z += problem.w[d * W + i] * line[static_cast<size_t>(t + 1 + i)];
      EXPECT_NEAR(results.y[t * D + d], z / (1 + std::exp(-z)) + problem.residual[t * D + d], 1e-14);
    }
    for (int64_t c = 0; c < W; ++c) {
      EXPECT_EQ(results.final_state[d * W + c], line[line.size() - static_cast<size_t>(W - c)]);
    }
  }
}

class Grid : public ::testing::TestWithParam<GridCase<ShortConvCase>> {};

TEST_P(Grid, EveryImplementation) { GetParam().run(); }

INSTANTIATE_TEST_SUITE_P(ShortConv, Grid, ::testing::ValuesIn(ShortConvGrid().cases()), kCaseName);

TEST(ShortConv, BroadcastInputs) { expect_same_when_broadcast(draw(with_batch(spec_of(40, 20), 2), 32)); }

TEST(ShortConv, EachOutputAlone) {
  expect_same_alone_among_outputs(Mode::kForward, draw(with_batch(spec_of(300, 20), 2), 33), "y");
  expect_same_alone_among_outputs(Mode::kBackward, draw(with_batch(spec_of(300, 20), 2), 33));
}

TEST(ShortConv, StateIndices) {
  expect_same_in_slots(draw(with_batch(spec_of(3, 20), 4), 41));
  expect_same_in_slots(draw(with_lengths(spec_of(0, 20), {1, 3, 0, 2}), 41));
}

TEST(ShortConvContract, SameBitsForEveryThreadCount) {
  const ShortConvSpec spec = reduced() ? spec_of(270, 530) : spec_of(700, 1100);
  expect_same_for_every_thread_count(draw(with_batch(spec, 2), 51));
  expect_same_for_every_thread_count(draw(with_lengths(spec, first<int64_t>({300, 0, 1, 2, 513, 2, 2}, 4)), 51));
}

TEST(ShortConvContract, SameBitsAloneAndInABatch) {
  expect_same_alone(draw(with_batch(spec_of(270, 20), 3), 52));
  expect_same_alone(draw(with_lengths(spec_of(0, 20), {270, 0, 270, 1, 270}), 52));
}

// Wherever it is cut; a step is a forward that writes its state in place.
TEST(ShortConvContract, SameBitsWhenCut) {
  const ShortConvCase problem = draw(spec_of(300, 20), 53);
  for (int64_t at : {0, 1, 2, 3, 4, 100, 256, 299, 300}) {
    expect_same_when_cut(problem, at);
    for (const std::string& name : implementations(Mode::kStep)) {
      const ShortConvCase exact = exact_for(name, problem);
      const ShortConvResults whole = support::forward(exact, context_for(name));
      const ShortConvResults head = support::step(slice_tokens(exact, 0, at), context_for(name));
      const ShortConvResults tail = support::step(tail_after(exact, at, head), context_for(name));
      EXPECT_TRUE(support::same_bits(head.y, slice(whole.y, 1, 0, at))) << name << " " << at;
      EXPECT_TRUE(support::same_bits(tail.y, slice(whole.y, 1, at, 300))) << name << " " << at;
      EXPECT_TRUE(support::same_bits(tail.final_state, whole.final_state)) << name << " " << at;
    }
  }
}

ShortConvSpec random_spec(Dice& dice) {
  ShortConvSpec spec = spec_of(dice.between(0, 30), dice.between(1, 70), dice.chance(50) ? 4 : dice.between(1, 16));
  if (dice.chance(20)) spec.T = dice.between(200, 600);
  spec = with_random_sequences(dice, spec);
  spec.options.activation = dice.pick({Activation::kNone, Activation::kSilu});
  spec.dtype = dice.pick({DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
  spec.parameter_dtype = dice.pick({DType::kF32, DType::kF32, spec.dtype, DType::kBF16});
  spec.bias = dice.chance(50);
  spec.residual = dice.chance(50);
  spec.initial_state = dice.chance(60);
  return spec;
}

TEST(ShortConvRandom, Problems) { check_random_problems(reduced() ? 20 : 200, random_spec); }

}  // namespace
}  // namespace fastweight::test
