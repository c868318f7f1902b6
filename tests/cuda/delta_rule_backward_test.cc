// What is special about the backward of the delta-rule family on a CUDA device: graphs, contents that the host cannot
// check, many sequences, kept states in every type and order. The cases of tests/delta_rule run on the device as well, see
// tests/CMakeLists.txt; tensors of more than 2^31 elements are in tests/python/test_cuda_training.py.
#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "tests/cuda/testing.h"
#include "tests/delta_rule/grid.h"

namespace fastweight::test {
namespace {

using support::DeviceStream;
using support::draw;

class CudaDeltaRuleBackward : public ::testing::TestWithParam<Gate> {
 protected:
  static DeltaRuleSpec spec(int64_t T, int64_t K, int64_t V, DType dtype = DType::kBF16) {
    DeltaRuleSpec one = spec_of(GetParam(), T, K, V);
    one.dtype = dtype;
    return one;
  }
};

// The same bits as a call of its own; tokens after the last offset keep what every gradient held.
TEST_P(CudaDeltaRuleBackward, GraphReplaysWithOtherLengths) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    DeltaRuleSpec one = with_lengths(with_heads(spec(0, 32, 20, dtype), reduced() ? 1 : 2, 2), {60, 60, 20, 10});
    one.options.qk_l2norm = one.options.beta_sigmoid = true;
    one.options.gate_in_kernel = GetParam() != Gate::kNone;
    expect_replays_with_other_lengths(
        Mode::kBackward, draw(one, 31),
        first<std::vector<int64_t>>(
            {{0, 0, 1, 67, 130}, {0, 0, 0, 0, 0}, {0, 64, 64, 64, 65}, {0, 60, 120, 140, 150}, {0, 3, 67, 131, 140}},
            2));
  }
}

// What the host cannot refuse touches nothing outside the gradients: a call looks at the memory around its tensors.
TEST_P(CudaDeltaRuleBackward, MalformedOffsetsStayInside) {
  for (const std::vector<int64_t>& offsets : first(kMalformedOffsets, 2)) {
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      DeltaRuleSpec one = with_lengths(with_heads(spec(0, 32, 16, dtype), 1, reduced() ? 1 : 2), {20, 20, 29});
      one.options.gate_in_kernel = GetParam() != Gate::kNone;
      one.options.chunk_size = 16;
      DeltaRuleCase problem = draw(one, 32);
      const Tensor saved = support::forward(problem, context_for("recurrent"), true).chunk_states;
      problem.cu_seqlens = offsets_of(offsets);
      for (const std::string& name : implementations(Mode::kBackward)) {
        for (const Tensor& states : {Tensor(), saved, saved.to(dtype)}) {
          EXPECT_NO_THROW(unless_declined(Mode::kBackward, name, [&] {
            return support::backward(problem, context_for(name), states);
          })) << name;
        }
      }
    }
  }
}

// More sequences than one tile of the chunk count, many of them empty.
TEST_P(CudaDeltaRuleBackward, ThousandsOfSequences) {
  Dice dice(33);
  std::vector<int64_t> lengths;
  for (int n = 0; n < (reduced() ? 50 : 3000); ++n)
    lengths.push_back(dice.chance(30) ? 0 : dice.chance(5) ? dice.between(17, 40) : dice.between(1, 4));
  DeltaRuleSpec one = with_lengths(with_heads(spec(0, 12, 8), 4, 1), lengths);  // heads: dA_log is a sum of all tokens
  one.options.gate_in_kernel = GetParam() != Gate::kNone;
  one.options.chunk_size = 16;
  check(Mode::kBackward, draw(one, 33));
}

// Along two of its dimensions a grid ends at 65535 blocks.
TEST_P(CudaDeltaRuleBackward, MoreThan65535SequencesOrHeads) {
  if (reduced()) GTEST_SKIP() << "a reduced run has no time for so many blocks";
  for (const auto& [B, H] : std::vector<std::pair<int64_t, int64_t>>{{66000, 1}, {1, 66000}}) {
    DeltaRuleSpec one = with_heads(spec(2, 4, 4), H, 1);
    one.B = B;
    check(Mode::kBackward, draw(one, 34));
  }
}

// Gates that close some channels or tokens leave the others' gradients accurate: nothing large cancels.
TEST_P(CudaDeltaRuleBackward, GateGradientsKeepTheAccuracyOfFp32) {
  if (GetParam() == Gate::kNone) GTEST_SKIP() << "no gate";
  constexpr double kBound = 5e-6, kHard = 1000, kShare = 0.1;
  for (bool in_kernel : {false, true}) {
    DeltaRuleSpec one = with_heads(spec(reduced() ? 100 : 200, 64, 48, DType::kF32), 1, 2);
    one.hard_gate_fraction = in_kernel ? 0 : kShare;
    one.options.gate_in_kernel = in_kernel;
    DeltaRuleCase problem = draw(one, 35);
    if (in_kernel) {
      Dice dice(35);
      for (int64_t i = 0; i < problem.g.size(); ++i) {
        const double rate = std::exp(problem.a_log[i / (problem.g.size() / (one.T * one.HV)) % one.HV]);
        if (dice.chance(int(100 * kShare))) problem.g.set(i, kHard / rate);
      }
    }
    const DeltaRuleResults expected = support::backward(support::in_double(problem), reference_context());
    for (const char* name : {"chunk_fp32", "recurrent"}) {
      const DeltaRuleResults results = support::backward(problem, context_for(name));
      for (const char* gradient : {"dg", "da_log"}) {
        if (const Tensor* x = results.find(gradient)) {
          EXPECT_LT(support::compare(*x, *expected.find(gradient)).relative_rms, kBound) << name << " " << gradient;
        }
      }
    }
  }
}

// Sums over heads, chunks and tokens have one order.
TEST_P(CudaDeltaRuleBackward, SameBitsTwice) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    DeltaRuleSpec one = with_heads(spec(700, 128, 72, dtype), 2, 2);
    if (reduced()) one = with_heads(spec(70, 72, 72, dtype), 1, 2);
    one.options.gate_in_kernel = GetParam() != Gate::kNone;
    const DeltaRuleCase problem = draw(one, 36);
    for (const std::string& name : implementations(Mode::kBackward)) {
      const auto run = [&] { return support::backward(problem, context_for(name)); };
      const auto expected = unless_declined(Mode::kBackward, name, run);
      if (expected) expect_same_bits(run(), *expected, describe(one));
    }
  }
}

// Calls from several threads at once, each on a stream of its own.
TEST_P(CudaDeltaRuleBackward, ConcurrentCalls) {
  const DeltaRuleCase problem = draw(with_lengths(with_heads(spec(0, 64, 32), 1, 2), {70, 1, 0, 33}), 37);
  const DeltaRuleResults expected = support::backward(problem, context_for(""));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const DeviceStream stream;
      Context context = context_for("");
      context.stream = stream.get();
      for (int round = 0; round < (reduced() ? 1 : 5); ++round) {
        expect_same_bits(support::backward(problem, context), expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Kept states ---------------------------------------------------------------------------------------------------------

// The view with its last two axes in the other order in memory.
TensorView turned(TensorView view) {
  view.strides[4] = view.shape[3];
  view.strides[3] = 1;
  return view;
}

// From the states that the forward of the same name keeps, in a type and in an order of memory of the caller's choice.
DeltaRuleResults backward_from_kept(const DeltaRuleCase& problem, const std::string& name, DType dtype, bool turn) {
  DeltaRuleResults kept = outputs_of(Mode::kForward, problem);
  kept.chunk_states = kept.chunk_states.to(dtype);
  const TensorView states = turn ? turned(kept.chunk_states.view()) : kept.chunk_states.view();
  const support::Call forward = call_of(Mode::kForward, problem, kept);
  forward["chunk_states"] = states;
  forward.run(context_for(name));
  DeltaRuleResults results = outputs_of(Mode::kBackward, problem);
  const support::Call backward = call_of(Mode::kBackward, problem, results);
  backward["chunk_states"] = states;
  results.implementation = backward.run(context_for(name));
  return results;
}

// In fp32, whatever the order: the bits of a backward that computes the states again. In the type of k too, where states
// are operands in that type; elsewhere their rounding shows.
TEST_P(CudaDeltaRuleBackward, FromKeptStates) {
  for (const auto& [K, V] : first<std::pair<int64_t, int64_t>>({{64, 36}, {20, 64}, {128, 128}, {256, 72}}, 2)) {
    for (bool v_first : {false, true}) {
      if (reduced() && v_first != (K == 64)) continue;
      DeltaRuleSpec one = with_lengths(with_heads(spec(0, K, V), 1, reduced() ? 1 : 2), {67, 0, 20});
      one.options.state_v_first = v_first;
      const DeltaRuleCase problem = draw(one, 38);
      const DeltaRuleResults exact = support::backward(support::in_double(problem), reference_context());
      for (const std::string& name : implementations(Mode::kBackward)) {
        if (name == "chunk_sm90") continue;  // it has tests of its own
        const DeltaRuleResults expected = support::backward(problem, context_for(name));
        for (DType dtype : {DType::kF32, one.dtype}) {
          for (bool turn : {false, true}) {
            const DeltaRuleResults results = backward_from_kept(problem, name, dtype, turn);
            const std::string what = std::string(name_of(dtype)) + (turn ? ", turned, " : ", ") + describe(one);
            if (dtype == DType::kF32 || name == "chunk_16bit") expect_same_bits(results, expected, what);
            expect_close(problem, results, exact);
          }
        }
      }
    }
  }
}

// What a forward leaves to its backward, and both in pieces of the input ------------------------------------------------

// A forward that keeps states and, if wanted, factors, all or those of pairs of tokens, and the backward from them; or from factors
// that are all 0.
enum class Keep { kStates, kFactors, kFactorsLost, kPairs, kPairsLost };
std::pair<DeltaRuleResults, DeltaRuleResults> train(const DeltaRuleCase& problem, const Context& context, Keep keep) {
  const DeltaRuleSpec& one = problem.spec;
  DeltaRuleResults outputs = outputs_of(Mode::kForward, problem);
  outputs.chunk_states = outputs.chunk_states.to(one.dtype);
  const support::Call forward = call_of(Mode::kForward, problem, outputs);
  DeltaRuleResults gradients = outputs_of(Mode::kBackward, problem);
  const support::Call backward = call_of(Mode::kBackward, problem, gradients);
  backward["chunk_states"] = outputs.chunk_states.view();
  TensorView lengths = forward["cu_seqlens"];
  lengths.device = context.device;  // where they will be: their contents are not looked at
  const int64_t chunks = delta_rule_num_chunks(problem.q.shape()[1], lengths, one.options.chunk_size);
  const bool all = keep == Keep::kFactors || keep == Keep::kFactorsLost;
  const int64_t words = delta_rule_kept_words(context, one.options, one.dtype, one.K, all);
  Tensor kept(DType::kI32, {problem.q.shape()[0], chunks, one.HV, words});
  if (keep != Keep::kStates) forward["kept"] = backward["kept"] = kept.view();
  outputs.implementation = forward.run(context);
  if (keep == Keep::kFactorsLost || keep == Keep::kPairsLost) kept.fill(0);
  gradients.implementation = backward.run(context);
  return {std::move(outputs), std::move(gradients)};
}

TEST_P(CudaDeltaRuleBackward, FromKeptFactors) {
  for (int64_t K : first<int64_t>({36, 128, 256}, 1)) {
    DeltaRuleSpec one = with_lengths(with_heads(spec(0, K, 36), 1, 2), {67, 0, 20});
    one.options.qk_l2norm = true;
    for (const DeltaRuleSpec& each : {one, with_heads(spec(70, K, 36), 1, 2)}) {
      const DeltaRuleCase problem = draw(each, 39);
      const auto [outputs, gradients] = train(problem, context_for(""), Keep::kStates);
      for (const auto& [keep, lose] :
           {std::pair{Keep::kFactors, Keep::kFactorsLost}, {Keep::kPairs, Keep::kPairsLost}}) {
        const auto [same_outputs, same_gradients] = train(problem, context_for(""), keep);
        expect_same_bits(same_outputs, outputs, describe(each));
        expect_same_bits(same_gradients, gradients, describe(each));
        const auto [_, lost] = train(problem, context_for(""), lose);
        EXPECT_FALSE(support::same_bits(lost.dv, gradients.dv)) << "made again: " << describe(each);
      }
    }
  }
}

// Kernels copy what is kept in pieces of 16 bytes.
TEST_P(CudaDeltaRuleBackward, KeptBesideAMultipleOf16BytesIsRefused) {
  const DeltaRuleCase problem = draw(spec(20, 64, 64), 42);
  const int64_t words = delta_rule_kept_words(context_for(""), problem.spec.options, problem.spec.dtype, 64);
  const Tensor kept(DType::kI32, {words + 1});
  const auto expect = [&](Mode mode, const DeltaRuleResults& outputs) {
    const support::Call call = call_of(mode, problem, outputs);
    TensorView& view = call["kept"];
    view = Tensor(DType::kI32, {1, 1, 1, words}).view();
    view.data = static_cast<int32_t*>(kept.data()) + 1;
    expect_refused(ErrorCode::kInvalidArgument, "kept: expected memory at a multiple of 16 bytes",
                   [&] { (void)call.run(context_for("")); });
    view.data = kept.data();
    EXPECT_NO_THROW((void)call.run(context_for("")));
  };
  expect(Mode::kForward, outputs_of(Mode::kForward, problem));
  expect(Mode::kBackward, outputs_of(Mode::kBackward, problem));
}

// What else is wanted changes no bit of a gradient, also where the scan back is all that runs.
TEST_P(CudaDeltaRuleBackward, GradientsAlone) {
  const DeltaRuleCase problem = draw(with_heads(spec(70, 24, 40), 1, 2), 41);
  for (const std::string& name : implementations(Mode::kBackward)) {
    const auto all =
        unless_declined(Mode::kBackward, name, [&] { return support::backward(problem, context_for(name)); });
    if (!all) continue;
    for (const std::vector<std::string>& wanted : first<std::vector<std::string>>(
             {{"dv", "d_initial_state"}, {"d_initial_state"}, {"dv"}, {"dq", "dv"}, {"dbeta"}}, 2)) {
      DeltaRuleResults some;
      for (const std::string& tensor : wanted) {
        some.at(tensor) = support::outputs_of(Mode::kBackward, problem).at(tensor);
      }
      support::call_of(Mode::kBackward, problem, some).run(context_for(name));
      for (const std::string& tensor : wanted) {
        EXPECT_TRUE(support::same_bits(some.at(tensor), *all->find(tensor))) << name << " " << tensor;
      }
    }
  }
}

// A small limit of scratch memory cuts the input into as many pieces as the kernels go along with.
TEST_P(CudaDeltaRuleBackward, InPieces) {
  DeltaRuleSpec whole = with_heads(spec(16 * 13 - 5, 36, 36), 1, 2);
  whole.B = 2;
  const std::vector<int64_t> lengths =
      emulated() ? std::vector<int64_t>{0, 20, 70, 0, 1, 17} : std::vector<int64_t>{0, 20, 110, 0, 1, 70, 17};
  const DeltaRuleSpec packed = with_lengths(with_heads(spec(0, 36, 36), 1, 2), lengths);
  for (DeltaRuleSpec one : {whole, packed}) {
    one.options.chunk_size = 16;
    one.options.gate_in_kernel = GetParam() != Gate::kNone;
    const DeltaRuleCase problem = draw(one, 40);
    CountingSource memory, less_memory;
    Context all = context_for(""), pieces = context_for("");
    all.workspace = memory.source();
    pieces.workspace = less_memory.source();
    pieces.scratch_bytes = 1;
    const auto [outputs, gradients] = train(problem, all, Keep::kStates);
    for (Keep keep : {Keep::kStates, Keep::kFactors}) {
      const auto [same_outputs, same_gradients] = train(problem, pieces, keep);
      expect_same_bits(same_outputs, outputs, describe(one));
      expect_same_bits(same_gradients, gradients, describe(one));
    }
    EXPECT_LT(less_memory.most, memory.most / 4 * 3) << describe(one);  // states between pieces are not small here
    expect_same_bits(support::backward(problem, pieces), gradients, describe(one));
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, CudaDeltaRuleBackward, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

// Refused calls -------------------------------------------------------------------------------------------------------

TEST(CudaDeltaRuleBackwardErrors, MoreHeadsThanKernelsCount) {
  constexpr int64_t kHeads = (int64_t{1} << 32) + 8;
  Nowhere nowhere;
  DeltaRuleBackward backward;
  backward.in.q = nowhere({1, 1, 8, 1});
  backward.in.k = nowhere({1, 1, 8, 1});
  backward.in.v = nowhere({1, 1, kHeads, 1});
  backward.d_o = nowhere({1, 1, kHeads, 1});
  backward.dv = nowhere({1, 1, kHeads, 1});
  expect_refused(ErrorCode::kUnsupported, "recurrent: takes up to 1073741824 heads, got 4294967304",
                 [&] { delta_rule_backward(Nowhere::context(), backward); });
}

}  // namespace
}  // namespace fastweight::test
