// Of the kernel in gradients.cuh: step 3, products that make dq and dk, and their way to memory.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_pairs.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// [16 tokens x channels] as C tiles.
template <int kK>
using Rows = float[Shape<kK>::kChannels / 8][4];

// The two rows of a lane, and their factors.
struct RowPair {
  int i;  // the other is i + 8
  float2 factor;
};

// sums += left right for rows [16 m, +16) of right, and the warp's channels, from the 16 `channel` on.
template <DType kType, int kK>
__device__ __forceinline__ void add_rows(const uint32_t (&left)[4], const SharedTile<kK>& right, int m, int channel,
                                         int lane, Rows<kK>& sums) {
#pragma unroll
  for (int n = 0; n < Shape<kK>::kChannels / 16; ++n) {
    uint32_t b[4];
    right.load_b_transposed(16 * m, channel + n, lane, b);
    mma<kType>(sums[2 * n], left, b[0], b[1]);
    mma<kType>(sums[2 * n + 1], left, b[2], b[3]);
  }
}

// dq = d_o S^T and dk = Y S^T.
template <DType kType, int kK>
__device__ __forceinline__ void read_state(Shared<kK>& s, int block, int channel, int lane, Rows<kK>& dq,
                                           Rows<kK>& dk) {
#pragma unroll 2
  for (int m = 0; m < Shape<kK>::kColumns / 16; ++m) {
    uint32_t d_o[4], Y[4];
    s.value_rows().load_a(16 * block, m, lane, d_o);
    s.Y_rows().load_c_transposed(16 * m, block, lane, Y);
#pragma unroll
    for (int n = 0; n < Shape<kK>::kChannels / 16; ++n) {
      uint32_t b[4];
      s.state_rows().load_b_transposed(16 * m, channel + n, lane, b);
      mma<kType>(dq[2 * n], d_o, b[0], b[1]);
      mma<kType>(dq[2 * n + 1], d_o, b[2], b[3]);
      mma<kType>(dk[2 * n], Y, b[0], b[1]);
      mma<kType>(dk[2 * n + 1], Y, b[2], b[3]);
    }
  }
}

// Scales the rows, and puts their inner products with those of a tile into `dots`.
template <DType kType, int kK>
__device__ __forceinline__ void scale_and_dot(const SharedTile<kK>& tile, const RowPair& rows, int channel, int lane,
                                              Rows<kK>& sums, float* dots) {
  float2 dot = make_float2(0, 0);
#pragma unroll
  for (int n = 0; n < Shape<kK>::kChannels / 8; ++n) {
    const int segment = 2 * channel + n;
    const auto x_at = [&](int row) {
      return unpack<kType>(*reinterpret_cast<const uint32_t*>(tile.segment(row, segment) + 2 * (lane % 4)));
    };
    const float2 upper = x_at(rows.i), lower = x_at(rows.i + 8);
    sums[n][0] *= rows.factor.x;
    sums[n][1] *= rows.factor.x;
    sums[n][2] *= rows.factor.y;
    sums[n][3] *= rows.factor.y;
    dot.x = fmaf(upper.y, sums[n][1], fmaf(upper.x, sums[n][0], dot.x));
    dot.y = fmaf(lower.y, sums[n][3], fmaf(lower.x, sums[n][2], dot.y));
  }
  dot = make_float2(sum_over_lanes<4>(dot.x), sum_over_lanes<4>(dot.y));
  if (lane % 4 == 0) {
    dots[rows.i] = dot.x;
    dots[rows.i + 8] = dot.y;
  }
}

// <S, G>, with G in shared memory: the diagonal of S G^T, 16 value columns to a warp. The inner index may stand in any
// order, so a lane takes eight channels side by side of both.
template <DType kType, int kK>
__device__ __forceinline__ void dot_states(const GradientArgs& args, const Item& item, Shared<kK>& s, int warp,
                                           int lane) {
  if (warp >= Shape<kK>::kColumns / 16) {
    if (lane == 0) s.state_dot[warp] = 0;
    return;
  }
  const int g = lane / 4, t = lane % 4, rows = args.chunk.problem.head_dim_v - item.column;
  const uint16_t* S = state_before(args, item) + (16 * warp + g) * args.S.v_stride + 8 * t;
  const bool has[2] = {16 * warp + g < rows, 16 * warp + g + 8 < rows};
  float c[2][4] = {};
#pragma unroll 4
  for (int m = 0; m < kK / 32; ++m) {
    uint4 x[2], y[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = has[half] && 32 * m + 8 * t < args.S_width;
      x[half] = there ? *reinterpret_cast<const uint4*>(S + 8 * half * args.S.v_stride + 32 * m) : uint4{};
      y[half] = *reinterpret_cast<const uint4*>(s.state_rows().segment(16 * warp + g + 8 * half, 4 * m + t));
    }
    const uint32_t first[4] = {x[0].x, x[1].x, x[0].y, x[1].y}, second[4] = {x[0].z, x[1].z, x[0].w, x[1].w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mma<kType>(c[half], first, y[half].x, y[half].y);
      mma<kType>(c[half], second, y[half].z, y[half].w);
    }
  }
  float sum = 0;
  if (g / 2 == t) sum = g % 2 == 0 ? c[0][0] + c[1][2] : c[0][1] + c[1][3];
  sum = sum_over_lanes<kWarpSize>(sum);
  if (lane == 0) s.state_dot[warp] = sum;
}

// Adds the sums of the items before, and keeps them for those that follow: each thread its own.
template <int kK>
__device__ __forceinline__ void carry(const GradientArgs& args, const Item& item, int which, int thread,
                                      Rows<kK>& sums) {
  if (item.first && item.last) return;
  using X = Shape<kK>;
  auto* slot = reinterpret_cast<float4*>(args.key_sums) +
               (static_cast<int64_t>(blockIdx.x) * 2 + which) * (kChunkRows * kK / 4) + thread;
#pragma unroll
  for (int n = 0; n < X::kChannels / 8; ++n) {
    float4& kept = slot[n * X::kThreads];
    if (!item.first) {
      const float4 x = kept;
      sums[n][0] += x.x;
      sums[n][1] += x.y;
      sums[n][2] += x.z;
      sums[n][3] += x.w;
    }
    if (!item.last) kept = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
  }
}

// The adjoint of the norm: dx = rstd dy - rstd^2 x (x . rstd dy), with rstd dy in `sums` and rstd^2 (..) in rows.factor.
template <DType kType, int kK>
__device__ __forceinline__ void subtract_along(const SharedTile<kK>& tile, const RowPair& rows, int channel, int lane,
                                               Rows<kK>& sums) {
#pragma unroll
  for (int n = 0; n < Shape<kK>::kChannels / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint16_t* pair = tile.segment(rows.i + 8 * half, 2 * channel + n) + 2 * (lane % 4);
      const float2 x = unpack<kType>(*reinterpret_cast<const uint32_t*>(pair));
      const float factor = half == 0 ? rows.factor.x : rows.factor.y;
      sums[n][2 * half] = fmaf(-factor, x.x, sums[n][2 * half]);
      sums[n][2 * half + 1] = fmaf(-factor, x.y, sums[n][2 * half + 1]);
    }
  }
}

// The warp's rows to memory, `row` being the lane's first.
template <DType kType, int kK>
__device__ __forceinline__ void store_key_rows(const DeviceTensor& out, bool vectors, const Item& item, int K, int row,
                                               int channel, int lane, const Rows<kK>& sums) {
  const int64_t base = row_offset(out, item.span.batch, item.span.begin, item.key_head);
#pragma unroll
  for (int n = 0; n < Shape<kK>::kChannels / 8; n += 2) {
    if (!vectors) break;
    uint32_t pairs[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pairs[h][0] = pack<kType>(sums[n + h][0], sums[n + h][1]);
      pairs[h][1] = pack<kType>(sums[n + h][2], sums[n + h][3]);
    }
    // Lanes change pairs with their neighbours, so that each has four channels side by side.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool odd = lane % 2 == 1;
      const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? pairs[0][half] : pairs[1][half], 1);
      const uint2 words = odd ? make_uint2(other, pairs[1][half]) : make_uint2(pairs[0][half], other);
      const int i = row + 8 * half, d = 16 * channel + 8 * n + (odd ? 8 : 0) + lane % 4 / 2 * 4;
      if (i < item.span.length && d < K) {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(out.data) + base + i * out.strides[1] + d) = words;
      }
    }
  }
  if (vectors) return;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    if (i >= item.span.length) continue;
#pragma unroll
    for (int n = 0; n < Shape<kK>::kChannels / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = 16 * channel + 8 * n + 2 * (lane % 4) + e;
        const float value = half == 0 ? sums[n][e] : sums[n][2 + e];
        if (d < K) store_float(out.data, out.dtype, base + i * out.strides[1] + d * out.strides[3], value);
      }
    }
  }
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
