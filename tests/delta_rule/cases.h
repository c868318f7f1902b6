// What the tests of the delta-rule family share: the implementations by name, tolerances, strided copies of a problem.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fastweight/delta_rule.h"
#include "fastweight/error.h"
#include "support/delta_rule_case.h"

namespace fastweight::test {

using support::DeltaRuleCase;
using support::DeltaRuleResults;
using support::DeltaRuleSpec;
using support::Tensor;

inline constexpr Gate kGates[] = {Gate::kNone, Gate::kPerHead, Gate::kPerChannel};

// Set for slow builds (sanitizers): the grids shrink.
inline bool reduced() {
  const char* value = std::getenv("FASTWEIGHT_TEST_REDUCED");
  return value != nullptr && std::string(value) != "" && std::string(value) != "0";
}

// Every value, or only the first few in a reduced run.
template <class T>
std::vector<T> first(std::vector<T> values, size_t count_if_reduced) {
  if (reduced() && values.size() > count_if_reduced) values.resize(count_if_reduced);
  return values;
}

// The implementations -----------------------------------------------------------------------------------------------

inline std::vector<std::string> implementations(const std::string& mode) {
  std::vector<std::string> names;
  for (const ImplementationInfo& info : delta_rule_implementations()) {
    if (info.mode == mode && info.device == "cpu") names.push_back(info.name);
  }
  return names;
}

inline Context context_for(const std::string& implementation, int num_threads = 0) {
  Context context;
  context.implementation = implementation;
  context.num_threads = num_threads;
  return context;
}

inline Context reference_context() { return context_for("reference"); }

// Who ran how often, and why others did not. Printed after the last test; an implementation that declined everything
// in a full run is a failure.
class Tally : public ::testing::Environment {
 public:
  static Tally& get() {
    static Tally* const tally = static_cast<Tally*>(::testing::AddGlobalTestEnvironment(new Tally));
    return *tally;
  }
  void ran(const std::string& name) { ++entries_[name].ran; }
  void declined(const std::string& name, const std::string& reason) {
    ++entries_[name].declined;
    entries_[name].reasons.insert(reason);
  }
  void TearDown() override {
    for (const auto& [name, entry] : entries_) {
      std::printf("%-20s ran %d, declined %d\n", name.c_str(), entry.ran, entry.declined);
      for (const std::string& reason : entry.reasons) std::printf("    %s\n", reason.c_str());
      if (::testing::GTEST_FLAG(filter) == "*") {
        EXPECT_GT(entry.ran, 0) << name << " declined every case";
      }
    }
  }

 private:
  struct Entry {
    int ran = 0, declined = 0;
    std::set<std::string> reasons;
  };
  std::map<std::string, Entry> entries_;
};
inline Tally& g_tally = Tally::get();

// The results of run(), or nothing if the implementation declines the problem.
template <class Run>
std::optional<DeltaRuleResults> unless_declined(const std::string& mode, const std::string& implementation,
                                                const Run& run) {
  const std::string key = mode + " " + (implementation.empty() ? "(automatic)" : implementation);
  try {
    DeltaRuleResults results = run();
    if (!implementation.empty()) {
      EXPECT_EQ(results.implementation, implementation);
    }
    g_tally.ran(key);
    return results;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    g_tally.declined(key, error.what());
    return std::nullopt;
  }
}

// Specs -------------------------------------------------------------------------------------------------------------

inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"f32", "bf16", "f16", "f64", "i32", "i64"};
  return kNames[static_cast<size_t>(dtype)];
}

inline const char* name_of(Gate gate) {
  constexpr const char* kNames[] = {"delta_rule", "gdn", "kda"};
  return kNames[static_cast<size_t>(gate)];
}

inline std::string describe(const DeltaRuleSpec& spec) {
  const DeltaRuleOptions& options = spec.options;
  std::ostringstream out;
  out << name_of(options.gate) << " B=" << spec.B << " T=" << spec.T << " H=" << spec.H << " HV=" << spec.HV
      << " K=" << spec.K << " V=" << spec.V << " C=" << options.chunk_size << " " << name_of(spec.dtype) << " gates "
      << name_of(spec.gate_dtype);
  if (!spec.cu_seqlens.empty()) {
    out << " cu_seqlens=[";
    for (size_t i = 0; i < spec.cu_seqlens.size(); ++i) out << (i > 0 ? " " : "") << spec.cu_seqlens[i];
    out << "]";
  }
  if (options.scale != DeltaRuleOptions::kUnset) out << " scale=" << options.scale;
  if (options.state_v_first) out << " state_v_first";
  if (options.qk_l2norm) out << " qk_l2norm";
  if (options.beta_sigmoid) out << (options.allow_neg_eigval ? " beta_sigmoid(x2)" : " beta_sigmoid");
  if (options.gate_in_kernel) out << " gate_in_kernel";
  if (options.lower_bound != DeltaRuleOptions::kUnset) out << " lower_bound=" << options.lower_bound;
  if (options.safe_gate) out << " safe_gate";
  if (!spec.initial_state) out << " no_initial_state";
  if (spec.beta_absent) out << " beta_absent";
  if (spec.beta_per_value) out << " beta_per_value";
  if (spec.a_log_absent) out << " a_log_absent";
  if (spec.dt_bias_absent) out << " dt_bias_absent";
  if (spec.gate_divisor != 1) out << " gate_divisor=" << spec.gate_divisor;
  if (spec.hard_gate_fraction > 0) out << " hard_gate_fraction=" << spec.hard_gate_fraction;
  return out.str();
}

inline DeltaRuleSpec spec_of(Gate gate, int64_t T, int64_t K, int64_t V) {
  DeltaRuleSpec spec;
  spec.options.gate = gate;
  spec.T = T;
  spec.K = K;
  spec.V = V;
  return spec;
}

// With grouped value heads; the family has them for the gated operators.
inline DeltaRuleSpec with_heads(DeltaRuleSpec spec, int64_t H, int64_t group) {
  spec.H = H;
  spec.HV = H * group;
  return spec;
}

inline DeltaRuleSpec with_lengths(DeltaRuleSpec spec, const std::vector<int64_t>& lengths) {
  spec.B = 1;
  spec.cu_seqlens = {0};
  for (int64_t length : lengths) spec.cu_seqlens.push_back(spec.cu_seqlens.back() + length);
  spec.T = spec.cu_seqlens.back();
  return spec;
}

// Tolerances --------------------------------------------------------------------------------------------------------

inline bool is_16_bit(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// The largest relative rms error of a result against the reference in double on the same rounded inputs.
inline double tolerance(const DeltaRuleSpec& spec, const std::string& tensor, DType result_type) {
  const Gate gate = spec.options.gate;
  if (is_16_bit(spec.dtype) || is_16_bit(result_type)) {
    if (tensor == "o" || tensor == "final_state" || tensor == "chunk_states") return gate == Gate::kNone ? 6e-3 : 5e-3;
    if (tensor == "dbeta") return gate == Gate::kNone ? 8e-3 : 2e-2;
    if (tensor == "dg") return 2e-2;
    if (tensor == "da_log" || tensor == "ddt_bias") return gate == Gate::kPerHead ? 2e-2 : 8e-3;
    return 8e-3;
  }
  if (spec.dtype == DType::kF64 && result_type == DType::kF64) return 1e-10;
  // Cumulative gates in fp32 lose digits when they are large: spec/building_blocks.md section 10.
  const bool large_gates = spec.hard_gate_fraction > 0 || spec.gate_divisor < 0.5;
  return gate == Gate::kPerChannel && large_gates ? 5e-4 : 1e-5;
}

// The rms of the terms whose difference a gate gradient is (dgamma = q dq + k dk_row - k dk_col); 0 for other
// tensors. Where the decay leaves little, the difference is far smaller than its terms, and fp32 keeps the digits of
// the terms.
inline double rms_of_gate_terms(const DeltaRuleCase& problem, const DeltaRuleResults& expected,
                                const std::string& tensor) {
  const DeltaRuleSpec& spec = problem.spec;
  if ((tensor != "dg" && tensor != "da_log" && tensor != "ddt_bias") || problem.q.size() == 0) return 0;
  const int64_t width = spec.options.gate == Gate::kPerHead ? spec.K : 1;
  double squares = 0;
  for (int64_t i = 0; i < problem.q.size(); i += width) {
    double sum = 0;
    for (int64_t j = i; j < i + width; ++j) {
      sum += std::fabs(problem.q[j] * expected.dq[j]) + std::fabs(problem.k[j] * expected.dk[j]);
    }
    squares += sum * sum;
  }
  const double terms = std::sqrt(squares * static_cast<double>(width) / static_cast<double>(problem.q.size()));
  // The parameters' gradients are sums over tokens (and channels) with factors up to the size of the gate.
  if (tensor == "dg") return terms;
  const double bound = spec.options.lower_bound == DeltaRuleOptions::kUnset ? 1 : -spec.options.lower_bound;
  const double summed = static_cast<double>(problem.g.size()) /
                        static_cast<double>(tensor == "da_log" ? expected.da_log.size() : expected.ddt_bias.size());
  return terms * std::sqrt(summed) * std::max(1.0, bound);
}

inline double rms(const Tensor& x) {
  double squares = 0;
  for (double value : x.values()) squares += value * value;
  return x.size() == 0 ? 0 : std::sqrt(squares / static_cast<double>(x.size()));
}

inline void expect_close(const DeltaRuleCase& problem, const DeltaRuleResults& results,
                         const DeltaRuleResults& expected) {
  constexpr double kOfGateTerms = 2e-6;
  const auto actual = results.named();
  const auto wanted = expected.named();
  ASSERT_EQ(actual.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto& [name, tensor] = wanted[i];
    ASSERT_EQ(actual[i].first, name);
    const support::Difference difference = support::compare(*actual[i].second, *tensor);
    const double bound = tolerance(problem.spec, name, actual[i].second->dtype());
    bool close = difference.relative_rms < bound;
    if (problem.spec.dtype == DType::kF64) {
      close = close || difference.max_abs <= 1e-12;
    } else {
      const double rms_error = difference.relative_rms * (rms(*tensor) + 1e-8);
      close =
          close || difference.max_abs <= 1e-6 || rms_error <= kOfGateTerms * rms_of_gate_terms(problem, expected, name);
    }
    EXPECT_TRUE(close) << results.implementation << " " << name << ": relative rms " << difference.relative_rms
                       << ", largest " << difference.max_abs << ", allowed " << bound << "\n  "
                       << describe(problem.spec);
  }
}

inline void expect_same_bits(const DeltaRuleResults& results, const DeltaRuleResults& expected,
                             const std::string& what = "") {
  const auto actual = results.named(), wanted = expected.named();
  ASSERT_EQ(actual.size(), wanted.size()) << what;
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(support::same_bits(*actual[i].second, *wanted[i].second))
        << results.implementation << " " << wanted[i].first << ": the largest difference is "
        << support::compare(*actual[i].second, *wanted[i].second).max_abs << " " << what;
  }
}

// Every CPU implementation of the mode on this problem, against the reference in double.
inline void check_forward(const DeltaRuleCase& problem, bool chunk_states = false) {
  const DeltaRuleResults expected = support::forward(support::in_double(problem), reference_context(), chunk_states);
  for (const std::string& name : implementations("forward")) {
    const auto results =
        unless_declined("forward", name, [&] { return support::forward(problem, context_for(name), chunk_states); });
    if (results) expect_close(problem, *results, expected);
  }
}

inline void check_backward(const DeltaRuleCase& problem) {
  const DeltaRuleResults expected = support::backward(support::in_double(problem), reference_context());
  for (const std::string& name : implementations("backward")) {
    const auto results =
        unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

inline void check_step(const DeltaRuleCase& problem) {
  const DeltaRuleResults expected = support::step(support::in_double(problem), reference_context());
  for (const std::string& name : implementations("step")) {
    const auto results = unless_declined("step", name, [&] { return support::step(problem, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

// Parts of tensors --------------------------------------------------------------------------------------------------

// x[.., begin:end, ..] along one axis; absent stays absent.
inline Tensor slice(const Tensor& x, size_t axis, int64_t begin, int64_t end) {
  if (!x.present()) return {};
  std::vector<int64_t> shape = x.shape();
  int64_t inner = 1, outer = 1;
  for (size_t i = 0; i < shape.size(); ++i) (i < axis ? outer : inner) *= i == axis ? 1 : shape[i];
  const int64_t extent = shape[axis];
  shape[axis] = end - begin;
  Tensor result(x.dtype(), shape);
  const size_t width = support::element_size(x.dtype()) * static_cast<size_t>(inner);
  const size_t bytes = width * static_cast<size_t>(end - begin);
  for (int64_t i = 0; i < outer && bytes > 0; ++i) {
    std::memcpy(static_cast<std::byte*>(result.data()) + static_cast<size_t>(i) * bytes,
                static_cast<const std::byte*>(x.data()) + static_cast<size_t>(i * extent + begin) * width, bytes);
  }
  return result;
}

// The problem of tokens [begin, end) of every batch row. The states are the caller's business.
inline DeltaRuleCase slice_tokens(const DeltaRuleCase& problem, int64_t begin, int64_t end) {
  DeltaRuleCase part = problem;
  part.spec.T = end - begin;
  part.spec.cu_seqlens.clear();
  part.cu_seqlens = {};
  for (Tensor* x : {&part.q, &part.k, &part.v, &part.g, &part.beta, &part.d_o}) *x = slice(*x, 1, begin, end);
  return part;
}

// Strided copies ----------------------------------------------------------------------------------------------------

// How a dense tensor is spread in memory: the order of the axes from the widest stride to the narrowest, the distance
// of neighbours along the narrowest, and a gap after every row, plane, .. .
enum class Layout { kDense, kHeadsFirst, kEverySecond, kReversed };
inline constexpr Layout kLayouts[] = {Layout::kDense, Layout::kHeadsFirst, Layout::kEverySecond, Layout::kReversed};

// A strided view into a buffer with guard zones around and between the elements.
class StridedTensor {
 public:
  StridedTensor() = default;

  // Holds the values of x; absent if x is.
  StridedTensor(const Tensor& x, Layout layout) {
    if (!x.present()) return;
    std::vector<size_t> order(x.shape().size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    if (layout == Layout::kHeadsFirst && order.size() >= 3) std::swap(order[1], order[2]);
    if (layout == Layout::kReversed) std::reverse(order.begin(), order.end());

    view_ = x.view();
    int64_t stride = layout == Layout::kEverySecond ? 2 : 1;
    for (size_t i = order.size(); i-- > 0;) {
      view_.strides[order[i]] = stride;
      stride *= view_.shape[order[i]];
      if (layout != Layout::kDense) stride += 3;
    }
    buffer_ = Tensor(x.dtype(), {stride + 2 * kGuard});
    std::memset(buffer_.data(), kSentinel, buffer_bytes());
    view_.data = static_cast<std::byte*>(buffer_.data()) + kGuard * support::element_size(x.dtype());
    shape_ = x.shape();
    for_each_element([&](int64_t flat, int64_t position) { buffer_.set(position, x[flat]); });
  }

  TensorView view() const { return view_; }

  Tensor dense() const {
    if (shape_.empty()) return {};
    Tensor result(buffer_.dtype(), shape_);
    for_each_element([&](int64_t flat, int64_t position) { result.set(flat, buffer_[position]); });
    return result;
  }

  // Nothing but the view's elements was written.
  bool guards_intact() const {
    if (shape_.empty()) return true;
    const size_t size = support::element_size(buffer_.dtype());
    std::vector<std::byte> bytes(buffer_bytes());
    std::memcpy(bytes.data(), buffer_.data(), bytes.size());
    for_each_element([&](int64_t, int64_t position) {
      std::memset(bytes.data() + static_cast<size_t>(position) * size, kSentinel, size);
    });
    for (std::byte byte : bytes) {
      if (byte != static_cast<std::byte>(kSentinel)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 64;  // elements
  static constexpr int kSentinel = 0x5a;

  size_t buffer_bytes() const { return static_cast<size_t>(buffer_.size()) * support::element_size(buffer_.dtype()); }

  template <class Visit>
  void for_each_element(const Visit& visit) const {
    int64_t count = 1;
    for (int64_t extent : shape_) count *= extent;
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t rest = flat, position = kGuard;
      for (size_t axis = shape_.size(); axis-- > 0;) {
        position += rest % shape_[axis] * view_.strides[axis];
        rest /= shape_[axis];
      }
      visit(flat, position);
    }
  }

  TensorView view_;
  std::vector<int64_t> shape_;
  Tensor buffer_;
};

// The inputs of a problem in a strided layout.
class StridedInputs {
 public:
  StridedInputs(const DeltaRuleCase& problem, Layout layout)
      : q_(problem.q, layout),
        k_(problem.k, layout),
        v_(problem.v, layout),
        g_(problem.g, layout),
        beta_(problem.beta, layout),
        a_log_(problem.a_log, layout),
        dt_bias_(problem.dt_bias, layout),
        initial_state_(problem.initial_state, layout),
        cu_seqlens_(problem.cu_seqlens, layout) {}

  DeltaRuleInputs views() const {
    DeltaRuleInputs in;
    in.q = q_.view();
    in.k = k_.view();
    in.v = v_.view();
    in.g = g_.view();
    in.beta = beta_.view();
    in.a_log = a_log_.view();
    in.dt_bias = dt_bias_.view();
    in.initial_state = initial_state_.view();
    in.cu_seqlens = cu_seqlens_.view();
    return in;
  }

 private:
  StridedTensor q_, k_, v_, g_, beta_, a_log_, dt_bias_, initial_state_, cu_seqlens_;
};

// As support::forward with chunk states, everything strided. The outputs take the types and shapes of `like`.
inline DeltaRuleResults forward_strided(const DeltaRuleCase& problem, const Context& context, Layout layout,
                                        const DeltaRuleResults& like) {
  const StridedInputs in(problem, layout);
  const StridedTensor o(like.o, layout), final_state(like.final_state, layout), chunk_states(like.chunk_states, layout);
  DeltaRuleForward args;
  args.in = in.views();
  args.options = problem.spec.options;
  args.o = o.view();
  args.final_state = final_state.view();
  args.chunk_states = chunk_states.view();
  DeltaRuleResults results;
  results.implementation = delta_rule_forward(context, args);
  for (const StridedTensor* x : {&o, &final_state, &chunk_states}) {
    EXPECT_TRUE(x->guards_intact()) << results.implementation << " wrote outside its outputs\n  "
                                    << describe(problem.spec);
  }
  results.o = o.dense();
  results.final_state = final_state.dense();
  results.chunk_states = chunk_states.dense();
  return results;
}

inline DeltaRuleResults backward_strided(const DeltaRuleCase& problem, const Context& context, Layout layout,
                                         const DeltaRuleResults& like) {
  const StridedInputs in(problem, layout);
  const StridedTensor d_o(problem.d_o, layout), d_final_state(problem.d_final_state, layout);
  const StridedTensor dq(like.dq, layout), dk(like.dk, layout), dv(like.dv, layout), dg(like.dg, layout),
      dbeta(like.dbeta, layout), da_log(like.da_log, layout), ddt_bias(like.ddt_bias, layout),
      d_initial_state(like.d_initial_state, layout);
  DeltaRuleBackward args;
  args.in = in.views();
  args.options = problem.spec.options;
  args.d_o = d_o.view();
  args.d_final_state = d_final_state.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  args.dg = dg.view();
  args.dbeta = dbeta.view();
  args.da_log = da_log.view();
  args.ddt_bias = ddt_bias.view();
  args.d_initial_state = d_initial_state.view();
  DeltaRuleResults results;
  results.implementation = delta_rule_backward(context, args);
  for (const StridedTensor* x : {&dq, &dk, &dv, &dg, &dbeta, &da_log, &ddt_bias, &d_initial_state}) {
    EXPECT_TRUE(x->guards_intact()) << results.implementation << " wrote outside its outputs\n  "
                                    << describe(problem.spec);
  }
  results.dq = dq.dense();
  results.dk = dk.dense();
  results.dv = dv.dense();
  results.dg = dg.dense();
  results.dbeta = dbeta.dense();
  results.da_log = da_log.dense();
  results.ddt_bias = ddt_bias.dense();
  results.d_initial_state = d_initial_state.dense();
  return results;
}

// Outputs of the shapes of `expected`, of the types that support's runs use, with every value NaN.
inline DeltaRuleResults outputs_like(const DeltaRuleResults& expected, const DeltaRuleCase& problem) {
  const DType wide = problem.spec.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto poisoned = [](const Tensor& x, DType dtype) {
    if (!x.present()) return Tensor();
    Tensor result(dtype, x.shape());
    result.fill(std::numeric_limits<double>::quiet_NaN());
    return result;
  };
  DeltaRuleResults outputs;
  outputs.o = poisoned(expected.o, problem.spec.dtype);
  outputs.final_state = poisoned(expected.final_state, wide);
  outputs.chunk_states = poisoned(expected.chunk_states, wide);
  outputs.dq = poisoned(expected.dq, problem.q.dtype());
  outputs.dk = poisoned(expected.dk, problem.k.dtype());
  outputs.dv = poisoned(expected.dv, problem.v.dtype());
  outputs.dg = poisoned(expected.dg, problem.g.dtype());
  outputs.dbeta = poisoned(expected.dbeta, problem.beta.dtype());
  outputs.da_log = poisoned(expected.da_log, problem.a_log.dtype());
  outputs.ddt_bias = poisoned(expected.ddt_bias, problem.dt_bias.dtype());
  outputs.d_initial_state = poisoned(expected.d_initial_state, wide);
  return outputs;
}

}  // namespace fastweight::test
