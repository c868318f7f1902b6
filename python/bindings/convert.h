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
using Library = torch::stable::detail::StableLibrary;
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

// Runs on the device of `tensor`: on the CPU with PyTorch's number of threads, on CUDA on PyTorch's current stream with
// scratch memory from PyTorch's allocator, which hands memory out again in the order of that stream.
class ContextOf {
 public:
  explicit ContextOf(const Tensor& tensor);
  ContextOf(const ContextOf&) = delete;
  ContextOf& operator=(const ContextOf&) = delete;

  operator const Context&() const { return context_; }

 private:
  static void* allocate(void* self, size_t bytes);

  const Tensor& tensor_;
  std::vector<Tensor> scratch_;
  Context context_;
};

// A dense tensor on the device of `like`. Its elements are undefined.
Tensor dense(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype);
Tensor dense_like(const Tensor& like);

// An output that was not asked for; None in Python. Operators return a fixed number of tensors.
inline Tensor nothing() { return Tensor(); }

// Outputs are made before the library has seen the arguments: an axis that is not there counts as empty.
inline int64_t extent(const Tensor& tensor, int64_t axis) { return axis < tensor.dim() ? tensor.size(axis) : 0; }

// States are fp32, in an fp64 problem fp64.
ScalarType state_dtype(const Tensor& q);

// Sequences: the batch, or what cu_seqlens counts.
int64_t num_sequences(const Tensor& q, const OptionalTensor& cu_seqlens);

// The outputs of a backward: the gradient of input i, where there is one and bit i of `asked_for` is set. It has the
// shape and type of its input; that of a state has the type of states.
struct Gradients {
  const Tensor& q;
  int64_t asked_for;

  Tensor operator()(int i, const char* name, const OptionalTensor& input, TensorView& destination) const;
  Tensor of_state(int i, const char* name, const OptionalTensor& input, TensorView& destination) const;
};

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
