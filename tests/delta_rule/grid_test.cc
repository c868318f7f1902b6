// Every implementation of every mode on the grid, and what a grid does not say: tensors of a call in relation to each
// other, saved states, decoding.
#include "tests/delta_rule/grid.h"

#include <gtest/gtest.h>

#include "tests/contract.h"

namespace fastweight::test {
namespace {

using support::draw;

class Grid : public ::testing::TestWithParam<GridCase<DeltaRuleCase>> {};

TEST_P(Grid, EveryImplementation) { GetParam().run(); }

INSTANTIATE_TEST_SUITE_P(DeltaRule, Grid, ::testing::ValuesIn(DeltaRuleGrid(Gate::kNone).cases()), kCaseName);
INSTANTIATE_TEST_SUITE_P(Gdn, Grid, ::testing::ValuesIn(DeltaRuleGrid(Gate::kPerHead).cases()), kCaseName);
INSTANTIATE_TEST_SUITE_P(Kda, Grid, ::testing::ValuesIn(DeltaRuleGrid(Gate::kPerChannel).cases()), kCaseName);

class Calls : public ::testing::TestWithParam<Gate> {
 protected:
  static DeltaRuleSpec spec(int64_t T, int64_t K, int64_t V) { return spec_of(GetParam(), T, K, V); }
};

void expect_close_from_saved_states(const DeltaRuleCase& problem) {
  const Tensor states = support::forward(problem, reference_context(), true).chunk_states;
  const DeltaRuleResults expected = support::backward(support::in_double(problem), reference_context());
  for (DType dtype : {DType::kF32, problem.spec.dtype}) {
    const Tensor saved = states.to(dtype);
    for (const std::string& name : implementations(Mode::kBackward)) {
      const auto results =
          unless_declined(Mode::kBackward, name, [&] { return support::backward(problem, context_for(name), saved); });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

// q, k and v as slices of one buffer [B, T, 2 H K + HV V].
TEST_P(Calls, PackedInputs) {
  const DeltaRuleSpec one = with_batch(with_heads(spec(69, 20, 36), 2, 2), 2);
  const DeltaRuleCase problem = draw(one, 37);
  const int64_t width_qk = one.H * one.K, width = 2 * width_qk + one.HV * one.V;
  Tensor packed(DType::kF32, {one.B, one.T, width});
  const auto place = [&](TensorView& view, const Tensor& x, int64_t offset) {
    const int64_t row = x.size() / (one.B * one.T);
    for (int64_t i = 0; i < x.size(); ++i) packed.set(i / row * width + offset + i % row, x[i]);
    view.data = static_cast<float*>(packed.data()) + offset;
    view.strides = {one.T * width, width, view.shape[3], 1};
  };
  for (Mode mode : kModes) {
    for (const std::string& name : implementations(mode)) {
      const auto dense = unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name)); });
      if (!dense) continue;
      DeltaRuleResults results = outputs_of(mode, problem);
      const support::Call call = call_of(mode, problem, results);
      place(call["q"], problem.q, 0);
      place(call["k"], problem.k, width_qk);
      place(call["v"], problem.v, 2 * width_qk);
      results.implementation = call.run(context_for(name));
      expect_same_bits(results, *dense, name_of(mode));
    }
  }
}

TEST_P(Calls, BroadcastInputs) {
  expect_same_when_broadcast(draw(with_batch(with_heads(spec(69, 20, 36), 2, 1), 2), 38));
}

TEST_P(Calls, EachOutputAlone) {
  expect_same_alone_among_outputs(Mode::kForward, draw(spec(130, 20, 36), 39), "o");
  DeltaRuleSpec one = with_heads(spec(69, 20, 36), 1, 2);
  one.options.gate_in_kernel = GetParam() != Gate::kNone;
  expect_same_alone_among_outputs(Mode::kBackward, draw(one, 58));
}

// The backward from the chunk states of the reference's forward, in fp32 and in the type of k.
TEST_P(Calls, SavedStates) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (bool packed : {false, true}) {
      for (int32_t chunk_size : {16, 64}) {
        if (emulated() && packed != (chunk_size == 64)) continue;
        DeltaRuleSpec one = with_heads(spec(emulated() ? 20 : 150, 20, 36), emulated() ? 1 : 2, 2);
        if (packed) one = with_lengths(one, {5, 0, emulated() ? 66 : 130, 1, 64});
        one.dtype = dtype;
        one.options.chunk_size = chunk_size;
        one.options.state_v_first = chunk_size == 16;
        expect_close_from_saved_states(draw(one, 56));
      }
    }
  }
}

// What a state in bf16 loses, it loses once per call, when it is written.
TEST_P(Calls, StatesOfStepsInBf16) {
  for (const auto& [K, V] :
       std::vector<std::pair<int64_t, int64_t>>{{128, 128}, {64, 32}, {256, 8}, {20, 36}, {7, 5}}) {
    for (int64_t T : {1, 3}) {
      for (bool v_first : {false, true}) {
        DeltaRuleSpec one = with_batch(with_heads(spec(T, K, V), 1, 2), 2);
        one.options.state_v_first = v_first;
        DeltaRuleCase problem = draw(one, 71);
        problem.initial_state = problem.initial_state.to(DType::kBF16);
        DeltaRuleCase wide = problem;
        wide.initial_state = problem.initial_state.to(DType::kF32);
        const DeltaRuleResults expected = support::step(support::in_double(problem), reference_context());
        for (const std::string& name : implementations(Mode::kStep)) {
          const auto results =
              unless_declined(Mode::kStep, name, [&] { return support::step(problem, context_for(name)); });
          if (!results) continue;
          expect_close(problem, *results, expected);
          const DeltaRuleResults in_fp32 = support::step(wide, context_for(name));
          const Tensor& state = (name == "reference" ? expected : in_fp32).final_state;  // it computes in double
          EXPECT_TRUE(support::same_bits(results->o, in_fp32.o)) << name << " " << describe(one);
          EXPECT_TRUE(support::same_bits(results->final_state, state.to(DType::kBF16))) << name << " " << describe(one);
        }
      }
    }
  }
}

TEST_P(Calls, WideValues) {
  for (int64_t V : first<int64_t>({300, 257, 512, 1100}, 1)) {
    const DeltaRuleSpec one = with_heads(spec(37, 24, V), 1, 2);
    if (device().type == DeviceType::kCpu) {
      check(draw(one, 72));
      check(draw(with_lengths(one, {5, 0, 20, 40}), 72));
    } else {
      EXPECT_THROW(support::forward(draw(one, 72), context_for("")), Error);
    }
  }
}

// The tokens in one pass, and as a prefill followed by one step per token.
TEST_P(Calls, PrefillThenSteps) {
  const DeltaRuleSpec one = with_batch(with_heads(spec(69, 20, 36), 1, 2), 2);
  const DeltaRuleCase problem = draw(one, 67);
  const DeltaRuleResults whole = support::forward(support::in_double(problem), reference_context());
  constexpr int64_t kPrefill = 64;
  for (const std::string& name : implementations(Mode::kStep)) {
    Tensor state = support::forward(slice_tokens(problem, 0, kPrefill), context_for("")).final_state;
    bool ran = true;
    for (int64_t t = kPrefill; t < one.T && ran; ++t) {
      DeltaRuleCase token = slice_tokens(problem, t, t + 1);
      token.initial_state = state;
      const auto results = unless_declined(Mode::kStep, name, [&] { return support::step(token, context_for(name)); });
      ran = results.has_value();
      if (!ran) break;
      state = results->final_state;
      EXPECT_LT(support::compare(results->o, slice(whole.o, 1, t, t + 1)).relative_rms, 1e-5) << name << " " << t;
    }
    if (ran) {
      EXPECT_LT(support::compare(state, whole.final_state).relative_rms, 1e-5) << name;
    }
  }
}

TEST_P(Calls, StateIndices) {
  for (int64_t T : {1, 2}) expect_same_in_slots(draw(with_batch(with_heads(spec(T, 20, 36), 1, 2), 4), 68));
  expect_same_in_slots(draw(with_lengths(with_heads(spec(0, 20, 36), 1, 2), {1, 3, 0, 2}), 68));
}

INSTANTIATE_TEST_SUITE_P(Operators, Calls, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
