// What is special about the short convolution on a CUDA device: graphs, contents that the host cannot check, many
// sequences. The cases of tests/short_conv run on the device as well, see tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "support/random.h"
#include "tests/cuda/testing.h"
#include "tests/short_conv/grid.h"

namespace fastweight::test {
namespace {

using support::DeviceGraph;
using support::DeviceStream;
using support::draw;

// An input that is not a number reaches its own output and the W - 1 after it, through either activation.
TEST(CudaShortConv, WhatIsNotANumberStays) {
  for (Activation activation : {Activation::kNone, Activation::kSilu}) {
    for (int64_t W : {4, 7}) {
      const ShortConvSpec spec = spec_of(20, 6, W, activation);
      ShortConvCase problem = draw(spec, 2);
      const int64_t token = 5;
      for (int64_t c = 0; c < spec.D; ++c) problem.x.set(token * spec.D + c, std::nan(""));
      const Tensor y = support::forward(problem, context_for("direct")).y;
      for (int64_t t = 0; t < spec.T; ++t) {
        for (double value : slice(y, 1, t, t + 1).values()) {
          EXPECT_EQ(std::isnan(value), t >= token && t < token + W) << "token " << t << ", " << describe(spec);
        }
      }
    }
  }
}

TEST(CudaShortConv, GraphReplaysWithOtherLengths) {
  ShortConvSpec spec = with_lengths(spec_of(0, 40), {30, 30, 15, 15});
  spec.dtype = DType::kBF16;
  expect_replays_with_other_lengths(
      Mode::kForward, draw(spec, 1),
      {{0, 30, 60, 75, 90}, {0, 0, 1, 89, 90}, {0, 16, 16, 16, 17}, {0, 0, 0, 0, 0}, {0, 3, 35, 67, 70}});
}

// Each replay of a captured step advances the states once more.
TEST(CudaShortConv, StepInAGraph) {
  constexpr int kReplays = 6;
  ShortConvSpec spec = spec_of(1, 300);
  spec.B = 3;
  spec.dtype = DType::kBF16;
  const ShortConvCase problem = draw(spec, 2);
  for (const std::string& name : implementations(Mode::kStep)) {
    ShortConvCase eager = problem;
    ShortConvResults expected;
    for (int i = 0; i < kReplays; ++i) {
      expected = support::step(eager, context_for(name));
      eager.initial_state = expected.final_state;
    }
    const ShortConvResults outputs = outputs_of(Mode::kStep, problem);
    const CallOnDevice call(call_of(Mode::kStep, problem, outputs));
    const DeviceStream stream;
    Context context = context_for(name);
    context.stream = stream.get();
    const DeviceGraph graph(stream, [&] { call.enqueue(context); });
    for (int i = 0; i < kReplays; ++i) graph.launch(stream);
    stream.wait();
    expect_same_bits(call.results<ShortConvResults>(), expected, name);
  }
}

// A prefill, then a step per token: the same bits as all tokens at once.
TEST(CudaShortConv, SameBitsByStepsAfterAPrefill) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t W : {4, 3, 7}) {
      ShortConvSpec spec = spec_of(24, 20, W);
      spec.B = 2;
      spec.dtype = dtype;
      const ShortConvCase problem = draw(spec, 3);
      const Context context = context_for("direct");
      const ShortConvResults whole = support::forward(problem, context);
      Tensor state = support::forward(slice_tokens(problem, 0, 17), context).final_state;
      for (int64_t t = 17; t < 24; ++t) {
        ShortConvCase token = slice_tokens(problem, t, t + 1);
        token.initial_state = state;
        const ShortConvResults results = support::step(token, context);
        state = results.final_state;
        EXPECT_TRUE(support::same_bits(results.y, slice(whole.y, 1, t, t + 1))) << "token " << t << " W=" << W;
      }
      EXPECT_TRUE(support::same_bits(state, whole.final_state)) << "W=" << W;
    }
  }
}

// An input more than W tokens back reaches no output, whatever it is.
TEST(CudaShortConv, WindowEnds) {
  for (int64_t W : {1, 3, 4, 5, 9, 16}) {
    ShortConvCase problem = draw(spec_of(40, 8, W), 4);
    for (int64_t d = 0; d < 8; ++d) problem.x.set(2 * 8 + d, std::numeric_limits<double>::infinity());
    const Tensor y = support::forward(problem, context_for("direct")).y;
    for (int64_t t = 0; t < 40; ++t) {
      const bool reached = t >= 2 && t < 2 + W;
      for (int64_t d = 0; d < 8; ++d) EXPECT_EQ(!std::isfinite(y[t * 8 + d]), reached) << "W=" << W << " token " << t;
    }
  }
}

TEST(CudaShortConv, ThousandsOfSequences) {
  Dice dice(5);
  std::vector<int64_t> lengths;
  for (int n = 0; n < 3000; ++n) lengths.push_back(dice.chance(30) ? 0 : dice.chance(5) ? 40 : dice.between(1, 4));
  check(draw(with_lengths(spec_of(0, 6), lengths), 5));
}

// Along two of its dimensions a grid ends at 65535 blocks.
TEST(CudaShortConv, MoreThan65535SequencesOrChannels) {
  ShortConvSpec sequences = spec_of(1, 2);
  sequences.B = 66000;
  check(draw(sequences, 9));
  if (reduced()) return;
  check(draw(with_lengths(spec_of(0, 2), std::vector<int64_t>(66000, 1)), 10));
  check(draw(spec_of(1, 66000), 11));
}

TEST(CudaShortConv, MalformedOffsetsStayInside) {
  expect_malformed_offsets_stay_inside(draw(with_lengths(spec_of(0, 20), {20, 20, 29}), 6));
}

TEST(CudaShortConv, SlotsThatDoNotExistAreSkipped) {
  ShortConvSpec spec = spec_of(2, 20);
  spec.B = 4;
  const ShortConvCase problem = draw(spec, 7);
  const Tensor indices(DType::kI64, {4}, std::vector<double>{3, 4, -7, 0});
  for (const std::string& name : implementations(Mode::kStep)) {
    const ShortConvResults after = outputs_of(Mode::kStep, problem);
    const support::Call call = call_of(Mode::kStep, problem, after);
    call["state_indices"] = indices.view();
    call.run(context_for(name));
    expect_skipped({1, 2}, {0, 3}, after.y, after.final_state, problem.initial_state, name);
  }
}

TEST(CudaShortConvErrors, WhatIsNotThere) {
  const ShortConvCase problem = draw(spec_of(5, 8), 8);
  expect_refused(ErrorCode::kUnsupported, "fp64",
                 [&] { support::forward(support::in_double(problem), context_for("")); });
  expect_refused(ErrorCode::kInvalidArgument, "implementation: expected one of",
                 [&] { support::forward(problem, context_for("reference")); });
  ShortConvForward args;
  Tensor y = problem.x;
  args.in = problem.inputs();
  args.y = y.view();
  for (TensorView* view : {&args.in.x, &args.in.w, &args.in.bias, &args.in.initial_state, &args.y}) {
    view->device = kCuda;
  }
  expect_refused(ErrorCode::kInvalidArgument, "x: expected a pointer into memory of cuda:0, got plain host memory",
                 [&] { short_conv_forward(context_for(""), args); });
}

}  // namespace
}  // namespace fastweight::test
