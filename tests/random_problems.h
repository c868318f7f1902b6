// Random problems with random options: every implementation of every mode against the reference in double, in a random
// layout.
//
// FASTWEIGHT_TEST_SEED=<number> runs the one problem of that number; FASTWEIGHT_TEST_COUNT=<number> runs that many.
#pragma once

#include <string>
#include <vector>

#include "tests/grid.h"
#include "tests/testing.h"

namespace fastweight::test {

inline int64_t random_width(Dice& dice) {
  if (dice.chance(40)) return dice.pick<int64_t>({1, 8, 16, 20, 32, 36, 60, 64, 100, 128});
  return dice.between(1, 70);
}

// Often next to the size of a block or chunk.
inline int64_t random_length(Dice& dice) {
  if (dice.chance(50)) return dice.pick<int64_t>({0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129});
  return dice.between(0, 160);
}

// The spec as a batch, or with packed sequences.
template <class Spec>
Spec with_random_sequences(Dice& dice, Spec spec) {
  if (!dice.chance(35)) {
    spec.B = dice.between(1, 3);
    return spec;
  }
  std::vector<int64_t> lengths;
  for (int64_t n = dice.between(1, 5); n > 0; --n) {
    lengths.push_back(dice.chance(20) ? 0 : dice.chance(30) ? dice.between(1, 3) : random_length(dice) / 2);
  }
  return with_lengths(spec, lengths);
}

template <class RandomSpec>
void check_random_problems(int64_t count, const RandomSpec& random_spec) {
  for_each_seed(count, [&](uint64_t seed) {
    Dice dice(seed);
    const auto spec = random_spec(dice);
    const Layout layout = dice.pick({Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed});
    SCOPED_TRACE("FASTWEIGHT_TEST_SEED=" + std::to_string(seed) + ": " + describe(spec));
    check(draw(spec, seed), layout);
  });
}

}  // namespace fastweight::test
