// Where the bits of a result may not change: from run to run, with the thread count, with the company in a batch, and
// when a sequence is cut at a chunk boundary and its state carried over.
//
// Sums over sequences (da_log, ddt_bias) belong to a whole call, so the last two say nothing about them. The reference
// keeps its state in double: it carries it exactly in a problem in double.
#include <gtest/gtest.h>

#include "tests/delta_rule/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

// Every implementation by name, and the automatic choice.
std::vector<std::string> choices(const std::string& mode) {
  std::vector<std::string> names = implementations(mode);
  if (!names.empty()) names.emplace_back();
  return names;
}

DeltaRuleCase exact_for(const std::string& implementation, const DeltaRuleCase& problem) {
  return implementation == "reference" ? support::in_double(problem) : problem;
}

std::vector<DeltaRuleSpec> specs(Gate gate, int64_t T) {
  DeltaRuleSpec plain = with_heads(spec_of(gate, T, 20, 36), 2, gate == Gate::kNone ? 1 : 2);
  DeltaRuleSpec options = plain;
  options.options.qk_l2norm = options.options.beta_sigmoid = options.options.state_v_first = true;
  options.options.gate_in_kernel = gate != Gate::kNone;
  DeltaRuleSpec wide = spec_of(gate, T, 128, 128);
  wide.dtype = DType::kBF16;
  return first<DeltaRuleSpec>({plain, options, wide}, 2);
}

class Contract : public ::testing::TestWithParam<Gate> {};

TEST_P(Contract, SameBitsForEveryThreadCount) {
  for (DeltaRuleSpec spec : specs(GetParam(), 133)) {
    spec.B = 3;
    for (const DeltaRuleSpec& one : {spec, with_lengths(spec, {5, 0, 64, 1, 63})}) {
      const DeltaRuleCase problem = draw(one, 81);
      for (const std::string& name : choices("forward")) {
        const auto run = [&](int threads) { return support::forward(problem, context_for(name, threads), true); };
        const auto expected = unless_declined("forward", name, [&] { return run(1); });
        if (!expected) continue;
        for (int threads : {1, 2, 3, 7}) expect_same_bits(run(threads), *expected, describe(one));
      }
      for (const std::string& name : choices("backward")) {
        const auto run = [&](int threads) { return support::backward(problem, context_for(name, threads)); };
        const auto expected = unless_declined("backward", name, [&] { return run(1); });
        if (!expected) continue;
        for (int threads : {1, 2, 3, 7}) expect_same_bits(run(threads), *expected, describe(one));
      }
      for (const std::string& name : choices("step")) {
        const auto run = [&](int threads) { return support::step(problem, context_for(name, threads)); };
        const auto expected = unless_declined("step", name, [&] { return run(1); });
        if (!expected) continue;
        for (int threads : {1, 2, 3, 7}) expect_same_bits(run(threads), *expected, describe(one));
      }
    }
  }
}

// Sequence n of a batch or of a packed problem, as a problem of its own.
DeltaRuleCase alone(const DeltaRuleCase& problem, int64_t n) {
  DeltaRuleCase part = problem;
  if (problem.spec.cu_seqlens.empty()) {
    part.spec.B = 1;
    for (Tensor* x : {&part.q, &part.k, &part.v, &part.g, &part.beta, &part.d_o}) *x = slice(*x, 0, n, n + 1);
  } else {
    const size_t i = static_cast<size_t>(n);
    part = slice_tokens(problem, problem.spec.cu_seqlens[i], problem.spec.cu_seqlens[i + 1]);
  }
  for (Tensor* x : {&part.initial_state, &part.d_final_state}) *x = slice(*x, 0, n, n + 1);
  return part;
}

// What sequence n got in a result of the whole problem, without the sums over sequences.
DeltaRuleResults share_of(const DeltaRuleResults& results, const DeltaRuleSpec& spec, int64_t n) {
  DeltaRuleResults share = results;
  const bool packed = !spec.cu_seqlens.empty();
  const int64_t begin = packed ? spec.cu_seqlens[static_cast<size_t>(n)] : n;
  const int64_t end = packed ? spec.cu_seqlens[static_cast<size_t>(n) + 1] : n + 1;
  for (Tensor* x : {&share.o, &share.dq, &share.dk, &share.dv, &share.dg, &share.dbeta}) {
    *x = slice(*x, packed ? 1 : 0, begin, end);
  }
  for (Tensor* x : {&share.final_state, &share.d_initial_state}) *x = slice(*x, 0, n, n + 1);
  share.chunk_states = share.da_log = share.ddt_bias = {};
  return share;
}

TEST_P(Contract, SameBitsAloneAndInABatch) {
  for (DeltaRuleSpec spec : specs(GetParam(), 69)) {
    spec.B = 3;
    for (const DeltaRuleSpec& one : {spec, with_lengths(spec, {5, 0, 64, 1, 70})}) {
      const DeltaRuleCase problem = draw(one, 82);
      const int64_t sequences = one.cu_seqlens.empty() ? one.B : static_cast<int64_t>(one.cu_seqlens.size()) - 1;
      const auto check = [&](const std::string& mode, const auto& run) {
        for (const std::string& name : choices(mode)) {
          const auto whole = unless_declined(mode, name, [&] { return run(problem, context_for(name)); });
          if (!whole) continue;
          for (int64_t n = 0; n < sequences; ++n) {
            DeltaRuleResults part = run(alone(problem, n), context_for(name));
            part.da_log = part.ddt_bias = {};
            expect_same_bits(part, share_of(*whole, one, n), describe(one) + ", sequence " + std::to_string(n));
          }
        }
      };
      check("forward", [](const DeltaRuleCase& x, const Context& c) { return support::forward(x, c); });
      check("backward", [](const DeltaRuleCase& x, const Context& c) { return support::backward(x, c); });
      check("step", [](const DeltaRuleCase& x, const Context& c) { return support::step(x, c); });
    }
  }
}

// Tokens of the whole length, and where it is cut: with short tails, and with more than one chunk on either side.
struct Cut {
  int64_t tokens, at;
  int32_t chunk_size;
};
constexpr Cut kCuts[] = {{69, 64, 64}, {129, 128, 64}, {128, 64, 64}, {150, 64, 64}, {257, 192, 64}, {65, 64, 64},
                         {37, 32, 32}, {100, 32, 32},  {17, 16, 16},  {50, 32, 16},  {130, 112, 16}, {81, 16, 16}};

std::vector<Cut> cuts() { return first<Cut>({std::begin(kCuts), std::end(kCuts)}, 3); }

void cut_forward(const DeltaRuleCase& given, int64_t at, const std::string& name) {
  const DeltaRuleCase problem = exact_for(name, given);
  const auto whole = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  const DeltaRuleCase head = slice_tokens(problem, 0, at);
  DeltaRuleCase tail = slice_tokens(problem, at, problem.spec.T);
  DeltaRuleResults first_part = support::forward(head, context_for(name));
  tail.spec.initial_state = true;
  tail.initial_state = first_part.final_state;
  const DeltaRuleResults second_part = support::forward(tail, context_for(name));

  first_part.final_state = {};
  DeltaRuleResults expected = *whole;
  expected.o = slice(whole->o, 1, at, problem.spec.T);
  expect_same_bits(second_part, expected, what + ", tail");
  expected.o = slice(whole->o, 1, 0, at);
  expected.final_state = {};
  expect_same_bits(first_part, expected, what + ", head");
}

void cut_backward(const DeltaRuleCase& given, int64_t at, const std::string& name) {
  const DeltaRuleCase problem = exact_for(name, given);
  const auto whole = unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  const std::vector<std::string> forwards = implementations("forward");
  const bool has_forward = std::find(forwards.begin(), forwards.end(), name) != forwards.end();

  DeltaRuleCase head = slice_tokens(problem, 0, at);
  DeltaRuleCase tail = slice_tokens(problem, at, problem.spec.T);
  tail.spec.initial_state = true;
  tail.initial_state = support::forward(head, context_for(has_forward ? name : "")).final_state;
  DeltaRuleResults second_part = support::backward(tail, context_for(name));
  head.d_final_state = second_part.d_initial_state;
  DeltaRuleResults first_part = support::backward(head, context_for(name));

  const auto rows = [&](int64_t begin, int64_t end) {
    DeltaRuleResults part = *whole;
    for (Tensor* x : {&part.dq, &part.dk, &part.dv, &part.dg, &part.dbeta}) *x = slice(*x, 1, begin, end);
    part.da_log = part.ddt_bias = {};
    return part;
  };
  DeltaRuleResults expected = rows(at, problem.spec.T);
  expected.d_initial_state = second_part.d_initial_state;
  second_part.da_log = second_part.ddt_bias = {};
  expect_same_bits(second_part, expected, what + ", tail");
  first_part.da_log = first_part.ddt_bias = {};
  expect_same_bits(first_part, rows(0, at), what + ", head");
}

TEST_P(Contract, SameBitsWhenCut) {
  for (const Cut& cut : cuts()) {
    for (DeltaRuleSpec spec : specs(GetParam(), cut.tokens)) {
      spec.options.chunk_size = cut.chunk_size;
      const DeltaRuleCase problem = draw(spec, 83);
      for (const std::string& name : choices("forward")) cut_forward(problem, cut.at, name);
      for (const std::string& name : choices("backward")) cut_backward(problem, cut.at, name);
    }
  }
}

// In many pieces.
TEST_P(Contract, SameBitsChunkByChunk) {
  for (DeltaRuleSpec spec : specs(GetParam(), 200)) {
    const DeltaRuleCase given = draw(spec, 84);
    for (const std::string& name : choices("forward")) {
      const DeltaRuleCase problem = exact_for(name, given);
      const auto whole =
          unless_declined("forward", name, [&] { return support::forward(problem, context_for(name), true); });
      if (!whole) continue;
      Tensor state = problem.initial_state;
      const int64_t C = spec.options.chunk_size;
      for (int64_t begin = 0; begin < spec.T; begin += C) {
        const int64_t end = std::min(begin + C, spec.T);
        DeltaRuleCase part = slice_tokens(problem, begin, end);
        part.initial_state = state;
        const DeltaRuleResults results = support::forward(part, context_for(name));
        EXPECT_TRUE(support::same_bits(results.o, slice(whole->o, 1, begin, end)))
            << results.implementation << " o at " << begin << " " << describe(spec);
        const Tensor saved = slice(whole->chunk_states, 1, begin / C, begin / C + 1);
        EXPECT_TRUE(saved.values() == state.to(saved.dtype()).values())
            << results.implementation << " chunk state at " << begin << " " << describe(spec);
        state = results.final_state;
      }
      EXPECT_TRUE(support::same_bits(state, whole->final_state)) << whole->implementation << " " << describe(spec);
    }
  }
}

// The backward from the forward's saved chunk states.
TEST_P(Contract, SameBitsFromSavedStates) {
  for (const DeltaRuleSpec& spec : specs(GetParam(), 150)) {
    const DeltaRuleCase given = draw(spec, 85);
    for (const std::string& name : choices("backward")) {
      const DeltaRuleCase problem = exact_for(name, given);
      const auto expected =
          unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
      if (!expected) continue;
      const std::vector<std::string> forwards = implementations("forward");
      const bool has_forward = std::find(forwards.begin(), forwards.end(), name) != forwards.end();
      const Tensor saved = support::forward(problem, context_for(has_forward ? name : ""), true).chunk_states;
      expect_same_bits(support::backward(problem, context_for(name), saved), *expected, describe(spec));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Contract, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
