// The adjoint of the WY factors.
//
//     X  = J^T dW,   Y = J^T dU
//     dk = sum over the group of beta * exp(gamma) * X,   dv = beta * Y
//     dbeta  = rowsum(Y * v) + rowsum(X * exp(gamma) * k)
//     dgamma = beta * X * exp(gamma) * k                              summed over d with one gate per head
//     dA = -slower(Z J^T),   Z = X (beta * exp(gamma) * k)^T + Y (beta * v)^T
//
// A block has a chunk of a key head and takes its value heads one after the other. The columns go in panels of 64: a
// thread makes 4 x 4 numbers of X or Y, what belongs to them alone, and two slabs of Z's operands.
#include <algorithm>

#include "cuda/blocks/adjoint.cuh"
#include "cuda/blocks/chunks.h"
#include "cuda/blocks/kernels.h"
#include "cuda/common/launch.h"
#include "cuda/common/mma.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kMostThreads = 256;

struct Args {
  DeviceTensor k, v;         // [B, T, H, K], [B, T, HV, V]
  DeviceTensor beta, gamma;  // [B, T, HV]; [B, T, HV] or [B, T, HV, K]
  DeviceTensor j;            // [B, T, HV, C]
  DeviceTensor dw, du;       // [B, T, HV, K], [B, T, HV, V]; absent: 0
  KeyGradient dk;
  DeviceTensor dv, dbeta, dgamma, da;
  ChunkedSequences chunked;
  int64_t num_chunks = 0;  // at most
  int64_t heads = 0;       // H
  int64_t group = 1;
  int32_t head_dim_k = 0, head_dim_v = 0;
  int32_t chunk_size = 0;
  Gate gate = Gate::kNone;
};

struct Shared {
  alignas(16) float J[kTileRows * kPitch];
  alignas(16) float gradient[kTileRows * kPitch];  // a panel of dW or dU; at the end J^T
  alignas(16) float product[kPitch * kTileRows];   // X^T or Y^T; at the end Z^T
  alignas(16) float factor[kPitch * kTileRows];    // (beta * exp(gamma) * k)^T or (beta * v)^T
  float beta[kTileRows], decay[kTileRows];         // decay: exp(gamma) with one number per head, else 1
};

// What a thread knows of its four rows, and its sums for them.
struct RowNumbers {
  float beta[4], decay[4];
  float dbeta[4], dgamma[4];
};

__device__ __forceinline__ void load_gradient(const DeviceTensor& x, const Args& args, const ChunkSpan& span,
                                              int64_t head, int first, int width, Shared& s) {
  read_vec4s(x, args.chunk_size, first, kPitch, width, rows_of(x, span, head),
             [&](int row, int column, const float(&v)[4]) {
               vec4_at(s.gradient, row, column) = make_float4(v[0], v[1], v[2], v[3]);
             });
}

// What a row of four numbers of X gives, and its operands of Z.
__device__ __forceinline__ void finish_key_row(const Args& args, const ChunkSpan& span, const ValueHead& head, int row,
                                               int i, int first, int column, const float (&X)[4], RowNumbers& rows,
                                               Shared& s) {
  float k[4] = {}, decay[4], operand[4], dk[4], dgamma[4];
  const bool there = row < span.length && first + column < args.head_dim_k;
  if (there) {
    load_row_vec4(args.k, row_offset(args.k, span.batch, span.begin + row, head.key), first + column, args.head_dim_k,
                  k);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) decay[e] = rows.decay[i];
  if (there && args.gate == Gate::kPerChannel) {
    float gamma[4];
    load_row_vec4(args.gamma, row_offset(args.gamma, span.batch, span.begin + row, head.value), first + column,
                  args.head_dim_k, gamma);
#pragma unroll
    for (int e = 0; e < 4; ++e) decay[e] = expf(gamma[e]);
  }
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float read = decay[e] * k[e];
    sum = fmaf(X[e], read, sum);
    operand[e] = rows.beta[i] * read;
    dgamma[e] = operand[e] * X[e];
    dk[e] = rows.beta[i] * decay[e] * X[e];
  }
  rows.dbeta[i] += sum;
  rows.dgamma[i] += sum;
  put_columns({s.product}, row, column, X);
  put_columns({s.factor}, row, column, operand);
  if (first + column >= args.head_dim_k) return;
  add_to_dk(args.dk, span, head, row, first + column, dk);
  if (there && args.dgamma.present() && args.gate == Gate::kPerChannel) {
    store_row_vec4(args.dgamma, row_offset(args.dgamma, span.batch, span.begin + row, head.value), first + column,
                   args.head_dim_k, dgamma);
  }
}

__device__ __forceinline__ void finish_value_row(const Args& args, const ChunkSpan& span, const ValueHead& head,
                                                 int row, int i, int first, int column, const float (&Y)[4],
                                                 RowNumbers& rows, Shared& s) {
  float v[4] = {}, dv[4];
  const bool there = row < span.length && first + column < args.head_dim_v;
  if (there) {
    load_row_vec4(args.v, row_offset(args.v, span.batch, span.begin + row, head.value), first + column, args.head_dim_v,
                  v);
  }
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum = fmaf(Y[e], v[e], sum);
    v[e] *= rows.beta[i];
    dv[e] = rows.beta[i] * Y[e];
  }
  rows.dbeta[i] += sum;
  put_columns({s.product}, row, column, Y);
  put_columns({s.factor}, row, column, v);
  if (there && args.dv.present()) {
    store_row_vec4(args.dv, row_offset(args.dv, span.batch, span.begin + row, head.value), first + column,
                   args.head_dim_v, dv);
  }
}

// The panels of one of the two gradients. finish(row, i, first, column, numbers) for each row of a thread.
template <class Finish>
__device__ __forceinline__ void run_panels(const Args& args, const ChunkSpan& span, const DeviceTensor& gradient,
                                           int64_t head, int width, const GridPlace& at, float (&Z)[4][4], Shared& s,
                                           const Finish& finish) {
  for (int first = 0; first < width; first += kPitch) {
    load_gradient(gradient, args, span, head, first, width, s);
    __syncthreads();  // and the slabs before have been read
    float c[4][4];
    transposed_product(s.J, s.gradient, args.chunk_size, at, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) finish(4 * at.row + i, i, first, 4 * at.column, c[i]);
    __syncthreads();  // and the gradient has been read
    if (at.column > at.row) continue;
    const int left = width - first, depth = left < kPitch ? left : kPitch;
#pragma unroll 4
    for (int n = 0; n < depth; ++n) {
      float a[4], b[4];
      unpack(Slab{s.product}.group(n, at.row), a);
      unpack(Slab{s.factor}.group(n, at.column), b);
      outer_product(a, b, Z);
    }
  }
}

__device__ __forceinline__ void run_head(const Args& args, const ChunkSpan& span, const ValueHead& head,
                                         const GridPlace& at, Shared& s) {
  read_lower(args.j, span, head.value, args.chunk_size, true, [&](int row, int column, const float(&v)[4]) {
    vec4_at(s.J, row, column) = make_float4(v[0], v[1], v[2], v[3]);
  });
  stage_numbers(args.beta, span, head.value, 1.0f, args.chunk_size, s.beta);
  const bool per_head = args.gate == Gate::kPerHead;
  if (per_head) stage_numbers(args.gamma, span, head.value, 0.0f, args.chunk_size, s.decay);
  __syncthreads();
  RowNumbers rows{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rows.beta[i] = s.beta[4 * at.row + i];
    rows.decay[i] = per_head ? expf(s.decay[4 * at.row + i]) : 1.0f;
  }
  float Z[4][4] = {};
  run_panels(args, span, args.dw, head.value, args.head_dim_k, at, Z, s,
             [&](int row, int i, int first, int column, const float(&X)[4]) {
               finish_key_row(args, span, head, row, i, first, column, X, rows, s);
             });
  run_panels(args, span, args.du, head.value, args.head_dim_v, at, Z, s,
             [&](int row, int i, int first, int column, const float(&Y)[4]) {
               finish_value_row(args, span, head, row, i, first, column, Y, rows, s);
             });
  store_numbers(args.dbeta, span, head.value, at, rows.dbeta);
  if (per_head) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.dgamma[i] *= rows.beta[i];
    store_numbers(args.dgamma, span, head.value, at, rows.dgamma);
  }
  if (!args.da.present()) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // J^T
    const int row = 4 * at.row + i;
    float values[4];
    unpack(vec4_at(s.J, row, 4 * at.column), values);
    if (4 * at.column < args.chunk_size) put_columns({s.gradient}, row, 4 * at.column, values);
  }
  __syncthreads();  // and the slabs have been read
  store_inverse_adjoint(args.da, span, head.value, args.chunk_size, at, Z, {s.gradient}, {s.product});
}

__global__ void __launch_bounds__(kMostThreads, 2) wy_adjoint_kernel(const __grid_constant__ Args args) {
  auto& s = dynamic_shared<Shared>();
  const GridPlace at = grid_place();
  const int64_t items = args.num_chunks * args.heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / args.heads, key = item - chunk * args.heads;
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    for (int64_t i = 0; i < args.group; ++i) run_head(args, span, value_head(item, key, i, args.group), at, s);
  }
}

}  // namespace

void blocks::direct(const BlockProblem<WyBackward>& problem, const Context& context) {
  const WyBackward& backward = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const NumberedChunks chunks = number_chunks(sizes, backward.in.cu_seqlens, context);
  Args args;
  args.k = device_tensor(backward.in.k);
  args.v = device_tensor(backward.in.v);
  args.beta = device_tensor(backward.in.beta);
  args.gamma = device_tensor(backward.in.gamma);
  args.j = device_tensor(backward.in.j);
  args.dw = device_tensor(backward.dw);
  args.du = device_tensor(backward.du);
  args.dv = device_tensor(backward.dv);
  args.dbeta = device_tensor(backward.dbeta);
  args.dgamma = device_tensor(backward.dgamma);
  args.da = device_tensor(backward.da);
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  args.heads = sizes.num_heads;
  args.group = sizes.group;
  args.head_dim_k = static_cast<int32_t>(sizes.head_dim_k);
  args.head_dim_v = static_cast<int32_t>(sizes.head_dim_v);
  args.chunk_size = static_cast<int32_t>(sizes.chunk_size);
  args.gate = sizes.gate;
  const int64_t items = args.num_chunks * args.heads;
  if (items == 0) return;
  args.dk = key_gradient(backward.dk, sizes);
  const DeviceWorkspace workspace(context, sum_bytes(args.dk, sizes, items));
  args.dk.sums = static_cast<float*>(workspace.data());
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)),
                          static_cast<unsigned>(args.chunk_size / 4 * kAcross), sizeof(Shared)};
  launch<wy_adjoint_kernel>("wy adjoint", context, shape, args);
}

}  // namespace fastweight::cuda
