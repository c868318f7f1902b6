// Random problems with random options: every implementation against the reference in double.
//
// FASTWEIGHT_TEST_SEED=<number> runs the one problem of that number; FASTWEIGHT_TEST_COUNT=<number> runs that many.
#include <gtest/gtest.h>

#include "tests/delta_rule/cases.h"

namespace fastweight::test {
namespace {

int64_t random_width(Dice& dice) {
  if (dice.chance(40)) return dice.pick<int64_t>({1, 8, 16, 20, 32, 36, 60, 64, 100, 128});
  return dice.between(1, 70);
}

int64_t random_length(Dice& dice) {
  if (dice.chance(50)) return dice.pick<int64_t>({0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129});
  return dice.between(0, 160);
}

DeltaRuleSpec random_spec(Dice& dice) {
  DeltaRuleSpec spec = spec_of(dice.pick({Gate::kNone, Gate::kPerHead, Gate::kPerChannel}), random_length(dice),
                               random_width(dice), random_width(dice));
  DeltaRuleOptions& options = spec.options;
  spec = with_heads(spec, dice.between(1, 2), dice.between(1, 3));
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
  spec.gate_dtype = dice.chance(60) ? DType::kF32 : dice.pick({spec.dtype, DType::kBF16, DType::kF16, DType::kF64});
  spec.initial_state = dice.chance(70);
  options.chunk_size = dice.pick({16, 32, 64, 64});
  options.state_v_first = dice.chance(30);
  options.qk_l2norm = dice.chance(40) && spec.K > 1;  // one number, normalised, has a gradient of almost nothing
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

void check_one(uint64_t seed) {
  Dice dice(seed);
  const DeltaRuleSpec spec = random_spec(dice);
  const Layout layout = dice.pick({Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed});
  SCOPED_TRACE("FASTWEIGHT_TEST_SEED=" + std::to_string(seed) + ": " + describe(spec));
  const DeltaRuleCase problem = support::draw(spec, seed);
  const DeltaRuleCase exact = support::in_double(problem);

  DeltaRuleResults expected = support::forward(exact, reference_context(), true);
  for (const std::string& name : implementations("forward")) {
    const auto results = unless_declined("forward", name, [&] {
      return forward_strided(problem, context_for(name), layout, support::forward_outputs(problem, true));
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

TEST(Random, Problems) { for_each_seed(reduced() ? 30 : 400, check_one); }

}  // namespace
}  // namespace fastweight::test
