// An allocation that fails anywhere in a call becomes an error of the library.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"

namespace {

// How many allocations of this thread succeed before one fails; below 0: all do.
thread_local int64_t g_until_failure = -1;

}  // namespace

void* operator new(size_t bytes) {
  void* block = g_until_failure-- == 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
// Whoever asks this way can do without: it is left alone.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes == 0 ? 1 : bytes); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }

namespace fastweight {
namespace {

struct Outcome {
  std::optional<ErrorCode> code;  // none: the call returned
  std::string message;
  bool failed = false;  // an allocation did
};

// The call with its n-th allocation failing, and that one alone: the message of the error finds memory.
Outcome outcome(const std::function<void()>& call, int64_t n) {
  Outcome outcome;
  g_until_failure = n;
  try {
    call();
    outcome.failed = g_until_failure < 0;
    g_until_failure = -1;
  } catch (const Error& error) {
    outcome.failed = g_until_failure < 0;
    g_until_failure = -1;
    outcome.code = error.code();
    outcome.message = error.what();
  } catch (const std::bad_alloc&) {
    g_until_failure = -1;
    ADD_FAILURE() << "std::bad_alloc from allocation " << n;
    outcome.failed = true;
  }
  return outcome;
}

// Every allocation of the call fails once; the last round, in which none does, ends as `expected`.
void expect_errors(const std::string& entry, std::optional<ErrorCode> expected, const std::function<void()>& call) {
  SCOPED_TRACE(entry);
  for (int64_t n = 0; n < 1000; ++n) {
    const Outcome result = outcome(call, n);
    if (!result.failed) {
      EXPECT_EQ(result.code, expected) << result.message;
      EXPECT_GT(n, 0) << "a call without allocations tests nothing";
      return;
    }
    EXPECT_EQ(result.code, ErrorCode::kOutOfMemory) << "allocation " << n << ": " << result.message;
    EXPECT_EQ(result.message, entry + ": out of host memory") << "allocation " << n;
  }
  FAIL() << "more allocations than there can be";
}

// Tensors of B = 2, T = 3, H = 2, K = V = D = 4, and slots for the steps.
class FailingAllocations : public testing::Test {
 protected:
  FailingAllocations() {
    context_.num_threads = 1;
    context_.verbose = true;
    context_.log = [](void*, const char*) {};
  }

  TensorView make(std::initializer_list<int64_t> shape) {
    return TensorView::dense(buffers_.emplace_back(256, 0.5f).data(), shape);
  }
  template <class Inputs>
  void fill(Inputs& in) {
    in.q = make({2, 3, 2, 4});
    in.k = make({2, 3, 2, 4});
    in.v = make({2, 3, 2, 4});
  }
  void fill(TttLinearInputs& in) {
    fill<TttLinearInputs>(in);
    in.w = make({2, 4});
    in.b = make({2, 4});
    in.eta = make({2, 3, 2});
  }
  void fill(ShortConvInputs& in) {
    in.x = make({2, 3, 4});
    in.w = make({4, 4});
  }

  Context context_;
  std::deque<std::vector<float>> buffers_;
  int64_t indices_[2] = {2, 0};
  int32_t positions_[3] = {0, 0, 0};
  const TensorView slots_ = TensorView::dense(indices_, DType::kI64, {2});
};

TEST_F(FailingAllocations, Forward) {
  DeltaRuleForward delta_rule;
  fill(delta_rule.in);
  delta_rule.o = make({2, 3, 2, 4});
  for (const char* name : {"", "chunk", "recurrent", "reference"}) {
    context_.implementation = name;
    expect_errors("delta_rule_forward", {}, [&] { delta_rule_forward(context_, delta_rule); });
  }
  context_.implementation = "";
  TttLinearForward ttt;
  fill(ttt.in);
  ttt.o = make({2, 3, 2, 4});
  expect_errors("ttt_linear_forward", {}, [&] { ttt_linear_forward(context_, ttt); });
  ShortConvForward conv;
  fill(conv.in);
  conv.y = make({2, 3, 4});
  expect_errors("short_conv_forward", {}, [&] { short_conv_forward(context_, conv); });
  const L2NormForward norm{make({2, 3, 4}), 1e-6, make({2, 3, 4}), {}};
  expect_errors("l2norm_forward", {}, [&] { l2norm_forward(context_, norm); });
  CombaForward comba;
  fill(comba.in);
  comba.in.g = make({2, 3, 2});
  comba.in.beta = make({2, 3, 2});
  comba.o = make({2, 3, 2, 4});
  expect_errors("comba_forward", {}, [&] { comba_forward(context_, comba); });
}

TEST_F(FailingAllocations, StepWithSlots) {
  DeltaRuleStep delta_rule;
  fill(delta_rule.in);
  delta_rule.state = make({3, 2, 4, 4});
  delta_rule.state_indices = slots_;
  delta_rule.o = make({2, 3, 2, 4});
  expect_errors("delta_rule_step", {}, [&] { delta_rule_step(context_, delta_rule); });
  TttLinearStep ttt;
  fill(ttt.in);
  ttt.state = make({3, 2, 4, 4});
  ttt.state_bias = make({3, 2, 4});
  ttt.gradient = make({3, 2, 4, 4});
  ttt.gradient_bias = make({3, 2, 4});
  ttt.position = TensorView::dense(positions_, DType::kI32, {3});
  ttt.state_indices = slots_;
  ttt.o = make({2, 3, 2, 4});
  expect_errors("ttt_linear_step", {}, [&] { ttt_linear_step(context_, ttt); });
  ShortConvStep conv;
  fill(conv.in);
  conv.state = make({3, 4, 4});
  conv.state_indices = slots_;
  conv.y = make({2, 3, 4});
  expect_errors("short_conv_step", {}, [&] { short_conv_step(context_, conv); });
}

// The message of the refusal is what finds no memory.
TEST_F(FailingAllocations, RefusedCalls) {
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  DeltaRuleForward delta_rule;
  fill(delta_rule.in);
  delta_rule.o = make({2, 3, 2, 5});
  expect_errors("delta_rule_forward", kInvalid, [&] { delta_rule_forward(context_, delta_rule); });
  expect_errors("delta_rule_num_chunks", kInvalid, [&] { delta_rule_num_chunks(-1, {}, 64); });
  TttLinearBackward ttt;
  fill(ttt.in);
  ttt.d_initial_state = make({2, 2, 4, 4});
  expect_errors("ttt_linear_backward", kInvalid, [&] { ttt_linear_backward(context_, ttt); });
  ShortConvBackward conv;
  expect_errors("short_conv_backward", kInvalid, [&] { short_conv_backward(context_, conv); });
  expect_errors("l2norm_backward", kInvalid, [&] { l2norm_backward(context_, {}); });
  GlaForward gla;
  fill(gla.in);
  gla.in.g_gamma = make({2});
  expect_errors("gla_forward", kInvalid, [&] { gla_forward(context_, gla); });
  DplrBackward dplr;
  dplr.options.gate = Gate::kPerHead;
  expect_errors("dplr_backward", kInvalid, [&] { dplr_backward(context_, dplr); });
  delta_rule.o = make({2, 3, 2, 4});
  context_.implementation = "nonsense";
  expect_errors("delta_rule_forward", kInvalid, [&] { delta_rule_forward(context_, delta_rule); });
}

}  // namespace
}  // namespace fastweight
