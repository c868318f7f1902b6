// Every kind of malformed call, for the three operators and the three modes, then the unusual calls that are valid.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/delta_rule/grid.h"
#include "tests/malformed.h"

namespace fastweight::test {
namespace {

using Call = Subject<DeltaRuleCase>;
using Rows = std::vector<Malformed<DeltaRuleCase>>;
constexpr DType kF32 = DType::kF32, kF64 = DType::kF64, kBF16 = DType::kBF16;
constexpr int64_t B = 2, T = 5, N = 2, H = 2, HV = 4, K = 8, V = 6, kSlots = Call::kSlots;

std::vector<DeltaRuleSpec> dense() {
  std::vector<DeltaRuleSpec> specs;
  for (Gate gate : kGates) specs.push_back(with_batch(with_heads(spec_of(gate, T, K, V), H, HV / H), B));
  return specs;
}

std::vector<DeltaRuleSpec> packed() {
  std::vector<DeltaRuleSpec> specs = dense();
  for (DeltaRuleSpec& spec : specs) spec = with_lengths(spec, {4, 0, 6});
  return specs;
}

// Raw gates with both parameters.
std::vector<DeltaRuleSpec> in_kernel() {
  std::vector<DeltaRuleSpec> specs = dense();
  specs.erase(specs.begin());
  for (DeltaRuleSpec& spec : specs) spec.options.gate_in_kernel = true;
  return specs;
}

auto gates(std::vector<Gate> list) {
  return [=](const DeltaRuleSpec& spec) { return std::count(list.begin(), list.end(), spec.options.gate) > 0; };
}
const auto kUngated = gates({Gate::kNone}), kGdn = gates({Gate::kPerHead}), kKda = gates({Gate::kPerChannel});
const auto kGated = gates({Gate::kPerHead, Gate::kPerChannel}), kNotKda = gates({Gate::kNone, Gate::kPerHead});

template <class Change>
auto options(const Change& change) {
  return with_spec([=](DeltaRuleSpec& spec) { change(spec.options); });
}
auto scale(double value) {
  return options([=](auto& o) { o.scale = value; });
}
auto chunk_size(int32_t value) {
  return options([=](auto& o) { o.chunk_size = value; });
}
auto bound(double value, bool safe) {
  return options([=](auto& o) {
    o.lower_bound = value;
    o.safe_gate = safe;
  });
}
auto qk(const Shape& shape) {
  return [=](Call& c) { c["q"] = c["k"] = c.input(kF32, shape); };
}

TEST(DeltaRuleErrors, EveryView) {
  expect_every_view_is_checked<DeltaRuleCase>(dense(), {"q", "v"});
  expect_every_view_is_checked<DeltaRuleCase>(packed(), {"q", "v"});
  expect_every_view_is_checked<DeltaRuleCase>(in_kernel(), {"q", "v"});
}

TEST(DeltaRuleErrors, Sequences) {
  expect_invalid<DeltaRuleCase>(dense(), {{"batch of 2", "cu_seqlens", as_integers("cu_seqlens", {0, 2, 5})}});
  expect_invalid(packed(), malformed_sequences<DeltaRuleCase>());
}

TEST(DeltaRuleErrors, Contexts) { expect_invalid(dense(), malformed_contexts<DeltaRuleCase>("q")); }
TEST(DeltaRuleErrors, Slots) { expect_invalid(dense(), malformed_slots<DeltaRuleCase>()); }

TEST(DeltaRuleErrors, Inputs) {
  expect_invalid(dense(), Rows{
                              {"q absent", "q", absent("q")},
                              {"k absent", "k", absent("k")},
                              {"v absent", "v", absent("v")},
                              {"q and k of other types", "k", as_input("k", kF64, {B, T, H, K})},
                              {"v of another type", "v", as_input("v", kBF16, {B, T, HV, V})},
                              {"q without heads", "q", qk({B, T, 0, K})},
                              {"K of 0", "q", qk({B, T, H, 0})},
                              {"K of 257", "q", qk({B, T, H, 257})},
                              {"V of 0", "v", as_input("v", kF32, {B, T, HV, 0})},
                              {"no value heads", "v", as_input("v", kF32, {B, T, 0, V})},
                              {"value heads not a multiple", "v", as_input("v", kF32, {B, T, 3, V})},
                              {"v of another batch", "v", as_input("v", kF32, {B + 1, T, HV, V})},
                              {"v of another length", "v", as_input("v", kF32, {B, T + 1, HV, V})},
                              {"beta of rank 4 with K", "beta", as_input("beta", kF32, {B, T, HV, K})},
                              {"both shapes", "k: expected shape [2, 5, 2, 8], got [2, 5, 2, 4]", extent("k", 3, 4)},
                              {"scratch memory beyond 64 bits", "q",
                               [](Call& c) {
                                 for (const char* name : {"q", "k", "v"}) {
                                   c[name].shape[0] = int64_t{1} << 50;
                                   c[name].strides[0] = 0;
                                 }
                               }},
                              {"g without a gate", "g", as_input("g", kF32, {B, T, HV}), kAllModes, kUngated},
                              {"no g", "g", absent("g"), kAllModes, kGated},
                              {"g per channel", "g", as_input("g", kF32, {B, T, HV, K}), kAllModes, kGdn},
                              {"g per head", "g", as_input("g", kF32, {B, T, HV}), kAllModes, kKda},
                              {"g of the query heads", "g", as_input("g", kF32, {B, T, H}), kAllModes, kGdn},
                              {"initial state of another count", "initial_state",
                               as_input("initial_state", kF32, {N + 1, HV, K, V}), kWithInitialState},
                              {"initial state transposed", "initial_state",
                               as_input("initial_state", kF32, {N, HV, V, K}), kWithInitialState},
                              {"initial state in a step", "initial_state",
                               as_input("initial_state", kF32, {N, HV, K, V}), kOnlyStep},
                          });
}

TEST(DeltaRuleErrors, Options) {
  expect_invalid(dense(), Rows{
                              {"scale NaN", "scale", scale(kNaN)},
                              {"scale -inf", "scale", scale(-kInfinity)},
                              {"chunk size 0", "chunk_size", chunk_size(0)},
                              {"chunk size 48", "chunk_size", chunk_size(48)},
                              {"chunk size 128", "chunk_size", chunk_size(128)},
                              {"chunk size negative", "chunk_size", chunk_size(-64)},
                              {"gate unknown", "gate", options([](auto& o) { o.gate = static_cast<Gate>(3); })},
                              {"gate negative", "gate", options([](auto& o) { o.gate = static_cast<Gate>(-1); })},
                              {"negative eigenvalues without a sigmoid", "allow_neg_eigval",
                               options([](auto& o) { o.allow_neg_eigval = true; })},
                              {"sigmoid without beta", "beta",
                               [](Call& c) {
                                 c.problem.spec.options.beta_sigmoid = true;
                                 c.rebuild();
                                 c["beta"] = {};
                               }},
                              {"gate in kernel without a gate", "gate_in_kernel",
                               options([](auto& o) { o.gate_in_kernel = true; }), kAllModes, kUngated},
                              {"A_log without gate in kernel", "a_log", as_input("a_log", kF32, {HV})},
                              {"dt_bias without gate in kernel", "dt_bias", as_input("dt_bias", kF32, {HV})},
                              {"lower bound without gate in kernel", "lower_bound", bound(-4, false)},
                              {"safe gate per head or without a gate", "safe_gate",
                               options([](auto& o) { o.safe_gate = true; }), kAllModes, kNotKda},
                          });
  expect_invalid(
      in_kernel(),
      Rows{
          {"without A_log", "a_log", absent("a_log")},
          {"A_log of the query heads", "a_log", as_input("a_log", kF32, {H})},
          {"A_log of rank 2 with gaps", "a_log",
           [](Call& c) {
             c["a_log"] = c.input(kF32, {2, 4});
             c["a_log"].shape[1] = 2;
           }},
          {"dt_bias per channel", "dt_bias", as_input("dt_bias", kF32, {HV, K}), kAllModes, kGdn},
          {"dt_bias per head", "dt_bias", as_input("dt_bias", kF32, {HV}), kAllModes, kKda},
          {"dt_bias transposed", "dt_bias", as_input("dt_bias", kF32, {K, HV}), kAllModes, kKda},
          {"lower bound 0", "lower_bound", bound(0, false), kAllModes, kKda},
          {"lower bound positive", "lower_bound", bound(1, false), kAllModes, kKda},
          {"lower bound NaN", "lower_bound", bound(kNaN, false), kAllModes, kKda},
          {"lower bound -inf", "lower_bound", bound(-kInfinity, false), kAllModes, kKda},
          {"lower bound below the safe range", "lower_bound", bound(-5.5, true), kAllModes, kKda},
          {"safe gate without a lower bound", "lower_bound", bound(DeltaRuleOptions::kUnset, true), kAllModes, kKda},
          {"lower bound per head", "lower_bound", bound(-4, false), kAllModes, kGdn},
          {"da_log with gaps", "da_log",
           [](Call& c) {
             c["a_log"] = c.input(kF32, {2, 2});
             c["da_log"] = c.output(kF32, {2, 4});
             c["da_log"].shape[1] = 2;
           },
           kOnlyBackward},
      });
}

TEST(DeltaRuleErrors, Outputs) {
  const auto v_first = options([](auto& o) { o.state_v_first = true; });
  expect_invalid(
      dense(),
      Rows{
          {"o absent", "o", absent("o"), kWithOutput},
          {"o of fp64", "o", as_output("o", kF64, {B, T, HV, V}), kWithOutput},
          {"o of the query heads", "o", as_output("o", kF32, {B, T, H, V}), kWithOutput},
          {"o broadcast", "o", strided("o", 1, 0), kWithOutput},
          {"o with overlapping rows", "o", strided("o", 2, V - 1), kWithOutput},
          {"o over v", "o", over("o", "v"), kWithOutput},
          {"o over part of v", "o",
           [](Call& c) {
             c["o"] = c["v"];
             shift(c["o"], 4 * V);
           },
           kWithOutput},
          {"final state over the initial state", "final_state", over("final_state", "initial_state"), kOnlyForward},
          {"final state over o", "o", in_memory_of("final_state", "o"), kOnlyForward},
          {"final state of bf16", "final_state", as_output("final_state", kBF16, {N, HV, K, V}), kOnlyForward},
          {"final state of fp64", "final_state", as_output("final_state", kF64, {N, HV, K, V}), kOnlyForward},
          {"final state transposed", "final_state", as_output("final_state", kF32, {N, HV, V, K}), kOnlyForward},
          {"states not transposed", "initial_state", v_first, kWithInitialState},
          {"state not transposed", "state", v_first, kOnlyStep},
          {"chunk states of another chunk count", "chunk_states", as_output("chunk_states", kF32, {B, 3, HV, K, V}),
           kWithInitialState},
          {"chunk states of bf16", "chunk_states", as_output("chunk_states", kBF16, {B, 1, HV, K, V}),
           kWithInitialState},
          {"chunk states of fp64", "chunk_states", as_output("chunk_states", kF64, {B, 1, HV, K, V}),
           kWithInitialState},
          {"d_o of bf16", "d_o", as_input("d_o", kBF16, {B, T, HV, V}), kOnlyBackward},
          {"d_o of the query heads", "d_o", as_input("d_o", kF32, {B, T, H, V}), kOnlyBackward},
          {"d_final_state of another count", "d_final_state", as_input("d_final_state", kF32, {N + 1, HV, K, V}),
           kOnlyBackward},
          {"dq of the value heads", "dq", as_output("dq", kF32, {B, T, HV, K}), kOnlyBackward},
          {"dk of bf16", "dk", as_output("dk", kBF16, {B, T, H, K}), kOnlyBackward},
          {"dq over dk", "dq", over("dq", "dk"), kOnlyBackward},
          {"dv over d_o", "dv", over("dv", "d_o"), kOnlyBackward},
          {"dg without g", "dg", as_output("dg", kF32, {B, T, HV}), kOnlyBackward, kUngated},
          {"dbeta without beta", "dbeta", absent("beta"), kOnlyBackward},
          {"da_log without a_log", "da_log", as_output("da_log", kF32, {HV}), kOnlyBackward},
          {"ddt_bias without dt_bias", "ddt_bias", as_output("ddt_bias", kF32, {HV}), kOnlyBackward},
          {"d_initial_state without initial_state", "d_initial_state", absent("initial_state"), kOnlyBackward},
          {"d_initial_state of bf16", "d_initial_state", as_output("d_initial_state", kBF16, {N, HV, K, V}),
           kOnlyBackward},
          {"state absent", "state", absent("state"), kOnlyStep},
          {"state of fp16", "state", as_output("state", DType::kF16, {kSlots, HV, K, V}), kOnlyStep},
          {"state broadcast", "state", strided("state", 0, 0), kOnlyStep},
          {"state indices over the state", "state",
           [](Call& c) {
             const int32_t slots[2] = {0, 1};
             std::memcpy(c["state"].data, slots, sizeof(slots));
             c["state_indices"].data = c["state"].data;
           },
           kOnlyStep},
      });
}

TEST(DeltaRuleErrors, OutOfMemory) { expect_out_of_memory<DeltaRuleCase>(dense()[1]); }
TEST(DeltaRuleErrors, CudaDevice) { expect_no_cuda_memory<DeltaRuleCase>(packed()[0]); }

TEST(DeltaRuleErrors, NumChunks) {
  const auto code = [](int64_t tokens, const TensorView& cu_seqlens, int32_t size) {
    try {
      delta_rule_num_chunks(tokens, cu_seqlens, size);
    } catch (const Error& error) {
      return static_cast<int>(error.code());
    }
    return 0;
  };
  const Tensor lengths(DType::kI64, {3}, std::vector<double>{0, 4, 9});
  const int invalid = static_cast<int>(ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(-1, {}, 64), invalid);
  EXPECT_EQ(code(9, {}, 48), invalid);
  EXPECT_EQ(code(8, lengths.view(), 64), invalid);
  EXPECT_EQ(code(9, lengths.view(), 64), 0);
}

// Unusual and valid -------------------------------------------------------------------------------------------------

TEST(DeltaRuleValid, Unchanged) {
  const auto nothing = [](Call&) {};
  expect_valid<DeltaRuleCase>("dense", dense(), nothing);
  expect_valid<DeltaRuleCase>("packed", packed(), nothing);
  expect_valid<DeltaRuleCase>("gate in kernel", in_kernel(), nothing);
}

// No batch (axis 0) or no tokens (axis 1), with null pointers.
void empty_axis(Call& c, size_t axis) {
  for (const support::NamedView& named : c.call->views()) {
    TensorView& view = *named.view;
    const std::string name = named.name;
    if (!view.present() || name.find("state") != std::string::npos || view.rank < 3) continue;
    view.shape[axis] = 0;
    view.data = nullptr;
  }
  if (c.call->has("chunk_states")) c["chunk_states"].shape[axis] = 0;
}

void no_sequences(Call& c) {
  for (const char* name : {"initial_state", "final_state", "d_final_state", "d_initial_state", "state_indices"}) {
    if (c.call->has(name) && c[name].present()) c[name].shape[0] = 0;
  }
}

TEST(DeltaRuleValid, EmptyBatch) {
  expect_valid<DeltaRuleCase>("empty batch", dense(), [](Call& c) {
    empty_axis(c, 0);
    no_sequences(c);
  });
  expect_valid<DeltaRuleCase>("no tokens", dense(), [](Call& c) { empty_axis(c, 1); });
  expect_valid<DeltaRuleCase>("no sequences", packed(), [](Call& c) {
    empty_axis(c, 1);
    c["cu_seqlens"] = c.integers({0});
    no_sequences(c);
  });
}

TEST(DeltaRuleValid, NoTokensKeepsTheState) {
  Call forward(Mode::kForward, dense()[1]), backward(Mode::kBackward, dense()[1]), step(Mode::kStep, dense()[1]);
  const auto before = step.written();
  for (Call* call : {&forward, &backward, &step}) {
    empty_axis(*call, 1);
    call->run();
  }
  EXPECT_EQ(forward.outputs.final_state.values(), forward.problem.initial_state.values());
  EXPECT_EQ(backward.outputs.d_initial_state.values(), backward.problem.d_final_state.values());
  EXPECT_TRUE(step.written() == before);
}

TEST(DeltaRuleValid, HugeBatchWithoutTokens) {
  Call call(Mode::kForward, dense()[0]);
  empty_axis(call, 1);
  for (const char* name : {"q", "k", "v", "beta", "o"}) call[name].shape[0] = int64_t{1} << 35;
  for (const char* name : {"initial_state", "final_state", "chunk_states"}) call[name] = {};
  EXPECT_NO_THROW(EXPECT_NE(call.run(), ""));
}

// Heads from `first` on, of a buffer [B, T, row].
TensorView heads_of(TensorView buffer, int64_t first, int64_t heads, int64_t width) {
  const int64_t row = buffer.shape[2];
  shift(buffer, 4 * first);
  buffer.rank = 4;
  buffer.shape = {B, T, heads, width};
  buffer.strides = {T * row, row, width, 1};
  return buffer;
}

// [B, T, H K + H K + HV V] holds q, k and v; another holds their gradients, or o in the place of v.
TEST(DeltaRuleValid, PackedHeads) {
  const auto slices = [](Call& c) {
    const int64_t row = 2 * H * K + HV * V;
    const TensorView inputs = c.input(kF32, {B, T, row}), outputs = c.output(kF32, {B, T, row});
    c["q"] = heads_of(inputs, 0, H, K);
    c["k"] = heads_of(inputs, H * K, H, K);
    c["v"] = heads_of(inputs, 2 * H * K, HV, V);
    c[c.mode == Mode::kBackward ? "dv" : "o"] = heads_of(outputs, 2 * H * K, HV, V);
    if (c.mode != Mode::kBackward) return;
    c["dq"] = heads_of(outputs, 0, H, K);
    c["dk"] = heads_of(outputs, H * K, H, K);
  };
  expect_valid<DeltaRuleCase>("slices of one buffer", dense(), slices);

  Call call(Mode::kBackward, dense()[0]);
  const TensorView buffer = call.output(kF32, {B, T, 2 * H * K});
  call["dq"] = heads_of(buffer, 0, H, K);
  call["dk"] = heads_of(buffer, H * K - 1, H, K);  // one column too early
  expect_refused(call);
  shift(call["dk"], 4);
  EXPECT_NO_THROW(call.run());
}

TEST(DeltaRuleValid, BroadcastInputs) {
  expect_valid<DeltaRuleCase>("one token for all", dense(), [](Call& c) {
    for (const char* name : {"q", "k", "v", "g", "beta"}) c[name].strides = {};
  });
}

TEST(DeltaRuleValid, OptionalTensorsAbsent) {
  expect_valid<DeltaRuleCase>("fewest tensors", dense(), [](Call& c) {
    for (const support::NamedView& named : c.call->views()) {
      const std::string name = named.name;
      const bool needed = name == "q" || name == "k" || name == "v" || name == "g" || name == "o" || name == "state";
      if (!needed && name != "state_indices") *named.view = {};
    }
  });
}

TEST(DeltaRuleValid, ParameterShapes) {
  expect_valid<DeltaRuleCase>("parameters of other shapes", in_kernel(), [](Call& c) {
    const bool per_channel = c.problem.spec.options.gate == Gate::kPerChannel;
    c["a_log"] = c.input(kBF16, {1, 1, HV, 1});
    if (per_channel) c["dt_bias"] = c.input(DType::kF16, {HV * K});
    if (c.mode != Mode::kBackward) return;
    c["da_log"] = c.output(kF32, {1, 1, HV, 1});
    if (per_channel) c["ddt_bias"] = c.output(DType::kF16, {HV * K});
  });
}

TEST(DeltaRuleValid, LowerBoundWithoutALog) {
  expect_valid<DeltaRuleCase>("lower bound", {in_kernel()[1]}, [](Call& c) {
    bound(-5, true)(c);
    c["a_log"] = {};
    if (c.mode == Mode::kBackward) c["da_log"] = {};
  });
}

TEST(DeltaRuleValid, AnyFiniteScale) {
  for (double value : {0.0, -0.5, 1e30}) expect_valid<DeltaRuleCase>("scale", dense(), scale(value));
}

TEST(DeltaRuleValid, Types) {
  for (DType dtype : {kBF16, DType::kF16, kF64}) {
    DeltaRuleSpec spec = dense()[2];
    spec.dtype = dtype;
    expect_valid<DeltaRuleCase>("types", {spec}, [](Call&) {});
    expect_valid<DeltaRuleCase>("o in fp32", {spec}, as_output("o", kF32, {B, T, HV, V}), kWithOutput);
  }
  DeltaRuleSpec spec = dense()[0];
  spec.dtype = kF64;
  expect_valid<DeltaRuleCase>("states in fp64", {spec}, as_input("initial_state", kBF16, {N, HV, K, V}), kOnlyForward);
}

}  // namespace
}  // namespace fastweight::test
