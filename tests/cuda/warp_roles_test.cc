// Signals between warps of a block, and barriers of a part of it.
#include "tests/cuda/warp_roles_kernels.h"

#include "tests/cuda/testing.h"

namespace fastweight::test {
namespace {

using cuda::kRoleThreads;
using support::DeviceCopy;

constexpr int kBlocks = 8, kTurns = 13;

TEST(WarpRoles, ABufferGoesFromWritersToReaders) {
  const DeviceCopy out(Tensor(DType::kI32, {kBlocks, kTurns, kRoleThreads}), kCuda);
  cuda::hand_over(kBlocks, kTurns, static_cast<int*>(out.view().data));
  const Tensor numbers = out.get();
  for (int64_t at = 0; at < numbers.size(); ++at) {
    const int64_t i = at % kRoleThreads, turn = at / kRoleThreads % kTurns, block = at / kRoleThreads / kTurns;
    ASSERT_EQ(numbers[at], static_cast<double>(1000 * block + turn + (i + 32) % kRoleThreads)) << at;
  }
}

TEST(WarpRoles, AllMeetAfterSomeHaveMetApart) {
  const DeviceCopy out(Tensor(DType::kI32, {kBlocks, 2 * kRoleThreads}), kCuda);
  cuda::meet_apart(kBlocks, kTurns, static_cast<int*>(out.view().data));
  const Tensor numbers = out.get();
  for (int64_t at = 0; at < numbers.size(); ++at) {
    const int64_t from = (at + kTurns * kRoleThreads) % (2 * kRoleThreads);
    ASSERT_EQ(numbers[at], static_cast<double>(from + kTurns)) << at;
  }
}

}  // namespace
}  // namespace fastweight::test
