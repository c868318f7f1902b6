// Malformed calls of the related operators. What the delta rule's own tests already show of its checks, which these
// share, is not repeated here. Then the unusual calls that are valid.
#include <gtest/gtest.h>

#include "tests/malformed.h"
#include "tests/related/grid.h"

namespace fastweight::test {
namespace {

using Call = Subject<RelatedCase>;
using Rows = std::vector<Malformed<RelatedCase>>;

RelatedSpec small(RelatedOp op) { return with_batch(spec_of(op, 5, 8, 6, 2), 2); }

std::vector<RelatedSpec> all_small() {
  std::vector<RelatedSpec> specs;
  for (RelatedOp op : kRelatedOps) specs.push_back(small(op));
  return specs;
}

std::vector<RelatedSpec> all_packed() {
  std::vector<RelatedSpec> specs;
  for (RelatedOp op : kRelatedOps) specs.push_back(with_lengths(small(op), {4, 0, 6}));
  return specs;
}

auto ops(std::vector<RelatedOp> list) {
  return [=](const RelatedSpec& spec) { return std::count(list.begin(), list.end(), spec.op) > 0; };
}

// B = 2, T = 5, H = 2, K = 8, V = 6.
TEST(RelatedErrors, Messages) {
  const auto per_channel = ops({RelatedOp::kGla, RelatedOp::kDplr}),
             low_rank = ops({RelatedOp::kIplr, RelatedOp::kDplr});
  const auto per_head = ops({RelatedOp::kSimpleGla, RelatedOp::kComba}), comba = ops({RelatedOp::kComba});
  const auto simple = ops({RelatedOp::kSimpleGla});
  const auto ungated = ops({RelatedOp::kLinearAttention, RelatedOp::kIplr});
  const auto gated = ops({RelatedOp::kSimpleGla, RelatedOp::kGla, RelatedOp::kComba, RelatedOp::kDplr});
  const std::string overlap = ", or another slice of its rows, got an overlap of their address ranges";
  const auto with_gamma = [](int64_t heads, DType dtype = DType::kF32) {
    return [=](Call& c) {
      c["g_gamma"] = c.input(dtype, {heads});
      c["g"] = {};
    };
  };
  expect_invalid(
      all_small(),
      Rows{
          {"q absent", "q: expected a tensor, got none", absent("q")},
          {"k narrow", "k: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", extent("k", 3, 7)},
          {"k of bf16", "k: expected type fp32, got bf16", typed("k", DType::kBF16)},
          {"v of 4 heads", "v: expected 2 heads as q, got 4 heads", as_input("v", DType::kF32, {2, 5, 4, 3}), kAllModes,
           ops({RelatedOp::kLinearAttention, RelatedOp::kSimpleGla, RelatedOp::kGla, RelatedOp::kIplr,
                RelatedOp::kDplr})},
          {"v of 1 head", "v: expected a positive multiple of the 2 heads of q, got 1 heads", extent("v", 2, 1)},
          {"initial state", "initial_state: expected shape [2, 2, 8, 6], got [2, 2, 8, 5]",
           extent("initial_state", 3, 5), kWithInitialState},
          {"scale", "scale: expected a finite number, got nan", with_spec([](auto& spec) { spec.scale = kNaN; })},
          {"chunks", "chunk_size: expected 16, 32 or 64, got 48", with_spec([](auto& spec) { spec.chunk_size = 48; })},
          {"o absent", "o: expected a tensor, got none", absent("o"), kWithOutput},
          {"state absent", "state: expected a tensor, got none", absent("state"), kOnlyStep},
          {"state narrow", "state: expected shape [5, 2, 8, 6], got [5, 2, 8, 5]", extent("state", 3, 5), kOnlyStep},
          {"dq over dk", "dq: expected memory apart from dk" + overlap, in_memory_of("dk", "dq"), kOnlyBackward},

          {"g absent", "g: expected a tensor, got none", absent("g"), kAllModes, gated},
          {"g of 3 heads", "g: expected shape [2, 5, 2], got [2, 5, 3]", extent("g", 2, 3), kAllModes, per_head},
          {"g narrow", "g: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", extent("g", 3, 7), kAllModes, per_channel},
          {"g without a gate", "g: expected none without a gate", over("g", "q"), kAllModes, ungated},

          {"g_gamma", "g_gamma: expected none unless the gate is per head", as_input("g_gamma", DType::kF32, {2}),
           kAllModes, ops({RelatedOp::kLinearAttention, RelatedOp::kGla})},
          {"g and g_gamma", "g: expected none with g_gamma", as_input("g_gamma", DType::kF32, {2}), kAllModes, simple},
          {"g_gamma long", "g_gamma: expected shape [2], got [3]", with_gamma(3), kAllModes, simple},
          {"g_gamma type", "g_gamma: expected a floating type", with_gamma(2, DType::kI32), kAllModes, simple},
          {"dg with g_gamma", "dg: expected none with g_gamma", with_gamma(2), kOnlyBackward, simple},

          {"p narrow", "p: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", extent("p", 3, 7), kAllModes, comba},
          {"p of fp16", "p: expected type fp32, got fp16", typed("p", DType::kF16), kAllModes, comba},
          {"beta per key", "beta: expected shape [2, 5, 2, 6], got [2, 5, 2, 8]", over("beta", "q"), kAllModes, comba},
          {"no p", "dp: expected none without p, got a tensor", absent("p"), kOnlyBackward, comba},
          {"dp narrow", "dp: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", extent("dp", 3, 7), kOnlyBackward, comba},
          {"no beta", "dbeta: expected none without beta, got a tensor", absent("beta"), kOnlyBackward, comba},

          {"a absent", "a: expected a tensor, got none", absent("a"), kAllModes, low_rank},
          {"b absent", "b: expected a tensor, got none", absent("b"), kAllModes, low_rank},
          {"a narrow", "a: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", extent("a", 3, 7), kAllModes, low_rank},
          {"b of bf16", "b: expected type fp32, got bf16", typed("b", DType::kBF16), kAllModes, low_rank},
          {"da over b", "da: expected memory apart from b" + overlap, in_memory_of("da", "b"), kOnlyBackward, low_rank},
          {"db of bf16", "db: expected type fp32, got bf16", typed("db", DType::kBF16), kOnlyBackward, low_rank},
      });
}

TEST(RelatedErrors, EveryView) {
  expect_every_view_is_checked<RelatedCase>(all_small(), {"q", "v"});
  expect_every_view_is_checked<RelatedCase>(all_packed(), {"q", "v"});
}

TEST(RelatedErrors, Contexts) { expect_invalid(all_small(), malformed_contexts<RelatedCase>("q")); }
TEST(RelatedErrors, StateIndices) { expect_invalid(all_small(), malformed_slots<RelatedCase>()); }
TEST(RelatedErrors, Sequences) { expect_invalid(all_packed(), malformed_sequences<RelatedCase>()); }

TEST(RelatedErrors, LowRankHasNoGatePerHead) {
  DplrForward args;
  args.options.gate = Gate::kPerHead;
  try {
    dplr_forward({}, args);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "gate: expected none (0) or per channel (2), got 1");
  }
}

TEST(RelatedErrors, OtherDevices) {
  for (RelatedOp op : kRelatedOps) {
    Call call(Mode::kForward, spec_of(op, 0, 8, 6, 2));
    call.context.device.type = DeviceType::kCuda;
    call.context.trust_pointers = true;  // where there is a device, the pointers would be refused first
    for (const support::NamedView& named : call.call->views()) named.view->device.type = DeviceType::kCuda;
    expect_refused(call, ErrorCode::kUnsupported);
  }
}

// Nothing to do, no sequences, no tokens: the states are still copied, and nothing fails.
TEST(RelatedValidCalls, Empty) {
  for (RelatedOp op : kRelatedOps) {
    for (RelatedSpec spec : {spec_of(op, 0, 8, 6, 2), with_lengths(spec_of(op, 0, 8, 6, 2), {0, 0, 0})}) {
      for (const std::string& name : implementations(op, Mode::kForward)) {
        const RelatedCase problem = support::draw(spec, 4);
        const RelatedResults results = support::forward(problem, context_for(name), true);
        EXPECT_EQ(results.final_state.values(), problem.initial_state.values()) << name;
      }
      for (const std::string& name : implementations(op, Mode::kBackward)) {
        const RelatedCase problem = support::draw(spec, 4);
        const RelatedResults gradients = support::backward(problem, context_for(name));
        EXPECT_EQ(gradients.d_initial_state.values(), problem.d_final_state.values()) << name;
      }
      for (const std::string& name : implementations(op, Mode::kStep)) {
        const RelatedCase problem = support::draw(spec, 4);
        EXPECT_EQ(support::step(problem, context_for(name)).final_state.values(), problem.initial_state.values());
      }
    }
    const RelatedSpec nobody = with_batch(spec_of(op, 5, 8, 6, 2), 0);
    support::forward(support::draw(nobody, 4), {}, true);
    support::backward(support::draw(nobody, 4), {});
    call_of(Mode::kBackward, support::draw(small(op), 4), RelatedResults()).run({});
  }
}

TEST(RelatedImplementations, ListsEndWithTheReference) {
  for (RelatedOp op : kRelatedOps) {
    for (Mode mode : kModes) {
      EXPECT_EQ(implementations(op, mode).back(), "reference") << name_of(op) << " " << name_of(mode);
    }
  }
}

}  // namespace
}  // namespace fastweight::test
