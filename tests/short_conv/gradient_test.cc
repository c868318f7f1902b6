// The gradients of the reference (tests/differences.h), with every option.
#include <gtest/gtest.h>

#include "tests/differences.h"
#include "tests/short_conv/grid.h"

namespace fastweight::test {
namespace {

void check_gradients(ShortConvSpec spec) {
  spec.set_types(DType::kF64);
  expect_gradients_match_differences(support::draw(spec, 11));
  expect_absent_gradients_are_zero(support::draw(spec, 12));
}

TEST(ShortConvGradient, MatchesCentralDifferences) {
  for (Activation activation : {Activation::kNone, Activation::kSilu}) {
    for (int64_t W : {1, 3, 4}) {
      for (int64_t T : {1, 2, 11}) {
        ShortConvSpec spec = spec_of(T, 3, W, activation);
        spec.B = 2;
        check_gradients(spec);
      }
      check_gradients(with_lengths(spec_of(0, 2, W, activation), {1, 0, 7, 2}));
    }
  }
  ShortConvSpec spec = spec_of(6, 3);
  spec.bias = spec.initial_state = false;
  check_gradients(spec);
}

}  // namespace
}  // namespace fastweight::test
