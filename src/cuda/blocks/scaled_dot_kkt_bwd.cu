// The adjoint of the gated Gram matrix. With E_ijd = dA_ij exp(gamma_id - gamma_jd), i > j,
//
//     reads_i = sum_j E_ij k_j,   writes_j = sum_i beta_i E_ij k_i            k as row and as column of A
//     dbeta  = rowsum(reads * k)
//     dk     = sum over the group of beta * reads + writes
//     dgamma = k * (beta * reads - writes)                                    summed over d with one gate per head
//
// The channels go in panels of 64, of which a thread makes 4 x 4 numbers of reads and of writes. Without a gate or with
// one per head E has no d, and both are products of matrices. With a gate per channel the exponential between row i of
// tile I and row j of an earlier tile J is the product of the three factors of scaled_dot_kkt.cu: a tile's terms are
// summed without `between`, which they have in common.
#include <algorithm>

#include "cuda/blocks/adjoint.cuh"
#include "cuda/blocks/chunks.h"
#include "cuda/blocks/kernels.h"
#include "cuda/common/activations.cuh"
#include "cuda/common/launch.h"

namespace fastweight::cuda {
namespace {

constexpr int kMostThreads = 256;

struct Args {
  DeviceTensor k, beta, gamma;  // [B, T, H, K], [B, T, HV], [B, T, HV] or [B, T, HV, K]
  DeviceTensor da;              // [B, T, HV, C]
  KeyGradient dk;
  DeviceTensor dbeta, dgamma;
  ChunkedSequences chunked;
  int64_t num_chunks = 0;  // at most
  int64_t heads = 0;       // H
  int64_t group = 1;
  int32_t head_dim_k = 0;
  int32_t chunk_size = 0;
};

struct Shared {
  alignas(16) float E[kTileRows * kPitch];             // beta_i E_ij, or beta_i dA_ij
  alignas(16) float E_columns[kTileRows * kTileRows];  // E^T, or dA^T
  alignas(16) float k[kTileRows * kPitch];             // a panel
  float beta[kTileRows], gamma[kTileRows];
};

struct ChannelShared : Shared {
  alignas(16) float gammas[kTileRows * kPitch];  // a panel
  alignas(16) float ahead[kTileRows * kPitch];   // times k_i
  alignas(16) float behind[kTileRows * kPitch];  // times k_j
};

// A thread's numbers of a panel, [row][channel].
struct Panel {
  float reads[4][4], writes[4][4];
};

__device__ __forceinline__ void load_k(const Args& args, const ChunkSpan& span, int64_t head, int first, Shared& s) {
  read_vec4s(args.k, args.chunk_size, first, kPitch, args.head_dim_k, rows_of(args.k, span, head),
             [&](int row, int column, const float(&v)[4]) {
               vec4_at(s.k, row, column) = make_float4(v[0], v[1], v[2], v[3]);
             });
}

// ---- One number per head, or none -----------------------------------------------------------------------------------

__device__ __forceinline__ void prepare_panel(const Args&, const ChunkSpan&, const ValueHead&, int, Shared&) {}

__device__ __forceinline__ void make_panel(const Args& args, const GridPlace& at, Shared& s, Panel& panel) {
#pragma unroll 4
  for (int j = 0; j < 4 * at.row + 4; ++j) {
    float a[4], b[4];
    unpack(Slab{s.E_columns}.group(j, at.row), a);
    unpack(vec4_at(s.k, j, 4 * at.column), b);
    outer_product(a, b, panel.reads);
  }
  transposed_product(s.E, s.k, args.chunk_size, at, panel.writes);
}

// ---- One number per channel -----------------------------------------------------------------------------------------

// gamma, and the factors of the panel. Rows beyond the chunk go on without decay: no exponent is positive because of
// them. Two barriers: k is there after the first.
__device__ __forceinline__ void prepare_panel(const Args& args, const ChunkSpan& span, const ValueHead& head, int first,
                                              ChannelShared& s) {
  const auto start = [&](int row) {
    const int64_t token = span.begin + (row < span.length ? row : span.length - 1);
    return row_offset(args.gamma, span.batch, token, head.value);
  };
  read_vec4s(args.gamma, args.chunk_size, first, kPitch, args.head_dim_k, start,
             [&](int row, int column, const float(&v)[4]) {
               vec4_at(s.gammas, row, column) = make_float4(v[0], v[1], v[2], v[3]);
             });
  __syncthreads();
  for (int at = threadIdx.x; at < args.chunk_size * kPitch; at += blockDim.x) {
    const int tile = at / kPitch / 4, column = at % kPitch;
    const float gamma = s.gammas[at], k = s.k[at], last = s.gammas[(4 * tile + 3) * kPitch + column];
    const float before = tile == 0 ? gamma : s.gammas[(4 * tile - 1) * kPitch + column];
    s.ahead[at] = k * exp_approx(gamma - before);
    s.behind[at] = k * exp_approx(last - gamma);
  }
}

// sum *= exp(gamma_to - gamma_from), channel by channel, added to `total`.
__device__ __forceinline__ void add_decayed(ChannelShared& s, int from, int to, int column, const float (&sum)[4][4],
                                            float (&total)[4][4]) {
  float low[4], high[4];
  unpack(vec4_at(s.gammas, from, column), low);
  unpack(vec4_at(s.gammas, to, column), high);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float between = exp_approx(high[n] - low[n]);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i][n] = fmaf(between, sum[i][n], total[i][n]);
  }
}

// The pairs inside a tile, by the decays of single tokens.
__device__ __forceinline__ void add_diagonal(const GridPlace& at, ChannelShared& s, Panel& panel) {
  const int top = 4 * at.row, column = 4 * at.column;
  float k[4][4], gamma[4][4], factor[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unpack(vec4_at(s.k, top + i, column), k[i]);
    unpack(vec4_at(s.gammas, top + i, column), gamma[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float decay = i == 0 ? 1.0f : exp_approx(gamma[i][n] - gamma[i - 1][n]);
#pragma unroll
      for (int j = 0; j < i; ++j) {
        factor[j][n] *= decay;
        panel.reads[i][n] = fmaf(Slab{s.E_columns}.at(top + j, top + i) * factor[j][n], k[j][n], panel.reads[i][n]);
        panel.writes[j][n] = fmaf(s.E[(top + i) * kPitch + top + j] * factor[j][n], k[i][n], panel.writes[j][n]);
      }
      factor[i][n] = 1;
    }
  }
}

__device__ __forceinline__ void make_panel(const Args& args, const GridPlace& at, ChannelShared& s, Panel& panel) {
  const int top = 4 * at.row, column = 4 * at.column, tiles = args.chunk_size / 4;
#pragma unroll 1
  for (int tile = 0; tile < at.row; ++tile) {
    float sum[4][4] = {};
#pragma unroll
    for (int j = 4 * tile; j < 4 * tile + 4; ++j) {
      float a[4], b[4];
      unpack(Slab{s.E_columns}.group(j, at.row), a);
      unpack(vec4_at(s.behind, j, column), b);
      outer_product(a, b, sum);
    }
    add_decayed(s, 4 * tile + 3, top - 1, column, sum, panel.reads);
  }
#pragma unroll 1
  for (int tile = at.row + 1; tile < tiles; ++tile) {
    float sum[4][4] = {};
#pragma unroll
    for (int i = 4 * tile; i < 4 * tile + 4; ++i) {
      float a[4], b[4];
      unpack(vec4_at(s.E, i, top), a);
      unpack(vec4_at(s.ahead, i, column), b);
      outer_product(a, b, sum);
    }
    add_decayed(s, top + 3, 4 * tile - 1, column, sum, panel.writes);
  }
  float before[4], last[4];
  unpack(vec4_at(s.gammas, at.row == 0 ? 0 : top - 1, column), before);
  unpack(vec4_at(s.gammas, top + 3, column), last);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float gamma[4];
    unpack(vec4_at(s.gammas, top + i, column), gamma);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      panel.reads[i][n] *= exp_approx(gamma[n] - before[n]);
      panel.writes[i][n] *= exp_approx(last[n] - gamma[n]);
    }
  }
  add_diagonal(at, s, panel);
}

// ---- A value head ---------------------------------------------------------------------------------------------------

template <bool kPerChannel>
__device__ __forceinline__ void load_E(const Args& args, const ChunkSpan& span, const ValueHead& head, Shared& s) {
  stage_numbers(args.beta, span, head.value, 1.0f, args.chunk_size, s.beta);
  if (!kPerChannel) stage_numbers(args.gamma, span, head.value, 0.0f, args.chunk_size, s.gamma);
  __syncthreads();
  read_lower(args.da, span, head.value, args.chunk_size, false, [&](int row, int column, float(&v)[4]) {
    if (!kPerChannel && args.gamma.present()) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool counts = row < span.length && column + e < row;
        v[e] = counts ? v[e] * expf(s.gamma[row] - s.gamma[column + e]) : 0.0f;
      }
    }
    put_columns({s.E_columns}, row, column, v);
    const float beta = s.beta[row];
    vec4_at(s.E, row, column) = make_float4(beta * v[0], beta * v[1], beta * v[2], beta * v[3]);
  });
}

template <bool kPerChannel, class AnyShared>
__device__ __forceinline__ void run_head(const Args& args, const ChunkSpan& span, const ValueHead& head,
                                         const GridPlace& at, AnyShared& s) {
  load_E<kPerChannel>(args, span, head, s);
  float dbeta[4] = {}, dgamma[4] = {};
  for (int first = 0; first < args.head_dim_k; first += kPitch) {
    load_k(args, span, head.key, first, s);
    prepare_panel(args, span, head, first, s);
    __syncthreads();
    Panel panel{};
    make_panel(args, at, s, panel);
    const int column = 4 * at.column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * at.row + i;
      float k[4], dk[4], dgamma_of_channels[4];
      unpack(vec4_at(s.k, row, column), k);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float read = s.beta[row] * panel.reads[i][n], write = panel.writes[i][n];
        dbeta[i] = fmaf(panel.reads[i][n], k[n], dbeta[i]);
        dk[n] = read + write;
        dgamma_of_channels[n] = k[n] * (read - write);
        dgamma[i] += dgamma_of_channels[n];
      }
      if (first + column >= args.head_dim_k) continue;
      add_to_dk(args.dk, span, head, row, first + column, dk);
      if (kPerChannel && args.dgamma.present() && row < span.length) {
        store_row_vec4(args.dgamma, row_offset(args.dgamma, span.batch, span.begin + row, head.value), first + column,
                       args.head_dim_k, dgamma_of_channels);
      }
    }
    __syncthreads();  // before the next panel, or the next head's E, overwrites what was read
  }
  store_numbers(args.dbeta, span, head.value, at, dbeta);
  if (!kPerChannel) store_numbers(args.dgamma, span, head.value, at, dgamma);
}

template <bool kPerChannel>
__global__ void __launch_bounds__(kMostThreads, 2) kkt_adjoint_kernel(const __grid_constant__ Args args) {
  auto& s = dynamic_shared<std::conditional_t<kPerChannel, ChannelShared, Shared>>();
  const GridPlace at = grid_place();
  const int64_t items = args.num_chunks * args.heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / args.heads, key = item - chunk * args.heads;
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    for (int64_t i = 0; i < args.group; ++i) {
      run_head<kPerChannel>(args, span, value_head(item, key, i, args.group), at, s);
    }
  }
}

}  // namespace

void blocks::direct(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context) {
  const ScaledDotKktBackward& backward = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const NumberedChunks chunks = number_chunks(sizes, backward.in.cu_seqlens, context);
  Args args;
  args.k = device_tensor(backward.in.k);
  args.beta = device_tensor(backward.in.beta);
  args.gamma = device_tensor(backward.in.gamma);
  args.da = device_tensor(backward.da);
  args.dbeta = device_tensor(backward.dbeta);
  args.dgamma = device_tensor(backward.dgamma);
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  args.heads = sizes.num_heads;
  args.group = sizes.group;
  args.head_dim_k = static_cast<int32_t>(sizes.head_dim_k);
  args.chunk_size = static_cast<int32_t>(sizes.chunk_size);
  const int64_t items = args.num_chunks * args.heads;
  if (items == 0) return;
  args.dk = key_gradient(backward.dk, sizes);
  const DeviceWorkspace workspace(context, sum_bytes(args.dk, sizes, items));
  args.dk.sums = static_cast<float*>(workspace.data());
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, 1 << 30));
  const auto threads = static_cast<unsigned>(args.chunk_size / 4 * kAcross);
  if (sizes.gate == Gate::kPerChannel) {
    launch<kkt_adjoint_kernel<true>>("scaled_dot_kkt adjoint", context, {blocks, threads, sizeof(ChannelShared)}, args);
  } else {
    launch<kkt_adjoint_kernel<false>>("scaled_dot_kkt adjoint", context, {blocks, threads, sizeof(Shared)}, args);
  }
}

}  // namespace fastweight::cuda
