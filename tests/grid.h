// A family's grid: a list of named cases. Every case runs in all of its modes with every implementation by name, on
// outputs that are poisoned and guarded, and is compared with the reference in double.
#pragma once

#include <cctype>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing.h"

namespace fastweight::test {

// One call with every tensor in a strided layout, on the outputs that are given.
template <class Case, class Results>
Results run_strided(Mode mode, const Case& problem, const Context& context, Layout layout, Results outputs) {
  const support::Call call = call_of(mode, problem, outputs);
  StridedArguments strided(call.views(), layout);
  outputs.implementation = call.run(context);
  EXPECT_TRUE(strided.finish()) << outputs.implementation << " " << name_of(mode) << " wrote outside its outputs\n  "
                                << describe(problem.spec);
  return outputs;
}

// Every implementation of the mode on this problem against the reference in double. With `wide`, what may have another
// type than the inputs has: results in 16 bits become fp32, and chunk states have the inputs' type.
template <class Case>
void check(Mode mode, const Case& problem, Layout layout = Layout::kDense, bool wide = false) {
  const std::vector<std::string> names = implementations(problem.spec, mode);
  if (names.empty()) return;
  const auto expected = support::run(mode, support::in_double(problem), reference_context());
  auto outputs = outputs_of(mode, problem);
  for (const auto& field : outputs.fields()) {
    Tensor& x = outputs.*field.tensor;
    if (wide && support::is_16_bit(x.dtype())) x = x.to(DType::kF32);
    if (wide && std::string(field.name) == "chunk_states") x = x.to(problem.spec.dtype);
  }
  for (const std::string& name : names) {
    const auto results =
        unless_declined(mode, name, [&] { return run_strided(mode, problem, context_for(name), layout, outputs); });
    if (results) expect_close(problem, *results, expected);
  }
}

// .. of every mode.
template <class Case>
void check(const Case& problem, Layout layout = Layout::kDense) {
  for (Mode mode : kModes) check(mode, problem, layout);
}

template <class Case>
struct GridCase {
  std::string name;
  decltype(Case::spec) spec;
  std::function<void(Case&)> change;  // of what was drawn
  std::vector<Mode> modes{kModes.begin(), kModes.end()};
  Layout layout = Layout::kDense;
  bool wide = false;  // see check()

  void run() const {
    Case problem = draw(spec, 21);
    if (change) change(problem);
    for (Mode mode : modes) check(mode, problem, layout, wide);
  }

  friend std::ostream& operator<<(std::ostream& out, const GridCase& one) { return out << describe(one.spec); }
};

template <class Case>
class GridOf {
 public:
  using Spec = decltype(Case::spec);

  // A case of this name; the values that tell it from others of the same kind become a part of it.
  GridCase<Case>& add(std::string name, const Spec& spec, const std::vector<double>& values = {}) {
    for (double value : values) {
      std::ostringstream text;
      text << value;
      name += "_" + text.str();
    }
    for (char& c : name) {
      if (c == '-') c = 'm';
      if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
    }
    return cases_.emplace_back(GridCase<Case>{name, spec});
  }

  const std::vector<GridCase<Case>>& cases() const { return cases_; }

 private:
  std::vector<GridCase<Case>> cases_;
};

inline const auto kCaseName = [](const auto& instance) { return instance.param.name; };

// The bits of a call do not depend on how its inputs lie ----------------------------------------------------------------

// A stride of 0 repeats one element along an axis, or, with all of them 0, everywhere.
template <class Case>
void expect_same_when_broadcast(const Case& problem) {
  constexpr size_t kAll = 3;
  for (size_t axis = 0; axis <= kAll; ++axis) {
    Case spread = problem;
    for (Tensor* x : spread.of(Part::kTokens)) {
      const TensorView view = x->view();
      for (int64_t i = 0; i < x->size(); ++i) {
        const int64_t back = axis == kAll ? i : i / view.strides[axis] % view.shape[axis] * view.strides[axis];
        x->set(i, (*x)[i - back]);
      }
    }
    const auto broadcast = [&](const support::NamedView& named) {
      for (const auto& field : Case::fields()) {
        if (named.written || field.part != Part::kTokens || std::string(field.name) != named.name) continue;
        if (axis == kAll) named.view->strides = {};
        if (axis != kAll) named.view->strides[axis] = 0;
      }
    };
    for (Mode mode : kModes) {
      for (const std::string& name : implementations(problem.spec, mode)) {
        const auto expected =
            unless_declined(mode, name, [&] { return support::run(mode, spread, context_for(name)); });
        if (!expected) continue;
        auto results = outputs_of(mode, problem);
        const support::Call call = call_of(mode, problem, results);
        for (const support::NamedView& named : call.views()) broadcast(named);
        results.implementation = call.run(context_for(name));
        expect_same_bits(results, *expected, std::string(name_of(mode)) + ", axis " + std::to_string(axis));
      }
    }
  }
}

// Every output that can be left out, alone with those that cannot (`required`), has the bits that it has among all.
template <class Case>
void expect_same_alone_among_outputs(Mode mode, const Case& problem, const std::string& required = "") {
  for (const std::string& name : implementations(problem.spec, mode)) {
    const auto all = unless_declined(mode, name, [&] { return support::run(mode, problem, context_for(name)); });
    if (!all) continue;
    for (const auto& [only, tensor] : all->named()) {
      auto results = outputs_of(mode, problem);
      auto expected = *all;
      for (const auto& field : results.fields()) {
        if (only != field.name && required != field.name) results.*field.tensor = expected.*field.tensor = {};
      }
      results.implementation = call_of(mode, problem, results).run(context_for(name));
      expect_same_bits(results, expected, std::string(name_of(mode)) + ", " + only + " alone");
    }
  }
}

}  // namespace fastweight::test
