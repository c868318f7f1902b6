// The l2 norm of rows and its adjoint.
//
//     y = x rstd,  rstd = 1 / sqrt(sum x^2 + eps)           dx = rstd (dy - y (y . dy))
//
// 8, 16 or 32 neighbouring lanes have a row, by its width alone. Rows of up to 8 elements per lane are read once and
// stay in registers; longer ones are read a second time.
#include <algorithm>
#include <array>

#include "cuda/blocks/kernels.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVec4s = 2;  // of a lane at a time
constexpr int kAxes = kMaxRank - 1;

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

struct Args {
  MergedRows rows;
  RowTensor x, y, dy, dx;  // forward: x, y; backward: y, dy, dx
  RowTensor rstd;          // without a last axis; optional in the forward
  float eps = 0;
  int lanes = kWarpSize;  // of a row
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
__device__ __forceinline__ void for_each_row(const Args& args, const Body& body) {
  const int rows_per_block = kThreads / args.lanes;
  const int lane = threadIdx.x % args.lanes, group = threadIdx.x / args.lanes;
  const int64_t step = int64_t{gridDim.x} * rows_per_block;
  for (int64_t first = int64_t{blockIdx.x} * rows_per_block; first < args.rows.count; first += step) {
    const int64_t row = first + group;
    body(row < args.rows.count ? row : int64_t{0}, row < args.rows.count, lane);
  }
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ Args args) {
  for_each_row(args, [&](int64_t row, bool exists, int lane) {
    const int64_t width = exists ? args.rows.width : 0, step = 4 * args.lanes, round = kVec4s * step;
    const int64_t x_start = row_start(args.rows, args.x, row), y_start = row_start(args.rows, args.y, row);
    float x[kVec4s][4];
    float sum = 0;
    for (int64_t base = 0; base < args.rows.width; base += round) {
      load_vec4s<kType>(args.x, x_start, base + 4 * lane, step, width, x);
#pragma unroll
      for (int q = 0; q < kVec4s; ++q) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum = fmaf(x[q][e], x[q][e], sum);
      }
    }
    const float rstd = 1.0f / sqrtf(sum_over(args.lanes, sum) + args.eps);
    for (int64_t base = 0; base < width; base += round) {
      if (args.rows.width > round) load_vec4s<kType>(args.x, x_start, base + 4 * lane, step, width, x);
#pragma unroll
      for (int q = 0; q < kVec4s; ++q) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[q][e] *= rstd;
      }
      store_vec4s<kType>(args.y, y_start, base + 4 * lane, step, width, x);
    }
    if (exists && lane == 0 && args.rstd.tensor.present()) {
      const DeviceTensor& out = args.rstd.tensor;
      store_float(out.data, out.dtype, row_start(args.rows, args.rstd, row), rstd);
    }
  });
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) norm_adjoint_kernel(const __grid_constant__ Args args) {
  for_each_row(args, [&](int64_t row, bool exists, int lane) {
    const int64_t width = exists ? args.rows.width : 0, step = 4 * args.lanes, round = kVec4s * step;
    const int64_t y_start = row_start(args.rows, args.y, row), dy_start = row_start(args.rows, args.dy, row);
    float y[kVec4s][4], dy[kVec4s][4];
    const auto load = [&](int64_t base) {
      load_vec4s<kType>(args.y, y_start, base + 4 * lane, step, width, y);
      with_type(args.dy.tensor.dtype,
                [&](auto type) { load_vec4s<type.value>(args.dy, dy_start, base + 4 * lane, step, width, dy); });
    };
    float sum = 0;
    for (int64_t base = 0; base < args.rows.width; base += round) {
      load(base);
#pragma unroll
      for (int q = 0; q < kVec4s; ++q) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum = fmaf(y[q][e], dy[q][e], sum);
      }
    }
    const float along = sum_over(args.lanes, sum);
    const float rstd = load_float(args.rstd.tensor.data, args.rstd.tensor.dtype, row_start(args.rows, args.rstd, row));
    const int64_t dx_start = row_start(args.rows, args.dx, row);
    for (int64_t base = 0; base < width; base += round) {
      if (args.rows.width > round) load(base);
#pragma unroll
      for (int q = 0; q < kVec4s; ++q) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dy[q][e] = rstd * fmaf(-y[q][e], along, dy[q][e]);
      }
      store_vec4s<kType>(args.dx, dx_start, base + 4 * lane, step, width, dy);
    }
  });
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

void set_lanes(Args& args) {
  args.lanes = 8;
  while (args.lanes < kWarpSize && args.lanes * 4 * kVec4s < args.rows.width) args.lanes *= 2;
}

LaunchShape shape_of(const Args& args) {
  const int64_t rows_per_block = kThreads / args.lanes;
  const int64_t blocks = (args.rows.count + rows_per_block - 1) / rows_per_block;
  return {static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 30)), kThreads};
}

}  // namespace

void blocks::direct(const BlockProblem<L2NormForward>& problem, const Context& context) {
  const L2NormForward& forward = problem.args;
  Args args;
  args.rows = merge_axes<3>(forward.x, {{{&forward.x, &args.x}, {&forward.y, &args.y}, {&forward.rstd, &args.rstd}}});
  args.eps = static_cast<float>(forward.eps);
  set_lanes(args);
  if (args.rows.count == 0) return;
  with_element_type(forward.x.dtype,
                    [&]<DType kType>() { launch<norm_kernel<kType>>("l2norm", context, shape_of(args), args); });
}

void blocks::direct(const BlockProblem<L2NormBackward>& problem, const Context& context) {
  const L2NormBackward& backward = problem.args;
  Args args;
  args.rows = merge_axes<4>(
      backward.y,
      {{{&backward.y, &args.y}, {&backward.rstd, &args.rstd}, {&backward.dy, &args.dy}, {&backward.dx, &args.dx}}});
  set_lanes(args);
  if (args.rows.count == 0) return;
  with_element_type(backward.y.dtype, [&]<DType kType>() {
    launch<norm_adjoint_kernel<kType>>("l2norm adjoint", context, shape_of(args), args);
  });
}

}  // namespace fastweight::cuda
