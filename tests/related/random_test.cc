// Random problems with random options: every implementation against the reference in double, everything strided.
//
// FASTWEIGHT_TEST_SEED=<number> runs the one problem of that number; FASTWEIGHT_TEST_COUNT=<number> runs that many.
#include <gtest/gtest.h>

#include "tests/related/cases.h"

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

RelatedSpec random_spec(Dice& dice) {
  RelatedSpec spec = spec_of(kRelatedOps[dice.below(std::size(kRelatedOps))], random_length(dice), random_width(dice),
                             random_width(dice), dice.between(1, 3));
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
  }
  return spec;
}

TEST(Random, Problems) {
  for_each_seed(reduced() ? 30 : 200, [](uint64_t seed) {
    Dice dice(seed);
    const RelatedSpec spec = random_spec(dice);
    const Layout layout = dice.pick({Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed});
    SCOPED_TRACE("FASTWEIGHT_TEST_SEED=" + std::to_string(seed) + ": " + describe(spec));
    check_strided(support::draw(spec, seed), layout);
  });
}

}  // namespace
}  // namespace fastweight::test
