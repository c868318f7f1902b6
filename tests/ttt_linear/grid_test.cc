// Every implementation of every mode on the grid, and what a grid does not say: tensors of a call in relation to each
// other, decoding.
#include "tests/ttt_linear/grid.h"

#include <gtest/gtest.h>

#include "tests/contract.h"

namespace fastweight::test {
namespace {

using support::draw;

class Grid : public ::testing::TestWithParam<GridCase<TttLinearCase>> {};

TEST_P(Grid, EveryImplementation) { GetParam().run(); }

INSTANTIATE_TEST_SUITE_P(TttLinear, Grid, ::testing::ValuesIn(TttLinearGrid().cases()), kCaseName);

TEST(Calls, BroadcastInputs) { expect_same_when_broadcast(draw(with_batch(spec_of(69, 20, 2), 2), 33)); }

TEST(Calls, EachOutputAlone) {
  expect_same_alone_among_outputs(Mode::kForward, draw(spec_of(69, 20), 34), "o");
  expect_same_alone_among_outputs(Mode::kBackward, draw(with_batch(spec_of(69, 20, 2), 2), 52));
}

TEST(Calls, StateIndices) {
  expect_same_in_slots(draw(with_batch(spec_of(3, 20, 2), 4), 69));
  expect_same_in_slots(draw(with_lengths(spec_of(0, 20, 2), {1, 3, 0, 18}), 69));
}

// eta as [B, T, H] and the biases as [N, H, D] give the same bits.
TEST(Calls, ShapesWithoutUnitAxes) {
  const TttLinearCase problem = draw(with_batch(spec_of(69, 20, 3), 2), 31);
  const auto without_unit_axis = [](const support::NamedView& named) {
    const std::string name = named.name;
    TensorView& view = *named.view;
    if (!view.present() || (name != "eta" && name != "deta" && !name.ends_with("_bias"))) return;
    const size_t axis = name.ends_with("eta") ? 3 : 2;
    for (size_t i = axis; i + 1 < kMaxRank; ++i) {
      view.shape[i] = view.shape[i + 1];
      view.strides[i] = view.strides[i + 1];
    }
    --view.rank;
  };
  for (Mode mode : kModes) {
    for (const std::string& name : implementations(mode)) {
      const auto expected = unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name)); });
      if (!expected) continue;
      TttLinearResults results = outputs_of(mode, problem);
      const support::Call call = call_of(mode, problem, results);
      for (const support::NamedView& named : call.views()) without_unit_axis(named);
      results.implementation = call.run(context_for(name));
      expect_same_bits(results, *expected, name_of(mode));
    }
  }
}

// Sequences whose open mini-batches hold different counts of tokens.
TEST(Calls, DifferentPositions) {
  const TttLinearSpec spec = with_batch(spec_of(20, 20, 2), 3);
  const TttLinearCase problem = draw(spec, 66);
  TttLinearOpen open = support::opened(problem);
  open.position = Tensor(DType::kI32, {3}, std::vector<double>{0, 7, 15});
  open.gradient = draw(spec, 67).initial_state;
  open.gradient_bias = draw(spec, 67).initial_state_bias;
  TttLinearOpen exact = open;
  for (Tensor* x : {&exact.state, &exact.state_bias, &exact.gradient, &exact.gradient_bias}) *x = x->to(DType::kF64);
  const TttLinearResults expected = support::step(support::in_double(problem), exact, reference_context());
  EXPECT_EQ(expected.position.values(), (std::vector<double>{4, 11, 3}));
  for (const std::string& name : implementations(Mode::kStep)) {
    const auto results =
        unless_declined(Mode::kStep, name, [&] { return support::step(problem, open, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

// The tokens in one pass, and as a prefill of whole mini-batches followed by one step per token.
TEST(Calls, PrefillThenSteps) {
  for (int32_t mini_batch : {16, 32}) {
    TttLinearSpec spec = with_batch(spec_of(96, 20, 2), 2);
    spec.options.mini_batch = mini_batch;
    const TttLinearCase problem = draw(spec, 68);
    const TttLinearResults whole = support::forward(support::in_double(problem), reference_context());
    const int64_t prefill = 32;
    for (const std::string& name : implementations(Mode::kStep)) {
      const TttLinearResults head = support::forward(slice_tokens(problem, 0, prefill), Context{});
      TttLinearOpen open = support::opened(problem);
      open.state = head.final_state;
      open.state_bias = head.final_state_bias;
      bool ran = true;
      for (int64_t t = prefill; t < spec.T && ran; ++t) {
        const TttLinearCase token = slice_tokens(problem, t, t + 1);
        const auto results =
            unless_declined(Mode::kStep, name, [&] { return support::step(token, open, context_for(name)); });
        ran = results.has_value();
        if (!ran) break;
        open = open_after(*results);
        EXPECT_LT(support::compare(results->o, slice(whole.o, 1, t, t + 1)).relative_rms, 1e-5) << name << " " << t;
      }
      if (!ran) continue;
      EXPECT_LT(support::compare(open.state, whole.final_state).relative_rms, 1e-5) << name;
      EXPECT_LT(support::compare(open.state_bias, whole.final_state_bias).relative_rms, 1e-5) << name;
      for (const Tensor* rest : {&open.gradient, &open.gradient_bias, &open.position}) {
        for (double value : rest->values()) ASSERT_EQ(value, 0) << name;
      }
    }
  }
}

}  // namespace
}  // namespace fastweight::test
