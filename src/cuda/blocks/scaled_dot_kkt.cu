// The gated Gram matrix of the keys of a chunk.
//
//     A_ij = beta_i sum_d k_id k_jd exp(gamma_id - gamma_jd),  i > j
//
// A block computes a chunk's matrix in tiles of 4 x 4, one to a thread: those below the diagonal first, then, in a warp
// of their own, those on it. The channels go in slabs.
//
// Without a gate or with one per head, the exponential leaves the sum: one block has a key head, and makes the matrices
// of its value heads from one product. With a gate per channel, a block has a value head, and the exponential between
// row i of tile I and row j of an earlier tile J is a product of three factors, none of which exceeds 1 where gates are
// decays:
//
//     ahead_i = exp(gamma_i - gamma_{4I-1})    between = exp(gamma_{4I-1} - gamma_{4J+3})    behind_j =
//     exp(gamma_{4J+3} - gamma_j)
//
// of which only `between` is made per pair of tiles. Inside a tile the factors are products of the decays of single
// tokens.
#include <algorithm>

#include "cuda/blocks/chunks.h"
#include "cuda/blocks/kernels.h"
#include "cuda/blocks/tile.cuh"
#include "cuda/common/activations.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kMostThreads = 160;

struct Args {
  DeviceTensor k, beta, gamma;  // [B, T, H, K], [B, T, HV], [B, T, HV] or [B, T, HV, K]
  DeviceTensor a;               // [B, T, HV, C]
  ChunkedSequences chunked;
  int64_t num_chunks = 0;  // at most
  int64_t heads = 0;       // of k without a gate per channel, of values with one
  int64_t group = 1;
  int32_t head_dim_k = 0;
  int32_t chunk_size = 0;
};

template <bool kPerChannel>
struct Shared;
template <>
struct Shared<false> {
  static constexpr int kDepth = 64;
  alignas(16) float k[kDepth * kTileRows];
  float beta[kTileRows], gamma[kTileRows];
};
template <>
struct Shared<true> {
  static constexpr int kDepth = 32;
  alignas(16) float k[kDepth * kTileRows];
  alignas(16) float gamma[kDepth * kTileRows];
  alignas(16) float ahead[kDepth * kTileRows];   // times k_i
  alignas(16) float behind[kDepth * kTileRows];  // times k_j
  float beta[kTileRows];
};

// Which tile a thread has; none: row -1. The last warp has the diagonal.
struct TilePlace {
  int row = -1, column = 0;
};

__host__ __device__ constexpr int threads_of(int chunk_size) {
  const int tiles = chunk_size / 4, below = tiles * (tiles - 1) / 2;
  return (below + kWarpSize - 1) / kWarpSize * kWarpSize + kWarpSize;
}

__device__ __forceinline__ TilePlace tile_of(int chunk_size) {
  const int tiles = chunk_size / 4, below = tiles * (tiles - 1) / 2, diagonal = threads_of(chunk_size) - kWarpSize;
  TilePlace place;
  if (static_cast<int>(threadIdx.x) >= diagonal) {
    const int tile = threadIdx.x - diagonal;
    if (tile < tiles) place = {tile, tile};
    return place;
  }
  if (static_cast<int>(threadIdx.x) >= below) return place;
  int row = 1, rest = threadIdx.x;
  for (; rest >= row; ++row) rest -= row;
  return {row, rest};
}

// The tile of a thread, and the one across the diagonal, which is 0.
__device__ __forceinline__ void store_tile(const Args& args, const ChunkSpan& span, int64_t head, const TilePlace& tile,
                                           const float (&A)[4][4]) {
  const float zeros[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * tile.row + i, across = 4 * tile.column + i;
    if (row < span.length) {
      store_row_vec4(args.a, row_offset(args.a, span.batch, span.begin + row, head), 4 * tile.column, args.chunk_size,
                     A[i]);
    }
    if (tile.row != tile.column && across < span.length) {
      store_row_vec4(args.a, row_offset(args.a, span.batch, span.begin + across, head), 4 * tile.row, args.chunk_size,
                     zeros);
    }
  }
}

// Channels [first, first + depth) of a chunk's keys.
__device__ __forceinline__ void stage_keys(const Args& args, const ChunkSpan& span, int64_t head, int first, int depth,
                                           const Slab& slab) {
  read_vec4s(args.k, args.chunk_size, first, depth, args.head_dim_k, rows_of(args.k, span, head),
             [&](int row, int d, const float(&values)[4]) { put_columns(slab, row, d, values); });
}

// The same of gamma. Rows beyond the chunk go on without decay: no exponent is positive because of them.
__device__ __forceinline__ void stage_gamma(const Args& args, const ChunkSpan& span, int64_t head, int first, int depth,
                                            const Slab& slab) {
  const auto start = [&](int row) {
    const int64_t token = span.begin + (row < span.length ? row : span.length - 1);
    return row_offset(args.gamma, span.batch, token, head);
  };
  read_vec4s(args.gamma, args.chunk_size, first, depth, args.head_dim_k, start,
             [&](int row, int d, const float(&values)[4]) { put_columns(slab, row, d, values); });
}

__device__ __forceinline__ int slab_depth(int most, int left) { return left >= most ? most : (left + 3) / 4 * 4; }

// ---- One number per head, or none -----------------------------------------------------------------------------------

__device__ __forceinline__ void run_item(const Args& args, const ChunkSpan& span, int64_t head, const TilePlace& tile,
                                         Shared<false>& s) {
  const int rows = args.chunk_size;
  float gram[4][4] = {};
  for (int first = 0; first < args.head_dim_k; first += s.kDepth) {
    const int depth = slab_depth(s.kDepth, args.head_dim_k - first);
    __syncthreads();  // the slab before has been read
    stage_keys(args, span, head, first, depth, {s.k});
    __syncthreads();
    if (tile.row < 0) continue;
#pragma unroll 4
    for (int d = 0; d < depth; ++d) {
      float a[4], b[4];
      unpack(Slab{s.k}.group(d, tile.row), a);
      unpack(Slab{s.k}.group(d, tile.column), b);
      outer_product(a, b, gram);
    }
  }
  for (int64_t h = head * args.group; h < (head + 1) * args.group; ++h) {
    __syncthreads();  // the numbers of the head before have been read
    stage_numbers(args.beta, span, h, 1.0f, rows, s.beta);
    stage_numbers(args.gamma, span, h, 0.0f, rows, s.gamma);
    __syncthreads();
    if (tile.row < 0) continue;
    float A[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 4 * tile.row + i, column = 4 * tile.column + j;
        const float lambda = args.gamma.present() ? expf(s.gamma[row] - s.gamma[column]) : 1.0f;
        A[i][j] = row > column ? s.beta[row] * gram[i][j] * lambda : 0.0f;
      }
    }
    store_tile(args, span, h, tile, A);
  }
}

// ---- One number per channel -----------------------------------------------------------------------------------------

// ahead and behind of the slab, times the keys. A thread has four rows of one channel.
__device__ __forceinline__ void make_factors(int rows, int depth, Shared<true>& s) {
  const int tiles = rows / 4;
  for (int at = threadIdx.x; at < tiles * depth; at += blockDim.x) {
    const int d = at / tiles, tile = at % tiles;
    float k[4], gamma[4], ahead[4], behind[4];
    unpack(Slab{s.k}.group(d, tile), k);
    unpack(Slab{s.gamma}.group(d, tile), gamma);
    const float before = tile == 0 ? gamma[0] : Slab{s.gamma}.at(d, 4 * tile - 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ahead[i] = k[i] * exp_approx(gamma[i] - before);
      behind[i] = k[i] * exp_approx(gamma[3] - gamma[i]);
    }
    Slab{s.ahead}.group(d, tile) = make_float4(ahead[0], ahead[1], ahead[2], ahead[3]);
    Slab{s.behind}.group(d, tile) = make_float4(behind[0], behind[1], behind[2], behind[3]);
  }
}

__device__ __forceinline__ void add_below(Shared<true>& s, const TilePlace& tile, int depth, float (&A)[4][4]) {
  const Slab ahead{s.ahead}, behind{s.behind};
  const Slab gamma{s.gamma};
#pragma unroll 2
  for (int d = 0; d < depth; ++d) {
    float a[4], b[4];
    unpack(ahead.group(d, tile.row), a);
    unpack(behind.group(d, tile.column), b);
    const float between = exp_approx(gamma.at(d, 4 * tile.row - 1) - gamma.at(d, 4 * tile.column + 3));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] *= between;
    outer_product(a, b, A);
  }
}

__device__ __forceinline__ void add_diagonal(Shared<true>& s, const TilePlace& tile, int depth, float (&A)[4][4]) {
#pragma unroll 2
  for (int d = 0; d < depth; ++d) {
    float k[4], gamma[4];
    unpack(Slab{s.k}.group(d, tile.row), k);
    unpack(Slab{s.gamma}.group(d, tile.row), gamma);
    float decayed[4];  // k_j, by the decays from its token to i
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float decay = i == 0 ? 1.0f : exp_approx(gamma[i] - gamma[i - 1]);
#pragma unroll
      for (int j = 0; j < i; ++j) {
        decayed[j] *= decay;
        A[i][j] = fmaf(k[i], decayed[j], A[i][j]);
      }
      decayed[i] = k[i];
    }
  }
}

__device__ __forceinline__ void run_item(const Args& args, const ChunkSpan& span, int64_t head, const TilePlace& tile,
                                         Shared<true>& s) {
  const int rows = args.chunk_size;
  float A[4][4] = {};
  __syncthreads();  // beta of the item before has been read
  stage_numbers(args.beta, span, head, 1.0f, rows, s.beta);
  for (int first = 0; first < args.head_dim_k; first += s.kDepth) {
    const int depth = slab_depth(s.kDepth, args.head_dim_k - first);
    __syncthreads();  // the slabs before have been read
    stage_keys(args, span, head / args.group, first, depth, {s.k});
    stage_gamma(args, span, head, first, depth, {s.gamma});
    __syncthreads();
    make_factors(rows, depth, s);
    __syncthreads();
    if (tile.row < 0) continue;
    if (tile.row != tile.column) {
      add_below(s, tile, depth, A);
    } else {
      add_diagonal(s, tile, depth, A);
    }
  }
  if (tile.row < 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) A[i][j] *= s.beta[4 * tile.row + i];
  }
  store_tile(args, span, head, tile, A);
}

template <bool kPerChannel>
__global__ void __launch_bounds__(kMostThreads, 4) kkt_kernel(const __grid_constant__ Args args) {
  __shared__ Shared<kPerChannel> s;
  const TilePlace tile = tile_of(args.chunk_size);
  const int64_t items = args.num_chunks * args.heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / args.heads;
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    run_item(args, span, item - chunk * args.heads, tile, s);
  }
}

}  // namespace

void blocks::direct(const BlockProblem<ScaledDotKktForward>& problem, const Context& context) {
  const ScaledDotKktForward& forward = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const bool per_channel = sizes.gate == Gate::kPerChannel;
  const NumberedChunks chunks = number_chunks(sizes, forward.in.cu_seqlens, context);
  Args args;
  args.k = device_tensor(forward.in.k);
  args.beta = device_tensor(forward.in.beta);
  args.gamma = device_tensor(forward.in.gamma);
  args.a = device_tensor(forward.a);
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  args.heads = per_channel ? sizes.num_value_heads : sizes.num_heads;
  args.group = sizes.group;
  args.head_dim_k = static_cast<int32_t>(sizes.head_dim_k);
  args.chunk_size = static_cast<int32_t>(sizes.chunk_size);
  const int64_t items = args.num_chunks * args.heads;
  if (items == 0) return;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)),
                          static_cast<unsigned>(threads_of(args.chunk_size))};
  if (per_channel) {
    launch<kkt_kernel<true>>("scaled_dot_kkt", context, shape, args);
  } else {
    launch<kkt_kernel<false>>("scaled_dot_kkt", context, shape, args);
  }
}

}  // namespace fastweight::cuda
