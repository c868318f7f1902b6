// Random problems with random options: every implementation against the reference in double.
#include <gtest/gtest.h>

#include "tests/random_problems.h"
#include "tests/related/grid.h"

namespace fastweight::test {
namespace {

RelatedSpec random_spec(Dice& dice) {
  RelatedSpec spec = spec_of(kRelatedOps[dice.below(std::size(kRelatedOps))], random_length(dice), random_width(dice),
                             random_width(dice), dice.between(1, 3));
  spec = with_random_sequences(dice, spec);
  spec.dtype = dice.pick({DType::kF32, DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
  spec.gate_dtype = dice.chance(60) ? DType::kF32 : dice.pick({spec.dtype, DType::kBF16, DType::kF16, DType::kF64});
  spec.initial_state = dice.chance(70);
  spec.chunk_size = dice.pick({16, 32, 64, 64});
  spec.state_v_first = dice.chance(30);
  if (dice.chance(30)) spec.scale = dice.pick({0.1, 1.0, -0.5});
  spec.gate_divisor = dice.pick({1.0, 1.0, 10.0, 0.1, 0.01});
  if (dice.chance(15)) spec.hard_gate_fraction = 0.3;
  spec.g_gamma = spec.op == RelatedOp::kSimpleGla && dice.chance(30);
  if (spec.op == RelatedOp::kComba) {
    spec.qk_l2norm = dice.chance(40) && spec.K > 1;  // one number, normalised, has a gradient of almost nothing
    spec.p_absent = dice.chance(30);
    spec.beta_absent = dice.chance(20);
    spec.beta_per_value = dice.chance(15);
    spec.group = dice.pick({1, 1, 2, 3});
  }
  return spec;
}

TEST(Random, Problems) { check_random_problems(reduced() ? 30 : 200, random_spec); }

}  // namespace
}  // namespace fastweight::test
