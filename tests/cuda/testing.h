// What the tests of the CUDA backend share. A program that includes this runs on the first device.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
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

}  // namespace fastweight::test
