// What the tests of the delta-rule family share: the implementations by name, tolerances, strided copies of a problem.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "fastweight/delta_rule.h"
#include "support/delta_rule_case.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::DeltaRuleCase;
using support::DeltaRuleResults;
using support::DeltaRuleSpec;

inline constexpr Gate kGates[] = {Gate::kNone, Gate::kPerHead, Gate::kPerChannel};

// The implementations -----------------------------------------------------------------------------------------------

inline std::vector<std::string> implementations(const std::string& mode) {
  return names_of(delta_rule_implementations(), mode);
}

// Specs -------------------------------------------------------------------------------------------------------------

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

// Tolerances --------------------------------------------------------------------------------------------------------

// The largest relative rms error of a result against the reference in double on the same rounded inputs.
inline double tolerance(const DeltaRuleSpec& spec, const std::string& tensor, DType result_type) {
  const Gate gate = spec.options.gate;
  if (is_16_bit(spec.dtype) || is_16_bit(result_type)) {
    if (tensor == "o" || tensor == "final_state" || tensor == "chunk_states") {
      // On tensor cores the operands of every product are rounded, which does not average out over few channels.
      const double room = device().type != DeviceType::kCuda ? 1 : spec.K < 8 ? 2 : 1.4;
      return room * (gate == Gate::kNone ? 6e-3 : 5e-3);
    }
    if (tensor == "dbeta") return gate == Gate::kNone ? 8e-3 : 2e-2;
    if (tensor == "dg") return 2e-2;
    if (tensor == "da_log" || tensor == "ddt_bias") return gate == Gate::kPerHead ? 2e-2 : 8e-3;
    return 8e-3;
  }
  if (spec.dtype == DType::kF64 && result_type == DType::kF64) return 1e-10;
  // Room for forms that take differences of cumulative fp32 gates, which lose digits when the gates are large.
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

// Every implementation of the mode on this problem, against the reference in double.
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

// Strided copies ----------------------------------------------------------------------------------------------------

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
  results.implementation = support::run(context, args);
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
  results.implementation = support::run(context, args);
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
