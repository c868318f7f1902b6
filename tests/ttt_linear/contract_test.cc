// Where the bits of a result may not change: from run to run, with the thread count, with the company in a batch, when
// a sequence is cut at a mini-batch boundary and its state carried over, to a forward or to steps, and when a step
// takes its tokens one by one.
//
// Sums over sequences (dw, db) belong to a whole call: only the first two hold for them. The reference keeps its state
// in double: it carries it exactly in a problem in double.
#include <gtest/gtest.h>

#include "tests/ttt_linear/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

// Every implementation by name, and the automatic choice.
std::vector<std::string> choices(const std::string& mode) {
  std::vector<std::string> names = implementations(mode);
  names.emplace_back();
  return names;
}

TttLinearCase exact_for(const std::string& implementation, const TttLinearCase& problem) {
  return implementation == "reference" ? support::in_double(problem) : problem;
}

std::vector<TttLinearSpec> specs(int64_t T) {
  TttLinearSpec bfloat = spec_of(T, 64);
  bfloat.dtype = DType::kBF16;
  return first<TttLinearSpec>({spec_of(T, 20, 2), spec_of(T, 128), bfloat}, 1);
}

template <class Run>
void expect_same_for_every_thread_count(const std::string& mode, const TttLinearSpec& spec, const Run& run) {
  for (const std::string& name : choices(mode)) {
    const auto expected = unless_declined(mode, name, [&] { return run(context_for(name, 1)); });
    if (!expected) continue;
    for (int threads : {1, 2, 3, 7}) expect_same_bits(run(context_for(name, threads)), *expected, describe(spec));
  }
}

TEST(Contract, SameBitsForEveryThreadCount) {
  for (TttLinearSpec spec : specs(133)) {
    spec.B = 3;
    for (const TttLinearSpec& one : {spec, with_lengths(spec, {5, 0, 64, 1, 63})}) {
      const TttLinearCase problem = draw(one, 81);
      expect_same_for_every_thread_count("forward", one,
                                         [&](const Context& c) { return support::forward(problem, c); });
      expect_same_for_every_thread_count("backward", one,
                                         [&](const Context& c) { return support::backward(problem, c); });
      expect_same_for_every_thread_count("step", one, [&](const Context& c) { return support::step(problem, c); });
    }
  }
}

// Sequence n of a batch or of a packed problem, as a problem of its own.
TttLinearCase alone(const TttLinearCase& problem, int64_t n) {
  TttLinearCase part = problem;
  if (problem.spec.cu_seqlens.empty()) {
    part.spec.B = 1;
    for (Tensor* x : {&part.q, &part.k, &part.v, &part.eta, &part.d_o}) *x = slice(*x, 0, n, n + 1);
  } else {
    const size_t i = static_cast<size_t>(n);
    part = slice_tokens(problem, problem.spec.cu_seqlens[i], problem.spec.cu_seqlens[i + 1]);
  }
  for (Tensor* x : {&part.initial_state, &part.initial_state_bias, &part.d_final_state, &part.d_final_state_bias}) {
    *x = slice(*x, 0, n, n + 1);
  }
  return part;
}

// What sequence n got in a result of the whole problem, without the sums over sequences.
TttLinearResults share_of(const TttLinearResults& results, const TttLinearSpec& spec, int64_t n) {
  TttLinearResults share = results;
  const bool packed = !spec.cu_seqlens.empty();
  const int64_t begin = packed ? spec.cu_seqlens[static_cast<size_t>(n)] : n;
  const int64_t end = packed ? spec.cu_seqlens[static_cast<size_t>(n) + 1] : n + 1;
  for (Tensor* x : {&share.o, &share.dq, &share.dk, &share.dv, &share.deta}) {
    *x = slice(*x, packed ? 1 : 0, begin, end);
  }
  for (Tensor* x : {&share.final_state, &share.final_state_bias, &share.gradient, &share.gradient_bias, &share.position,
                    &share.d_initial_state, &share.d_initial_state_bias}) {
    *x = slice(*x, 0, n, n + 1);
  }
  share.dw = share.db = {};
  return share;
}

TEST(Contract, SameBitsAloneAndInABatch) {
  for (TttLinearSpec spec : specs(69)) {
    spec.B = 3;
    for (const TttLinearSpec& one : {spec, with_lengths(spec, {5, 0, 64, 1, 70})}) {
      const TttLinearCase problem = draw(one, 82);
      const auto check = [&](const std::string& mode, const auto& run) {
        for (const std::string& name : choices(mode)) {
          const auto whole = unless_declined(mode, name, [&] { return run(problem, context_for(name)); });
          if (!whole) continue;
          for (int64_t n = 0; n < num_sequences(one); ++n) {
            TttLinearResults part = run(alone(problem, n), context_for(name));
            part.dw = part.db = {};
            expect_same_bits(part, share_of(*whole, one, n), describe(one) + ", sequence " + std::to_string(n));
          }
        }
      };
      check("forward", [](const TttLinearCase& x, const Context& c) { return support::forward(x, c); });
      check("backward", [](const TttLinearCase& x, const Context& c) { return support::backward(x, c); });
      check("step", [](const TttLinearCase& x, const Context& c) { return support::step(x, c); });
    }
  }
}

// Tokens of the whole length, and where it is cut: with short tails, and with more than one mini-batch on either side.
struct Cut {
  int64_t tokens, at;
  int32_t mini_batch;
};
constexpr Cut kCuts[] = {{17, 16, 16}, {50, 32, 16},   {130, 112, 16}, {81, 16, 16},  {37, 32, 32},   {100, 32, 32},
                         {69, 64, 64}, {129, 128, 64}, {128, 64, 64},  {150, 64, 64}, {257, 192, 64}, {65, 64, 64}};

std::vector<Cut> cuts() { return first<Cut>({std::begin(kCuts), std::end(kCuts)}, 3); }

// The tail of a problem that goes on where `head` ended.
TttLinearCase tail_after(const TttLinearCase& problem, int64_t at, const TttLinearResults& head) {
  TttLinearCase tail = slice_tokens(problem, at, problem.spec.T);
  tail.initial_state = head.final_state;
  tail.initial_state_bias = head.final_state_bias;
  return tail;
}

void cut_forward(const TttLinearCase& given, int64_t at, const std::string& name) {
  const TttLinearCase problem = exact_for(name, given);
  const auto whole = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  TttLinearResults head = support::forward(slice_tokens(problem, 0, at), context_for(name));
  const TttLinearResults tail = support::forward(tail_after(problem, at, head), context_for(name));

  TttLinearResults expected = *whole;
  expected.o = slice(whole->o, 1, at, problem.spec.T);
  expect_same_bits(tail, expected, what + ", tail");
  head.final_state = head.final_state_bias = expected.final_state = expected.final_state_bias = {};
  expected.o = slice(whole->o, 1, 0, at);
  expect_same_bits(head, expected, what + ", head");
}

void cut_backward(const TttLinearCase& given, int64_t at, const std::string& name) {
  const TttLinearCase problem = exact_for(name, given);
  const auto whole = unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  TttLinearCase head = slice_tokens(problem, 0, at);
  const TttLinearCase tail = tail_after(problem, at, support::forward(head, context_for(name)));
  TttLinearResults second_part = support::backward(tail, context_for(name));
  head.d_final_state = second_part.d_initial_state;
  head.d_final_state_bias = second_part.d_initial_state_bias;
  TttLinearResults first_part = support::backward(head, context_for(name));

  const auto rows = [&](int64_t begin, int64_t end) {
    TttLinearResults part = *whole;
    for (Tensor* x : {&part.dq, &part.dk, &part.dv, &part.deta}) *x = slice(*x, 1, begin, end);
    part.dw = part.db = {};
    return part;
  };
  for (TttLinearResults* part : {&first_part, &second_part}) part->dw = part->db = {};
  expect_same_bits(first_part, rows(0, at), what + ", head");
  TttLinearResults expected = rows(at, problem.spec.T);
  expected.d_initial_state = second_part.d_initial_state;
  expected.d_initial_state_bias = second_part.d_initial_state_bias;
  expect_same_bits(second_part, expected, what + ", tail");
}

TEST(Contract, SameBitsWhenCut) {
  for (const Cut& cut : cuts()) {
    for (TttLinearSpec spec : specs(cut.tokens)) {
      spec.options.mini_batch = cut.mini_batch;
      const TttLinearCase problem = draw(spec, 83);
      for (const std::string& name : choices("forward")) cut_forward(problem, cut.at, name);
      for (const std::string& name : choices("backward")) cut_backward(problem, cut.at, name);
    }
  }
}

// One call of a step with all tokens, and one call for each token.
TEST(Contract, SameBitsTokenByToken) {
  for (const TttLinearSpec& spec : specs(37)) {
    const TttLinearCase given = draw(spec, 84);
    for (const std::string& name : choices("step")) {
      const TttLinearCase problem = exact_for(name, given);
      const auto whole = unless_declined("step", name, [&] { return support::step(problem, context_for(name)); });
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
      for (const std::string& name : choices("step")) {
        const TttLinearCase problem = exact_for(name, given);
        const auto whole =
            unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
        if (!whole) continue;
        for (int64_t at : {0, 64, 128}) {
          const TttLinearResults head = support::forward(slice_tokens(problem, 0, at), context_for(name));
          const TttLinearCase tail = tail_after(problem, at, head);
          const TttLinearResults steps = support::step(tail, context_for(name));
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
