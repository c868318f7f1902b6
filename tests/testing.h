// What the tests of all operator families share: contexts, a tally of who ran, parts and strided copies of tensors.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/error.h"
#include "fastweight/info.h"
#include "support/device.h"
#include "support/tensor.h"

namespace fastweight::test {

using support::Tensor;

// Set for slow builds (sanitizers): the grids shrink.
inline bool reduced() {
  const char* value = std::getenv("FASTWEIGHT_TEST_REDUCED");
  return value != nullptr && std::string(value) != "" && std::string(value) != "0";
}

// The golden cases: where the build found them, unless the programs were moved to another machine.
inline std::string golden_folder(const char* of_the_build) {
  const char* value = std::getenv("FASTWEIGHT_GOLDEN_DIR");
  return value == nullptr ? of_the_build : value;
}

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
inline Device& device() {
  static Device value = [] {
    const char* name = std::getenv("FASTWEIGHT_TEST_DEVICE");
    return name != nullptr && std::string(name) == "cuda" ? Device{DeviceType::kCuda, 0} : Device{};
  }();
  return value;
}

inline const char* device_name() { return device().type == DeviceType::kCuda ? "cuda" : "cpu"; }

// The implementations -----------------------------------------------------------------------------------------------

inline Context context_for(const std::string& implementation, int num_threads = 0) {
  Context context;
  context.device = device();
  context.implementation = implementation;
  context.num_threads = num_threads;
  return context;
}

inline Context reference_context() {
  Context context;
  context.implementation = "reference";
  return context;
}

// Who ran how often, and why others did not. Printed after the last test; an implementation that declined everything
// in a full run is a failure.
class Tally : public ::testing::Environment {
 public:
  static Tally& get() {
    static Tally* const tally = static_cast<Tally*>(::testing::AddGlobalTestEnvironment(new Tally));
    return *tally;
  }
  void ran(const std::string& name) { ++entries_[name].ran; }
  void declined(const std::string& name, const std::string& reason) {
    ++entries_[name].declined;
    entries_[name].reasons.insert(reason);
  }
  void SetUp() override {
    const std::string reason = device().type == DeviceType::kCuda ? support::why_no_device() : "";
    if (reason.empty()) return;
    std::printf("skipped: %s\n", reason.c_str());
    std::exit(kSkipped);
  }
  void TearDown() override {
    for (const auto& [name, entry] : entries_) {
      std::printf("%-20s ran %d, declined %d\n", name.c_str(), entry.ran, entry.declined);
      for (const std::string& reason : entry.reasons) std::printf("    %s\n", reason.c_str());
      if (::testing::GTEST_FLAG(filter) == "*") {
        EXPECT_GT(entry.ran, 0) << name << " declined every case";
      }
    }
  }

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
auto unless_declined(const std::string& mode, const std::string& implementation, const Run& run)
    -> std::optional<decltype(run())> {
  const std::string key = mode + " " + (implementation.empty() ? "(automatic)" : implementation);
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

inline int64_t environment_number(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoll(value, nullptr, 10);
}

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

// The names of the implementations of a mode on the device under test.
inline std::vector<std::string> names_of(const std::vector<ImplementationInfo>& infos, const std::string& mode) {
  std::vector<std::string> names;
  for (const ImplementationInfo& info : infos) {
    if (info.mode == mode && info.device == device_name()) names.push_back(info.name);
  }
  return names;
}

// Types and differences ---------------------------------------------------------------------------------------------

inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"f32", "bf16", "f16", "f64", "i32", "i64"};
  return kNames[static_cast<size_t>(dtype)];
}

inline bool is_16_bit(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

inline double rms(const Tensor& x) {
  double squares = 0;
  for (double value : x.values()) squares += value * value;
  return x.size() == 0 ? 0 : std::sqrt(squares / static_cast<double>(x.size()));
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
inline Tensor slice(const Tensor& x, size_t axis, int64_t begin, int64_t end) {
  if (!x.present()) return {};
  std::vector<int64_t> shape = x.shape();
  int64_t inner = 1, outer = 1;
  for (size_t i = 0; i < shape.size(); ++i) (i < axis ? outer : inner) *= i == axis ? 1 : shape[i];
  const int64_t extent = shape[axis];
  shape[axis] = end - begin;
  Tensor result(x.dtype(), shape);
  const size_t width = static_cast<size_t>(element_size(x.dtype()) * inner);
  const size_t bytes = width * static_cast<size_t>(end - begin);
  for (int64_t i = 0; i < outer && bytes > 0; ++i) {
    std::memcpy(static_cast<std::byte*>(result.data()) + static_cast<size_t>(i) * bytes,
                static_cast<const std::byte*>(x.data()) + static_cast<size_t>(i * extent + begin) * width, bytes);
  }
  return result;
}

// The problem of tokens [begin, end) of every batch row. The states are the caller's business.
template <class Case>
Case slice_tokens(const Case& problem, int64_t begin, int64_t end) {
  Case part = problem;
  part.spec.T = end - begin;
  part.spec.cu_seqlens.clear();
  part.cu_seqlens = {};
  for (Tensor* x : part.per_token()) *x = slice(*x, 1, begin, end);
  return part;
}

// An output of the shape of x with every value NaN; absent if x is.
inline Tensor poisoned(const Tensor& x, DType dtype) {
  if (!x.present()) return {};
  Tensor result(dtype, x.shape());
  result.fill(std::numeric_limits<double>::quiet_NaN());
  return result;
}

// Strided copies ----------------------------------------------------------------------------------------------------

// How a dense tensor is spread in memory: the order of the axes from the widest stride to the narrowest, the distance
// of neighbours along the narrowest, and a gap after every row, plane, .. .
enum class Layout { kDense, kHeadsFirst, kEverySecond, kReversed };
inline constexpr Layout kLayouts[] = {Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed};

// A strided view into a buffer with guard zones around and between the elements.
class StridedTensor {
 public:
  StridedTensor() = default;

  // Holds the values of x; absent if x is.
  StridedTensor(const Tensor& x, Layout layout) {
    if (!x.present()) return;
    std::vector<size_t> order(x.shape().size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    if (layout == Layout::kHeadsFirst && order.size() >= 3) std::swap(order[1], order[2]);
    if (layout == Layout::kReversed) std::reverse(order.begin(), order.end());

    view_ = x.view();
    int64_t stride = layout == Layout::kEverySecond ? 2 : 1;
    for (size_t i = order.size(); i-- > 0;) {
      view_.strides[order[i]] = stride;
      stride *= view_.shape[order[i]];
      if (layout != Layout::kDense) stride += 3;
    }
    buffer_ = Tensor(x.dtype(), {stride + 2 * kGuard});
    std::memset(buffer_.data(), kSentinel, buffer_bytes());
    view_.data = static_cast<std::byte*>(buffer_.data()) + kGuard * element_size(x.dtype());
    shape_ = x.shape();
    for_each_element([&](int64_t flat, int64_t position) { buffer_.set(position, x[flat]); });
  }

  TensorView view() const { return view_; }

  Tensor dense() const {
    if (shape_.empty()) return {};
    Tensor result(buffer_.dtype(), shape_);
    for_each_element([&](int64_t flat, int64_t position) { result.set(flat, buffer_[position]); });
    return result;
  }

  // Nothing but the view's elements was written.
  bool guards_intact() const {
    if (shape_.empty()) return true;
    const size_t size = static_cast<size_t>(element_size(buffer_.dtype()));
    std::vector<std::byte> bytes(buffer_bytes());
    std::memcpy(bytes.data(), buffer_.data(), bytes.size());
    for_each_element([&](int64_t, int64_t position) {
      std::memset(bytes.data() + static_cast<size_t>(position) * size, kSentinel, size);
    });
    for (std::byte byte : bytes) {
      if (byte != static_cast<std::byte>(kSentinel)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 64;  // elements
  static constexpr int kSentinel = 0x5a;

  size_t buffer_bytes() const { return static_cast<size_t>(buffer_.size() * element_size(buffer_.dtype())); }

  template <class Visit>
  void for_each_element(const Visit& visit) const {
    int64_t count = 1;
    for (int64_t extent : shape_) count *= extent;
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t rest = flat, position = kGuard;
      for (size_t axis = shape_.size(); axis-- > 0;) {
        position += rest % shape_[axis] * view_.strides[axis];
        rest /= shape_[axis];
      }
      visit(flat, position);
    }
  }

  TensorView view_;
  std::vector<int64_t> shape_;
  Tensor buffer_;
};

}  // namespace fastweight::test
