// Every implementation of every mode against the reference in double.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/short_conv/cases.h"

namespace fastweight::test {
namespace {

using support::draw;

// The definition once more, for one sequence, with the inputs before its start in front.
TEST(ShortConv, ReferenceIsTheDefinition) {
  const ShortConvCase problem = support::in_double(draw(spec_of(9, 3, 4), 1));
  const ShortConvResults results = support::forward(problem, reference_context());
  const int64_t T = 9, D = 3, W = 4;
  for (int64_t d = 0; d < D; ++d) {
    std::vector<double> line;
    for (int64_t c = 0; c < W; ++c) line.push_back(problem.initial_state[d * W + c]);
    for (int64_t t = 0; t < T; ++t) line.push_back(problem.x[t * D + d]);
    for (int64_t t = 0; t < T; ++t) {
      double z = problem.bias[d];
      for (int64_t i = 0; i < W; ++i) z += problem.w[d * W + i] * line[static_cast<size_t>(t + 1 + i)];
      EXPECT_NEAR(results.y[t * D + d], z / (1 + std::exp(-z)) + problem.residual[t * D + d], 1e-14);
    }
    for (int64_t c = 0; c < W; ++c) {
      EXPECT_EQ(results.final_state[d * W + c], line[line.size() - static_cast<size_t>(W - c)]);
    }
  }
}

TEST(ShortConv, Lengths) {
  for (int64_t T : first<int64_t>({5, 0, 1, 257, 2, 3, 4, 15, 16, 64, 255, 256, 511, 513, 600}, 4)) {
    ShortConvSpec spec = spec_of(T, 21);
    spec.B = 2;
    check(draw(spec, 21));
  }
}

TEST(ShortConv, ChannelsAndWidths) {
  for (int64_t D : first<int64_t>({33, 1, 7, 8, 16, 64, 511, 512, 513, 1100}, 3)) check(draw(spec_of(17, D), 22));
  for (int64_t W : first<int64_t>({3, 1, 2, 5, 7, 8, 16}, 3)) {
    for (int64_t T : {1, 2, 9, 300}) check(draw(spec_of(T, 19, W), 23));
  }
}

TEST(ShortConv, Options) {
  for (Activation activation : {Activation::kNone, Activation::kSilu}) {
    for (int variant = 0; variant < 8; ++variant) {
      ShortConvSpec spec = spec_of(37, 19, 4, activation);
      spec.bias = variant & 1;
      spec.residual = variant & 2;
      spec.initial_state = variant & 4;
      check(draw(spec, 24));
    }
  }
}

TEST(ShortConv, VariableLengths) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{{5, 0, 64, 1, 33},
                                                                               {0, 0},
                                                                               {0, 300, 0},
                                                                               {1, 1, 1, 1},
                                                                               {2, 3, 4, 5, 260},
                                                                               {256, 512, 1},
                                                                               std::vector<int64_t>(600, 1)}) {
    check(draw(with_lengths(spec_of(0, 20), lengths), 25));
    check(draw(with_lengths(spec_of(0, 9, 3), lengths), 26));
  }
}

TEST(ShortConv, Types) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF64, DType::kF32}) {
    for (DType parameter_dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      ShortConvSpec spec = spec_of(67, 37);
      spec.dtype = dtype;
      spec.parameter_dtype = parameter_dtype;
      check(draw(spec, 27));
      check(draw(with_lengths(spec, {5, 0, 64, 1, 33}), 27));
    }
  }
}

TEST(ShortConv, MixedStates) {
  for (DType state_dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    ShortConvSpec spec = spec_of(2, 20);
    spec.bias = false;
    const ShortConvCase drawn = draw(spec, 28);
    ShortConvCase problem = drawn;
    problem.initial_state = problem.initial_state.to(state_dtype);
    problem.d_final_state = problem.d_final_state.to(state_dtype);
    const ShortConvCase exact = support::in_double(problem);
    for (const std::string mode : {"forward", "backward"}) {
      const ShortConvResults expected = run(mode, exact, reference_context());
      for (const std::string& name : implementations(mode)) {
        const auto results = unless_declined(mode, name, [&] { return run(mode, problem, context_for(name)); });
        if (results) expect_close(problem, *results, expected);
      }
    }
  }
}

// Outputs and states in fp32 for 16-bit inputs.
TEST(ShortConv, WideOutputs) {
  ShortConvSpec spec = spec_of(70, 20);
  spec.dtype = spec.parameter_dtype = DType::kBF16;
  const ShortConvCase problem = draw(spec, 30);
  for_each_implementation([&](const std::string& mode, const std::string& name) {
    if (mode == "step") return;
    const ShortConvResults expected = run(mode, support::in_double(problem), reference_context());
    ShortConvResults wide = outputs_of(mode, problem);
    for (Tensor* x : {&wide.y, &wide.final_state, &wide.dx, &wide.dw, &wide.dbias, &wide.d_initial_state}) {
      if (x->present()) *x = x->to(DType::kF32);
    }
    const auto results = unless_declined(
        mode, name, [&] { return run_strided(mode, problem, context_for(name), Layout::kDense, wide); });
    if (results) expect_close(problem, *results, expected);
  });
}

TEST(ShortConv, StridedTensors) {
  for (Layout layout : kLayouts) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t W : {4, 3}) {
        ShortConvSpec spec = spec_of(69, 20, W);
        spec.B = 2;
        spec.dtype = dtype;
        check(draw(spec, 31), layout);
      }
    }
  }
}

TEST(ShortConv, BroadcastInput) {
  ShortConvCase problem = draw(spec_of(40, 20), 32);
  for (size_t axis : {size_t{1}, size_t{2}}) {
    ShortConvForward args;
    args.in = problem.inputs();
    args.options = problem.spec.options;
    args.in.x.strides[axis] = 0;
    ShortConvCase repeated = problem;
    for (int64_t i = 0; i < repeated.x.size(); ++i) repeated.x.set(i, problem.x[axis == 1 ? i % 20 : i / 20 * 20]);
    for (const std::string& name : implementations("forward")) {
      ShortConvCase plain = repeated;
      plain.residual = {};
      const ShortConvResults expected = support::forward(plain, context_for(name));
      Tensor y(DType::kF32, problem.x.shape());
      args.y = y.view();
      support::run(context_for(name), args);
      EXPECT_TRUE(support::same_bits(y, expected.y)) << name << ", axis " << axis;
    }
  }
}

TEST(ShortConv, EachGradientAlone) {
  ShortConvSpec spec = spec_of(300, 20);
  spec.B = 2;
  const ShortConvCase problem = draw(spec, 33);
  const struct {
    const char* name;
    Tensor ShortConvResults::*result;
    TensorView ShortConvBackward::*argument;
  } gradients[] = {
      {"dx", &ShortConvResults::dx, &ShortConvBackward::dx},
      {"dw", &ShortConvResults::dw, &ShortConvBackward::dw},
      {"dbias", &ShortConvResults::dbias, &ShortConvBackward::dbias},
      {"d_initial_state", &ShortConvResults::d_initial_state, &ShortConvBackward::d_initial_state},
  };
  for (const std::string& name : implementations("backward")) {
    const ShortConvResults all = support::backward(problem, context_for(name));
    for (const auto& [gradient, result, argument] : gradients) {
      const Tensor& expected = all.*result;
      Tensor alone(expected.dtype(), expected.shape());
      ShortConvBackward args = support::backward_args(problem, {});
      args.*argument = alone.view();
      support::run(context_for(name), args);
      EXPECT_TRUE(support::same_bits(alone, expected)) << name << " " << gradient;
    }
  }
}

TEST(ShortConv, AbsentOutputGradients) {
  for (int variant = 0; variant < 4; ++variant) {
    ShortConvCase problem = draw(spec_of(variant < 2 ? 70 : 3, 20), 34);
    if (variant & 1) problem.dy = {};
    if (variant & 2) problem.d_final_state = {};
    check(problem);
  }
}

TEST(ShortConv, LargeInputs) {
  ShortConvCase problem = draw(spec_of(20, 16), 35);
  for (int64_t i = 0; i < problem.x.size(); ++i) problem.x.set(i, problem.x[i] * 200);
  check(problem);
}

// Decoding ----------------------------------------------------------------------------------------------------------

TEST(ShortConvStep, SlotsAndSkippedSequences) {
  for (const std::string& name : implementations("step")) {
    ShortConvSpec spec = spec_of(3, 20);
    spec.B = 3;
    spec.residual = false;
    const ShortConvCase problem = draw(spec, 41);
    const ShortConvResults expected = support::step(problem, context_for(name));
    Tensor state(DType::kF32, {5, 20, 4}), y(DType::kF32, problem.x.shape());
    state.fill(7);
    const int64_t state_size = 80, y_size = 60;
    for (int64_t i = 0; i < state_size; ++i) {
      state.set(4 * state_size + i, problem.initial_state[i]);
      state.set(i, problem.initial_state[2 * state_size + i]);
    }
    const Tensor indices(DType::kI32, {3}, std::vector<double>{4, -1, 0});
    ShortConvStep args;
    args.in = problem.inputs();
    args.in.initial_state = {};
    args.options = spec.options;
    args.state = state.view();
    args.state_indices = indices.view();
    args.y = y.view();
    support::run(context_for(name), args);
    for (int64_t i = 0; i < y_size; ++i) {
      EXPECT_EQ(y[i], expected.y[i]) << name;
      EXPECT_EQ(y[y_size + i], 0) << name;
      EXPECT_EQ(y[2 * y_size + i], expected.y[2 * y_size + i]) << name;
    }
    for (int64_t i = 0; i < state_size; ++i) {
      EXPECT_EQ(state[4 * state_size + i], expected.final_state[i]) << name;
      EXPECT_EQ(state[i], expected.final_state[2 * state_size + i]) << name;
      for (int64_t slot : {1, 2, 3}) EXPECT_EQ(state[slot * state_size + i], 7) << name;
    }
  }
}

// The same bits ------------------------------------------------------------------------------------------------------

// Two runs, any number of threads, which on a device means: again.
TEST(ShortConvContract, RunsAndThreads) {
  const bool on_cpu = device().type == DeviceType::kCpu;
  ShortConvSpec spec = reduced() ? spec_of(270, 530) : spec_of(700, 1100);
  spec.B = 2;
  for (const ShortConvSpec& one : {spec, with_lengths(spec, first<int64_t>({300, 0, 1, 2, 513, 2, 2}, 4))}) {
    const ShortConvCase problem = draw(one, 51);
    for_each_implementation([&](const std::string& mode, const std::string& name) {
      const ShortConvResults expected = run(mode, problem, context_for(name, 1));
      for (int threads : on_cpu ? first<int>({5, 1, 2}, 1) : std::vector{1}) {
        expect_same_bits(run(mode, problem, context_for(name, threads)), expected, mode);
      }
    });
  }
}

// A sequence alone, in a batch, packed.
TEST(ShortConvContract, Batch) {
  ShortConvSpec spec = spec_of(270, 20);
  spec.B = 3;
  const ShortConvCase batch = draw(spec, 52);
  ShortConvCase packed = batch;
  packed.spec = with_lengths(spec, {270, 270, 270});
  packed.cu_seqlens = Tensor(DType::kI64, {4}, std::vector<double>{0, 270, 540, 810});
  for (Tensor* x : {&packed.x, &packed.residual, &packed.dy}) *x = Tensor(DType::kF32, {1, 810, 20}, x->values());
  for_each_implementation([&](const std::string& mode, const std::string& name) {
    const ShortConvResults whole = run(mode, batch, context_for(name)), lines = run(mode, packed, context_for(name));
    for (int64_t n = 0; n < 3; ++n) {
      ShortConvCase one = batch;
      one.spec.B = 1;
      for (Tensor* x : {&one.x, &one.residual, &one.dy, &one.initial_state, &one.d_final_state}) {
        *x = slice(*x, 0, n, n + 1);
      }
      ShortConvResults alone = run(mode, one, context_for(name)), part = whole, line = lines;
      for (Tensor* x :
           {&part.y, &part.dx, &part.final_state, &part.d_initial_state, &line.final_state, &line.d_initial_state}) {
        *x = slice(*x, 0, n, n + 1);
      }
      for (Tensor* x : {&line.y, &line.dx}) *x = slice(*x, 1, 270 * n, 270 * (n + 1));
      for (ShortConvResults* r : {&alone, &part, &line}) r->dw = r->dbias = {};  // sums over sequences
      expect_same_bits(part, alone, mode);
      expect_same_bits(line, alone, mode);
    }
  });
}

// Cut anywhere with the state carried over in the type that the implementation computes in, forward, backward and token
// by token.
void check_cuts(const std::string& name, const ShortConvCase& whole) {
  const Context context = context_for(name);
  const std::vector<std::string> backwards = implementations("backward");
  const bool has_backward = std::ranges::find(backwards, name) != backwards.end();
  for (int64_t cut : {0, 1, 2, 3, 4, 100, 256, 299, 300}) {
    ShortConvCase head = whole, tail = whole;
    head.spec.T = cut;
    tail.spec.T = 300 - cut;
    for (Tensor ShortConvCase::*x : {&ShortConvCase::x, &ShortConvCase::residual, &ShortConvCase::dy}) {
      head.*x = slice(whole.*x, 1, 0, cut);
      tail.*x = slice(whole.*x, 1, cut, 300);
    }
    for (const std::string mode : {"forward", "step"}) {
      const ShortConvResults expected = support::forward(whole, context), begin = run(mode, head, context);
      tail.initial_state = begin.final_state;
      const ShortConvResults end = run(mode, tail, context);
      EXPECT_TRUE(support::same_bits(begin.y, slice(expected.y, 1, 0, cut))) << name << " " << cut;
      EXPECT_TRUE(support::same_bits(end.y, slice(expected.y, 1, cut, 300))) << name << " " << cut;
      EXPECT_TRUE(support::same_bits(end.final_state, expected.final_state)) << name << " " << cut;
    }
    if (!has_backward) continue;
    const ShortConvResults expected = support::backward(whole, context), end = support::backward(tail, context);
    head.d_final_state = end.d_initial_state;
    const ShortConvResults begin = support::backward(head, context);
    EXPECT_TRUE(support::same_bits(begin.dx, slice(expected.dx, 1, 0, cut))) << name << " " << cut;
    EXPECT_TRUE(support::same_bits(end.dx, slice(expected.dx, 1, cut, 300))) << name << " " << cut;
    EXPECT_TRUE(support::same_bits(begin.d_initial_state, expected.d_initial_state)) << name << " " << cut;
  }
}

TEST(ShortConvContract, Cut) {
  const ShortConvCase problem = draw(spec_of(300, 20), 53);
  for (const std::string& name : implementations("forward")) {
    check_cuts(name, name == "reference" ? support::in_double(problem) : problem);
  }
}

// Random problems ---------------------------------------------------------------------------------------------------

// FASTWEIGHT_TEST_SEED=<number> runs the one problem of that number; FASTWEIGHT_TEST_COUNT=<number> runs that many.
TEST(ShortConvRandom, Problems) {
  for_each_seed(reduced() ? 20 : 200, [](uint64_t seed) {
    Dice dice(seed);
    ShortConvSpec spec = spec_of(dice.between(0, 30), dice.between(1, 70), dice.chance(50) ? 4 : dice.between(1, 16));
    if (dice.chance(20)) spec.T = dice.between(200, 600);
    if (dice.chance(40)) {
      std::vector<int64_t> lengths;
      for (int64_t n = dice.between(1, 6); n > 0; --n) lengths.push_back(dice.chance(20) ? 0 : dice.between(1, 40));
      spec = with_lengths(spec, lengths);
    } else {
      spec.B = dice.between(1, 3);
    }
    spec.options.activation = dice.pick({Activation::kNone, Activation::kSilu});
    spec.dtype = dice.pick({DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64});
    spec.parameter_dtype = dice.pick({DType::kF32, DType::kF32, spec.dtype, DType::kBF16});
    spec.bias = dice.chance(50);
    spec.residual = dice.chance(50);
    spec.initial_state = dice.chance(60);
    const Layout layout = dice.pick({Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed});
    SCOPED_TRACE("FASTWEIGHT_TEST_SEED=" + std::to_string(seed));
    check(draw(spec, seed), layout);
  });
}

}  // namespace
}  // namespace fastweight::test
