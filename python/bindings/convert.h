// Between PyTorch's stable ABI and the library: tensors become views, the device of a tensor becomes a context, errors
// become exceptions that the Python side can tell apart.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/fields.h"
#include "fastweight/context.h"
#include "fastweight/tensor.h"

namespace fastweight::bindings {

// An operator of PyTorch: its schema, which begins with its name, and what it runs on every device. The library says
// what it can do where.
struct Operator {
  std::string schema;
  void (*kernel)(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
};

// One list per file; module.cc registers them.
std::span<const Operator> delta_rule_operators();
std::span<const Operator> related_operators();
std::span<const Operator> ttt_linear_operators();
std::span<const Operator> short_conv_operators();
std::span<const Operator> blocks_operators();
std::span<const Operator> info_operators();

// The names of the bits of the delta rule's options, from bit 2 on.
std::vector<std::string> delta_rule_switches();

// One reference to a tensor of PyTorch, or none. PyTorch's own wrapper shares its reference and asks PyTorch for one
// property at a time, which a decoding step would notice.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// The arguments of an operator in the order of its schema, taken one by one; then its results in the same way. Structs
// that read themselves from here keep the order of a long argument list in one place. Taking does not fail: what is
// wrong with an argument is found when all of them have an owner.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }
  Tensor tensor() { return Tensor(take<AtenTensorHandle>()); }
  Tensor optional_tensor() { return Tensor(take<std::optional<AtenTensorHandle>>().value_or(nullptr)); }

 private:
  StableIValue* next_;
};

// A result that is no tensor becomes None in Python: operators return a fixed number of them.
StableIValue result(Tensor tensor);

template <class... Tensors>
void give(StableIValue* stack, Tensors&&... results) {
  ((*stack++ = result(std::move(results))), ...);
}

// Throws for an element type or a rank that the library has no word for. No tensor: an absent view.
TensorView view(const char* name, const Tensor& tensor);

// The element type that a ScalarType of a schema, an int32_t on the stack, stands for; `name` is what has it.
DType dtype_of(const char* name, int32_t code);

// A finite number, or infinity, the library's word for an absent one.
double number(const char* name, const std::optional<double>& value);

// New tensors, dense: on the device of `like`, with elements that are undefined. `destination` becomes their view.
Tensor dense(const TensorView& like, DType dtype, std::initializer_list<int64_t> shape, TensorView& destination);
Tensor dense_like(const TensorView& like, DType dtype, TensorView& destination);
inline Tensor dense_like(const TensorView& like, TensorView& destination) {
  return dense_like(like, like.dtype, destination);
}

// Of this shape, and dense where the last two axes change places.
Tensor dense_transposed(const TensorView& like, DType dtype, std::initializer_list<int64_t> shape,
                        TensorView& destination);

// Sets what lies at or past `first` of an axis to 0, in the order of PyTorch's current stream.
void zero_from(const Tensor& tensor, int64_t axis, int64_t first);

// Outputs are made before the library has seen the arguments: an axis that is not there counts as empty.
inline int64_t extent(const TensorView& view, int axis) {
  return axis < view.rank ? view.shape[static_cast<size_t>(axis)] : 0;
}

// States are fp32, in an fp64 problem fp64.
inline DType state_dtype(const TensorView& q) { return q.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Sequences: the batch, or what cu_seqlens counts.
inline int64_t num_sequences(const TensorView& q, const TensorView& cu_seqlens) {
  return cu_seqlens.present() ? std::max<int64_t>(extent(cu_seqlens, 0) - 1, 0) : extent(q, 0);
}

// Runs on the device of a tensor: on the CPU with PyTorch's number of threads, on CUDA on PyTorch's current stream with
// scratch memory from PyTorch's allocator, which hands memory out again in the order of that stream.
class ContextOf {
 public:
  explicit ContextOf(const TensorView& tensor);
  ContextOf(const ContextOf&) = delete;
  ContextOf& operator=(const ContextOf&) = delete;

  operator const Context&() const { return context_; }
  Context* operator->() { return &context_; }

 private:
  static void* allocate(void* self, size_t bytes);

  std::vector<Tensor> scratch_;
  Context context_;
};

// ---- What follows from the tables of a family ---------------------------------------------------------------------

// The tensors of a struct that are arguments of an operator: those that a call reads or updates, in the order of the
// table. Those that it writes are results.
constexpr bool is_argument(Use use) { return use == Use::kReads || use == Use::kMayRead || use == Use::kUpdates; }

template <class Struct>
class TensorArguments {
 public:
  explicit TensorArguments(Arguments& arguments) {
    Tensor* next = tensors_.data();
    for (const auto& row : kTensors<Struct>) {
      if (is_argument(row.use)) *next++ = row.use == Use::kMayRead ? arguments.optional_tensor() : arguments.tensor();
    }
  }

  void view_as(Struct& to) const {
    const Tensor* next = tensors_.data();
    for (const auto& row : kTensors<Struct>) {
      if (is_argument(row.use)) to.*row.view = view(row.name, *next++);
    }
  }

 private:
  std::array<Tensor, kTensors<Struct>.size()> tensors_;
};

// Their part of a schema: "Tensor q, Tensor? g, ". What is updated has a letter: "Tensor(a!) state, ".
template <class Struct>
std::string argument_schema() {
  std::string schema;
  char letter = 'a';
  for (const auto& row : kTensors<Struct>) {
    if (row.use == Use::kReads) schema += "Tensor ";
    if (row.use == Use::kMayRead) schema += "Tensor? ";
    if (row.use == Use::kUpdates) schema += std::string("Tensor(") + letter++ + "!) ";
    if (is_argument(row.use)) schema += std::string(row.name) + ", ";
  }
  return schema;
}

// The results: "Tensor o", or "(Tensor dq, Tensor dk)".
template <class Struct>
std::string result_schema() {
  std::string schema;
  int count = 0;
  for (const auto& row : kTensors<Struct>) {
    if (is_argument(row.use)) continue;
    schema += (count++ == 0 ? "Tensor " : ", Tensor ") + std::string(row.name);
  }
  return count == 1 ? schema : "(" + schema + ")";
}

// The gradients that a backward returns, in the order of its table: of the inputs that are there, where bit i of
// `asked_for` is set for input i. Each has the shape and type of its input; that of a state has the type of states.
template <class Backward>
class GradientResults {
 public:
  static constexpr auto kCount =
      std::ranges::count_if(kTensors<Backward>, [](const auto& row) { return row.gradient_of != nullptr; });

  // `like` has the type of the problem.
  GradientResults(Backward& args, const TensorView& like, int64_t asked_for) {
    static_assert(gradients_follow_inputs<Backward>());
    using Inputs = decltype(args.in);
    Tensor* next = tensors_.data();
    for (const auto& row : kTensors<Backward>) {
      if (row.gradient_of == nullptr) continue;
      const TensorField<Inputs>* input = input_row<Inputs>(row.gradient_of);
      const TensorView& of = args.in.*input->view;
      Tensor& tensor = *next++;
      if (!(asked_for >> (input - kTensors<Inputs>.data()) & 1) || !of.present()) continue;
      tensor = dense_like(of, row.use == Use::kWritesState ? state_dtype(like) : of.dtype, args.*row.view);
    }
  }

  void give(StableIValue* stack) {
    for (Tensor& tensor : tensors_) *stack++ = result(std::move(tensor));
  }

 private:
  std::array<Tensor, kCount> tensors_;
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
