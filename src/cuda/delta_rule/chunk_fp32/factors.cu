// The factors of the chunk form in fp32, in tiles of 16 tokens. See ../chunk.cuh for the equations.
//
// One block of four warps per (tile, value head), on the multiply-add units: products of 16 x 16 are few beside those
// of the scan. A lane has the columns j and j + 8 of k k^T and q k^T and every 16th vec4 of channels, over which the
// sums are collected at the end. With one decay per channel k_j runs down the rows, multiplied by one decay after the
// other.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_fp32/chunk.cuh"

namespace fastweight::cuda::chunk_fp32 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

template <int kK, bool kPerChannel>
struct Shared {
  alignas(128) float k[kTileRows * kK];
  alignas(128) float q[kTileRows * kK];
  alignas(128) float decay[kPerChannel ? kTileRows * kK : kTileRows];  // of tokens: exp(g)
  float kk[kWarps][kSquare], qk[kWarps][kSquare];                      // sums over the channels of a warp
  float between[kPerChannel ? 1 : kSquare];                            // exp(gamma_i - gamma_j)
  alignas(16) float A[kTileRows * kPitchOfLower<kTileRows>];
  alignas(16) float J[kSquare];
  float beta[kTileRows], rstd_k[kTileRows], rstd_q[kTileRows];

  // One tile serves both roles of the keys.
  __device__ __forceinline__ FloatTile<kK> reader() { return {k}; }
  __device__ __forceinline__ FloatTile<kK> writer() { return {k}; }
  __device__ __forceinline__ float rstd_reader(int row) const { return rstd_k[row]; }
  __device__ __forceinline__ float rstd_writer(int row) const { return rstd_k[row]; }
};

// exp(g) of all tokens, per channel or once; 1 where there is none.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void load_decays(const DeltaRuleDeviceProblem& p, const ChunkSpan& span, int head,
                                            Shared<kK, kPerChannel>& s) {
  const float rate = p.gate_in_kernel ? gate_rate(p, head) : 0.0f;
  const int64_t base = p.gate == Gate::kNone ? 0 : row_offset(p.g, span.batch, span.begin, head);
  if constexpr (kPerChannel) {
    const FloatTile<kK> decay{s.decay};
    for (int at = threadIdx.x; at < kTileRows * kK / 4; at += kThreads) {
      const int row = at / (kK / 4), channel = at % (kK / 4) * 4;
      float x[4] = {};
      if (row < span.length) {
        const char* from = element_at(p.g.data, p.g.dtype, base + row * p.g.strides[1]);
        const RawVec4 raw = load_part(p.g, from, channel, p.head_dim_k);
        with_type(p.g.dtype, [&](auto type) { decode_vec4<type.value>(raw, x); });
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool exists = row < span.length && channel + e < p.head_dim_k;
        const float bias = exists && p.gate_in_kernel ? gate_bias(p, head, channel + e) : 0.0f;
        x[e] = exists ? expf(log_decay(p, x[e], rate, bias)) : 1.0f;
      }
      decay.vec4(row, channel / 4) = make_float4(x[0], x[1], x[2], x[3]);
    }
  } else if (threadIdx.x < kTileRows) {
    const int row = threadIdx.x;
    float x = 1.0f;
    if (p.gate != Gate::kNone && row < span.length) {
      const float bias = p.gate_in_kernel ? gate_bias(p, head, 0) : 0.0f;
      x = expf(log_decay(p, load_float(p.g.data, p.g.dtype, base + row * p.g.strides[1]), rate, bias));
    }
    s.decay[row] = x;
  }
}

// 1 / sqrt(sum x^2 + eps) of the tile's rows, each by eight neighbouring lanes; all 1 unless the option asks.
template <int kK>
__device__ __forceinline__ void tile_norms(const FloatTile<kK>& tile, bool wanted, float* rstd) {
  constexpr int kLanes = kThreads / kTileRows;
  const int row = threadIdx.x / kLanes, part = threadIdx.x % kLanes;
  float sum = 0;
  if (wanted) {
    for (int c = part; c < kK / 4; c += kLanes) {
      const float4 x = tile.vec4(row, c);
      sum = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, sum))));
    }
    sum = sum_over_lanes<kLanes>(sum);
  }
  if (part == 0) rstd[row] = wanted ? 1.0f / sqrtf(sum + kL2NormEps) : 1.0f;
}

__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// reader writer^T and q writer^T, with the decays of the channels where there are such: the sums over the channels of each warp.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void multiply_rows(Shared<kK, kPerChannel>& s, int warp, int lane) {
  constexpr int kLow = kTileRows / 2;  // lanes along the columns
  constexpr int kGroups = kThreads / kLow;
  const int j = lane % kLow;
  const FloatTile<kK> reader = s.reader(), writer = s.writer(), q{s.q}, decay{s.decay};
  float kk_low[kTileRows] = {}, qk_low[kTileRows] = {};    // column j
  float kk_high[kTileRows] = {}, qk_high[kTileRows] = {};  // column j + 8, whose first eight rows nobody wants
#pragma unroll 1
  for (int c = threadIdx.x / kLow; c < kK / 4; c += kGroups) {
    float4 low = make_float4(0, 0, 0, 0), high = low;
    if constexpr (!kPerChannel) {
      low = writer.vec4(j, c);
      high = writer.vec4(j + kLow, c);
    }
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const float4 read_i = reader.vec4(i, c), q_i = q.vec4(i, c);
      if constexpr (kPerChannel) {
        const float4 write_i = writer.vec4(i, c), decay_i = decay.vec4(i, c);
        low = i == j ? write_i : low * decay_i;
        if (i >= kLow) high = i == j + kLow ? write_i : high * decay_i;
      }
      kk_low[i] = dot(read_i, low, kk_low[i]);
      qk_low[i] = dot(q_i, low, qk_low[i]);
      if (i >= kLow) {
        kk_high[i] = dot(read_i, high, kk_high[i]);
        qk_high[i] = dot(q_i, high, qk_high[i]);
      }
    }
  }
  const auto collect = [&](float x) {
#pragma unroll
    for (int distance = kLow; distance < kWarpSize; distance *= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
    return x;
  };
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    const float kk = collect(kk_low[i]), qk = collect(qk_low[i]);
    if (lane < kLow) {
      s.kk[warp][i * kTileRows + j] = kk;
      s.qk[warp][i * kTileRows + j] = qk;
    }
    if (i < kLow) continue;
    const float kk_2 = collect(kk_high[i]), qk_2 = collect(qk_high[i]);
    if (lane < kLow) {
      s.kk[warp][i * kTileRows + j + kLow] = kk_2;
      s.qk[warp][i * kTileRows + j + kLow] = qk_2;
    }
  }
}

// A and sP with all their factors. sP goes to memory; A is to be inverted, unless beta is per value channel.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void make_lower(const TileArgs& args, int64_t item, Shared<kK, kPerChannel>& s) {
  const DeltaRuleDeviceProblem& p = args.problem;
  for (int at = threadIdx.x; at < kSquare; at += kThreads) {
    const int i = at / kTileRows, j = at % kTileRows;
    float a = 0, b = 0;
    if (i >= j) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        a += s.kk[w][at];
        b += s.qk[w][at];
      }
      const float factor = kPerChannel ? s.rstd_writer(j) : s.rstd_writer(j) * s.between[at];
      a = i == j ? 0.0f : s.beta[i] * s.rstd_reader(i) * factor * a;
      b = p.scale * s.rstd_q[i] * factor * b;
    }
    args.factors.sP[item * kSquare + at] = b;
    if (args.factors.A != nullptr) args.factors.A[item * kSquare + at] = a;
    if (p.beta_per_value) {
      args.factors.J[item * kSquare + at] = a;
    } else {
      s.A[j * kPitchOfLower<kTileRows> + i] = a;
    }
  }
}

// The decays between tokens and what they make of the tokens, with one decay per head or none. Thread j has column j
// and token j.
template <int kK>
__device__ __forceinline__ void multiply_decays(const TileArgs& args, int64_t item, Shared<kK, false>& s) {
  const int j = threadIdx.x;
  if (j >= kTileRows) return;
  float before = 1, since = 1;  // the product up to j; from after j on
  for (int i = 0; i < kTileRows; ++i) {
    if (i <= j) before *= s.decay[i];
    if (i > j) since *= s.decay[i];
    if (i >= j) s.between[i * kTileRows + j] = since;
  }
  float* token = args.factors.token + item * kTokenFactors * kTileRows;
  token[kOnValue * kTileRows + j] = s.beta[j];
  token[kOnKeyRead * kTileRows + j] = s.beta[j] * before * s.rstd_reader(j);
  token[kOnQueryRead * kTileRows + j] = args.problem.scale * before * s.rstd_q[j];
  token[kOnWrite * kTileRows + j] = since * s.rstd_writer(j);
  if (j < 4) args.factors.total[item * args.factors.total_width + j] = before * since;
}

// The scan's three copies of the keys, and beta alone for the tokens. A thread has a channel.
template <int kK>
__device__ __forceinline__ void scale_keys(const TileArgs& args, int64_t item, Shared<kK, true>& s) {
  const FloatTile<kK> reader = s.reader(), writer = s.writer(), q{s.q}, decay{s.decay};
  for (int channel = threadIdx.x; channel < kK; channel += kThreads) {
    float* to = args.factors.keys + item * kKeyCopies * kTileRows * kK + channel;
    float before = 1;
#pragma unroll 4
    for (int i = 0; i < kTileRows; ++i) {
      before *= decay.at(i, channel);
      to[(kReader * kTileRows + i) * kK] = s.rstd_reader(i) * (before * reader.at(i, channel));
      to[(kQuery * kTileRows + i) * kK] = args.problem.scale * s.rstd_q[i] * (before * q.at(i, channel));
    }
    args.factors.total[item * args.factors.total_width + channel] = before;
    float after = 1;
#pragma unroll 4
    for (int i = kTileRows - 1; i >= 0; --i) {
      to[(kWriter * kTileRows + i) * kK] = s.rstd_writer(i) * (after * writer.at(i, channel));
      after *= decay.at(i, channel);
    }
  }
  if (threadIdx.x < kTileRows) {
    float* token = args.factors.token + item * kTokenFactors * kTileRows + threadIdx.x;
    token[kOnValue * kTileRows] = token[kOnKeyRead * kTileRows] = s.beta[threadIdx.x];
    token[kOnQueryRead * kTileRows] = token[kOnWrite * kTileRows] = 1.0f;
  }
}

// beta per value channel is left to the scan.
__device__ __forceinline__ float tile_beta(const DeltaRuleDeviceProblem& p, const ChunkSpan& span, int head, int row) {
  return p.beta_per_value ? 1.0f : chunk_beta(p, span, head, row);
}

template <int kK, bool kPerChannel>
__global__ void __launch_bounds__(kThreads) tile_factors_kernel(const __grid_constant__ TileArgs args) {
  auto& s = dynamic_shared<Shared<kK, kPerChannel>>();
  const DeltaRuleDeviceProblem& p = args.problem;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t items = args.num_tiles * p.num_value_heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t tile = item / p.num_value_heads;
    const int head = static_cast<int>(item - tile * p.num_value_heads);
    const ChunkSpan span = chunk_at(args.tiles, tile);
    if (span.sequence < 0) return;  // tiles are numbered without gaps: none follows
    const int rows = static_cast<int>(span.length), key_head = head / p.group;
    const FloatTile<kK> k{s.k}, q{s.q};
    load_rows(k, p.k, row_offset(p.k, span.batch, span.begin, key_head), rows, p.head_dim_k);
    load_rows(q, p.q, row_offset(p.q, span.batch, span.begin, key_head), rows, p.head_dim_k);
    commit_copies();
    load_decays(p, span, head, s);
    if (threadIdx.x < kTileRows) s.beta[threadIdx.x] = tile_beta(p, span, head, threadIdx.x);
    wait_copies<0>();
    __syncthreads();
    tile_norms(k, p.qk_l2norm, s.rstd_k);
    tile_norms(q, p.qk_l2norm, s.rstd_q);
    multiply_rows(s, warp, lane);
    __syncthreads();
    if constexpr (kPerChannel) {
      scale_keys(args, item, s);
    } else {
      multiply_decays(args, item, s);
      __syncthreads();
    }
    make_lower(args, item, s);
    __syncthreads();
    if (warp == 0 && !p.beta_per_value) {
      solve_unit_lower<kTileRows>(s.A, s.J, 0, lane);
      for (int at = lane; at < kSquare; at += kWarpSize) args.factors.J[item * kSquare + at] = s.J[at];
    }
    __syncthreads();  // before the next item overwrites the tiles
  }
}

}  // namespace

size_t factors_bytes(int padded_k, bool per_channel) {
  size_t bytes = 0;
  with_padded_k_and_gate(padded_k, per_channel,
                         [&]<int kK, bool kPerChannel>() { bytes = sizeof(Shared<kK, kPerChannel>); });
  return bytes;
}

void launch_factors(const TileArgs& args, int padded_k, const Context& context) {
  const int64_t items = args.num_tiles * args.problem.num_value_heads;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, 1 << 30));
  with_padded_k_and_gate(padded_k, args.problem.gate == Gate::kPerChannel, [&]<int kK, bool kPerChannel>() {
    launch<tile_factors_kernel<kK, kPerChannel>>("delta_rule chunk_fp32 factors", context,
                                                 {blocks, kThreads, sizeof(Shared<kK, kPerChannel>)}, args);
  });
}

}  // namespace fastweight::cuda::chunk_fp32
