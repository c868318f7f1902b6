// Malformed calls of the related operators: the error's code, its text, and that nothing was written. What the delta
// rule's own tests already show of the checks that all families share is not repeated here. Then the unusual calls that
// are valid.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/related/cases.h"

namespace fastweight::test {
namespace {

constexpr double kPoison = 77;

struct Call {
  RelatedCase data;
  RelatedResults results;
  RelatedInputs<TensorView> in;
  RelatedOutputs<TensorView> out;
  Context context;
  bool backward;

  Call(const RelatedSpec& spec, bool is_backward) : data(support::draw(spec, 3)), backward(is_backward) {
    results = backward ? support::backward_outputs(data) : support::forward_outputs(data, true);
    for (Tensor* x : results.all()) {
      if (x->present()) x->fill(kPoison);
    }
    in = views_of(data);
    out = views_of(results);
  }

  std::string run() const {
    return backward ? support::run_backward(data.spec, context, in, out)
                    : support::run_forward(data.spec, context, in, out);
  }
  bool untouched() const {
    for (const Tensor* x : results.all()) {
      for (int64_t i = 0; x->present() && i < x->size(); ++i) {
        if ((*x)[i] != kPoison) return false;
      }
    }
    return true;
  }
};

enum Mode { kForward = 1, kBackward = 2, kBoth = 3 };

struct Malformed {
  std::string message;
  std::function<void(Call&)> spoil;
  std::vector<RelatedOp> ops = {std::begin(kRelatedOps), std::end(kRelatedOps)};
  int modes = kBoth;
};

// B = 2, T = 5, H = 2, K = 8, V = 6.
std::vector<Malformed> malformed() {
  const std::vector<RelatedOp> gla{RelatedOp::kLinearAttention, RelatedOp::kSimpleGla, RelatedOp::kGla};
  const std::vector<RelatedOp> per_channel{RelatedOp::kGla, RelatedOp::kDplr};
  const std::vector<RelatedOp> per_head{RelatedOp::kSimpleGla, RelatedOp::kComba};
  const std::vector<RelatedOp> low_rank{RelatedOp::kIplr, RelatedOp::kDplr};
  const std::vector<RelatedOp> comba{RelatedOp::kComba}, simple{RelatedOp::kSimpleGla};
  static const Tensor vector(DType::kF32, {2}), longer(DType::kF32, {3});
  return {
      {"q: expected a tensor, got none", [](Call& c) { c.in.q = {}; }},
      {"k: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", [](Call& c) { c.in.k.shape[3] = 7; }},
      {"k: expected type fp32, got bf16", [](Call& c) { c.in.k.dtype = DType::kBF16; }},
      {"v: expected 2 heads as q, got 4 heads",
       [](Call& c) {
         c.in.v.shape[2] = 4;
         c.in.v.shape[3] = 3;
       }},
      {"v: expected a positive multiple of the 2 heads of q, got 1 heads", [](Call& c) { c.in.v.shape[2] = 1; }},
      {"initial_state: expected shape [2, 2, 8, 6], got [2, 2, 8, 5]",
       [](Call& c) { c.in.initial_state.shape[3] = 5; }},
      {"scale: expected a finite number, got nan", [](Call& c) { c.data.spec.scale = std::nan(""); }},
      {"chunk_size: expected 16, 32 or 64, got 48", [](Call& c) { c.data.spec.chunk_size = 48; }},
      {"num_threads: ", [](Call& c) { c.context.num_threads = -1; }},
      {"implementation: expected one of ", [](Call& c) { c.context.implementation = "fastest"; }},
      {"o: expected a tensor, got none",
       [](Call& c) { c.out.o = {}; },
       {std::begin(kRelatedOps), std::end(kRelatedOps)},
       kForward},
      {"dq: expected memory apart from dk, or another slice of its rows, got an overlap of their address ranges",
       [](Call& c) { c.out.dk.data = c.out.dq.data; },
       {std::begin(kRelatedOps), std::end(kRelatedOps)},
       kBackward},

      {"g: expected a tensor, got none",
       [](Call& c) { c.in.g = {}; },
       {RelatedOp::kSimpleGla, RelatedOp::kGla, RelatedOp::kComba, RelatedOp::kDplr}},
      {"g: expected shape [2, 5, 2], got [2, 5, 3]", [](Call& c) { c.in.g.shape[2] = 3; }, per_head},
      {"g: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", [](Call& c) { c.in.g.shape[3] = 7; }, per_channel},
      {"g: expected none without a gate",
       [](Call& c) { c.in.g = c.in.q; },
       {RelatedOp::kLinearAttention, RelatedOp::kIplr}},

      {"g_gamma: expected none unless the gate is per head",
       [](Call& c) { c.in.g_gamma = vector.view(); },
       {RelatedOp::kLinearAttention, RelatedOp::kGla}},
      {"g: expected none with g_gamma", [](Call& c) { c.in.g_gamma = vector.view(); }, simple},
      {"g_gamma: expected shape [2], got [3]",
       [](Call& c) {
         c.in.g_gamma = longer.view();
         c.in.g = {};
       },
       simple},
      {"g_gamma: expected a floating type",
       [](Call& c) {
         c.in.g_gamma = vector.view();
         c.in.g_gamma.dtype = DType::kI32;
         c.in.g = {};
       },
       simple},
      {"dg: expected none with g_gamma",
       [](Call& c) {
         c.in.g_gamma = vector.view();
         c.in.g = {};
       },
       simple, kBackward},

      {"p: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", [](Call& c) { c.in.p.shape[3] = 7; }, comba},
      {"p: expected type fp32, got fp16", [](Call& c) { c.in.p.dtype = DType::kF16; }, comba},
      {"beta: expected shape [2, 5, 2], got [2, 5, 2, 6]",
       [](Call& c) {
         const TensorView v = c.in.v;
         c.in.beta = v;
       },
       comba},
      {"dp: expected none without p, got a tensor", [](Call& c) { c.in.p = {}; }, comba, kBackward},
      {"dp: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", [](Call& c) { c.out.dp.shape[3] = 7; }, comba, kBackward},
      {"dbeta: expected none without beta, got a tensor", [](Call& c) { c.in.beta = {}; }, comba, kBackward},

      {"a: expected a tensor, got none", [](Call& c) { c.in.a = {}; }, low_rank},
      {"b: expected a tensor, got none", [](Call& c) { c.in.b = {}; }, low_rank},
      {"a: expected shape [2, 5, 2, 8], got [2, 5, 2, 7]", [](Call& c) { c.in.a.shape[3] = 7; }, low_rank},
      {"b: expected type fp32, got bf16", [](Call& c) { c.in.b.dtype = DType::kBF16; }, low_rank},
      {"da: expected memory apart from b, or another slice of its rows, got an overlap of their address ranges",
       [](Call& c) { c.out.da.data = c.in.b.data; }, low_rank, kBackward},
      {"db: expected type fp32, got bf16", [](Call& c) { c.out.db.dtype = DType::kBF16; }, low_rank, kBackward},
  };
}

RelatedSpec small(RelatedOp op) {
  RelatedSpec spec = spec_of(op, 5, 8, 6, 2);
  spec.B = 2;
  return spec;
}

TEST(RelatedErrors, MessagesAndUntouchedOutputs) {
  for (const Malformed& one : malformed()) {
    for (RelatedOp op : one.ops) {
      for (bool backward : {false, true}) {
        if ((one.modes & (backward ? kBackward : kForward)) == 0) continue;
        Call call(small(op), backward);
        one.spoil(call);
        const std::string what = std::string(name_of(op)) + (backward ? " backward: " : " forward: ") + one.message;
        try {
          call.run();
          ADD_FAILURE() << what << ": no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << what;
          EXPECT_EQ(std::string(error.what()).substr(0, one.message.size()), one.message) << what;
        }
        EXPECT_TRUE(call.untouched()) << what;
      }
    }
  }
}

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
    RelatedSpec spec = small(op);
    spec.T = 0;
    Call call(spec, false);
    call.context.device.type = DeviceType::kCuda;
    call.context.trust_pointers = true;  // where there is a device, the pointers would be refused first
    for (TensorView* view : call.in.all()) view->device.type = DeviceType::kCuda;
    for (TensorView* view : call.out.all()) view->device.type = DeviceType::kCuda;
    try {
      call.run();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    }
  }
}

// Nothing to do, no sequences, no tokens: the states are still copied, and nothing fails.
TEST(RelatedValidCalls, Empty) {
  for (RelatedOp op : kRelatedOps) {
    for (RelatedSpec spec : {spec_of(op, 0, 8, 6, 2), with_lengths(spec_of(op, 0, 8, 6, 2), {0, 0, 0})}) {
      for (const std::string& name : implementations(op, "forward")) {
        const RelatedCase problem = support::draw(spec, 4);
        const RelatedResults results = support::forward(problem, context_for(name), true);
        EXPECT_EQ(results.final_state.values(), problem.initial_state.values()) << name;
        const RelatedResults gradients = support::backward(problem, context_for(name));
        EXPECT_EQ(gradients.d_initial_state.values(), problem.d_final_state.values()) << name;
      }
    }
    RelatedSpec nobody = spec_of(op, 5, 8, 6, 2);
    nobody.B = 0;
    support::forward(support::draw(nobody, 4), {}, true);
    support::backward(support::draw(nobody, 4), {});
    RelatedCase problem = support::draw(small(op), 4);
    RelatedResults none;
    support::run_backward(problem.spec, {}, views_of(problem), views_of(none));
  }
}

TEST(RelatedImplementations, ListsEndWithTheReference) {
  for (RelatedOp op : kRelatedOps) {
    for (const char* mode : {"forward", "backward"}) {
      EXPECT_EQ(implementations(op, mode).back(), "reference") << name_of(op) << " " << mode;
    }
  }
}

}  // namespace
}  // namespace fastweight::test
