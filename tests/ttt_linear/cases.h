// What the tests of the TTT-linear family share: the implementations by name, tolerances, strided copies of a problem.
#pragma once

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "fastweight/ttt_linear.h"
#include "support/random.h"
#include "support/ttt_linear_case.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::TttLinearCase;
using support::TttLinearOpen;
using support::TttLinearResults;
using support::TttLinearSpec;

// The implementations -----------------------------------------------------------------------------------------------

inline std::vector<std::string> implementations(const std::string& mode) {
  return names_of(ttt_linear_implementations(), mode);
}

// Specs -------------------------------------------------------------------------------------------------------------

inline std::string describe(const TttLinearSpec& spec) {
  std::ostringstream out;
  out << "ttt_linear B=" << spec.B << " T=" << spec.T << " H=" << spec.H << " D=" << spec.D
      << " C=" << spec.options.mini_batch << " " << name_of(spec.dtype) << " parameters "
      << name_of(spec.parameter_dtype);
  if (!spec.cu_seqlens.empty()) {
    out << " cu_seqlens=[";
    for (size_t i = 0; i < spec.cu_seqlens.size(); ++i) out << (i > 0 ? " " : "") << spec.cu_seqlens[i];
    out << "]";
  }
  if (spec.options.scale != TttLinearOptions::kUnset) out << " scale=" << spec.options.scale;
  if (spec.options.eps != TttLinearOptions{}.eps) out << " eps=" << spec.options.eps;
  if (!spec.initial_state) out << " no_initial_state";
  if (!spec.initial_state_bias) out << " no_initial_state_bias";
  return out.str();
}

inline TttLinearSpec spec_of(int64_t T, int64_t D, int64_t H = 1) {
  TttLinearSpec spec;
  spec.T = T;
  spec.D = D;
  spec.H = H;
  return spec;
}

// Tolerances --------------------------------------------------------------------------------------------------------

// The largest relative rms error of a result against the reference in double on the same rounded inputs.
inline double tolerance(const TttLinearSpec& spec, const std::string& tensor, DType result_type) {
  if (is_16_bit(spec.dtype) || is_16_bit(result_type)) {
    if (tensor == "dk") return 1e-2;
    if (tensor == "dv" || tensor == "d_initial_state") return 7e-3;
    if (tensor == "dw" || tensor == "db") return 6e-3;
    if (tensor == "deta") return 3e-2;
    return 5e-3;
  }
  return spec.dtype == DType::kF64 && result_type == DType::kF64 ? 1e-10 : 1e-5;
}

inline void expect_close(const TttLinearCase& problem, const TttLinearResults& results,
                         const TttLinearResults& expected) {
  const Closeness closeness{
      .tolerance = [&](const std::string& name, DType type) { return tolerance(problem.spec, name, type); },
      .smallest = problem.spec.dtype == DType::kF64 ? 1e-12 : 1e-6};
  expect_close(results.implementation, results.named(), expected.named(), closeness, describe(problem.spec));
}

// Every implementation of the mode on this problem, against the reference in double.
inline void check_forward(const TttLinearCase& problem) {
  const TttLinearResults expected = support::forward(support::in_double(problem), reference_context());
  for (const std::string& name : implementations("forward")) {
    const auto results = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

inline void check_backward(const TttLinearCase& problem) {
  const TttLinearResults expected = support::backward(support::in_double(problem), reference_context());
  for (const std::string& name : implementations("backward")) {
    const auto results =
        unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

inline void check_step(const TttLinearCase& problem) {
  const TttLinearResults expected = support::step(support::in_double(problem), reference_context());
  for (const std::string& name : implementations("step")) {
    const auto results = unless_declined("step", name, [&] { return support::step(problem, context_for(name)); });
    if (results) expect_close(problem, *results, expected);
  }
}

// Parts of problems -------------------------------------------------------------------------------------------------

inline TttLinearOpen open_after(const TttLinearResults& step) {
  return {step.final_state, step.final_state_bias, step.gradient, step.gradient_bias, step.position};
}

// Strided runs ------------------------------------------------------------------------------------------------------

// As support's functions, with every tensor of the call in a strided layout, on the outputs that are given.
inline TttLinearResults forward_strided(const TttLinearCase& problem, const Context& context, Layout layout,
                                        TttLinearResults outputs) {
  TttLinearForward args = support::forward_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

inline TttLinearResults backward_strided(const TttLinearCase& problem, const Context& context, Layout layout,
                                         TttLinearResults outputs) {
  TttLinearBackward args = support::backward_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

inline TttLinearResults step_strided(const TttLinearCase& problem, const Context& context, Layout layout,
                                     TttLinearResults outputs) {
  TttLinearStep args = support::step_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

}  // namespace fastweight::test
