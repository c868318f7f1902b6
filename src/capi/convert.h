// From the C structs to the C++ ones, and from exceptions to status codes. Converting checks only what the C++ side
// cannot see: null structs and their sizes. Values travel unchanged; the operators judge them.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>

#include "core/check.h"
#include "core/fields.h"
#include "fastweight/c_api.h"
#include "fastweight/context.h"
#include "fastweight/tensor.h"

namespace fastweight::capi {

TensorView to_view(const fw_tensor& tensor);
Context to_context(const fw_context* context);

// The same text, with a lifetime as long as the program's.
const char* permanent_name(const std::string& name);

// The size of a C struct when it was first released. A struct that has grown since then names the first of the fields
// that were added:
//
//     template <>
//     inline constexpr size_t kFirstSize<fw_context> = offsetof(fw_context, added);
template <class CStruct>
inline constexpr size_t kFirstSize = sizeof(CStruct);

template <>
inline constexpr size_t kFirstSize<fw_delta_rule_options> = offsetof(fw_delta_rule_options, total_value_heads);

// Zeros, which stand for absent tensors, null pointers and false; the size; the defaults of C++ for the options, those
// of Struct and of the struct of options in it whose members this C struct has. Nothing for a null pointer.
template <class Struct, class CStruct>
void init(CStruct* to) {
  if (to == nullptr) return;
  *to = {};
  to->struct_size = sizeof(CStruct);
  const auto set_defaults = [&]<class Options>(const Options& defaults) {
    for_each_option_pair<Options, Options, CStruct>([&](const auto& from_row, const auto& to_row) {
      using Value = std::remove_cvref_t<decltype(to->*to_row.value)>;
      to->*to_row.value = static_cast<Value>(defaults.*from_row.value);
    });
  };
  const Struct defaults{};
  set_defaults(defaults);
  if constexpr (
      requires { defaults.options; } && !requires { to->options; })
    set_defaults(defaults.options);
}

// The struct behind a pointer that came from C, perhaps from a program that was compiled when the struct was smaller:
// the fields it does not have get their defaults.
template <class Struct, class CStruct>
CStruct required(const char* name, const CStruct* pointer) {
  if (pointer == nullptr) check::invalid(name, "a struct", "null");
  constexpr size_t kFirst = kFirstSize<CStruct>, kLast = sizeof(CStruct);
  if (pointer->struct_size < kFirst || pointer->struct_size > kLast) {
    const std::string smallest = kFirst == kLast ? "" : std::to_string(kFirst) + " to ";
    check::invalid(name, "struct_size " + smallest + std::to_string(kLast), std::to_string(pointer->struct_size));
  }
  CStruct whole;
  init<Struct>(&whole);
  std::memcpy(static_cast<void*>(&whole), pointer, pointer->struct_size);
  return whole;
}

// The tensors and options of Struct, row by row.
template <class Struct, class CStruct>
void copy_fields(const CStruct& from, Struct& to) {
  if constexpr (!std::is_null_pointer_v<std::remove_cvref_t<decltype(kTensors<Struct>)>>) {
    for (size_t i = 0; i < kTensors<Struct>.size(); ++i) {
      to.*kTensors<Struct>[i].view = to_view(from.*kTensors<Struct, CStruct>[i].view);
    }
  }
  for_each_option_pair<Struct, Struct, CStruct>([&](const auto& to_row, const auto& from_row) {
    using Value = std::remove_cvref_t<decltype(to.*to_row.value)>;
    to.*to_row.value = static_cast<Value>(from.*from_row.value);
  });
}

// The arguments of a call. In C the building blocks have their inputs and options in the struct itself.
template <class Args, class CArgs>
Args to_args(const CArgs* pointer) {
  const CArgs from = required<Args>("args", pointer);
  Args args;
  copy_fields(from, args);
  if constexpr (requires { args.in; }) {
    if constexpr (requires { from.inputs; }) {
      copy_fields(required<decltype(args.in)>("inputs", from.inputs), args.in);
    } else {
      copy_fields(from, args.in);
    }
  }
  if constexpr (requires { args.options; }) {
    if constexpr (requires { from.options; }) {
      copy_fields(required<decltype(args.options)>("options", from.options), args.options);
    } else {
      copy_fields(from, args.options);
    }
  }
  return args;
}

// Keeps the text for fw_last_error and gives the status back.
fw_status fail(fw_status status, const char* text) noexcept;

// The status of the exception in flight.
fw_status fail_with_current_exception() noexcept;

// Runs the body of an entry point; nothing is thrown past it.
template <class Body>
fw_status guarded(const Body& body) noexcept {
  try {
    body();
    return FW_OK;
  } catch (...) {
    return fail_with_current_exception();
  }
}

// Calls an entry point of the library. `implementation`, unless null, receives the name of what ran, which lives as long
// as the program.
template <class Args, class CArgs>
fw_status call(std::string (*entry)(const Context&, const Args&), const fw_context* context, const CArgs* args,
               const char** implementation) noexcept {
  return guarded([&] {
    const std::string name = entry(to_context(context), to_args<Args>(args));
    if (implementation != nullptr) *implementation = permanent_name(name);
  });
}

}  // namespace fastweight::capi
