// The building blocks on every instruction set of this processor, against the reference in double: those that a better
// one hides, down to the portable fallback, included.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "cpu/simd/targets.h"
#include "fastweight/info.h"
#include "tests/blocks/grid.h"
// After the choice of targets.
#include "hwy/tests/hwy_gtest.h"

namespace fastweight::test {
namespace {

class BlockTargets : public hwy::TestWithParamTargetAndT<Block> {
 protected:
  void SetUp() override {
    TestWithParamTargetAndT::SetUp();
    const int64_t target = std::get<0>(::testing::TestWithParam<std::tuple<int64_t, Block>>::GetParam());
    ASSERT_EQ(cpu_target(), hwy::TargetName(target));
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, BlockTargets,
                         ::testing::Combine(::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                                            ::testing::ValuesIn(kBlocks)),
                         [](const ::testing::TestParamInfo<std::tuple<int64_t, Block>>& param) {
                           return std::string(hwy::TargetName(std::get<0>(param.param))) + "_" +
                                  name_of(std::get<1>(param.param));
                         });

TEST_P(BlockTargets, AgreeWithTheReference) {
  for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
    for (int64_t C : {16, 32, 64}) {
      BlockSpec spec = with_lengths(spec_of(GetParam(), 0, C, gate), {5, 0, 70, 1, 47, 64});
      spec = with_heads(spec, 1, 2, 36, 21);
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        spec.dtype = dtype;
        check(support::draw(spec, 91));
      }
    }
  }
}

}  // namespace
}  // namespace fastweight::test
