// Every implementation of every mode of every operator on the grid, and tensors of a call in relation to each other.
#include "tests/related/grid.h"

#include <gtest/gtest.h>

namespace fastweight::test {
namespace {

using support::draw;

class Grid : public ::testing::TestWithParam<GridCase<RelatedCase>> {};

TEST_P(Grid, EveryImplementation) { GetParam().run(); }

INSTANTIATE_TEST_SUITE_P(Related, Grid, ::testing::ValuesIn(RelatedGrid().cases()), kCaseName);

class Calls : public ::testing::TestWithParam<RelatedOp> {};

TEST_P(Calls, BroadcastInputs) {
  expect_same_when_broadcast(draw(with_batch(spec_of(GetParam(), 69, 20, 36, 2), 2), 38));
}

TEST_P(Calls, WideValues) {
  for (int64_t V : first<int64_t>({300, 512}, 1)) check(draw(spec_of(GetParam(), 37, 24, V, 2), 72));
}

TEST_P(Calls, EachOutputAlone) {
  RelatedSpec spec = spec_of(GetParam(), 130, 20, 36, 2);
  expect_same_alone_among_outputs(Mode::kForward, draw(spec, 39), "o");
  expect_same_alone_among_outputs(Mode::kBackward, draw(spec, 56));
  spec.dtype = DType::kBF16;
  expect_same_alone_among_outputs(Mode::kForward, draw(spec, 39), "o");
}

// An o in fp32 is what the o of 16-bit inputs is rounded from.
TEST_P(Calls, WideOutput) {
  RelatedSpec spec = spec_of(GetParam(), 130, 20, 36);
  spec.dtype = DType::kBF16;
  const RelatedCase problem = draw(spec, 39);
  for (const std::string& name : implementations(GetParam(), Mode::kForward)) {
    RelatedResults wide;
    wide.o = Tensor(DType::kF32, problem.v.shape());
    call_of(Mode::kForward, problem, wide).run(context_for(name));
    const RelatedResults narrow = support::forward(problem, context_for(name));
    EXPECT_TRUE(support::same_bits(wide.o.to(DType::kBF16), narrow.o)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Calls, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
