#include "convert.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "fastweight/error.h"

namespace fastweight::bindings {
namespace {

[[noreturn]] void invalid(const char* name, const std::string& expected, const std::string& got) {
  throw Error(ErrorCode::kInvalidArgument, std::string(name) + ": expected " + expected + ", got " + got);
}

DType dtype_of(const char* name, const Tensor& tensor) {
  switch (const ScalarType type = tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::Double:
      return DType::kF64;
    case ScalarType::Int:
      return DType::kI32;
    case ScalarType::Long:
      return DType::kI64;
    default:
      invalid(name, "float32, bfloat16, float16, float64, int32 or int64", torch::headeronly::toString(type));
  }
}

Device device_of(const Tensor& tensor) {
  if (!tensor.is_cuda()) return {};
  return {DeviceType::kCuda, tensor.get_device_index()};
}

// Status codes of the C functions under the stable ABI. PyTorch's macro for this changed its name after 2.11.
void check_shim(AOTITorchError status) {
  if (status != AOTI_TORCH_SUCCESS) throw std::runtime_error("a call into PyTorch failed");
}

// PyTorch's library for CUDA is loaded where there are CUDA tensors. A build for the CPU has none to link to.
void* current_cuda_stream(int32_t device_index) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Get>(symbol);
  }();
  if (get == nullptr) throw Error(ErrorCode::kDevice, "this PyTorch has no CUDA streams");
  void* stream = nullptr;
  check_shim(get(device_index, &stream));
  return stream;
}

}  // namespace

TensorView view(const char* name, const Tensor& tensor) {
  TensorView result;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (sizes.size() > static_cast<size_t>(kMaxRank)) {
    invalid(name, "at most " + std::to_string(kMaxRank) + " dimensions", std::to_string(sizes.size()));
  }
  result.data = tensor.data_ptr();
  result.dtype = dtype_of(name, tensor);
  result.device = device_of(tensor);
  result.rank = static_cast<int32_t>(sizes.size());
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    result.shape[axis] = sizes[axis];
    result.strides[axis] = strides[axis];
  }
  return result;
}

TensorView view(const char* name, const OptionalTensor& tensor) {
  return tensor.has_value() ? view(name, *tensor) : TensorView{};
}

double number(const char* name, const std::optional<double>& value) {
  if (!value.has_value()) return std::numeric_limits<double>::infinity();
  if (!std::isfinite(*value)) invalid(name, "a finite number", std::to_string(*value));
  return *value;
}

ContextOf::ContextOf(const Tensor& tensor) : tensor_(tensor) {
  context_.device = device_of(tensor);
  if (context_.device.type == DeviceType::kCpu) {
    context_.num_threads = static_cast<int>(torch::stable::get_num_threads());
    return;
  }
  context_.stream = current_cuda_stream(context_.device.index);
  context_.workspace = {allocate, [](void*, void*, size_t) {}, this};
}

void* ContextOf::allocate(void* self, size_t bytes) {
  ContextOf& context = *static_cast<ContextOf*>(self);
  try {
    context.scratch_.push_back(dense(context.tensor_, {static_cast<int64_t>(bytes)}, ScalarType::Byte));
    return context.scratch_.back().data_ptr();
  } catch (const std::exception&) {
    return nullptr;
  }
}

Tensor dense(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * std::max<int64_t>(shape[axis], 1);
  int32_t device_type = 0;
  check_shim(aoti_torch_get_device_type(like.get(), &device_type));
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  // The shim's own function: a call through the dispatcher takes twice as long.
  check_shim(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), code,
                                      device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor dense_like(const Tensor& like) {
  const auto sizes = like.sizes();
  return dense(like, {sizes.begin(), sizes.end()}, like.scalar_type());
}

ScalarType state_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

int64_t num_sequences(const Tensor& q, const OptionalTensor& cu_seqlens) {
  return cu_seqlens.has_value() ? cu_seqlens->numel() - 1 : q.size(0);
}

namespace {

Tensor gradient(const Gradients& gradients, int i, const char* name, const OptionalTensor& input,
                std::optional<ScalarType> dtype, TensorView& destination) {
  if (!(gradients.asked_for >> i & 1) || !input.has_value()) return nothing();
  const auto shape = input->sizes();
  const Tensor result = dense(gradients.q, {shape.begin(), shape.end()}, dtype.value_or(input->scalar_type()));
  destination = view(name, result);
  return result;
}

}  // namespace

Tensor Gradients::operator()(int i, const char* name, const OptionalTensor& input, TensorView& destination) const {
  return gradient(*this, i, name, input, std::nullopt, destination);
}

Tensor Gradients::of_state(int i, const char* name, const OptionalTensor& input, TensorView& destination) const {
  return gradient(*this, i, name, input, state_dtype(q), destination);
}

void rethrow(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    switch (e.code()) {
      case ErrorCode::kInvalidArgument:
        throw std::runtime_error(std::string("[ValueError] ") + e.what());
      case ErrorCode::kUnsupported:
        throw std::runtime_error(std::string("[NotImplementedError] ") + e.what());
      case ErrorCode::kOutOfMemory:
        throw std::runtime_error(std::string("[MemoryError] ") + e.what());
      case ErrorCode::kDevice:
        break;
    }
    throw;
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("[MemoryError] out of memory");
  }
}

}  // namespace fastweight::bindings
