// Between PyTorch's stable ABI and the library: tensors become views, the device of a tensor becomes a context, errors
// become exceptions that the Python side can tell apart.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/tensor.h"

namespace fastweight::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The arguments of an operator in the order of its schema, taken one by one; then its results in the same way. Structs
// that read themselves from here keep the order of a long argument list in one place.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }

 private:
  StableIValue* next_;
};

template <class... Tensors>
void give(StableIValue* stack, const Tensors&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

// Throws for an element type or a rank that the library has no word for.
TensorView view(const char* name, const Tensor& tensor);
TensorView view(const char* name, const OptionalTensor& tensor);

// A finite number, or infinity, the library's word for an absent one.
double number(const char* name, const std::optional<double>& value);

// Runs on the device of `tensor`, with PyTorch's number of threads.
Context context_of(const Tensor& tensor);

// A dense tensor on the device of `like`. Its elements are undefined.
Tensor dense(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype);
Tensor dense_like(const Tensor& like);

// An output that was not asked for; None in Python. Operators return a fixed number of tensors.
inline Tensor nothing() { return Tensor(); }

// What is written is fp32, or fp64 in an fp64 problem.
ScalarType state_dtype(const Tensor& q);

// Sequences: the batch, or what cu_seqlens counts.
int64_t num_sequences(const Tensor& q, const OptionalTensor& cu_seqlens);

// Calls the library. Its errors arrive in Python as a RuntimeError whose text begins with the name of the class that
// _library.py raises instead, in brackets: the stable ABI has no other way to choose a class.
[[noreturn]] void rethrow(std::exception_ptr error);

template <class Call>
void guarded(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (...) {
    rethrow(std::current_exception());
  }
}

}  // namespace fastweight::bindings
