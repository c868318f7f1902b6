// What is special about the delta-rule family on a CUDA device: graphs, streams, contents that the host cannot check,
// many sequences; of the backward, see delta_rule_backward_test.cc. The cases of tests/delta_rule run on the device as well, see tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "fastweight/info.h"
#include "tests/cuda/testing.h"
#include "tests/delta_rule/grid.h"

namespace fastweight::test {
namespace {

using support::DeviceCopy;
using support::DeviceGraph;
using support::DeviceStream;
using support::draw;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A forward with all its tensors on the device, the chunk states up to the bound.
struct ForwardOnDevice {
  explicit ForwardOnDevice(const DeltaRuleCase& problem) : spec(problem.spec) {
    DeltaRuleInputs& in = args.in;
    const DeltaRuleInputs host = problem.inputs();
    for (auto member : {&DeltaRuleInputs::q, &DeltaRuleInputs::k, &DeltaRuleInputs::v, &DeltaRuleInputs::g,
                        &DeltaRuleInputs::beta, &DeltaRuleInputs::initial_state}) {
      if ((host.*member).present()) in.*member = copy(host.*member);
    }
    offsets = std::make_unique<DeviceCopy>(problem.cu_seqlens, kCuda);
    in.cu_seqlens = offsets->view();
    args.options = spec.options;
    const int64_t sequences = static_cast<int64_t>(spec.cu_seqlens.size()) - 1;
    const int64_t chunks = delta_rule_num_chunks(spec.T, in.cu_seqlens, spec.options.chunk_size);
    o = std::make_unique<DeviceCopy>(Tensor(spec.dtype, problem.v.shape()), kCuda);
    final_state = std::make_unique<DeviceCopy>(Tensor(DType::kF32, {sequences, spec.HV, spec.K, spec.V}), kCuda);
    chunk_states = std::make_unique<DeviceCopy>(Tensor(DType::kF32, {1, chunks, spec.HV, spec.K, spec.V}), kCuda);
    args.o = o->view();
    args.final_state = final_state->view();
    args.chunk_states = chunk_states->view();
  }

  TensorView copy(const TensorView& host) {
    return copies.emplace_back(std::make_unique<DeviceCopy>(host, kCuda))->view();
  }

  void poison() {
    for (DeviceCopy* x : {o.get(), final_state.get(), chunk_states.get()}) test::poison(*x);
  }

  DeltaRuleResults results(int64_t tokens, int64_t chunks) const {
    DeltaRuleResults all;
    all.o = slice(o->get(), 1, 0, tokens);
    all.final_state = final_state->get();
    all.chunk_states = slice(chunk_states->get(), 1, 0, chunks);
    return all;
  }

  DeltaRuleSpec spec;
  DeltaRuleForward args;
  std::vector<std::unique_ptr<DeviceCopy>> copies;
  std::unique_ptr<DeviceCopy> offsets, o, final_state, chunk_states;
};

class CudaDeltaRule : public ::testing::TestWithParam<Gate> {
 protected:
  static DeltaRuleSpec spec(int64_t T, int64_t K, int64_t V, DType dtype = DType::kBF16) {
    DeltaRuleSpec one = spec_of(GetParam(), T, K, V);
    one.dtype = dtype;
    return one;
  }

  // The types that choose between the implementations of a form.
  static constexpr DType kTypes[] = {DType::kBF16, DType::kF32};

  // Those of the forward that take tensors of the type and of any width; chunk_sm90 has tests of its own.
  static std::vector<std::string> forwards(DType dtype) {
    std::vector<std::string> names = implementations(Mode::kForward);
    std::erase(names, "chunk_sm90");
    if (dtype == DType::kF32) std::erase(names, "chunk_16bit");
    return names;
  }
};

// One capture serves any lengths that fit: the same bits as a call of its own, and nothing else written.
TEST_P(CudaDeltaRule, GraphReplaysWithOtherLengths) {
  constexpr int64_t kTokens = 300;
  for (DType dtype : kTypes) {
    DeltaRuleSpec one = with_lengths(with_heads(spec(0, 64, 32, dtype), emulated() ? 1 : 2, 2), {100, 100, 50, 50});
    const DeltaRuleCase problem = draw(one, 1);
    for (const std::string& name : forwards(dtype)) {
      ForwardOnDevice call(problem);
      const DeviceStream stream;
      Context context = context_for(name);
      context.stream = stream.get();
      const DeviceGraph graph(stream, [&] { EXPECT_EQ(delta_rule_forward(context, call.args), name); });
      for (const std::vector<int64_t>& offsets : first<std::vector<int64_t>>({{0, 0, 1, 299, 300},
                                                                              {0, 64, 64, 64, 65},
                                                                              {0, 0, 0, 0, 0},
                                                                              {0, 100, 200, 250, 300},
                                                                              {0, 3, 67, 131, 200}},
                                                                             3)) {
        const int64_t tokens = offsets.back();
        call.offsets->set(offsets_of(offsets));
        call.poison();
        graph.launch(stream);
        stream.wait();
        const int64_t chunks =
            delta_rule_num_chunks(tokens, offsets_of(offsets).view(), static_cast<int32_t>(one.options.chunk_size));
        const DeltaRuleResults replayed = call.results(tokens, chunks);
        for (int64_t i = tokens; i < kTokens; ++i) {
          for (double value : slice(call.o->get(), 1, i, i + 1).values()) ASSERT_TRUE(std::isnan(value)) << name;
        }

        DeltaRuleCase same = slice_tokens(problem, 0, tokens);
        same.spec.cu_seqlens = offsets;
        same.cu_seqlens = offsets_of(offsets);
        DeltaRuleResults expected = support::forward(same, context_for(name), true);
        expect_same_bits(replayed, expected, name + " with " + std::to_string(tokens) + " tokens");
      }
    }
  }
}

// Each replay of a captured step advances the states once more.
TEST_P(CudaDeltaRule, StepInAGraph) {
  constexpr int kReplays = 5;
  DeltaRuleSpec one = with_heads(spec(1, 128, 128), 2, 2);
  one.B = 3;
  const DeltaRuleCase problem = draw(one, 2);
  for (const std::string& name : implementations(Mode::kStep)) {
    DeltaRuleCase eager = problem;
    DeltaRuleResults expected;
    for (int i = 0; i < kReplays; ++i) {
      expected = support::step(eager, context_for(name));
      eager.initial_state = expected.final_state;
    }

    const DeviceCopy q(problem.q, kCuda), k(problem.k, kCuda), v(problem.v, kCuda), beta(problem.beta, kCuda);
    const DeviceCopy g(problem.g, kCuda), state(problem.initial_state, kCuda), o(expected.o, kCuda);
    DeltaRuleStep args;
    args.options = one.options;
    args.in.q = q.view();
    args.in.k = k.view();
    args.in.v = v.view();
    args.in.g = g.view();
    args.in.beta = beta.view();
    args.state = state.view();
    args.o = o.view();
    const DeviceStream stream;
    Context context = context_for(name);
    context.stream = stream.get();
    const DeviceGraph graph(stream, [&] { delta_rule_step(context, args); });
    for (int i = 0; i < kReplays; ++i) graph.launch(stream);
    stream.wait();
    EXPECT_TRUE(support::same_bits(state.get(), expected.final_state)) << name;
    EXPECT_TRUE(support::same_bits(o.get(), expected.o)) << name;
  }
}

// Steps that follow each other in one graph may overlap, but each sees what the one before it wrote: its state, and its
// output as values.
TEST_P(CudaDeltaRule, StepsThatNeedEachOther) {
  constexpr int kSteps = 6, kReplays = 3;
  DeltaRuleSpec one = with_heads(spec(1, 128, 128), 2, 4);
  one.B = 2;
  one.options.qk_l2norm = true;
  const DeltaRuleCase problem = draw(one, 9);
  const Context context = context_for("recurrent");
  DeltaRuleCase eager = problem;
  for (int i = 0; i < kReplays * kSteps; ++i) {
    const DeltaRuleResults results = support::step(eager, context);
    eager.initial_state = results.final_state;
    eager.v = results.o;
  }

  const DeviceCopy q(problem.q, kCuda), k(problem.k, kCuda), beta(problem.beta, kCuda), g(problem.g, kCuda);
  const DeviceCopy state(problem.initial_state, kCuda), even(problem.v, kCuda), odd(problem.v, kCuda);
  DeltaRuleStep args;
  args.options = one.options;
  args.in.q = q.view();
  args.in.k = k.view();
  args.in.g = g.view();
  args.in.beta = beta.view();
  args.state = state.view();
  const DeviceStream stream;
  Context on_stream = context;
  on_stream.stream = stream.get();
  const DeviceGraph graph(stream, [&] {
    for (int i = 0; i < kSteps; ++i) {
      args.in.v = (i % 2 == 0 ? even : odd).view();
      args.o = (i % 2 == 0 ? odd : even).view();
      delta_rule_step(on_stream, args);
    }
  });
  for (int i = 0; i < kReplays; ++i) graph.launch(stream);
  stream.wait();
  EXPECT_TRUE(support::same_bits(state.get(), eager.initial_state));
  EXPECT_TRUE(support::same_bits(even.get(), eager.v));
}

// All tokens at once, or a prefill and then a step per token: the same bits.
TEST_P(CudaDeltaRule, SameBitsByStepsAfterAPrefill) {
  constexpr int64_t kPrefill = 33;
  for (bool v_first : {false, true}) {
    DeltaRuleSpec one = with_heads(spec(40, 128, 64), 1, 2);
    one.B = 2;
    one.options.qk_l2norm = one.options.beta_sigmoid = true;
    one.options.gate_in_kernel = GetParam() != Gate::kNone;
    one.options.state_v_first = v_first;
    const DeltaRuleCase problem = draw(one, 3);
    const Context context = context_for("recurrent");
    const DeltaRuleResults whole = support::forward(problem, context);
    Tensor state = support::forward(slice_tokens(problem, 0, kPrefill), context).final_state;
    for (int64_t t = kPrefill; t < one.T; ++t) {
      DeltaRuleCase token = slice_tokens(problem, t, t + 1);
      token.initial_state = state;
      const DeltaRuleResults results = support::step(token, context);
      state = results.final_state;
      EXPECT_TRUE(support::same_bits(results.o, slice(whole.o, 1, t, t + 1))) << "token " << t;
    }
    EXPECT_TRUE(support::same_bits(state, whole.final_state));
  }
}

// States in either order give the same bits.
TEST_P(CudaDeltaRule, SameBitsForBothOrdersOfTheState) {
  for (const auto& [K, V] : std::vector<std::pair<int64_t, int64_t>>{{128, 128}, {64, 256}, {256, 40}, {20, 36}}) {
    DeltaRuleSpec one = with_heads(spec(9, K, V), 1, 2);
    const DeltaRuleCase k_first = draw(one, 4);
    DeltaRuleCase v_first = k_first;
    v_first.spec.options.state_v_first = true;
    const auto turned = [](const Tensor& x) {
      const std::vector<int64_t>& s = x.shape();
      Tensor result(x.dtype(), {s[0], s[1], s[3], s[2]});
      for (int64_t i = 0; i < x.size(); ++i) {
        const int64_t matrix = i / (s[2] * s[3]), row = i / s[3] % s[2], column = i % s[3];
        result.set(matrix * s[2] * s[3] + column * s[2] + row, x[i]);
      }
      return result;
    };
    v_first.initial_state = turned(k_first.initial_state);
    const Context context = context_for("recurrent");
    const DeltaRuleResults a = support::forward(k_first, context);
    DeltaRuleResults b = support::forward(v_first, context);
    b.final_state = turned(b.final_state);
    expect_same_bits(b, a, "K=" + std::to_string(K) + " V=" + std::to_string(V));
  }
}

// In fp32 the tensor cores keep what the multiply-add units keep, within a small factor, with strong gates too.
TEST_P(CudaDeltaRule, ChunkKeepsTheAccuracyOfFp32) {
  constexpr double kBound = 3e-6;
  for (double fraction : {0.0, 0.1}) {
    DeltaRuleSpec one = spec(200, 128, 48, DType::kF32);
    one.hard_gate_fraction = GetParam() == Gate::kNone ? 0.0 : fraction;
    const DeltaRuleCase problem = draw(one, 15);
    const DeltaRuleResults expected = support::forward(support::in_double(problem), reference_context());
    const DeltaRuleResults results = support::forward(problem, context_for("chunk_fp32"));
    EXPECT_LT(support::compare(results.o, expected.o).relative_rms, kBound) << describe(one);
    EXPECT_LT(support::compare(results.final_state, expected.final_state).relative_rms, kBound) << describe(one);
  }
}

// More sequences than one tile of the chunk count, many of them empty.
TEST_P(CudaDeltaRule, ThousandsOfSequences) {
  Dice dice(5);
  std::vector<int64_t> lengths;
  for (int n = 0; n < (reduced() ? 300 : 3000); ++n)
    lengths.push_back(dice.chance(30) ? 0 : dice.chance(5) ? dice.between(17, 40) : dice.between(1, 4));
  DeltaRuleSpec one = with_lengths(with_heads(spec(0, 12, 8), 1, 1), lengths);
  one.options.chunk_size = 16;
  check(Mode::kForward, draw(one, 5));
  check(Mode::kStep, draw(one, 6));
}

// Some kernels take no others.
TEST_P(CudaDeltaRule, WideRowsOfWholePieces) { check(Mode::kForward, draw(with_heads(spec(70, 72, 80), 1, 2), 8)); }

TEST_P(CudaDeltaRule, ManyBatchesAndHeads) {
  DeltaRuleSpec one = with_heads(spec(1, 16, 8), 40, 2);
  one.B = reduced() ? 60 : 900;
  check(Mode::kStep, draw(one, 7));
}

// Along two of its dimensions a grid ends at 65535 blocks.
TEST_P(CudaDeltaRule, MoreThan65535SequencesOrHeads) {
  if (reduced()) GTEST_SKIP() << "a reduced run has no time for so many blocks";
  for (const auto& [B, H] : std::vector<std::pair<int64_t, int64_t>>{{66000, 1}, {1, 66000}}) {
    for (int64_t T : {1, 2}) {  // a step of one token has a kernel of its own
      DeltaRuleSpec one = with_heads(spec(T, 4, 4), H, 1);
      one.B = B;
      check(Mode::kStep, draw(one, 17));
      check(Mode::kForward, draw(one, 18));
    }
  }
}

// What the host cannot refuse touches nothing outside the tensors: support::run looks at the memory around them.
TEST_P(CudaDeltaRule, MalformedOffsetsStayInside) {
  for (const std::vector<int64_t>& offsets : kMalformedOffsets) {
    for (DType dtype : kTypes) {
      DeltaRuleSpec one = with_lengths(with_heads(spec(0, 32, 16, dtype), 1, 2), {20, 20, 29});
      one.options.chunk_size = 16;
      DeltaRuleCase problem = draw(one, 9);
      problem.cu_seqlens = offsets_of(offsets);
      DeltaRuleForward args;
      args.in = problem.inputs();
      args.options = one.options;
      Tensor o(one.dtype, problem.v.shape()), chunk_states(DType::kF32, {1, 3, one.HV, one.K, one.V});
      args.o = o.view();
      args.chunk_states = chunk_states.view();
      for (const std::string& name : forwards(dtype)) {
        EXPECT_NO_THROW(support::run(context_for(name), args)) << name;
      }
    }
  }
}

TEST_P(CudaDeltaRule, SlotsThatDoNotExistAreSkipped) {
  for (int64_t T : {1, 2}) {  // a step of one token has a kernel of its own
    DeltaRuleSpec one = with_heads(spec(T, 20, 36), 1, 2);
    one.B = 4;
    const DeltaRuleCase problem = draw(one, 10);
    const Tensor indices(DType::kI32, {4}, std::vector<double>{3, 4, -7, 0});
    for (const std::string& name : implementations(Mode::kStep)) {
      Tensor state = problem.initial_state, o(DType::kF32, problem.v.shape());
      o.fill(kNaN);
      DeltaRuleStep args;
      args.in = problem.inputs();
      args.in.initial_state = {};
      args.options = one.options;
      args.state = state.view();
      args.state_indices = indices.view();
      args.o = o.view();
      support::run(context_for(name), args);
      expect_skipped({1, 2}, {0, 3}, o, state, problem.initial_state, name);
    }
  }
}

// Calls from several threads at once, each on a stream of its own.
TEST_P(CudaDeltaRule, ConcurrentCalls) {
  const DeltaRuleCase problem = draw(with_lengths(with_heads(spec(0, 128, 64), 2, 2), {70, 1, 0, 33}), 11);
  const DeltaRuleResults expected = support::forward(problem, context_for(""), true);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const DeviceStream stream;
      Context context = context_for("");
      context.stream = stream.get();
      for (int round = 0; round < (reduced() ? 1 : 5); ++round) {
        expect_same_bits(support::forward(problem, context, true), expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Operators, CudaDeltaRule, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

// Shared memory ------------------------------------------------------------------------------------------------------

// The emulator as a device with so much shared memory for a block.
class EmulatedSharedMemory {
 public:
  explicit EmulatedSharedMemory(const char* bytes) { setenv(kName, bytes, 1); }
  ~EmulatedSharedMemory() { unsetenv(kName); }

 private:
  static constexpr const char* kName = "FASTWEIGHT_EMULATED_SHARED_MEMORY";
};

// "chunk" is the first of chunk_16bit and chunk_fp32 that takes the problem; the verbose line says which, how it cuts the
// problem, and why not the other.
TEST(CudaForms, ChunkIsTheFirstThatTakesIt) {
  std::string line;
  Context context = context_for("chunk");
  context.verbose = true;
  context.log_user = &line;
  context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) = text; };
  DeltaRuleSpec one = with_heads(spec_of(Gate::kPerHead, 70, 32, 20), 1, 2);
  one.dtype = DType::kBF16;
  EXPECT_EQ(support::forward(draw(one, 20), context).implementation, "chunk_16bit");
  EXPECT_NE(line.find(": ran chunk_16bit {K 64, columns 32, warps 4, stages 2}"), std::string::npos) << line;
  EXPECT_EQ(line.find("chunk_fp32"), std::string::npos) << line;
  one.dtype = DType::kF32;
  const DeltaRuleCase problem = draw(one, 20);
  EXPECT_EQ(support::forward(problem, context).implementation, "chunk_fp32");
  EXPECT_NE(line.find("chunk_16bit: q, k, v and o must have one 16-bit type)"), std::string::npos) << line;
  EXPECT_NE(line.find(": ran chunk_fp32 {K 64, columns "), std::string::npos) << line;
  test::expect_refused(ErrorCode::kUnsupported,
                       "delta_rule_forward: chunk_16bit: q, k, v and o must have one 16-bit type",
                       [&] { support::forward(problem, context_for("chunk_16bit")); });
  one.dtype = DType::kBF16;
  EXPECT_EQ(support::forward(draw(one, 20), context_for("chunk_fp32")).implementation, "chunk_fp32");
}

// Where a block lacks the memory for 16-bit operands, chunk_16bit declines and chunk_fp32 runs.
TEST(CudaSharedMemory, OfDevicesWith99Kilobytes) {
  if (cuda_devices().at(0).name != "emulator") GTEST_SKIP() << "a device has the shared memory that it has";
  const EmulatedSharedMemory limit("101376");
  const auto runs = [&](Gate gate, int64_t K, DType dtype) {
    DeltaRuleSpec one = with_heads(spec_of(gate, 70, K, 20), 1, 2);
    one.dtype = dtype;
    const DeltaRuleCase problem = draw(one, 19);
    const DeltaRuleResults expected = support::forward(support::in_double(problem), reference_context(), true);
    const DeltaRuleResults results = support::forward(problem, context_for("chunk"), true);
    expect_close(problem, results, expected);
    return results.implementation;
  };
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    EXPECT_EQ(runs(Gate::kPerChannel, 64, dtype), "chunk_16bit");
    EXPECT_EQ(runs(Gate::kPerChannel, 128, dtype), "chunk_fp32");
    EXPECT_EQ(runs(Gate::kPerHead, 128, dtype), "chunk_16bit");
    EXPECT_EQ(runs(Gate::kPerHead, 256, dtype), "chunk_fp32");
  }
  EXPECT_EQ(runs(Gate::kNone, 256, DType::kBF16), "chunk_fp32");
  for (const char* name : {"chunk_16bit: needs ", "chunk_fp32: needs ", "the device has 101376"}) {
    test::expect_refused(ErrorCode::kUnsupported, name, [&] { runs(Gate::kPerChannel, 256, DType::kBF16); });
  }
}

// One kernel asks for the memory of one stage, of two, and of one again, and gets it each time. The stages show in no bit.
TEST(CudaSharedMemory, OneKernelWithLessAndMore) {
  if (cuda_devices().at(0).name != "emulator") GTEST_SKIP() << "a device has the shared memory that it has";
  DeltaRuleSpec one = with_heads(spec_of(Gate::kPerHead, 130, 128, 20), 1, 1);
  one.dtype = DType::kF16;
  const DeltaRuleCase problem = draw(one, 21);
  std::string line;
  Context context = context_for("chunk_16bit");
  context.verbose = true;
  context.log_user = &line;
  context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) = text; };
  const auto run = [&](const char* bytes, const std::string& stages) {
    const EmulatedSharedMemory limit(bytes);
    const DeltaRuleResults results = support::forward(problem, context, true);
    EXPECT_NE(line.find(stages), std::string::npos) << line;
    return results;
  };
  const DeltaRuleResults expected = run("101376", "stages 1");
  expect_same_bits(run("232448", "stages 2"), expected, "two stages");
  expect_same_bits(run("101376", "stages 1"), expected, "one stage again");
}

// Scratch memory -----------------------------------------------------------------------------------------------------

TEST(CudaWorkspace, FromTheCaller) {
  const DeltaRuleCase problem = draw(with_lengths(spec_of(Gate::kPerHead, 0, 32, 16), {70, 1, 0, 33}), 12);
  CountingSource memory;
  Context context = context_for("recurrent");
  const DeltaRuleResults expected = support::forward(problem, context, true);
  context.workspace = memory.source();
  expect_same_bits(support::forward(problem, context, true), expected);
  EXPECT_EQ(memory.blocks.size(), 1u);
  EXPECT_EQ(memory.released, 1);
  memory.empty = true;
  try {
    support::forward(problem, context, true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

// Refused calls ------------------------------------------------------------------------------------------------------

void expect_refused(const DeltaRuleForward& args, const Context& context, ErrorCode code, const std::string& text) {
  test::expect_refused(code, text, [&] { delta_rule_forward(context, args); });
}

TEST(CudaErrors, DevicesAndPointers) {
  DeltaRuleCase problem = draw(with_lengths(spec_of(Gate::kPerHead, 0, 32, 16), {5, 4}), 13);
  const ForwardOnDevice call(problem);
  const Context context = context_for("");
  EXPECT_NO_THROW(delta_rule_forward(context, call.args));

  DeltaRuleForward args = call.args;
  args.in.k = problem.k.view();
  expect_refused(args, context, ErrorCode::kInvalidArgument, "k: expected memory on cuda:0, got cpu:0");
  args.in.k.device = kCuda;
  expect_refused(args, context, ErrorCode::kInvalidArgument,
                 "k: expected a pointer into memory of cuda:0, got plain host memory");
  args = call.args;
  args.in.cu_seqlens = problem.cu_seqlens.view();
  expect_refused(args, context, ErrorCode::kInvalidArgument, "cu_seqlens: expected memory on cuda:0, got cpu:0");
  expect_refused(call.args, Context{}, ErrorCode::kInvalidArgument, "q: expected memory on cpu:0, got cuda:0");

  args = call.args;
  Context elsewhere = context;
  elsewhere.device.index = 99;
  for (TensorView* view : {&args.in.q, &args.in.k, &args.in.v, &args.in.g, &args.in.beta, &args.in.initial_state,
                           &args.in.cu_seqlens, &args.o, &args.final_state, &args.chunk_states}) {
    view->device.index = 99;
  }
  expect_refused(args, elsewhere, ErrorCode::kInvalidArgument, "device: expected cuda:0");
}

// The driver is not asked about pointers then; all else is checked as before.
TEST(CudaErrors, TrustedPointers) {
  DeltaRuleCase problem = draw(with_lengths(spec_of(Gate::kPerHead, 0, 32, 16), {5, 4}), 13);
  ForwardOnDevice call(problem);
  Context context = context_for("");
  delta_rule_forward(context, call.args);
  const DeltaRuleResults expected = call.results(9, 2);
  call.poison();
  context.trust_pointers = true;
  delta_rule_forward(context, call.args);
  expect_same_bits(call.results(9, 2), expected, "trusted");

  DeltaRuleForward args = call.args;
  args.in.k = problem.k.view();
  expect_refused(args, context, ErrorCode::kInvalidArgument, "k: expected memory on cuda:0, got cpu:0");
  args.in.k = {};
  expect_refused(args, context, ErrorCode::kInvalidArgument, "k: expected a tensor, got none");
}

TEST(CudaErrors, WhatIsNotThere) {
  const DeltaRuleCase problem = draw(with_lengths(spec_of(Gate::kPerHead, 0, 32, 16), {5, 4}), 14);
  const ForwardOnDevice call(problem);
  expect_refused(call.args, context_for("reference"), ErrorCode::kInvalidArgument, "implementation: expected one of");
  const ForwardOnDevice in_double(support::in_double(problem));
  DeltaRuleForward args = in_double.args;
  args.final_state = args.chunk_states = {};
  expect_refused(args, context_for(""), ErrorCode::kUnsupported, "fp64");
}

TEST(CudaErrors, MoreHeadsThanKernelsCount) {
  constexpr int64_t kHeads = (int64_t{1} << 32) + 8;
  const std::string text = "recurrent: takes up to 1073741824 heads, got 4294967304";
  Nowhere nowhere;
  DeltaRuleForward forward;
  forward.in.q = nowhere({1, 1, 8, 1});
  forward.in.k = nowhere({1, 1, 8, 1});
  forward.in.v = nowhere({1, 1, kHeads, 1});
  forward.o = nowhere({1, 1, kHeads, 1});
  expect_refused(forward, Nowhere::context(), ErrorCode::kUnsupported, text);
  DeltaRuleStep step;
  step.in = forward.in;
  step.o = forward.o;
  step.state = nowhere({1, kHeads, 1, 1});
  test::expect_refused(ErrorCode::kUnsupported, text, [&] { delta_rule_step(Nowhere::context(), step); });
}

}  // namespace
}  // namespace fastweight::test
