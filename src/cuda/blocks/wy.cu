// The WY factors of a chunk:  W = J (beta * exp(gamma) * k),  U = J (beta * v).
//
// A block has a chunk of a value head. J stays in shared memory, transposed; the columns of W and then of U go in
// panels of 64, of which a thread makes 4 x 4 numbers, from the rows up to its own.
#include <algorithm>

#include "cuda/blocks/chunks.h"
#include "cuda/blocks/kernels.h"
#include "cuda/blocks/tile.cuh"
#include "cuda/common/launch.h"

namespace fastweight::cuda {
namespace {

constexpr int kMostThreads = 256;
constexpr int kPanel = 64;  // columns

struct Args {
  DeviceTensor k, v;         // [B, T, H, K], [B, T, HV, V]
  DeviceTensor beta, gamma;  // [B, T, HV]; [B, T, HV] or [B, T, HV, K]
  DeviceTensor j;            // [B, T, HV, C]
  DeviceTensor w, u;         // [B, T, HV, K], [B, T, HV, V]; optional
  ChunkedSequences chunked;
  int64_t num_chunks = 0;  // at most
  int64_t heads = 0;       // HV
  int64_t group = 1;
  int32_t head_dim_k = 0, head_dim_v = 0;
  int32_t chunk_size = 0;
  Gate gate = Gate::kNone;
};

struct Shared {
  alignas(16) float J[kTileRows * kTileRows];  // transposed
  alignas(16) float x[kTileRows * kPanel];     // [row][column]: beta * exp(gamma) * k, or beta * v
  float beta[kTileRows];
  float k_factor[kTileRows];  // beta, times exp(gamma) with one number per head
};

// What stands above the diagonal is not looked at.
__device__ __forceinline__ void load_J(const Args& args, const ChunkSpan& span, int64_t head, Shared& s) {
  read_vec4s(args.j, args.chunk_size, 0, args.chunk_size, args.chunk_size, rows_of(args.j, span, head),
             [&](int row, int column, float(&values)[4]) {
#pragma unroll
               for (int e = 0; e < 4; ++e) values[e] = column + e > row ? 0.0f : values[e];
               put_columns({s.J}, row, column, values);
             });
}

__device__ __forceinline__ float4& panel_at(Shared& s, int row, int column) {
  return *reinterpret_cast<float4*>(s.x + row * kPanel + column);
}

// A panel of x, times a number per row.
__device__ __forceinline__ void load_panel(const DeviceTensor& x, const ChunkSpan& span, int64_t head, int rows,
                                           int first, int width, const float* factor, Shared& s) {
  read_vec4s(x, rows, first, kPanel, width, rows_of(x, span, head), [&](int row, int column, const float(&v)[4]) {
    const float f = factor[row];
    panel_at(s, row, column) = make_float4(f * v[0], f * v[1], f * v[2], f * v[3]);
  });
}

// The panel times exp(gamma), one number per channel. A thread meets the vec4s that it loaded.
__device__ __forceinline__ void decay_panel(const Args& args, const ChunkSpan& span, int64_t head, int first,
                                            Shared& s) {
  read_vec4s(args.gamma, args.chunk_size, first, kPanel, args.head_dim_k, rows_of(args.gamma, span, head),
             [&](int row, int column, const float(&gamma)[4]) {
               const float4 x = panel_at(s, row, column);
               panel_at(s, row, column) =
                   make_float4(x.x * expf(gamma[0]), x.y * expf(gamma[1]), x.z * expf(gamma[2]), x.w * expf(gamma[3]));
             });
}

// Columns [first, first + 64) of J x to the caller.
__device__ __forceinline__ void multiply_panel(const ChunkSpan& span, int64_t head, const DeviceTensor& out, int first,
                                               int width, Shared& s) {
  const int tile = threadIdx.x / (kPanel / 4), column = threadIdx.x % (kPanel / 4) * 4;
  float c[4][4] = {};
#pragma unroll 4
  for (int m = 0; m < 4 * tile + 4; ++m) {
    float a[4], b[4];
    unpack(Slab{s.J}.group(m, tile), a);
    unpack(*reinterpret_cast<const float4*>(s.x + m * kPanel + column), b);
    outer_product(a, b, c);
  }
  if (first + column >= width) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * tile + i;
    if (row >= span.length) continue;
    store_row_vec4(out, row_offset(out, span.batch, span.begin + row, head), first + column, width, c[i]);
  }
}

__device__ __forceinline__ void make_W(const Args& args, const ChunkSpan& span, int64_t head, Shared& s) {
  for (int first = 0; first < args.head_dim_k; first += kPanel) {
    load_panel(args.k, span, head / args.group, args.chunk_size, first, args.head_dim_k, s.k_factor, s);
    if (args.gate == Gate::kPerChannel) decay_panel(args, span, head, first, s);
    __syncthreads();
    multiply_panel(span, head, args.w, first, args.head_dim_k, s);
    __syncthreads();  // before the next panel overwrites this one
  }
}

__device__ __forceinline__ void make_U(const Args& args, const ChunkSpan& span, int64_t head, Shared& s) {
  for (int first = 0; first < args.head_dim_v; first += kPanel) {
    load_panel(args.v, span, head, args.chunk_size, first, args.head_dim_v, s.beta, s);
    __syncthreads();
    multiply_panel(span, head, args.u, first, args.head_dim_v, s);
    __syncthreads();  // before the next panel overwrites this one
  }
}

__global__ void __launch_bounds__(kMostThreads, 3) wy_kernel(const __grid_constant__ Args args) {
  __shared__ Shared s;
  const int64_t items = args.num_chunks * args.heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / args.heads, head = item - chunk * args.heads;
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    load_J(args, span, head, s);
    stage_numbers(args.beta, span, head, 1.0f, args.chunk_size, s.beta);
    if (args.gate == Gate::kPerHead) stage_numbers(args.gamma, span, head, 0.0f, args.chunk_size, s.k_factor);
    __syncthreads();
    for (int row = threadIdx.x; row < args.chunk_size; row += blockDim.x) {
      s.k_factor[row] = args.gate == Gate::kPerHead ? s.beta[row] * expf(s.k_factor[row]) : s.beta[row];
    }
    __syncthreads();
    if (args.w.present()) make_W(args, span, head, s);
    if (args.u.present()) make_U(args, span, head, s);
  }
}

}  // namespace

void blocks::direct(const BlockProblem<WyForward>& problem, const Context& context) {
  const WyForward& forward = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const NumberedChunks chunks = number_chunks(sizes, forward.in.cu_seqlens, context);
  Args args;
  args.k = device_tensor(forward.in.k);
  args.v = device_tensor(forward.in.v);
  args.beta = device_tensor(forward.in.beta);
  args.gamma = device_tensor(forward.in.gamma);
  args.j = device_tensor(forward.in.j);
  args.w = device_tensor(forward.w);
  args.u = device_tensor(forward.u);
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  args.heads = sizes.num_value_heads;
  args.group = sizes.group;
  args.head_dim_k = static_cast<int32_t>(sizes.head_dim_k);
  args.head_dim_v = static_cast<int32_t>(sizes.head_dim_v);
  args.chunk_size = static_cast<int32_t>(sizes.chunk_size);
  args.gate = sizes.gate;
  const int64_t items = args.num_chunks * args.heads;
  if (items == 0) return;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)),
                          static_cast<unsigned>(args.chunk_size / 4 * (kPanel / 4))};
  launch<wy_kernel>("wy", context, shape, args);
}

}  // namespace fastweight::cuda
