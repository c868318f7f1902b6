// What a lane has of the rows and columns of a mini-batch, and the norms of rows that lie across the warps.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/ttt_linear/chunk.cuh"

namespace fastweight::cuda::ttt {
namespace {

// n is rounded to 16 bits as a multiple of this. The inner gradient grows with 1 / sqrt(variance + eps), beyond the
// range of fp16 where a state is nearly constant.
template <DType kType>
constexpr float kGradientUnit = kType == DType::kF16 ? 64.0f : 1.0f;

// What a lane has of C tiles of 16 tokens x 16 columns: of tokens g and g + 8 the columns 4t .. 4t + 3. Column 4t + e
// is column 2t + e % 2 of tile e / 2, so that a lane's columns lie together in memory.
template <int kC>
using LaneRows = float[kC / kTileRows][2][4];

template <int kC>
__device__ __forceinline__ float& element(LaneRows<kC>& x, int tile, int half, int e) {
  return x[tile][e / 2][2 * half + e % 2];
}

// Fragments of 16 columns [16 m, 16 m + 16) of rows [row, row + 16) of a tile: where a lane finds those of m = 0, as
// left or (for products with the tile) right operand, and as right operand for products with the transposed tile; and
// from there those of the others. Segments of 16 bytes are exchanged within 128 bytes, see SharedTile.
template <int kD>
__device__ __forceinline__ uint32_t first_fragment(const SharedTile<kD>& tile, int row, int lane) {
  return tile.address(row + lane % 16, lane / 16);
}
template <int kD>
__device__ __forceinline__ uint32_t first_transposed_fragment(const SharedTile<kD>& tile, int row, int lane) {
  return tile.address(row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}
__device__ __forceinline__ uint32_t fragment(uint32_t first, int m) { return (first ^ m % 4 * 32) + m / 4 * 128; }

// The position of a lane; `warp` numbers the 16 columns of its warp.
struct Lane {
  int warp, lane, g, t;
  int column;   // its first
  int columns;  // how many of its four exist

  __device__ Lane(int D, int number)
      : warp(number),
        lane(threadIdx.x % kWarpSize),
        g(lane / 4),
        t(lane % 4),
        column(kWarpColumns * warp + 4 * t),
        columns(min(max(D - column, 0), 4)) {}

  // Its numbers are computed from here on, not kept.
  __device__ __forceinline__ void forget() {
    lane = opaque(lane);
    g = lane / 4;
    t = lane % 4;
    column = kWarpColumns * warp + 4 * t;
  }

  __device__ int row(int tile, int half) const { return kTileRows * tile + 8 * half + g; }
};

// The lane's numbers along the last axis; 0 where there are none.
__device__ __forceinline__ void load_columns(const DeviceTensor& x, int64_t offset, int64_t stride, const Lane& at,
                                             float (&values)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) values[e] = 0.0f;
  if (!x.present()) return;
  with_type(x.dtype, [&](auto type) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < at.columns) values[e] = load_float(x.data, type.value, offset + (at.column + e) * stride);
    }
  });
}

// Pairs, then pairs of pairs, in place.
template <int kCount>
__device__ __forceinline__ float sum_in_pairs(float (&x)[kCount]) {
#pragma unroll
  for (int distance = 1; distance < kCount; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * distance) x[i] += x[i + distance];
  }
  return x[0];
}

// What a lane knows of its columns: the layer norm's parameters and which of the columns exist; kFull: all do. For
// those that do not, the parameters, the state and its bias are 0.
template <bool kFull>
struct Columns {
  float w[4], b[4], ww[4];  // the last is w^2

  __device__ __forceinline__ Columns(const DeviceProblem& p, int head, const Lane& at) {
    load_columns(p.w, head * p.w.strides[0], p.w.strides[1], at, w);
    load_columns(p.b, head * p.b.strides[0], p.b.strides[1], at, b);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      ww[e] = w[e] * w[e];
      exists_[e] = e < at.columns ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      bits_[m] = (2 * m < at.columns ? 0xffffu : 0) | (2 * m + 1 < at.columns ? 0xffff0000u : 0);
    }
    inverse_ = 1.0f / static_cast<float>(min(p.head_dim - kWarpColumns * at.warp, kWarpColumns));
  }

  // A number of column e, and a pair of 16-bit numbers of columns 2m and 2m + 1: 0 where there is no column.
  __device__ __forceinline__ float masked(int e, float x) const { return kFull ? x : exists_[e] * x; }
  __device__ __forceinline__ uint32_t masked_pair(int m, uint32_t x) const { return kFull ? x : bits_[m] & x; }

  // The mean over the columns of the warp; and over all columns, from the means of the warps.
  __device__ __forceinline__ float mean(float sum) const { return sum * (kFull ? 1.0f / kWarpColumns : inverse_); }

  template <int kWarps>
  __device__ __forceinline__ static float mean(const DeviceProblem& p, const float (&means)[kWarps]) {
    float parts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto left = static_cast<float>(p.head_dim - kWarpColumns * w);
      parts[w] = means[w] * (kFull ? 1.0f : fminf(fmaxf(left, 0.0f), kWarpColumns));
    }
    return sum_in_pairs(parts) * (kFull ? 1.0f / kWarps : p.inverse_head_dim);
  }

 private:
  float exists_[4], inverse_;
  uint32_t bits_[2];
};

// ---- The state ------------------------------------------------------------------------------------------------------

// h^T as C tiles [16 columns x 8 keys], in the order of columns that `LaneRows` asks for, and the lane's columns of c.
template <int kD>
struct State {
  float h[kD / 8][4];
  float c[4];

  __device__ __forceinline__ void load(const ChunkArgs& args, int64_t sequence, int head, const Lane& at) {
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) h[n][i] = 0.0f;
    }
    if (args.initial_state.present()) {
      const DeviceStates& states = args.initial_state;
      with_type(states.dtype, [&](auto type) {
        for_each_element(states, sequence, head, args.problem.head_dim, at,
                         [&](int64_t offset, float& x) { x = load_float(states.data, type.value, offset); });
      });
    }
    const DeviceTensor& bias = args.initial_state_bias;
    load_columns(bias, sequence * bias.strides[0] + head * bias.strides[1], bias.strides[2], at, c);
  }

  __device__ __forceinline__ void store(const ChunkArgs& args, int64_t sequence, int head, const Lane& at) {
    if (args.final_state.present()) {
      auto* states = static_cast<float*>(args.final_state.data);
      for_each_element(args.final_state, sequence, head, args.problem.head_dim, at,
                       [&](int64_t offset, float& x) { states[offset] = x; });
    }
    const DeviceTensor& bias = args.final_state_bias;
    if (bias.present() && at.g == 0) {
      scatter_vec4(bias.data, DType::kF32,
                   sequence * bias.strides[0] + head * bias.strides[1] + at.column * bias.strides[2], bias.strides[2],
                   at.columns, c);
    }
  }

  // Keys [16 m, 16 m + 16) in 16 bits: registers 0 and 1 are the right operand for the first tile of a row's columns,
  // 2 and 3 for the second.
  template <DType kType>
  __device__ __forceinline__ void operand(int m, uint32_t (&b)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = h[2 * m + i % 2] + i / 2 * 2;
      b[i] = pack<kType>(pair[0], pair[1]);
    }
  }

  // c = c - eta total, where `total` is the sum of n over the rows of the lane.
  template <bool kFull>
  __device__ __forceinline__ void move_bias(float eta, const Columns<kFull>& columns, float (&total)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        total[e] += __shfl_xor_sync(kAllLanes, total[e], distance);
      }
      c[e] = fmaf(columns.masked(e, -eta), total[e], c[e]);
    }
  }

 private:
  // access(offset, element) for those that exist.
  template <class Access>
  __device__ __forceinline__ void for_each_element(const DeviceStates& states, int64_t sequence, int head, int D,
                                                   const Lane& at, const Access& access) {
    const int64_t base = sequence * states.outer_strides[0] + head * states.outer_strides[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = kWarpColumns * at.warp + 4 * (at.g / 2) + 2 * half + at.g % 2;
      if (column >= D) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int64_t offset = base + column * states.v_stride + (2 * at.t + e) * states.k_stride;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n, offset += 8 * states.k_stride) {
          if (8 * n + 2 * at.t + e < D) access(offset, h[n][2 * half + e]);
        }
      }
    }
  }
};

// ---- Sums over rows -------------------------------------------------------------------------------------------------

// Puts the warp's sums of two numbers per row, which are in parts at the four lanes of a row: own[0] of token g and
// own[1] of token g + 8 of a tile. finish(i, sums) makes of those of own[i] what is put.
template <int kD, int kC, class Finish>
__device__ __forceinline__ void put_sums(const float2 (&own)[2], int tile, const Lane& at, RowSums<kD, kC>& sums,
                                         const Finish& finish) {
  const int half = at.t % 2;
  float2 kept = half == 0 ? own[0] : own[1];
  const float2 sent = half == 0 ? own[1] : own[0];
  kept.x += __shfl_xor_sync(kAllLanes, sent.x, 1);
  kept.y += __shfl_xor_sync(kAllLanes, sent.y, 1);
  kept.x += __shfl_xor_sync(kAllLanes, kept.x, 2);
  kept.y += __shfl_xor_sync(kAllLanes, kept.y, 2);
  const float2 put = finish(half, kept);
  // Two lanes have the same. That both write spares one tile a branch, and costs several tiles registers.
  if (kC == kTileRows || at.t < 2) sums[at.row(tile, half)][at.warp] = put;
}

// The warp's share of the statistics of all rows: mean and variance of its columns. Both come from distances to the
// row's first number in the warp, for which one round of sums suffices: it is one of the 16, so its distance from the
// mean is at most four standard deviations, and what cancels is small.
template <int kD, int kC, bool kFull>
__device__ __forceinline__ void put_statistics(LaneRows<kC>& x, const Columns<kFull>& columns, const Lane& at,
                                               RowSums<kD, kC>& sums) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
    float first[2];
    float2 own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[half] = __shfl_sync(kAllLanes, element<kC>(x, tile, half, 0), at.lane - at.t);
      float d[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) d[e] = columns.masked(e, element<kC>(x, tile, half, e) - first[half]);
      own[half] =
          make_float2((d[0] + d[1]) + (d[2] + d[3]), fmaf(d[0], d[0], d[1] * d[1]) + fmaf(d[2], d[2], d[3] * d[3]));
    }
    put_sums<kD, kC>(own, tile, at, sums, [&](int i, float2 sum) {
      const float distance = columns.mean(sum.x);
      return make_float2((i == 0 ? first[0] : first[1]) + distance, fmaf(-distance, distance, columns.mean(sum.y)));
    });
  }
}

template <int kWarps>
__device__ __forceinline__ void get_shares(const float2 (&row)[kWarps], float (&x)[kWarps], float (&y)[kWarps]) {
#pragma unroll
  for (int w = 0; w < kWarps; w += 2) {
    const float4 two = *reinterpret_cast<const float4*>(&row[w]);
    x[w] = two.x;
    y[w] = two.y;
    x[w + 1] = two.z;
    y[w + 1] = two.w;
  }
}

// Mean and 1 / sqrt(variance + eps) of a row from all warps' shares: the means of parts, then the variances around
// them with the squared distances from the common mean.
template <bool kFull, int kWarps>
__device__ __forceinline__ float2 get_norm(const float2 (&row)[kWarps], const DeviceProblem& p) {
  float means[kWarps], variances[kWarps];
  get_shares(row, means, variances);
  const float mean = Columns<kFull>::mean(p, means);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float distance = means[w] - mean;
    variances[w] = fmaf(distance, distance, variances[w]);
  }
  return make_float2(mean, rsqrt_approx(Columns<kFull>::mean(p, variances) + p.eps));
}

// The means over all columns of two numbers of a row, from all warps' sums.
template <int kWarps>
__device__ __forceinline__ float2 get_means(const float2 (&row)[kWarps], const DeviceProblem& p) {
  float x[kWarps], y[kWarps];
  get_shares(row, x, y);
  return make_float2(sum_in_pairs(x) * p.inverse_head_dim, sum_in_pairs(y) * p.inverse_head_dim);
}

// ---- Inner gradients ------------------------------------------------------------------------------------------------

// The lane's four elements of a row of a tile.
template <DType kType, int kD>
__device__ __forceinline__ void load_four(const SharedTile<kD>& tile, int row, int column, float (&values)[4]) {
  const uint2 words = *reinterpret_cast<const uint2*>(&tile.at(row, column));
  const float2 low = unpack<kType>(words.x), high = unpack<kType>(words.y);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = high.x;
  values[3] = high.y;
}

// w (b - v + k) of a row, what is not of the state in y = w^2 x + w (b - v + k).
template <DType kType, int kD, int kC, bool kFull>
__device__ __forceinline__ void residual_of(Stage<kD, kC>& stage, const Columns<kFull>& columns, int row,
                                            const Lane& at, float (&values)[4]) {
  float k[4], v[4];
  load_four<kType>(stage.k(), row, at.column, k);
  load_four<kType>(stage.v(), row, at.column, v);
#pragma unroll
  for (int e = 0; e < 4; ++e) values[e] = columns.w[e] * (columns.b[e] - v[e] + k[e]);
}

// z, a lane's part of a row, becomes x = LN(z), and y is made of it; the lane's sums of y and x y. Both are 0 in
// columns that do not exist, as w is.
template <bool kFull>
__device__ __forceinline__ float2 inner_sums(const float2& norm, const Columns<kFull>& columns,
                                             const float (&residual)[4], float (&x)[4], float (&y)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    x[e] = (x[e] - norm.x) * norm.y;
    y[e] = fmaf(columns.ww[e], x[e], residual[e]);
  }
  return make_float2((y[0] + y[1]) + (y[2] + y[3]), fmaf(x[0], y[0], x[1] * y[1]) + fmaf(x[2], y[2], x[3] * y[3]));
}

// n = r (y - mean(y) - x mean(x y)), of which `means` are those of y and x y. In columns that do not exist it is
// something finite.
__device__ __forceinline__ float inner_gradient(float r, const float2& means, float x, float y) {
  return r * fmaf(-x, means.y, y - means.x);
}

// n^T of a tile in 16 bits: the fragment [16 columns x 16 tokens], in units, 0 for extension rows and for columns
// that do not exist.
template <DType kType, bool kFull>
__device__ __forceinline__ void transpose_gradients(const float (&n)[2][4], int tile, int rows,
                                                    const Columns<kFull>& columns, const Lane& at,
                                                    uint32_t (&operand)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t real = at.row(tile, half) < rows ? 0xffffffffu : 0;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      constexpr float kUnits = 1.0f / kGradientUnit<kType>;
      const uint32_t pair = pack<kType>(kUnits * n[m][2 * half], kUnits * n[m][2 * half + 1]);
      operand[2 * half + m] = transpose_8x8(columns.masked_pair(m, pair) & real);
    }
  }
}

// ---- Outputs --------------------------------------------------------------------------------------------------------

// Block (i, j) of P = lower(scale q k^T + 1) in 16 bits, as an A fragment.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void block_of_p(Stage<kD, kC>& stage, int i, int j, float scale, const Lane& at,
                                           uint32_t (&operand)[4]) {
  const uint32_t q = first_fragment(stage.q(), kTileRows * i, at.lane);
  const uint32_t k = first_transposed_fragment(stage.k(), kTileRows * j, at.lane);
  float c[2][4] = {};
#pragma unroll
  for (int m = 0; m < kD / 16; ++m) {
    uint32_t a[4], b[4];
    ldmatrix(fragment(q, m), a);
    ldmatrix(fragment(k, m), b);
    mma<kType>(c[0], a, b[0], b[1]);
    mma<kType>(c[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int column = kTileRows * j + 8 * n + 2 * at.t + r % 2;
      const float move = fmaf(scale, c[n][r], 1.0f);
      c[n][r] = column <= at.row(i, r / 2) ? move : 0.0f;
    }
  }
  pack_a<kType>(c[0], c[1], operand);
}

// o = y + w LN(y) + b for the first `count` rows in one type. `o` points to the lane's first column of the first row.
template <DType kType, int kC, bool kFull>
__device__ __forceinline__ void store_outputs_as(const DeviceTensor& x, char* o, int count,
                                                 const float2 (&norms)[kC / 8], const Columns<kFull>& columns,
                                                 const Lane& at, LaneRows<kC>& y) {
#pragma unroll
  for (int r = 0; r < kC / 8; ++r) {
    float values[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value = element<kC>(y, r / 2, r % 2, e);
      values[e] = value + fmaf(columns.w[e], (value - norms[r].x) * norms[r].y, columns.b[e]);
    }
    const int row = 8 * r + at.g;
    char* address = o + byte_offset(kType, row * x.strides[1]);
    if (x.aligned_vec4) {
      if (row < count) store_vec4<kType>(address, values);
    } else {
      scatter_vec4(address, kType, 0, x.strides[3], row < count ? at.columns : 0, values);
    }
  }
}

// o has the type of q or is fp32.
template <DType kType, int kC, bool kFull>
__device__ __forceinline__ void store_outputs(const DeviceTensor& x, char* o, int count, const float2 (&norms)[kC / 8],
                                              const Columns<kFull>& columns, const Lane& at, LaneRows<kC>& y) {
  if (at.columns == 0) return;
  if (x.dtype == kType) {
    store_outputs_as<kType, kC>(x, o, count, norms, columns, at, y);
  } else {
    store_outputs_as<DType::kF32, kC>(x, o, count, norms, columns, at, y);
  }
}

// The lane's first column of the first row of a sequence.
__device__ __forceinline__ char* first_output(const DeviceTensor& o, const SequenceSpan& span, int head,
                                              const Lane& at) {
  return element_at(o.data, o.dtype, row_offset(o, span.batch, span.begin, head) + at.column * o.strides[3]);
}

}  // namespace
}  // namespace fastweight::cuda::ttt
