// The l2 norm of rows and its adjoint.
//
//     y = x rstd,  rstd = 1 / sqrt(sum x^2 + eps)           dx = rstd (dy - y (y . dy))
//
// Rows of up to 8 elements per lane are read once and stay in registers; longer ones are read a second time.
#include "cuda/blocks/kernels.h"
#include "cuda/blocks/rows.cuh"

namespace fastweight::cuda {
namespace {

using namespace rows;

struct Args {
  MergedRows rows;
  RowTensor x, y, dy, dx;  // forward: x, y; backward: y, dy, dx
  RowTensor rstd;          // without a last axis; optional in the forward
  float eps = 0;
  int lanes = kWarpSize;  // of a row
};

template <DType kType>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ Args args) {
  for_each_row(args.rows.count, args.lanes, [&](int64_t row, bool exists, int lane) {
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
  for_each_row(args.rows.count, args.lanes, [&](int64_t row, bool exists, int lane) {
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

}  // namespace

void blocks::direct(const BlockProblem<L2NormForward>& problem, const Context& context) {
  const L2NormForward& forward = problem.args;
  Args args;
  args.rows = merge_axes<3>(forward.x, {{{&forward.x, &args.x}, {&forward.y, &args.y}, {&forward.rstd, &args.rstd}}});
  args.eps = static_cast<float>(forward.eps);
  args.lanes = lanes_for(args.rows.width);
  if (args.rows.count == 0) return;
  with_element_type(forward.x.dtype, [&]<DType kType>() {
    launch<norm_kernel<kType>>("l2norm", context, launch_shape(args.rows.count, args.lanes), args);
  });
}

void blocks::direct(const BlockProblem<L2NormBackward>& problem, const Context& context) {
  const L2NormBackward& backward = problem.args;
  Args args;
  args.rows = merge_axes<4>(
      backward.y,
      {{{&backward.y, &args.y}, {&backward.rstd, &args.rstd}, {&backward.dy, &args.dy}, {&backward.dx, &args.dx}}});
  args.lanes = lanes_for(args.rows.width);
  if (args.rows.count == 0) return;
  with_element_type(backward.y.dtype, [&]<DType kType>() {
    launch<norm_adjoint_kernel<kType>>("l2norm adjoint", context, launch_shape(args.rows.count, args.lanes), args);
  });
}

}  // namespace fastweight::cuda
