// Sequences that are cut into segments on Hopper (src/cuda/delta_rule/chunk_sm90/segment_plan.h): the plan on the host, and both
// directions against the double-precision reference and against themselves, with segments so short that there are many.
#include "cuda/delta_rule/chunk_sm90/segment_plan.h"

#include "tests/sm90/delta_rule_cases.h"
#include "tests/sm90/testing.h"

namespace fastweight::test {
namespace {

using cuda::chunk_sm90::kLongSegmentChunks;
using cuda::chunk_sm90::kSegmentChunks;
using cuda::chunk_sm90::segment_chunks;
using cuda::chunk_sm90::segments_of;
using support::draw;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int kNever = -1;

// Few heads alone, of a device with 132 multiprocessors; a wish comes first.
TEST(Sm90SegmentPlan, HeadsAndDeviceDecide) {
  EXPECT_EQ(segment_chunks(1, 132, 0), kSegmentChunks);
  EXPECT_EQ(segment_chunks(8, 132, 0), kSegmentChunks);
  EXPECT_EQ(segment_chunks(9, 132, 0), kLongSegmentChunks);
  EXPECT_EQ(segment_chunks(13, 132, 0), kLongSegmentChunks);
  EXPECT_EQ(segment_chunks(14, 132, 0), 0);
  EXPECT_EQ(segment_chunks(16, 132, 0), 0);
  EXPECT_EQ(segment_chunks(8, 132, kNever), 0);
  EXPECT_EQ(segment_chunks(96, 132, 5), 5);
}

TEST(Sm90SegmentPlan, SegmentsComeInFours) {
  EXPECT_EQ(segments_of(4095, 1024), 0);
  EXPECT_EQ(segments_of(4096, 1024), 4);
  EXPECT_EQ(segments_of(8191, 1024), 4);
  EXPECT_EQ(segments_of(8192, 1024), 8);
}

// Every segment that a window touches has a number among those of the window.
TEST(Sm90SegmentPlan, NumbersOfAWindow) {
  cuda::Sequences sequences;
  sequences.count = 1;
  sequences.tokens = 16 * 41;
  for (int64_t n : {1, 3, 5}) {
    for (int64_t begin = 0; begin < 41; begin += 4) {
      const cuda::ChunkWindow window{begin, std::min<int64_t>(begin + 4, 41), 41};
      const auto [first, count] = cuda::chunk_sm90::segments_in(sequences, 16, n, window);
      for (int64_t segment = 0; segment < 41 / n; ++segment) {
        const bool touched = segment * n < window.end && (segment + 1) * n > window.begin;
        if (touched) EXPECT_TRUE(segment >= first && segment < first + count) << n << " " << begin << " " << segment;
      }
      EXPECT_LE(first + count, 41 / n);
    }
  }
}

Context cut_into(int chunks, size_t scratch_bytes = 0) {
  Context context = context_for("chunk_sm90");
  context.segment_chunks = chunks;
  context.scratch_bytes = scratch_bytes;
  return context;
}

// With outputs that held NaNs.
DeltaRuleResults run_into(DeltaRuleResults outputs, const DeltaRuleCase& problem, const Context& context) {
  for (const auto& [name, tensor] : outputs.named()) outputs.at(name).fill(kNaN);
  call_of(Mode::kForward, problem, outputs).run(context);
  return outputs;
}

DeltaRuleResults run(const DeltaRuleCase& problem, const Context& context) {
  return run_into(outputs_of(Mode::kForward, problem), problem, context);
}

void expect_as_reference(const DeltaRuleCase& problem, int chunks) {
  expect_close(problem, run(problem, cut_into(chunks)), support::forward(problem, reference_context(), true));
  expect_close(problem, support::backward(problem, cut_into(chunks)),
               support::backward(support::in_double(problem), reference_context()));
}

constexpr const char* kGradientsOfTokens[] = {"dq", "dk", "dv", "dg", "dbeta"};

// Those of tokens [begin, end) are all the gradients that a call has.
void expect_gradients_of(const DeltaRuleResults& part, const DeltaRuleResults& whole, int64_t begin, int64_t end) {
  for (const char* name : kGradientsOfTokens) {
    EXPECT_TRUE(support::same_bits(*part.find(name), slice(*whole.find(name), 1, begin, end))) << name;
  }
}

// Decays so weak that what a segment begins with still counts where it ends.
DeltaRuleSpec remembering(DeltaRuleSpec spec) {
  spec.gate_divisor = 50;
  return spec;
}

// The same with chunks of 16 tokens.
DeltaRuleSpec in_small_chunks(DeltaRuleSpec spec) {
  spec.options.chunk_size = 16;
  return remembering(spec);
}

class Sm90Segments : public ::testing::TestWithParam<Gate> {};

// Twice four segments and a tail, of several rows and grouped heads.
TEST_P(Sm90Segments, AsReference) {
  const int chunks = reduced() ? 1 : 2;
  const int64_t tokens = 16 * 8 * chunks + (reduced() ? 5 : 35);
  expect_as_reference(draw(with_batch(with_heads(in_small_chunks(wide(GetParam(), tokens)), 1, 2), 2), 1), chunks);
}

TEST_P(Sm90Segments, WholeChunks) { expect_as_reference(draw(remembering(wide(GetParam(), 64 * 4 + 3)), 2), 1); }

TEST_P(Sm90Segments, Widths) {
  for (const Widths& widths : first<Widths>({{72, 40}, {128, 40}, {72, 120}}, 1)) {
    DeltaRuleSpec spec = in_small_chunks(sized(GetParam(), 70, widths, DType::kF16));
    spec.initial_state = false;
    spec.options.state_v_first = true;
    expect_as_reference(draw(spec, 3), 1);
  }
}

// Maps are 128 x 128: other widths are not cut, whatever the caller wishes.
TEST_P(Sm90Segments, OtherWidthsAreNotCut) {
  for (const Widths& widths : {Widths{64, 64}, {128, 136}}) {
    const DeltaRuleCase problem = draw(in_small_chunks(sized(GetParam(), 70, widths)), 17);
    expect_same_bits(run(problem, cut_into(1)), run(problem, cut_into(kNever)), name_of_widths(widths));
  }
}

// Shorter than four segments of 16 tokens, as long, longer, and of none at all.
DeltaRuleSpec of_sequences(Gate gate) {
  return with_lengths(in_small_chunks(wide(gate, 0)), {5, 0, 63, 64, reduced() ? 70 : 130, reduced() ? 0 : 65});
}

TEST_P(Sm90Segments, SequencesOfAllLengths) { expect_as_reference(draw(of_sequences(GetParam()), 4), 1); }

// A sequence alone has the bits that it has among others.
TEST_P(Sm90Segments, TheBatchDoesNotShow) {
  const DeltaRuleCase packed = draw(of_sequences(GetParam()), 5);
  const DeltaRuleResults all = run(packed, cut_into(1));
  const int64_t begin = packed.spec.cu_seqlens[4], end = packed.spec.cu_seqlens[5];
  DeltaRuleCase one = slice_tokens(packed, begin, end);
  one.initial_state = slice(packed.initial_state, 0, 4, 5);
  one.d_final_state = slice(packed.d_final_state, 0, 4, 5);
  const DeltaRuleResults alone = run(one, cut_into(1));
  EXPECT_TRUE(support::same_bits(alone.o, slice(all.o, 1, begin, end)));
  EXPECT_TRUE(support::same_bits(alone.final_state, slice(all.final_state, 0, 4, 5)));
  const DeltaRuleResults all_back = support::backward(packed, cut_into(1)), back = support::backward(one, cut_into(1));
  expect_gradients_of(back, all_back, begin, end);
  EXPECT_TRUE(support::same_bits(back.d_initial_state, slice(all_back.d_initial_state, 0, 4, 5)));
}

// A call that is cut behind four segments, the state handed over: the same bits.
TEST_P(Sm90Segments, CutsBehindFourDoNotShow) {
  const DeltaRuleCase problem = draw(in_small_chunks(wide(GetParam(), 64 + 64 + 9)), 6);
  const Context context = cut_into(1);
  const DeltaRuleResults whole = run(problem, context), head = run(slice_tokens(problem, 0, 64), context);
  DeltaRuleCase rest = slice_tokens(problem, 64, 137);
  rest.initial_state = head.final_state;
  const DeltaRuleResults tail = run(rest, context);
  EXPECT_TRUE(support::same_bits(head.o, slice(whole.o, 1, 0, 64)));
  EXPECT_TRUE(support::same_bits(tail.o, slice(whole.o, 1, 64, 137)));
  EXPECT_TRUE(support::same_bits(tail.final_state, whole.final_state));
  EXPECT_TRUE(support::same_bits(tail.chunk_states, slice(whole.chunk_states, 1, 4, 9)));
}

// The same of gradients, where something is behind the cut and where the second call has a tail alone.
TEST_P(Sm90Segments, CutsBehindFourDoNotShowInGradients) {
  for (const int64_t tokens : first<int64_t>({64 + 64 + 9, 64 + 20, 64 + 64}, 1)) {
    const DeltaRuleCase problem = draw(in_small_chunks(wide(GetParam(), tokens)), 6);
    const Context context = cut_into(1);
    const DeltaRuleResults whole = support::backward(problem, context);
    DeltaRuleCase head = slice_tokens(problem, 0, 64), rest = slice_tokens(problem, 64, tokens);
    rest.initial_state = run(head, context).final_state;
    const DeltaRuleResults of_rest = support::backward(rest, context);
    head.d_final_state = of_rest.d_initial_state;
    const DeltaRuleResults of_head = support::backward(head, context);
    expect_gradients_of(of_rest, whole, 64, tokens);
    expect_gradients_of(of_head, whole, 0, 64);
    EXPECT_TRUE(support::same_bits(of_head.d_initial_state, whole.d_initial_state));
  }
}

// Without segments, and with ones of which no sequence has four: the bits of the scan. With them there are others.
TEST_P(Sm90Segments, Never) {
  const DeltaRuleCase problem = draw(in_small_chunks(wide(GetParam(), reduced() ? 70 : 100)), 7);
  const DeltaRuleResults never = run(problem, cut_into(kNever));
  expect_same_bits(run(problem, cut_into(2)), never, "too long for the sequence");
  EXPECT_FALSE(support::same_bits(run(problem, cut_into(1)).final_state, never.final_state));
  const DeltaRuleResults never_back = support::backward(problem, cut_into(kNever));
  expect_same_bits(support::backward(problem, cut_into(2)), never_back, "too long for the sequence");
  EXPECT_FALSE(support::same_bits(support::backward(problem, cut_into(1)).d_initial_state, never_back.d_initial_state));
}

// Whether the verbose line of a call with such a context names them.
template <class Run>
bool names_segments(Context context, const Run& run) {
  std::string line;
  context.verbose = true;
  context.log_user = &line;
  context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) = text; };
  run(context);
  return line.find("segments of 1 chunks") != std::string::npos;
}

TEST(Sm90SegmentConfig, TheVerboseLineNamesThem) {
  const DeltaRuleCase problem = draw(in_small_chunks(wide(Gate::kPerHead, 64)), 16);
  for (int chunks : {1, kNever}) {
    EXPECT_EQ(names_segments(cut_into(chunks), [&](const Context& context) { run(problem, context); }), chunks == 1);
    EXPECT_EQ(names_segments(cut_into(chunks), [&](const Context& context) { support::backward(problem, context); }),
              chunks == 1);
  }
}

// Windows of four chunks cut segments of three and of five wherever it happens: the same bits.
TEST_P(Sm90Segments, WindowsDoNotShow) {
  const DeltaRuleSpec none = wide(GetParam(), 0);
  using Cut = std::pair<DeltaRuleSpec, int>;
  for (const auto& [spec, chunks] : first<Cut>({{with_lengths(none, {20, 0, 200, 5}), 3},
                                                {with_batch(wide(GetParam(), 16 * 13 + 5), 2), 3},
                                                {sized(GetParam(), 16 * 13 + 5, {128, 40}), 3},
                                                {with_lengths(none, {20, 0, 200, 5, 195}), 3},
                                                {with_lengths(none, {20, 330}), 5},
                                                // Segments that begin and end with windows, with a tail and without.
                                                {wide(GetParam(), 16 * 16), 4},
                                                {with_lengths(none, {16 * 16, 16 * 4 + 7}), 1}},
                                               1)) {
    const DeltaRuleCase problem = draw(in_small_chunks(spec), 8);
    expect_same_bits(run(problem, cut_into(chunks, 1)), run(problem, cut_into(chunks)), "windows");
    expect_same_bits(support::backward(problem, cut_into(chunks, 1)), support::backward(problem, cut_into(chunks)),
                     "windows back");
  }
}

// States that a backward makes again are those that the forward kept.
TEST_P(Sm90Segments, Gradients) {
  const DeltaRuleCase problem = draw(with_lengths(in_small_chunks(wide(GetParam(), 0)), {20, 75}), 9);
  const Context context = cut_into(1);
  const DeltaRuleResults again = support::backward(problem, context);
  expect_same_bits(support::backward(problem, context, run(problem, context).chunk_states), again, "states");
  expect_close(problem, again, support::backward(support::in_double(problem), reference_context()));
}

// What a forward keeps for its backward changes no bit of either.
TEST_P(Sm90Segments, KeptFactors) {
  const DeltaRuleCase problem = draw(in_small_chunks(wide(GetParam(), 70)), 10);
  const Context context = cut_into(1);
  const int64_t words = delta_rule_kept_words(context, problem.spec.options, problem.spec.dtype, problem.spec.K);
  const Tensor kept(DType::kI32, {1, 5, problem.spec.HV, words});
  DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  const auto call = call_of(Mode::kForward, problem, outputs);
  call["kept"] = kept.view();
  call.run(context);
  EXPECT_TRUE(support::same_bits(outputs.o, run(problem, context).o));
  DeltaRuleResults from_kept = outputs_of(Mode::kBackward, problem);
  const auto back = call_of(Mode::kBackward, problem, from_kept);
  back["kept"] = kept.view();
  back.run(context);
  expect_same_bits(from_kept, support::backward(problem, context), "kept");
}

// Five segments of one chunk between two sequences that are cut as well or, in a reduced run, are not.
const int64_t kBesideNaNs = reduced() ? 20 : 70;
DeltaRuleSpec between_others(Gate gate) {
  return with_lengths(in_small_chunks(wide(gate, 0)), {kBesideNaNs, 80, kBesideNaNs});
}

// NaNs stay in their sequence, and behind the segment that they are in.
TEST_P(Sm90Segments, NaNsStayWhereTheyAre) {
  const int64_t begin = kBesideNaNs, end = begin + 80, tokens = end + kBesideNaNs;
  DeltaRuleCase packed = draw(between_others(GetParam()), 11);
  const DeltaRuleResults clean = run(packed, cut_into(1));
  const int64_t row = packed.k.size() / tokens;
  for (int64_t i = 0; i < row; ++i) packed.k.set((begin + 32) * row + i, kNaN);
  const DeltaRuleResults results = run(packed, cut_into(1));
  EXPECT_TRUE(support::same_bits(slice(results.o, 1, 0, begin + 32), slice(clean.o, 1, 0, begin + 32)));
  EXPECT_TRUE(support::same_bits(slice(results.o, 1, end, tokens), slice(clean.o, 1, end, tokens)));
  for (double value : slice(results.o, 1, begin + 48, end).values()) ASSERT_TRUE(std::isnan(value));
  for (double value : slice(results.final_state, 0, 1, 2).values()) ASSERT_TRUE(std::isnan(value));
}

// On the way back, those of d_o stay behind, and reach what comes before the segment that they are in.
TEST_P(Sm90Segments, NaNsOfGradientsStayWhereTheyAre) {
  const int64_t begin = kBesideNaNs, end = begin + 80, tokens = end + kBesideNaNs;
  DeltaRuleCase packed = draw(between_others(GetParam()), 11);
  const DeltaRuleResults clean = support::backward(packed, cut_into(1));
  const int64_t row = packed.d_o.size() / tokens;
  for (int64_t i = 0; i < row; ++i) packed.d_o.set((begin + 40) * row + i, kNaN);
  const DeltaRuleResults results = support::backward(packed, cut_into(1));
  for (const char* name : kGradientsOfTokens) {
    const Tensor &of = *results.find(name), &expected = *clean.find(name);
    EXPECT_TRUE(support::same_bits(slice(of, 1, 0, begin), slice(expected, 1, 0, begin))) << name;
    EXPECT_TRUE(support::same_bits(slice(of, 1, begin + 48, tokens), slice(expected, 1, begin + 48, tokens))) << name;
  }
  for (double value : slice(results.dv, 1, begin, begin + 32).values()) ASSERT_TRUE(std::isnan(value));
  for (double value : slice(results.d_initial_state, 0, 1, 2).values()) ASSERT_TRUE(std::isnan(value));
}

// What nobody asks for changes no bit: the gradient of the initial state alone, in windows or not, or all but it.
TEST_P(Sm90Segments, GradientsOfFewTensors) {
  const DeltaRuleSpec spec = in_small_chunks(wide(GetParam(), 0));
  for (const std::vector<int64_t>& lengths : first<std::vector<int64_t>>({{70}, {128}, {20, 130}}, 2)) {
    const DeltaRuleCase problem = draw(with_lengths(spec, lengths), 18);
    const DeltaRuleResults all = support::backward(problem, cut_into(1));
    DeltaRuleResults state = outputs_of(Mode::kBackward, problem), tokens = outputs_of(Mode::kBackward, problem);
    const auto without_state = call_of(Mode::kBackward, problem, tokens);
    without_state["d_initial_state"] = {};
    without_state.run(cut_into(1));
    expect_gradients_of(tokens, all, 0, problem.spec.T);
    const auto state_alone = call_of(Mode::kBackward, problem, state);
    for (const char* name : kGradientsOfTokens) state_alone[name] = {};
    for (const size_t scratch_bytes : {0, 1}) {
      state_alone.run(cut_into(1, scratch_bytes));
      EXPECT_TRUE(support::same_bits(state.d_initial_state, all.d_initial_state)) << scratch_bytes;
    }
  }
}

// Tokens of no sequence: nothing is cut.
TEST_P(Sm90Segments, NoSequences) {
  DeltaRuleCase problem = draw(with_lengths(in_small_chunks(wide(GetParam(), 0)), {70}), 19);
  DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  for (Tensor* state : {&problem.initial_state, &problem.d_final_state, &outputs.final_state}) {
    *state = slice(*state, 0, 0, 0);
  }
  outputs.chunk_states = {};
  problem.cu_seqlens = offsets_of({0});
  EXPECT_FALSE(names_segments(cut_into(1), [&](const Context& context) { run_into(outputs, problem, context); }));
  EXPECT_FALSE(names_segments(cut_into(1), [&](const Context& context) { support::backward(problem, context); }));
}

// Offsets that the host cannot refuse: the call looks at the memory around its tensors.
TEST_P(Sm90Segments, MalformedOffsetsStayInside) {
  DeltaRuleCase problem = draw(with_lengths(in_small_chunks(wide(GetParam(), 0)), {70, 10, 20}), 12);
  const DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 90, 30, 100}, {-5, 1 << 30, 0, 1000}}) {
    problem.cu_seqlens = offsets_of(offsets);
    for (size_t scratch_bytes : first<size_t>({1, 0}, 1)) {
      EXPECT_NO_THROW(run_into(outputs, problem, cut_into(1, scratch_bytes)));
      EXPECT_NO_THROW(support::backward(problem, cut_into(1, scratch_bytes)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gates, Sm90Segments, ::testing::Values(Gate::kPerHead, Gate::kPerChannel),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(Sm90SegmentGates, NoneWeakAndStrong) {
  expect_as_reference(draw(in_small_chunks(wide(Gate::kNone, 70)), 13), 1);
  for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
    DeltaRuleSpec weak = in_small_chunks(wide(gate, 70)), strong = weak, hard = weak;
    weak.gate_divisor = 1000;
    strong.gate_divisor = 0.2;
    hard.hard_gate_fraction = 0.3;
    for (const DeltaRuleSpec& spec : first<DeltaRuleSpec>({strong, hard, weak}, 2)) {
      expect_as_reference(draw(spec, 14), 1);
    }
  }
}

// Lengths that a captured call never saw.
TEST(Sm90SegmentGraphs, ReplayWithOtherLengths) {
  const DeltaRuleCase problem = draw(with_lengths(in_small_chunks(wide(Gate::kPerHead, 0)), {70, 30, 100}), 15);
  for (const Mode mode : {Mode::kForward, Mode::kBackward}) {
    const DeltaRuleResults outputs = outputs_of(mode, problem);
    const CallOnDevice call(call_of(mode, problem, outputs));
    const support::DeviceStream stream;
    Context context = cut_into(1);
    context.stream = stream.get();
    const support::DeviceGraph graph(stream, [&] { call.enqueue(context); });
    for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 1, 129, 200}, {0, 130, 130, 200}}) {
      call["cu_seqlens"].set(offsets_of(offsets));
      graph.launch(stream);
      stream.wait();
      DeltaRuleCase same = problem;
      same.cu_seqlens = offsets_of(offsets);
      const DeltaRuleResults expected =
          mode == Mode::kForward ? run(same, cut_into(1)) : support::backward(same, cut_into(1));
      const auto same_bits = [&](const char* name) {
        return support::same_bits(call[name].get(), *expected.find(name));
      };
      for (const char* name : mode == Mode::kForward
                                  ? std::vector{"o", "final_state"}
                                  : std::vector{"dq", "dk", "dv", "dg", "dbeta", "d_initial_state"}) {
        EXPECT_TRUE(same_bits(name)) << name;
      }
    }
  }
}

}  // namespace
}  // namespace fastweight::test
