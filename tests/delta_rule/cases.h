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
  const bool in_double = problem.spec.dtype == DType::kF64;
  const Closeness closeness{
      .tolerance = [&](const std::string& name, DType type) { return tolerance(problem.spec, name, type); },
      .smallest = in_double ? 1e-12 : 1e-6,
      .slack =
          [&](const std::string& name) {
            return in_double ? 0 : kOfGateTerms * rms_of_gate_terms(problem, expected, name);
          }};
  expect_close(results.implementation, results.named(), expected.named(), closeness, describe(problem.spec));
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

// Strided runs ------------------------------------------------------------------------------------------------------

// As support's functions, with every tensor of the call in a strided layout, on the outputs that are given.
inline DeltaRuleResults forward_strided(const DeltaRuleCase& problem, const Context& context, Layout layout,
                                        DeltaRuleResults outputs) {
  DeltaRuleForward args = support::forward_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

inline DeltaRuleResults backward_strided(const DeltaRuleCase& problem, const Context& context, Layout layout,
                                         DeltaRuleResults outputs) {
  DeltaRuleBackward args = support::backward_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

inline DeltaRuleResults step_strided(const DeltaRuleCase& problem, const Context& context, Layout layout,
                                     DeltaRuleResults outputs) {
  DeltaRuleStep args = support::step_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

}  // namespace fastweight::test
