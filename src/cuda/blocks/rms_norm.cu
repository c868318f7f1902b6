// The RMS norm of rows with a gate, and its adjoint. With n = x rstd, rstd = 1 / sqrt(mean x^2 + eps) and
// a = activation(gate):
//
//     y  = weight n a
//     dn = dy weight a                         dx = rstd (dn - n mean(dn n))
//     dgate = dy weight n activation'(gate)    dweight = sum over rows of dy n a
//
// Lanes have rows as in the l2 norm. The backward leaves rstd in scratch memory; a second kernel sums dweight, a thread
// per column and run of rows, in fp32, and a third adds the runs in order, in fp64.
#include "cuda/blocks/kernels.h"
#include "cuda/blocks/rows.cuh"
#include "cuda/common/activations.cuh"
#include "cuda/common/workspace.h"

namespace fastweight::cuda {
namespace {

using namespace rows;

constexpr int64_t kRowsPerRun = 64;

struct Args {
  MergedRows rows;
  RowTensor x, gate, y, dy, dx, dgate;  // of rows [D]; gate, dx and dgate may be absent
  DeviceTensor weight, dweight;         // [D], may be absent
  float eps = 0;
  bool silu = true;
  int lanes = kWarpSize;
  float* rstd = nullptr;  // [rows], where dweight is asked for
  float* sums = nullptr;  // [runs][D]
  int64_t num_runs = 0;
};

struct Gated {
  float value, slope;  // activation(gate) and its derivative
};
__device__ __forceinline__ Gated activate(float gate, bool silu) {
  const float y = sigmoid(gate);
  if (!silu) return {y, y * (1.0f - y)};
  return {gate * y, y * fmaf(gate, 1.0f - y, 1.0f)};
}

// This lane's elements of a row, from `base` on.
struct Place {
  int64_t row, base, first, step, width;
};

// Of any type; ones where there is no tensor.
__device__ __forceinline__ void load_any(const MergedRows& rows, const RowTensor& x, const Place& at,
                                         float (&values)[kVec4s][4]) {
  const int64_t start = row_start(rows, x, at.row);
  with_type(x.tensor.dtype, [&](auto type) { load_vec4s<type.value>(x, start, at.first, at.step, at.width, values); });
}
__device__ __forceinline__ void store_any(const MergedRows& rows, const RowTensor& x, const Place& at,
                                          const float (&values)[kVec4s][4]) {
  const int64_t start = row_start(rows, x, at.row);
  with_type(x.tensor.dtype, [&](auto type) { store_vec4s<type.value>(x, start, at.first, at.step, at.width, values); });
}
__device__ __forceinline__ float weight_at(const Args& args, int64_t column) {
  if (!args.weight.present() || column >= args.rows.width) return 1.0f;
  return load_float(args.weight.data, args.weight.dtype, column * args.weight.strides[0]);
}

// body(e, q, column) for this lane's elements.
template <class Body>
__device__ __forceinline__ void for_elements(const Place& at, const Body& body) {
#pragma unroll
  for (int q = 0; q < kVec4s; ++q) {
#pragma unroll
    for (int e = 0; e < 4; ++e) body(q, e, at.first + q * at.step + e);
  }
}

template <DType kType>
__device__ __forceinline__ float find_rstd(const Args& args, Place at, int lane, float (&x)[kVec4s][4]) {
  const int64_t start = row_start(args.rows, args.x, at.row), round = kVec4s * at.step;
  float sum = 0;
  for (at.base = 0; at.base < args.rows.width; at.base += round) {
    load_vec4s<kType>(args.x, start, at.base + 4 * lane, at.step, at.width, x);
    for_elements(at, [&](int q, int e, int64_t) { sum = fmaf(x[q][e], x[q][e], sum); });
  }
  return 1.0f / sqrtf(sum_over(args.lanes, sum) / static_cast<float>(args.rows.width) + args.eps);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const __grid_constant__ Args args) {
  for_each_row(args.rows.count, args.lanes, [&](int64_t row, bool exists, int lane) {
    Place at{row, 0, 4 * lane, 4 * args.lanes, exists ? args.rows.width : 0};
    const int64_t x_start = row_start(args.rows, args.x, row), round = kVec4s * at.step;
    float x[kVec4s][4], gate[kVec4s][4];
    const float rstd = find_rstd<kType>(args, at, lane, x);
    for (at.base = 0; at.base < at.width; at.base += round) {
      at.first = at.base + 4 * lane;
      if (args.rows.width > round) load_vec4s<kType>(args.x, x_start, at.first, at.step, at.width, x);
      const bool gated = args.gate.tensor.present();
      if (gated) load_any(args.rows, args.gate, at, gate);
      for_elements(at, [&](int q, int e, int64_t column) {
        const float y = x[q][e] * rstd * weight_at(args, column);
        x[q][e] = gated ? y * activate(gate[q][e], args.silu).value : y;
      });
      store_any(args.rows, args.y, at, x);
    }
  });
}

template <DType kType>
__global__ void __launch_bounds__(kThreads, 2) rms_norm_adjoint_kernel(const __grid_constant__ Args args) {
  for_each_row(args.rows.count, args.lanes, [&](int64_t row, bool exists, int lane) {
    Place at{row, 0, 4 * lane, 4 * args.lanes, exists ? args.rows.width : 0};
    const int64_t x_start = row_start(args.rows, args.x, row), round = kVec4s * at.step;
    const bool gated = args.gate.tensor.present(), several = args.rows.width > round;
    float x[kVec4s][4], gate[kVec4s][4], dn[kVec4s][4];
    const float rstd = find_rstd<kType>(args, at, lane, x);
    // x becomes n, dn what reaches it, gate the gate's gradient.
    const auto load = [&] {
      at.first = at.base + 4 * lane;
      if (several) load_vec4s<kType>(args.x, x_start, at.first, at.step, at.width, x);
      load_any(args.rows, args.dy, at, dn);
      if (gated) load_any(args.rows, args.gate, at, gate);
      for_elements(at, [&](int q, int e, int64_t column) {
        const float weight = weight_at(args, column);
        x[q][e] *= rstd;
        if (gated) {
          const Gated a = activate(gate[q][e], args.silu);
          gate[q][e] = dn[q][e] * (weight * x[q][e]) * a.slope;
          dn[q][e] *= a.value;
        }
        dn[q][e] *= weight;
      });
    };
    float sum = 0;
    for (at.base = 0; at.base < args.rows.width; at.base += round) {
      load();
      for_elements(at, [&](int q, int e, int64_t) { sum = fmaf(dn[q][e], x[q][e], sum); });
      if (args.dgate.tensor.present()) store_any(args.rows, args.dgate, at, gate);
    }
    const float along = sum_over(args.lanes, sum) / static_cast<float>(args.rows.width);
    if (exists && lane == 0 && args.rstd != nullptr) args.rstd[row] = rstd;
    if (!args.dx.tensor.present()) return;
    for (at.base = 0; at.base < at.width; at.base += round) {
      if (several) load();
      for_elements(at, [&](int q, int e, int64_t) { dn[q][e] = rstd * fmaf(-x[q][e], along, dn[q][e]); });
      store_any(args.rows, args.dx, at, dn);
    }
  });
}

// A thread per run of rows and column.
__global__ void __launch_bounds__(kThreads) rms_norm_sums_kernel(const __grid_constant__ Args args) {
  const int64_t items = args.num_runs * args.rows.width, step = gridDim.x * int64_t{kThreads};
  for (int64_t item = blockIdx.x * int64_t{kThreads} + threadIdx.x; item < items; item += step) {
    const int64_t run = item / args.rows.width, column = item - run * args.rows.width;
    const int64_t begin = run * kRowsPerRun, rest = args.rows.count - begin;
    const int64_t end = begin + (rest < kRowsPerRun ? rest : kRowsPerRun);
    const auto element = [&](const RowTensor& x, int64_t row) {
      return load_float(x.tensor.data, x.tensor.dtype, row_start(args.rows, x, row) + column * x.stride);
    };
    float sum = 0;
    for (int64_t row = begin; row < end; ++row) {
      const float n = element(args.x, row) * args.rstd[row];
      float through = element(args.dy, row);
      if (args.gate.tensor.present()) through *= activate(element(args.gate, row), args.silu).value;
      sum = fmaf(through, n, sum);
    }
    args.sums[item] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) rms_norm_total_kernel(const __grid_constant__ Args args) {
  const int64_t step = gridDim.x * int64_t{kThreads};
  for (int64_t column = blockIdx.x * int64_t{kThreads} + threadIdx.x; column < args.rows.width; column += step) {
    double total = 0;
    for (int64_t run = 0; run < args.num_runs; ++run) {
      total += static_cast<double>(args.sums[run * args.rows.width + column]);
    }
    store_float(args.dweight.data, args.dweight.dtype, column * args.dweight.strides[0], static_cast<float>(total));
  }
}

Args make_args(const RmsNormInputs& in, const RmsNormOptions& options) {
  Args args;
  args.eps = static_cast<float>(options.eps);
  args.silu = options.activation == NormGate::kSilu;
  if (in.weight.present()) args.weight = device_tensor(in.weight);
  return args;
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::min<int64_t>((threads + kThreads - 1) / kThreads, 1 << 30));
}

}  // namespace

void blocks::direct(const BlockProblem<RmsNormForward>& problem, const Context& context) {
  const RmsNormForward& forward = problem.args;
  const RmsNormInputs& in = forward.in;
  Args args = make_args(in, forward.options);
  args.rows = merge_axes<3>(in.x, {{{&in.x, &args.x}, {&in.gate, &args.gate}, {&forward.y, &args.y}}});
  args.lanes = lanes_for(args.rows.width);
  if (args.rows.count == 0) return;
  with_element_type(in.x.dtype, [&]<DType kType>() {
    launch<rms_norm_kernel<kType>>("rms norm", context, launch_shape(args.rows.count, args.lanes), args);
  });
}

void blocks::direct(const BlockProblem<RmsNormBackward>& problem, const Context& context) {
  const RmsNormBackward& backward = problem.args;
  const RmsNormInputs& in = backward.in;
  Args args = make_args(in, backward.options);
  args.rows = merge_axes<5>(in.x, {{{&in.x, &args.x},
                                    {&in.gate, &args.gate},
                                    {&backward.dy, &args.dy},
                                    {&backward.dx, &args.dx},
                                    {&backward.dgate, &args.dgate}}});
  args.lanes = lanes_for(args.rows.width);
  args.num_runs = (args.rows.count + kRowsPerRun - 1) / kRowsPerRun;
  const bool summed = backward.dweight.present();
  const auto floats = summed ? args.rows.count + args.num_runs * args.rows.width : 0;
  const DeviceWorkspace workspace(context, static_cast<size_t>(floats) * sizeof(float));
  if (summed) {
    args.dweight = device_tensor(backward.dweight);
    args.rstd = static_cast<float*>(workspace.data());
    args.sums = args.rstd + args.rows.count;
  }
  if (args.rows.count > 0) {
    with_element_type(in.x.dtype, [&]<DType kType>() {
      launch<rms_norm_adjoint_kernel<kType>>("rms norm adjoint", context, launch_shape(args.rows.count, args.lanes),
                                             args);
    });
  }
  if (!summed) return;
  if (args.rows.count > 0) {
    launch<rms_norm_sums_kernel>("rms norm sums", context, {blocks_for(args.num_runs * args.rows.width), kThreads},
                                 args);
  }
  launch<rms_norm_total_kernel>("rms norm total", context, {blocks_for(args.rows.width), kThreads}, args);
}

}  // namespace fastweight::cuda
