// What is special about TTT-linear on a CUDA device: graphs, contents that the host cannot check, many sequences,
// prefill and decoding. The cases of tests/ttt_linear run on the device as well, see tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "tests/contract.h"
#include "tests/cuda/testing.h"
#include "tests/ttt_linear/grid.h"

namespace fastweight::test {
namespace {

using support::DeviceGraph;
using support::DeviceStream;
using support::draw;

// In a type that every implementation takes.
TttLinearSpec bf16_spec(int64_t T, int64_t D, int64_t H) {
  TttLinearSpec spec = spec_of(T, D, H);
  spec.dtype = DType::kBF16;
  return spec;
}

// With a mini-batch that this forward takes.
TttLinearSpec for_forward(const std::string& name, TttLinearSpec spec) {
  spec.options.mini_batch = name == "chunk_tiles" ? 32 : 16;
  return spec;
}

TEST(CudaTttLinear, GraphReplaysWithOtherLengths) {
  for (const char* name : {"chunk_chain", "chunk_tiles"}) {  // with the mini-batches of either
    const TttLinearCase problem = draw(with_lengths(for_forward(name, bf16_spec(0, 20, 2)), {40, 40, 10, 10}), 1);
    for (Mode mode : {Mode::kForward, Mode::kBackward}) {
      expect_replays_with_other_lengths(
          mode, problem, {{0, 40, 80, 90, 100}, {0, 0, 1, 99, 100}, {0, 16, 16, 48, 49}, {0, 0, 0, 0, 0}});
    }
  }
}

// A forward that keeps its states, if they are wanted, and the backward from them, or from states that are all 0.
enum class Keep { kNothing, kStates, kStatesLost };
std::pair<TttLinearResults, TttLinearResults> train(const TttLinearCase& problem, Keep keep) {
  const TttLinearSpec& spec = problem.spec;
  const Context context = context_for("chunk_chain");
  TttLinearResults outputs = outputs_of(Mode::kForward, problem), gradients = outputs_of(Mode::kBackward, problem);
  const support::Call forward = call_of(Mode::kForward, problem, outputs),
                      backward = call_of(Mode::kBackward, problem, gradients);
  const int64_t C = spec.options.mini_batch, T = problem.q.shape()[1];
  const int64_t mini_batches = spec.cu_seqlens.empty() ? (T + C - 1) / C : T / C + num_sequences(spec);
  const int64_t words = ttt_linear_kept_words(context, spec.options, spec.dtype, spec.D);
  EXPECT_GT(words, 0);
  Tensor kept(DType::kI32, {problem.q.shape()[0], mini_batches, spec.H, words});
  if (keep != Keep::kNothing) forward["kept"] = backward["kept"] = kept.view();
  outputs.implementation = forward.run(context);
  if (keep == Keep::kStatesLost) kept.fill(0);
  gradients.implementation = backward.run(context);
  return {std::move(outputs), std::move(gradients)};
}

TEST(CudaTttLinear, FromKeptStates) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (int64_t D : first<int64_t>({64, 36, 128, 84}, 3)) {
      TttLinearSpec dense = bf16_spec(37, D, 2);
      dense.dtype = dtype;
      for (const TttLinearSpec& spec : {with_batch(dense, 2), with_lengths(dense, {33, 0, 16, 1})}) {
        const TttLinearCase problem = draw(spec, 8);
        const auto [outputs, gradients] = train(problem, Keep::kNothing);
        const auto [same_outputs, same_gradients] = train(problem, Keep::kStates);
        expect_same_bits(same_outputs, outputs, describe(spec));
        expect_same_bits(same_gradients, gradients, describe(spec));
        const auto [_, others] = train(problem, Keep::kStatesLost);
        EXPECT_FALSE(support::same_bits(others.dk, gradients.dk)) << describe(spec);
      }
    }
  }
}

// Only the forward whose states they are fills them.
TEST(CudaTttLinear, OtherForwardsKeepNothing) {
  const TttLinearCase problem = draw(bf16_spec(16, 64, 1), 9);
  const TttLinearResults outputs = outputs_of(Mode::kForward, problem);
  const support::Call forward = call_of(Mode::kForward, problem, outputs);
  Tensor kept(DType::kI32, {1, 1, 1, ttt_linear_kept_words(context_for(""), {}, DType::kBF16, 64)});
  forward["kept"] = kept.view();
  EXPECT_EQ(forward.run(context_for("")), "chunk_chain");
  for (const char* name : {"chunk_fp32", "recurrent"}) {
    expect_refused(ErrorCode::kUnsupported, "keeps no states for a backward",
                   [&] { (void)forward.run(context_for(name)); });
  }
}

// Each replay of a captured step advances the states once more, over the end of a mini-batch.
TEST(CudaTttLinear, StepInAGraph) {
  constexpr int kReplays = 18;
  TttLinearSpec spec = bf16_spec(1, 36, 2);
  spec.B = 2;
  const TttLinearCase problem = draw(spec, 2);
  for (const std::string& name : implementations(Mode::kStep)) {
    TttLinearOpen open = support::opened(problem);
    const TttLinearResults outputs = outputs_of(Mode::kStep, problem);
    const CallOnDevice call(call_of(Mode::kStep, problem, outputs));
    const DeviceStream stream;
    Context context = context_for(name);
    context.stream = stream.get();
    const DeviceGraph graph(stream, [&] { call.enqueue(context); });
    for (int i = 0; i < kReplays; ++i) graph.launch(stream);
    stream.wait();

    TttLinearResults expected;
    for (int i = 0; i < kReplays; ++i) {
      expected = support::step(problem, open, context_for(name));
      open = open_after(expected);
    }
    EXPECT_EQ(expected.position.values(), (std::vector<double>{2, 2})) << name;
    expect_same_bits(call.results<TttLinearResults>(), expected, name);
  }
}

// All tokens at once, or a prefill and then a step per token: the same bits, outputs included.
TEST(CudaTttLinear, SameBitsByStepsAfterAPrefill) {
  constexpr int64_t kPrefill = 16;
  TttLinearSpec spec = bf16_spec(32, 36, 2);
  const TttLinearCase problem = draw(spec, 3);
  const Context context = context_for("recurrent");
  const TttLinearResults whole = support::forward(problem, context);
  const TttLinearResults head = support::forward(slice_tokens(problem, 0, kPrefill), context);
  TttLinearOpen open = support::opened(problem);
  open.state = head.final_state;
  open.state_bias = head.final_state_bias;
  for (int64_t t = kPrefill; t < spec.T; ++t) {
    const TttLinearResults one = support::step(slice_tokens(problem, t, t + 1), open, context);
    EXPECT_TRUE(support::same_bits(one.o, slice(whole.o, 1, t, t + 1))) << "token " << t;
    open = open_after(one);
  }
  EXPECT_TRUE(support::same_bits(open.state, whole.final_state));
  EXPECT_TRUE(support::same_bits(open.state_bias, whole.final_state_bias));
}

// Every shape of the chunk form's kernels, with rows that can be copied in pieces and rows that cannot.
TEST(CudaTttLinear, ShapesOfTheChunkForm) {
  for (int32_t mini_batch : {16, 32, 64}) {
    for (int64_t D : {64, 128, 36, 100}) {
      if (reduced() && D > 64 && mini_batch == 32) continue;
      TttLinearSpec spec = bf16_spec(reduced() ? 2 * mini_batch + 3 : 5 * mini_batch + 3, D, 1);
      if (mini_batch == 32) spec.dtype = DType::kF16;
      spec.options.mini_batch = mini_batch;
      const TttLinearCase problem = draw(spec, 4);
      const TttLinearResults expected = support::forward(support::in_double(problem), reference_context());
      const std::string name = mini_batch == 16 ? "chunk_chain" : "chunk_tiles";
      const TttLinearResults results = support::forward(problem, context_for(name));
      EXPECT_EQ(results.implementation, name);
      expect_close(problem, results, expected);
    }
  }
}

// .. and of its backward, with an odd and an even number of mini-batches for the two groups of partners.
TEST(CudaTttLinear, ShapesOfTheChunkBackward) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (int64_t D : {64, 36, 17}) {
      for (int64_t T : {5, 32, 83}) {
        if (reduced() && dtype == DType::kF16 && D < 64) continue;
        TttLinearSpec spec = spec_of(T, D, 2);
        spec.dtype = dtype;
        const TttLinearCase problem = draw(spec, 15);
        const TttLinearResults expected = support::backward(support::in_double(problem), reference_context());
        const TttLinearResults results = support::backward(problem, context_for("chunk_chain"));
        expect_close(problem, results, expected);
      }
    }
  }
}

// A forward and a backward that are both chosen automatically go by the same states: sequences may be cut between them.
TEST(CudaTttLinear, ForwardAndBackwardHaveTheSameStates) {
  for (int32_t mini_batch : {16, 32}) {
    for (int64_t D : {36, 100}) {
      for (bool wide : {false, true}) {
        TttLinearSpec spec = bf16_spec(3 * mini_batch + 5, D, 1);
        spec.options.mini_batch = mini_batch;
        TttLinearCase problem = draw(spec, 19);
        if (wide) problem.d_o = problem.d_o.to(DType::kF32);
        EXPECT_EQ(support::backward(problem, context_for("")).implementation,
                  support::forward(problem, context_for("")).implementation);
        expect_same_when_cut(problem, 2 * mini_batch);
        expect_close(problem, support::backward(problem, context_for("")),
                     support::backward(support::in_double(problem), reference_context()));
      }
    }
  }
}

// Rows of 128 channels and long mini-batches: the matrices of a block do not fit into shared memory.
TEST(CudaTttLinear, Fp32WithMatricesInScratchMemory) {
  TttLinearSpec spec = spec_of(70, 128, 1);
  spec.options.mini_batch = 64;
  check(Mode::kForward, draw(spec, 16));
  check(Mode::kBackward, draw(spec, 16));
}

// What the state's gradient passes through on its way back is beyond the range of fp16 where a state is nearly
// constant, as one of 0 is, and below it where gradients are small.
TEST(CudaTttLinear, GradientsBeyondTheRangeOfFp16) {
  for (double factor : {1.0, 1e-3}) {
    TttLinearSpec spec = spec_of(40, 36, 1);
    spec.dtype = DType::kF16;
    spec.initial_state = spec.initial_state_bias = false;
    TttLinearCase problem = draw(spec, 17);
    for (Tensor* x : {&problem.d_o, &problem.d_final_state, &problem.d_final_state_bias}) {
      for (int64_t i = 0; i < x->size(); ++i) x->set(i, factor * (*x)[i]);
    }
    const TttLinearResults expected = support::backward(support::in_double(problem), reference_context());
    expect_close(problem, support::backward(problem, context_for("chunk_chain")), expected);
  }
}

TEST(CudaTttLinear, ChunkIsTheEntryForTheMiniBatch) {
  for (const std::string name : {"chunk_chain", "chunk_tiles"}) {
    const TttLinearCase problem = draw(for_forward(name, bf16_spec(20, 16, 1)), 14);
    for (const char* asked : {"chunk", ""}) {
      EXPECT_EQ(support::forward(problem, context_for(asked)).implementation, name) << asked;
    }
  }
  for (const char* asked : {"chunk", ""}) {
    const TttLinearCase problem = draw(spec_of(20, 16), 14);
    EXPECT_EQ(support::forward(problem, context_for(asked)).implementation, "chunk_fp32") << asked;
    EXPECT_EQ(support::backward(problem, context_for(asked)).implementation, "chunk_fp32") << asked;
  }
}

TEST(CudaTttLinear, WhatTheChunkFormsDecline) {
  const auto expect_declined = [](const std::string& name, const TttLinearSpec& spec, const std::string& reason) {
    expect_refused(ErrorCode::kUnsupported, name + ": " + reason,
                   [&] { support::forward(draw(spec, 12), context_for(name)); });
  };
  for (const char* name : {"chunk_chain", "chunk_tiles"}) {
    expect_declined(name, for_forward(name, spec_of(20, 16)), "q, k and v must be bf16 or fp16");
  }
  const auto expect_backward_declined = [](const std::string& name, const TttLinearSpec& refused,
                                           const std::string& reason) {
    expect_refused(ErrorCode::kUnsupported, name + ": " + reason,
                   [&] { support::backward(draw(refused, 12), context_for(name)); });
  };
  for (const char* name : {"chunk_chain", "chunk_tiles"}) {
    expect_backward_declined(name, for_forward(name, spec_of(20, 16)), "q, k and v must be bf16 or fp16");
  }
  TttLinearSpec spec = bf16_spec(20, 16, 1);
  expect_declined("chunk_tiles", spec, "takes mini-batches of 32 or 64 tokens, got 16");
  expect_backward_declined("chunk_tiles", spec, "takes mini-batches of 32 or 64 tokens, got 16");
  for (int32_t mini_batch : {32, 64}) {
    spec.options.mini_batch = mini_batch;
    expect_declined("chunk_chain", spec, "takes mini-batches of 16 tokens, got " + std::to_string(mini_batch));
    expect_backward_declined("chunk_chain", spec, "takes mini-batches of 16 tokens, got " + std::to_string(mini_batch));
  }
}

// Inner gradients beyond the range of fp16: a state of 0 makes the variance of every z that of eps alone.
TEST(CudaTttLinear, LargeGradientsInFp16) {
  for (const char* name : {"chunk_chain", "chunk_tiles"}) {
    TttLinearSpec spec = for_forward(name, spec_of(33, 20, 1));
    spec.dtype = DType::kF16;
    spec.initial_state = spec.initial_state_bias = false;
    spec.options.eps = 1e-9;
    TttLinearCase problem = draw(spec, 5);
    for (int64_t i = 0; i < problem.eta.size(); ++i) problem.eta.set(i, 0.1 * problem.eta[i]);
    const TttLinearResults expected = support::forward(support::in_double(problem), reference_context());
    expect_close(problem, support::forward(problem, context_for(name)), expected);
  }
}

// An input that is not a number makes its own output, and those of later mini-batches, none either.
TEST(CudaTttLinear, WhatIsNotANumberStays) {
  constexpr int64_t kToken = 5;
  for (const std::string& name : implementations(Mode::kForward)) {
    for (auto tensor : {&TttLinearCase::k, &TttLinearCase::v, &TttLinearCase::eta}) {
      TttLinearCase problem = draw(for_forward(name, bf16_spec(70, 20, 1)), 13);
      const int64_t width = (problem.*tensor).size() / problem.spec.T;
      for (int64_t i = 0; i < width; ++i) (problem.*tensor).set(kToken * width + i, std::nan(""));
      const TttLinearResults results = support::forward(problem, context_for(name));
      const bool moves_state = tensor != &TttLinearCase::eta;  // the last token's step size alone does
      for (double value : slice(results.o, 1, kToken, kToken + 1).values()) EXPECT_TRUE(std::isnan(value)) << name;
      for (double value : slice(results.o, 1, 69, 70).values()) EXPECT_EQ(std::isnan(value), moves_state) << name;
      for (double value : results.final_state.values()) EXPECT_EQ(std::isnan(value), moves_state) << name;
    }
  }
}

// In the backward it makes the gradients of its own token, and of earlier mini-batches, none.
TEST(CudaTttLinear, WhatIsNotANumberStaysOnTheWayBack) {
  constexpr int64_t kToken = 40;
  for (const std::string& name : implementations(Mode::kBackward)) {
    for (Tensor TttLinearCase::*tensor : {&TttLinearCase::k, &TttLinearCase::v, &TttLinearCase::d_o}) {
      TttLinearCase problem = draw(for_forward(name, bf16_spec(70, 36, 1)), 18);
      const int64_t width = (problem.*tensor).size() / problem.spec.T;
      for (int64_t i = 0; i < width; ++i) (problem.*tensor).set(kToken * width + i, std::nan(""));
      const TttLinearResults results = support::backward(problem, context_for(name));
      for (const Tensor* x : {&results.dk, &results.dv}) {
        for (int64_t token : {int64_t{0}, kToken}) {
          for (double value : slice(*x, 1, token, token + 1).values()) EXPECT_TRUE(std::isnan(value)) << name;
        }
      }
      for (double value : results.d_initial_state.values()) EXPECT_TRUE(std::isnan(value)) << name;
    }
  }
}

// More (sequence, head) pairs than blocks run at once, many of the sequences empty.
TEST(CudaTttLinear, ThousandsOfSequences) {
  Dice dice(6);
  std::vector<int64_t> lengths;
  for (int n = 0; n < (reduced() ? 100 : 1000); ++n) {
    lengths.push_back(dice.chance(30) ? 0 : dice.chance(5) ? dice.between(17, 40) : dice.between(1, 4));
  }
  for (int32_t mini_batch : {16, 32}) {
    TttLinearSpec spec = with_lengths(bf16_spec(0, 12, 1), lengths);
    spec.options.mini_batch = mini_batch;
    check(Mode::kForward, draw(spec, 6));
    check(Mode::kBackward, draw(spec, 6));
  }
  check(Mode::kStep, draw(with_lengths(bf16_spec(0, 12, 1), lengths), 7));
}

// Along two of its dimensions a grid ends at 65535 blocks.
TEST(CudaTttLinear, MoreThan65535SequencesOrHeads) {
  if (reduced()) GTEST_SKIP() << "a reduced run has no time for so many blocks";
  for (const auto& [B, H] : std::vector<std::pair<int64_t, int64_t>>{{66000, 1}, {1, 66000}}) {
    TttLinearSpec spec = bf16_spec(1, 4, H);
    spec.B = B;
    check(Mode::kForward, draw(spec, 10));
    check(Mode::kBackward, draw(spec, 10));
    check(Mode::kStep, draw(spec, 11));
  }
}

TEST(CudaTttLinear, MalformedOffsetsStayInside) {
  for (const char* name : {"chunk_chain", "chunk_tiles"}) {
    expect_malformed_offsets_stay_inside(draw(with_lengths(for_forward(name, bf16_spec(0, 16, 1)), {20, 20, 29}), 8));
  }
}

// A slot that does not exist is skipped like -1, a count outside the mini-batch is clamped to it.
TEST(CudaTttLinear, SlotsAndPositionsThatDoNotExist) {
  TttLinearSpec spec = bf16_spec(2, 20, 2);
  spec.B = 4;
  const TttLinearCase problem = draw(spec, 9);
  const Tensor indices(DType::kI32, {4}, std::vector<double>{3, 4, -7, 0});
  for (const std::string& name : implementations(Mode::kStep)) {
    TttLinearResults after = outputs_of(Mode::kStep, problem);
    after.position = Tensor(DType::kI32, {4}, std::vector<double>{-3, 5, 1000, 1e9});
    const Tensor before = after.gradient;
    const support::Call call = call_of(Mode::kStep, problem, after);
    call["state_indices"] = indices.view();
    call.run(context_for(name));
    EXPECT_EQ(after.position.values(), (std::vector<double>{2, 5, 1000, 1})) << name;
    expect_skipped({1, 2}, {0, 3}, after.o, after.gradient, before, name);
  }
}

TEST(CudaTttLinear, MoreHeadsThanKernelsCount) {
  constexpr int64_t kHeads = (int64_t{1} << 32) + 8;
  const std::string text = "recurrent: takes up to 1073741824 heads, got 4294967304";
  Nowhere nowhere;
  TttLinearForward forward;
  forward.in.q = nowhere({1, 1, kHeads, 1});
  forward.in.k = nowhere({1, 1, kHeads, 1});
  forward.in.v = nowhere({1, 1, kHeads, 1});
  forward.in.w = nowhere({kHeads, 1});
  forward.in.b = nowhere({kHeads, 1});
  forward.in.eta = nowhere({1, 1, kHeads});
  forward.o = nowhere({1, 1, kHeads, 1});
  expect_refused(ErrorCode::kUnsupported, text, [&] { ttt_linear_forward(Nowhere::context(), forward); });
  TttLinearBackward backward;
  backward.in = forward.in;
  backward.d_o = forward.o;
  backward.dq = nowhere({1, 1, kHeads, 1});
  expect_refused(ErrorCode::kUnsupported, "chunk_fp32: takes up to 1073741824 heads, got 4294967304",
                 [&] { ttt_linear_backward(Nowhere::context(), backward); });
  TttLinearStep step;
  step.in = forward.in;
  step.o = forward.o;
  step.state = nowhere({1, kHeads, 1, 1});
  step.state_bias = nowhere({1, kHeads, 1, 1});
  step.gradient = nowhere({1, kHeads, 1, 1});
  step.gradient_bias = nowhere({1, kHeads, 1, 1});
  step.position = nowhere({1});
  step.position.dtype = DType::kI32;
  expect_refused(ErrorCode::kUnsupported, text, [&] { ttt_linear_step(Nowhere::context(), step); });
}

}  // namespace
}  // namespace fastweight::test
