// The gradients of the reference (tests/differences.h), with every option.
#include <gtest/gtest.h>

#include "tests/differences.h"
#include "tests/ttt_linear/grid.h"

namespace fastweight::test {
namespace {

std::vector<TttLinearSpec> specs() {
  std::vector<TttLinearSpec> list;
  const auto add = [&](const std::string& name, TttLinearSpec spec) {
    spec.name = name;
    spec.dtype = spec.parameter_dtype = DType::kF64;
    list.push_back(spec);
  };
  // One whole and one partial mini-batch.
  TttLinearSpec plain = spec_of(19, 5, 2);
  plain.B = 2;
  add("plain", plain);
  TttLinearSpec spec = plain;
  spec.options.scale = 0.7;
  spec.options.eps = 1e-2;
  add("scale_and_eps", spec);
  add("whole", spec_of(32, 4));
  add("one_token", spec_of(1, 6, 2));
  spec = spec_of(40, 4);
  spec.options.mini_batch = 32;
  add("mini_batch_32", spec);
  spec = spec_of(70, 3);
  spec.options.mini_batch = 64;
  add("mini_batch_64", spec);
  spec = plain;
  spec.initial_state = false;
  add("no_state", spec);
  spec = plain;
  spec.initial_state_bias = false;
  add("no_bias", spec);
  add("varlen", with_lengths(plain, {1, 0, 18, 3, 16}));
  return list;
}

class Gradient : public ::testing::TestWithParam<TttLinearSpec> {};

// Of fourth order: the layer norm bends too much for two points. eta is about 0.005, and its derivatives grow with the
// sums over the mini-batch.
TEST_P(Gradient, MatchesCentralDifferences) {
  expect_gradients_match_differences(support::draw(GetParam(), 11), [](const std::string& name) {
    return Differences{.step = name == "eta" ? 1e-5 : 1e-3, .fourth_order = true, .bound = 1e-7};
  });
}

TEST_P(Gradient, AbsentGradientsAreZero) { expect_absent_gradients_are_zero(support::draw(GetParam(), 12)); }

INSTANTIATE_TEST_SUITE_P(Reference, Gradient, ::testing::ValuesIn(specs()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace fastweight::test
