// Random problems with random options: every implementation against the reference in double.
//
// FASTWEIGHT_TEST_SEED=<number> runs the one problem of that number; FASTWEIGHT_TEST_COUNT=<number> runs that many.
#include <gtest/gtest.h>

#include "tests/ttt_linear/cases.h"

namespace fastweight::test {
namespace {

int64_t random_width(Dice& dice) {
  if (dice.chance(40)) return dice.pick<int64_t>({16, 20, 32, 36, 60, 64, 100, 128});
  return dice.between(12, 70);
}

int64_t random_length(Dice& dice) {
  if (dice.chance(50)) return dice.pick<int64_t>({0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129});
  return dice.between(0, 160);
}

TttLinearSpec random_spec(Dice& dice) {
  TttLinearSpec spec = spec_of(random_length(dice), random_width(dice), dice.between(1, 3));
  if (dice.chance(35)) {
    std::vector<int64_t> lengths;
    for (int64_t n = dice.between(1, 5); n > 0; --n) {
      lengths.push_back(dice.chance(20) ? 0 : dice.chance(30) ? dice.between(1, 3) : random_length(dice) / 2);
    }
    spec = with_lengths(spec, lengths);
  } else {
    spec.B = dice.between(1, 3);
  }
  spec.dtype = dice.pick({DType::kF32, DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
  spec.parameter_dtype =
      dice.chance(60) ? DType::kF32 : dice.pick({spec.dtype, DType::kBF16, DType::kF16, DType::kF64});
  spec.initial_state = dice.chance(80);
  spec.initial_state_bias = dice.chance(80);
  // From a state of 0 the first gradients exceed the range of fp16.
  if (spec.dtype == DType::kF16 || spec.parameter_dtype == DType::kF16) {
    spec.initial_state = spec.initial_state_bias = true;
  }
  spec.options.mini_batch = dice.pick({16, 16, 32, 64});
  if (dice.chance(30)) spec.options.scale = dice.pick({0.1, 1.0, 0.5});
  if (dice.chance(20)) spec.options.eps = dice.pick({1e-5, 1e-3});
  return spec;
}

void check_one(uint64_t seed) {
  Dice dice(seed);
  const TttLinearSpec spec = random_spec(dice);
  const Layout layout = dice.pick({Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed});
  SCOPED_TRACE("FASTWEIGHT_TEST_SEED=" + std::to_string(seed) + ": " + describe(spec));
  const TttLinearCase problem = support::draw(spec, seed);
  const TttLinearCase exact = support::in_double(problem);

  TttLinearResults expected = support::forward(exact, reference_context());
  for (const std::string& name : implementations("forward")) {
    const auto results = unless_declined("forward", name, [&] {
      return forward_strided(problem, context_for(name), layout, support::forward_outputs(problem));
    });
    if (results) expect_close(problem, *results, expected);
  }
  expected = support::backward(exact, reference_context());
  for (const std::string& name : implementations("backward")) {
    const auto results = unless_declined("backward", name, [&] {
      return backward_strided(problem, context_for(name), layout, support::backward_outputs(problem));
    });
    if (results) expect_close(problem, *results, expected);
  }
  check_step(problem);
}

TEST(Random, Problems) { for_each_seed(reduced() ? 20 : 200, check_one); }

}  // namespace
}  // namespace fastweight::test
