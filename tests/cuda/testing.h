// What the tests of the CUDA backend share. A program that includes this runs on the first device.
#pragma once

#include <cstdint>
#include <vector>

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

}  // namespace fastweight::test
