// The kernels of the delta rule on every instruction set of this processor, against the reference in double: those that
// a better one hides, down to the portable fallback, included.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/simd/targets.h"
#include "fastweight/info.h"
#include "tests/delta_rule/grid.h"
// After the choice of targets.
#include "hwy/tests/hwy_gtest.h"

namespace fastweight::test {
namespace {

using support::draw;

class Targets : public hwy::TestWithParamTargetAndT<Gate> {
 protected:
  void SetUp() override {
    TestWithParamTargetAndT::SetUp();
    const int64_t target = std::get<0>(::testing::TestWithParam<std::tuple<int64_t, Gate>>::GetParam());
    ASSERT_EQ(cpu_target(), hwy::TargetName(target));
  }

  // Problems of sequences of T tokens, and of some around that.
  std::vector<DeltaRuleCase> problems(int64_t T) {
    const Gate gate = GetParam();
    DeltaRuleSpec grouped = with_heads(spec_of(gate, T, 20, 36), 2, 2);
    grouped.B = 2;
    std::vector<DeltaRuleSpec> specs{grouped, spec_of(gate, T, 128, 128),
                                     with_lengths(with_heads(spec_of(gate, 0, 20, 36), 1, 2), {5, 0, T, 1, T / 2})};
    DeltaRuleSpec options = with_heads(spec_of(gate, T, 36, 20), 1, 2);
    options.options.qk_l2norm = options.options.beta_sigmoid = options.options.allow_neg_eigval = true;
    options.options.state_v_first = true;
    options.options.gate_in_kernel = gate != Gate::kNone;
    specs.push_back(options);
    if (gate == Gate::kPerChannel) {
      options.options.lower_bound = -5;
      specs.push_back(options);
    }
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      DeltaRuleSpec narrow = with_heads(spec_of(gate, T, 20, 36), 1, 2);
      narrow.dtype = narrow.gate_dtype = dtype;
      specs.push_back(narrow);
    }
    std::vector<DeltaRuleCase> drawn;
    for (const DeltaRuleSpec& spec : specs) drawn.push_back(draw(spec, 91));
    return drawn;
  }
};

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<int64_t, Gate>>& info) {
  return std::string(hwy::TargetName(std::get<0>(info.param))) + "_" + name_of(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Targets, Targets,
                         ::testing::Combine(::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                                            ::testing::ValuesIn(kGates)),
                         name_of_case);

TEST_P(Targets, AgreeWithTheReference) {
  for (const DeltaRuleCase& problem : problems(70)) check(problem);
  for (const DeltaRuleCase& problem : problems(3)) check(Mode::kStep, problem);
}

}  // namespace
}  // namespace fastweight::test
