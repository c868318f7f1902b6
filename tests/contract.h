// Where the bits of a result may not change, for every family alike: from run to run, with the thread count, with the
// company in a batch, when a sequence is cut at a chunk boundary and its state carried over, and by what comes later.
//
// A family's Case and Results say which of their tensors belong to tokens and which to the ends of sequences
// (per_token, initial_states, ..). The rest of the results are sums over a whole call (of_the_call): only the first two
// hold for them. The reference keeps its state in double: it carries it exactly in a problem in double. To be included
// after the family's cases.h, whose describe(spec) it calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/random.h"
#include "tests/testing.h"

namespace fastweight::test {

// Every implementation by name, and, if there is any, the automatic choice, which is one of them once more.
inline std::vector<std::string> and_automatic(std::vector<std::string> names) {
  if (!names.empty() && !reduced()) names.emplace_back();
  return names;
}

template <class Case>
Case exact_for(const std::string& implementation, const Case& problem) {
  return implementation == "reference" ? in_double(problem) : problem;
}

// Sequence n of a batch or of a packed problem, as a problem of its own.
template <class Case>
Case alone(const Case& problem, int64_t n) {
  Case part = problem;
  if (problem.spec.cu_seqlens.empty()) {
    part.spec.B = 1;
    for (Tensor* x : part.per_token()) *x = slice(*x, 0, n, n + 1);
  } else {
    const size_t i = static_cast<size_t>(n);
    part = slice_tokens(problem, problem.spec.cu_seqlens[i], problem.spec.cu_seqlens[i + 1]);
  }
  for (Tensor* x : part.initial_states()) *x = slice(*x, 0, n, n + 1);
  for (Tensor* x : part.final_gradients()) *x = slice(*x, 0, n, n + 1);
  return part;
}

template <class Results>
Results without_sums(Results results) {
  for (Tensor* x : results.of_the_call()) *x = {};
  return results;
}

// What sequence n got in a result of the whole problem.
template <class Results, class Spec>
Results share_of(const Results& results, const Spec& spec, int64_t n) {
  Results share = without_sums(results);
  const bool packed = !spec.cu_seqlens.empty();
  const int64_t begin = packed ? spec.cu_seqlens[static_cast<size_t>(n)] : n;
  const int64_t end = packed ? spec.cu_seqlens[static_cast<size_t>(n) + 1] : n + 1;
  for (Tensor* x : share.per_token()) *x = slice(*x, packed ? 1 : 0, begin, end);
  for (Tensor* x : share.final_states()) *x = slice(*x, 0, n, n + 1);
  for (Tensor* x : share.initial_gradients()) *x = slice(*x, 0, n, n + 1);
  return share;
}

// run(problem, context) of `mode` gives the same for every number of threads, which on a device means: again. The
// problem has to be large enough for more than one (cpu/partition.h).
template <class Case, class Run>
void expect_same_for_every_thread_count(const Case& problem, const std::vector<std::string>& names,
                                        const std::string& mode, const Run& run) {
  for (const std::string& name : and_automatic(names)) {
    const auto expected = unless_declined(mode, name, [&] { return run(problem, context_for(name, 1)); });
    if (!expected) continue;
    const bool on_cpu = device().type == DeviceType::kCpu;
    for (int threads : on_cpu ? first<int>({7, 1, 2, 3}, 1) : std::vector{1}) {
      expect_same_bits(run(problem, context_for(name, threads)), *expected, describe(problem.spec));
    }
  }
}

// .. and for every sequence alone.
template <class Case, class Run>
void expect_same_alone(const Case& problem, const std::vector<std::string>& names, const std::string& mode,
                       const Run& run) {
  for (const std::string& name : and_automatic(names)) {
    const auto whole = unless_declined(mode, name, [&] { return run(problem, context_for(name)); });
    if (!whole) continue;
    for (int64_t n = 0; n < support::num_sequences(problem.spec); ++n) {
      expect_same_bits(without_sums(run(alone(problem, n), context_for(name))), share_of(*whole, problem.spec, n),
                       describe(problem.spec) + ", sequence " + std::to_string(n));
    }
  }
}

// Tokens of the whole length, and where it is cut: with short tails, and with more than one chunk on either side.
struct Cut {
  int64_t tokens, at;
  int32_t chunk_size;
};
inline std::vector<Cut> cuts() {
  return first<Cut>({{69, 64, 64},
                     {17, 16, 16},
                     {100, 32, 32},
                     {129, 128, 64},
                     {128, 64, 64},
                     {150, 64, 64},
                     {257, 192, 64},
                     {65, 64, 64},
                     {37, 32, 32},
                     {50, 32, 16},
                     {130, 112, 16},
                     {81, 16, 16}},
                    3);
}

// As many as there are in `to`.
inline void copy_tensors(const std::vector<Tensor*>& from, const std::vector<Tensor*>& to) {
  for (size_t i = 0; i < to.size(); ++i) *to[i] = *from[i];
}

// The tail of a problem that goes on where `head`, a result of a forward, ended.
template <class Case, class Results>
Case tail_after(const Case& problem, int64_t at, Results head) {
  Case tail = slice_tokens(problem, at, problem.spec.T);
  copy_tensors(head.final_states(), tail.initial_states());
  return tail;
}

// The rows of tokens [begin, end) of the results.
template <class Results>
Results rows_of(const Results& results, int64_t begin, int64_t end) {
  Results part = without_sums(results);
  for (Tensor* x : part.per_token()) *x = slice(*x, 1, begin, end);
  return part;
}

// A token that is not a number in one of the tensors does not reach the tokens [begin, end). On a device, where a chunk
// is one product on tensor cores, it may reach all of its own chunk.
template <class Case, class Run>
void expect_not_reached(const Case& problem, const std::vector<Tensor Case::*>& tensors, int64_t token, int64_t begin,
                        int64_t end, const std::vector<std::string>& names, const std::string& mode, const Run& run) {
  const int64_t reach = device().type == DeviceType::kCpu ? 1 : 64;
  begin = (begin + reach - 1) / reach * reach;
  end = end == problem.spec.T ? end : end / reach * reach;
  if (begin >= end) return;
  const auto tokens = [&](const auto& results) {
    auto part = rows_of(results, begin, end);
    for (Tensor* x : part.final_states()) *x = {};
    for (Tensor* x : part.initial_gradients()) *x = {};
    return part;
  };
  for (const std::string& name : and_automatic(names)) {
    const auto expected = unless_declined(mode, name, [&] { return run(problem, context_for(name)); });
    if (!expected) continue;
    for (Tensor Case::*tensor : tensors) {
      if (!(problem.*tensor).present()) continue;
      Case changed = problem;
      const int64_t width = (problem.*tensor).size() / problem.spec.T;
      for (int64_t i = 0; i < width; ++i) (changed.*tensor).set(token * width + i, std::nan(""));
      expect_same_bits(tokens(run(changed, context_for(name))), tokens(*expected),
                       describe(problem.spec) + ", not a number at " + std::to_string(token));
    }
  }
}

template <class Case>
void expect_same_when_forward_is_cut(const Case& given, int64_t at, const std::string& name) {
  const Case problem = exact_for(name, given);
  const auto whole = unless_declined("forward", name, [&] { return forward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  auto head = forward(slice_tokens(problem, 0, at), context_for(name));
  expect_same_bits(forward(tail_after(problem, at, head), context_for(name)), rows_of(*whole, at, problem.spec.T),
                   what + ", tail");
  auto expected = rows_of(*whole, 0, at);
  for (Tensor* x : head.final_states()) *x = {};
  for (Tensor* x : expected.final_states()) *x = {};
  expect_same_bits(head, expected, what + ", head");
}

// The head's final state comes from the forward of the same name, where there is one.
template <class Case>
void expect_same_when_backward_is_cut(const Case& given, int64_t at, const std::string& name,
                                      const std::vector<std::string>& forwards) {
  const Case problem = exact_for(name, given);
  const auto whole = unless_declined("backward", name, [&] { return backward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  const bool has_forward = std::find(forwards.begin(), forwards.end(), name) != forwards.end();
  Case head = slice_tokens(problem, 0, at);
  Case tail = tail_after(problem, at, forward(head, context_for(has_forward ? name : "")));
  auto second_part = without_sums(backward(tail, context_for(name)));
  copy_tensors(second_part.initial_gradients(), head.final_gradients());
  expect_same_bits(without_sums(backward(head, context_for(name))), rows_of(*whole, 0, at), what + ", head");
  auto expected = rows_of(*whole, at, problem.spec.T);
  copy_tensors(second_part.initial_gradients(), expected.initial_gradients());
  expect_same_bits(second_part, expected, what + ", tail");
}

// In many pieces, with the chunk states of the whole in between.
template <class Case>
void expect_same_chunk_by_chunk(const Case& given, int64_t chunk_size, const std::string& name) {
  const Case problem = exact_for(name, given);
  const auto whole = unless_declined("forward", name, [&] { return forward(problem, context_for(name), true); });
  if (!whole) return;
  Tensor state = problem.initial_state;
  const int64_t T = problem.spec.T;
  for (int64_t begin = 0; begin < T; begin += chunk_size) {
    const int64_t end = std::min(begin + chunk_size, T);
    Case part = slice_tokens(problem, begin, end);
    part.initial_state = state;
    const auto results = forward(part, context_for(name));
    EXPECT_TRUE(support::same_bits(results.o, slice(whole->o, 1, begin, end)))
        << results.implementation << " o at " << begin << " " << describe(given.spec);
    const Tensor saved = slice(whole->chunk_states, 1, begin / chunk_size, begin / chunk_size + 1);
    EXPECT_TRUE(saved.values() == state.to(saved.dtype()).values())
        << results.implementation << " chunk state at " << begin << " " << describe(given.spec);
    state = results.final_state;
  }
  EXPECT_TRUE(support::same_bits(state, whole->final_state)) << whole->implementation << " " << describe(given.spec);
}

// The backward from the chunk states that the forward of the same name, where there is one, has saved.
template <class Case>
void expect_same_from_saved_states(const Case& given, const std::string& name,
                                   const std::vector<std::string>& forwards) {
  const Case problem = exact_for(name, given);
  const auto expected = unless_declined("backward", name, [&] { return backward(problem, context_for(name)); });
  if (!expected) return;
  const bool has_forward = std::find(forwards.begin(), forwards.end(), name) != forwards.end();
  const Tensor saved = forward(problem, context_for(has_forward ? name : ""), true).chunk_states;
  expect_same_bits(backward(problem, context_for(name), saved), *expected, describe(given.spec));
}

}  // namespace fastweight::test
