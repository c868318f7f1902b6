// The backward of the delta rule on Hopper's instructions, by its name: against the double-precision reference, with all
// lengths of tails, states, layouts and types.
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "tests/sm90/delta_rule_cases.h"
#include "tests/sm90/testing.h"

namespace fastweight::test {
namespace {

using support::draw;

// And of those for gradients of K above 64 with several ranges, the last not full.
const std::vector<Widths> kWidthsOfGradients{{128, 128}, {64, 64}, {56, 136}, {128, 200}};

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Context context() { return context_for("chunk_sm90"); }

DeltaRuleResults run(const DeltaRuleCase& problem, const Tensor& states = {}) {
  return support::backward(problem, context(), states);
}

// With other views of some tensors, or without them.
DeltaRuleResults run_with(const DeltaRuleCase& problem, DeltaRuleResults outputs,
                          const std::function<void(const support::Call&)>& change) {
  const support::Call call = call_of(Mode::kBackward, problem, outputs);
  change(call);
  outputs.implementation = call.run(context());
  return outputs;
}

void expect_as_reference(const DeltaRuleCase& problem) {
  expect_close(problem, run(problem), support::backward(support::in_double(problem), reference_context()));
}

class Sm90DeltaRuleBackward : public ::testing::TestWithParam<Gate> {};

TEST_P(Sm90DeltaRuleBackward, Lengths) {
  for (const DeltaRuleCase& problem : cases_of_lengths(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRuleBackward, ChunksOfFewerTokens) {
  for (const DeltaRuleCase& problem : cases_of_small_chunks(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRuleBackward, Fp16) {
  for (const DeltaRuleCase& problem : cases_in_fp16(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRuleBackward, Widths) {
  for (const DeltaRuleCase& problem : cases_of_widths(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRuleBackward, NoInitialStateAndStatesInTheOtherOrder) {
  for (const Widths& widths : kWidthsOfKernels) {
    expect_as_reference(case_without_initial_state_in_the_other_order(GetParam(), widths));
  }
}

TEST_P(Sm90DeltaRuleBackward, SequencesOfAllLengths) {
  for (const Widths& widths : kWidthsOfKernels) expect_as_reference(case_of_sequences(GetParam(), widths));
}

INSTANTIATE_TEST_SUITE_P(Gates, Sm90DeltaRuleBackward,
                         ::testing::Values(Gate::kNone, Gate::kPerHead, Gate::kPerChannel),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// Those with decays.
class Sm90DecayBackward : public ::testing::TestWithParam<std::tuple<Gate, Widths>> {
 protected:
  static DeltaRuleSpec spec_of_length(int64_t T) { return sized(std::get<0>(GetParam()), T, std::get<1>(GetParam())); }
};

TEST_P(Sm90DecayBackward, GroupsNormsAndRawGates) {
  for (const int64_t group : {2, 1}) {
    DeltaRuleSpec spec = with_batch(with_heads(spec_of_length(70), 2, group), 2);
    spec.options.qk_l2norm = spec.options.gate_in_kernel = spec.options.beta_sigmoid = true;
    DeltaRuleCase problem = draw(spec, 7);
    expect_as_reference(problem);
    problem.g = problem.g.to(problem.g.dtype() == DType::kF32 ? DType::kBF16 : DType::kF32);
    expect_as_reference(problem);
  }
}

// A sequence alone, and the same between others whose tokens are NaNs: the same bits.
TEST_P(Sm90DecayBackward, NothingOfTheNextSequence) {
  DeltaRuleCase packed = draw(with_lengths(spec_of_length(0), {40, 70, 30}), 8);
  const DeltaRuleResults whole = run(packed);
  for (Tensor* x : {&packed.q, &packed.k, &packed.v, &packed.g, &packed.beta, &packed.d_o}) {
    const int64_t row = x->size() / packed.spec.T;
    for (int64_t t = 0; t < packed.spec.T; ++t) {
      if (t >= 40 && t < 110) continue;
      for (int64_t i = 0; i < row; ++i) x->set(t * row + i, kNaN);
    }
  }
  const DeltaRuleResults beside = run(packed);
  for (const char* name : {"dq", "dk", "dv", "dg", "dbeta"}) {
    const Tensor part = slice(*beside.find(name), 1, 40, 110);
    EXPECT_TRUE(support::same_bits(part, slice(*whole.find(name), 1, 40, 110))) << name;
    for (double value : part.values()) ASSERT_FALSE(std::isnan(value)) << name;
  }
}

// From states that a forward kept in fp32 or in the type of k, and from those computed again: the same bits.
TEST_P(Sm90DecayBackward, FromKeptStates) {
  const DeltaRuleCase problem = draw(with_lengths(with_heads(spec_of_length(0), 1, 2), {67, 0, 20}), 9);
  const Tensor states = support::forward(problem, context(), true).chunk_states;
  const DeltaRuleResults again = run(problem);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    expect_same_bits(run(problem, states.to(dtype)), again, std::string(name_of(dtype)));
  }
}

// With little scratch memory the chunks come in windows, and gradients of states go from one to the next: the same bits.
TEST_P(Sm90DecayBackward, WindowsDoNotShow) {
  DeltaRuleSpec spec = with_heads(spec_of_length(reduced() ? 40 : 150), 1, 2);
  spec.options.chunk_size = 16;
  Context little = context();
  little.scratch_bytes = 1;
  const std::vector<int64_t> lengths =
      reduced() ? std::vector<int64_t>{20, 0, 5, 34} : std::vector<int64_t>{70, 0, 5, 90};
  for (const DeltaRuleSpec& one : {with_batch(spec, 2), with_lengths(spec, lengths)}) {
    const DeltaRuleCase problem = draw(one, 16);
    expect_same_bits(support::backward(problem, little), run(problem), "windows");
  }
}

// Of the other implementations tests/cuda has as much in narrow heads, which the emulator has time for.
TEST_P(Sm90DecayBackward, GraphReplaysWithOtherLengths) {
  const DeltaRuleCase problem = draw(with_lengths(with_heads(spec_of_length(0), 1, 2), {60, 60, 30}), 31);
  expect_replays_with_other_lengths(
      Mode::kBackward, problem, first<std::vector<int64_t>>({{0, 0, 67, 130}, {0, 64, 64, 65}}, 1),
      emulated() ? std::vector<std::string>{"chunk_sm90"} : implementations(problem.spec, Mode::kBackward));
}

TEST_P(Sm90DecayBackward, MalformedOffsetsStayInside) {
  DeltaRuleCase problem = draw(with_lengths(spec_of_length(0), {30, 20, 19}), 13);
  for (const std::vector<int64_t>& offsets : kMalformedOffsets) {
    problem.cu_seqlens = offsets_of(offsets);
    EXPECT_NO_THROW(run(problem));
  }
}

TEST_P(Sm90DecayBackward, TwoRunsHaveTheSameBits) {
  const DeltaRuleCase problem = draw(with_heads(spec_of_length(reduced() ? 100 : 200), 2, 2), 9);
  expect_same_bits(run(problem), run(problem), "two runs");
}

// Many heads have blocks of 128 columns, one alone has two of 64: the same bits.
TEST_P(Sm90DecayBackward, ColumnsOfABlockChangeNoBit) {
  const int64_t heads = heads_of_wide_blocks();
  const DeltaRuleCase all = draw(with_heads(spec_of_length(100), heads, 1), 11);
  DeltaRuleCase one = all;
  one.spec.H = one.spec.HV = 1;
  for (Tensor* x : {&one.q, &one.k, &one.v, &one.g, &one.beta, &one.d_o}) *x = slice(*x, 2, 1, 2);
  for (Tensor* x : {&one.initial_state, &one.d_final_state}) *x = slice(*x, 1, 1, 2);
  const DeltaRuleResults of_all = run(all), of_one = run(one);
  for (const char* name : {"dq", "dk", "dv", "dg", "dbeta"}) {
    EXPECT_TRUE(support::same_bits(*of_one.find(name), slice(*of_all.find(name), 2, 1, 2))) << name;
  }
  EXPECT_TRUE(support::same_bits(of_one.d_initial_state, slice(of_all.d_initial_state, 1, 1, 2)));
}

INSTANTIATE_TEST_SUITE_P(GatesAndWidths, Sm90DecayBackward,
                         ::testing::Combine(::testing::Values(Gate::kPerHead, Gate::kPerChannel),
                                            ::testing::ValuesIn(kWidthsOfGradients)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) +
                                  name_of_widths(std::get<1>(info.param));
                         });

// Of the gradients with a decay per channel: a block with all value columns of a head, and one with a range of them.
const std::vector<Widths> kWidthsOfChannels{{128, 128}, {64, 64}, {128, 200}, {56, 136}};

DeltaRuleCase raw_gates_with_a_strong_head(DType gates, int64_t H, int64_t group, const Widths& widths = {128, 128}) {
  DeltaRuleSpec spec = with_heads(sized(Gate::kPerChannel, 100, widths), H, group);
  spec.options.gate_in_kernel = true;
  spec.gate_dtype = gates;
  DeltaRuleCase problem = draw(spec, 23);
  problem.a_log.set(1, 3);
  return problem;
}

// Decays of tokens, or of whole tiles, that are too strong to be divided by; and gates in fp32 or in the type of k.
TEST(Sm90Backward, StrongDecaysPerChannel) {
  for (const auto& [gates, widths] : {std::pair{DType::kF32, Widths{128, 128}},
                                      {DType::kBF16, {128, 128}},
                                      {DType::kBF16, {64, 64}},
                                      {DType::kF32, {56, 136}},
                                      {DType::kF32, {128, 200}},
                                      {DType::kBF16, {72, 256}}}) {
    DeltaRuleCase problem = draw(sized(Gate::kPerChannel, 100, widths), 17);
    problem.g = problem.g.to(gates);
    for (int64_t i = 0; i < problem.g.size(); i += 3)
      problem.g.set(i, i / widths.first % 32 < 16 ? -5.0 : i % 7 == 0 ? -40.0 : -0.1);
    expect_as_reference(problem);
  }
}

// Raw gates of a group of heads, of which one decays so fast that all its pairs of chunks and heads are left to another
// kernel.
TEST(Sm90Backward, OneStrongHeadOfRawGates) {
  for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
    for (DType gates : {DType::kF32, DType::kBF16}) {
      expect_as_reference(raw_gates_with_a_strong_head(gates, 1, 2, widths));
    }
  }
}

// Tiles of 16 tokens, tokens and channels that forget everything, among others that forget next to nothing.
TEST(Sm90Backward, GatesThatForgetAmongMildOnes) {
  for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
    for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
      for (DType gates : {DType::kBF16, DType::kF32}) expect_as_reference(case_that_forgets(gate, gates, widths));
    }
  }
}

// Of a group of heads and four chunks, one head in one chunk: another kernel has the group's share of dq and dk there.
TEST(Sm90Backward, OneStrongDecayAmongMildOnes) {
  for (const Widths& widths : kWidthsOfChannels) {
    DeltaRuleSpec spec = with_heads(sized(Gate::kPerChannel, 200, widths), 2, 2);
    spec.options.qk_l2norm = true;
    DeltaRuleCase problem = draw(spec, 18);
    for (int64_t i = 0; i < problem.g.size(); ++i) problem.g.set(i, -0.3 * (i * 7 % 11) / 11);
    problem.g.set((70 * spec.HV + 1) * spec.K + 5, -20.0);
    expect_as_reference(problem);
  }
}

// So mild that tiles of 16 tokens fit the exponents of fp16.
TEST(Sm90Backward, MildDecaysPerChannelInFp16) {
  for (const Widths& widths : kWidthsOfChannels) {
    DeltaRuleCase problem = draw(sized(Gate::kPerChannel, 100, widths, DType::kF16), 19);
    for (int64_t i = 0; i < problem.g.size(); ++i) problem.g.set(i, -0.1 * (i * 7 % 11) / 11);
    expect_as_reference(problem);
  }
}

// Gates per channel that are given and raw, in the type of k: where these come and dg leaves by TMA, and where they cannot.
class Sm90GateMaps : public ::testing::TestWithParam<std::tuple<bool, int64_t>> {
 protected:
  static DeltaRuleCase drawn() {
    const auto [raw, width] = GetParam();
    DeltaRuleSpec spec = with_heads(sized(Gate::kPerChannel, 70, {width, width}), 1, 2);
    spec.options.gate_in_kernel = raw;
    spec.gate_dtype = spec.dtype;
    return draw(spec, 24);
  }
};

TEST_P(Sm90GateMaps, DgInFp32BesideGatesInTheTypeOfK) {
  const DeltaRuleCase problem = drawn();
  DeltaRuleResults outputs = outputs_of(Mode::kBackward, problem);
  outputs.dg = outputs.dg.to(DType::kF32);
  DeltaRuleResults results = run_with(problem, outputs, [](const support::Call&) {});
  expect_close(problem, results, support::backward(support::in_double(problem), reference_context()));
  results.dg = results.dg.to(DType::kBF16);
  expect_same_bits(results, run(problem), "dg in fp32, rounded");
}

TEST_P(Sm90GateMaps, StridedGates) {
  const DeltaRuleCase problem = drawn();
  const DeltaRuleResults expected = run(problem);
  for (Layout layout : first<Layout>({Layout::kReversed, Layout::kEverySecond, Layout::kHeadsFirst}, 2)) {
    const StridedTensor g(problem.g, layout);
    const std::string what = "layout " + std::to_string(static_cast<int>(layout));
    expect_same_bits(run_with(problem, outputs_of(Mode::kBackward, problem),
                              [&](const support::Call& call) { call["g"] = g.view(); }),
                     expected, what + " of g");
    DeltaRuleResults outputs = outputs_of(Mode::kBackward, problem);
    const StridedTensor dg(outputs.dg, layout);
    outputs = run_with(problem, outputs, [&](const support::Call& call) { call["dg"] = dg.view(); });
    outputs.dg = dg.dense();
    expect_same_bits(outputs, expected, what + " of dg");
    EXPECT_TRUE(dg.guards_intact()) << what;
  }
}

// An element behind a multiple of 16 bytes.
TEST_P(Sm90GateMaps, MisalignedGates) {
  const DeltaRuleCase problem = drawn();
  const auto misaligned = [](const Tensor& x, const TensorView& view) {
    TensorView moved = view;
    moved.data = static_cast<std::byte*>(x.data()) + element_size(x.dtype());
    return moved;
  };
  const DeltaRuleResults expected = run(problem);
  DeltaRuleResults outputs = outputs_of(Mode::kBackward, problem);
  Tensor g(problem.g.dtype(), {problem.g.size() + 1}), dg = g;
  for (int64_t i = 0; i < problem.g.size(); ++i) g.set(i + 1, problem.g[i]);
  expect_same_bits(run_with(problem, outputs, [&](const support::Call& call) { call["g"] = misaligned(g, call["g"]); }),
                   expected, "g");
  outputs = run_with(problem, outputs, [&](const support::Call& call) { call["dg"] = misaligned(dg, call["dg"]); });
  for (int64_t i = 0; i < problem.g.size(); ++i) outputs.dg.set(i, dg[i + 1]);
  expect_same_bits(outputs, expected, "dg");
}

// One gate for all tokens, heads or channels.
TEST_P(Sm90GateMaps, BroadcastGates) {
  for (size_t axis : {3, 1, 2}) {
    DeltaRuleCase problem = drawn();
    const TensorView view = problem.g.view();
    for (int64_t i = 0; i < problem.g.size(); ++i) {
      problem.g.set(i, problem.g[i - i / view.strides[axis] % view.shape[axis] * view.strides[axis]]);
    }
    const auto broadcast = [&](const support::Call& call) { call["g"].strides[axis] = 0; };
    expect_same_bits(run_with(problem, outputs_of(Mode::kBackward, problem), broadcast), run(problem),
                     "axis " + std::to_string(axis));
  }
}

INSTANTIATE_TEST_SUITE_P(Gates, Sm90GateMaps,
                         ::testing::Combine(::testing::Values(false, true), ::testing::Values(128, 64, 56)),
                         [](const auto& info) {
                           return (std::get<0>(info.param) ? "raw" : "given") + std::to_string(std::get<1>(info.param));
                         });

// What is not asked for changes no bit of the gradients of the gates' parameters, of mild heads and of strong ones.
TEST(Sm90Backward, ParametersOfGatesWithoutDg) {
  std::vector<DeltaRuleCase> problems;
  for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
    problems.push_back(raw_gates_with_a_strong_head(DType::kF32, 2, 1, widths));
    problems.push_back(raw_gates_with_a_strong_head(DType::kBF16, 2, 1, widths));
  }
  DeltaRuleSpec per_head = with_heads(wide(Gate::kPerHead, 100), 2, 1);
  per_head.options.gate_in_kernel = true;
  problems.push_back(draw(per_head, 25));
  for (const DeltaRuleCase& problem : problems) {
    DeltaRuleResults all = run(problem), outputs = outputs_of(Mode::kBackward, problem);
    all.dg = outputs.dg = {};
    expect_same_bits(run_with(problem, outputs, [](const support::Call&) {}), all, describe(problem.spec));
  }
}

// A gate that is not a number spoils what comes of the states after it and of their gradients before it, in its head and
// sequence, and all of its token.
TEST(Sm90Backward, NaNGates) {
  for (const auto& [gate, widths] :
       {std::pair{Gate::kPerHead, Widths{128, 128}}, {Gate::kPerChannel, {128, 128}}, {Gate::kPerChannel, {64, 64}}}) {
    for (const DeltaRuleSpec& spec : specs_of_decays(gate, widths)) {
      const NaNGate x = nan_gate(spec);
      const DeltaRuleResults clean = run(x.without), results = run(x.with);
      for (const char* name : {"dq", "dk", "dv", "dg", "dbeta"}) {
        const std::string what = std::string(name) + " of " + describe(x.with.spec);
        const auto part = [&](const DeltaRuleResults& of, int64_t begin, int64_t end, int64_t head) {
          return part_of(*of.find(name), begin, end, head);
        };
        const auto expect_same = [&](int64_t begin, int64_t end, int64_t head) {
          EXPECT_TRUE(support::same_bits(part(results, begin, end, head), part(clean, begin, end, head)))
              << what << " " << begin << " " << head;
        };
        expect_same(0, x.with.spec.T, 1 - x.head);
        expect_same(0, x.begin, x.head);
        expect_same(x.end, x.with.spec.T, x.head);
        const bool of_states = std::string(name) == "dq", of_gradients = std::string(name) == "dv";
        if (of_states) {
          expect_same(x.begin, x.chunk_begin, x.head);
        } else {
          EXPECT_TRUE(all_nan(part(results, x.begin, x.chunk_begin, x.head))) << what;
        }
        if (of_gradients) {
          expect_same(x.chunk_end, x.end, x.head);
        } else {
          EXPECT_TRUE(all_nan(part(results, x.chunk_end, x.end, x.head))) << what;
        }
        EXPECT_TRUE(all_nan(part(results, x.token, x.token + 1, x.head))) << what;
      }
      for (int64_t n = 0; n < 3; ++n) {
        for (int64_t head = 0; head < 2; ++head) {
          const auto state = [&](const Tensor& states) { return slice(slice(states, 0, n, n + 1), 1, head, head + 1); };
          if (n == 1 && head == x.head) {
            EXPECT_TRUE(all_nan(state(results.d_initial_state))) << describe(x.with.spec);
          } else {
            EXPECT_TRUE(support::same_bits(state(results.d_initial_state), state(clean.d_initial_state))) << n << head;
          }
        }
      }
    }
  }
}

// Four times as many pairs of a chunk and a key head as the gradients have blocks, two on a multiprocessor with K <= 64,
// which take one after the other: mild ones and strong ones.
TEST(Sm90Backward, ManyPairsForABlock) {
  for (const auto& [widths, heads] : {std::pair{Widths{128, 128}, 4}, {{64, 64}, 8}, {{48, 72}, 8}}) {
    const int64_t chunks = cuda_devices().front().multiprocessors + 1;
    DeltaRuleSpec spec = with_heads(sized(Gate::kPerChannel, 16 * chunks - 3, widths), heads, 1);
    spec.options.chunk_size = 16;
    spec.options.gate_in_kernel = widths.second == 72;
    spec.gate_dtype = widths.second == 72 ? DType::kF32 : spec.dtype;
    DeltaRuleCase problem = draw(spec, 26);
    for (int64_t chunk = 1; chunk < chunks; chunk += 3) {
      problem.g.set((16 * chunk * heads + 1) * spec.K + 5, spec.options.gate_in_kernel ? 200 : -200);
    }
    expect_as_reference(problem);
  }
}

// A row alone leaves most of the device to the gradients, which begin when the scan back has left a chunk. With many rows
// none of it is left, and they begin when it has ended.
TEST(Sm90Backward, GradientsBesideTheScanBackChangeNoBit) {
  for (const auto& [gate, widths] : first<std::pair<Gate, Widths>>({{Gate::kPerHead, {128, 128}},
                                                                    {Gate::kPerChannel, {128, 128}},
                                                                    {Gate::kPerChannel, {64, 64}},
                                                                    {Gate::kNone, {64, 136}},
                                                                    {Gate::kPerChannel, {128, 200}}},
                                                                   3)) {
    const int64_t rows = cuda_devices().front().multiprocessors;
    DeltaRuleSpec spec = with_batch(with_heads(sized(gate, 16 * (emulated() ? 9 : 60) - 3, widths), 1, 1), rows);
    spec.options.chunk_size = 16;
    const DeltaRuleCase all = draw(spec, 28);
    DeltaRuleCase one = all;
    one.spec.B = 1;
    for (Tensor* x : {&one.q, &one.k, &one.v, &one.g, &one.beta, &one.d_o, &one.initial_state, &one.d_final_state}) {
      if (x->present()) *x = slice(*x, 0, 1, 2);
    }
    Context windows = context();
    windows.scratch_bytes = 1;
    const DeltaRuleResults of_all = run(all), of_one = run(one), in_windows = support::backward(one, windows);
    for (const char* name : {"dq", "dk", "dv", "dg", "dbeta", "d_initial_state"}) {
      if (!of_all.find(name)->present()) continue;
      const Tensor expected = slice(*of_all.find(name), 0, 1, 2);
      EXPECT_TRUE(support::same_bits(*of_one.find(name), expected)) << name << " of " << describe(spec);
      EXPECT_TRUE(support::same_bits(*in_windows.find(name), expected)) << name << " in windows of " << describe(spec);
    }
  }
}

// Heads that fill the device: with a decay per head or none the scan back over a window begins while the gradients of the
// window before still run.
TEST(Sm90Backward, WindowsThatOverlapDoNotShow) {
  for (const auto& [gate, widths] : first<std::pair<Gate, Widths>>({{Gate::kPerHead, {128, 128}},
                                                                    {Gate::kNone, {64, 192}},
                                                                    {Gate::kPerChannel, {128, 128}},
                                                                    {Gate::kNone, {128, 128}},
                                                                    {Gate::kPerHead, {128, 256}}},
                                                                   3)) {
    const int64_t heads = emulated() ? 3 : 96;
    DeltaRuleSpec spec = with_heads(sized(gate, 16 * (emulated() ? 8 : 40) + 5, widths), heads, 1);
    spec.options.chunk_size = 16;
    const DeltaRuleCase problem = draw(spec, 27);
    Context windows = context();
    windows.scratch_bytes = 1;
    const DeltaRuleResults one = run(problem);
    for (int round = 0; round < (emulated() ? 1 : 5); ++round) {
      expect_same_bits(support::backward(problem, windows), one, "windows");
    }
  }
}

// Ranges of 128 columns of a head's values, of groups of heads and sequences of all lengths.
TEST(Sm90Backward, ValuesAbove128) {
  for (const Gate gate : {Gate::kNone, Gate::kPerHead, Gate::kPerChannel}) {
    for (const Widths& widths : first<Widths>({{128, 256}, {64, 192}, {128, 136}, {64, 256}, {72, 248}}, 3)) {
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        DeltaRuleSpec spec = with_lengths(with_heads(sized(gate, 0, widths, dtype), 1, 2), {67, 0, 20});
        spec.options.qk_l2norm = dtype == DType::kBF16;
        expect_as_reference(draw(spec, 33));
      }
    }
  }
}

// States that are made again have the bits of the forward's here too.
TEST(Sm90Backward, KeysAbove128) {
  for (const auto& [gate, widths] :
       {std::pair{Gate::kPerHead, Widths{192, 136}}, {Gate::kNone, {256, 64}}, {Gate::kPerChannel, {192, 72}}}) {
    DeltaRuleSpec spec = with_lengths(with_heads(sized(gate, 0, widths), 1, 2), {67, 0, 140});
    spec.gate_divisor = 30;  // mild enough that a chunk is not forgotten in the next one
    const DeltaRuleCase problem = draw(spec, 32);
    expect_as_reference(problem);
    const Tensor states = support::forward(problem, context(), true).chunk_states;
    expect_same_bits(run(problem, states), run(problem), "kept states");
    Context little = context();
    little.scratch_bytes = 1;
    expect_same_bits(support::backward(problem, little), run(problem), "windows");
  }
}

TEST(Sm90Backward, TheVerboseLineSaysWhoseGradientsRun) {
  const auto expect = [](Gate gate, const Widths& widths, DType dtype, bool own, bool raw = false) {
    std::string line;
    DeltaRuleSpec spec = sized(gate, 1, widths, dtype);
    spec.options.gate_in_kernel = raw;
    Context verbose = context();
    verbose.verbose = true;
    verbose.log_user = &line;
    verbose.log = [](void* user, const char* text) { *static_cast<std::string*>(user) = text; };
    support::backward(draw(spec, 34), verbose);
    EXPECT_EQ(line.find("gradients of chunk_16bit") == std::string::npos, own) << line;
  };
  for (const int64_t V : {64, 128, 136, 256}) {
    for (const int64_t K : {64, 128}) expect(Gate::kPerHead, {K, V}, DType::kF16, true);
  }
  expect(Gate::kNone, {192, 64}, DType::kBF16, false);
  expect(Gate::kPerChannel, {192, 64}, DType::kBF16, false);
  for (const int64_t V : {64, 128, 136, 256}) {
    for (const int64_t K : {8, 64, 72}) expect(Gate::kPerChannel, {K, V}, DType::kBF16, true);
  }
  for (const int64_t K : {64, 128}) {
    expect(Gate::kPerChannel, {K, 64}, DType::kBF16, true, true);
    expect(Gate::kPerChannel, {K, 64}, DType::kF16, true);
    expect(Gate::kPerChannel, {K, 64}, DType::kF16, false, true);
  }
}

TEST(Sm90Backward, WhatItDeclines) {
  const auto expect = [](const DeltaRuleSpec& spec, const std::string& reason) {
    expect_refused(ErrorCode::kUnsupported, reason, [&] { run(draw(spec, 10)); });
  };
  expect(wide(Gate::kPerHead, 70, DType::kF32), "16-bit type");
  for (const Widths& widths : {Widths{1, 8}, {33, 64}, {64, 63}, {100, 128}, {128, 65}, {64, 129}}) {
    expect(sized(Gate::kPerHead, 70, widths), "multiples of 16 bytes");
  }
}

}  // namespace
}  // namespace fastweight::test
