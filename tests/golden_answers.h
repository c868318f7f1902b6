// Results against answers that were computed elsewhere, in double: see tests/golden.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/golden.h"
#include "tests/testing.h"

namespace fastweight::test {

template <class Golden>
const Golden& golden_named(const std::vector<Golden>& cases, const std::string& name) {
  return *std::find_if(cases.begin(), cases.end(), [&](const Golden& one) { return one.problem.spec.name == name; });
}

template <class Golden>
std::vector<std::string> names_in(const std::vector<Golden>& cases) {
  std::vector<std::string> names;
  for (const Golden& golden : cases) names.push_back(golden.problem.spec.name);
  return names;
}

// Every result that has an answer in the file, in the mean and nowhere far off. Returns how many there were.
template <class Case, class Results>
size_t expect_answers(const Case& problem, const Results& results, const Results& answers) {
  size_t compared = 0;
  for (const auto& [name, answer] : answers.named()) {
    const Tensor* const result = results.find(name);
    if (result == nullptr) continue;
    ++compared;
    const std::vector<double> values = answer->values();
    double largest = 1;
    for (double value : values) largest = std::max(largest, std::fabs(value));
    const support::Tolerance bound = tolerance(problem, answers, name, result->dtype());
    const double allowed = std::max(bound.relative, bound.rms / (support::rms(*answer) + 1e-8));
    const support::Difference difference = support::compare(*result, *answer);
    EXPECT_LT(difference.relative_rms, allowed) << results.implementation << " " << name;
    EXPECT_LT(difference.max_abs, 10 * allowed * largest) << results.implementation << " " << name;
  }
  return compared;
}

// The reference in double has all answers.
template <class Golden>
void expect_exact_answers(const Golden& golden) {
  const auto problem = support::in_double(golden.problem);
  size_t compared = 0;
  for (Mode mode : {Mode::kForward, Mode::kBackward}) {
    compared += expect_answers(problem, support::run(mode, problem, reference_context()), golden.expected);
  }
  EXPECT_EQ(compared, golden.expected.named().size());
}

template <class Golden>
void expect_answers(Mode mode, const Golden& golden) {
  for (const std::string& name : implementations(golden.problem.spec, mode)) {
    auto results = unless_declined(mode, name, [&] { return support::run(mode, golden.problem, context_for(name)); });
    if (!results) continue;
    if (mode == Mode::kStep) support::drop_open_states(*results);
    EXPECT_GT(expect_answers(golden.problem, *results, golden.expected), 0u) << name;
  }
}

// On inputs rounded to 16 bits, against the reference on the same.
template <class Golden>
void expect_close_in_16_bits(Mode mode, const Golden& golden) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    auto problem = golden.problem;
    problem.spec.dtype = dtype;
    for (Tensor* x : {&problem.q, &problem.k, &problem.v, &problem.d_o}) *x = x->to(dtype);
    const auto expected = support::run(mode, support::in_double(problem), reference_context());
    for (const std::string& name : implementations(problem.spec, mode)) {
      const auto results = unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name)); });
      if (results) expect_close(problem, *results, expected);
    }
  }
}

}  // namespace fastweight::test
