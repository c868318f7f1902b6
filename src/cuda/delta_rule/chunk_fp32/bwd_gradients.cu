// Backward in the chunk form with the accuracy of fp32: dq, dk, dg, dbeta and the tiles' sums for A_log and dt_bias,
// all tiles at once. bwd.cuh has the equations.
//
// A block has one (tile, key head) and takes the value heads of the group one after the other, so that dq and dk are
// summed in order. Three steps:
//
//     products    d_o S^T, Y S^T and R G^T on tensor cores, in slices of 64 value columns: a warp has 16 channels,
//                 which are the rows of its left operands S and G. d_o R^T and Y R^T, a share of the columns for each
//                 warp.
//     pairs       what is a number per pair of tokens: dsP and dA with their factors, M
//     channels    a thread has one channel of all tokens, on one of two sides: that of the queries (dq, dg) or that of
//                 the keys (dk, dbeta). On either side, with z = q or beta k and D = scale dsP or dA:
//
//                     x_i = scale e_i (d_o S^T)_i  or  -e_i (Y S^T)_i       row_i = x_i + rows(D, k)_i
//                     a_i = z_i x_i                                         column_j = cols(D, z)_j
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/adjoints.cuh"
#include "cuda/delta_rule/chunk_fp32/bwd.cuh"
#include "cuda/delta_rule/scan_part.cuh"

namespace fastweight::cuda::chunk_fp32 {
namespace {

constexpr int kSliceColumns = 64;
constexpr int kSteps = kSliceColumns / 8;  // of a slice's products
using SliceTile = FloatTile<kSliceColumns>;

enum Side { kQueries, kKeys };

template <int kK>
inline constexpr int kThreads = 2 * kK;  // a warp for 16 channels, a thread for a channel on a side
template <int kK>
inline constexpr int kWarps = kK / 16;

// Sums over the channels of a side, by token.
enum RowSum { kReads, kWrites, kBeta, kAlong, kRowSums };

// A number for each channel of all tokens, in rows that the C tiles of a warp are written to without conflicts.
template <int kK>
using Rows = float[kTileRows][kK + 4];

template <int kK, bool kPerChannel>
struct Shared {
  alignas(128) float d_o[kTileRows * kSliceColumns];
  alignas(128) float Y[kTileRows * kSliceColumns];
  alignas(128) float R[kTileRows * kSliceColumns];
  Rows<kK> reads[2];                    // by side d_o S^T, Y S^T; then x; then row; of the queries then column
  Rows<kK> writes;                      // R G^T; then w (R G^T); then the keys' share of dg
  Rows<kK> sums[2];                     // dq, dk: over the value heads so far
  float overlap[kK];                    // <S, G> by channel
  float pairs[2][kWarps<kK>][kSquare];  // d_o R^T and Y R^T of the warps' columns
  alignas(16) float D[2][kSquare];      // by side
  float M[kSquare];                     // one decay per head
  float row_sums[kRowSums][kWarps<kK>][kTileRows];
  float overlap_sums[kWarps<kK>];
  float channel_decay[kPerChannel ? kTileRows : 1][kK + 4];     // exp(g)
  float decay[kTileRows], before[kTileRows], after[kTileRows];  // one decay per head: exp(g), e, w
  float beta[kTileRows], rstd[2][kTileRows], y_dot_v[kTileRows];
  double da_log[kWarps<kK>];

  __device__ __forceinline__ SliceTile tile_d_o() { return {d_o}; }
  __device__ __forceinline__ SliceTile tile_Y() { return {Y}; }
  __device__ __forceinline__ SliceTile tile_R() { return {R}; }
};

// One tile of one value head.
struct Item {
  ChunkSpan span;
  int64_t tile, slot;  // in the order of all tiles; where its states are
  int head, key_head;
  int rows;

  __device__ __forceinline__ int64_t item(const DeltaRuleDeviceProblem& p) const {
    return tile * p.num_value_heads + head;
  }
};

// The channel and side of a thread.
template <int kK>
struct Place {
  int channel = threadIdx.x % kK;
  int side = threadIdx.x / kK;
  int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
};

// Products ------------------------------------------------------------------------------------------------------------

// Columns [first, first + 64) of the rows; zeros where there are none, and without a tensor.
__device__ __forceinline__ void load_slice(const SliceTile& tile, const DeviceTensor& x, const Item& item, int first,
                                           int width) {
  if (!x.present()) {
    for (int at = threadIdx.x; at < kTileRows * SliceTile::kVec4s; at += blockDim.x) {
      tile.vec4(at / SliceTile::kVec4s, at % SliceTile::kVec4s) = make_float4(0, 0, 0, 0);
    }
    return;
  }
  const int64_t offset = row_offset(x, item.span.batch, item.span.begin, item.head) + first * x.strides[3];
  load_rows(tile, x, offset, item.rows, width - first);
}

// Rows [channel, channel + 16) and columns [column, column + 8) of a state, as a C tile lies.
__device__ __forceinline__ void load_left(const float* state, int64_t pitch, int channel, int column, int K, int V,
                                          int lane, float (&c)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int d = channel + lane / 4 + 8 * h, v = column + 2 * (lane % 4);
    float2 pair = make_float2(0, 0);
    if (d < K && v < V) pair = *reinterpret_cast<const float2*>(state + d * pitch + v);
    c[2 * h] = pair.x;
    c[2 * h + 1] = v + 1 < V ? pair.y : 0.0f;
  }
}

template <int kK>
__device__ __forceinline__ void add_product(Rows<kK>& rows, const SplitSum (&sum)[2], bool first, int channel,
                                            int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = rows[8 * n + 2 * (lane % 4) + e % 2][channel + lane / 4 + e / 2 * 8];
      x = first ? sum[n].total(e) : x + sum[n].total(e);
    }
  }
}

// The warp's channels of the three products with states, and <S, G>. Every lane adds to what itself has written.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void multiply_states(const TileBackwardArgs& args, const Item& item, int first,
                                                Shared<kK, kPerChannel>& s, int warp, int lane, float (&overlap)[2]) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int K = p.head_dim_k, V = p.head_dim_v, channel = 16 * warp;
  const auto state_of = [&](const DeviceStates& x) {
    return static_cast<const float*>(x.data) + item.slot * x.outer_strides[0] + item.head * x.outer_strides[1];
  };
  const float *S = state_of(args.S), *G = state_of(args.G);
  SplitSum of_q[2], of_k[2], of_w[2];
  float a[4], b[4];
  const auto load = [&](int m) {
    load_left(S, args.S.k_stride, channel, first + 8 * m, K, V, lane, a);
    load_left(G, args.G.k_stride, channel, first + 8 * m, K, V, lane, b);
  };
  load(0);
#pragma unroll 1
  for (int m = 0; m < kSteps; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) overlap[e / 2] = fmaf(a[e], b[e], overlap[e / 2]);
    const SplitTile left_S = split_tile(a), left_G = split_tile(b);
    if (m + 1 < kSteps) load(m + 1);  // on its way during the products; zeros beyond V
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply(of_q[n], left_S, s.tile_d_o().pair_along(n, m, lane));
      multiply(of_k[n], left_S, s.tile_Y().pair_along(n, m, lane));
      multiply(of_w[n], left_G, s.tile_R().pair_along(n, m, lane));
    }
  }
  add_product<kK>(s.reads[kQueries], of_q, first == 0, channel, lane);
  add_product<kK>(s.reads[kKeys], of_k, first == 0, channel, lane);
  add_product<kK>(s.writes, of_w, first == 0, channel, lane);
}

// left R^T over the warp's share of the slice's columns, added to its share of the pairs.
template <int kK>
__device__ __forceinline__ void multiply_pairs(const SliceTile& left, const SliceTile& right, bool first_slice,
                                               int warp, int lane, float* pairs) {
  SplitSum sum[2];
#pragma unroll 1
  for (int m = warp; m < kSteps; m += kWarps<kK>) {
    const float2 upper = left.pair_along(0, m, lane), lower = left.pair_along(1, m, lane);
    const float c[4] = {upper.x, upper.y, lower.x, lower.y};
    const SplitTile a = split_tile(c);
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply(sum[n], a, right.pair_along(n, m, lane));
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = pairs[(lane / 4 + e / 2 * 8) * kTileRows + 8 * n + 2 * (lane % 4) + e % 2];
      x = first_slice ? sum[n].total(e) : x + sum[n].total(e);
    }
  }
}

// Y . v over the slice, of the thread's row and columns.
template <int kK>
__device__ __forceinline__ float multiply_values(const DeviceTensor& v, const Item& item, int first, int V,
                                                 const SliceTile& Y, float sum) {
  constexpr int kLanes = kThreads<kK> / kTileRows;
  const int row = threadIdx.x / kLanes;
  if (row >= item.rows) return sum;
  const int64_t offset = row_offset(v, item.span.batch, item.span.begin + row, item.head);
  for (int column = threadIdx.x % kLanes; column < kSliceColumns && first + column < V; column += kLanes) {
    sum = fmaf(Y.at(row, column), load_float(v.data, v.dtype, offset + (first + column) * v.strides[3]), sum);
  }
  return sum;
}

template <int kK, bool kPerChannel>
__device__ __forceinline__ void make_products(const TileBackwardArgs& args, const Item& item, const Place<kK>& at,
                                              Shared<kK, kPerChannel>& s) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int V = p.head_dim_v;
  float overlap[2] = {}, y_dot_v = 0;
#pragma unroll 1
  for (int first = 0; first < V; first += kSliceColumns) {
    __syncthreads();  // nobody reads the last slice any more
    load_slice(s.tile_d_o(), args.d_o, item, first, V);
    load_slice(s.tile_Y(), args.Y, item, first, V);
    load_slice(s.tile_R(), args.R, item, first, V);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    multiply_states(args, item, first, s, at.warp, at.lane, overlap);
    multiply_pairs<kK>(s.tile_d_o(), s.tile_R(), first == 0, at.warp, at.lane, s.pairs[kQueries][at.warp]);
    multiply_pairs<kK>(s.tile_Y(), s.tile_R(), first == 0, at.warp, at.lane, s.pairs[kKeys][at.warp]);
    y_dot_v = multiply_values<kK>(p.v, item, first, V, s.tile_Y(), y_dot_v);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    overlap[h] = sum_over_lanes<4>(overlap[h]);
    if (at.lane % 4 == 0) s.overlap[16 * at.warp + at.lane / 4 + 8 * h] = overlap[h];
  }
  constexpr int kLanes = kThreads<kK> / kTileRows;
  y_dot_v = sum_over_lanes<kLanes>(y_dot_v);
  if (threadIdx.x % kLanes == 0) s.y_dot_v[threadIdx.x / kLanes] = y_dot_v;
}

// Pairs ---------------------------------------------------------------------------------------------------------------

// One decay per head: exp(g) of the tokens, and e and w.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void load_decays(const DeltaRuleDeviceProblem& p, const Item& item,
                                            Shared<kK, kPerChannel>& s) {
  const int row = threadIdx.x;
  if (row < kTileRows) {
    s.decay[row] = 1.0f;
    if (p.gate == Gate::kPerHead && row < item.rows) {
      const float x =
          load_float(p.g.data, p.g.dtype, row_offset(p.g, item.span.batch, item.span.begin + row, item.head));
      const float rate = p.gate_in_kernel ? gate_rate(p, item.head) : 0.0f;
      const float bias = p.gate_in_kernel ? gate_bias(p, item.head, 0) : 0.0f;
      s.decay[row] = expf(log_decay(p, x, rate, bias));
    }
  }
  __syncthreads();
  if (row < kTileRows) {
    float before = 1, after = 1;
    for (int i = 0; i <= row; ++i) before *= s.decay[i];
    for (int i = row + 1; i < kTileRows; ++i) after *= s.decay[i];
    s.before[row] = before;
    s.after[row] = after;
  }
}

// D of both sides and M from the warps' shares. With one decay per head D has the decays between the tokens.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void make_pairs(const TileBackwardArgs& args, const Item& item, Shared<kK, kPerChannel>& s) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const TileFactors& factors = args.tile.factors;
  for (int at = threadIdx.x; at < kSquare; at += kThreads<kK>) {
    const int i = at / kTileRows, j = at % kTileRows;
    float dsP = 0, dA = 0, between = 1;
    if (i >= j) {
      for (int w = 0; w < kWarps<kK>; ++w) {
        dsP += s.pairs[kQueries][w][at];
        dA -= s.pairs[kKeys][w][at];
      }
      if (i == j) dA = 0;
    }
    if constexpr (!kPerChannel) {
      for (int m = j + 1; m <= i; ++m) between *= s.decay[m];
      if (p.gate == Gate::kPerHead) {
        const int64_t offset = item.item(p) * kSquare + at;
        s.M[at] = i > j ? fmaf(dsP, factors.sP[offset], dA * factors.A[offset]) : 0.0f;
      }
    }
    s.D[kQueries][at] = p.scale * dsP * between;
    s.D[kKeys][at] = dA * between;
  }
}

// Channels ------------------------------------------------------------------------------------------------------------

using Column = float[kTileRows];  // one channel of all tokens

// Over the lanes of the warp; lanes 2 i and 2 i + 1 get the sum of token i.
__device__ __forceinline__ float sum_tokens(const Column& x, int lane) {
  float eight[8], four[4], two[2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool high = lane & 16;
    eight[i] = (high ? x[8 + i] : x[i]) + __shfl_xor_sync(kAllLanes, high ? x[i] : x[8 + i], 16);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool high = lane & 8;
    four[i] = (high ? eight[4 + i] : eight[i]) + __shfl_xor_sync(kAllLanes, high ? eight[i] : eight[4 + i], 8);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool high = lane & 4;
    two[i] = (high ? four[2 + i] : four[i]) + __shfl_xor_sync(kAllLanes, high ? four[i] : four[2 + i], 4);
  }
  const bool high = lane & 2;
  const float one = (high ? two[1] : two[0]) + __shfl_xor_sync(kAllLanes, high ? two[0] : two[1], 2);
  return one + __shfl_xor_sync(kAllLanes, one, 1);
}

template <int kK, bool kPerChannel>
__device__ __forceinline__ void send_row_sum(Shared<kK, kPerChannel>& s, RowSum kind, const Column& x,
                                             const Place<kK>& at) {
  const float sum = sum_tokens(x, at.lane);
  if (at.lane % 2 == 0) s.row_sums[kind][at.warp][at.lane / 2] = sum;
}

// Over the warps of a side, in order.
template <int kK, bool kPerChannel>
__device__ __forceinline__ float receive_row_sum(const Shared<kK, kPerChannel>& s, RowSum kind, int side, int row) {
  constexpr int kHalf = kWarps<kK> / 2;
  float sum = s.row_sums[kind][side * kHalf][row];
  for (int w = 1; w < kHalf; ++w) sum += s.row_sums[kind][side * kHalf + w][row];
  return sum;
}

// One channel of the rows of q, k or the gate as it lies in memory; zeros where there is none.
__device__ __forceinline__ void load_column(const DeviceTensor& x, const Item& item, int head, int channel, int width,
                                            Column& column) {
  const int64_t offset = row_offset(x, item.span.batch, item.span.begin, head) + channel * x.strides[3];
  const int rows = channel < width ? item.rows : 0;
  with_type(x.dtype, [&](auto type) {
    const char* from = element_at(x.data, type.value, offset);
    const int64_t step = byte_offset(type.value, x.strides[1]);
#pragma unroll
    for (int i = 0; i < kTileRows; ++i, from += step) {
      column[i] = i < rows ? decode(load_bits(from, type.value), type.value) : 0.0f;
    }
  });
}

// Of q or k with its norm.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void load_rows_of(const DeltaRuleDeviceProblem& p, int side, const Item& item, int channel,
                                             const Shared<kK, kPerChannel>& s, Column& x) {
  load_column(side == kQueries ? p.q : p.k, item, item.key_head, channel, p.head_dim_k, x);
  if (!p.qk_l2norm) return;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) x[i] *= s.rstd[side][i];
}

// exp(g) of one channel; 1 where there is none.
template <int kK>
__device__ __forceinline__ void load_decay_column(const DeltaRuleDeviceProblem& p, const Item& item, int channel,
                                                  Rows<kK>& decays) {
  const bool inside = channel < p.head_dim_k;
  const float rate = p.gate_in_kernel ? gate_rate(p, item.head) : 0.0f;
  const float bias = p.gate_in_kernel && inside ? gate_bias(p, item.head, channel) : 0.0f;
  Column x;
  load_column(p.g, item, item.head, channel, p.head_dim_k, x);
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    decays[i][channel] = inside && i < item.rows ? expf(log_decay(p, x[i], rate, bias)) : 1.0f;
  }
}

// The factors of the reads and, of the keys, of the writes; what the state contributes to dg, per channel to `gates`
// and per head to the row sums. x and w (R G^T) stay in shared memory.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void scale_reads(const DeltaRuleDeviceProblem& p, const Place<kK>& at, const Column& k,
                                            const Column& z, Shared<kK, kPerChannel>& s, Column& gates) {
  const float factor = at.side == kQueries ? p.scale : -1.0f;
  float before = 1, after = 1, run = 0;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    float& x = s.reads[at.side][i][at.channel];
    if constexpr (kPerChannel) before *= s.channel_decay[i][at.channel];
    x = factor * (kPerChannel ? before : s.before[i]) * x;
  }
  Column reads;
#pragma unroll
  for (int i = kTileRows - 1; i >= 0; --i) {
    reads[i] = z[i] * s.reads[at.side][i][at.channel];
    run += reads[i];
    gates[i] = run;
  }
  Column writes = {};
  if (at.side == kKeys) {
#pragma unroll
    for (int i = kTileRows - 1; i >= 0; --i) {
      float& x = s.writes[i][at.channel];
      x = (kPerChannel ? after : s.after[i]) * x;
      writes[i] = k[i] * x;
      if constexpr (kPerChannel) after *= s.channel_decay[i][at.channel];
    }
    run = after * s.overlap[at.channel];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      gates[i] += run;
      run += writes[i];
    }
  }
  if (!kPerChannel && p.gate == Gate::kPerHead) {
    send_row_sum(s, kReads, reads, at);
    if (at.side == kKeys) {
      send_row_sum(s, kWrites, writes, at);
      const float overlap = sum_over_lanes<kWarpSize>(s.overlap[at.channel]);
      if (at.lane == 0) s.overlap_sums[at.warp] = overlap;
    }
  }
}

// rows(D, k) to x, which become the side's rows where they lie, and cols(D, z). Per channel the decay from j to i runs
// down the rows, and the pairs' terms are added to `gates`: to gates_m those of i >= m > j.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void multiply_by_pairs(const Place<kK>& at, const Column& k, const Column& z,
                                                  Shared<kK, kPerChannel>& s, Column& columns, Column& gates) {
  const float* D = s.D[at.side];
  Column factor;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    float& x = s.reads[at.side][i][at.channel];
    const float decay = kPerChannel ? s.channel_decay[kPerChannel ? i : 0][at.channel] : 1.0f;
    float row = x, crossing = 0;
#pragma unroll
    for (int j = 0; j < i; ++j) {
      const float d = D[i * kTileRows + j];
      if constexpr (kPerChannel) {
        gates[j] += crossing;
        factor[j] *= decay;
        const float term = factor[j] * (d * z[i]);
        row = fmaf(d, factor[j] * k[j], row);
        columns[j] += term;
        crossing = fmaf(k[j], term, crossing);
      } else {
        row = fmaf(d, k[j], row);
        columns[j] = fmaf(d, z[i], columns[j]);
      }
    }
    const float diagonal = D[i * kTileRows + i];
    factor[i] = 1;
    x = fmaf(diagonal, k[i], row);
    columns[i] = diagonal * z[i];
    if constexpr (kPerChannel) gates[i] += crossing;
  }
}

// The side's share of the gradients of one value head, up to where the sides meet: then `own` is what the thread adds
// to dq or dk without the other side's part, and `gates` its share of dg.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void make_channels(const TileBackwardArgs& args, const Item& item, const Place<kK>& at,
                                              Shared<kK, kPerChannel>& s, Column& own, Column& gates) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  Column k, z, columns;
  load_rows_of(p, kKeys, item, at.channel, s, k);
  if (at.side == kQueries) {
    load_rows_of(p, kQueries, item, at.channel, s, z);
  } else {
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) z[i] = s.beta[i] * k[i];
  }
  scale_reads<kK, kPerChannel>(p, at, k, z, s, gates);
  multiply_by_pairs<kK, kPerChannel>(at, k, z, s, columns, gates);
  if (at.side == kQueries) {
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      own[i] = s.reads[kQueries][i][at.channel];
      s.reads[kQueries][i][at.channel] = columns[i];
    }
    return;
  }
  Column products;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    const float row = s.reads[kKeys][i][at.channel];
    own[i] = fmaf(s.beta[i], row, columns[i] + s.writes[i][at.channel]);
    products[i] = k[i] * row;
    if constexpr (kPerChannel) s.writes[i][at.channel] = gates[i];
  }
  send_row_sum(s, kBeta, products, at);
}

// Gradients of gates, beta and parameters -----------------------------------------------------------------------------

// One decay per head: dg of token m.
template <int kK, bool kPerChannel>
__device__ __forceinline__ float gate_gradient(const Shared<kK, kPerChannel>& s, int m) {
  constexpr int kHalf = kWarps<kK> / 2;
  float crossing = 0, reads = 0, overlap = s.overlap_sums[kHalf];
  for (int i = m; i < kTileRows; ++i) {
    for (int j = 0; j < m; ++j) crossing += s.M[i * kTileRows + j];
    reads += receive_row_sum(s, kReads, kQueries, i) + receive_row_sum(s, kReads, kKeys, i);
  }
  for (int w = kHalf + 1; w < kWarps<kK>; ++w) overlap += s.overlap_sums[w];
  float writes = s.before[kTileRows - 1] * overlap;
  for (int j = 0; j < m; ++j) writes += receive_row_sum(s, kWrites, kKeys, j);
  return crossing + reads + writes;
}

// The gradient of element (token, channel) of the gate tensor to the caller; its terms to the sums.
__device__ __forceinline__ void store_gate(const TileBackwardArgs& args, const Item& item, int row, int channel,
                                           float rate, float bias, float dg, double& da_log, double& ddt_bias) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int64_t token = item.span.begin + row, column = p.gate == Gate::kPerChannel ? channel : 0;
  const int64_t offset = row_offset(p.g, item.span.batch, token, item.head) + column * p.g.strides[3];
  const float x = p.gate_in_kernel ? load_float(p.g.data, p.g.dtype, offset) : 0.0f;
  const GateGradient gradient = log_decay_adjoint(p, x, rate, bias, dg);
  da_log += static_cast<double>(gradient.a_log);
  ddt_bias += static_cast<double>(gradient.x);
  if (!args.dg.present()) return;
  store_float(args.dg.data, args.dg.dtype,
              row_offset(args.dg, item.span.batch, token, item.head) + column * args.dg.strides[3], gradient.x);
}

__device__ __forceinline__ double sum_over_warp(double value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Per channel: by the queries' side, which has the channel's gates of both sides after this.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void finish_channel_gates(const TileBackwardArgs& args, const Item& item,
                                                     const Place<kK>& at, const Column& gates,
                                                     Shared<kK, kPerChannel>& s) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const bool inside = at.channel < p.head_dim_k;
  const float rate = p.gate_in_kernel ? gate_rate(p, item.head) : 0.0f;
  const float bias = p.gate_in_kernel && inside ? gate_bias(p, item.head, at.channel) : 0.0f;
  double da_log = 0, ddt_bias = 0;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    if (inside && i < item.rows) {
      store_gate(args, item, i, at.channel, rate, bias, gates[i] + s.writes[i][at.channel], da_log, ddt_bias);
    }
  }
  if (!args.sums.wanted()) return;
  if (inside) args.sums.parts[item.item(p) * args.sums.width() + 1 + at.channel] = ddt_bias;
  da_log = sum_over_warp(da_log);
  if (at.lane == 0) s.da_log[at.warp] = da_log;
}

// One per head: by the first warp, a lane for a token. dbeta likewise.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void finish_tokens(const TileBackwardArgs& args, const Item& item,
                                              Shared<kK, kPerChannel>& s) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int row = threadIdx.x;
  const bool inside = row < item.rows;
  if (p.gate == Gate::kPerHead) {
    double da_log = 0, ddt_bias = 0;
    if (inside) {
      const float rate = p.gate_in_kernel ? gate_rate(p, item.head) : 0.0f;
      const float bias = p.gate_in_kernel ? gate_bias(p, item.head, 0) : 0.0f;
      store_gate(args, item, row, 0, rate, bias, gate_gradient(s, row), da_log, ddt_bias);
    }
    da_log = sum_over_warp(da_log);
    ddt_bias = sum_over_warp(ddt_bias);
    if (args.sums.wanted() && row == 0) {
      double* const parts = args.sums.parts + item.item(p) * args.sums.width();
      parts[0] = da_log;
      parts[1] = ddt_bias;
    }
  }
  if (!args.dbeta.present() || !inside) return;
  const float dbeta = s.y_dot_v[row] + receive_row_sum(s, kBeta, kKeys, row);
  store_float(args.dbeta.data, args.dbeta.dtype,
              row_offset(args.dbeta, item.span.batch, item.span.begin + row, item.head),
              beta_adjoint(p, s.beta[row], dbeta));
}

// The kernel ----------------------------------------------------------------------------------------------------------

// The gradients of one value head, dq and dk as far as they are sums.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void run_head(const TileBackwardArgs& args, const Item& item, const Place<kK>& at,
                                         Shared<kK, kPerChannel>& s) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  if (threadIdx.x < kTileRows) s.beta[threadIdx.x] = chunk_beta(p, item.span, item.head, threadIdx.x);
  make_products(args, item, at, s);
  if constexpr (kPerChannel) {
    if (at.side == kQueries) load_decay_column<kK>(p, item, at.channel, s.channel_decay);
  } else {
    load_decays(p, item, s);
  }
  __syncthreads();
  make_pairs<kK, kPerChannel>(args, item, s);
  __syncthreads();
  Column own, gates = {};
  make_channels<kK, kPerChannel>(args, item, at, s, own, gates);
  __syncthreads();
  const bool first = item.head == item.key_head * p.group;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    if (at.side == kKeys) own[i] += s.reads[kQueries][i][at.channel];
    float& sum = s.sums[at.side][i][at.channel];
    sum = first ? own[i] : sum + own[i];
  }
  if constexpr (kPerChannel) {
    if (at.side == kQueries) finish_channel_gates(args, item, at, gates, s);
  }
  if (threadIdx.x < kWarpSize) finish_tokens(args, item, s);
  __syncthreads();  // before the next head's products
  if (kPerChannel && args.sums.wanted() && threadIdx.x == 0) {
    double sum = 0;
    for (int w = 0; w < kWarps<kK> / 2; ++w) sum += s.da_log[w];
    args.sums.parts[item.item(p) * args.sums.width()] = sum;
  }
}

// 1 / sqrt(sum x^2 + eps) of q, by the queries' side, and of k.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void make_norms(const DeltaRuleDeviceProblem& p, const Item& item, const Place<kK>& at,
                                           Shared<kK, kPerChannel>& s) {
  if (!p.qk_l2norm) return;
  Column x;
  load_column(at.side == kQueries ? p.q : p.k, item, item.key_head, at.channel, p.head_dim_k, x);
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) x[i] *= x[i];
  send_row_sum(s, kAlong, x, at);
  __syncthreads();
  if (threadIdx.x < 2 * kTileRows) {
    const int side = threadIdx.x / kTileRows, row = threadIdx.x % kTileRows;
    s.rstd[side][row] = 1.0f / sqrtf(receive_row_sum(s, kAlong, side, row) + kL2NormEps);
  }
  __syncthreads();
}

// dq and dk to the caller, through the norm.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void store_keys(const TileBackwardArgs& args, const Item& item, const Place<kK>& at,
                                           Shared<kK, kPerChannel>& s) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  Column dy;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) dy[i] = s.sums[at.side][i][at.channel];
  if (p.qk_l2norm) {
    Column y, products;
    load_rows_of(p, at.side, item, at.channel, s, y);
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) products[i] = y[i] * dy[i];
    send_row_sum(s, kAlong, products, at);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      dy[i] = s.rstd[at.side][i] * fmaf(-y[i], receive_row_sum(s, kAlong, at.side, i), dy[i]);
    }
  }
  const DeviceTensor& out = at.side == kQueries ? args.dq : args.dk;
  if (!out.present() || at.channel >= p.head_dim_k) return;
  const int64_t offset = row_offset(out, item.span.batch, item.span.begin, item.key_head) + at.channel * out.strides[3];
  with_type(out.dtype, [&](auto type) {
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      if (i < item.rows) store_float(out.data, type.value, offset + i * out.strides[1], dy[i]);
    }
  });
}

// Tile `at` of the segment. Its sequence is -1 where there is none; `ended` says that none follows either.
__device__ __forceinline__ Item tile_at(const TileBackwardArgs& args, int64_t at, bool& ended) {
  const TileArgs& tile = args.tile;
  const Segment& segment = args.segment;
  const int64_t each = chunks_of(tile.problem.sequences.tokens, kTileRows);  // in sequences of one length
  Item item{};
  item.slot = at;
  item.tile = segment.first + at;
  if (segment.kind == Segment::kSlice) {
    const int64_t position = segment.first + at % segment.count;
    item.tile = position < each ? at / segment.count * each + position : tile.num_tiles;
  }
  if (item.tile < tile.num_tiles) item.span = chunk_at(tile.tiles, item.tile);
  ended = segment.kind != Segment::kSlice && item.span.sequence < 0;
  item.rows = static_cast<int>(item.span.length);
  return item;
}

template <int kK, bool kPerChannel>
__global__ void __launch_bounds__(kThreads<kK>, 512 / kThreads<kK>)
    tile_gradients_kernel(const __grid_constant__ TileBackwardArgs args, int64_t items) {
  auto& s = dynamic_shared<Shared<kK, kPerChannel>>();
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const Place<kK> at;
  const int key_heads = p.num_value_heads / p.group;
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    bool ended = false;
    Item item = tile_at(args, i / key_heads, ended);
    if (ended) return;
    if (item.span.sequence < 0) continue;
    item.key_head = static_cast<int>(i % key_heads);
    make_norms(p, item, at, s);
    for (int h = 0; h < p.group; ++h) {
      item.head = item.key_head * p.group + h;
      run_head<kK, kPerChannel>(args, item, at, s);
    }
    store_keys(args, item, at, s);
    __syncthreads();  // before the next tile's norms
  }
}

}  // namespace

size_t gradients_bytes(int padded_k, bool per_channel) {
  size_t bytes = 0;
  with_padded_k_and_gate(padded_k, per_channel,
                         [&]<int kK, bool kPerChannel>() { bytes = sizeof(Shared<kK, kPerChannel>); });
  return bytes;
}

void launch_gradients(const TileBackwardArgs& args, int padded_k, const Context& context) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const Segment& segment = args.segment;
  const int64_t tiles = segment.kind == Segment::kWhole   ? args.tile.num_tiles
                        : segment.kind == Segment::kSlice ? p.sequences.count * segment.count
                                                          : segment.count;
  const int64_t items = tiles * (p.num_value_heads / p.group);
  if (items == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, 1 << 30));
  with_padded_k_and_gate(padded_k, p.gate == Gate::kPerChannel, [&]<int kK, bool kPerChannel>() {
    launch<tile_gradients_kernel<kK, kPerChannel>>("delta_rule chunk_fp32 gradients", context,
                                                   {blocks, kThreads<kK>, sizeof(Shared<kK, kPerChannel>)}, args,
                                                   items);
  });
}

}  // namespace fastweight::cuda::chunk_fp32
