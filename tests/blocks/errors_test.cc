// Malformed calls of every block, then unusual calls that are valid.
#include <gtest/gtest.h>

#include <limits>

#include "fastweight/fastweight.h"
#include "tests/blocks/grid.h"
#include "tests/malformed.h"

namespace fastweight::test {
namespace {

using Call = Subject<BlockCase>;
using Rows = std::vector<Malformed<BlockCase>>;
constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;
constexpr int64_t B = 2, T = 20, H = 2, HV = 4, K = 8, V = 6, C = 16;

BlockSpec small(Block block, Gate gate = Gate::kPerHead) {
  return with_batch(with_heads(spec_of(block, T, C, gate), H, HV, K, V), B);
}

TEST(BlockErrors, EveryView) {
  for (Block block : kBlocks) {
    for (Gate gate : {Gate::kPerHead, Gate::kPerChannel}) {
      const BlockSpec spec = small(block, gate);
      expect_every_view_is_checked<BlockCase>({spec, with_lengths(spec, {7, 0, 13})},
                                              {"x", "k", "v", "a", "j", "y", "da", "dj"});
    }
  }
}

TEST(BlockErrors, ChunkLocalCumsum) {
  const std::string apart = "memory apart from x, or another slice of its rows, got an overlap of their address ranges";
  expect_invalid(
      {small(Block::kChunkLocalCumsum)},
      Rows{
          {"chunks", "chunk_size: expected 16, 32 or 64, got 48", with_spec([](auto& spec) { spec.C = 48; })},
          {"no y", "y: expected a tensor, got none", absent("y")},
          {"rank", "y: expected shape [2, 20, 4], got [2, 20, 4, 16]", as_output("y", kF32, {B, T, HV, C})},
          {"strides",
           "y: expected strides that step over the axes with smaller ones, got shape [2, 20, 4] with strides [80, 2, "
           "3]",
           [](Call& c) {
             c["y"].strides = {80, 2, 3};
           }},
          {"y over x", "y: expected " + apart, over("y", "x")},
          {"no x", "x: expected a tensor, got none", absent("x")},
          {"flat", "x: expected rank 3 or 4, got shape [2, 20]", as_input("x", kF32, {B, T})},
          {"batch", "cu_seqlens: expected a batch of 1, got a batch of 2", as_integers("cu_seqlens", {0, 20})},
          {"name", "implementation: expected one of simd, reference, got \"chunk\"",
           [](Call& c) { c.context.implementation = "chunk"; }},
      });
}

TEST(BlockErrors, ScaledDotKkt) {
  expect_invalid(
      {small(Block::kScaledDotKkt)},
      Rows{
          {"no k", "k: expected a tensor, got none", absent("k")},
          {"heads", "k: expected a divisor of the 4 heads of a, got 3 heads", as_input("k", kF32, {B, T, 3, K}),
           kOnlyForward},
          {"wide", "k: head width K: expected a value from 1 to 256, got 257", as_input("k", kF32, {B, T, H, 257})},
          {"beta", "beta: expected shape [2, 20, 4], got [2, 20, 4, 8]", as_input("beta", kF32, {B, T, HV, K})},
          {"gamma", "gamma: expected shape [2, 20, 4, 8], got [2, 20, 4, 6]", as_input("gamma", kF32, {B, T, HV, V})},
          {"bf16", "a: expected type fp32, got bf16", as_output("a", kBF16, {B, T, HV, C}), kOnlyForward},
          {"chunks", "a: expected a last axis of 16, 32 or 64, got shape [2, 20, 4, 8]",
           as_output("a", kF32, {B, T, HV, K}), kOnlyForward},
          {"no beta", "dbeta: expected none without beta, got a tensor", absent("beta"), kOnlyBackward},
          {"no gamma", "dgamma: expected none without gamma, got a tensor", absent("gamma"), kOnlyBackward},
      });
}

TEST(BlockErrors, SolveTril) {
  expect_invalid({small(Block::kSolveTril)},
                 Rows{
                     {"integers", "a: expected a floating type, got int32", typed("a", DType::kI32), kOnlyForward},
                     {"chunks", "a: expected a last axis of 16, 32 or 64, got shape [2, 20, 4, 8]",
                      as_input("a", kF32, {B, T, HV, K}), kOnlyForward},
                     {"j", "j: expected shape [2, 20, 4, 16], got [2, 20, 4, 8]", as_output("j", kF32, {B, T, HV, K}),
                      kOnlyForward},
                     {"no dj", "dj: expected a tensor, got none", absent("dj"), kOnlyBackward},
                 });
  expect_invalid({with_lengths(small(Block::kSolveTril), {9, 0, 11})},
                 Rows{{"decreasing", "cu_seqlens: expected at least 9 at position 2, got 7",
                       as_integers("cu_seqlens", {0, 9, 7, 20})}});
}

TEST(BlockErrors, Wy) {
  expect_invalid(
      {small(Block::kWy)},
      Rows{
          {"v of bf16", "v: expected type fp32, got bf16", as_input("v", kBF16, {B, T, HV, V})},
          {"no j", "j: expected a tensor, got none", absent("j")},
          {"w", "w: expected shape [2, 20, 4, 8], got [2, 20, 4, 6]", as_output("w", kF32, {B, T, HV, V}),
           kOnlyForward},
          {"da", "da: expected shape [2, 20, 4, 16], got [2, 20, 4]", as_output("da", kF32, {B, T, HV}), kOnlyBackward},
      });
}

TEST(BlockErrors, L2Norm) {
  expect_invalid({small(Block::kL2Norm)},
                 Rows{
                     {"rank", "x: expected rank 2 to 5, got shape [2]", as_input("x", kF32, {B}), kOnlyForward},
                     {"empty rows", "x: expected at least one element per row, got shape [2, 0]",
                      as_input("x", kF32, {B, 0}), kOnlyForward},
                     {"rstd", "rstd: expected shape [2, 20, 2], got [2, 20, 4]", as_output("rstd", kF32, {B, T, HV}),
                      kOnlyForward},
                     {"no rstd", "rstd: expected a tensor, got none", absent("rstd"), kOnlyBackward},
                 });
  const Tensor x(kF32, {B, K});
  Tensor y = support::poisoned(kF32, {B, K});
  for (const auto& [eps, text] : {std::pair(0.0, "0"), std::pair(1e-39, "1e-39"), std::pair(1e-50, "1e-50")}) {
    try {
      l2norm_forward({}, {x.view(), eps, y.view(), {}});
      ADD_FAILURE() << "accepted eps " << text;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                std::string("eps: expected a finite number above 0 and normal in fp32 (at least 2^-126), got ") + text);
    }
  }
  for (double value : y.values()) EXPECT_TRUE(std::isnan(value));
}

TEST(BlockErrors, GateActivation) {
  const auto bounded = with_spec([](auto& spec) { spec.lower_bound = true; });
  expect_invalid(
      {small(Block::kGateActivation)},
      Rows{
          {"no a_log", "a_log: expected a tensor without lower_bound, got none", absent("a_log"), kOnlyForward},
          {"a_log", "a_log: expected shape [4], got [8]", as_input("a_log", kF32, {K})},
          {"dt_bias", "dt_bias: expected shape [4], got [4, 8]", as_input("dt_bias", kF32, {HV, K})},
          {"bound", "lower_bound: expected none without a gate per channel, got -5", bounded},
          {"chunks", "chunk_size: expected 16, 32 or 64, got 17", with_spec([](auto& spec) { spec.C = 17; })},
          {"no dg", "dg: expected a tensor, got none", absent("dg"), kOnlyBackward},
          {"no dt_bias", "ddt_bias: expected none without dt_bias, got a tensor", absent("dt_bias"), kOnlyBackward},
      });
  const Tensor x(kF32, {B, T, HV, K}), a_log(kF32, {HV});
  Tensor g = support::poisoned(kF32, {B, T, HV, K});
  GateActivationForward args{{x.view(), a_log.view(), {}, {}}, {}, g.view()};
  args.options.lower_bound = 1;
  try {
    gate_activation_forward({}, args);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "lower_bound: expected a finite number below 0, got 1");
  }
  for (double value : g.values()) ASSERT_TRUE(std::isnan(value));
}

TEST(BlockErrors, RmsNorm) {
  expect_invalid({small(Block::kRmsNorm)},
                 Rows{
                     {"no x", "x: expected a tensor, got none", absent("x")},
                     {"gate narrow", "gate: expected shape [2, 20, 2, 8], got [2, 20, 2, 7]", extent("gate", 3, 7)},
                     {"weight long", "weight: expected shape [8], got [9]", as_input("weight", kF32, {9})},
                     {"y of fp16", "y: expected type fp32, got fp16", typed("y", DType::kF16), kOnlyForward},
                     {"no dy", "dy: expected a tensor, got none", absent("dy"), kOnlyBackward},
                     {"no gate", "dgate: expected none without gate, got a tensor", absent("gate"), kOnlyBackward},
                     {"no weight", "dweight: expected none without weight", absent("weight"), kOnlyBackward},
                     {"y over gate", "y: expected memory apart from gate", in_memory_of("y", "gate"), kOnlyForward},
                     {"dx over x", "dx: expected memory apart from x", in_memory_of("dx", "x"), kOnlyBackward},
                 });
  const Tensor x(kF32, {3, 20});
  Tensor y = support::poisoned(kF32, {3, 20});
  for (const auto& [eps, activation, text] :
       {std::tuple(1e-39, NormGate::kSilu, "eps: expected a finite number above 0"),
        {-1e-5, NormGate::kSilu, "eps: expected a finite number above 0"},
        {1e-5, static_cast<NormGate>(7), "activation: expected silu (0) or sigmoid (1), got 7"}}) {
    try {
      rms_norm_forward({}, {{x.view(), {}, {}}, {eps, activation}, y.view()});
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }
  for (double value : y.values()) ASSERT_TRUE(std::isnan(value));
}

// Unusual and valid -------------------------------------------------------------------------------------------------

// y in the memory of x has the bits that it has elsewhere, whatever the width and the strides.
TEST(BlockValid, RmsNormInPlace) {
  for (DType dtype : {kF32, DType::kBF16, DType::kF64}) {
    for (int64_t width : {5, 128, 700}) {
      BlockSpec spec = with_heads(spec_of(Block::kRmsNorm, 30), 2, 2, width);
      spec.dtype = dtype;
      for (const std::string& name : implementations(Block::kRmsNorm, Mode::kForward)) {
        BlockCase problem = support::draw(spec, 12);
        const auto expected =
            unless_declined(Mode::kForward, name, [&] { return support::forward(problem, context_for(name)); });
        if (!expected) continue;
        BlockResults results = support::outputs_of(Mode::kForward, problem);
        const support::Call call = call_of(Mode::kForward, problem, results);
        call["y"] = call["x"];
        call.run(context_for(name));
        EXPECT_TRUE(support::same_bits(problem.x, expected->y)) << name << " " << describe(spec);
      }
    }
  }
}

// The smallest eps is one in fp32, too: a row of zeros stays one.
TEST(BlockValid, SmallestEps) {
  for (const std::string& name : implementations(Block::kL2Norm, Mode::kForward)) {
    const Tensor x(kF32, {3, 20});
    Tensor y = support::poisoned(kF32, {3, 20});
    l2norm_forward(context_for(name), {x.view(), std::numeric_limits<float>::min(), y.view(), {}});
    for (double value : y.values()) EXPECT_EQ(value, 0) << name;
  }
}

// Without eps rows have a norm of 1, and those of zeros are nowhere.
TEST(BlockValid, RmsNormWithoutEps) {
  for (const std::string& name : implementations(Block::kRmsNorm, Mode::kForward)) {
    Tensor x(kF32, {2, 20}), y = support::poisoned(kF32, {2, 20});
    for (int64_t i = 0; i < 20; ++i) x.set(i, i % 2 == 0 ? 3 : -3);
    RmsNormForward args{{x.view(), {}, {}}, {0.0, NormGate::kSilu}, y.view()};
    support::Call(rms_norm_forward, args).run(context_for(name));
    for (int64_t i = 0; i < 20; ++i) {
      EXPECT_NEAR(y[i], i % 2 == 0 ? 1 : -1, 1e-6) << name;
      EXPECT_TRUE(std::isnan(y[20 + i])) << name;
    }
  }
}

TEST(BlockValid, HugeEmptyBatchesCostNothing) {
  const int64_t kMany = int64_t{1} << 40;
  const TensorView none3 = TensorView::dense(static_cast<float*>(nullptr), {kMany, 0, 2});
  const TensorView none4 = TensorView::dense(static_cast<float*>(nullptr), {kMany, 0, 2, 16});
  for (const char* name : {"simd", "reference"}) {
    const Context context = context_for(name);
    EXPECT_EQ(chunk_local_cumsum(context, {none3, {}, 16, false, none3}), name);
    EXPECT_EQ(solve_tril_forward(context, {none4, {}, none4}), name);
    EXPECT_EQ(wy_forward(context, {{none4, none4, none3, {}, none4, {}}, none4, none4}), name);
    EXPECT_EQ(l2norm_forward(context, {none4, 1e-6, none4, none3}), name);
    // The sums over no tokens are 0.
    Tensor a_log(kF32, {2}), da_log = support::poisoned(kF32, {2});
    GateActivationBackward args;
    args.in.x = args.dg = none3;
    args.in.a_log = a_log.view();
    args.da_log = da_log.view();
    EXPECT_EQ(gate_activation_backward(context, args), name);
    EXPECT_EQ(da_log.values(), (std::vector<double>{0, 0}));
  }
}

// One gradient of W and U left out is one of zeros.
TEST(BlockValid, AbsentGradientsAreZero) {
  for (const std::string& name : implementations(Block::kWy, Mode::kBackward)) {
    const BlockCase problem = support::draw(spec_of(Block::kWy, 40, 16, Gate::kPerChannel), 1);
    for (Tensor BlockCase::*gradient : {&BlockCase::dw, &BlockCase::du}) {
      BlockCase zero = problem, without = problem;
      (zero.*gradient).fill(0);
      without.*gradient = {};
      expect_same_bits(support::backward(without, context_for(name)), support::backward(zero, context_for(name)));
    }
  }
}

}  // namespace
}  // namespace fastweight::test
