// What the tests of the CUDA backend share. A program that includes this runs on the first device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "fastweight/error.h"
#include "support/placement.h"
#include "tests/testing.h"

namespace fastweight::test {

inline const Device kCuda{DeviceType::kCuda, 0};
[[maybe_unused]] inline const bool g_on_cuda = (device() = kCuda, true);

inline Tensor offsets_of(const std::vector<int64_t>& offsets, DType dtype = DType::kI64) {
  return Tensor(dtype, {static_cast<int64_t>(offsets.size())}, std::vector<double>(offsets.begin(), offsets.end()));
}

// The tensor with every value NaN.
inline void poison(support::DeviceCopy& x) {
  Tensor values = x.get();
  values.fill(std::numeric_limits<double>::quiet_NaN());
  x.set(values);
}

// A call of which every tensor has a copy on the device.
class CallOnDevice {
 public:
  explicit CallOnDevice(const support::Call& call) : call_(call) {
    for (const support::NamedView& named : call_.views()) {
      auto& copy = copies_.emplace_back(std::make_unique<support::DeviceCopy>(*named.view, kCuda));
      *named.view = copy->view();
    }
  }

  std::string enqueue(const Context& context) const { return call_.enqueue(context); }
  support::DeviceCopy& operator[](const std::string& name) const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (name == call_.views()[i].name) return *copies_[i];
    }
    throw std::out_of_range("no tensor " + name);
  }

  void poison_outputs() const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (call_.views()[i].written && call_.views()[i].view->present()) poison(*copies_[i]);
    }
  }

  // What it has written, with the names of a family's results.
  template <class Results>
  Results results() const {
    Results all;
    for (size_t i = 0; i < copies_.size(); ++i) {
      const support::NamedView& named = call_.views()[i];
      const std::string name = named.name;
      if (named.written && named.view->present())
        all.at(name.starts_with("state") ? "final_" + name : name) = copies_[i]->get();
    }
    return all;
  }

 private:
  support::Call call_;
  std::vector<std::unique_ptr<support::DeviceCopy>> copies_;
};

// One capture of a mode serves any lengths that fit: the same bits as a call of its own, and nothing else written.
template <class Case>
void expect_replays_with_other_lengths(Mode mode, const Case& problem,
                                       const std::vector<std::vector<int64_t>>& all_offsets,
                                       const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const auto run = [&] { return support::run(mode, problem, context_for(name)); };
    if (!unless_declined(mode, name, run)) continue;
    const auto outputs = outputs_of(mode, problem);
    const CallOnDevice call(call_of(mode, problem, outputs));
    const support::DeviceStream stream;
    Context context = context_for(name);
    context.stream = stream.get();
    const support::DeviceGraph graph(stream, [&] { EXPECT_EQ(call.enqueue(context), name); });
    for (const std::vector<int64_t>& offsets : all_offsets) {
      const int64_t tokens = offsets.back();
      call["cu_seqlens"].set(offsets_of(offsets));
      call.poison_outputs();
      graph.launch(stream);
      stream.wait();
      auto replayed = call.results<std::remove_const_t<decltype(outputs)>>();
      for (Tensor* x : replayed.of(Part::kTokens)) {
        if (!x->present()) continue;
        for (double value : slice(*x, 1, tokens, problem.spec.T).values()) ASSERT_TRUE(std::isnan(value)) << name;
        *x = slice(*x, 1, 0, tokens);
      }
      Case same = slice_tokens(problem, 0, tokens);
      same.spec.cu_seqlens = offsets;
      same.cu_seqlens = offsets_of(offsets);
      expect_same_bits(replayed, support::run(mode, same, context_for(name)),
                       std::string(name_of(mode)) + " " + name + " with " + std::to_string(tokens) + " tokens of " +
                           describe(problem.spec));
    }
  }
}

template <class Case>
void expect_replays_with_other_lengths(Mode mode, const Case& problem,
                                       const std::vector<std::vector<int64_t>>& all_offsets) {
  expect_replays_with_other_lengths(mode, problem, all_offsets, implementations(problem.spec, mode));
}

// Offsets of 69 tokens in three sequences that the host would refuse.
inline const std::vector<std::vector<int64_t>> kMalformedOffsets{
    {0, 200, 10, 69}, {-5, -1, 30, 1000000}, {60, 50, 40, 30}, {0, 69, 0, 69}, {int64_t{1} << 40, 0, 1, 2}};

// What the host cannot refuse touches nothing outside the tensors: the calls look at the memory around them. For 69
// tokens in three sequences.
template <class Case>
void expect_malformed_offsets_stay_inside(const Case& drawn) {
  for (const std::vector<int64_t>& offsets : kMalformedOffsets) {
    Case problem = drawn;
    problem.cu_seqlens = offsets_of(offsets);
    for (Mode mode : kModes) {
      for (const std::string& name : implementations(problem.spec, mode)) {
        auto outputs = outputs_of(mode, drawn);
        EXPECT_NO_THROW(unless_declined(mode, name,
                                        [&] {
                                          outputs.implementation =
                                              call_of(mode, problem, outputs).run(context_for(name));
                                          return outputs;
                                        }))
            << name << " " << name_of(mode);
      }
    }
  }
}

// call() is refused, and the message has the text.
template <class Call>
void expect_refused(ErrorCode code, const std::string& text, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// Views of memory that nobody has, apart from each other, for calls that are refused before they touch it. Their
// context trusts pointers.
class Nowhere {
 public:
  TensorView operator()(std::initializer_list<int64_t> shape) {
    next_ += uintptr_t{1} << 40;
    return TensorView::dense(reinterpret_cast<void*>(next_), DType::kF32, shape, kCuda);
  }
  static Context context() {
    Context context = context_for("");
    context.trust_pointers = true;
    return context;
  }

 private:
  uintptr_t next_ = 0;
};

// After a step on all slots of a state: those of the sequences `skipped` are as before and their outputs 0, those of
// `advanced` are not as before.
inline void expect_skipped(const std::vector<int64_t>& skipped, const std::vector<int64_t>& advanced,
                           const Tensor& outputs, const Tensor& state, const Tensor& before, const std::string& what) {
  const auto kept = [&](int64_t n) {
    return support::same_bits(slice(state, 0, n, n + 1), slice(before, 0, n, n + 1));
  };
  for (int64_t n : skipped) {
    for (double value : slice(outputs, 0, n, n + 1).values()) EXPECT_EQ(value, 0) << what;
    EXPECT_TRUE(kept(n)) << what;
  }
  for (int64_t n : advanced) EXPECT_FALSE(kept(n)) << what;
}

// Scratch memory from the caller, and what was asked for.
struct CountingSource {
  std::vector<std::unique_ptr<support::DeviceBuffer>> blocks;
  int released = 0;
  size_t most = 0;  // bytes of a block
  bool empty = false;

  WorkspaceSource source() {
    return {[](void* user, size_t bytes) -> void* {
              auto* self = static_cast<CountingSource*>(user);
              if (self->empty) return nullptr;
              self->most = std::max(self->most, bytes);
              self->blocks.push_back(std::make_unique<support::DeviceBuffer>(bytes));
              return self->blocks.back()->data();
            },
            [](void* user, void*, size_t) { ++static_cast<CountingSource*>(user)->released; }, this};
  }
};

}  // namespace fastweight::test
