#include "convert.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "fastweight/error.h"

namespace fastweight::bindings {
namespace {

[[noreturn]] void invalid(const char* name, const std::string& expected, const std::string& got) {
  throw Error(ErrorCode::kInvalidArgument, std::string(name) + ": expected " + expected + ", got " + got);
}

// Status codes of the C functions under the stable ABI. PyTorch's macro for this changed its name after 2.11.
void check_shim(AOTITorchError status) {
  if (status != AOTI_TORCH_SUCCESS) throw std::runtime_error("a call into PyTorch failed");
}

// PyTorch's numbers for types and devices, asked for once.
const int32_t kCodes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(),
                          aoti_torch_dtype_float64(), aoti_torch_dtype_int32(),    aoti_torch_dtype_int64()};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32, DType::kI64};
const int32_t kCpuCode = aoti_torch_device_type_cpu(), kCudaCode = aoti_torch_device_type_cuda();

int32_t code_of(DType dtype) { return kCodes[std::find(kDTypes, std::end(kDTypes), dtype) - kDTypes]; }

std::string dtype_text(int32_t code) {
  return torch::headeronly::toString(
      torch::stable::detail::to<torch::headeronly::ScalarType>(torch::stable::detail::from(code)));
}

Tensor allocate(TensorView& view) {
  AtenTensorHandle handle = nullptr;
  // The shim's own function: a call through the dispatcher takes twice as long.
  check_shim(aoti_torch_empty_strided(view.rank, view.shape.data(), view.strides.data(), code_of(view.dtype),
                                      view.device.type == DeviceType::kCuda ? kCudaCode : kCpuCode, view.device.index,
                                      &handle));
  Tensor tensor(handle);
  check_shim(aoti_torch_get_data_ptr(handle, &view.data));
  return tensor;
}

TensorView shaped(const TensorView& like, std::initializer_list<int64_t> shape) {
  TensorView view;
  view.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  view.device = like.device;
  return view;
}

void set_dense_strides(TensorView& view) {
  int64_t stride = 1;
  for (size_t axis = static_cast<size_t>(view.rank); axis-- > 0;) {
    view.strides[axis] = stride;
    stride *= std::max<int64_t>(view.shape[axis], 1);
  }
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

StableIValue result(Tensor tensor) {
  AtenTensorHandle handle = tensor.release();
  if (handle == nullptr) check_shim(aoti_torch_new_uninitialized_tensor(&handle));
  return torch::stable::detail::from(handle);
}

DType dtype_of(const char* name, int32_t code) {
  const int32_t* found = std::find(kCodes, std::end(kCodes), code);
  if (found != std::end(kCodes)) return kDTypes[found - kCodes];
  invalid(name, "float32, bfloat16, float16, float64, int32 or int64", dtype_text(code));
}

TensorView view(const char* name, const Tensor& tensor) {
  TensorView result;
  AtenTensorHandle handle = tensor.get();
  if (handle == nullptr) return result;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0;
  check_shim(aoti_torch_get_dim(handle, &rank));
  if (rank > kMaxRank) invalid(name, "at most " + std::to_string(kMaxRank) + " dimensions", std::to_string(rank));
  check_shim(aoti_torch_get_sizes(handle, &sizes));
  check_shim(aoti_torch_get_strides(handle, &strides));
  check_shim(aoti_torch_get_dtype(handle, &dtype));
  check_shim(aoti_torch_get_device_type(handle, &device_type));
  check_shim(aoti_torch_get_data_ptr(handle, &result.data));
  result.dtype = dtype_of(name, dtype);
  if (device_type == kCudaCode) {
    result.device.type = DeviceType::kCuda;
    check_shim(aoti_torch_get_device_index(handle, &result.device.index));
  }
  result.rank = static_cast<int32_t>(rank);
  std::copy_n(sizes, rank, result.shape.begin());
  std::copy_n(strides, rank, result.strides.begin());
  return result;
}

double number(const char* name, const std::optional<double>& value) {
  if (!value.has_value()) return std::numeric_limits<double>::infinity();
  if (!std::isfinite(*value)) invalid(name, "a finite number", std::to_string(*value));
  return *value;
}

Tensor dense(const TensorView& like, DType dtype, std::initializer_list<int64_t> shape, TensorView& destination) {
  return dense_like(shaped(like, shape), dtype, destination);
}

Tensor dense_like(const TensorView& like, DType dtype, TensorView& destination) {
  destination = like;
  destination.dtype = dtype;
  set_dense_strides(destination);
  return allocate(destination);
}

Tensor dense_transposed(const TensorView& like, DType dtype, std::initializer_list<int64_t> shape,
                        TensorView& destination) {
  destination = shaped(like, shape);
  destination.dtype = dtype;
  const size_t last = shape.size() - 1;
  std::swap(destination.shape[last - 1], destination.shape[last]);
  set_dense_strides(destination);
  std::swap(destination.shape[last - 1], destination.shape[last]);
  std::swap(destination.strides[last - 1], destination.strides[last]);
  return allocate(destination);
}

void zero_from(const Tensor& tensor, int64_t axis, int64_t first) {
  int64_t extent = 0;
  check_shim(aoti_torch_get_size(tensor.get(), axis, &extent));
  if (first >= extent) return;
  AtenTensorHandle part = nullptr;
  check_shim(aoti_torch_aten_narrow(tensor.get(), axis, first, extent - first, &part));
  check_shim(aoti_torch_zero_(Tensor(part).get()));
}

ContextOf::ContextOf(const TensorView& tensor) {
  context_.device = tensor.device;
  if (context_.device.type == DeviceType::kCpu) {
    uint32_t num_threads = 0;
    check_shim(torch_get_num_threads(&num_threads));
    context_.num_threads = static_cast<int>(num_threads);
    return;
  }
  context_.stream = current_cuda_stream(context_.device.index);
  context_.workspace = {allocate, [](void*, void*, size_t) {}, this};
  context_.trust_pointers = true;
}

void* ContextOf::allocate(void* self, size_t bytes) {
  ContextOf& context = *static_cast<ContextOf*>(self);
  try {
    TensorView block;
    block.device = context.context_.device;
    const auto count = static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float));
    context.scratch_.push_back(dense(block, DType::kF32, {count}, block));
    return block.data;
  } catch (const std::exception&) {
    return nullptr;
  }
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
