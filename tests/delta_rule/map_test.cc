// The map of a segment: what it means, every implementation against the reference in double, and what its bits are.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "support/delta_rule_map_case.h"
#include "tests/delta_rule/grid.h"
#include "tests/random_problems.h"

namespace fastweight::test {
namespace {

using support::draw;

using support::DeltaRuleMapCase;
using MapResults = support::DeltaRuleMapResults;

std::vector<std::string> map_implementations(Mode mode) { return names_of(delta_rule_map_implementations(), mode); }

MapResults run_map(Mode mode, const DeltaRuleCase& drawn, const Context& context, Layout layout = Layout::kDense) {
  const DeltaRuleMapCase problem{drawn};
  MapResults results = support::outputs_of(mode, problem);
  const support::Call call = support::call_of(mode, problem, results);
  StridedArguments strided(call.views(), layout);
  results.implementation = call.run(context);
  EXPECT_TRUE(strided.finish()) << results.implementation << " wrote beside its outputs";
  return results;
}

constexpr Mode kMapModes[] = {Mode::kForward, Mode::kBackward};

// Of an implementation by its name; none where it declines.
std::optional<MapResults> try_map(Mode mode, const DeltaRuleCase& problem, const Context& context,
                                  Layout layout = Layout::kDense) {
  return unless_declined(mode, context.implementation, [&] { return run_map(mode, problem, context, layout); });
}

// `cut_into`: the chunks of a segment where sequences are cut into segments.
void check(const DeltaRuleCase& problem, Layout layout = Layout::kDense, int cut_into = 0) {
  for (Mode mode : kMapModes) {
    const MapResults expected = run_map(mode, support::in_double(problem), reference_context());
    for (const std::string& name : map_implementations(mode)) {
      Context context = context_for(name);
      context.segment_chunks = cut_into;
      const auto results = try_map(mode, problem, context, layout);
      if (results) expect_close(problem, *results, expected);
    }
  }
}

DeltaRuleSpec in_16_bits(DeltaRuleSpec spec, DType dtype = DType::kBF16) {
  spec.dtype = dtype;
  return spec;
}

DeltaRuleSpec random_spec(Dice& dice) {
  DeltaRuleSpec spec = spec_of(dice.pick({Gate::kNone, Gate::kPerHead, Gate::kPerChannel}), random_length(dice),
                               random_width(dice), random_width(dice));
  DeltaRuleOptions& options = spec.options;
  spec = with_random_sequences(dice, with_heads(spec, dice.between(1, 2), dice.between(1, 3)));
  spec.dtype = dice.pick({DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
  spec.gate_dtype = dice.chance(60) ? DType::kF32 : dice.pick({spec.dtype, DType::kBF16, DType::kF64});
  spec.initial_state = dice.chance(50);
  options.chunk_size = dice.pick({16, 32, 64, 64});
  options.state_v_first = dice.chance(30);
  options.qk_l2norm = dice.chance(40);
  if (dice.chance(30)) options.scale = dice.pick({0.1, 1.0, -0.5});
  spec.beta_absent = dice.chance(10);
  options.beta_sigmoid = !spec.beta_absent && dice.chance(40);
  options.allow_neg_eigval = options.beta_sigmoid && dice.chance(50);
  if (options.gate == Gate::kNone) return spec;
  options.gate_in_kernel = dice.chance(40);
  if (options.gate_in_kernel) {
    spec.dt_bias_absent = dice.chance(30);
    if (options.gate == Gate::kPerChannel && dice.chance(50)) options.lower_bound = -5;
  } else {
    spec.gate_divisor = dice.pick({1.0, 1.0, 10.0, 0.1});
    if (dice.chance(15)) spec.hard_gate_fraction = 0.3;
  }
  return spec;
}

TEST(Map, Random) {
  for_each_seed(reduced() ? 12 : 150, [](uint64_t seed) {
    Dice dice(seed);
    const DeltaRuleSpec spec = random_spec(dice);
    const Layout layout = dice.pick({Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed});
    SCOPED_TRACE("FASTWEIGHT_TEST_SEED=" + std::to_string(seed) + ": " + describe(spec));
    check(draw(spec, seed), layout);
  });
}

TEST(Map, LargeHeads) {
  for (Gate gate : kGates) {
    check(draw(spec_of(gate, 70, 128, 128), 31));
    if (!reduced()) check(draw(with_batch(spec_of(gate, 70, 256, 200), 2), 32));
  }
}

// Widths that Hopper's kernels take, and those next to them.
TEST(Map, In16Bits) {
  for (Gate gate : kGates) {
    check(draw(with_lengths(with_heads(in_16_bits(spec_of(gate, 0, 128, 72)), 1, 2), {66, 0, 1}), 41));
    check(draw(in_16_bits(spec_of(gate, 66, 64, 96), DType::kF16), 42));
    if (reduced()) continue;
    check(draw(in_16_bits(spec_of(gate, 70, 256, 64)), 43));
    check(draw(with_batch(with_heads(in_16_bits(spec_of(gate, 200, 128, 128)), 2, 2), 2), 44));
  }
}

// Nothing but the final state is wanted of segments: four of them with a tail and without.
TEST(Map, InSegments) {
  for (Gate gate : kGates) {
    DeltaRuleSpec spec = with_lengths(in_16_bits(spec_of(gate, 0, 128, 40)), {64, 71});
    spec.options.chunk_size = 16;
    spec.gate_divisor = 50;
    check(draw(spec, 45), Layout::kDense, 1);
  }
}

// A small limit of scratch memory cuts the input into pieces, which shows in no bit.
TEST(Map, InPieces) {
  if (device().type != DeviceType::kCuda) GTEST_SKIP() << "the CPU takes no scratch memory that grows with the length";
  for (Gate gate : kGates) {
    DeltaRuleSpec spec = with_lengths(in_16_bits(spec_of(gate, 0, 24, 40)), {0, 110, 20});
    spec.options.chunk_size = 16;
    const DeltaRuleCase problem = draw(spec, 46);
    for (Mode mode : kMapModes) {
      for (const std::string& name : map_implementations(mode)) {
        Context pieces = context_for(name);
        pieces.scratch_bytes = 1;
        const auto expected = try_map(mode, problem, context_for(name));
        if (expected) expect_same_bits(run_map(mode, problem, pieces), *expected);
      }
    }
  }
}

// Element (d, j) of the K x V state of sequence n and head h.
double element(const Tensor& x, const DeltaRuleSpec& spec, int64_t n, int64_t h, int64_t d, int64_t j) {
  const int64_t at = (n * spec.HV + h) * spec.K * spec.V;
  return x[at + (spec.options.state_v_first ? j * spec.K + d : d * spec.V + j)];
}

// M x + y for every sequence and head, in the layout of y; `transposed`: with the transpose of M.
Tensor apply(const DeltaRuleSpec& spec, const Tensor& M, bool transposed, const Tensor& x, const Tensor& y) {
  Tensor result = y;
  const int64_t K = spec.K, V = spec.V;
  for (int64_t n = 0; n < y.shape()[0]; ++n) {
    for (int64_t h = 0; h < spec.HV; ++h) {
      const int64_t at = (n * spec.HV + h) * K * K, out = (n * spec.HV + h) * K * V;
      for (int64_t d = 0; d < K; ++d) {
        for (int64_t j = 0; j < V; ++j) {
          double sum = element(y, spec, n, h, d, j);
          for (int64_t i = 0; i < K; ++i) {
            sum += M[at + (transposed ? i * K + d : d * K + i)] * element(x, spec, n, h, i, j);
          }
          result.set(out + (spec.options.state_v_first ? j * K + d : d * V + j), sum);
        }
      }
    }
  }
  return result;
}

std::vector<DeltaRuleSpec> some_specs(Gate gate, int64_t T) {
  DeltaRuleSpec plain = with_heads(spec_of(gate, T, 24, 40), emulated() ? 1 : 2, 2);
  DeltaRuleSpec options = plain;
  options.options.qk_l2norm = options.options.beta_sigmoid = options.options.state_v_first = true;
  options.options.gate_in_kernel = gate != Gate::kNone;
  options.dtype = DType::kBF16;
  return emulated() ? std::vector{options} : std::vector{plain, options};
}

class MapOf : public ::testing::TestWithParam<Gate> {};

// S_out = M S_in + h and G_in = M^T G_out + e, whatever the state and the gradient are, and mt is M^T.
TEST_P(MapOf, IsWhatTheSegmentDoes) {
  for (const DeltaRuleSpec& drawn : some_specs(GetParam(), 70)) {
    const DeltaRuleCase problem = support::in_double(draw(with_lengths(drawn, {21, 0, 49}), 33));
    const DeltaRuleResults forward = support::forward(problem, reference_context());
    const DeltaRuleResults backward = support::backward(problem, reference_context());
    DeltaRuleCase segment = problem;
    segment.initial_state = segment.d_final_state = {};
    const MapResults map = run_map(Mode::kForward, segment, reference_context());
    const MapResults back = run_map(Mode::kBackward, segment, reference_context());
    const auto expect_near = [&](const Tensor& x, const Tensor& y) {
      EXPECT_LT(support::compare(x, y).relative_rms, 1e-12) << describe(problem.spec);
    };
    expect_near(apply(problem.spec, map.m, false, problem.initial_state, map.h), forward.final_state);
    expect_near(apply(problem.spec, map.m, true, problem.d_final_state, back.e), backward.d_initial_state);
    expect_near(apply(problem.spec, back.mt, false, problem.d_final_state, back.e), backward.d_initial_state);
  }
}

// Where a state or its gradient is given, h and e are the bits of the forward and backward of the same name.
TEST_P(MapOf, HasTheBitsOfForwardAndBackward) {
  for (const DeltaRuleSpec& spec : some_specs(GetParam(), 133)) {
    for (const DeltaRuleSpec& each :
         first<DeltaRuleSpec>({with_lengths(spec, {5, 0, 64, 1, 63}), with_batch(spec, 2)}, emulated() ? 1 : 2)) {
      const DeltaRuleCase problem = draw(each, 35);
      for (const std::string& name : map_implementations(Mode::kForward)) {
        if (name == "reference") continue;
        const Context context = context_for(name);
        if (const auto map = try_map(Mode::kForward, problem, context)) {
          EXPECT_TRUE(support::same_bits(map->h, support::forward(problem, context).final_state))
              << name << " " << describe(spec);
        }
        if (const auto back = try_map(Mode::kBackward, problem, context)) {
          EXPECT_TRUE(support::same_bits(back->e, support::backward(problem, context).d_initial_state))
              << name << " " << describe(spec);
        }
      }
    }
  }
}

TEST_P(MapOf, SameBitsForEveryThreadCountAndAlone) {
  for (const DeltaRuleSpec& spec : some_specs(GetParam(), 69)) {
    const int64_t rows = emulated() ? 2 : 3;
    const DeltaRuleCase problem = draw(with_batch(spec, rows), 36);
    for (Mode mode : kMapModes) {
      for (const std::string& name : map_implementations(mode)) {
        const auto whole = try_map(mode, problem, context_for(name, 1));
        if (!whole) continue;
        const MapResults& expected = *whole;
        for (int threads : first<int>({3, 2, 8}, 1))
          expect_same_bits(run_map(mode, problem, context_for(name, threads)), expected);
        for (int64_t b = 0; b < rows; ++b) {
          DeltaRuleCase alone = problem;
          alone.spec.B = 1;
          for (Part part : {Part::kTokens, Part::kStart, Part::kEnd}) {
            for (Tensor* x : alone.of(part)) *x = slice(*x, 0, b, b + 1);
          }
          MapResults one = expected;
          for (const auto& field : MapResults::fields()) {
            one.*field.tensor = slice(expected.*field.tensor, 0, b, b + 1);
          }
          expect_same_bits(run_map(mode, alone, context_for(name)), one);
        }
      }
    }
  }
}

// (M2, h2) after (M1, h1), cut anywhere.
TEST_P(MapOf, Composes) {
  constexpr int64_t kTokens = 100, kCut = 37;
  const DeltaRuleSpec spec = with_heads(spec_of(GetParam(), kTokens, 20, 20), 1, 2);
  DeltaRuleCase problem = draw(spec, 37);
  problem.initial_state = problem.d_final_state = {};
  const DeltaRuleCase head = slice_tokens(problem, 0, kCut), tail = slice_tokens(problem, kCut, kTokens);
  for (const std::string& name : map_implementations(Mode::kForward)) {
    if (!try_map(Mode::kForward, problem, context_for(name))) continue;
    const auto of = [&](Mode mode, const DeltaRuleCase& part) { return run_map(mode, part, context_for(name)); };
    const MapResults first = of(Mode::kForward, head), second = of(Mode::kForward, tail);
    const MapResults whole = of(Mode::kForward, problem), back = of(Mode::kBackward, problem);
    const Tensor none(DType::kF32, whole.m.shape());
    EXPECT_LT(support::compare(apply(spec, second.m, false, first.m, none), whole.m).relative_rms, 1e-6) << name;
    EXPECT_LT(support::compare(apply(spec, second.m, false, first.h, second.h), whole.h).relative_rms, 1e-6) << name;
    const MapResults first_back = of(Mode::kBackward, head), second_back = of(Mode::kBackward, tail);
    EXPECT_LT(support::compare(apply(spec, first_back.mt, false, second_back.e, first_back.e), back.e).relative_rms,
              1e-6)
        << name;
  }
}

TEST_P(MapOf, EmptySegmentsChangeNothing) {
  constexpr int64_t kWidth = 8;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const DeltaRuleSpec spec = in_16_bits(with_heads(spec_of(GetParam(), 0, kWidth, 16), 2, 1), dtype);
    const DeltaRuleCase problem = draw(with_lengths(spec, {0, 0}), 38);
    const auto expect_identity = [](const Tensor& m, const std::string& name) {
      for (int64_t i = 0; i < m.size(); ++i) {
        EXPECT_EQ(m[i], i % (kWidth * kWidth) % (kWidth + 1) == 0 ? 1 : 0) << name;
      }
    };
    for (const std::string& name : map_implementations(Mode::kForward)) {
      const auto map = try_map(Mode::kForward, problem, context_for(name));
      if (!map) continue;
      const MapResults back = run_map(Mode::kBackward, problem, context_for(name));
      EXPECT_EQ(map->h.values(), problem.initial_state.values());
      EXPECT_EQ(back.e.values(), problem.d_final_state.values());
      expect_identity(map->m, name);
      expect_identity(back.mt, name);
    }
  }
}

// A decay of 0 leaves nothing of the state before it, and makes no NaN.
TEST_P(MapOf, AHardGateForgetsEverything) {
  if (GetParam() == Gate::kNone) GTEST_SKIP() << "no gate";
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    DeltaRuleCase problem = draw(in_16_bits(spec_of(GetParam(), 40, 16, 8), dtype), 39);
    const int64_t gates = problem.g.size() / problem.spec.T;
    for (int64_t i = 0; i < gates; ++i) problem.g.set(17 * gates + i, -1000);
    problem.initial_state = {};
    for (const std::string& name : map_implementations(Mode::kForward)) {
      const auto map = try_map(Mode::kForward, problem, context_for(name));
      if (!map) continue;
      for (double value : map->m.values()) EXPECT_EQ(value, 0) << name;
      for (double value : map->h.values()) EXPECT_TRUE(std::isfinite(value)) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, MapOf, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

template <class Args>
void expect_invalid(std::string (*entry)(const Context&, const Args&), const Args& args, const std::string& text) {
  try {
    support::Call(entry, args).run(context_for(""));
    ADD_FAILURE() << "accepted; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(MapErrors, AreNamed) {
  const DeltaRuleCase problem = draw(with_heads(spec_of(Gate::kPerHead, 20, 6, 4), 1, 2), 40);
  const Tensor square(DType::kF32, {1, 2, 6, 6}), state(DType::kF32, {1, 2, 6, 4}), wrong(DType::kF32, {1, 2, 4, 6});
  const Tensor beta(DType::kF32, {1, 20, 2, 4});
  DeltaRuleMapForward forward = support::bound<DeltaRuleMapForward>(problem, MapResults());
  forward.m = square.view();
  forward.h = state.view();
  const auto refused = [&](TensorView DeltaRuleMapForward::*view, const Tensor& x, const std::string& text) {
    DeltaRuleMapForward args = forward;
    args.*view = x.view();
    expect_invalid(delta_rule_map_forward, args, text);
  };
  refused(&DeltaRuleMapForward::m, wrong, "m: expected shape [1, 2, 6, 6], got [1, 2, 4, 6]");
  refused(&DeltaRuleMapForward::h, wrong, "h: expected shape [1, 2, 6, 4], got [1, 2, 4, 6]");
  refused(&DeltaRuleMapForward::m, square.to(DType::kBF16), "m: expected");
  DeltaRuleMapForward per_value = forward;
  per_value.in.beta = beta.view();
  expect_invalid(delta_rule_map_forward, per_value, "beta: expected shape [1, 20, 2], got [1, 20, 2, 4]");

  DeltaRuleMapBackward backward = support::bound<DeltaRuleMapBackward>(problem, MapResults());
  backward.mt = square.view();
  expect_invalid(delta_rule_map_backward, backward, "initial_state");
  backward.in.initial_state = {};
  backward.e = wrong.view();
  expect_invalid(delta_rule_map_backward, backward, "e: expected shape [1, 2, 6, 4], got [1, 2, 4, 6]");
  backward.e = {};
  backward.d_o = wrong.view();
  expect_invalid(delta_rule_map_backward, backward, "d_o: expected shape [1, 20, 2, 4], got [1, 2, 4, 6]");
}

}  // namespace
}  // namespace fastweight::test
