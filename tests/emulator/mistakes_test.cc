// What the emulator says of kernels with a mistake that a device may let pass.
#include "tests/emulator/mistakes_kernels.h"

#include "tests/sm90/testing.h"

namespace fastweight::test {
namespace {

using cuda::Mistake;
using support::DeviceCopy;

class EmulatorDeathTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSize = 64;

  // The result of a product or a copy with a mistake.
  static Tensor multiply(Mistake mistake) {
    const DeviceCopy a(draw_integers(DType::kBF16, {kSize, kSize}, 4, 1), kCuda);
    const DeviceCopy b(draw_integers(DType::kBF16, {kSize, kSize}, 4, 2), kCuda);
    const DeviceCopy c(Tensor(DType::kF32, {kSize, kSize}), kCuda);
    cuda::multiply_with(mistake, a.view().data, b.view().data, static_cast<float*>(c.view().data));
    return c.get();
  }
  static Tensor copy(Mistake mistake) {
    const DeviceCopy x(draw_integers(DType::kBF16, {32, kSize}, 100, 3), kCuda);
    const DeviceCopy y(Tensor(DType::kBF16, {32, kSize}), kCuda);
    const auto map = [](const DeviceCopy& of) {
      return cuda::tensor_map({.data = of.view().data,
                               .rank = 2,
                               .sizes = {kSize, 32},
                               .strides = {1, kSize},
                               .box = {kSize, 32},
                               .swizzle = cuda::Swizzle::kNone});
    };
    cuda::copy_with(mistake, map(x), map(y));
    return y.get();
  }
  static Tensor count(Mistake mistake) {
    const DeviceCopy b(Tensor(DType::kF32, {kSize}), kCuda), c(Tensor(DType::kF32, {kSize}), kCuda);
    cuda::count_with(mistake, static_cast<float*>(b.view().data), static_cast<float*>(c.view().data));
    return c.get();
  }
  static int64_t count_nans(const Tensor& x) {
    int64_t count = 0;
    for (double value : x.values()) count += std::isnan(value);
    return count;
  }
};

TEST_F(EmulatorDeathTest, NoMistake) {
  EXPECT_EQ(count_nans(multiply(Mistake::kNone)), 0);
  EXPECT_TRUE(support::same_bits(copy(Mistake::kNone), draw_integers(DType::kBF16, {32, kSize}, 100, 3)));
  const Tensor counted = count(Mistake::kNone);
  for (int64_t i = 0; i < kSize; ++i) EXPECT_EQ(counted[i], static_cast<double>(i));
}

TEST_F(EmulatorDeathTest, Products) {
  EXPECT_EQ(count_nans(multiply(Mistake::kSumsReadEarly)), kSize * kSize);
  EXPECT_DEATH(multiply(Mistake::kSumsWrittenEarly), "an accumulator of wgmma was written before");
  EXPECT_DEATH(multiply(Mistake::kFragmentWrittenEarly), "an operand of wgmma was written before");
  EXPECT_DEATH(multiply(Mistake::kOperandWrittenEarly), "an operand of wgmma was written before");
  EXPECT_DEATH(multiply(Mistake::kNoFence), "does not begin with a fence");
  EXPECT_DEATH(multiply(Mistake::kThreeWarps), "waits at wgmma for its warpgroup forever");
  EXPECT_DEATH(multiply(Mistake::kTwoDescriptors), "warps of a warpgroup at wgmma and another wgmma|disagree");
  EXPECT_DEATH(multiply(Mistake::kOperandOutside), "outside dynamic shared memory");
}

TEST_F(EmulatorDeathTest, Copies) {
  EXPECT_EQ(count_nans(copy(Mistake::kLoadReadEarly)), 32 * kSize);
  EXPECT_DEATH(copy(Mistake::kTooFewBytes), "waits for parity 0 of the transaction barrier");
  EXPECT_DEATH(copy(Mistake::kTooManyArrivals), "more arrivals at a transaction barrier");
  EXPECT_DEATH(copy(Mistake::kBarrierNotInitialized), "not initialized");
  EXPECT_DEATH(copy(Mistake::kLoadNotWaitedFor), "a copy to shared memory is on its way");
  EXPECT_DEATH(copy(Mistake::kSourceWrittenEarly), "the source of a bulk store was written");
  EXPECT_DEATH(copy(Mistake::kStoreNotWaitedFor), "leaves while bulk stores read its shared memory");
  EXPECT_DEATH(copy(Mistake::kBoxNotAligned), "not aligned to 128 bytes");
}

TEST_F(EmulatorDeathTest, Registers) {
  cuda::share_registers_with(Mistake::kNone);
  EXPECT_DEATH(cuda::share_registers_with(Mistake::kTooManyRegisters), "registers for 5 warpgroups");
}

TEST_F(EmulatorDeathTest, KernelsThatOverlap) {
  EXPECT_EQ(count(Mistake::kReadBeforeWaiting)[kSize - 1], 0);
  EXPECT_DEATH(count(Mistake::kNoWait), "leaves without having waited for the kernels before");
}

}  // namespace
}  // namespace fastweight::test
