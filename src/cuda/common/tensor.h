// Tensors as kernels see them. Compiled by both compilers.
#pragma once

#include <cstdint>

#include "fastweight/tensor.h"

#ifdef __CUDACC__
#define FW_HOST_DEVICE __host__ __device__
#else
#define FW_HOST_DEVICE
#endif

namespace fastweight::cuda {

// Strides count elements, as in TensorView. Absent: the pointer is null.
struct DeviceTensor {
  void* data = nullptr;
  int64_t strides[kMaxRank] = {};
  DType dtype = DType::kF32;
  bool aligned_vec4 = false;  // every four elements along the last axis lie together, aligned to the size of four

  FW_HOST_DEVICE bool present() const { return data != nullptr; }
};

// Whether groups of `count` along `axis` lie together, aligned to the size of a group, for every index along the other
// axes.
inline bool has_groups(const TensorView& view, int axis, int64_t count) {
  const auto a = static_cast<size_t>(axis);
  const int64_t bytes = count * element_size(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) != 0) return false;
  if (view.strides[a] != 1 || view.shape[a] % count != 0) return false;
  for (size_t i = 0; i < static_cast<size_t>(view.rank); ++i) {
    if (i != a && view.shape[i] > 1 && view.strides[i] % count != 0) return false;
  }
  return true;
}

inline bool has_aligned_vec4(const TensorView& view, int axis) { return has_groups(view, axis, 4); }

// Rows along the last axis can be moved in pieces of 16 bytes.
inline bool has_vectors(const TensorView& view) {
  return has_groups(view, view.rank - 1, 16 / element_size(view.dtype));
}

inline DeviceTensor device_tensor(const TensorView& view) {
  DeviceTensor tensor;
  if (!view.present()) return tensor;
  tensor.data = view.data;
  tensor.dtype = view.dtype;
  for (int axis = 0; axis < view.rank; ++axis) tensor.strides[axis] = view.strides[static_cast<size_t>(axis)];
  tensor.aligned_vec4 = has_aligned_vec4(view, view.rank - 1);
  return tensor;
}

// K x V matrices in a tensor whose last two axes are K and V in either order: [N, HV, ..] or [B, NT, HV, ..]. Kernels
// know the order by the strides alone.
struct DeviceStates {
  void* data = nullptr;
  int64_t outer_strides[kMaxRank - 2] = {};
  int64_t k_stride = 0, v_stride = 0;
  DType dtype = DType::kF32;
  bool k_aligned_vec4 = false, v_aligned_vec4 = false;  // as DeviceTensor::aligned_vec4, along K or along V

  FW_HOST_DEVICE bool present() const { return data != nullptr; }
};

inline DeviceStates device_states(const TensorView& view, bool v_first) {
  DeviceStates states;
  if (!view.present()) return states;
  const int k_axis = view.rank - (v_first ? 1 : 2), v_axis = view.rank - (v_first ? 2 : 1);
  states.data = view.data;
  states.dtype = view.dtype;
  for (int axis = 0; axis < view.rank - 2; ++axis) states.outer_strides[axis] = view.strides[static_cast<size_t>(axis)];
  states.k_stride = view.strides[static_cast<size_t>(k_axis)];
  states.v_stride = view.strides[static_cast<size_t>(v_axis)];
  states.k_aligned_vec4 = has_aligned_vec4(view, k_axis);
  states.v_aligned_vec4 = has_aligned_vec4(view, v_axis);
  return states;
}

}  // namespace fastweight::cuda
