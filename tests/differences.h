// The gradients of a family's reference against central differences of its forward, in double, for every element of
// every input that has a gradient.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "tests/testing.h"

namespace fastweight::test {

// The tensor that holds the gradient of the one called `name`: named d<name>, or d_<name>.
template <class Struct>
auto gradient_of(Struct& tensors, const std::string& name) {
  auto* const gradient = tensors.find("d" + name);
  return gradient != nullptr ? gradient : tensors.find("d_" + name);
}

// What the gradients are those of: the sum of all results times the given gradients of them.
template <class Case>
double loss(const Case& problem) {
  Context context = reference_context();
  context.num_threads = 1;
  const auto results = support::run(Mode::kForward, problem, context);
  double sum = 0;
  for (const auto& [name, tensor] : results.named()) {
    const Tensor* const weights = gradient_of(problem, name);
    for (int64_t i = 0; weights != nullptr && i < weights->size(); ++i) sum += (*tensor)[i] * (*weights)[i];
  }
  return sum;
}

// How far the points of a difference are apart, and whether two more make it one of fourth order.
struct Differences {
  double step = 1e-5;
  bool fourth_order = false;
  double bound = 1e-8;  // on the relative rms
};

template <class Case>
Tensor central_differences(const Case& problem, const std::string& name, const Differences& how) {
  Case shifted = problem;
  Tensor& input = *shifted.find(name);
  Tensor gradient(DType::kF64, input.shape());
  for (int64_t i = 0; i < gradient.size(); ++i) {
    const double x = input[i];
    const auto difference = [&](double step) {
      input.set(i, x + step);
      const double above = loss(shifted);
      input.set(i, x - step);
      return (above - loss(shifted)) / (2 * step);
    };
    const double wide = difference(how.step);
    gradient.set(i, how.fourth_order ? (4 * difference(how.step / 2) - wide) / 3 : wide);
    input.set(i, x);
  }
  return gradient;
}

// how(name) may differ from input to input. Those `without_input` are of something in between.
template <class Case, class How>
void expect_gradients_match_differences(const Case& problem, const How& how,
                                        const std::vector<std::string>& without_input = {}) {
  const auto results = support::run(Mode::kBackward, problem, reference_context());
  size_t compared = 0;
  for (const auto& [name, input] : problem.named()) {
    const Tensor* const gradient = gradient_of(results, name);
    if (gradient == nullptr) continue;
    ++compared;
    const support::Difference difference = support::compare(*gradient, central_differences(problem, name, how(name)));
    EXPECT_LT(difference.relative_rms, how(name).bound)
        << "d" << name << ", largest " << difference.max_abs << "\n  " << describe(problem.spec);
  }
  EXPECT_EQ(compared + without_input.size(), results.named().size()) << "a gradient without its input";
}
template <class Case>
void expect_gradients_match_differences(const Case& problem) {
  expect_gradients_match_differences(problem, [](const std::string&) { return Differences{}; });
}

// The gradients of the parts add up; an absent gradient of a result counts as 0.
template <class Case>
void expect_absent_gradients_are_zero(const Case& problem) {
  Case none = problem;
  std::vector<std::string> given;
  for (const auto& field : Case::fields()) {
    if (std::string(field.name).starts_with("d") && field.part != Part::kCall && (problem.*field.tensor).present()) {
      given.push_back(field.name);
      none.*field.tensor = {};
    }
  }
  const auto whole = support::run(Mode::kBackward, problem, reference_context());
  auto sum = support::run(Mode::kBackward, none, reference_context());
  for (const auto& [name, zero] : sum.named()) {
    for (double value : zero->values()) ASSERT_EQ(value, 0) << name;
  }
  for (const std::string& name : given) {
    Case only = none;
    for (const auto& field : Case::fields()) {
      if (name == field.name) only.*field.tensor = problem.*field.tensor;
    }
    const auto part = support::run(Mode::kBackward, only, reference_context());
    for (const auto& [result, tensor] : part.named()) {
      Tensor& total = *sum.find(result);
      for (int64_t i = 0; i < total.size(); ++i) total.set(i, total[i] + (*tensor)[i]);
    }
  }
  for (const auto& [name, expected] : whole.named()) {
    for (int64_t i = 0; i < expected->size(); ++i) {
      ASSERT_NEAR((*sum.find(name))[i], (*expected)[i], 1e-11 * (1 + support::rms(*expected)))
          << name << " " << i << "\n  " << describe(problem.spec);
    }
  }
}

}  // namespace fastweight::test
