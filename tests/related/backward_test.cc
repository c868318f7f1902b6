// Every backward implementation of every related operator against the reference in double.
#include <gtest/gtest.h>

#include "tests/related/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

class Backward : public ::testing::TestWithParam<RelatedOp> {
 protected:
  static RelatedSpec spec(int64_t T, int64_t K, int64_t V, int64_t H = 1) { return spec_of(GetParam(), T, K, V, H); }
};

TEST_P(Backward, Lengths) {
  for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 63, 64, 130, 191, 320}, 4)) {
    for (int32_t chunk_size : first<int32_t>({64, 16}, 1)) {
      RelatedSpec one = spec(T, 24, 40);
      one.chunk_size = chunk_size;
      one.B = 2;
      check_backward(draw(one, 41));
    }
  }
}

TEST_P(Backward, HeadWidths) {
  const std::vector<std::pair<int64_t, int64_t>> widths{{20, 36}, {1, 1},    {3, 128},   {128, 3},  {60, 100},
                                                        {1, 17},  {100, 60}, {128, 128}, {16, 256}, {256, 200},
                                                        {7, 5},   {31, 33},  {64, 8}};
  for (const auto& [K, V] : first(widths, 4)) check_backward(draw(spec(70, K, V), 42));
}

TEST_P(Backward, LongSequence) { check_backward(draw(spec(reduced() ? 200 : 512, 128, 128), 43)); }

TEST_P(Backward, VariableLengths) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5, 0, 64, 1, 33}, {0, 0}, {0, 130, 0}, {1, 1, 1, 1}, {64, 128, 65}, {200, 3}}) {
    check_backward(draw(with_lengths(spec(0, 20, 36, 2), lengths), 45));
  }
}

TEST_P(Backward, Variants) {
  for (RelatedSpec one : variants(spec(69, 20, 36, 2))) {
    check_backward(draw(one, 46));
    check_backward(draw(with_lengths(one, {5, 0, 64, 1, 33}), 46));
  }
}

// One head alone is cut into units whose sums are added; many are not.
TEST_P(Backward, Heads) {
  for (int64_t H : {1, 4, 8}) check_backward(draw(spec(35, 20, 130, H), 44));
}

TEST_P(Backward, StrongAndWeakGates) {
  if (!has_gate(GetParam())) GTEST_SKIP() << "no gate";
  for (double divisor : {0.01, 0.1, 10.0, 1000.0}) {
    RelatedSpec one = spec(130, 36, 20);
    one.gate_divisor = divisor;
    check_backward(draw(one, 50));
  }
  for (double fraction : {0.1, 0.5, 1.0}) {
    RelatedSpec one = spec(130, 36, 20);
    one.hard_gate_fraction = fraction;
    check_backward(draw(one, 51));
  }
  RelatedCase open = draw(spec(130, 36, 20), 52);
  open.g.fill(0);
  check_backward(open);
}

TEST_P(Backward, SixteenBitTypes) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType gate_dtype : {DType::kF32, dtype}) {
      RelatedSpec one = spec(70, 60, 100, 2);
      one.dtype = dtype;
      one.gate_dtype = gate_dtype;
      check_backward(draw(one, 53));
      check_backward(draw(with_lengths(one, {5, 0, 64, 1, 33}), 53));
    }
  }
}

TEST_P(Backward, MixedTypes) {
  for (DType other : {DType::kBF16, DType::kF16, DType::kF64}) {
    RelatedSpec one = spec(70, 20, 36);
    one.gate_dtype = other;
    RelatedCase problem = draw(one, 54);
    problem.initial_state = problem.initial_state.to(other);
    problem.d_final_state = problem.d_final_state.to(other);
    check_backward(problem);
  }
}

TEST_P(Backward, AbsentGradients) {
  RelatedCase problem = draw(spec(70, 20, 36), 55);
  problem.d_final_state = {};
  check_backward(problem);
  problem.d_o = {};
  check_backward(problem);
}

// Each gradient alone has the bits that it has among the others.
TEST_P(Backward, OutputsAlone) {
  const RelatedCase problem = draw(spec(130, 20, 36, 2), 56);
  for (const std::string& name : implementations(GetParam(), "backward")) {
    const RelatedResults all = support::backward(problem, context_for(name));
    for (size_t i = 0; i < all.all().size(); ++i) {
      if (!all.all()[i]->present()) continue;
      RelatedResults alone;
      *alone.all()[i] = support::poisoned_like(*all.all()[i]);
      support::run_backward(problem.spec, context_for(name), views_of(problem), views_of(alone));
      EXPECT_TRUE(support::same_bits(*alone.all()[i], *all.all()[i])) << name << " " << all.kNames[i];
    }
  }
}

TEST_P(Backward, StridedTensorsBothWays) {
  for (Layout layout : kLayouts) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      RelatedSpec one = spec(69, 20, 36, 2);
      one.B = 2;
      one.dtype = dtype;
      check_strided(draw(one, 57), layout);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Backward, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
