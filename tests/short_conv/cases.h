// What the tests of the short convolution share: the implementations by name, tolerances, strided copies of a problem.
#pragma once

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "fastweight/short_conv.h"
#include "support/short_conv_case.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::ShortConvCase;
using support::ShortConvResults;
using support::ShortConvSpec;

inline std::vector<std::string> implementations(const std::string& mode) {
  return names_of(short_conv_implementations(), mode);
}

// Specs -------------------------------------------------------------------------------------------------------------

inline std::string describe(const ShortConvSpec& spec) {
  std::ostringstream out;
  out << "short_conv B=" << spec.B << " T=" << spec.T << " D=" << spec.D << " W=" << spec.W << " "
      << name_of(spec.dtype) << " parameters " << name_of(spec.parameter_dtype);
  if (!spec.cu_seqlens.empty()) {
    out << " cu_seqlens=[";
    for (size_t i = 0; i < spec.cu_seqlens.size(); ++i) out << (i > 0 ? " " : "") << spec.cu_seqlens[i];
    out << "]";
  }
  if (spec.options.activation == Activation::kSilu) out << " silu";
  if (!spec.bias) out << " no_bias";
  if (!spec.residual) out << " no_residual";
  if (!spec.initial_state) out << " no_initial_state";
  return out.str();
}

inline ShortConvSpec spec_of(int64_t T, int64_t D, int64_t W = 4, Activation activation = Activation::kSilu) {
  ShortConvSpec spec;
  spec.T = T;
  spec.D = D;
  spec.W = W;
  spec.options.activation = activation;
  return spec;
}

// Tolerances --------------------------------------------------------------------------------------------------------

// The largest relative rms error of a result against the reference in double on the same rounded inputs: a few units of
// the result's own type.
inline double tolerance(const ShortConvSpec& spec, DType result_type) {
  if (result_type == DType::kBF16) return 3e-3;
  if (result_type == DType::kF16) return 4e-4;
  return spec.dtype == DType::kF64 && result_type == DType::kF64 ? 1e-12 : 2e-6;
}

inline void expect_close(const ShortConvCase& problem, const ShortConvResults& results,
                         const ShortConvResults& expected) {
  const Closeness closeness{.tolerance = [&](const std::string&, DType type) { return tolerance(problem.spec, type); },
                            .smallest = 1e-12};
  expect_close(results.implementation, results.named(), expected.named(), closeness, describe(problem.spec));
}

// Strided runs ------------------------------------------------------------------------------------------------------

// As support's functions, with every tensor of the call in a strided layout, on the outputs that are given.
inline ShortConvResults forward_strided(const ShortConvCase& problem, const Context& context, Layout layout,
                                        ShortConvResults outputs) {
  ShortConvForward args = support::forward_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

inline ShortConvResults backward_strided(const ShortConvCase& problem, const Context& context, Layout layout,
                                         ShortConvResults outputs) {
  ShortConvBackward args = support::backward_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

inline ShortConvResults step_strided(const ShortConvCase& problem, const Context& context, Layout layout,
                                     ShortConvResults outputs) {
  ShortConvStep args = support::step_args(problem, outputs);
  StridedArguments strided(support::views_of(args), layout);
  outputs.implementation = support::run(context, args);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " wrote outside its outputs\n  " << describe(problem.spec);
  return outputs;
}

// Every mode ---------------------------------------------------------------------------------------------------------

inline ShortConvResults outputs_of(const std::string& mode, const ShortConvCase& problem) {
  if (mode == "forward") return support::forward_outputs(problem);
  return mode == "backward" ? support::backward_outputs(problem) : support::step_outputs(problem);
}

inline ShortConvResults run(const std::string& mode, const ShortConvCase& problem, const Context& context) {
  if (mode == "forward") return support::forward(problem, context);
  return mode == "backward" ? support::backward(problem, context) : support::step(problem, context);
}

inline ShortConvResults run_strided(const std::string& mode, const ShortConvCase& problem, const Context& context,
                                    Layout layout, const ShortConvResults& outputs) {
  if (mode == "forward") return forward_strided(problem, context, layout, outputs);
  return mode == "backward" ? backward_strided(problem, context, layout, outputs)
                            : step_strided(problem, context, layout, outputs);
}

inline const std::vector<std::string>& modes() {
  static const std::vector<std::string>& names = *new std::vector<std::string>{"forward", "backward", "step"};
  return names;
}

// visit(mode, implementation) for all that there are.
template <class Visit>
void for_each_implementation(const Visit& visit) {
  for (const std::string& mode : modes()) {
    for (const std::string& name : implementations(mode)) visit(mode, name);
  }
}

// Every implementation of every mode on this problem, against the reference in double.
inline void check(const ShortConvCase& problem, Layout layout = Layout::kDense) {
  const ShortConvCase exact = support::in_double(problem);
  for (const std::string& mode : modes()) {
    const ShortConvResults expected = run(mode, exact, reference_context());
    for (const std::string& name : implementations(mode)) {
      const auto results = unless_declined(mode, name, [&] {
        return layout == Layout::kDense
                   ? run(mode, problem, context_for(name))
                   : run_strided(mode, problem, context_for(name), layout, outputs_of(mode, problem));
      });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

}  // namespace fastweight::test
