// Every forward implementation of every related operator against the reference in double.
#include <gtest/gtest.h>

#include "tests/related/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

class Forward : public ::testing::TestWithParam<RelatedOp> {
 protected:
  static RelatedSpec spec(int64_t T, int64_t K, int64_t V, int64_t H = 1) { return spec_of(GetParam(), T, K, V, H); }
};

TEST_P(Forward, Lengths) {
  for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 63, 64, 130, 191, 320}, 4)) {
    for (int32_t chunk_size : first<int32_t>({64, 16}, 1)) {
      RelatedSpec one = spec(T, 24, 40);
      one.chunk_size = chunk_size;
      one.B = 2;
      check_forward(draw(one, 21));
    }
  }
}

TEST_P(Forward, HeadWidths) {
  const std::vector<std::pair<int64_t, int64_t>> widths{{20, 36}, {1, 1},    {3, 128},   {128, 3},  {60, 100},
                                                        {1, 17},  {100, 60}, {128, 128}, {16, 256}, {256, 200},
                                                        {7, 5},   {31, 33},  {64, 8}};
  for (const auto& [K, V] : first(widths, 4)) check_forward(draw(spec(70, K, V), 22));
}

TEST_P(Forward, LongSequence) { check_forward(draw(spec(reduced() ? 200 : 1024, 128, 128), 23)); }

TEST_P(Forward, VariableLengths) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5, 0, 64, 1, 33}, {0, 0}, {0, 130, 0}, {1, 1, 1, 1}, {64, 128, 65}, {200, 3}}) {
    check_forward(draw(with_lengths(spec(0, 20, 36, 2), lengths), 25));
  }
}

TEST_P(Forward, Variants) {
  for (RelatedSpec one : variants(spec(69, 20, 36, 2))) {
    check_forward(draw(one, 26));
    one.dtype = one.gate_dtype = DType::kF64;
    check_forward(draw(one, 26));
    check_forward(draw(with_lengths(one, {5, 0, 64, 1, 33}), 26));
  }
}

TEST_P(Forward, StrongAndWeakGates) {
  if (!has_gate(GetParam())) GTEST_SKIP() << "no gate";
  for (double divisor : {0.01, 0.1, 10.0, 1000.0}) {
    RelatedSpec one = spec(130, 36, 20);
    one.gate_divisor = divisor;
    check_forward(draw(one, 30));
  }
  for (double fraction : {0.1, 0.5, 1.0}) {
    RelatedSpec one = spec(130, 36, 20);
    one.hard_gate_fraction = fraction;
    check_forward(draw(one, 31));
  }
  RelatedCase open = draw(spec(130, 36, 20), 32);
  open.g.fill(0);
  check_forward(open);
}

TEST_P(Forward, SixteenBitTypes) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType gate_dtype : {DType::kF32, dtype}) {
      RelatedSpec one = spec(70, 60, 100, 2);
      one.dtype = dtype;
      one.gate_dtype = gate_dtype;
      check_forward(draw(one, 33));
      check_forward(draw(with_lengths(one, {5, 0, 64, 1, 33}), 33));
    }
  }
}

TEST_P(Forward, MixedTypes) {
  for (DType other : {DType::kBF16, DType::kF16, DType::kF64}) {
    RelatedSpec one = spec(70, 20, 36);
    one.gate_dtype = other;
    RelatedCase problem = draw(one, 34);
    problem.initial_state = problem.initial_state.to(other);
    check_forward(problem);
  }
}

// The optional outputs do not change o, which may be fp32 for 16-bit inputs.
TEST_P(Forward, OutputsAlone) {
  RelatedSpec one = spec(130, 20, 36);
  one.dtype = DType::kBF16;
  const RelatedCase problem = draw(one, 39);
  for (const std::string& name : implementations(GetParam(), "forward")) {
    const RelatedResults all = support::forward(problem, context_for(name), true);
    RelatedResults alone;
    alone.o = Tensor(DType::kF32, problem.v.shape());
    support::run_forward(one, context_for(name), views_of(problem), views_of(alone));
    EXPECT_TRUE(support::same_bits(alone.o.to(DType::kBF16), all.o)) << name;
  }
}

// A stride of 0 repeats one element along an axis.
TEST_P(Forward, BroadcastInputs) {
  RelatedSpec one = spec(69, 20, 36, 2);
  one.B = 2;
  RelatedCase problem = draw(one, 38);
  for (size_t axis = 0; axis < 3; ++axis) {
    RelatedCase spread = problem;
    RelatedInputs<TensorView> views = views_of(problem);
    for (size_t i = 0; i < 8; ++i) {
      Tensor& x = *spread.all()[i];
      TensorView& view = *views.all()[i];
      if (!x.present()) continue;
      for (int64_t j = 0; j < x.size(); ++j) {
        x.set(j, x[j - j / view.strides[axis] % view.shape[axis] * view.strides[axis]]);
      }
      view.strides[axis] = 0;
    }
    for (const std::string& name : implementations(GetParam(), "forward")) {
      const RelatedResults expected = support::forward(spread, context_for(name));
      RelatedResults results = support::forward_outputs(problem, false);
      results.implementation = support::run_forward(one, context_for(name), views, views_of(results));
      expect_same_bits(results, expected, "axis " + std::to_string(axis));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Forward, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
