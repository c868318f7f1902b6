// Non-owning views of tensors: pointer, element type, shape, strides, device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace fastweight {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kI32 = 4, kI64 = 5 };

// Bytes of one element.
constexpr int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
  }
  return 1;  // not a type; every operator rejects it
}

enum class DeviceType : int32_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 5;

// A view never owns memory. Strides count elements, may be zero (a broadcast input) and need not be dense. A
// default-constructed view means "absent"; a tensor without elements may have a null pointer.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device{};
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};

  bool present() const { return rank > 0 || data != nullptr; }

  // A dense, row-major view. The const overload is for inputs: an operator never writes through an input view.
  static TensorView dense(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {}) {
    TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.device = device;
    for (int64_t extent : shape) {
      if (view.rank == kMaxRank) break;
      view.shape[static_cast<size_t>(view.rank++)] = extent;
    }
    int64_t stride = 1;
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      view.strides[static_cast<size_t>(axis)] = stride;
      stride *= view.shape[static_cast<size_t>(axis)];
    }
    return view;
  }
  static TensorView dense(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {}) {
    return dense(const_cast<void*>(data), dtype, shape, device);
  }
  static TensorView dense(float* data, std::initializer_list<int64_t> shape) { return dense(data, DType::kF32, shape); }
  static TensorView dense(const float* data, std::initializer_list<int64_t> shape) {
    return dense(data, DType::kF32, shape);
  }
  static TensorView dense(double* data, std::initializer_list<int64_t> shape) {
    return dense(data, DType::kF64, shape);
  }
  static TensorView dense(const double* data, std::initializer_list<int64_t> shape) {
    return dense(data, DType::kF64, shape);
  }
};

}  // namespace fastweight
