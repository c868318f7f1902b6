// Every implementation of the in-place step against the reference in double.
#include <gtest/gtest.h>

#include "tests/ttt_linear/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

TEST(Step, OneToken) {
  for (int64_t D : first<int64_t>({60, 16, 128, 33, 64, 100, 17, 20, 5, 1}, 4)) {
    TttLinearSpec spec = spec_of(1, D, 2);
    spec.B = 3;
    check_step(draw(spec, 61));
  }
}

TEST(Step, SeveralTokens) {
  for (int64_t T : {0, 2, 5, 15, 16, 17, 40}) {
    for (int32_t mini_batch : {16, 32, 64}) {
      TttLinearSpec spec = spec_of(T, 20, 2);
      spec.B = 2;
      spec.options.mini_batch = mini_batch;
      check_step(draw(spec, 62));
    }
  }
}

TEST(Step, VariableLengths) { check_step(draw(with_lengths(spec_of(0, 20, 2), {1, 0, 3, 16, 37}), 63)); }

TEST(Step, SixteenBitTypes) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (DType parameter_dtype : {DType::kF32, dtype}) {
      TttLinearSpec spec = spec_of(19, 60, 2);
      spec.dtype = dtype;
      spec.parameter_dtype = parameter_dtype;
      check_step(draw(spec, 64));
    }
  }
}

TEST(Step, ScaleAndEps) {
  TttLinearSpec spec = spec_of(19, 20);
  spec.options.scale = 0.3;
  spec.options.eps = 1e-2;
  check_step(draw(spec, 65));
}

// Sequences whose open mini-batches hold different counts of tokens.
TEST(Step, DifferentPositions) {
  TttLinearSpec spec = spec_of(20, 20, 2);
  spec.B = 3;
  const TttLinearCase problem = draw(spec, 66);
  TttLinearOpen open = support::opened(problem);
  const std::vector<double> positions{0, 7, 15};
  open.position = Tensor(DType::kI32, {3}, positions);
  open.gradient = draw(spec, 67).initial_state;
  open.gradient_bias = draw(spec, 67).initial_state_bias;
  TttLinearOpen exact = open;
  for (Tensor* x : {&exact.state, &exact.state_bias, &exact.gradient, &exact.gradient_bias}) *x = x->to(DType::kF64);
  const TttLinearResults expected = support::step(support::in_double(problem), exact, reference_context());
  EXPECT_EQ(expected.position.values(), (std::vector<double>{4, 11, 3}));
  for (const std::string& name : implementations("step")) {
    const auto results = unless_declined("step", name, [&] { return support::step(problem, open, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

// The tokens in one pass, and as a prefill of whole mini-batches followed by one step per token.
TEST(Step, PrefillThenSteps) {
  for (int32_t mini_batch : {16, 32}) {
    TttLinearSpec spec = spec_of(96, 20, 2);
    spec.B = 2;
    spec.options.mini_batch = mini_batch;
    const TttLinearCase problem = draw(spec, 68);
    const TttLinearResults whole = support::forward(support::in_double(problem), reference_context());
    const int64_t prefill = 32;
    for (const std::string& name : implementations("step")) {
      const TttLinearResults head = support::forward(slice_tokens(problem, 0, prefill), Context{});
      TttLinearOpen open = support::opened(problem);
      open.state = head.final_state;
      open.state_bias = head.final_state_bias;
      bool ran = true;
      for (int64_t t = prefill; t < spec.T && ran; ++t) {
        const TttLinearCase token = slice_tokens(problem, t, t + 1);
        const auto results =
            unless_declined("step", name, [&] { return support::step(token, open, context_for(name)); });
        ran = results.has_value();
        if (!ran) break;
        open = open_after(*results);
        EXPECT_LT(support::compare(results->o, slice(whole.o, 1, t, t + 1)).relative_rms, 1e-5) << name << " " << t;
      }
      if (!ran) continue;
      EXPECT_LT(support::compare(open.state, whole.final_state).relative_rms, 1e-5) << name;
      EXPECT_LT(support::compare(open.state_bias, whole.final_state_bias).relative_rms, 1e-5) << name;
      for (double value : open.gradient.values()) ASSERT_EQ(value, 0) << name;
      for (double value : open.gradient_bias.values()) ASSERT_EQ(value, 0) << name;
      for (double value : open.position.values()) ASSERT_EQ(value, 0) << name;
    }
  }
}

// Sequence n advances slot state_indices[n]; -1 leaves every slot alone and gives an o of 0.
TEST(Step, StateIndices) {
  constexpr int64_t kSlots = 6, kSequences = 4;
  const std::vector<double> slots{4, -1, 0, 2};
  for (DType index_type : {DType::kI32, DType::kI64}) {
    for (bool varlen : {false, true}) {
      TttLinearSpec spec = spec_of(3, 20, 2);
      spec.B = kSequences;
      if (varlen) spec = with_lengths(spec, {1, 3, 0, 18});
      const TttLinearCase problem = draw(spec, 69);
      TttLinearSpec pool_spec = spec;
      pool_spec.cu_seqlens.clear();
      pool_spec.B = kSlots;
      TttLinearOpen pool = support::opened(draw(pool_spec, 70));
      pool.gradient = draw(pool_spec, 71).initial_state;
      pool.gradient_bias = draw(pool_spec, 71).initial_state_bias;
      // Slots 1, 3 and 5 are free, and hold no counts.
      pool.position = Tensor(DType::kI32, {kSlots}, std::vector<double>{3, -1, 15, 16, 0, 1e9});
      const Tensor indices(index_type, {kSequences}, slots);

      for (const std::string& name : implementations("step")) {
        TttLinearOpen after = pool;
        Tensor o(DType::kF32, problem.v.shape());
        o.fill(std::numeric_limits<double>::quiet_NaN());
        TttLinearStep args;
        args.in = problem.inputs();
        args.in.initial_state = args.in.initial_state_bias = {};
        args.options = spec.options;
        args.state = after.state.view();
        args.state_bias = after.state_bias.view();
        args.gradient = after.gradient.view();
        args.gradient_bias = after.gradient_bias.view();
        args.position = after.position.view();
        args.state_indices = indices.view();
        args.o = o.view();
        const auto ran = unless_declined("step", name, [&] {
          TttLinearResults results;
          results.implementation = support::run(context_for(name), args);
          return results;
        });
        if (!ran) continue;

        std::vector<bool> used(kSlots, false);
        for (int64_t n = 0; n < kSequences; ++n) {
          const size_t i = static_cast<size_t>(n);
          const int64_t slot = static_cast<int64_t>(slots[i]);
          const Tensor rows = varlen ? slice(o, 1, spec.cu_seqlens[i], spec.cu_seqlens[i + 1]) : slice(o, 0, n, n + 1);
          if (slot < 0) {
            for (double value : rows.values()) EXPECT_EQ(value, 0) << name;
            continue;
          }
          used[static_cast<size_t>(slot)] = true;
          // The sequence alone, with its slot as the only one.
          TttLinearCase alone = varlen ? slice_tokens(problem, spec.cu_seqlens[i], spec.cu_seqlens[i + 1]) : problem;
          if (!varlen) {
            for (Tensor* x : {&alone.q, &alone.k, &alone.v, &alone.eta}) *x = slice(*x, 0, n, n + 1);
          }
          alone.spec.B = 1;
          TttLinearOpen open = pool;
          for (Tensor* x : {&open.state, &open.state_bias, &open.gradient, &open.gradient_bias, &open.position}) {
            *x = slice(*x, 0, slot, slot + 1);
          }
          const TttLinearResults expected = support::step(alone, open, context_for(name));
          EXPECT_TRUE(support::same_bits(rows, expected.o)) << name << " sequence " << n;
          const auto same = [&](const Tensor& all, const Tensor& one) {
            EXPECT_TRUE(support::same_bits(slice(all, 0, slot, slot + 1), one)) << name << " sequence " << n;
          };
          same(after.state, expected.final_state);
          same(after.state_bias, expected.final_state_bias);
          same(after.gradient, expected.gradient);
          same(after.gradient_bias, expected.gradient_bias);
          same(after.position, expected.position);
        }
        for (int64_t slot = 0; slot < kSlots; ++slot) {
          if (used[static_cast<size_t>(slot)]) continue;
          const auto untouched = [&](const Tensor& now, const Tensor& before) {
            EXPECT_TRUE(support::same_bits(slice(now, 0, slot, slot + 1), slice(before, 0, slot, slot + 1)))
                << name << " slot " << slot;
          };
          untouched(after.state, pool.state);
          untouched(after.state_bias, pool.state_bias);
          untouched(after.gradient, pool.gradient);
          untouched(after.gradient_bias, pool.gradient_bias);
          untouched(after.position, pool.position);
        }
      }
    }
  }
}

// Inputs, states and o with gaps; nothing between them is written.
TEST(Step, StridedTensors) {
  for (Layout layout : kLayouts) {
    TttLinearSpec spec = spec_of(18, 20, 2);
    spec.B = 2;
    const TttLinearCase problem = draw(spec, 72);
    const TttLinearResults expected = support::step(support::in_double(problem), reference_context());
    const TttLinearResults outputs = support::step_outputs(problem, support::opened(problem));
    for (const std::string& name : implementations("step")) {
      const auto results =
          unless_declined("step", name, [&] { return step_strided(problem, context_for(name), layout, outputs); });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

}  // namespace
}  // namespace fastweight::test
