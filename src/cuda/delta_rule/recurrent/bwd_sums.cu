// From the parts that the walk has left (bwd.cuh) to the caller's gradients, all chunks at once. The parts of a value
// head are added in the order of the ranges, then the value heads of a group in theirs; then the way back through the
// norm, the gate and beta's sigmoid.
//
// Keys: a block has a chunk of one key head, a warp one token after the other, a lane every 32nd channel.
// Gates: a block has a chunk of one value head. With a gate per channel a thread has every 128th channel and walks over
// the tokens; the other numbers are one per token, and so is the thread.
#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/adjoints.cuh"
#include "cuda/delta_rule/recurrent/bwd.cuh"
#include "cuda/delta_rule/token.cuh"

namespace fastweight::cuda::recurrent {
namespace {

constexpr int kSumThreads = 128;
constexpr int kWarps = kSumThreads / kWarpSize;
constexpr int kMostPerLane = 256 / kWarpSize;  // channels

// Number `at` of a row of `width` numbers, over the parts.
__device__ __forceinline__ float sum_of_parts(const BackwardArgs& args, const float* parts, int64_t row, int head,
                                              int width, int at) {
  const int64_t heads = args.problem.num_value_heads, step = args.parts.rows * heads * width;
  const float* part = parts + (row * heads + head) * width + at;
  float sum = part[0];
  for (int i = 1; i < args.parts.count; ++i) sum += part[i * step];
  return sum;
}

// The gradient of one row of x, q or k.
__device__ __forceinline__ void finish_row(const BackwardArgs& args, const float* parts, const DeviceTensor& x,
                                           const DeviceTensor& dx, int64_t batch, int64_t token, int key_head) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int lane = threadIdx.x % kWarpSize, K = p.head_dim_k;
  const int64_t row = batch * p.sequences.tokens + token;
  const int64_t x_row = row_offset(x, batch, token, key_head), dx_row = row_offset(dx, batch, token, key_head);
  float dy[kMostPerLane] = {}, values[kMostPerLane] = {};
  float squares = 0, along = 0;
#pragma unroll
  for (int c = 0; c < kMostPerLane; ++c) {
    const int channel = c * kWarpSize + lane;
    if (channel >= K) continue;
    for (int h = 0; h < p.group; ++h) {
      const float part = sum_of_parts(args, parts, row, key_head * p.group + h, K, channel);
      dy[c] = h == 0 ? part : dy[c] + part;
    }
    if (!p.qk_l2norm) continue;
    values[c] = load_float(x.data, x.dtype, x_row + channel * x.strides[3]);
    squares = fmaf(values[c], values[c], squares);
    along = fmaf(values[c], dy[c], along);
  }
  const float rstd = norm_factor(sum_over_lanes<kWarpSize>(squares));
  along = rstd * sum_over_lanes<kWarpSize>(along);
#pragma unroll
  for (int c = 0; c < kMostPerLane; ++c) {
    const int channel = c * kWarpSize + lane;
    if (channel >= K) continue;
    const float value = p.qk_l2norm ? norm_adjoint(values[c], rstd, along, dy[c]) : dy[c];
    store_float(dx.data, dx.dtype, dx_row + channel * dx.strides[3], value);
  }
}

__global__ void __launch_bounds__(kSumThreads)
    recurrent_key_sums_kernel(const __grid_constant__ BackwardArgs args, int64_t items) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int key_heads = p.num_value_heads / p.group;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / key_heads;
    const int key_head = static_cast<int>(item - chunk * key_heads);
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    for (int64_t t = threadIdx.x / kWarpSize; t < span.length; t += kWarps) {
      if (args.dq.present()) finish_row(args, args.parts.dq, p.q, args.dq, span.batch, span.begin + t, key_head);
      if (args.dk.present()) finish_row(args, args.parts.dk, p.k, args.dk, span.batch, span.begin + t, key_head);
    }
  }
}

// One number of the gate tensor: its gradient to the caller, its terms to the sums.
__device__ __forceinline__ void finish_gate(const BackwardArgs& args, const ChunkSpan& span, int64_t t, int head,
                                            int channel, float rate, float bias, double& da_log, double& ddt_bias) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t token = span.begin + t, column = p.gate == Gate::kPerChannel ? channel : 0;
  const float dg =
      sum_of_parts(args, args.parts.dg, span.batch * p.sequences.tokens + token, head, args.parts.gate_width, channel);
  const int64_t at = row_offset(p.g, span.batch, token, head) + column * p.g.strides[3];
  const float x = p.gate_in_kernel ? load_float(p.g.data, p.g.dtype, at) : 0.0f;
  const GateGradient gradient = log_decay_adjoint(p, x, rate, bias, dg);
  da_log += static_cast<double>(gradient.a_log);
  ddt_bias += static_cast<double>(gradient.x);
  if (!args.dg.present()) return;
  store_float(args.dg.data, args.dg.dtype, row_offset(args.dg, span.batch, token, head) + column * args.dg.strides[3],
              gradient.x);
}

// The sums of the threads, in order.
__device__ __forceinline__ double add_threads(double value, int threads, double (&shared)[kSumThreads]) {
  __syncthreads();  // nobody reads what was there before
  shared[threadIdx.x] = value;
  __syncthreads();
  double sum = shared[0];
  for (int i = 1; i < threads; ++i) sum += shared[i];
  return sum;
}

__device__ __forceinline__ void finish_gates(const BackwardArgs& args, const ChunkSpan& span, int64_t chunk, int head,
                                             double (&shared)[kSumThreads]) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const float rate = gate_rate(p, head);
  double* const sums = args.sums.parts + (chunk * p.num_value_heads + head) * args.sums.width();
  double da_log = 0;
  if (p.gate == Gate::kPerChannel) {
    for (int channel = threadIdx.x; channel < p.head_dim_k; channel += kSumThreads) {
      const float bias = gate_bias(p, head, channel);
      double ddt_bias = 0;
      for (int64_t t = 0; t < span.length; ++t) {
        finish_gate(args, span, t, head, channel, rate, bias, da_log, ddt_bias);
      }
      if (args.sums.wanted()) sums[1 + channel] = ddt_bias;
    }
  } else {
    double ddt_bias = 0;
    if (threadIdx.x < span.length) {
      finish_gate(args, span, threadIdx.x, head, 0, rate, gate_bias(p, head, 0), da_log, ddt_bias);
    }
    if (args.sums.wanted()) {
      const double sum = add_threads(ddt_bias, static_cast<int>(span.length), shared);
      if (threadIdx.x == 0) sums[1] = sum;
    }
  }
  if (!args.sums.wanted()) return;
  const int threads = p.gate == Gate::kPerChannel ? min(p.head_dim_k, kSumThreads) : static_cast<int>(span.length);
  const double sum = add_threads(da_log, threads, shared);
  if (threadIdx.x == 0) sums[0] = sum;
}

__global__ void __launch_bounds__(kSumThreads)
    recurrent_gate_sums_kernel(const __grid_constant__ BackwardArgs args, int64_t items) {
  __shared__ double shared[kSumThreads];
  const DeltaRuleDeviceProblem& p = args.problem;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / p.num_value_heads;
    const int head = static_cast<int>(item - chunk * p.num_value_heads);
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;
    if (args.parts.dg != nullptr) finish_gates(args, span, chunk, head, shared);
    if (args.parts.dbeta != nullptr && threadIdx.x < span.length) {
      const int64_t token = span.begin + threadIdx.x;
      const float dbeta = sum_of_parts(args, args.parts.dbeta, span.batch * p.sequences.tokens + token, head, 1, 0);
      const float beta = beta_of(p, load_float(p.beta.data, p.beta.dtype, row_offset(p.beta, span.batch, token, head)));
      store_float(args.dbeta.data, args.dbeta.dtype, row_offset(args.dbeta, span.batch, token, head),
                  beta_adjoint(p, beta, dbeta));
    }
  }
}

LaunchShape shape_of(int64_t items) { return {static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)), kSumThreads}; }

}  // namespace

void launch_key_sums(const BackwardArgs& args, const Context& context) {
  const int64_t chunks = max_chunks(args.problem.sequences, args.chunked.chunk_size);
  const int64_t items = chunks * (args.problem.num_value_heads / args.problem.group);
  if (items == 0 || (!args.dq.present() && !args.dk.present())) return;
  launch<recurrent_key_sums_kernel>("delta_rule recurrent key sums", context, shape_of(items), args, items);
}

void launch_gate_sums(const BackwardArgs& args, const Context& context) {
  const int64_t items = max_chunks(args.problem.sequences, args.chunked.chunk_size) * args.problem.num_value_heads;
  if (items == 0 || (args.parts.dg == nullptr && args.parts.dbeta == nullptr)) return;
  launch<recurrent_gate_sums_kernel>("delta_rule recurrent gate sums", context, shape_of(items), args, items);
}

}  // namespace fastweight::cuda::recurrent
