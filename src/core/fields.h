// What the structs of a family hold, as tables: one row per tensor and per option. Whatever goes over "all tensors of a
// call" reads them: the checks of memory and device, the C interface, the PyTorch operators, test cases, fuzz targets.
// A family's tables stand in core/<family>_fields.h.
//
// A public struct of C++ and its twin in C have members of the same names. The tables are therefore templates over the
// struct S whose members they name, and the rows of kTensors<DeltaRuleInputs> and of
// kTensors<DeltaRuleInputs, fw_delta_rule_inputs> correspond one by one.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "fastweight/c_api.h"
#include "fastweight/tensor.h"

namespace fastweight {

// What a call does with a tensor.
enum class Use {
  kReads,        // must be there
  kMayRead,      // may be absent
  kUpdates,      // reads it and writes it in place
  kWrites,       // of the type of what it belongs to, or fp32
  kWritesState,  // fp32, in an fp64 problem fp64
};

constexpr bool is_written(Use use) { return use >= Use::kUpdates; }

template <class S>
struct TensorField {
  static constexpr bool kInC = requires { &S::struct_size; };
  using View = std::conditional_t<kInC, fw_tensor, TensorView>;

  const char* name;
  Use use;
  View S::*view;
  const char* gradient_of = nullptr;  // the input whose gradient this is
};

// The tensors of a struct, without those of the struct of inputs inside it.
template <class Struct, class S = Struct>
inline constexpr auto kTensors = nullptr;

template <class S, class Value>
struct OptionField {
  static constexpr bool kIsSwitch = std::is_same_v<Value, bool>;

  const char* name;
  Value S::*value;
};

template <class S, class Value>
constexpr OptionField<S, Value> option(const char* name, Value S::*value) {
  return {name, value};
}

// The options of a struct: a tuple, as their types differ.
template <class Struct, class S = Struct>
inline constexpr auto kOptions = std::tuple<>();

// visit(row, row of the other) for each option of S and of Other.
template <class Struct, class S, class Other, class Visit>
constexpr void for_each_option_pair(const Visit& visit) {
  constexpr size_t kCount = std::tuple_size_v<std::remove_cvref_t<decltype(kOptions<Struct, S>)>>;
  [&]<size_t... i>(std::index_sequence<i...>) {
    (visit(std::get<i>(kOptions<Struct, S>), std::get<i>(kOptions<Struct, Other>)), ...);
  }
  (std::make_index_sequence<kCount>());
}

// visit(row) for each option that is true or false.
template <class Struct, class Visit>
constexpr void for_each_switch(const Visit& visit) {
  const auto visit_switch = [&]<class Row>(const Row& row) {
    if constexpr (Row::kIsSwitch) visit(row);
  };
  std::apply([&](const auto&... rows) { (visit_switch(rows), ...); }, kOptions<Struct>);
}

// visit(row, view) for each tensor of a call: its inputs, then the others.
template <class Args, class Visit>
constexpr void for_each_tensor(Args& args, const Visit& visit) {
  if constexpr (requires { args.in; }) {
    for (const auto& row : kTensors<std::remove_cvref_t<decltype(args.in)>>) visit(row, args.in.*row.view);
  }
  for (const auto& row : kTensors<std::remove_const_t<Args>>) visit(row, args.*row.view);
}

// The tensors of a call as the checks want them.
template <class Args>
std::vector<check::Argument> arguments_of(const Args& args) {
  std::vector<check::Argument> list;
  list.reserve(24);
  for_each_tensor(args, [&](const auto& row, const TensorView& view) {
    list.push_back({row.name, &view, is_written(row.use)});
  });
  return list;
}

// The row of the inputs with this name; null: there is none.
template <class Inputs, class S = Inputs>
constexpr const TensorField<S>* input_row(std::string_view name) {
  for (const auto& row : kTensors<Inputs, S>) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

// Whether every gradient of a backward names an input.
template <class Backward>
constexpr bool gradients_name_inputs() {
  for (const auto& row : kTensors<Backward>) {
    if (row.gradient_of != nullptr && input_row<decltype(Backward::in)>(row.gradient_of) == nullptr) return false;
  }
  return true;
}

// Whether the gradients of a backward stand in the order of the first inputs, one for each: Python pairs them by place.
template <class Backward>
constexpr bool gradients_follow_inputs() {
  auto input = kTensors<decltype(Backward::in)>.begin();
  for (const auto& row : kTensors<Backward>) {
    if (row.gradient_of != nullptr && std::string_view(row.gradient_of) != (input++)->name) return false;
  }
  return true;
}

// The gradients that a backward is asked for: of inputs that are there, with their shape and type. Of a state's gradient
// the family checks the rest, for states have shapes and types of their own.
template <class Backward>
void check_gradients(const Backward& args) {
  static_assert(gradients_name_inputs<Backward>());
  for (const auto& row : kTensors<Backward>) {
    if (row.gradient_of == nullptr || !(args.*row.view).present()) continue;
    const TensorView& input = args.in.*input_row<decltype(Backward::in)>(row.gradient_of)->view;
    if (!input.present()) check::invalid(row.name, std::string("none without ") + row.gradient_of, "a tensor");
    if (row.use == Use::kWrites) check::like(row.name, args.*row.view, input);
  }
}

}  // namespace fastweight
