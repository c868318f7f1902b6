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
  const auto actual = results.named();
  const auto wanted = expected.named();
  ASSERT_EQ(actual.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto& [name, tensor] = wanted[i];
    ASSERT_EQ(actual[i].first, name);
    const support::Difference difference = support::compare(*actual[i].second, *tensor);
    const double bound = tolerance(problem.spec, name, actual[i].second->dtype());
    const double smallest = problem.spec.dtype == DType::kF64 ? 1e-12 : 1e-6;
    EXPECT_TRUE(difference.relative_rms < bound || difference.max_abs <= smallest)
        << results.implementation << " " << name << ": relative rms " << difference.relative_rms << ", largest "
        << difference.max_abs << ", allowed " << bound << "\n  " << describe(problem.spec);
  }
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

// Strided copies ----------------------------------------------------------------------------------------------------

// The inputs of a problem in a strided layout.
class StridedInputs {
 public:
  StridedInputs(const TttLinearCase& problem, Layout layout)
      : q_(problem.q, layout),
        k_(problem.k, layout),
        v_(problem.v, layout),
        w_(problem.w, layout),
        b_(problem.b, layout),
        eta_(problem.eta, layout),
        initial_state_(problem.initial_state, layout),
        initial_state_bias_(problem.initial_state_bias, layout),
        cu_seqlens_(problem.cu_seqlens, layout) {}

  TttLinearInputs views() const {
    TttLinearInputs in;
    in.q = q_.view();
    in.k = k_.view();
    in.v = v_.view();
    in.w = w_.view();
    in.b = b_.view();
    in.eta = eta_.view();
    in.initial_state = initial_state_.view();
    in.initial_state_bias = initial_state_bias_.view();
    in.cu_seqlens = cu_seqlens_.view();
    return in;
  }

 private:
  StridedTensor q_, k_, v_, w_, b_, eta_, initial_state_, initial_state_bias_, cu_seqlens_;
};

// As support::forward, everything strided. The outputs take the types and shapes of `like`.
inline TttLinearResults forward_strided(const TttLinearCase& problem, const Context& context, Layout layout,
                                        const TttLinearResults& like) {
  const StridedInputs in(problem, layout);
  const StridedTensor o(like.o, layout), final_state(like.final_state, layout),
      final_state_bias(like.final_state_bias, layout);
  TttLinearForward args;
  args.in = in.views();
  args.options = problem.spec.options;
  args.o = o.view();
  args.final_state = final_state.view();
  args.final_state_bias = final_state_bias.view();
  TttLinearResults results;
  results.implementation = support::run(context, args);
  for (const StridedTensor* x : {&o, &final_state, &final_state_bias}) {
    EXPECT_TRUE(x->guards_intact()) << results.implementation << " wrote outside its outputs\n  "
                                    << describe(problem.spec);
  }
  results.o = o.dense();
  results.final_state = final_state.dense();
  results.final_state_bias = final_state_bias.dense();
  return results;
}

inline TttLinearResults backward_strided(const TttLinearCase& problem, const Context& context, Layout layout,
                                         const TttLinearResults& like) {
  const StridedInputs in(problem, layout);
  const StridedTensor d_o(problem.d_o, layout), d_final_state(problem.d_final_state, layout),
      d_final_state_bias(problem.d_final_state_bias, layout);
  const StridedTensor dq(like.dq, layout), dk(like.dk, layout), dv(like.dv, layout), dw(like.dw, layout),
      db(like.db, layout), deta(like.deta, layout), d_initial_state(like.d_initial_state, layout),
      d_initial_state_bias(like.d_initial_state_bias, layout);
  TttLinearBackward args;
  args.in = in.views();
  args.options = problem.spec.options;
  args.d_o = d_o.view();
  args.d_final_state = d_final_state.view();
  args.d_final_state_bias = d_final_state_bias.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  args.dw = dw.view();
  args.db = db.view();
  args.deta = deta.view();
  args.d_initial_state = d_initial_state.view();
  args.d_initial_state_bias = d_initial_state_bias.view();
  TttLinearResults results;
  results.implementation = support::run(context, args);
  for (const StridedTensor* x : {&dq, &dk, &dv, &dw, &db, &deta, &d_initial_state, &d_initial_state_bias}) {
    EXPECT_TRUE(x->guards_intact()) << results.implementation << " wrote outside its outputs\n  "
                                    << describe(problem.spec);
  }
  results.dq = dq.dense();
  results.dk = dk.dense();
  results.dv = dv.dense();
  results.dw = dw.dense();
  results.db = db.dense();
  results.deta = deta.dense();
  results.d_initial_state = d_initial_state.dense();
  results.d_initial_state_bias = d_initial_state_bias.dense();
  return results;
}

// From support::opened(problem).
inline TttLinearResults step_strided(const TttLinearCase& problem, const Context& context, Layout layout) {
  TttLinearCase stateless = problem;
  stateless.initial_state = stateless.initial_state_bias = {};
  const StridedInputs in(stateless, layout);
  const TttLinearOpen open = support::opened(problem);
  const StridedTensor state(open.state, layout), state_bias(open.state_bias, layout), gradient(open.gradient, layout),
      gradient_bias(open.gradient_bias, layout), position(open.position, layout),
      o(Tensor(problem.spec.dtype, problem.v.shape()), layout);
  TttLinearStep args;
  args.in = in.views();
  args.options = problem.spec.options;
  args.state = state.view();
  args.state_bias = state_bias.view();
  args.gradient = gradient.view();
  args.gradient_bias = gradient_bias.view();
  args.position = position.view();
  args.o = o.view();
  TttLinearResults results;
  results.implementation = support::run(context, args);
  for (const StridedTensor* x : {&state, &state_bias, &gradient, &gradient_bias, &position, &o}) {
    EXPECT_TRUE(x->guards_intact()) << results.implementation << " wrote outside its outputs\n  "
                                    << describe(problem.spec);
  }
  results.o = o.dense();
  results.final_state = state.dense();
  results.final_state_bias = state_bias.dense();
  results.gradient = gradient.dense();
  results.gradient_bias = gradient_bias.dense();
  results.position = position.dense();
  return results;
}

// Outputs of the shapes of `expected`, of the types that support's runs use, with every value NaN.
inline TttLinearResults outputs_like(const TttLinearResults& expected, const TttLinearCase& problem) {
  const DType wide = problem.spec.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  TttLinearResults outputs;
  outputs.o = poisoned(expected.o, problem.spec.dtype);
  outputs.final_state = poisoned(expected.final_state, wide);
  outputs.final_state_bias = poisoned(expected.final_state_bias, wide);
  outputs.dq = poisoned(expected.dq, problem.q.dtype());
  outputs.dk = poisoned(expected.dk, problem.k.dtype());
  outputs.dv = poisoned(expected.dv, problem.v.dtype());
  outputs.dw = poisoned(expected.dw, problem.w.dtype());
  outputs.db = poisoned(expected.db, problem.b.dtype());
  outputs.deta = poisoned(expected.deta, problem.eta.dtype());
  outputs.d_initial_state = poisoned(expected.d_initial_state, wide);
  outputs.d_initial_state_bias = poisoned(expected.d_initial_state_bias, wide);
  return outputs;
}

}  // namespace fastweight::test
