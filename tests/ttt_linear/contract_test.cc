// What tests/contract.h promises, for TTT-linear, and that the state carries over from a forward to steps and from step
// to step.
#include <gtest/gtest.h>

#include "tests/contract.h"
#include "tests/ttt_linear/grid.h"

namespace fastweight::test {
namespace {

using support::draw;

std::vector<TttLinearSpec> specs(int64_t T) {
  TttLinearSpec half = spec_of(T, 36), bfloat = spec_of(T, 64);
  half.dtype = DType::kF16;
  bfloat.dtype = DType::kBF16;
  return first<TttLinearSpec>({spec_of(T, 20, 2), half, spec_of(T, 128), bfloat}, 2);
}

TEST(Contract, SameBitsForEveryThreadCount) {
  for (const TttLinearSpec& spec : specs(reduced() ? 69 : 133)) {
    expect_same_for_every_thread_count(draw(with_batch(spec, 3), 81));
    expect_same_for_every_thread_count(draw(with_lengths(spec, {5, 0, 64, 1, 63}), 81));
  }
}

TEST(Contract, SameBitsAloneAndInABatch) {
  for (const TttLinearSpec& spec : specs(69)) {
    expect_same_alone(draw(with_batch(spec, 3), 82));
    expect_same_alone(draw(with_lengths(spec, {5, 0, 64, 1, 70}), 82));
  }
}

// Whatever a token holds, the tokens before it do not see it; in the backward, those after it do not see its gradient.
TEST(Contract, SameBitsBeforeWhatIsNotANumber) {
  constexpr int64_t kTokens = 75;
  for (const TttLinearSpec& spec : specs(kTokens)) {
    const TttLinearCase problem = draw(spec, 86);
    for (int64_t token : first<int64_t>({25, 72, 47, 16}, 2)) {
      expect_not_reached(Mode::kForward, problem,
                         {&TttLinearCase::q, &TttLinearCase::k, &TttLinearCase::v, &TttLinearCase::eta}, token, 0,
                         token);
      expect_not_reached(Mode::kBackward, problem, {&TttLinearCase::d_o}, token, token + 1, kTokens);
    }
  }
}

// A chunk is a mini-batch.
TEST(Contract, SameBitsWhenCut) {
  for (const Cut& cut : cuts()) {
    for (TttLinearSpec spec : specs(cut.tokens)) {
      spec.options.mini_batch = cut.chunk_size;
      expect_same_when_cut(draw(spec, 83), cut.at);
    }
  }
}

// One call of a step with all tokens, and one call for each token.
TEST(Contract, SameBitsTokenByToken) {
  for (const TttLinearSpec& spec : specs(37)) {
    const TttLinearCase given = draw(spec, 84);
    for (const std::string& name : and_automatic(implementations(Mode::kStep))) {
      const TttLinearCase problem = exact_for(name, given);
      const auto whole = unless_declined(Mode::kStep, name, [&] { return support::step(problem, context_for(name)); });
      if (!whole) continue;
      TttLinearOpen open = support::opened(problem);
      for (int64_t t = 0; t < spec.T; ++t) {
        const TttLinearResults one = support::step(slice_tokens(problem, t, t + 1), open, context_for(name));
        EXPECT_TRUE(support::same_bits(one.o, slice(whole->o, 1, t, t + 1)))
            << whole->implementation << " token " << t << " " << describe(spec);
        open = open_after(one);
      }
      EXPECT_TRUE(support::same_bits(open.state, whole->final_state) &&
                  support::same_bits(open.state_bias, whole->final_state_bias) &&
                  support::same_bits(open.gradient, whole->gradient) &&
                  support::same_bits(open.gradient_bias, whole->gradient_bias) &&
                  support::same_bits(open.position, whole->position))
          << whole->implementation << " " << describe(spec);
    }
  }
}

// A prefill by the forward and steps after it end in the state of one forward, where a mini-batch ends.
TEST(Contract, SameBitsAfterPrefillAndSteps) {
  for (TttLinearSpec spec : specs(192)) {
    for (int32_t mini_batch : {16, 32, 64}) {
      spec.options.mini_batch = mini_batch;
      const TttLinearCase given = draw(spec, 85);
      for (const std::string& name : and_automatic(implementations(Mode::kStep))) {
        const TttLinearCase problem = exact_for(name, given);
        const auto whole =
            unless_declined(Mode::kForward, name, [&] { return support::forward(problem, context_for(name)); });
        if (!whole) continue;
        for (int64_t at : {0, 64, 128}) {
          const TttLinearResults head = support::forward(slice_tokens(problem, 0, at), context_for(name));
          const TttLinearCase tail = tail_after(problem, at, head);
          const TttLinearResults steps = support::step(tail, context_for(name));
          // On a device the choice for a forward may be a form that has no step.
          if (steps.implementation != whole->implementation) continue;
          EXPECT_TRUE(support::same_bits(steps.final_state, whole->final_state) &&
                      support::same_bits(steps.final_state_bias, whole->final_state_bias))
              << steps.implementation << " " << describe(spec) << ", prefill of " << at;
        }
      }
    }
  }
}

// The reference's step does what its forward does, bit for bit.
TEST(Contract, ReferenceStepIsItsForward) {
  for (const TttLinearSpec& spec : specs(48)) {
    const TttLinearCase problem = support::in_double(draw(spec, 86));
    const TttLinearResults whole = support::forward(problem, reference_context());
    TttLinearResults steps = support::step(problem, reference_context());
    steps.gradient = steps.gradient_bias = steps.position = {};
    expect_same_bits(steps, whole, describe(spec));
  }
}

}  // namespace
}  // namespace fastweight::test
