// What the tests of Hopper's instructions share. A program that includes this ends with kSkipped where there is no such
// device.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "fastweight/info.h"
#include "tests/cuda/testing.h"

namespace fastweight::test {

class NeedsHopper : public ::testing::Environment {
 public:
  void SetUp() override {
    std::string reason = support::why_no_device();
    if (reason.empty() && cuda_devices().front().major != 9) reason = "the first device is not a Hopper";
    if (reason.empty()) return;
    std::printf("skipped: %s\n", reason.c_str());
    std::exit(kSkipped);
  }
};
[[maybe_unused]] inline ::testing::Environment* const g_needs_hopper =
    ::testing::AddGlobalTestEnvironment(new NeedsHopper);

// So many value heads of up to 128 columns that a block of a scan has all columns of one: with fewer heads there is a
// multiprocessor for every block of 64.
inline int64_t heads_of_wide_blocks() { return cuda_devices().front().multiprocessors / 2 + 1; }

// Small whole numbers: products of such matrices are exact in every type and order.
inline Tensor draw_integers(DType dtype, std::vector<int64_t> shape, int64_t most, uint64_t seed) {
  Tensor x(dtype, std::move(shape));
  Dice dice(seed);
  for (int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<double>(dice.between(-most, most)));
  return x;
}

}  // namespace fastweight::test
