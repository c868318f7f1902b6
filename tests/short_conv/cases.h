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
  const auto actual = results.named();
  const auto wanted = expected.named();
  ASSERT_EQ(actual.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto& [name, tensor] = wanted[i];
    ASSERT_EQ(actual[i].first, name);
    const support::Difference difference = support::compare(*actual[i].second, *tensor);
    const double bound = tolerance(problem.spec, actual[i].second->dtype());
    EXPECT_TRUE(difference.relative_rms < bound || difference.max_abs <= 1e-12)
        << results.implementation << " " << name << ": relative rms " << difference.relative_rms << ", largest "
        << difference.max_abs << ", allowed " << bound << "\n  " << describe(problem.spec);
  }
}

// Outputs of the shapes and types of `expected`'s counterparts in the problem, with every value NaN.
inline ShortConvResults outputs_like(const ShortConvResults& expected, const ShortConvCase& problem) {
  ShortConvResults outputs;
  outputs.y = poisoned(expected.y, problem.x.dtype());
  outputs.final_state = poisoned(expected.final_state, problem.x.dtype());
  outputs.dx = poisoned(expected.dx, problem.x.dtype());
  outputs.dw = poisoned(expected.dw, problem.w.dtype());
  outputs.dbias = poisoned(expected.dbias, problem.bias.dtype());
  outputs.d_initial_state = poisoned(expected.d_initial_state, problem.initial_state.dtype());
  return outputs;
}

// Strided runs ------------------------------------------------------------------------------------------------------

// The results with everything in a strided layout. The outputs take the types and shapes of `like`.
inline ShortConvResults run_strided(const std::string& mode, const ShortConvCase& problem, const Context& context,
                                    Layout layout, const ShortConvResults& like) {
  const StridedTensor x(problem.x, layout), w(problem.w, layout), bias(problem.bias, layout),
      residual(problem.residual, layout), initial_state(problem.initial_state, layout),
      cu_seqlens(problem.cu_seqlens, layout), dy(problem.dy, layout), d_final_state(problem.d_final_state, layout);
  const Tensor start = problem.initial_state.present() ? problem.initial_state
                       : like.final_state.present()    ? Tensor(like.final_state.dtype(), like.final_state.shape())
                                                       : Tensor();
  const StridedTensor y(like.y, layout), final_state(mode == "step" ? start : like.final_state, layout),
      dx(like.dx, layout), dw(like.dw, layout), dbias(like.dbias, layout),
      d_initial_state(like.d_initial_state, layout);
  const ShortConvInputs in{x.view(), w.view(), bias.view(), mode == "step" ? TensorView() : initial_state.view(),
                           cu_seqlens.view()};
  const ShortConvOptions& options = problem.spec.options;
  ShortConvResults results;
  if (mode == "forward") {
    const ShortConvForward args{in, options, residual.view(), y.view(), final_state.view()};
    results.implementation = support::run(context, args);
  } else if (mode == "step") {
    const ShortConvStep args{in, options, residual.view(), final_state.view(), {}, y.view()};
    results.implementation = support::run(context, args);
  } else {
    const ShortConvBackward args{in,        options,   dy.view(),    d_final_state.view(),
                                 dx.view(), dw.view(), dbias.view(), d_initial_state.view()};
    results.implementation = support::run(context, args);
  }
  for (const StridedTensor* output : {&y, &final_state, &dx, &dw, &dbias, &d_initial_state}) {
    EXPECT_TRUE(output->guards_intact()) << results.implementation << " wrote outside its outputs\n  "
                                         << describe(problem.spec);
  }
  results.y = y.dense();
  results.final_state = final_state.dense();
  results.dx = dx.dense();
  results.dw = dw.dense();
  results.dbias = dbias.dense();
  results.d_initial_state = d_initial_state.dense();
  return results;
}

// Every mode ---------------------------------------------------------------------------------------------------------

inline ShortConvResults run(const std::string& mode, const ShortConvCase& problem, const Context& context) {
  if (mode == "forward") return support::forward(problem, context);
  return mode == "backward" ? support::backward(problem, context) : support::step(problem, context);
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
    const ShortConvResults like = outputs_like(expected, problem);
    for (const std::string& name : implementations(mode)) {
      const auto results = unless_declined(mode, name, [&] {
        return layout == Layout::kDense ? run(mode, problem, context_for(name))
                                        : run_strided(mode, problem, context_for(name), layout, like);
      });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

}  // namespace fastweight::test
