// Chunk-local sums of gates, with or without the activation that makes the gates, and the way back.
//
//     y_i = sum over j <= i (reverse: j >= i) of the chunk of f(x_j), or y_i = f(x_i) without a chunk size
//     f(x) = x,  -a softplus(x + b)  or  bound * sigmoid(a (x + b)),     a = exp(A_log), b = dt_bias
//
// A thread has one column or four neighbouring ones of one chunk and walks over its tokens, the loads of a tile of them
// on their way at once. Neighbouring threads have neighbouring columns, then the next chunk. Every sum is one chain in
// the order of the tokens, whatever the layout.
//
// A thread of the backward has the same columns of a run of chunks. It leaves the sums of their gradients of A_log and
// dt_bias in scratch memory, in fp64; a second kernel adds the runs. The cut depends on the lengths of the sequences
// alone.
#include <algorithm>

#include "cuda/blocks/chunks.h"
#include "cuda/blocks/kernels.h"
#include "cuda/common/activations.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 8;                // tokens
constexpr int64_t kUnsummedChunk = 64;  // tokens, where gates are not summed and the cut is one of convenience
constexpr int64_t kTokensPerRun = 128;  // of the backward, at least

enum class Form { kNone, kSoftplus, kBounded };

struct Args {
  DeviceTensor x;   // [B, T, heads, width]: a value per head is a row of heads (BlockProblem)
  DeviceTensor y;   // like x
  DeviceTensor dg;  // like x; backward
  DeviceTensor dx;  // like x; backward, optional
  DeviceTensor a_log, dt_bias;
  ChunkedSequences chunked;
  int64_t num_chunks = 0;  // at most
  int64_t width = 0;
  int64_t columns = 0;  // of a token
  bool per_channel = false;
  bool summed = false, reverse = false;
  Form form = Form::kNone;
  float bound = 0;

  int64_t chunks_per_run = 1, num_runs = 0;
  double* sums = nullptr;  // [runs][2][columns]: of A_log's gradients, of dt_bias's
};

// A thread's columns and their parameters.
template <int kColumns>
struct Columns {
  int64_t first;  // of all columns of a token
  int64_t head, offset;
  float a[kColumns], bias[kColumns];
};

template <int kColumns>
__device__ __forceinline__ Columns<kColumns> columns_at(const Args& args, int64_t group) {
  Columns<kColumns> columns;
  columns.first = group * kColumns;
  columns.head = columns.first / args.width;
  columns.offset = columns.first - columns.head * args.width;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    columns.a[c] = 1;
    columns.bias[c] = 0;
    if (args.form == Form::kNone) continue;
    const int64_t column = columns.offset + c;
    const DeviceTensor &a_log = args.a_log, &dt_bias = args.dt_bias;
    if (a_log.present()) {
      const int64_t head = args.per_channel ? columns.head : column;
      columns.a[c] = expf(load_float(a_log.data, a_log.dtype, head * a_log.strides[0]));
    }
    if (dt_bias.present()) {
      const int64_t at = args.per_channel ? columns.head * dt_bias.strides[0] + column * dt_bias.strides[1]
                                          : column * dt_bias.strides[0];
      columns.bias[c] = load_float(dt_bias.data, dt_bias.dtype, at);
    }
  }
  return columns;
}

template <int kColumns>
__device__ __forceinline__ int64_t offset_of(const DeviceTensor& x, const ChunkSpan& span, int64_t token,
                                             const Columns<kColumns>& columns) {
  return row_offset(x, span.batch, span.begin + token, columns.head) + columns.offset * x.strides[3];
}

// kColumns == 4: the tensor has aligned_vec4.
template <DType kType, int kColumns>
__device__ __forceinline__ void load_tile(const DeviceTensor& x, int64_t offset, int64_t step, int tokens,
                                          float (&values)[kTile][kColumns]) {
  RawVec4 raw[kTile];
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    raw[i] = {};
    if (i >= tokens) continue;
    const char* address = element_at(x.data, kType, offset + i * step);
    if constexpr (kColumns == 4) {
      raw[i] = load_vec4<kType>(address);
    } else {
      raw[i].words[0] = load_bits(address, kType);
    }
  }
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    if constexpr (kColumns == 4) {
      decode_vec4<kType>(raw[i], values[i]);
    } else {
      values[i][0] = decode(raw[i].words[0], kType);
    }
  }
}

// y is of type kType or fp32.
template <DType kType, int kColumns>
__device__ __forceinline__ void store(const DeviceTensor& y, int64_t offset, const float (&values)[kColumns]) {
  if constexpr (kColumns == 1) {
    store_float(y.data, y.dtype, offset, values[0]);
  } else if (kType == DType::kF32 || y.dtype == DType::kF32) {
    store_vec4<DType::kF32>(element_at(y.data, DType::kF32, offset), values);
  } else {
    store_vec4<kType>(element_at(y.data, kType, offset), values);
  }
}

__device__ __forceinline__ float activate(const Args& args, float x, float a, float bias) {
  if (args.form == Form::kNone) return x;
  if (args.form == Form::kBounded) return args.bound * sigmoid(a * (x + bias));
  return -a * softplus(x + bias);
}

__device__ __forceinline__ int tokens_left(const ChunkSpan& span, int64_t n) {
  return static_cast<int>(span.length - n < kTile ? span.length - n : kTile);
}

template <DType kType, int kColumns>
__global__ void __launch_bounds__(kThreads) gate_forward_kernel(const __grid_constant__ Args args) {
  const int64_t groups = args.columns / kColumns, items = args.num_chunks * groups;
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x, step = gridDim.x * int64_t{kThreads};
  for (int64_t item = first; item < items; item += step) {
    const int64_t chunk = item / groups;
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    const auto columns = columns_at<kColumns>(args, item - chunk * groups);
    float sum[kColumns] = {};
    for (int64_t n = 0; n < span.length; n += kTile) {
      const int64_t token = args.reverse ? span.length - 1 - n : n;
      const int64_t x_step = args.reverse ? -args.x.strides[1] : args.x.strides[1];
      const int64_t y_step = args.reverse ? -args.y.strides[1] : args.y.strides[1];
      const int64_t y = offset_of(args.y, span, token, columns);
      const int tokens = tokens_left(span, n);
      float x[kTile][kColumns];
      load_tile<kType>(args.x, offset_of(args.x, span, token, columns), x_step, tokens, x);
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        if (i >= tokens) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float g = activate(args, x[i][c], columns.a[c], columns.bias[c]);
          sum[c] = args.summed ? sum[c] + g : g;
        }
        store<kType>(args.y, y + i * y_step, sum);
      }
    }
  }
}

struct Gradient {
  float x;
  float a_log;  // this element's term of the sum
};

// sigmoid'(x) = sigmoid(x) sigmoid(-x), from which nothing cancels where the sigmoid is close to 1.
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = expf(-fabsf(x));
  return e / ((1.0f + e) * (1.0f + e));
}

//     dx = -a sigmoid(z) dg,         dA_log: dg g
//     dx = bound sigmoid'(a z) a dg, dA_log: dx z
__device__ __forceinline__ Gradient activate_adjoint(const Args& args, float z, float a, float dg) {
  if (args.form == Form::kBounded) {
    const float dx = args.bound * sigmoid_slope(a * z) * (a * dg);
    return {dx, dx * z};
  }
  return {-(a * sigmoid(z)) * dg, -(a * softplus(z)) * dg};
}

// From the last token of a chunk to the first.
template <DType kType, int kColumns>
__device__ __forceinline__ void chunk_backward(const Args& args, const ChunkSpan& span,
                                               const Columns<kColumns>& columns, double (&da_log)[kColumns],
                                               double (&ddt_bias)[kColumns]) {
  float sum[kColumns] = {};
  for (int64_t n = 0; n < span.length; n += kTile) {
    const int64_t token = span.length - 1 - n;
    const int tokens = tokens_left(span, n);
    float x[kTile][kColumns], dg[kTile][kColumns];
    load_tile<kType>(args.x, offset_of(args.x, span, token, columns), -args.x.strides[1], tokens, x);
    with_type(args.dg.dtype, [&](auto type) {
      load_tile<type.value>(args.dg, offset_of(args.dg, span, token, columns), -args.dg.strides[1], tokens, dg);
    });
    const int64_t dx_offset = args.dx.present() ? offset_of(args.dx, span, token, columns) : 0;
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (i >= tokens) continue;
      float dx[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sum[c] = args.summed ? sum[c] + dg[i][c] : dg[i][c];
        const Gradient gradient = activate_adjoint(args, x[i][c] + columns.bias[c], columns.a[c], sum[c]);
        dx[c] = gradient.x;
        ddt_bias[c] += static_cast<double>(gradient.x);
        da_log[c] += static_cast<double>(gradient.a_log);
      }
      if (args.dx.present()) store<kType>(args.dx, dx_offset - i * args.dx.strides[1], dx);
    }
  }
}

template <DType kType, int kColumns>
__global__ void __launch_bounds__(kThreads) gate_backward_kernel(const __grid_constant__ Args args) {
  const int64_t groups = args.columns / kColumns, items = args.num_runs * groups;
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x, step = gridDim.x * int64_t{kThreads};
  for (int64_t item = first; item < items; item += step) {
    const int64_t run = item / groups;
    const auto columns = columns_at<kColumns>(args, item - run * groups);
    double da_log[kColumns] = {}, ddt_bias[kColumns] = {};
    for (int64_t i = 0; i < args.chunks_per_run; ++i) {
      const ChunkSpan span = chunk_at(args.chunked, run * args.chunks_per_run + i);
      if (span.sequence < 0) break;
      chunk_backward<kType>(args, span, columns, da_log, ddt_bias);
    }
    double* const sums = args.sums + 2 * run * args.columns + columns.first;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[c] = da_log[c];
      sums[args.columns + c] = ddt_bias[c];
    }
  }
}

struct FinishArgs {
  const double* sums = nullptr;
  int64_t num_runs = 0, columns = 0, heads = 0, per_head = 1;
  DeviceTensor da_log, ddt_bias;
};

// The sums of the runs to the caller, a block per head. Each column of the head has `lanes` threads, which add every
// lanes-th run; what they have is added in their order, and the columns of the head in theirs.
__global__ void __launch_bounds__(kThreads) gate_sums_kernel(const __grid_constant__ FinishArgs args) {
  __shared__ double partial_sums[kThreads];
  int columns_at_once = 1;
  while (columns_at_once < args.per_head && columns_at_once < kThreads) columns_at_once *= 2;
  const int lanes = kThreads / columns_at_once, column = threadIdx.x % columns_at_once,
            lane = threadIdx.x / columns_at_once;
  for (int64_t head = blockIdx.x; head < args.heads; head += gridDim.x) {
    double da_log = 0;
    for (int64_t base = 0; base < args.per_head; base += columns_at_once) {
      const bool there = base + column < args.per_head;
      for (int row = 0; row < 2; ++row) {
        const double* sums = args.sums + row * args.columns + head * args.per_head + base + column;
        double sum = 0;
        for (int64_t run = lane; there && run < args.num_runs; run += lanes) sum += sums[2 * run * args.columns];
        partial_sums[threadIdx.x] = sum;
        __syncthreads();
        if (lane == 0) {
          for (int other = 1; other < lanes; ++other) sum += partial_sums[other * columns_at_once + column];
          partial_sums[column] = sum;
          const DeviceTensor& out = args.ddt_bias;
          if (row == 1 && there && out.present()) {
            const int64_t at = head * out.strides[0] + (base + column) * out.strides[1];
            store_float(out.data, out.dtype, at, static_cast<float>(sum));
          }
        }
        __syncthreads();
        if (row == 0 && threadIdx.x == 0) {
          for (int c = 0; c < columns_at_once && base + c < args.per_head; ++c) da_log += partial_sums[c];
        }
        __syncthreads();  // before the next sums overwrite the partial sums
      }
    }
    if (threadIdx.x == 0 && args.da_log.present()) {
      store_float(args.da_log.data, args.da_log.dtype, head * args.da_log.strides[0], static_cast<float>(da_log));
    }
  }
}

// Calls body.template operator()<kType, kColumns>().
template <class Body>
void with_columns(DType dtype, bool aligned_vec4, const Body& body) {
  with_element_type(dtype, [&]<DType kType>() {
    aligned_vec4 ? body.template operator()<kType, 4>() : body.template operator()<kType, 1>();
  });
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::min<int64_t>((threads + kThreads - 1) / kThreads, 1 << 30));
}

// Four columns to a thread where there are enough of them to fill a large device all the same.
bool worth_vec4s(int64_t columns) {
  constexpr int64_t kManyColumns = 256;
  return columns >= kManyColumns;
}

Args args_of(const TensorView& x) {
  Args args;
  args.x = device_tensor(x);
  args.width = x.shape[3];
  args.columns = x.shape[2] * x.shape[3];
  return args;
}

Args args_of(const GateActivationInputs& in, const GateActivationOptions& options, Gate gate) {
  Args args = args_of(in.x);
  args.a_log = device_tensor(in.a_log);
  args.dt_bias = device_tensor(in.dt_bias);
  args.per_channel = gate == Gate::kPerChannel;
  args.summed = options.chunk_size != 0;
  const bool bounded = options.lower_bound != GateActivationOptions::kUnset;
  args.form = bounded ? Form::kBounded : Form::kSoftplus;
  args.bound = bounded ? static_cast<float>(options.lower_bound) : 0.0f;
  return args;
}

// Without a chunk size, sequences do not matter.
NumberedChunks chunks_of(const BlockSizes& sizes, const TensorView& cu_seqlens, const Context& context) {
  if (sizes.chunk_size == 0) return {device_sequences({}, sizes.batch, sizes.tokens), kUnsummedChunk, context};
  return number_chunks(sizes, cu_seqlens, context);
}

void run_forward(Args args, const NumberedChunks& chunks, const Context& context) {
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  if (args.num_chunks == 0) return;
  const bool aligned_vec4 = args.x.aligned_vec4 && args.y.aligned_vec4 && worth_vec4s(args.columns);
  with_columns(args.x.dtype, aligned_vec4, [&]<DType kType, int kColumns>() {
    launch<gate_forward_kernel<kType, kColumns>>(
        "gate forward", context, {blocks_for(args.num_chunks * (args.columns / kColumns)), kThreads}, args);
  });
}

}  // namespace

void blocks::direct(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context) {
  Args args = args_of(problem.args.x);
  args.y = device_tensor(problem.args.y);
  args.summed = true;
  args.reverse = problem.args.reverse;
  run_forward(args, chunks_of(problem.sizes, problem.args.cu_seqlens, context), context);
}

void blocks::direct(const BlockProblem<GateActivationForward>& problem, const Context& context) {
  Args args = args_of(problem.args.in, problem.args.options, problem.sizes.gate);
  args.y = device_tensor(problem.args.g);
  run_forward(args, chunks_of(problem.sizes, problem.args.in.cu_seqlens, context), context);
}

void blocks::direct(const BlockProblem<GateActivationBackward>& problem, const Context& context) {
  const GateActivationBackward& backward = problem.args;
  Args args = args_of(backward.in, backward.options, problem.sizes.gate);
  args.dg = device_tensor(backward.dg);
  args.dx = device_tensor(backward.dx);
  const NumberedChunks chunks = chunks_of(problem.sizes, backward.in.cu_seqlens, context);
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  args.chunks_per_run = std::max<int64_t>(kTokensPerRun / args.chunked.chunk_size, 1);
  args.num_runs = (args.num_chunks + args.chunks_per_run - 1) / args.chunks_per_run;
  const DeviceWorkspace workspace(context, static_cast<size_t>(2 * args.num_runs * args.columns) * sizeof(double));
  args.sums = static_cast<double*>(workspace.data());
  if (args.num_runs > 0) {
    const bool aligned_vec4 =
        args.x.aligned_vec4 && args.dg.aligned_vec4 && (!args.dx.present() || args.dx.aligned_vec4);
    with_columns(args.x.dtype, aligned_vec4 && worth_vec4s(args.columns), [&]<DType kType, int kColumns>() {
      launch<gate_backward_kernel<kType, kColumns>>(
          "gate backward", context, {blocks_for(args.num_runs * (args.columns / kColumns)), kThreads}, args);
    });
  }
  FinishArgs finish;
  finish.sums = args.sums;
  finish.num_runs = args.num_runs;
  finish.columns = args.columns;
  finish.heads = problem.sizes.num_value_heads;
  finish.per_head = args.columns / finish.heads;
  finish.da_log = device_tensor(backward.da_log);
  finish.ddt_bias = device_tensor(backward.ddt_bias);
  if (!finish.da_log.present() && !finish.ddt_bias.present()) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(finish.heads, 1 << 30));
  launch<gate_sums_kernel>("gate sums", context, {blocks, kThreads}, finish);
}

}  // namespace fastweight::cuda
