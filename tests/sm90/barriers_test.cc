// Barriers of transactions over many phases, of warpgroups, warps with different work and registers, election.
#include "tests/sm90/barriers_kernels.h"

#include "tests/sm90/testing.h"

namespace fastweight::test {
namespace {

using support::DeviceCopy;

TEST(Barriers, RingOverManyPhases) {
  using cuda::kRingFloats;
  for (int tiles : {1, 2, 3, 4, 20}) {
    const Tensor x = draw_integers(DType::kF32, {tiles, kRingFloats}, 1000, 1);
    const DeviceCopy in(x, kCuda), out(Tensor(DType::kF32, {tiles, kRingFloats}), kCuda);
    cuda::reverse_tiles(static_cast<const float*>(in.view().data), tiles, static_cast<float*>(out.view().data));
    const Tensor y = out.get();
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t i = 0; i < kRingFloats; ++i) {
        ASSERT_EQ(y[t * kRingFloats + i], x[t * kRingFloats + kRingFloats - 1 - i] + static_cast<double>(t)) << t;
      }
    }
  }
}

TEST(Barriers, OneLaneIsElected) {
  const DeviceCopy counts(Tensor(DType::kI32, {8}), kCuda), same(Tensor(DType::kI32, {8}), kCuda);
  cuda::elect(static_cast<uint32_t*>(counts.view().data), static_cast<uint32_t*>(same.view().data));
  for (double count : counts.get().values()) EXPECT_EQ(count, 1);
  for (double value : same.get().values()) EXPECT_EQ(value, 1);
}

TEST(Barriers, WarpgroupsWaitForThemselvesAlone) {
  constexpr int kTurns = 5;
  const DeviceCopy out(Tensor(DType::kI32, {cuda::kRotatingGroups, 128}), kCuda);
  cuda::rotate_in_groups(kTurns, static_cast<int*>(out.view().data));
  const Tensor numbers = out.get();
  for (int64_t group = 0; group < cuda::kRotatingGroups; ++group) {
    const int64_t turns = kTurns * (group + 1);
    for (int64_t i = 0; i < 128; ++i) {
      ASSERT_EQ(numbers[128 * group + i], static_cast<double>((i + turns * cuda::kRotation) % 128 + turns)) << group;
    }
  }
}

TEST(Barriers, PhasesOfArrivals) {
  constexpr int kPhases = 9;
  const DeviceCopy seen(Tensor(DType::kI32, {kPhases}), kCuda);
  cuda::count_phases(kPhases, static_cast<int*>(seen.view().data));
  const Tensor sums = seen.get();
  for (int64_t phase = 0; phase < kPhases; ++phase) EXPECT_EQ(sums[phase], 10.0 * static_cast<double>(phase + 1));
}

}  // namespace
}  // namespace fastweight::test
