// What is special about the short convolution on a CUDA device: graphs, contents that the host cannot check, many
// sequences. The cases of tests/short_conv run on the device as well, see tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "support/random.h"
#include "tests/cuda/testing.h"
#include "tests/short_conv/cases.h"

namespace fastweight::test {
namespace {

using support::DeviceCopy;
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

// One capture serves any lengths that fit: the same bits as a call of its own, and nothing else written.
TEST(CudaShortConv, GraphReplaysWithOtherLengths) {
  constexpr int64_t kTokens = 90;
  ShortConvSpec spec = with_lengths(spec_of(0, 40), {30, 30, 15, 15});
  spec.dtype = DType::kBF16;
  const ShortConvCase problem = draw(spec, 1);
  const DeviceCopy x(problem.x, kCuda), w(problem.w, kCuda), bias(problem.bias, kCuda),
      residual(problem.residual, kCuda), initial_state(problem.initial_state, kCuda);
  DeviceCopy offsets(problem.cu_seqlens, kCuda), y(problem.x, kCuda), final_state(problem.initial_state, kCuda);
  const ShortConvForward args{{x.view(), w.view(), bias.view(), initial_state.view(), offsets.view()},
                              spec.options,
                              residual.view(),
                              y.view(),
                              final_state.view()};
  for (const std::string& name : implementations("forward")) {
    const DeviceStream stream;
    Context context = context_for(name);
    context.stream = stream.get();
    const DeviceGraph graph(stream, [&] { EXPECT_EQ(short_conv_forward(context, args), name); });
    for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
             {0, 30, 60, 75, 90}, {0, 0, 1, 89, 90}, {0, 16, 16, 16, 17}, {0, 0, 0, 0, 0}, {0, 3, 35, 67, 70}}) {
      const int64_t tokens = lengths.back();
      offsets.set(offsets_of(lengths));
      poison(y);
      poison(final_state);
      graph.launch(stream);
      stream.wait();
      const Tensor all = y.get();
      for (double value : slice(all, 1, tokens, kTokens).values()) ASSERT_TRUE(std::isnan(value)) << name;

      ShortConvCase same = problem;
      same.spec.T = tokens;
      same.spec.cu_seqlens = lengths;
      same.cu_seqlens = offsets_of(lengths);
      for (Tensor* tensor : {&same.x, &same.residual}) *tensor = slice(*tensor, 1, 0, tokens);
      const ShortConvResults expected = support::forward(same, context_for(name));
      EXPECT_TRUE(support::same_bits(slice(all, 1, 0, tokens), expected.y)) << name << ", " << tokens << " tokens";
      EXPECT_TRUE(support::same_bits(final_state.get(), expected.final_state)) << name << ", " << tokens << " tokens";
    }
  }
}

// Each replay of a captured step advances the states once more.
TEST(CudaShortConv, StepInAGraph) {
  constexpr int kReplays = 6;
  ShortConvSpec spec = spec_of(1, 300);
  spec.B = 3;
  spec.dtype = DType::kBF16;
  const ShortConvCase problem = draw(spec, 2);
  for (const std::string& name : implementations("step")) {
    ShortConvCase eager = problem;
    ShortConvResults expected;
    for (int i = 0; i < kReplays; ++i) {
      expected = support::step(eager, context_for(name));
      eager.initial_state = expected.final_state;
    }
    const DeviceCopy x(problem.x, kCuda), w(problem.w, kCuda), bias(problem.bias, kCuda),
        residual(problem.residual, kCuda), state(problem.initial_state, kCuda), y(problem.x, kCuda);
    const ShortConvStep args{
        {x.view(), w.view(), bias.view(), {}, {}}, spec.options, residual.view(), state.view(), {}, y.view()};
    const DeviceStream stream;
    Context context = context_for(name);
    context.stream = stream.get();
    const DeviceGraph graph(stream, [&] { short_conv_step(context, args); });
    for (int i = 0; i < kReplays; ++i) graph.launch(stream);
    stream.wait();
    EXPECT_TRUE(support::same_bits(state.get(), expected.final_state)) << name;
    EXPECT_TRUE(support::same_bits(y.get(), expected.y)) << name;
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
      const auto tokens = [&](int64_t begin, int64_t end) {
        ShortConvCase part = problem;
        part.spec.T = end - begin;
        for (Tensor* tensor : {&part.x, &part.residual}) *tensor = slice(*tensor, 1, begin, end);
        return part;
      };
      const Context context = context_for("direct");
      const ShortConvResults whole = support::forward(problem, context);
      Tensor state = support::forward(tokens(0, 17), context).final_state;
      for (int64_t t = 17; t < 24; ++t) {
        ShortConvCase token = tokens(t, t + 1);
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

// What the host cannot refuse touches nothing outside the tensors: support::run looks at the memory around them.
TEST(CudaShortConv, MalformedOffsetsStayInside) {
  const ShortConvCase drawn = draw(with_lengths(spec_of(0, 20), {20, 20, 29}), 6);
  for (const std::vector<int64_t>& offsets : std::vector<std::vector<int64_t>>{
           {0, 200, 10, 69}, {-5, -1, 30, 1000000}, {60, 50, 40, 30}, {0, 69, 0, 69}, {int64_t{1} << 40, 0, 1, 2}}) {
    ShortConvCase problem = drawn;
    problem.cu_seqlens = offsets_of(offsets);
    for (const std::string& name : implementations("forward")) {
      EXPECT_NO_THROW(support::forward(problem, context_for(name))) << name;
      EXPECT_NO_THROW(support::step(problem, context_for(name))) << name;
      EXPECT_NO_THROW(support::backward(problem, context_for(name))) << name;
    }
  }
}

TEST(CudaShortConv, SlotsThatDoNotExistAreSkipped) {
  ShortConvSpec spec = spec_of(2, 20);
  spec.B = 4;
  const ShortConvCase problem = draw(spec, 7);
  const Tensor indices(DType::kI64, {4}, std::vector<double>{3, 4, -7, 0});
  for (const std::string& name : implementations("step")) {
    Tensor state = problem.initial_state, y = support::poisoned(DType::kF32, problem.x.shape());
    ShortConvStep args;
    args.in = problem.inputs();
    args.in.initial_state = {};
    args.options = spec.options;
    args.state = state.view();
    args.state_indices = indices.view();
    args.y = y.view();
    support::run(context_for(name), args);
    expect_skipped({1, 2}, {0, 3}, y, state, problem.initial_state, name);
  }
}

TEST(CudaShortConvErrors, WhatIsNotThere) {
  const ShortConvCase problem = draw(spec_of(5, 8), 8);
  const auto expect_refused = [](const auto& run, ErrorCode code, const std::string& text) {
    try {
      run();
      ADD_FAILURE() << "accepted; expected: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  expect_refused([&] { support::forward(support::in_double(problem), context_for("")); }, ErrorCode::kUnsupported,
                 "fp64");
  expect_refused([&] { support::forward(problem, context_for("reference")); }, ErrorCode::kInvalidArgument,
                 "implementation: expected one of");
  ShortConvForward args;
  Tensor y = problem.x;
  args.in = problem.inputs();
  args.y = y.view();
  for (TensorView* view : {&args.in.x, &args.in.w, &args.in.bias, &args.in.initial_state, &args.y}) {
    view->device = kCuda;
  }
  expect_refused([&] { short_conv_forward(context_for(""), args); }, ErrorCode::kInvalidArgument,
                 "x: expected a pointer into memory of cuda:0, got plain host memory");
}

}  // namespace
}  // namespace fastweight::test
