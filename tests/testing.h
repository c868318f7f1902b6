// What the tests of all operator families share: contexts, a tally of who ran, parts and strided copies of tensors.
// What walks over elements is compiled apart, with optimization, which the tests do without.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/error.h"
#include "fastweight/info.h"
#include "support/case.h"
#include "support/device.h"

namespace fastweight::test {

using support::kModes;
using support::Mode;
using support::name_of;
using support::Part;
using support::Tensor;

// Set for slow builds (sanitizers): the grids shrink.
bool reduced();

// The golden cases: where the build found them, unless the programs were moved to another machine.
std::string golden_folder(const char* of_the_build);

// Every value, or only the first few in a reduced run.
template <class T>
std::vector<T> first(std::vector<T> values, size_t count_if_reduced) {
  if (reduced() && values.size() > count_if_reduced) values.resize(count_if_reduced);
  return values;
}

// The device --------------------------------------------------------------------------------------------------------

// Where the implementations under test run: the CPU, or the first CUDA device with FASTWEIGHT_TEST_DEVICE=cuda. The
// oracle is the CPU's reference either way. A program that finds no such device ends with kSkipped: GoogleTest would
// count its tests as passed.
inline constexpr int kSkipped = 77;
Device& device();

const char* device_name();

// A reduced run on a CUDA device: the emulator, where every case costs a hundred times what it costs on the CPU.
bool emulated();

// The implementations -----------------------------------------------------------------------------------------------

Context context_for(const std::string& implementation, int num_threads = 0);
Context reference_context();

// Who ran how often, and why others did not. Printed after the last test; an implementation that declined everything
// in a full run is a failure.
class Tally : public ::testing::Environment {
 public:
  static Tally& get();
  void ran(const std::string& name);
  void declined(const std::string& name, const std::string& reason);
  void SetUp() override;
  void TearDown() override;

 private:
  struct Entry {
    int ran = 0, declined = 0;
    std::set<std::string> reasons;
  };
  std::map<std::string, Entry> entries_;
};
inline Tally& g_tally = Tally::get();

// The results of run(), or nothing if the implementation declines the problem.
template <class Run>
auto unless_declined(Mode mode, const std::string& implementation, const Run& run) -> std::optional<decltype(run())> {
  const std::string key = std::string(name_of(mode)) + " " + (implementation.empty() ? "(automatic)" : implementation);
  try {
    auto results = run();
    if (!implementation.empty()) {
      EXPECT_EQ(results.implementation, implementation);
    }
    g_tally.ran(key);
    return results;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    g_tally.declined(key, error.what());
    return std::nullopt;
  }
}

// Random problems ---------------------------------------------------------------------------------------------------

// The engine is the same everywhere; the standard's distributions are not.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t bound) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

int64_t environment_number(const char* name, int64_t otherwise);

// check(seed) for the seeds from 0 to `count` or FASTWEIGHT_TEST_COUNT, or for FASTWEIGHT_TEST_SEED alone.
template <class Check>
void for_each_seed(int64_t count, const Check& check) {
  const int64_t only = environment_number("FASTWEIGHT_TEST_SEED", -1);
  if (only >= 0) {
    check(static_cast<uint64_t>(only));
    return;
  }
  const int64_t seeds = environment_number("FASTWEIGHT_TEST_COUNT", count);
  for (int64_t seed = 0; seed < seeds; ++seed) check(static_cast<uint64_t>(seed));
}

// The spec with packed sequences of these lengths.
template <class Spec>
Spec with_lengths(Spec spec, const std::vector<int64_t>& lengths) {
  spec.B = 1;
  spec.cu_seqlens = {0};
  for (int64_t length : lengths) spec.cu_seqlens.push_back(spec.cu_seqlens.back() + length);
  spec.T = spec.cu_seqlens.back();
  return spec;
}

template <class Spec>
Spec with_batch(Spec spec, int64_t B) {
  spec.B = B;
  return spec;
}

// The names of the implementations of a mode on the device under test.
std::vector<std::string> names_of(const std::vector<ImplementationInfo>& infos, Mode mode);
template <class Spec>
std::vector<std::string> implementations(const Spec& spec, Mode mode) {
  return names_of(implementations_of(spec), mode);
}

// Differences ---------------------------------------------------------------------------------------------

// Every result of a family within its tolerance of the expected one.
template <class Case, class Results>
void expect_close(const Case& problem, const Results& results, const Results& expected) {
  const auto actual = results.named(), wanted = expected.named();
  ASSERT_EQ(actual.size(), wanted.size()) << describe(problem.spec);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const std::string& name = actual[i].first;
    const Tensor* const tensor = actual[i].second;
    ASSERT_EQ(name, wanted[i].first);
    support::Tolerance bound;
    if constexpr (requires { tolerance(problem, expected, name, tensor->dtype(), results.implementation); }) {
      bound = tolerance(problem, expected, name, tensor->dtype(), results.implementation);
    } else if constexpr (requires { tolerance(problem, expected, name, tensor->dtype(), true); }) {
      bound = tolerance(problem, expected, name, tensor->dtype(), device().type == DeviceType::kCuda);
    } else {
      bound = tolerance(problem, expected, name, tensor->dtype());
    }
    const support::Difference difference = support::compare(*tensor, *wanted[i].second);
    EXPECT_LE(support::excess(*tensor, *wanted[i].second, bound), 1)
        << results.implementation << " " << name << ": relative rms " << difference.relative_rms << ", largest "
        << difference.max_abs << ", allowed " << bound.relative << "\n  " << describe(problem.spec);
  }
}

template <class Results>
void expect_same_bits(const Results& results, const Results& expected, const std::string& what = "") {
  const auto actual = results.named(), wanted = expected.named();
  ASSERT_EQ(actual.size(), wanted.size()) << what;
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(support::same_bits(*actual[i].second, *wanted[i].second))
        << results.implementation << " " << wanted[i].first << ": the largest difference is "
        << support::compare(*actual[i].second, *wanted[i].second).max_abs << " " << what;
  }
}

// Parts of tensors --------------------------------------------------------------------------------------------------

// x[.., begin:end, ..] along one axis; absent stays absent.
Tensor slice(const Tensor& x, size_t axis, int64_t begin, int64_t end);

// The problem of tokens [begin, end) of every batch row. The states are the caller's business.
template <class Case>
Case slice_tokens(const Case& problem, int64_t begin, int64_t end) {
  Case part = problem;
  part.spec.T = end - begin;
  part.spec.cu_seqlens.clear();
  part.cu_seqlens = {};
  for (Tensor* x : part.of(Part::kTokens)) *x = slice(*x, 1, begin, end);
  return part;
}

// Strided copies ----------------------------------------------------------------------------------------------------

// How a dense tensor is spread in memory: the order of the axes from the widest stride to the narrowest, the distance
// of neighbours along the narrowest, and a gap after every row, plane, .. . With kAlignedRows the gaps keep the
// alignment of rows of whole quads.
enum class Layout { kDense, kHeadsFirst, kEverySecond, kReversed, kAlignedRows };
inline constexpr Layout kLayouts[] = {Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed};

// A strided view into a buffer with guard zones around and between the elements.
class StridedTensor {
 public:
  StridedTensor() = default;

  // Holds the values of x; absent if x is.
  StridedTensor(const Tensor& x, Layout layout);

  TensorView view() const { return view_; }
  Tensor dense() const;

  // Nothing but the view's elements was written.
  bool guards_intact() const;

 private:
  size_t buffer_bytes() const;
  template <class Visit>
  void for_each_element(const Visit& visit) const;

  TensorView view_;
  std::vector<int64_t> shape_;
  Tensor buffer_;
};

// The tensors of a call in a strided layout, while it lives: the views are redirected to copies.
class StridedArguments {
 public:
  StridedArguments(const std::vector<support::NamedView>& dense, Layout layout);

  // Copies the outputs to where they are wanted; false if anything between or around their elements was written.
  bool finish();

 private:
  struct Copy {
    void* dense;
    bool written;
    StridedTensor strided;
  };
  std::deque<Copy> copies_;
};

}  // namespace fastweight::test
