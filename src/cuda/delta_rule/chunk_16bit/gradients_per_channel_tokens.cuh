// Of the kernel in gradients_per_channel.cuh: step 7, the adjoints of the norms, and dq, dk and dbeta to memory.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_per_channel_tiles.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// A token's channels by kLanes neighbouring lanes, eight of them at a time.
template <int kK>
struct TokenLanes {
  static constexpr int kLanes = Shape<kK>::kThreads / kChunkRows, kEights = kK / kLanes / 8;

  int row, lane;

  __device__ __forceinline__ explicit TokenLanes(int thread) : row(thread / kLanes), lane(thread % kLanes) {}
  __device__ __forceinline__ int channel(int n) const { return 8 * (lane + kLanes * n); }
};

template <int kK>
__device__ __forceinline__ void load_eight(float* sums, int row, int channel, float (&x)[8]) {
  const auto* from = reinterpret_cast<const float4*>(&SumTile<kK>{sums}.at(row, channel));
  const int second = row % 2;  // rows that share banks begin with different halves
  const float4 a = from[second], b = from[1 - second];
  const float4 low = second == 0 ? a : b, high = second == 0 ? b : a;
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// dq or dk of the chunk: the sum over the items of the key head, then the adjoint of the norm.
template <DType kType, int kK>
struct KeyRows {
  using Lanes = TokenLanes<kK>;
  using Sums = float[Lanes::kEights][8];

  const GradientArgs& args;
  const Item& item;
  Lanes own;

  // What the item has, and what its predecessors left; false where successors follow.
  __device__ __forceinline__ bool add_up(float* sums, int which, Sums& y) const {
#pragma unroll
    for (int n = 0; n < Lanes::kEights; ++n) load_eight<kK>(sums, own.row, own.channel(n), y[n]);
    if (item.first && item.last) return true;
    float* slot = args.key_sums + ((blockIdx.x * int64_t{kKeySumsPerChannel} + which) * kChunkRows + own.row) * kK;
#pragma unroll
    for (int n = 0; n < Lanes::kEights; ++n) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& kept = slot[own.channel(n) + e];
        if (!item.first) y[n][e] += kept;
        if (!item.last) kept = y[n][e];
      }
    }
    return item.last;
  }

  // Eight elements of the token's row of q or k, as pairs.
  __device__ __forceinline__ void load(const DeviceTensor& x, int channel, uint32_t (&pairs)[4]) const {
    const int count = own.row < item.span.length ? args.chunk.problem.head_dim_k - channel : 0;
    const auto* from = static_cast<const uint16_t*>(x.data) +
                       row_offset(x, item.span.batch, item.span.begin + own.row, item.key_head) +
                       channel * x.strides[3];
    pairs[0] = pairs[1] = pairs[2] = pairs[3] = 0;
    if (args.chunk.vector_keys) {
      if (count <= 0) return;
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      pairs[0] = words.x, pairs[1] = words.y, pairs[2] = words.z, pairs[3] = words.w;
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t element = e < count ? from[e * x.strides[3]] : 0;
      pairs[e / 2] |= element << (e % 2 * 16);
    }
  }

  // y, the gradient of rstd x, becomes that of x.
  __device__ __forceinline__ void through_norm(const DeviceTensor& x, float rstd, Sums& y) const {
    uint32_t pairs[Lanes::kEights][4];
#pragma unroll
    for (int n = 0; n < Lanes::kEights; ++n) load(x, own.channel(n), pairs[n]);
    float along = 0;
#pragma unroll
    for (int n = 0; n < Lanes::kEights; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 values = rstd * unpack<kType>(pairs[n][e]);
        along = fmaf(values.y, y[n][2 * e + 1], fmaf(values.x, y[n][2 * e], along));
      }
    }
    along = sum_over_lanes<Lanes::kLanes>(along);
#pragma unroll
    for (int n = 0; n < Lanes::kEights; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 values = unpack<kType>(pairs[n][e]);
        y[n][2 * e] = norm_adjoint(values.x, rstd, along, y[n][2 * e]);
        y[n][2 * e + 1] = norm_adjoint(values.y, rstd, along, y[n][2 * e + 1]);
      }
    }
  }

  __device__ __forceinline__ void store(const DeviceTensor& out, bool vectors, const Sums& y, float* sums) const {
    if (own.row >= item.span.length) return;
    const int K = args.chunk.problem.head_dim_k;
    const int64_t start = row_offset(out, item.span.batch, item.span.begin + own.row, item.key_head);
    if (vectors) {
      auto* to = static_cast<uint16_t*>(out.data) + start;
#pragma unroll
      for (int n = 0; n < Lanes::kEights; ++n) {
        uint32_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) pairs[e] = pack<kType>(y[n][2 * e], y[n][2 * e + 1]);
        if (own.channel(n) >= K) continue;
        *reinterpret_cast<uint4*>(to + own.channel(n)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
      return;
    }
    const SumTile<kK> tile{sums};
#pragma unroll
    for (int n = 0; n < Lanes::kEights; ++n) {
#pragma unroll
      for (int e = 0; e < 8; ++e) tile.at(own.row, own.channel(n) + e) = y[n][e];
    }
#pragma unroll 1
    for (int at = 0; at < 8 * Lanes::kEights; ++at) {  // out of shared memory, once in the code: it is seldom needed
      const int channel = own.channel(at / 8) + at % 8;
      if (channel < K) store_float(out.data, out.dtype, start + channel * out.strides[3], tile.at(own.row, channel));
    }
  }

  __device__ __forceinline__ void finish(float* sums, int which, const DeviceTensor& x, const float* rstd,
                                         const DeviceTensor& out, bool vectors) const {
    if (!out.present()) return;
    Sums y;
    if (!add_up(sums, which, y)) return;
    if (args.chunk.problem.qk_l2norm) through_norm(x, rstd[own.row], y);
    store(out, vectors, y, sums);
  }
};

// dbeta = Y . v + k . (rows(dA, k) - e (Y S^T)), over the ranges of columns of a head.
template <int kK>
__device__ __forceinline__ void finish_beta(const GradientArgs& args, const Item& item, Shared<kK>& s,
                                            const TokenLanes<kK>& own) {
  if (!args.dbeta.present()) return;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < TokenLanes<kK>::kEights; ++n) {
    float x[8];
    load_eight<kK>(s.reader, own.row, own.channel(n), x);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum -= x[e];
  }
  sum = sum_over_lanes<TokenLanes<kK>::kLanes>(sum);
  if (own.lane != 0) return;
  sum += s.dbeta[own.row];
  s.dbeta[own.row] = sum;
  if (!item.closes || own.row >= item.span.length) return;
  const DeviceTensor& out = args.dbeta;
  store_float(out.data, out.dtype, row_offset(out, item.span.batch, item.span.begin + own.row, item.head),
              beta_adjoint(args.chunk.problem, s.beta[own.row], sum));
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
