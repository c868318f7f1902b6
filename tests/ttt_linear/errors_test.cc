// Every kind of malformed call, for the three modes, then the unusual calls that are valid.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/malformed.h"
#include "tests/ttt_linear/grid.h"

namespace fastweight::test {
namespace {

using Call = Subject<TttLinearCase>;
using Rows = std::vector<Malformed<TttLinearCase>>;
constexpr DType kF32 = DType::kF32, kF64 = DType::kF64, kBF16 = DType::kBF16;
constexpr int64_t B = 2, T = 5, N = 2, H = 3, D = 8, kSlots = Call::kSlots;

TttLinearSpec dense() { return with_batch(spec_of(T, D, H), B); }
TttLinearSpec packed() { return with_lengths(spec_of(0, D, H), {4, 0, 6}); }

auto qkv(const Shape& shape) {
  return [=](Call& c) { c["q"] = c["k"] = c["v"] = c.input(kF32, shape); };
}
template <class Change>
auto options(const Change& change) {
  return with_spec([=](TttLinearSpec& spec) { change(spec.options); });
}
auto scale(double value) {
  return options([=](auto& o) { o.scale = value; });
}
auto eps(double value) {
  return options([=](auto& o) { o.eps = value; });
}
auto mini_batch(int32_t value) {
  return options([=](auto& o) { o.mini_batch = value; });
}
auto positions(const std::vector<double>& counts) {
  return [=](Call& c) {
    for (size_t i = 0; i < counts.size(); ++i) static_cast<int32_t*>(c["position"].data)[i] = int32_t(counts[i]);
  };
}

TEST(TttLinearErrors, EveryView) { expect_every_view_is_checked<TttLinearCase>({dense(), packed()}, {"q", "state"}); }
TEST(TttLinearErrors, Contexts) { expect_invalid({dense()}, malformed_contexts<TttLinearCase>("q")); }
TEST(TttLinearErrors, Slots) { expect_invalid({dense()}, malformed_slots<TttLinearCase>()); }

TEST(TttLinearErrors, Sequences) {
  expect_invalid({dense()}, Rows{{"batch of 2", "cu_seqlens", as_integers("cu_seqlens", {0, 2, 5})}});
  expect_invalid({packed()}, malformed_sequences<TttLinearCase>());
}

TEST(TttLinearErrors, Inputs) {
  const std::string bias = "initial_state_bias";
  expect_invalid(
      {dense()},
      Rows{
          {"q absent", "q", absent("q")},
          {"k absent", "k", absent("k")},
          {"v absent", "v", absent("v")},
          {"w absent", "w", absent("w")},
          {"b absent", "b", absent("b")},
          {"eta absent", "eta", absent("eta")},
          {"q of rank 3", "q", [](Call& c) { c["q"].rank = 3; }},
          {"k of another type", "k", as_input("k", kF64, {B, T, H, D})},
          {"v of another type", "v", as_input("v", kBF16, {B, T, H, D})},
          {"no heads", "q", qkv({B, T, 0, D})},
          {"D of 0", "q", qkv({B, T, H, 0})},
          {"D of 129", "q", qkv({B, T, H, 129})},
          {"k of another width", "k", as_input("k", kF32, {B, T, H, D - 1})},
          {"v of another width", "v", as_input("v", kF32, {B, T, H, D + 1})},
          {"v of more heads", "v", as_input("v", kF32, {B, T, 2 * H, D})},
          {"v of another length", "v", as_input("v", kF32, {B, T + 1, H, D})},
          {"w for all heads", "w", as_input("w", kF32, {D})},
          {"w transposed", "w", as_input("w", kF32, {D, H})},
          {"b of another width", "b", as_input("b", kF32, {H, D + 1})},
          {"b of rank 3", "b", as_input("b", kF32, {1, H, D})},
          {"eta per channel", "eta", as_input("eta", kF32, {B, T, H, D})},
          {"eta of rank 2", "eta", as_input("eta", kF32, {B, T})},
          {"eta of other heads", "eta", as_input("eta", kF32, {B, T, 1})},
          {"both shapes", "k: expected shape [2, 5, 3, 8], got [2, 5, 3, 4]", extent("k", 3, 4)},
          {"scratch memory beyond 64 bits", "q",
           [](Call& c) {
             for (const char* name : {"q", "k", "v"}) {
               c[name].shape[0] = int64_t{1} << 50;
               c[name].strides[0] = 0;
             }
           }},
          {"initial state of another count", "initial_state", as_input("initial_state", kF32, {N + 1, H, D, D}),
           kWithInitialState},
          {"initial bias of another count", bias, as_input(bias, kF32, {N + 1, H, 1, D}), kWithInitialState},
          {"initial bias of two rows", bias, as_input(bias, kF32, {N, H, 2, D}), kWithInitialState},
          {"initial bias of rank 2", bias, as_input(bias, kF32, {H, D}), kWithInitialState},
          {"initial state in a step", "initial_state", as_input("initial_state", kF32, {N, H, D, D}), kOnlyStep},
          {"initial bias in a step", bias, as_input(bias, kF32, {N, H, 1, D}), kOnlyStep},
      });
}

TEST(TttLinearErrors, Options) {
  expect_invalid({dense()}, Rows{
                                {"scale NaN", "scale", scale(kNaN)},
                                {"scale -inf", "scale", scale(-kInfinity)},
                                {"scale 0", "scale", scale(0)},
                                {"scale negative", "scale", scale(-0.5)},
                                {"eps NaN", "eps", eps(kNaN)},
                                {"eps inf", "eps", eps(kInfinity)},
                                {"eps 0", "eps", eps(0)},
                                {"eps negative", "eps", eps(-1e-6)},
                                {"eps 0 in fp32", "eps", eps(1e-50)},
                                {"eps subnormal in fp32", "eps", eps(1e-39)},
                                {"mini-batch 0", "mini_batch", mini_batch(0)},
                                {"mini-batch 8", "mini_batch", mini_batch(8)},
                                {"mini-batch 48", "mini_batch", mini_batch(48)},
                                {"mini-batch 128", "mini_batch", mini_batch(128)},
                                {"mini-batch negative", "mini_batch", mini_batch(-16)},
                            });
}

TEST(TttLinearErrors, Outputs) {
  const std::string bias = "final_state_bias", d_bias = "d_initial_state_bias";
  expect_invalid(
      {dense()},
      Rows{
          {"o absent", "o", absent("o"), kWithOutput},
          {"o of fp64", "o", as_output("o", kF64, {B, T, H, D}), kWithOutput},
          {"o of another width", "o", as_output("o", kF32, {B, T, H, D + 1}), kWithOutput},
          {"o broadcast", "o", strided("o", 1, 0), kWithOutput},
          {"o with overlapping rows", "o", strided("o", 2, D - 1), kWithOutput},
          {"o over v", "o", over("o", "v"), kWithOutput},
          {"final state over the initial state", "final_state", over("final_state", "initial_state"), kOnlyForward},
          {"final bias over the final state", "final_state", in_memory_of(bias, "final_state"), kOnlyForward},
          {"final state of bf16", "final_state", as_output("final_state", kBF16, {N, H, D, D}), kOnlyForward},
          {"final state of fp64", "final_state", as_output("final_state", kF64, {N, H, D, D}), kOnlyForward},
          {"kept where nothing is", "kept", as_output("kept", DType::kI32, {B, 1, H, 2112}), kOnlyForward},
          {"final bias of bf16", bias, as_output(bias, kBF16, {N, H, 1, D}), kOnlyForward},
          {"final bias of two rows", bias, as_output(bias, kF32, {N, H, 2, D}), kOnlyForward},
          {"d_o of bf16", "d_o", as_input("d_o", kBF16, {B, T, H, D}), kOnlyBackward},
          {"d_o of other heads", "d_o", as_input("d_o", kF32, {B, T, H + 1, D}), kOnlyBackward},
          {"d_final_state of another count", "d_final_state", as_input("d_final_state", kF32, {N + 1, H, D, D}),
           kOnlyBackward},
          {"d_final_state_bias of another count", "d_final_state_bias",
           as_input("d_final_state_bias", kF32, {N + 1, H, 1, D}), kOnlyBackward},
          {"dk of bf16", "dk", as_output("dk", kBF16, {B, T, H, D}), kOnlyBackward},
          {"dq over dk", "dq", over("dq", "dk"), kOnlyBackward},
          {"dv over d_o", "dv", over("dv", "d_o"), kOnlyBackward},
          {"dw over db", "dw", over("dw", "db"), kOnlyBackward},
          {"dw of another shape", "dw", as_output("dw", kF32, {D, H}), kOnlyBackward},
          {"db of fp64", "db", as_output("db", kF64, {H, D}), kOnlyBackward},
          {"deta of another rank", "deta", as_output("deta", kF32, {B, T, H}), kOnlyBackward},
          {"d_initial_state without initial_state", "d_initial_state", absent("initial_state"), kOnlyBackward},
          {"d_initial_state_bias without initial_state_bias", d_bias, absent("initial_state_bias"), kOnlyBackward},
          {"d_initial_state of bf16", "d_initial_state", as_output("d_initial_state", kBF16, {N, H, D, D}),
           kOnlyBackward},
          {"d_initial_state_bias of another width", d_bias, as_output(d_bias, kF32, {N, H, 1, D + 1}), kOnlyBackward},
      });
}

TEST(TttLinearErrors, States) {
  expect_invalid(
      {dense()},
      Rows{
          {"state absent", "state", absent("state"), kOnlyStep},
          {"state bias absent", "state_bias", absent("state_bias"), kOnlyStep},
          {"gradient absent", "gradient", absent("gradient"), kOnlyStep},
          {"gradient bias absent", "gradient_bias", absent("gradient_bias"), kOnlyStep},
          {"position absent", "position", absent("position"), kOnlyStep},
          {"state of bf16", "state", as_output("state", kBF16, {kSlots, H, D, D}), kOnlyStep},
          {"state broadcast", "state", strided("state", 0, 0), kOnlyStep},
          {"state bias of another count", "state_bias", as_output("state_bias", kF32, {kSlots - 1, H, 1, D}),
           kOnlyStep},
          {"gradient of another count", "gradient", as_output("gradient", kF32, {kSlots + 1, H, D, D}), kOnlyStep},
          {"gradient over the state", "state", over("gradient", "state"), kOnlyStep},
          {"gradient bias of fp64", "gradient_bias", as_output("gradient_bias", kF64, {kSlots, H, 1, D}), kOnlyStep},
          {"position of another count", "position", as_integers("position", {0, 1}), kOnlyStep},
          {"position of int64", "position", as_integers("position", {0, 15, 3, 1, 7}, DType::kI64), kOnlyStep},
          {"position of floats", "position", as_output("position", kF32, {kSlots}), kOnlyStep},
          {"position of rank 2", "position", as_output("position", DType::kI32, {kSlots, 1}), kOnlyStep},
          {"position broadcast", "position", strided("position", 0, 0), kOnlyStep},
          {"position negative", "position", positions({-1, 0, 0, 0, 0}), kOnlyStep},
          {"position of a full mini-batch", "position: expected a count from 0 to 15 in slot 3, got 16",
           positions({0, 0, 0, 16, 0}), kOnlyStep},
          {"state indices over the position", "position",
           [](Call& c) {
             positions({0, 1, 2, 3, 4})(c);
             c["state_indices"].data = c["position"].data;
           },
           kOnlyStep},
      });
}

// Without indices every slot belongs to a sequence.
TEST(TttLinearErrors, PositionsWithoutIndices) {
  for (size_t slot = 0; slot < 2; ++slot) {
    Call call(Mode::kStep, dense());
    for (const char* name : {"state", "state_bias", "gradient", "gradient_bias", "position"}) call[name].shape[0] = N;
    call["state_indices"] = {};
    std::vector<double> counts{0, 15};
    positions(counts)(call);
    EXPECT_NO_THROW(call.run());
    counts[slot] = 16;
    positions(counts)(call);
    EXPECT_EQ(expect_refused(call),
              "position: expected a count from 0 to 15 in slot " + std::to_string(slot) + ", got 16");
  }
}

TEST(TttLinearErrors, OutOfMemory) { expect_out_of_memory<TttLinearCase>(dense()); }
TEST(TttLinearErrors, CudaDevice) { expect_no_cuda_memory<TttLinearCase>(packed()); }

// Unusual and valid -------------------------------------------------------------------------------------------------

TEST(TttLinearValid, Unchanged) {
  expect_valid<TttLinearCase>("unchanged", {dense(), packed()}, [](Call&) {});
}

// The smallest eps is one in fp32, too: rows without variance have an LN of 0.
TEST(TttLinearValid, SmallestEps) {
  Call call(Mode::kForward, dense());
  for (Tensor* x : {&call.problem.q, &call.problem.k, &call.problem.v}) x->fill(0.25);
  eps(std::numeric_limits<float>::min())(call);
  EXPECT_NO_THROW(call.run());
  for (const std::vector<double>& values : call.written()) {
    for (double value : values) EXPECT_TRUE(std::isfinite(value));
  }
}

// Sequences are along the first axis of a state, and along that of what belongs to tokens in a batch.
void set_batch_and_length(Call& c, int64_t batch, int64_t tokens) {
  const auto set = [&](auto& tensors) {
    for (const auto& field : tensors.fields()) {
      if (!c.call->has(field.name) || !c[field.name].present() || field.part == Part::kCall) continue;
      c[field.name].shape[0] = batch;
      if (field.part == Part::kTokens) c[field.name].shape[1] = tokens;
    }
  };
  set(c.problem);
  set(c.outputs);
}

TEST(TttLinearValid, EmptyProblems) {
  expect_valid<TttLinearCase>(
      "no batch", {dense()}, [](Call& c) { set_batch_and_length(c, 0, T); }, kWithInitialState);
  expect_valid<TttLinearCase>(
      "no tokens", {dense()}, [](Call& c) { set_batch_and_length(c, B, 0); }, kWithInitialState);
  // The gradients of w and b are sums over nothing.
  Call call(Mode::kBackward, dense());
  set_batch_and_length(call, 0, T);
  EXPECT_NO_THROW(call.run());
  for (const Tensor* sum : {&call.outputs.dw, &call.outputs.db}) {
    for (double value : sum->values()) EXPECT_EQ(value, 0);
  }
}

TEST(TttLinearValid, StepWithoutTokens) {
  Call call(Mode::kStep, dense());
  for (const char* name : {"q", "k", "v", "eta", "o"}) call[name].shape[1] = 0;
  const auto before = call.written();
  EXPECT_NO_THROW(call.run());
  EXPECT_TRUE(call.written() == before);
}

TEST(TttLinearValid, BroadcastInputs) {
  expect_valid<TttLinearCase>("one token for all", {dense()}, [](Call& c) {
    for (const char* name : {"q", "k", "v", "eta", "w", "b"}) c[name].strides = {};
  });
}

TEST(TttLinearValid, OptionalTensorsAbsent) {
  expect_valid<TttLinearCase>("fewest tensors", {dense()}, [](Call& c) {
    for (const support::NamedView& named : c.call->views()) {
      const std::string name = named.name;
      if (name.starts_with("initial_") || name.starts_with("final_") || name.starts_with("d")) *named.view = {};
    }
  });
}

TEST(TttLinearValid, ShapesWithoutUnitAxes) {
  expect_valid<TttLinearCase>("rank 3", {dense()}, [](Call& c) {
    c["eta"] = c.input(kBF16, {B, T, H});
    if (c.mode == Mode::kBackward) c["deta"] = c.output(kBF16, {B, T, H});
    for (const support::NamedView& named : c.call->views()) {
      if (!std::string(named.name).ends_with("_bias") || !named.view->present()) continue;
      const Shape shape{named.view->shape[0], H, D};
      *named.view = named.written ? c.output(kF32, shape) : c.input(kF32, shape);
    }
  });
}

TEST(TttLinearValid, Types) {
  for (DType dtype : {kBF16, DType::kF16, kF64}) {
    TttLinearSpec spec = dense();
    spec.dtype = dtype;
    expect_valid<TttLinearCase>("types", {spec}, [](Call&) {});
    expect_valid<TttLinearCase>("o in fp32", {spec}, as_output("o", kF32, {B, T, H, D}), kWithOutput);
    if (dtype != kF64) continue;
    expect_valid<TttLinearCase>(
        "states of both types", {spec},
        [](Call& c) {
          c["state"] = c.output(kF32, {kSlots, H, D, D});
          c["gradient_bias"] = c.output(kF32, {kSlots, H, 1, D});
        },
        kOnlyStep);
  }
}

TEST(TttLinearVerbose, OneLine) {
  const std::string line = verbose_line<TttLinearCase>(dense());
  EXPECT_EQ(line.find("fastweight: ttt_linear_forward B=2 T=5 H=3 D=8 N=2 C=16, fp32: ran "), 0u) << line;
}

}  // namespace
}  // namespace fastweight::test
