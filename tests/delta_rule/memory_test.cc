// How much scratch memory a call takes from the context's source, and that it gives all of it back.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#include "support/delta_rule_case.h"

namespace fastweight {
namespace {

struct Meter {
  size_t held = 0, most = 0;

  Context context(const char* implementation) {
    Context context;
    context.implementation = implementation;
    context.num_threads = 2;
    context.workspace.user = this;
    context.workspace.allocate = [](void* user, size_t bytes) {
      auto* meter = static_cast<Meter*>(user);
      meter->held += bytes;
      meter->most = std::max(meter->most, meter->held);
      return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    };
    context.workspace.release = [](void* user, void* pointer, size_t bytes) {
      static_cast<Meter*>(user)->held -= bytes;
      std::free(pointer);
    };
    return context;
  }
};

support::DeltaRuleCase problem(Gate gate, int64_t tokens) {
  support::DeltaRuleSpec spec;
  spec.T = tokens;
  spec.H = spec.HV = 8;
  spec.K = 32;
  spec.V = 48;
  spec.options.gate = gate;
  return support::draw(spec, 1);
}

class DeltaRuleMemory : public ::testing::TestWithParam<Gate> {};

TEST_P(DeltaRuleMemory, ForwardDoesNotGrowWithLength) {
  for (const char* implementation : {"chunk", "recurrent"}) {
    size_t most[2];
    for (int i = 0; i < 2; ++i) {
      Meter meter;
      support::forward(problem(GetParam(), i == 0 ? 256 : 1024), meter.context(implementation));
      EXPECT_EQ(meter.held, 0u);
      EXPECT_GT(meter.most, 0u);
      most[i] = meter.most;
    }
    EXPECT_EQ(most[0], most[1]) << implementation;
  }
}

// One fp32 state per chunk of 64, and per token one row of values and 2 x 16 pair factors, for each of two threads; V
// is padded to at most 64.
TEST_P(DeltaRuleMemory, BackwardGrowsByAtMostOneStatePerChunk) {
  for (const char* implementation : {"chunk", "recurrent"}) {
    size_t most[2];
    const int64_t lengths[2] = {256, 1024};
    for (int i = 0; i < 2; ++i) {
      Meter meter;
      support::backward(problem(GetParam(), lengths[i]), meter.context(implementation));
      EXPECT_EQ(meter.held, 0u);
      most[i] = meter.most;
    }
    const int64_t more_tokens = lengths[1] - lengths[0];
    const size_t state = 32 * 64 * sizeof(float), row = (64 + 2 * 16) * sizeof(float);
    EXPECT_LE(most[1] - most[0],
              2 * (static_cast<size_t>(more_tokens / 64) * state + static_cast<size_t>(more_tokens) * row))
        << implementation;
  }
}

INSTANTIATE_TEST_SUITE_P(Gates, DeltaRuleMemory, ::testing::Values(Gate::kNone, Gate::kPerHead, Gate::kPerChannel));

}  // namespace
}  // namespace fastweight
