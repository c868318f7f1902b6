// What the cases of every operator family share: tensors by name, calls of the public API made from them, and the
// tolerance of a comparison.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fields.h"
#include "fastweight/context.h"
#include "support/placement.h"
#include "support/random.h"
#include "support/tensor.h"

namespace fastweight::support {

enum class Mode { kForward, kBackward, kStep };
inline constexpr std::array kModes{Mode::kForward, Mode::kBackward, Mode::kStep};
const char* name_of(Mode mode);
const char* name_of(DType dtype);

// For the description of a problem: its packed sequences, if it has any.
std::string describe_lengths(const std::vector<int64_t>& cu_seqlens);

// Tensors by name ---------------------------------------------------------------------------------------------------

// What a tensor has one entry for: every token ([B, T, ..]), every sequence ([N, ..]), where it starts or where it ends,
// or the whole call.
enum class Part { kTokens, kStart, kEnd, kCall };

template <class Struct>
struct CaseTensor {
  const char* name;  // as in the public structs
  Tensor Struct::*tensor;
  Part part = Part::kTokens;
};

using NamedTensors = std::vector<std::pair<std::string, const Tensor*>>;

// The base of a struct of tensors that lists them in fields().
template <class Self>
class TensorsByName {
 public:
  // The present tensors, in the order of the fields.
  NamedTensors named() const {
    NamedTensors result;
    for (const auto& field : Self::fields()) {
      if ((self().*field.tensor).present()) result.emplace_back(field.name, &(self().*field.tensor));
    }
    return result;
  }

  std::vector<Tensor*> of(Part part) {
    std::vector<Tensor*> result;
    for (const auto& field : Self::fields()) {
      if (field.part == part) result.push_back(&(static_cast<Self&>(*this).*field.tensor));
    }
    return result;
  }

  // Null if there is none of that name or it is absent.
  const Tensor* find(std::string_view name) const {
    for (const auto& field : Self::fields()) {
      if (name == field.name && (self().*field.tensor).present()) return &(self().*field.tensor);
    }
    return nullptr;
  }
  Tensor* find(std::string_view name) { return const_cast<Tensor*>(std::as_const(*this).find(name)); }

  // Of a name that there is.
  Tensor& at(std::string_view name) {
    for (const auto& field : Self::fields()) {
      if (name == field.name) return static_cast<Self&>(*this).*field.tensor;
    }
    throw std::out_of_range("no tensor " + std::string(name));
  }

 private:
  const Self& self() const { return static_cast<const Self&>(*this); }
};

inline bool is_floating(DType dtype) { return dtype != DType::kI32 && dtype != DType::kI64; }

// The same values in fp64 throughout: what the reference is given to be the oracle.
template <class Case>
Case in_double(Case problem) {
  problem.spec.set_types(DType::kF64);
  for (const auto& field : Case::fields()) {
    Tensor& tensor = problem.*field.tensor;
    if (is_floating(tensor.dtype())) tensor = tensor.to(DType::kF64);
  }
  return problem;
}

// Calls -------------------------------------------------------------------------------------------------------------

template <class Args>
std::vector<NamedView> views_of(Args& args) {
  std::vector<NamedView> views;
  for_each_tensor(args, [&](const auto& row, TensorView& view) {
    views.push_back({row.name, &view, is_written(row.use)});
  });
  return views;
}

// A call of the public API with the views of its tensors, to be made any number of times. A copy is the same call.
class Call {
 public:
  template <class Args>
  Call(std::string (*entry)(const Context&, const Args&), Args args) {
    const auto kept = std::make_shared<Args>(std::move(args));
    views_ = views_of(*kept);
    enqueue_ = [entry, kept](const Context& context) { return entry(context, *kept); };
  }

  const std::vector<NamedView>& views() const { return views_; }
  bool has(std::string_view name) const { return find(name) != nullptr; }
  TensorView& operator[](std::string_view name) const {
    if (TensorView* view = find(name)) return *view;
    throw std::out_of_range("no tensor " + std::string(name));
  }

  // On views that lie where the context says.
  std::string enqueue(const Context& context) const { return enqueue_(context); }

  // On views of host memory; for a device, the tensors are copied there and back (placement.h).
  std::string run(const Context& context) const;

 private:
  TensorView* find(std::string_view name) const;

  std::vector<NamedView> views_;
  std::function<std::string(const Context&)> enqueue_;
};

// Options that a spec holds as they are; families whose specs do not have functions of their own.
template <class Spec, class Args>
void set_options(const Spec& spec, Args& args) {
  args.options = spec.options;
}

// The call with every view on the tensor of its name: one of the outputs, or else one of the problem. A step has no
// initial states, and its states are the final ones of the results.
template <class Args, class Case, class Results>
Args bound(const Case& problem, const Results& outputs) {
  Args args;
  constexpr bool kIsStep = requires { args.state; };
  for (const NamedView& named : views_of(args)) {
    const std::string name = named.name;
    if (kIsStep && name.starts_with("initial_")) continue;
    const Tensor* tensor = outputs.find(kIsStep && name.starts_with("state") ? "final_" + name : name);
    if (tensor == nullptr) tensor = problem.find(name);
    if (tensor != nullptr) *named.view = tensor->view();
  }
  set_options(problem.spec, args);
  return args;
}
template <class Args, class Case, class Results>
Call bound_call(std::string (*entry)(const Context&, const Args&), const Case& problem, const Results& outputs) {
  return Call(entry, bound<Args>(problem, outputs));
}

// Poisoned outputs for the gradients of all inputs that are there.
template <class Backward, class Case, class Results>
void add_gradients(const Case& problem, Results& outputs) {
  for (const auto& row : kTensors<Backward>) {
    const Tensor* const input = row.gradient_of == nullptr ? nullptr : problem.find(row.gradient_of);
    if (input == nullptr) continue;
    const bool is_state = row.use == Use::kWritesState;
    outputs.at(row.name) = poisoned(is_state ? accumulator_type(problem.spec.dtype) : input->dtype(), input->shape());
  }
}

// A family has outputs_of(mode, problem), poisoned with NaN, and call_of(mode, problem, outputs).
template <class Case>
auto run(Mode mode, const Case& problem, const Context& context) {
  auto results = outputs_of(mode, problem);
  results.implementation = call_of(mode, problem, results).run(context);
  return results;
}

// Tolerances --------------------------------------------------------------------------------------------------------

// A result is close enough when its relative rms error stays below `relative`, or no element is off by more than
// `smallest` (what is 0 in exact arithmetic has no relative error), or the rms of its error is at most `rms`.
struct Tolerance {
  double relative;
  double smallest;
  double rms = 0;
};

// The error over what is allowed: at most 1 passes.
double excess(const Tensor& result, const Tensor& expected, const Tolerance& tolerance);

inline bool is_16_bit(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }
double rms(const Tensor& x);

}  // namespace fastweight::support
