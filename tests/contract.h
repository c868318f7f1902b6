// Where the bits of a result may not change, for every family alike: from run to run, with the thread count, with the
// company in a batch, when a sequence is cut at a chunk boundary and its state carried over, and by what comes later.
//
// The fields of a family's Case and Results say which of their tensors belong to tokens and which to the ends of
// sequences. The rest of the results are sums over a whole call: only the first two hold for them. The reference keeps
// its state in double: it carries it exactly in a problem in double.
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
    for (Tensor* x : part.of(Part::kTokens)) *x = slice(*x, 0, n, n + 1);
  } else {
    const size_t i = static_cast<size_t>(n);
    part = slice_tokens(problem, problem.spec.cu_seqlens[i], problem.spec.cu_seqlens[i + 1]);
  }
  for (Part end : {Part::kStart, Part::kEnd}) {
    for (Tensor* x : part.of(end)) *x = slice(*x, 0, n, n + 1);
  }
  return part;
}

template <class Results>
Results without_sums(Results results) {
  for (Tensor* x : results.of(Part::kCall)) *x = {};
  return results;
}

// What sequence n got in a result of the whole problem.
template <class Results, class Spec>
Results share_of(const Results& results, const Spec& spec, int64_t n) {
  Results share = without_sums(results);
  const bool packed = !spec.cu_seqlens.empty();
  const int64_t begin = packed ? spec.cu_seqlens[static_cast<size_t>(n)] : n;
  const int64_t end = packed ? spec.cu_seqlens[static_cast<size_t>(n) + 1] : n + 1;
  for (Tensor* x : share.of(Part::kTokens)) *x = slice(*x, packed ? 1 : 0, begin, end);
  for (Part of_sequences : {Part::kStart, Part::kEnd}) {
    for (Tensor* x : share.of(of_sequences)) *x = slice(*x, 0, n, n + 1);
  }
  return share;
}

// A mode gives the same for every number of threads, which on a device means: again. The problem has to be large enough
// for more than one (cpu/partition.h).
template <class Case>
void expect_same_for_every_thread_count(const Case& problem) {
  const bool on_cpu = device().type == DeviceType::kCpu;
  for (Mode mode : kModes) {
    for (const std::string& name : and_automatic(implementations(problem.spec, mode))) {
      const auto expected =
          unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name, 1)); });
      if (!expected) continue;
      for (int threads : on_cpu ? first<int>({7, 1, 2, 3}, 1) : std::vector{1}) {
        expect_same_bits(support::run(mode, problem, context_for(name, threads)), *expected, describe(problem.spec));
      }
    }
  }
}

// .. and for every sequence alone.
template <class Case>
void expect_same_alone(const Case& problem) {
  for (Mode mode : kModes) {
    for (const std::string& name : and_automatic(implementations(problem.spec, mode))) {
      const auto whole = unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name)); });
      if (!whole) continue;
      for (int64_t n = 0; n < support::num_sequences(problem.spec); ++n) {
        expect_same_bits(without_sums(support::run(mode, alone(problem, n), context_for(name))),
                         share_of(*whole, problem.spec, n), describe(problem.spec) + ", sequence " + std::to_string(n));
      }
    }
  }
}

// A step advances slot state_indices[n] for sequence n; -1 leaves every slot alone and gives an output of 0.
template <class Case>
void expect_same_in_slots(const Case& problem) {
  constexpr int64_t kSlots = 6;
  const std::vector<double> slots{4, -1, 0, 2};
  // The sums of open mini-batches are those of as many tokens. Slots 1, 3 and 5 are free, and hold no counts.
  const std::vector<double> counts{3, -1, 15, 16, 0, 1e9};
  auto pool = outputs_of(Mode::kStep, problem);
  uint64_t stream = 1;
  for (Tensor* x : pool.of(Part::kEnd)) {
    if (!x->present()) continue;
    std::vector<int64_t> shape = x->shape();
    shape[0] = kSlots;
    *x = support::is_floating(x->dtype()) ? support::normals(x->dtype(), shape, 69, stream++)
                                          : Tensor(x->dtype(), shape, counts);
  }
  for (DType index_type : {DType::kI32, DType::kI64}) {
    const Tensor indices(index_type, {4}, slots);
    for (const std::string& name : implementations(problem.spec, Mode::kStep)) {
      auto after = pool;
      const support::Call call = call_of(Mode::kStep, problem, after);
      call["state_indices"] = indices.view();
      const auto ran = unless_declined(Mode::kStep, name, [&] {
        after.implementation = call.run(context_for(name));
        return after;
      });
      if (!ran) continue;
      std::vector<bool> used(kSlots, false);
      for (int64_t n = 0; n < 4; ++n) {
        const int64_t slot = static_cast<int64_t>(slots[static_cast<size_t>(n)]);
        auto share = share_of(*ran, problem.spec, n);
        if (slot < 0) {
          for (double value : share.of(Part::kTokens)[0]->values()) EXPECT_EQ(value, 0) << name;
          continue;
        }
        used[static_cast<size_t>(slot)] = true;
        const Case one = alone(problem, n);
        auto expected = outputs_of(Mode::kStep, one);
        for (const auto& field : expected.fields()) {
          if (field.part != Part::kEnd) continue;
          expected.*field.tensor = slice(pool.*field.tensor, 0, slot, slot + 1);
          share.*field.tensor = slice((*ran).*field.tensor, 0, slot, slot + 1);
        }
        expected.implementation = call_of(Mode::kStep, one, expected).run(context_for(name));
        expect_same_bits(share, expected, "sequence " + std::to_string(n) + " of " + describe(problem.spec));
      }
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        for (const auto& field : pool.fields()) {
          if (used[static_cast<size_t>(slot)] || field.part != Part::kEnd) continue;
          EXPECT_TRUE(support::same_bits(slice((*ran).*field.tensor, 0, slot, slot + 1),
                                         slice(pool.*field.tensor, 0, slot, slot + 1)))
              << name << " " << field.name << " of slot " << slot;
        }
      }
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
  copy_tensors(head.of(Part::kEnd), tail.of(Part::kStart));
  return tail;
}

// The rows of tokens [begin, end) of the results.
template <class Results>
Results rows_of(const Results& results, int64_t begin, int64_t end) {
  Results part = without_sums(results);
  for (Tensor* x : part.of(Part::kTokens)) *x = slice(*x, 1, begin, end);
  return part;
}

// A token that is not a number in one of the tensors does not reach the tokens [begin, end). On a device, where a chunk
// is one product on tensor cores, it may reach all of its own chunk.
template <class Case>
void expect_not_reached(Mode mode, const Case& problem, const std::vector<Tensor Case::*>& tensors, int64_t token,
                        int64_t begin, int64_t end) {
  const int64_t reach = device().type == DeviceType::kCpu ? 1 : 64;
  begin = (begin + reach - 1) / reach * reach;
  end = end == problem.spec.T ? end : end / reach * reach;
  if (begin >= end) return;
  const auto tokens = [&](const auto& results) {
    auto part = rows_of(results, begin, end);
    for (Part end : {Part::kStart, Part::kEnd}) {
      for (Tensor* x : part.of(end)) *x = {};
    }
    return part;
  };
  for (const std::string& name : and_automatic(implementations(problem.spec, mode))) {
    const auto expected = unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name)); });
    if (!expected) continue;
    for (Tensor Case::*tensor : tensors) {
      if (!(problem.*tensor).present()) continue;
      Case changed = problem;
      const int64_t width = (problem.*tensor).size() / problem.spec.T;
      for (int64_t i = 0; i < width; ++i) (changed.*tensor).set(token * width + i, std::nan(""));
      expect_same_bits(tokens(support::run(mode, changed, context_for(name))), tokens(*expected),
                       describe(problem.spec) + ", not a number at " + std::to_string(token));
    }
  }
}

// The forward of the same name, where there is one.
template <class Spec>
Context forward_of(const Spec& spec, const std::string& name) {
  const std::vector<std::string> forwards = implementations(spec, Mode::kForward);
  return context_for(std::find(forwards.begin(), forwards.end(), name) == forwards.end() ? "" : name);
}

template <class Case>
void expect_same_when_forward_is_cut(const Case& given, int64_t at, const std::string& name) {
  const Case problem = exact_for(name, given);
  const auto whole = unless_declined(Mode::kForward, name, [&] { return forward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  auto head = forward(slice_tokens(problem, 0, at), context_for(name));
  expect_same_bits(forward(tail_after(problem, at, head), context_for(name)), rows_of(*whole, at, problem.spec.T),
                   what + ", tail");
  auto expected = rows_of(*whole, 0, at);
  for (Tensor* x : head.of(Part::kEnd)) *x = {};
  for (Tensor* x : expected.of(Part::kEnd)) *x = {};
  expect_same_bits(head, expected, what + ", head");
}

template <class Case>
void expect_same_when_backward_is_cut(const Case& given, int64_t at, const std::string& name) {
  const Case problem = exact_for(name, given);
  const auto whole = unless_declined(Mode::kBackward, name, [&] { return backward(problem, context_for(name)); });
  if (!whole) return;
  const std::string what = describe(given.spec) + ", cut at " + std::to_string(at);
  Case head = slice_tokens(problem, 0, at);
  Case tail = tail_after(problem, at, forward(head, forward_of(problem.spec, name)));
  auto second_part = without_sums(backward(tail, context_for(name)));
  copy_tensors(second_part.of(Part::kStart), head.of(Part::kEnd));
  expect_same_bits(without_sums(backward(head, context_for(name))), rows_of(*whole, 0, at), what + ", head");
  auto expected = rows_of(*whole, at, problem.spec.T);
  copy_tensors(second_part.of(Part::kStart), expected.of(Part::kStart));
  expect_same_bits(second_part, expected, what + ", tail");
}

template <class Case>
void expect_same_when_cut(const Case& problem, int64_t at) {
  for (const std::string& name : and_automatic(implementations(problem.spec, Mode::kForward))) {
    expect_same_when_forward_is_cut(problem, at, name);
  }
  for (const std::string& name : and_automatic(implementations(problem.spec, Mode::kBackward))) {
    expect_same_when_backward_is_cut(problem, at, name);
  }
}

// In many pieces, with the chunk states of the whole in between.
template <class Case>
void expect_same_chunk_by_chunk(const Case& given, int64_t chunk_size, const std::string& name) {
  const Case problem = exact_for(name, given);
  const auto whole = unless_declined(Mode::kForward, name, [&] { return forward(problem, context_for(name), true); });
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

// The backward from the chunk states that its forward has saved.
template <class Case>
void expect_same_from_saved_states(const Case& given, const std::string& name) {
  const Case problem = exact_for(name, given);
  const auto expected = unless_declined(Mode::kBackward, name, [&] { return backward(problem, context_for(name)); });
  if (!expected) return;
  const Tensor saved = forward(problem, forward_of(problem.spec, name), true).chunk_states;
  expect_same_bits(backward(problem, context_for(name), saved), *expected, describe(given.spec));
}

// Both of every implementation.
template <class Case>
void expect_same_from_chunk_states(const Case& problem, int64_t chunk_size) {
  for (const std::string& name : and_automatic(implementations(problem.spec, Mode::kForward))) {
    expect_same_chunk_by_chunk(problem, chunk_size, name);
  }
  for (const std::string& name : and_automatic(implementations(problem.spec, Mode::kBackward))) {
    expect_same_from_saved_states(problem, name);
  }
}

}  // namespace fastweight::test
