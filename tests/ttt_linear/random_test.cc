// Random problems with random options: every implementation against the reference in double.
#include <gtest/gtest.h>

#include "tests/random_problems.h"
#include "tests/ttt_linear/grid.h"

namespace fastweight::test {
namespace {

TttLinearSpec random_spec(Dice& dice) {
  TttLinearSpec spec = spec_of(random_length(dice), std::max<int64_t>(12, random_width(dice)), dice.between(1, 3));
  spec = with_random_sequences(dice, spec);
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

TEST(Random, Problems) { check_random_problems(reduced() ? 20 : 200, random_spec); }

}  // namespace
}  // namespace fastweight::test
