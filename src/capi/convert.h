// From the C structs to the C++ ones, and from exceptions to status codes. Converting checks only what the C++ side
// cannot see: null structs and their sizes. Values travel unchanged; the operators judge them.
#pragma once

#include <string>

#include "core/check.h"
#include "fastweight/c_api.h"
#include "fastweight/context.h"
#include "fastweight/tensor.h"

namespace fastweight::capi {

TensorView to_view(const fw_tensor& tensor);
Context to_context(const fw_context* context);

// The same text, with a lifetime as long as the program's.
const char* permanent_name(const std::string& name);

// The struct behind a pointer that came from C.
template <class Struct>
const Struct& required(const char* name, const Struct* pointer) {
  if (pointer == nullptr) check::invalid(name, "a struct", "null");
  if (pointer->struct_size != sizeof(Struct)) {
    check::invalid(name, "struct_size " + std::to_string(sizeof(Struct)), std::to_string(pointer->struct_size));
  }
  return *pointer;
}

// Zeros, which stand for absent tensors, null pointers and false, and the size. False for a null pointer.
template <class Struct>
bool clear(Struct* pointer) {
  if (pointer == nullptr) return false;
  *pointer = {};
  pointer->struct_size = sizeof(Struct);
  return true;
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

// Calls an entry point of the library with the arguments that make_args() converts. `implementation`, unless null,
// receives the name of what ran, which lives as long as the program.
template <class Args, class MakeArgs>
fw_status call(std::string (*entry)(const Context&, const Args&), const fw_context* context, const MakeArgs& make_args,
               const char** implementation) noexcept {
  return guarded([&] {
    const std::string name = entry(to_context(context), make_args());
    if (implementation != nullptr) *implementation = permanent_name(name);
  });
}

}  // namespace fastweight::capi
