// Random problems with random options: every implementation against the reference in double.
#include <gtest/gtest.h>

#include "tests/delta_rule/grid.h"
#include "tests/random_problems.h"

namespace fastweight::test {
namespace {

DeltaRuleSpec random_spec(Dice& dice) {
  DeltaRuleSpec spec = spec_of(dice.pick({Gate::kNone, Gate::kPerHead, Gate::kPerChannel}), random_length(dice),
                               random_width(dice), random_width(dice));
  DeltaRuleOptions& options = spec.options;
  spec = with_heads(spec, dice.between(1, 2), dice.between(1, 3));
  spec = with_random_sequences(dice, spec);
  spec.dtype = dice.pick({DType::kF32, DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
  if (dice.chance(15)) {  // for the kernels of Hopper
    spec.K = dice.pick<int64_t>({72, 96, 128, 192});
    spec.V = dice.pick<int64_t>({72, 104, 128});
    spec.dtype = dice.pick({DType::kBF16, DType::kF16});
  }
  spec.gate_dtype = dice.chance(60) ? DType::kF32 : dice.pick({spec.dtype, DType::kBF16, DType::kF16, DType::kF64});
  spec.initial_state = dice.chance(70);
  options.chunk_size = dice.pick({16, 32, 64, 64});
  options.state_v_first = dice.chance(30);
  // One number, normalised, has a gradient of almost nothing; of few numbers the roundings do not make up for each other.
  options.qk_l2norm = dice.chance(40) && spec.K > 3;
  if (dice.chance(30)) options.scale = dice.pick({0.1, 1.0, -0.5});
  if (dice.chance(10)) {
    spec.beta_absent = true;
  } else {
    options.beta_sigmoid = dice.chance(40);
    options.allow_neg_eigval = options.beta_sigmoid && dice.chance(50);
    spec.beta_per_value = dice.chance(10);
  }
  if (options.gate == Gate::kNone) return spec;
  options.gate_in_kernel = dice.chance(40);
  if (options.gate_in_kernel) {
    spec.dt_bias_absent = dice.chance(30);
    if (options.gate == Gate::kPerChannel && dice.chance(50)) {
      options.lower_bound = dice.pick({-5.0, -2.0, -20.0});
      options.safe_gate = options.lower_bound >= -5 && dice.chance(50);
      spec.a_log_absent = dice.chance(30);
    }
  } else {
    spec.gate_divisor = dice.pick({1.0, 1.0, 10.0, 0.1, 0.01});
    if (dice.chance(15)) spec.hard_gate_fraction = 0.3;
    options.safe_gate = options.gate == Gate::kPerChannel && dice.chance(20);
  }
  return spec;
}

TEST(Random, Problems) { check_random_problems(reduced() ? 30 : 400, random_spec); }

}  // namespace
}  // namespace fastweight::test
