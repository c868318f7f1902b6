// Tensors of rows [.., D] on the device. 8, 16 or 32 neighbouring lanes have a row, by its width alone, and take kVec4s
// vec4s of it at a time.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "core/blocks_problem.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda::rows {

inline constexpr int kThreads = 256;
inline constexpr int kVec4s = 2;  // of a lane at a time
inline constexpr int kAxes = kMaxRank - 1;

// Rows [..] of a tensor [.., D], their axes merged where they lie one after the other.
struct MergedRows {
  int64_t count = 1;
  int axes = 0;
  int64_t extents[kAxes] = {};
  int64_t width = 0;  // D
};

struct RowTensor {
  DeviceTensor tensor;
  int64_t row_strides[kAxes] = {};
  int64_t stride = 1;  // within a row
};

__device__ __forceinline__ int64_t row_start(const MergedRows& rows, const RowTensor& x, int64_t row) {
  int64_t offset = 0;
  for (int axis = rows.axes - 1; axis > 0; --axis) {
    const int64_t outer = row / rows.extents[axis];
    offset += (row - outer * rows.extents[axis]) * x.row_strides[axis];
    row = outer;
  }
  return offset + row * x.row_strides[0];
}

// Vec4 q * lanes + lane of a row from element `base` on; zeros beyond its end.
template <DType kType>
__device__ __forceinline__ void load_vec4s(const RowTensor& x, int64_t start, int64_t first, int64_t step,
                                           int64_t width, float (&values)[kVec4s][4]) {
  RawVec4 raw[kVec4s];
#pragma unroll
  for (int q = 0; q < kVec4s; ++q) {
    const int64_t at = first + q * step;
    raw[q] = {};
    if (at >= width) continue;
    if (x.tensor.aligned_vec4) {
      raw[q] = load_vec4<kType>(element_at(x.tensor.data, kType, start + at));
    } else {
      const int count = static_cast<int>(width - at < 4 ? width - at : 4);
      raw[q] = gather_vec4(x.tensor.data, kType, start + at * x.stride, x.stride, count);
    }
  }
#pragma unroll
  for (int q = 0; q < kVec4s; ++q) decode_vec4<kType>(raw[q], values[q]);
}

// Of type kType or fp32.
template <DType kType>
__device__ __forceinline__ void store_vec4s(const RowTensor& y, int64_t start, int64_t first, int64_t step,
                                            int64_t width, const float (&values)[kVec4s][4]) {
#pragma unroll
  for (int q = 0; q < kVec4s; ++q) {
    const int64_t at = first + q * step;
    if (at >= width) continue;
    if (!y.tensor.aligned_vec4) {
      const int count = static_cast<int>(width - at < 4 ? width - at : 4);
      scatter_vec4(y.tensor.data, y.tensor.dtype, start + at * y.stride, y.stride, count, values[q]);
    } else if (kType == DType::kF32 || y.tensor.dtype == DType::kF32) {
      store_vec4<DType::kF32>(element_at(y.tensor.data, DType::kF32, start + at), values[q]);
    } else {
      store_vec4<kType>(element_at(y.tensor.data, kType, start + at), values[q]);
    }
  }
}

__device__ __forceinline__ float sum_over(int lanes, float value) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// body(row, exists, lane) for the rows of this thread's lanes; every thread of a warp takes part in every round.
template <class Body>
__device__ __forceinline__ void for_each_row(int64_t count, int lanes, const Body& body) {
  const int rows_per_block = kThreads / lanes;
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  const int64_t step = int64_t{gridDim.x} * rows_per_block;
  for (int64_t first = int64_t{blockIdx.x} * rows_per_block; first < count; first += step) {
    const int64_t row = first + group;
    body(row < count ? row : int64_t{0}, row < count, lane);
  }
}

// The axes before the last one of `like`, merged as far as all tensors allow, and the tensors by these axes.
template <size_t kCount>
MergedRows merge_axes(const TensorView& like,
                      const std::array<std::pair<const TensorView*, RowTensor*>, kCount>& tensors) {
  MergedRows rows;
  const auto last = static_cast<size_t>(like.rank - 1);
  rows.width = like.shape[last];
  for (const auto& [view, row_tensor] : tensors) {
    if (!view->present()) continue;
    row_tensor->tensor = device_tensor(*view);
    row_tensor->stride = view->rank == like.rank ? view->strides[last] : 0;
  }
  for (size_t axis = 0; axis < last; ++axis) {
    const int64_t extent = like.shape[axis];
    rows.count *= extent;
    if (extent == 1 && rows.axes > 0) continue;
    bool follows = rows.axes > 0;  // in every tensor, the rows of this axis fill one step of the axis before it
    for (const auto& [view, row_tensor] : tensors) {
      follows =
          follows && row_tensor->row_strides[rows.axes - 1] == (view->present() ? extent * view->strides[axis] : 0);
    }
    if (!follows) rows.extents[rows.axes++] = 1;
    rows.extents[rows.axes - 1] *= extent;
    for (const auto& [view, row_tensor] : tensors) {
      row_tensor->row_strides[rows.axes - 1] = view->present() ? view->strides[axis] : 0;
    }
  }
  return rows;
}

inline int lanes_for(int64_t width) {
  int lanes = 8;
  while (lanes < kWarpSize && lanes * 4 * kVec4s < width) lanes *= 2;
  return lanes;
}

inline LaunchShape launch_shape(int64_t count, int lanes) {
  const int64_t rows_per_block = kThreads / lanes;
  const int64_t blocks = (count + rows_per_block - 1) / rows_per_block;
  return {static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 30)), kThreads};
}

}  // namespace fastweight::cuda::rows
