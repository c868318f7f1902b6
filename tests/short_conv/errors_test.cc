// Every kind of malformed call, for the three modes, then the unusual calls that are valid.
#include <gtest/gtest.h>

#include "tests/malformed.h"
#include "tests/short_conv/grid.h"

namespace fastweight::test {
namespace {

using Call = Subject<ShortConvCase>;
using Rows = std::vector<Malformed<ShortConvCase>>;
constexpr DType kF32 = DType::kF32, kF64 = DType::kF64, kBF16 = DType::kBF16;
constexpr int64_t B = 2, T = 5, N = 2, D = 6, W = 4;

ShortConvSpec dense() { return with_batch(spec_of(T, D, W, Activation::kNone), B); }
ShortConvSpec packed() { return with_lengths(dense(), {4, 0, 6}); }

TEST(ShortConvErrors, EveryView) { expect_every_view_is_checked<ShortConvCase>({dense(), packed()}, {"x", "w"}); }
TEST(ShortConvErrors, Contexts) { expect_invalid({dense()}, malformed_contexts<ShortConvCase>("x")); }
TEST(ShortConvErrors, Slots) { expect_invalid({dense()}, malformed_slots<ShortConvCase>()); }

TEST(ShortConvErrors, Sequences) {
  expect_invalid({dense()}, Rows{{"batch of 2", "cu_seqlens", as_integers("cu_seqlens", {0, 2, 5})}});
  expect_invalid({packed()}, malformed_sequences<ShortConvCase>());
}

TEST(ShortConvErrors, Inputs) {
  const std::string state = "initial_state";
  expect_invalid({dense()},
                 Rows{
                     {"x absent", "x", absent("x")},
                     {"w absent", "w", absent("w")},
                     {"no channels", "x", as_input("x", kF32, {B, T, 0})},
                     {"w of another count", "w: expected shape [6, 4], got [7, 4]", as_input("w", kF32, {D + 1, W})},
                     {"w transposed", "w", as_input("w", kF32, {W, D})},
                     {"w of rank 3", "w", as_input("w", kF32, {D, 1, W})},
                     {"W of 0", "w", as_input("w", kF32, {D, 0})},
                     {"W of 17", "w", as_input("w", kF32, {D, 17})},
                     {"bias of another count", "bias", as_input("bias", kF32, {D + 1})},
                     {"initial state of another count", state, as_input(state, kF32, {N + 1, D, W}), kWithInitialState},
                     {"initial state of another width", state, as_input(state, kF32, {N, D, W - 1}), kWithInitialState},
                     {"initial state in a step", state, as_input(state, kF32, {N, D, W}), kOnlyStep},
                     {"scratch memory beyond 64 bits", "x",
                      [](Call& c) {
                        c["x"].shape[0] = int64_t{1} << 50;
                        c["x"].strides[0] = 0;
                      }},
                     {"activation unknown", "activation",
                      with_spec([](ShortConvSpec& spec) { spec.options.activation = static_cast<Activation>(2); })},
                 });
}

TEST(ShortConvErrors, Outputs) {
  expect_invalid(
      {dense()},
      Rows{
          {"y absent", "y", absent("y"), kWithOutput},
          {"y of fp64", "y", as_output("y", kF64, {B, T, D}), kWithOutput},
          {"y of bf16", "y", as_output("y", kBF16, {B, T, D}), kWithOutput},
          {"y of another shape", "y", as_output("y", kF32, {B, T, D + 1}), kWithOutput},
          {"y broadcast", "y", strided("y", 1, 0), kWithOutput},
          {"y over x", "y", over("y", "x"), kWithOutput},
          {"residual of another shape", "residual", as_input("residual", kF32, {B, T - 1, D}), kWithOutput},
          {"final state over the initial state", "final_state", over("final_state", "initial_state"), kOnlyForward},
          {"final state of bf16", "final_state", as_output("final_state", kBF16, {N, D, W}), kOnlyForward},
          {"dy of another shape", "dy", as_input("dy", kF32, {B, T, D + 1}), kOnlyBackward},
          {"dy of bf16", "dy", as_input("dy", kBF16, {B, T, D}), kOnlyBackward},
          {"d_final_state of another count", "d_final_state", as_input("d_final_state", kF32, {N + 1, D, W}),
           kOnlyBackward},
          {"dx of bf16", "dx", as_output("dx", kBF16, {B, T, D}), kOnlyBackward},
          {"dx over dy", "dx", over("dx", "dy"), kOnlyBackward},
          {"dw of another shape", "dw", as_output("dw", kF32, {D, W + 1}), kOnlyBackward},
          {"dbias without bias", "dbias", absent("bias"), kOnlyBackward},
          {"d_initial_state without initial_state", "d_initial_state", absent("initial_state"), kOnlyBackward},
          {"state absent", "state", absent("state"), kOnlyStep},
          {"state of bf16", "state", as_output("state", kBF16, {5, D, W}), kOnlyStep},
      });
}

TEST(ShortConvErrors, OutOfMemory) { expect_out_of_memory<ShortConvCase>(dense()); }
TEST(ShortConvErrors, CudaDevice) { expect_no_cuda_memory<ShortConvCase>(packed()); }

TEST(ShortConvErrors, Fp64RunsOnTheReferenceOnly) {
  for (Mode mode : kModes) {
    ShortConvSpec spec = dense();
    spec.set_types(kF64);
    Call call(mode, spec);
    EXPECT_EQ(call.run(), "reference");
    call.context.implementation = "direct";
    expect_refused(call, ErrorCode::kUnsupported);
  }
}

// Unusual and valid -------------------------------------------------------------------------------------------------

TEST(ShortConvValid, Unchanged) {
  for (const ShortConvSpec& spec : {dense(), packed()}) {
    for (Mode mode : kModes) EXPECT_EQ(Call(mode, spec).run(), "direct");
  }
}

TEST(ShortConvValid, FewestTensors) {
  expect_valid<ShortConvCase>("fewest tensors", {dense()}, [](Call& c) {
    for (const support::NamedView& named : c.call->views()) {
      const std::string name = named.name;
      if (name != "x" && name != "w" && name != "y" && !name.starts_with("state")) *named.view = {};
    }
  });
}

TEST(ShortConvValid, NothingToDo) {
  for (const int64_t batch : {int64_t{0}, int64_t{1} << 40}) {
    Call call(Mode::kBackward, dense());
    for (const char* name : {"initial_state", "d_final_state", "d_initial_state", "dy", "dx"}) call[name] = {};
    call["x"].shape = {batch, 0, D};
    EXPECT_NO_THROW(call.run());
    for (const Tensor* sum : {&call.outputs.dw, &call.outputs.dbias}) {
      for (double value : sum->values()) EXPECT_EQ(value, 0);
    }
  }
  Call step(Mode::kStep, dense());
  for (const char* name : {"x", "residual", "y"}) step[name].shape[1] = 0;
  const auto before = step.written();
  EXPECT_NO_THROW(step.run());
  EXPECT_TRUE(step.written() == before);
}

TEST(ShortConvVerbose, OneLine) {
  EXPECT_EQ(verbose_line<ShortConvCase>(dense()),
            "fastweight: short_conv_forward B=2 T=5 D=6 W=4 N=2, fp32: ran direct");
}

}  // namespace
}  // namespace fastweight::test
