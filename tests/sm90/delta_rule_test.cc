// The forward of the delta rule on Hopper's instructions, by its name: against the double-precision reference, with all
// lengths of tails, states, layouts and types.
#include <thread>
#include <tuple>
#include <utility>

#include "cuda/delta_rule/chunk_sm90/beside.h"
#include "tests/sm90/delta_rule_cases.h"
#include "tests/sm90/testing.h"

namespace fastweight::test {
namespace {

using support::Call;
using support::draw;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

DeltaRuleForward arguments(const DeltaRuleCase& problem, const DeltaRuleResults& outputs) {
  DeltaRuleForward args;
  args.in = problem.inputs();
  args.options = problem.spec.options;
  args.o = outputs.o.view();
  args.final_state = outputs.final_state.view();
  args.chunk_states = outputs.chunk_states.view();
  return args;
}

// With outputs that held NaNs.
DeltaRuleResults run_into(DeltaRuleResults outputs, const DeltaRuleCase& problem,
                          const Context& context = context_for("chunk_sm90")) {
  for (const auto& [name, tensor] : outputs.named()) outputs.at(name).fill(kNaN);
  Call(delta_rule_forward, arguments(problem, outputs)).run(context);
  return outputs;
}

DeltaRuleResults run_forward(const DeltaRuleCase& problem, DType of_chunk_states = DType::kF32) {
  DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  outputs.chunk_states = outputs.chunk_states.to(of_chunk_states);
  return run_into(outputs, problem);
}

void expect_as_reference(const DeltaRuleCase& problem) {
  expect_close(problem, run_forward(problem), support::forward(problem, reference_context(), true));
}

class Sm90DeltaRule : public ::testing::TestWithParam<Gate> {};

TEST_P(Sm90DeltaRule, Lengths) {
  for (const DeltaRuleCase& problem : cases_of_lengths(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRule, ChunksOfFewerTokens) {
  for (const DeltaRuleCase& problem : cases_of_small_chunks(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRule, Fp16) {
  for (const DeltaRuleCase& problem : cases_in_fp16(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRule, Widths) {
  for (const DeltaRuleCase& problem : cases_of_widths(GetParam())) expect_as_reference(problem);
}

TEST_P(Sm90DeltaRule, NoInitialStateAndStatesInTheOtherOrder) {
  for (const Widths& widths : kWidthsOfKernels) {
    expect_as_reference(case_without_initial_state_in_the_other_order(GetParam(), widths));
  }
}

TEST_P(Sm90DeltaRule, SequencesOfAllLengths) {
  for (const Widths& widths : kWidthsOfKernels) expect_as_reference(case_of_sequences(GetParam(), widths));
}

INSTANTIATE_TEST_SUITE_P(Gates, Sm90DeltaRule, ::testing::Values(Gate::kNone, Gate::kPerHead, Gate::kPerChannel),
                         [](const auto& info) { return std::string(name_of(info.param)); });

class Sm90Decays : public ::testing::TestWithParam<std::tuple<Gate, Widths>> {
 protected:
  static DeltaRuleSpec spec_of_length(int64_t T) { return sized(std::get<0>(GetParam()), T, std::get<1>(GetParam())); }
};

TEST_P(Sm90Decays, GroupsNormsAndRawGates) {
  DeltaRuleSpec spec = with_batch(with_heads(spec_of_length(70), 2, 2), 2);
  spec.options.qk_l2norm = spec.options.gate_in_kernel = spec.options.beta_sigmoid = true;
  expect_as_reference(draw(spec, 7));
}

// More chunks than a device of a few multiprocessors makes the factors of at once: of several heads, and of several rows.
TEST(Sm90DeltaRuleForward, SeveralTurnsOfTheFactors) {
  DeltaRuleSpec spec = with_heads(wide(Gate::kPerHead, 64 * 17 + 1), 3, 1);
  spec.options.qk_l2norm = spec.options.gate_in_kernel = spec.options.beta_sigmoid = true;
  expect_as_reference(draw(spec, 21));
  expect_as_reference(draw(with_batch(wide(Gate::kNone, 64 * 17), 3), 22));
}

// A sequence alone, and the same between others whose tokens are NaNs: the same bits.
TEST_P(Sm90Decays, NothingOfTheNextSequence) {
  const std::vector<int64_t> lengths{40, 70, 30};
  DeltaRuleCase packed = draw(with_lengths(spec_of_length(0), lengths), 8);
  const DeltaRuleResults whole = run_forward(packed);
  for (Tensor* x : {&packed.q, &packed.k, &packed.v, &packed.g, &packed.beta}) {
    const int64_t row = x->size() / packed.spec.T;
    for (int64_t t = 0; t < packed.spec.T; ++t) {
      if (t >= 40 && t < 110) continue;
      for (int64_t i = 0; i < row; ++i) x->set(t * row + i, kNaN);
    }
  }
  const DeltaRuleResults beside = run_forward(packed);
  EXPECT_TRUE(support::same_bits(slice(beside.o, 1, 40, 110), slice(whole.o, 1, 40, 110)));
  EXPECT_TRUE(support::same_bits(slice(beside.final_state, 0, 1, 2), slice(whole.final_state, 0, 1, 2)));
  for (double value : slice(beside.o, 1, 40, 110).values()) ASSERT_FALSE(std::isnan(value));
}

// Kept in the type of k they are those of fp32, rounded, in either order of K and V.
TEST_P(Sm90Decays, ChunkStatesInTheTypeOfK) {
  const int64_t many = heads_of_wide_blocks();
  for (const auto& [v_first, heads] : {std::pair<bool, int64_t>{true, 2}, {true, many}, {false, 2}}) {
    DeltaRuleSpec spec = with_heads(spec_of_length(200), heads, 1);
    spec.K -= 8;
    spec.V -= 24;
    spec.options.state_v_first = v_first;
    const DeltaRuleCase problem = draw(spec, 12);
    const DeltaRuleResults expected = run_forward(problem), results = run_forward(problem, DType::kBF16);
    EXPECT_TRUE(support::same_bits(results.chunk_states, expected.chunk_states.to(DType::kBF16))) << v_first << heads;
    EXPECT_TRUE(support::same_bits(results.o, expected.o)) << v_first << heads;
  }
}

// Whether states are kept, and in which type, changes no bit of the outputs. Of blocks of 128 columns some leave by TMA.
TEST(Sm90DeltaRuleForward, KeptStatesDoNotShow) {
  for (Gate gate : {Gate::kNone, Gate::kPerHead, Gate::kPerChannel}) {
    DeltaRuleSpec spec = with_heads(wide(gate, 200), heads_of_wide_blocks(), 1);
    const DeltaRuleCase problem = draw(spec, 25);
    std::string line;
    Context context = context_for("chunk_sm90");
    context.verbose = true;
    context.log_user = &line;
    context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) = text; };
    DeltaRuleResults none = outputs_of(Mode::kForward, problem);
    none.chunk_states = {};
    none = run_into(none, problem, context);
    EXPECT_NE(line.find("columns 128"), std::string::npos) << line;
    for (DType type : {DType::kBF16, DType::kF32}) {
      DeltaRuleResults with_states = run_forward(problem, type);
      with_states.chunk_states = {};
      expect_same_bits(with_states, none, std::string(name_of(gate)) + " with states in " + name_of(type));
    }
  }
}

// A gate that is not a number makes all outputs of its head from its token on NaNs, and the final state. It reaches no
// earlier chunk, no other head and no other sequence.
TEST(Sm90DeltaRuleForward, NaNGates) {
  for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
    for (const DeltaRuleSpec& spec : specs_of_decays(gate)) {
      const NaNGate x = nan_gate(spec);
      const DeltaRuleResults clean = run_forward(x.without), results = run_forward(x.with);
      const std::string what = describe(x.with.spec);
      const auto expect_same = [&](const char* name, int64_t begin, int64_t end, int64_t head) {
        EXPECT_TRUE(support::same_bits(part_of(*results.find(name), begin, end, head),
                                       part_of(*clean.find(name), begin, end, head)))
            << name << " " << begin << " " << head << " " << what;
      };
      expect_same("o", 0, x.chunk_begin, x.head);
      expect_same("o", x.end, x.with.spec.T, x.head);
      expect_same("o", 0, x.with.spec.T, 1 - x.head);
      EXPECT_TRUE(all_nan(part_of(results.o, x.token, x.end, x.head))) << what;
      expect_same("chunk_states", 0, x.chunks, x.head);
      expect_same("chunk_states", x.chunks + 1, x.chunks + 2, x.head);
      expect_same("chunk_states", 0, x.chunks + 2, 1 - x.head);
      EXPECT_TRUE(all_nan(part_of(results.chunk_states, x.chunks, x.chunks + 1, x.head))) << what;
      for (int64_t n = 0; n < 3; ++n) {
        for (int64_t head = 0; head < 2; ++head) {
          const auto state = [&](const Tensor& states) { return slice(slice(states, 0, n, n + 1), 1, head, head + 1); };
          if (n == 1 && head == x.head) {
            EXPECT_TRUE(all_nan(state(results.final_state))) << what;
          } else {
            EXPECT_TRUE(support::same_bits(state(results.final_state), state(clean.final_state))) << n << head << what;
          }
        }
      }
    }
  }
}

// Offsets that the host cannot refuse: the call looks at the memory around its tensors.
TEST_P(Sm90Decays, MalformedOffsetsStayInside) {
  DeltaRuleCase problem = draw(with_lengths(spec_of_length(0), {30, 20, 19}), 13);
  const DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  for (const std::vector<int64_t>& offsets : kMalformedOffsets) {
    problem.cu_seqlens = offsets_of(offsets);
    EXPECT_NO_THROW(run_into(outputs, problem));
  }
}

// A captured call serves other lengths: the tensor maps know none.
TEST_P(Sm90Decays, GraphReplaysWithOtherLengths) {
  const DeltaRuleCase problem = draw(with_lengths(spec_of_length(0), {100, 60, 40}), 14);
  const DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  const CallOnDevice call(Call(delta_rule_forward, arguments(problem, outputs)));
  const support::DeviceStream stream;
  Context context = context_for("chunk_sm90");
  context.stream = stream.get();
  const support::DeviceGraph graph(stream, [&] { call.enqueue(context); });
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 1, 129, 200}, {0, 100, 100, 150}}) {
    call["cu_seqlens"].set(offsets_of(offsets));
    call.poison_outputs();
    graph.launch(stream);
    stream.wait();
    DeltaRuleCase same = problem;
    same.cu_seqlens = offsets_of(offsets);
    const DeltaRuleResults direct = run_into(outputs, same);
    EXPECT_TRUE(support::same_bits(call["o"].get(), direct.o));
    EXPECT_TRUE(support::same_bits(call["final_state"].get(), direct.final_state));
    for (double value : slice(call["o"].get(), 1, offsets.back(), 200).values()) ASSERT_TRUE(std::isnan(value));
  }
}

// A sequence that is cut between two chunks, the state handed over: the same bits.
TEST_P(Sm90Decays, CutsBetweenChunksDoNotShow) {
  const DeltaRuleCase problem = draw(spec_of_length(230), 15);
  const DeltaRuleResults whole = run_forward(problem), head = run_forward(slice_tokens(problem, 0, 128));
  DeltaRuleCase rest = slice_tokens(problem, 128, 230);
  rest.initial_state = head.final_state;
  const DeltaRuleResults tail = run_forward(rest);
  EXPECT_TRUE(support::same_bits(head.o, slice(whole.o, 1, 0, 128)));
  EXPECT_TRUE(support::same_bits(tail.o, slice(whole.o, 1, 128, 230)));
  EXPECT_TRUE(support::same_bits(tail.final_state, whole.final_state));
}

// With little scratch memory the chunks come in windows, and states go from one to the next: the same bits.
TEST_P(Sm90Decays, WindowsDoNotShow) {
  DeltaRuleSpec spec = with_heads(spec_of_length(150), 2, 1);
  spec.options.chunk_size = 16;
  Context context = context_for("chunk_sm90");
  context.scratch_bytes = 1;
  for (const DeltaRuleSpec& one : {with_batch(spec, 2), with_lengths(spec, {70, 0, 5, 90})}) {
    const DeltaRuleCase problem = draw(one, 16);
    expect_same_bits(run_into(outputs_of(Mode::kForward, problem), problem, context), run_forward(problem), "windows");
  }
}

TEST_P(Sm90Decays, TwoRunsHaveTheSameBits) {
  const DeltaRuleCase problem = draw(with_heads(spec_of_length(200), 3, 1), 9);
  expect_same_bits(run_forward(problem), run_forward(problem), "two runs");
}

// Many heads have blocks of 128 columns, one alone has two of 64: the same bits.
TEST_P(Sm90Decays, ColumnsOfABlockChangeNoBit) {
  const int64_t heads = heads_of_wide_blocks();
  const DeltaRuleCase all = draw(with_heads(spec_of_length(100), heads, 1), 11);
  DeltaRuleCase one = all;
  one.spec.H = one.spec.HV = 1;
  for (Tensor* x : {&one.q, &one.k, &one.v, &one.g, &one.beta}) *x = slice(*x, 2, 1, 2);
  one.initial_state = slice(one.initial_state, 1, 1, 2);
  const DeltaRuleResults of_all = run_forward(all), of_one = run_forward(one);
  EXPECT_TRUE(support::same_bits(of_one.o, slice(of_all.o, 2, 1, 2)));
  EXPECT_TRUE(support::same_bits(of_one.final_state, slice(of_all.final_state, 1, 1, 2)));
  EXPECT_TRUE(support::same_bits(of_one.chunk_states, slice(of_all.chunk_states, 2, 1, 2)));
}

// Factors that the forward kept, all or those of pairs of tokens, of few heads or many, are those that the backward would make
// again.
Tensor keep_factors(const DeltaRuleCase& problem, bool all, const Context& context) {
  const DeltaRuleSpec& spec = problem.spec;
  const int64_t words = delta_rule_kept_words(context, spec.options, spec.dtype, spec.K, all);
  Tensor kept(DType::kI32, {1, delta_rule_num_chunks(spec.T, {}, spec.options.chunk_size), spec.HV, words});
  DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  const Call forward = call_of(Mode::kForward, problem, outputs);
  forward["kept"] = kept.view();
  forward.run(context);
  EXPECT_TRUE(support::same_bits(outputs.o, run_forward(problem).o));
  return kept;
}
void expect_gradients_from(const DeltaRuleCase& problem, const Tensor& kept, const Context& context,
                           const Tensor& states = {}) {
  DeltaRuleResults from_kept = outputs_of(Mode::kBackward, problem);
  const Call backward = call_of(Mode::kBackward, problem, from_kept);
  backward["kept"] = kept.view();
  if (states.size() > 0) backward["chunk_states"] = states.view();
  backward.run(context);
  const DeltaRuleResults again = support::backward(problem, context, states);
  expect_same_bits(from_kept, again, context.implementation);
  expect_close(problem, again, support::backward(problem, reference_context()));
}

TEST_P(Sm90Decays, GradientsFromKeptFactors) {
  const bool many = std::get<0>(GetParam()) == Gate::kPerHead;
  DeltaRuleSpec spec = with_heads(spec_of_length(70), 1, many ? heads_of_wide_blocks() : 2);
  spec.options.qk_l2norm = true;
  const DeltaRuleCase problem = draw(spec, 20);
  expect_gradients_from(problem, keep_factors(problem, true, context_for("chunk_sm90")), context_for("chunk_16bit"));
}

// In windows or in one, by either backward, with the states before the chunks or without.
TEST(Sm90Channels, GradientsFromKeptPairs) {
  const auto with = [](const char* name, size_t scratch_bytes) {
    Context context = context_for(name);
    context.scratch_bytes = scratch_bytes;
    return context;
  };
  for (const auto& [type, widths] :
       {std::pair{DType::kBF16, Widths{128, 128}}, {DType::kF16, {64, 64}}, {DType::kBF16, {192, 72}}}) {
    DeltaRuleSpec spec = with_heads(sized(Gate::kPerChannel, reduced() ? 280 : 600, widths, type), 1, 2);
    spec.options.qk_l2norm = true;
    if (type == DType::kBF16) spec.gate_divisor = 0.2;  // strong ones among them
    const DeltaRuleCase problem = draw(spec, 20);
    const Tensor states = run_forward(problem).chunk_states;
    const Tensor kept = keep_factors(problem, false, with("chunk_sm90", 1));
    EXPECT_TRUE(support::same_bits(keep_factors(problem, false, with("chunk_sm90", 0)), kept));
    expect_gradients_from(problem, kept, with("chunk_sm90", 1), states);
    expect_gradients_from(problem, kept, with("chunk_16bit", 0), states);
    expect_gradients_from(problem, kept, with("chunk_sm90", 0));
  }
}

std::string name_of_variant(const ::testing::TestParamInfo<std::tuple<Gate, Widths>>& info) {
  return std::string(name_of(std::get<0>(info.param))) + name_of_widths(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(GatesAndWidths, Sm90Decays,
                         ::testing::Combine(::testing::Values(Gate::kPerHead, Gate::kPerChannel),
                                            ::testing::ValuesIn(kWidthsOfKernels)),
                         name_of_variant);
// Channels that two warpgroups share.
INSTANTIATE_TEST_SUITE_P(KeysAbove128, Sm90Decays,
                         ::testing::Combine(::testing::Values(Gate::kPerHead, Gate::kPerChannel),
                                            ::testing::Values(Widths{192, 136})),
                         name_of_variant);

TEST(Sm90DeltaRuleForward, KeysAbove128) {
  for (Gate gate : {Gate::kPerHead, Gate::kNone, Gate::kPerChannel}) {
    for (const Widths& widths : first<Widths>({{256, 64}, {136, 200}, {256, 256}, {192, 8}}, 2)) {
      expect_as_reference(draw(with_batch(sized(gate, 130, widths), 2), 23));
      expect_as_reference(case_without_initial_state_in_the_other_order(gate, widths));
    }
    expect_as_reference(case_of_sequences(gate, {256, 64}));
    expect_as_reference(draw(sized(gate, 66, {200, 72}, DType::kF16), 24));
  }
}

// Gates per channel: given or raw, with a bound or without, in the type of k, which TMA brings, or in fp32; mild and strong.
TEST(Sm90Channels, Gates) {
  for (const auto& [type, widths] : {std::pair{DType::kBF16, Widths{128, 128}},
                                     {DType::kF32, {128, 128}},
                                     {DType::kBF16, {64, 64}},
                                     {DType::kF32, {40, 64}}}) {
    DeltaRuleSpec given = with_heads(sized(Gate::kPerChannel, 100, widths), 1, 2);
    given.gate_dtype = type;
    DeltaRuleSpec mild = given, mixed = given, hard = given, raw = given;
    mild.gate_divisor = 8;
    mixed.gate_divisor = 0.2;
    hard.hard_gate_fraction = 0.3;
    raw.options.gate_in_kernel = raw.options.qk_l2norm = true;
    DeltaRuleSpec bounded = raw;
    bounded.options.lower_bound = -5;
    bounded.options.safe_gate = true;
    for (const DeltaRuleSpec& spec : {given, mild, mixed, hard, raw, bounded}) expect_as_reference(draw(spec, 17));
  }
}

TEST(Sm90Channels, GatesInFp16) {
  for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
    for (double divisor : {0.2, 1.0, 100.0}) {
      DeltaRuleSpec spec = sized(Gate::kPerChannel, 100, widths, DType::kF16);
      spec.gate_dtype = DType::kF16;
      spec.gate_divisor = divisor;
      expect_as_reference(draw(spec, 18));
    }
  }
}

// Tiles of 16 tokens, tokens and channels that forget everything, among others that forget next to nothing.
TEST(Sm90Channels, GatesThatForgetAmongMildOnes) {
  for (DType type : {DType::kBF16, DType::kF32}) expect_as_reference(case_that_forgets(Gate::kPerChannel, type));
}

// What the gates' copy brings with it changes no bit: the same gates in fp32.
TEST(Sm90Channels, TypeOfTheGatesChangesNoBit) {
  for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
    DeltaRuleSpec spec = sized(Gate::kPerChannel, 100, widths);
    spec.gate_dtype = DType::kBF16;
    const DeltaRuleCase problem = draw(spec, 19);
    DeltaRuleCase same = problem;
    same.g = problem.g.to(DType::kF32);
    expect_same_bits(run_forward(same), run_forward(problem), "gates in fp32");
  }
}

// Factors beside the scan --------------------------------------------------------------------------------------------

// Of chunks of 16 tokens more than all blocks begin with, and never in segments.
DeltaRuleSpec beside_spec(Gate gate, const Widths& widths, int64_t heads, int64_t group, int64_t chunks) {
  DeltaRuleSpec spec = with_heads(sized(gate, 16 * chunks - 5, widths), heads, group);
  spec.options.chunk_size = 16;
  return spec;
}
Context uncut() {
  Context context = context_for("chunk_sm90");
  context.segment_chunks = -1;
  return context;
}
DeltaRuleResults run_uncut(const DeltaRuleCase& problem, const Context& context = uncut()) {
  return run_into(outputs_of(Mode::kForward, problem), problem, context);
}

// One sequence leaves most of the device to the factors of its later chunks. With an empty one beside it nothing is: several
// sequences in a row go at different paces.
TEST(Sm90Beside, ChangesNoBit) {
  // Value heads of one key head, with which blocks have 64 columns or 128.
  const auto of_heads = [](int64_t group, int64_t chunks) {
    return beside_spec(Gate::kPerHead, {128, 128}, 1, group, emulated() ? chunks : 1900);
  };
  // On a device the scan needs fewer multiprocessors than half, and waits for them.
  const auto of_channels = [](const Widths& widths, int64_t group, int64_t chunks, DType dtype = DType::kBF16) {
    DeltaRuleSpec spec = beside_spec(Gate::kPerChannel, widths, emulated() ? 1 : 32, group, emulated() ? chunks : 100);
    spec.dtype = dtype;
    return spec;
  };
  for (const DeltaRuleSpec& spec : std::vector<DeltaRuleSpec>{
           of_heads(1, 17), of_channels({128, 128}, 1, 25), of_channels({64, 64}, 1, 20), of_heads(2, 25),
           of_channels({128, 128}, 1, 17), of_channels({128, 128}, 2, 11), of_channels({128, 128}, 1, 26, DType::kF16),
           of_channels({64, 56}, 1, 21, DType::kF16)}) {
    DeltaRuleCase alone = draw(spec, 20), apart = draw(with_lengths(spec, {spec.T, 0}), 20);
    for (Tensor DeltaRuleCase::*tensor :
         {&DeltaRuleCase::q, &DeltaRuleCase::k, &DeltaRuleCase::v, &DeltaRuleCase::g, &DeltaRuleCase::beta}) {
      apart.*tensor = alone.*tensor;
    }
    alone.initial_state.fill(0);
    apart.initial_state.fill(0);
    DeltaRuleResults one, other;
    one.o = run_uncut(alone).o;
    other.o = run_uncut(apart).o;
    expect_same_bits(one, other, describe(spec));
  }
}

// With decays per channel, from an initial state: rows, heads and groups, raw gates and norms, mild decays and strong ones, and
// states before the chunks in both types.
TEST(Sm90Beside, ChannelsAsReference) {
  const int64_t heads = emulated() ? 1 : 16, chunks = emulated() ? 13 : 200;
  DeltaRuleSpec mixed = with_batch(beside_spec(Gate::kPerChannel, {128, 64}, heads, 1, chunks), 2),
                raw = beside_spec(Gate::kPerChannel, {128, 64}, 3 * heads, 1, chunks),
                grouped = beside_spec(Gate::kPerChannel, {72, 40}, heads, 2, chunks);
  mixed.gate_divisor = 0.2;
  mixed.gate_dtype = DType::kBF16;
  raw.options.qk_l2norm = raw.options.gate_in_kernel = raw.options.beta_sigmoid = true;
  for (const DeltaRuleSpec& spec : {mixed, raw, grouped}) {
    const DeltaRuleCase problem = draw(spec, 24);
    const DeltaRuleResults results = run_uncut(problem);
    expect_close(problem, results, support::forward(problem, reference_context(), true));
    DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
    outputs.chunk_states = outputs.chunk_states.to(DType::kBF16);
    const DeltaRuleResults rounded = run_into(outputs, problem, uncut());
    EXPECT_TRUE(support::same_bits(rounded.o, results.o));
    EXPECT_TRUE(support::same_bits(rounded.chunk_states, results.chunk_states.to(DType::kBF16)));
  }
}

// Every window has flags of its own pairs. A chunk of a head takes about 60 KB of scratch memory.
TEST(Sm90Beside, WindowsDoNotShow) {
  const int64_t heads = emulated() ? 1 : 32, width = emulated() ? 18 : 40;
  const DeltaRuleCase problem = draw(beside_spec(Gate::kPerChannel, {128, 128}, heads, 1, 2 * width + 1), 25);
  Context context = uncut();
  context.scratch_bytes = static_cast<size_t>(heads * width) * 60 << 10;
  expect_same_bits(run_uncut(problem, context), run_uncut(problem), "windows");
}

// One sequence of a captured call has other lengths at every replay, or offsets that nobody can refuse.
TEST(Sm90Beside, GraphReplaysWithOtherLengths) {
  for (const Gate gate : {Gate::kPerChannel, Gate::kPerHead}) {
    const int64_t heads = emulated() ? 1 : 32;
    DeltaRuleSpec spec = beside_spec(gate, {128, 128}, heads, 1, emulated() ? 25 : 100);
    const DeltaRuleCase problem = draw(with_lengths(spec, {spec.T}), 26);
    const DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
    const CallOnDevice call(Call(delta_rule_forward, arguments(problem, outputs)));
    const support::DeviceStream stream;
    Context context = uncut();
    context.stream = stream.get();
    const support::DeviceGraph graph(stream, [&] { call.enqueue(context); });
    const auto replay = [&](const std::vector<int64_t>& offsets) {
      call["cu_seqlens"].set(offsets_of(offsets));
      call.poison_outputs();
      graph.launch(stream);
      stream.wait();
    };
    for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, spec.T}, {0, 70}, {0, spec.T - 20}}) {
      replay(offsets);
      DeltaRuleCase same = problem;
      same.cu_seqlens = offsets_of(offsets);
      EXPECT_TRUE(support::same_bits(call["o"].get(), run_into(outputs, same, uncut()).o)) << offsets[1];
    }
    for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{50, 20}, {-7, 3 * spec.T}}) {
      EXPECT_NO_THROW(replay(offsets));
    }
  }
}

// How the factors are divided between all multiprocessors and those that the scan leaves idle.
TEST(Sm90Beside, Plan) {
  using namespace cuda::chunk_sm90;
  const BesideProblem problem{.pairs = 12800,
                              .at_place = 100,
                              .pair_cycles = 2000,
                              .beside_cycles = 2500,
                              .chunk_cycles = 4000,
                              .scan_blocks = 100,
                              .at_once = 6};
  const BesidePlan plan = plan_beside(problem, 132);
  EXPECT_EQ(plan.beside, 32);
  EXPECT_EQ(plan.before, 6336);  // eight rounds of 132 x 6: beside are 128 x 4000 x 32 / 2500 pairs at most
  BesideProblem other = problem;
  other.scan_blocks = 128;  // too few are idle
  EXPECT_EQ(plan_beside(other, 132).beside, 0);
  EXPECT_EQ(plan_beside(other, 132).before, 12800);
  other = problem;
  other.pairs = 700;  // all blocks begin with more
  EXPECT_EQ(plan_beside(other, 132).beside, 0);
  other = problem;
  other.pairs = other.at_place = other.scan_blocks = 0;  // nothing to do
  EXPECT_EQ(plan_beside(other, 132).beside, 0);
  other = problem;
  other.scan_blocks = 10;  // the others are fast enough
  EXPECT_EQ(plan_beside(other, 132).beside, 122);
  EXPECT_EQ(plan_beside(other, 132).before, 0);
}

TEST(Sm90DeltaRuleForward, NoBatchAndNoTokens) {
  for (auto [B, T] : {std::pair<int64_t, int64_t>{0, 70}, {0, 0}, {2, 0}}) {
    DeltaRuleSpec spec = with_heads(wide(Gate::kPerHead, T), 2, 2);
    spec.B = B;
    expect_as_reference(draw(spec, 22));
  }
}

// A thread whose first call finds all memory it needs: nothing before the tensor maps has asked for the device's context.
TEST(Sm90DeltaRuleForward, FirstCallOfAThread) {
  const DeltaRuleCase problem = draw(wide(Gate::kPerHead, 100), 21);
  DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  outputs.chunk_states = {};
  const CallOnDevice call{Call(delta_rule_forward, arguments(problem, outputs))};
  CountingSource measure;
  Context context = context_for("chunk_sm90");
  context.workspace = measure.source();
  call.enqueue(context);
  const support::DeviceBuffer memory(measure.most);
  context.workspace = {[](void* user, size_t) -> void* { return static_cast<support::DeviceBuffer*>(user)->data(); },
                       [](void*, void*, size_t) {}, const_cast<support::DeviceBuffer*>(&memory)};
  context.trust_pointers = true;
  std::string error;
  std::thread([&] {
    try {
      call.enqueue(context);
    } catch (const Error& problem_of_thread) {
      error = problem_of_thread.what();
    }
  }).join();
  EXPECT_EQ(error, "");
}

TEST(Sm90DeltaRuleForward, WhatItDeclines) {
  const auto expect = [](const DeltaRuleSpec& spec, const std::string& reason) {
    expect_refused(ErrorCode::kUnsupported, reason, [&] { run_forward(draw(spec, 10)); });
  };
  expect(wide(Gate::kPerHead, 70, DType::kF32), "16-bit type");
  for (const Widths& widths : {Widths{1, 8}, {33, 64}, {64, 63}, {100, 128}, {128, 65}, {64, 129}}) {
    expect(sized(Gate::kPerHead, 70, widths), "multiples of 16 bytes");
  }
}

}  // namespace
}  // namespace fastweight::test
