// Every implementation of the in-place step against the reference in double.
#include <gtest/gtest.h>

#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "tests/delta_rule/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

// On a device one token has a kernel of its own.
constexpr int64_t kOneOrTwo[] = {1, 2};

class Step : public ::testing::TestWithParam<Gate> {
 protected:
  static DeltaRuleSpec spec(int64_t T, int64_t K, int64_t V) { return spec_of(GetParam(), T, K, V); }
};

TEST_P(Step, OneToken) {
  const std::vector<std::pair<int64_t, int64_t>> widths{{20, 36}, {128, 128}, {1, 1},     {3, 100},
                                                        {100, 3}, {60, 200},  {256, 256}, {31, 33}};
  for (const auto& [K, V] : first(widths, 4)) {
    DeltaRuleSpec one = with_heads(spec(1, K, V), 2, 2);
    one.B = 3;
    check_step(draw(one, 61));
  }
}

TEST_P(Step, SeveralTokens) {
  for (int64_t T : {0, 2, 5, 17}) {
    DeltaRuleSpec one = with_heads(spec(T, 20, 36), 1, 2);
    one.B = 2;
    check_step(draw(one, 62));
  }
}

TEST_P(Step, VariableLengths) {
  check_step(draw(with_lengths(with_heads(spec(0, 20, 36), 1, 2), {1, 0, 3, 1, 7}), 63));
}

TEST_P(Step, Options) {
  for (int64_t T : kOneOrTwo) {
    for (int variant = 0; variant < 6; ++variant) {
      DeltaRuleSpec one = with_heads(spec(T, 36, 20), 1, 2);
      one.options.qk_l2norm = true;
      one.options.state_v_first = variant % 2 == 1;
      one.options.beta_sigmoid = variant >= 1;
      one.options.allow_neg_eigval = variant >= 2;
      if (GetParam() != Gate::kNone) {
        one.options.gate_in_kernel = variant >= 2;
        one.dt_bias_absent = variant == 3;
      }
      if (GetParam() == Gate::kPerChannel && variant >= 4) {
        one.options.lower_bound = -5;
        one.a_log_absent = variant == 5;
      }
      check_step(draw(one, 64));
    }
  }
}

TEST_P(Step, BetaForms) {
  for (int64_t T : kOneOrTwo) {
    DeltaRuleSpec one = spec(T, 20, 36);
    one.beta_absent = true;
    check_step(draw(one, 65));
    one.beta_absent = false;
    one.beta_per_value = true;
    check_step(draw(one, 65));
  }
}

TEST_P(Step, SixteenBitTypes) {
  for (int64_t T : {1, 3}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (DType gate_dtype : {DType::kF32, dtype}) {
        DeltaRuleSpec one = with_heads(spec(T, 60, 100), 1, 2);
        one.dtype = dtype;
        one.gate_dtype = gate_dtype;
        check_step(draw(one, 66));
      }
    }
  }
}

// What a state in bf16 loses, it loses once per call, when it is written.
TEST_P(Step, StatesInBf16) {
  for (const auto& [K, V] :
       std::vector<std::pair<int64_t, int64_t>>{{128, 128}, {64, 32}, {256, 8}, {20, 36}, {7, 5}}) {
    for (int64_t T : {1, 3}) {
      for (bool v_first : {false, true}) {
        DeltaRuleSpec one = with_heads(spec(T, K, V), 1, 2);
        one.B = 2;
        one.options.state_v_first = v_first;
        DeltaRuleCase problem = draw(one, 71);
        problem.initial_state = problem.initial_state.to(DType::kBF16);
        DeltaRuleCase wide = problem;
        wide.initial_state = problem.initial_state.to(DType::kF32);
        const DeltaRuleResults expected = support::step(support::in_double(problem), reference_context());
        for (const std::string& name : implementations("step")) {
          const auto results = unless_declined("step", name, [&] { return support::step(problem, context_for(name)); });
          if (!results) continue;
          expect_close(problem, *results, expected);
          const DeltaRuleResults in_fp32 = support::step(wide, context_for(name));
          const Tensor& state = (name == "reference" ? expected : in_fp32).final_state;  // it computes in double
          EXPECT_TRUE(support::same_bits(results->o, in_fp32.o)) << name << " " << describe(one);
          EXPECT_TRUE(support::same_bits(results->final_state, state.to(DType::kBF16))) << name << " " << describe(one);
        }
      }
    }
  }
}

// The tokens in one pass, and as a prefill followed by one step per token.
TEST_P(Step, PrefillThenSteps) {
  DeltaRuleSpec one = with_heads(spec(69, 20, 36), 1, 2);
  one.B = 2;
  const DeltaRuleCase problem = draw(one, 67);
  const DeltaRuleResults whole = support::forward(support::in_double(problem), reference_context());
  constexpr int64_t kPrefill = 64;
  for (const std::string& name : implementations("step")) {
    const DeltaRuleCase prefill = slice_tokens(problem, 0, kPrefill);
    Tensor state = support::forward(prefill, context_for("")).final_state;
    bool ran = true;
    for (int64_t t = kPrefill; t < one.T && ran; ++t) {
      DeltaRuleCase token = slice_tokens(problem, t, t + 1);
      token.initial_state = state;
      const auto results = unless_declined("step", name, [&] { return support::step(token, context_for(name)); });
      ran = results.has_value();
      if (!ran) break;
      state = results->final_state;
      EXPECT_LT(support::compare(results->o, slice(whole.o, 1, t, t + 1)).relative_rms, 1e-5) << name << " " << t;
    }
    if (ran) {
      EXPECT_LT(support::compare(state, whole.final_state).relative_rms, 1e-5) << name;
    }
  }
}

// Sequence n advances slot state_indices[n]; -1 leaves every state alone and gives an o of 0.
TEST_P(Step, StateIndices) {
  constexpr int64_t kSlots = 6;
  const std::vector<double> slots{4, -1, 0, 2};
  for (DType index_type : {DType::kI32, DType::kI64}) {
    for (int64_t T : {0, 1, 2}) {  // 0: packed sequences
      const bool varlen = T == 0;
      DeltaRuleSpec one = with_heads(spec(T, 20, 36), 1, 2);
      one.B = 4;
      if (varlen) one = with_lengths(one, {1, 3, 0, 2});
      const DeltaRuleCase problem = draw(one, 68);
      const DeltaRuleResults expected = support::step(support::in_double(problem), reference_context());

      DeltaRuleSpec pool_spec = one;
      pool_spec.cu_seqlens.clear();
      pool_spec.B = kSlots;
      const Tensor pool = draw(pool_spec, 69).initial_state;
      const int64_t size = pool.size() / kSlots;
      const Tensor indices(index_type, {4}, slots);
      for (const std::string& name : implementations("step")) {
        Tensor state = pool, o(DType::kF32, problem.v.shape());
        o.fill(std::numeric_limits<double>::quiet_NaN());
        for (int64_t n = 0; n < 4; ++n) {
          const int64_t slot = static_cast<int64_t>(slots[static_cast<size_t>(n)]);
          for (int64_t i = 0; i < size && slot >= 0; ++i) {
            state.set(slot * size + i, problem.initial_state[n * size + i]);
          }
        }
        const Tensor before = state;
        DeltaRuleStep args;
        args.in = problem.inputs();
        args.in.initial_state = {};
        args.options = one.options;
        args.state = state.view();
        args.state_indices = indices.view();
        args.o = o.view();
        const auto ran = unless_declined("step", name, [&] {
          DeltaRuleResults results;
          results.implementation = support::run(context_for(name), args);
          return results;
        });
        if (!ran) continue;
        std::vector<bool> used(kSlots, false);
        for (int64_t n = 0; n < 4; ++n) {
          const int64_t slot = static_cast<int64_t>(slots[static_cast<size_t>(n)]);
          const Tensor rows =
              varlen ? slice(o, 1, one.cu_seqlens[static_cast<size_t>(n)], one.cu_seqlens[static_cast<size_t>(n) + 1])
                     : slice(o, 0, n, n + 1);
          const Tensor wanted = varlen ? slice(expected.o, 1, one.cu_seqlens[static_cast<size_t>(n)],
                                               one.cu_seqlens[static_cast<size_t>(n) + 1])
                                       : slice(expected.o, 0, n, n + 1);
          if (slot < 0) {
            for (double value : rows.values()) EXPECT_EQ(value, 0) << name;
            continue;
          }
          used[static_cast<size_t>(slot)] = true;
          EXPECT_LT(support::compare(rows, wanted).relative_rms, 1e-5) << name << " sequence " << n;
          EXPECT_LT(
              support::compare(slice(state, 0, slot, slot + 1), slice(expected.final_state, 0, n, n + 1)).relative_rms,
              1e-5)
              << name << " sequence " << n;
        }
        for (int64_t slot = 0; slot < kSlots; ++slot) {
          if (used[static_cast<size_t>(slot)]) continue;
          EXPECT_TRUE(support::same_bits(slice(state, 0, slot, slot + 1), slice(before, 0, slot, slot + 1)))
              << name << " slot " << slot;
        }
      }
    }
  }
}

// Inputs, state and o with gaps; nothing between them is written.
TEST_P(Step, StridedTensors) {
  std::vector<Layout> layouts(std::begin(kLayouts), std::end(kLayouts));
  layouts.push_back(Layout::kAlignedRows);
  for (Layout layout : layouts) {
    for (int64_t T : kOneOrTwo) {
      DeltaRuleSpec one = with_heads(spec(T, 20, 36), 2, 2);
      one.B = 2;
      const DeltaRuleCase problem = draw(one, 70);
      const DeltaRuleResults expected = support::step(support::in_double(problem), reference_context());
      const DeltaRuleResults outputs = support::step_outputs(problem);
      for (const std::string& name : implementations("step")) {
        const auto results =
            unless_declined("step", name, [&] { return step_strided(problem, context_for(name), layout, outputs); });
        if (results) expect_close(problem, *results, expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Step, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
