// The gradients of every chunk with one decay per key channel. See gradient.cuh for the equations.
//
// A pair of tokens i >= j has the factor exp(gamma_i - gamma_j) in every channel, a product of the decays of single tokens
// as in factors_per_channel.cu. A chunk is four tiles of 16 tokens; rise_i is the product of the decays from the start of
// i's tile through i, fall_j of those after j to the end of j's tile, total_t of all of a tile. All products below the
// diagonal tiles are made on tensor cores, and everything that is left in fp32:
//
//     X_i = (..((d_o S^T)_i total_0 + P_i0 (fall k)_0) total_1 + ..)         the reads of q, from outside i's tile;
//                                                                           of the reader likewise with Y S^T and A
//     F_j = (..((R G^T)_j total_3 + P_3j^T (rise q)_3 + A_3j^T (rise k)_3) total_2 + ..)     the writes of k, to outside
//
// with P = scale dP, A = -dA and the reader's rise k = -beta rise k. Then
//
//     dq_i = rise_i X_i + pairs of the tile,     dk_j = fall_j F_j + pairs of the tile - beta_j (rise_j X_j + ..)
//
// The pairs of a tile are walked in fp32 by a thread per channel: down the rows i, with exp(gamma_i - gamma_j) of all j <
// i in registers. The same walk sums dg of its own terms: X_i is what a pair (i, anything before the tile) contributes,
// F_j what (anything after it, j) does, and what passes over the whole tile,
//
//     over_t = sum of M_ij over the tiles I > t > J, with the state before as a J and the state after as an I,
//
// falls off on the way: rise x after each factor total_t. Every term of dg_m is one that exp(g_m) multiplies, and no
// quotient of decays is formed: any gate is safe.
//
// A block has K / 16 warps. The value side is transposed in steps 1 to 3: channels, or value columns, are the rows of the
// products and tokens their columns.
//
//     1   a warp has 16 value columns: R^T = bD^T J^T
//     2   blocks of 16 x 16 of P and A, dealt to the warps: below the diagonal rounded to operands, on it in fp32
//     3   a warp has 16 channels: S d_o^T and S Y^T in registers, <S, G>, and G R^T
//     4   a thread has two channels of a tile: the rising and falling rows
//     5   a warp has 16 channels: X and F, from 3 and 4
//     6   a thread has a channel of a tile: the walk
//     7   some threads have a token: the adjoints of the norms, dq, dk, dbeta
//
// Three tiles of [64 x K] numbers, fp32 in the end, hold all operands one after the other: two blocks of K = 128 fit a
// multiprocessor of Hopper, one of which computes while the other waits.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/adjoints.cuh"
#include "cuda/delta_rule/chunk_16bit/gradient_items.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

constexpr int kRows = 16;  // of a tile
constexpr int kTiles = kChunkRows / kRows;

template <int kK>
struct Shape {
  static constexpr int kColumns = kK == 64 ? 64 : 128;  // of values
  static constexpr int kWarps = kK / 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksOfSM = kK == 256 ? 1 : kK == 128 ? 2 : 3;
};

enum PairKind { kPairsOfP, kPairsOfA };

// [64 tokens x kK channels] in fp32. Eight neighbouring channels stay together; the eights change places so that the C
// tiles of a transposed product, and rows, go to different banks.
template <int kK>
struct SumTile {
  float* data;

  __device__ __forceinline__ float& at(int row, int channel) const {
    return data[row * kK + (channel ^ (row / 2 % 4 * 8))];
  }
};

// A block of 16 x 16 elements, by LowerBlocks' rules. Blocks of a matrix differ by constants.
struct PairBlock : TileFragments<PairBlock> {
  static constexpr int kElements = 256;

  uint32_t start;

  __device__ __forceinline__ explicit PairBlock(const uint16_t* memory) : start(shared_address(memory)) {}
  __device__ __forceinline__ uint32_t address(int row, int even, int h) const {
    return start + static_cast<uint32_t>(32 * row + (((even + h) ^ row >> 2) & 1) * 16);
  }
};

// The six blocks below the diagonal of a [64 x 64] matrix.
struct BelowDiagonal {
  uint16_t data[kTiles * (kTiles - 1) / 2][PairBlock::kElements];

  __device__ __forceinline__ PairBlock block(int row, int column) const {
    return PairBlock(data[row * (row - 1) / 2 + column]);
  }
};

// The lower triangle of a [16 x 16] matrix in fp32: rows in whole fours.
struct Triangle {
  float data[160];

  __device__ __forceinline__ static constexpr int row(int i) {
    const int fours = i / 4;
    return 4 * (2 * fours * (fours + 1) + i % 4 * (fours + 1));
  }
  // The first `count` elements of row i, and what fills the last four.
  __device__ __forceinline__ void load(int i, int count, float (&x)[kRows]) const {
#pragma unroll
    for (int j = 0; j < kRows; j += 4) {
      if (j >= count) continue;
      const float4 four = *reinterpret_cast<const float4*>(data + row(i) + j);
      x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
    }
  }
};

template <int kK>
struct Shared {
  static constexpr int kColumns = Shape<kK>::kColumns;
  using Sums = float[kChunkRows * kK];
  using Keys = uint16_t[kChunkRows * kK];
  using Values = uint16_t[kChunkRows * kColumns];
  using State = uint16_t[kColumns * kK];

  union {
    alignas(128) State S;      // steps 1 to 3
    alignas(128) Sums writer;  // R G^T from step 3 on, then F, then dk
  };
  union {
    struct {
      alignas(128) Keys reader;
      alignas(128) Values v;
    } first;                    // step 1
    alignas(128) Values d_o;    // steps 2 and 3
    alignas(128) State G;       // step 3
    struct {
      alignas(128) Keys falling;
      float first[4][4][Shape<kK>::kThreads];  // sums of the first tile, which add_tiles leaves alone, out of registers
    } tiles;                                   // steps 4 and 5
    alignas(128) Sums query;    // step 6: X of q, then dq
  };
  union {
    struct {
      alignas(128) Values R, Y;  // transposed: steps 1 to 3
    } columns;
    struct {
      alignas(128) Keys q, k;  // rising: steps 4 and 5
    } rising;
    alignas(128) Sums reader;  // step 6: X of the reader, then the terms of dbeta
  };
  union {
    struct {
      alignas(128) uint16_t J[LowerBlocks::kElements];
      float yv[kColumns / 16][kChunkRows];  // Y . v of the warps' columns
    } value_side;                           // step 1
    struct {
      alignas(128) BelowDiagonal below[2];
      alignas(16) Triangle diagonal[2][kTiles];
    } pairs;  // from step 2 on, by PairKind
  };
  union {
    alignas(16) float total[kTiles][kK];  // steps 4 and 5
    float over[kTiles][kK];               // steps 5 and 6
    float bias[kTiles][kK];               // from step 6 on: the tile's share of ddt_bias
  };
  float a_log[kTiles * kK / kWarpSize];  // the share of dA_log of the warps' tiles and channels
  float beta[kChunkRows], rstd_q[kChunkRows], rstd_k[kChunkRows];
  float dbeta[kChunkRows];  // over the ranges of columns
  Item item;                // here, it takes no registers between the steps
};

// [16 channels x 64 tokens] as C tiles.
using Channels = float[kChunkRows / 8][4];
// [16 channels x 16 tokens].
using ChannelTile = float[2][4];

// Loads ----------------------------------------------------------------------------------------------------------------

// What step 1 needs, and Y.
template <int kK>
__device__ __forceinline__ void load_first(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const ChunkFactors& factors = args.chunk.factors;
  copy_rows<X::kColumns, X::kThreads>(SharedTile<kK>(s.S), state_before(args, item), args.S.v_stride,
                                      p.head_dim_v - item.column, args.S_width, thread);
  copy_rows<kChunkRows, X::kThreads>(SharedTile<kK>(s.first.reader),
                                     factors.keys + (item.at * kKeyCopies + kReader) * kChunkRows * kK, kK, kChunkRows,
                                     kK, thread);
  load_value_rows<X::kThreads>(SharedTile<X::kColumns>(s.first.v), p.v, args.chunk.vector_values, item, p.head_dim_v,
                               thread);
  copy_lower_blocks<X::kThreads>(s.value_side.J, factors.J + item.at * kChunkRows * kChunkRows, thread);
  copy_rows<X::kColumns, X::kThreads>(SharedTile<kChunkRows>(s.columns.Y),
                                      args.Y + (item.at * args.padded_v + item.column) * kChunkRows, kChunkRows,
                                      args.padded_v - item.column, kChunkRows, thread);
  commit_copies();
  if (thread < kChunkRows) {
    const int i = thread;
    const float* row = factors.row + item.at * kRowNumbers * kChunkRows + i;
    s.rstd_q[i] = row[kRstdOfQ * kChunkRows];
    s.rstd_k[i] = row[kRstdOfK * kChunkRows];
    s.beta[i] = factors.token[item.at * kChunkRows + i];
    if (item.opens) s.dbeta[i] = 0;
  }
}

// The gate, as token.cuh and adjoints.cuh have it, by the special function unit: this kernel needs each decay twice.
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float sigmoid_approx(float x) {
  return reciprocal_approx(1.0f + exp2_approx(-kLog2E * x));
}

// The relative error is below 2^-14; it is largest where the series ends, at e^x = 2^-8.
__device__ __forceinline__ float softplus_approx(float x) {
  const float e = exp2_approx(kLog2E * x);
  const float series = e * fmaf(-e, fmaf(-e, 1.0f / 3, 0.5f), 1.0f), log = kLn2 * log2_approx(1.0f + e);
  return x > 20.0f ? x : e < 0x1p-8f ? series : log;
}

enum class GateKind { kGiven, kSoftplus, kBounded };

// body(std::integral_constant<GateKind, kind>), around a loop.
template <class Body>
__device__ __forceinline__ void with_gate_kind(const DeltaRuleDeviceProblem& p, const Body& body) {
  if (!p.gate_in_kernel) {
    body(std::integral_constant<GateKind, GateKind::kGiven>());
  } else if (p.has_lower_bound) {
    body(std::integral_constant<GateKind, GateKind::kBounded>());
  } else {
    body(std::integral_constant<GateKind, GateKind::kSoftplus>());
  }
}

template <GateKind kKind>
__device__ __forceinline__ float decay_of(const DeltaRuleDeviceProblem& p, float x, float rate, float bias) {
  float g = x;
  if constexpr (kKind == GateKind::kBounded) g = p.lower_bound * sigmoid_approx(rate * (x + bias));
  if constexpr (kKind == GateKind::kSoftplus) g = -rate * softplus_approx(x + bias);
  return exp2_approx(max_or_nan(kLog2E * g, -150.0f));
}

template <GateKind kKind>
__device__ __forceinline__ GateGradient gate_adjoint(const DeltaRuleDeviceProblem& p, float x, float rate, float bias,
                                                     float dg) {
  if constexpr (kKind == GateKind::kGiven) return {dg, 0.0f};
  const float z = x + bias;
  if constexpr (kKind == GateKind::kBounded) {
    const float y = sigmoid_approx(rate * z), dx = p.lower_bound * (y * (1.0f - y)) * (rate * dg);
    return {dx, dx * z};
  }
  return {-(rate * sigmoid_approx(z)) * dg, -(rate * softplus_approx(z)) * dg};
}

// Step 1 ---------------------------------------------------------------------------------------------------------------

// Y . v of the tokens j, j + 1 over the warp's columns, of which a lane has two.
__device__ __forceinline__ void dot_values(const float2 (&v)[2], const float2 (&Y)[2], int lane, float* yv) {
  float sum[2] = {fmaf(v[0].x, Y[0].x, v[1].x * Y[1].x), fmaf(v[0].y, Y[0].y, v[1].y * Y[1].y)};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
      sum[e] += __shfl_xor_sync(kAllLanes, sum[e], distance);
    }
    if (lane < 4) yv[e] = sum[e];
  }
}

// bD^T of the warp's columns as A fragments.
template <DType kType, int kK>
__device__ __forceinline__ void residuals(Shared<kK>& s, int warp, int lane, uint32_t (&bD)[kTiles][4]) {
  Channels X = {};
  const SharedTile<kK> S(s.S), reader(s.first.reader);
  const SharedTile<Shape<kK>::kColumns> values(s.first.v);
  const SharedTile<kChunkRows> Y_rows(s.columns.Y);
#pragma unroll 4
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[4];
    S.load_a(16 * warp, m, lane, a);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t b[4];
      reader.load_b(16 * n, m, lane, b);
      mma<kType>(X[2 * n], a, b[0], b[1]);
      mma<kType>(X[2 * n + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    uint32_t v_pairs[4], Y_pairs[4];
    values.load_c_transposed(16 * m, warp, lane, v_pairs);
    Y_rows.load_a(16 * warp, m, lane, Y_pairs);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 16 * m + 8 * h + 2 * (lane % 4), n = 2 * m + h;
      const float2 v[2] = {unpack<kType>(v_pairs[2 * h]), unpack<kType>(v_pairs[2 * h + 1])};
      const float2 Y[2] = {unpack<kType>(Y_pairs[2 * h]), unpack<kType>(Y_pairs[2 * h + 1])};
      const float2 beta = *reinterpret_cast<const float2*>(s.beta + j);
      dot_values(v, Y, lane, &s.value_side.yv[warp][j]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        X[n][2 * e] = beta.x * (v[e].x - X[n][2 * e]);
        X[n][2 * e + 1] = beta.y * (v[e].y - X[n][2 * e + 1]);
      }
    }
    pack_a<kType>(X[2 * m], X[2 * m + 1], bD[m]);
  }
}

// R^T = bD^T J^T of the warp's columns.
template <DType kType, int kK>
__device__ __forceinline__ void make_writes(Shared<kK>& s, int warp, int lane) {
  uint32_t bD[kTiles][4];
  residuals<kType>(s, warp, lane, bD);
  Channels R = {};
  const LowerBlocks J = s.value_side.J;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = m; n < kTiles; ++n) {
      uint32_t b[4];
      J.load_b(16 * n, m, lane, b);
      mma<kType>(R[2 * n], bD[m], b[0], b[1]);
      mma<kType>(R[2 * n + 1], bD[m], b[2], b[3]);
    }
  }
  const SharedTile<kChunkRows> R_rows(s.columns.R);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    uint32_t a[4];
    pack_a<kType>(R[2 * m], R[2 * m + 1], a);
    R_rows.store_a(16 * warp, m, lane, a);
  }
}

// Step 2 ---------------------------------------------------------------------------------------------------------------

// Block (row, column) of P = scale lower(d_o R^T) or of A = slower(Y R^T).
template <DType kType, int kK>
__device__ __forceinline__ void make_pairs(Shared<kK>& s, float scale, int tokens, int kind, int row, int column,
                                           int lane) {
  constexpr int kColumns = Shape<kK>::kColumns;
  const SharedTile<kColumns> d_o(s.d_o);
  const SharedTile<kChunkRows> R(s.columns.R), Y(s.columns.Y);
  float c[2][4] = {};
#pragma unroll 4
  for (int m = 0; m < kColumns / 16; ++m) {
    uint32_t a[4], b[4];
    if (kind == kPairsOfP) {
      d_o.load_a(16 * row, m, lane, a);
    } else {
      Y.load_c_transposed(16 * m, row, lane, a);
    }
    R.load_b_transposed(16 * m, column, lane, b);
    mma<kType>(c[0], a, b[0], b[1]);
    mma<kType>(c[1], a, b[2], b[3]);
  }
  const float factor = kind == kPairsOfP ? scale : 1.0f;
  float* triangle = s.pairs.diagonal[kind][row].data;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = lane / 4 + e / 2 * 8, j = 8 * n + 2 * (lane % 4) + e % 2;
      c[n][e] = 16 * row + i < tokens ? factor * c[n][e] : 0.0f;
      if (row == column && j <= i) triangle[Triangle::row(i) + j] = c[n][e];
    }
  }
  if (row == column) return;
  uint32_t a[4];
  pack_a<kType>(c[0], c[1], a);
  s.pairs.below[kind].block(row, column).store_a(0, 0, lane, a);
}

template <DType kType, int kK>
__device__ __forceinline__ void make_all_pairs(Shared<kK>& s, float scale, int tokens, int warp, int lane) {
  constexpr int kBlocks = kTiles * (kTiles + 1) / 2;
#pragma unroll 1
  for (int at = warp; at < 2 * kBlocks; at += Shape<kK>::kWarps) {
    const int block = at % kBlocks, row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    make_pairs<kType>(s, scale, tokens, at / kBlocks, row, block - row * (row + 1) / 2, lane);
  }
}

// Step 3 ---------------------------------------------------------------------------------------------------------------

// S d_o^T and S Y^T.
template <DType kType, int kK>
__device__ __forceinline__ void read_state(Shared<kK>& s, int warp, int lane, Channels& query, Channels& reader) {
  constexpr int kColumns = Shape<kK>::kColumns;
  const SharedTile<kK> S(s.S);
  const SharedTile<kColumns> d_o(s.d_o);
  const SharedTile<kChunkRows> Y(s.columns.Y);
#pragma unroll 2
  for (int m = 0; m < kColumns / 16; ++m) {
    uint32_t a[4];
    S.load_c_transposed(16 * m, warp, lane, a);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t b[4];
      d_o.load_b(16 * n, m, lane, b);
      mma<kType>(query[2 * n], a, b[0], b[1]);
      mma<kType>(query[2 * n + 1], a, b[2], b[3]);
      Y.load_b_transposed(16 * m, n, lane, b);
      mma<kType>(reader[2 * n], a, b[0], b[1]);
      mma<kType>(reader[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// <S, G> of channels g and g + 8 of the warp's: the diagonal of S G^T.
template <DType kType, int kK>
__device__ __forceinline__ float2 dot_states(Shared<kK>& s, int warp, int lane) {
  const SharedTile<kK> S(s.S), G(s.G);
  float c[2][4] = {};
#pragma unroll 4
  for (int m = 0; m < Shape<kK>::kColumns / 16; ++m) {
    uint32_t a[4], b[4];  // an A fragment of channels by columns is also a B fragment of columns by channels
    S.load_c_transposed(16 * m, warp, lane, a);
    G.load_c_transposed(16 * m, warp, lane, b);
    mma<kType>(c[0], a, b[0], b[2]);
    mma<kType>(c[1], a, b[1], b[3]);
  }
  const int g = lane / 4, source = 4 * g + g / 2;  // has column g of row g
  return make_float2(__shfl_sync(kAllLanes, g % 2 == 0 ? c[0][0] : c[0][1], source),
                     __shfl_sync(kAllLanes, g % 2 == 0 ? c[1][2] : c[1][3], source));
}

// Where the thread's elements of a C tile [16 channels x 8 tokens] lie in a tile of sums.
template <int kK>
struct OwnSums {
  float* low;   // channel g, token 2t
  float* high;  // channel g + 8

  __device__ __forceinline__ OwnSums(float* sums, int warp, int lane) {
    const SumTile<kK> tile{sums};
    low = &tile.at(2 * (lane % 4), 16 * warp + lane / 4);
    high = &tile.at(2 * (lane % 4), 16 * warp + lane / 4 + 8);
  }
  __device__ __forceinline__ float& at(int n, int e) const { return (e < 2 ? low : high)[(8 * n + e % 2) * kK]; }
  __device__ __forceinline__ void store(int n, const float (&x)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) at(n, e) = x[e];
  }
  __device__ __forceinline__ void load(int n, float (&x)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = at(n, e);
  }
};

// G R^T, half of the tokens at a time.
template <DType kType, int kK>
__device__ __forceinline__ void read_gradient(Shared<kK>& s, int warp, int lane) {
  const SharedTile<kK> G(s.G);
  const SharedTile<kChunkRows> R(s.columns.R);
  const OwnSums<kK> writer(s.writer, warp, lane);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float c[4][4] = {};
#pragma unroll 4
    for (int m = 0; m < Shape<kK>::kColumns / 16; ++m) {
      uint32_t a[4];
      G.load_c_transposed(16 * m, warp, lane, a);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t b[4];
        R.load_b_transposed(16 * m, 2 * half + n, lane, b);
        mma<kType>(c[2 * n], a, b[0], b[1]);
        mma<kType>(c[2 * n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) writer.store(4 * half + n, c[n]);
  }
}

// Step 4 ---------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator*(float a, float2 b) { return make_float2(a * b.x, a * b.y); }

// Two elements that lie together, aligned to their size.
template <DType kType>
__device__ __forceinline__ float2 load_pair(const char* address) {
  if constexpr (kType == DType::kF32) {
    return *reinterpret_cast<const float2*>(address);
  } else {
    return unpack<kType>(*reinterpret_cast<const uint32_t*>(address));
  }
}

// exp(g) of the 16 tokens of a tile and two channels; 1 where there is none.
template <int kK>
__device__ __forceinline__ void load_decays(const DeltaRuleDeviceProblem& p, const Item& item, int tile, int channel,
                                            float2 (&decay)[kRows]) {
  const int rows = static_cast<int>(item.span.length) - kRows * tile, count = p.head_dim_k - channel;
  const int64_t base =
      row_offset(p.g, item.span.batch, item.span.begin + kRows * tile, item.head) + channel * p.g.strides[3];
  float rate = 0, bias[2] = {};
  if (p.gate_in_kernel) {
    rate = gate_rate(p, item.head);
    for (int e = 0; e < 2 && e < count; ++e) bias[e] = gate_bias(p, item.head, channel + e);
  }
  with_type(p.g.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const char* at = element_at(p.g.data, kType, base);
    const int64_t step = byte_offset(kType, p.g.strides[1]), other = byte_offset(kType, p.g.strides[3]);
#pragma unroll
    for (int i = 0; i < kRows; ++i, at += step) {
      decay[i] = make_float2(0, 0);
      if (i >= rows || count <= 0) continue;
      if (p.g.aligned_vec4) {
        decay[i] = load_pair<kType>(at);
      } else {
        decay[i].x = load_float(at, kType, 0);
        if (count > 1) decay[i].y = load_float(at + other, kType, 0);
      }
    }
  });
  with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float low = decay_of<kKind>(p, decay[i].x, rate, bias[0]);
      const float high = decay_of<kKind>(p, decay[i].y, rate, bias[1]);
      decay[i] = make_float2(i < rows && count > 0 ? low : 1.0f, i < rows && count > 1 ? high : 1.0f);
    }
  });
}

// The falling rows; the rising ones in place of q and k; the decays of whole tiles.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows(const DeltaRuleDeviceProblem& p, const Item& item, Shared<kK>& s,
                                           int thread) {
  const SharedTile<kK> q(s.rising.q), k(s.rising.k), falling(s.tiles.falling);
  const int tile = thread / (kK / 2), channel = thread % (kK / 2) * 2, top = kRows * tile;
  const auto pair_at = [&](const SharedTile<kK>& rows, int i) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(&rows.at(top + i, channel));
  };
  float2 decay[kRows];
  load_decays<kK>(p, item, tile, channel, decay);
  float2 until = make_float2(1, 1);
#pragma unroll
  for (int i = kRows - 1; i >= 0; --i) {
    const float2 x = until * (s.rstd_k[top + i] * unpack<kType>(pair_at(k, i)));
    pair_at(falling, i) = pack<kType>(x.x, x.y);
    until = until * decay[i];
  }
  float2 since = make_float2(1, 1);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    since = since * decay[i];
    const float2 on_q = s.rstd_q[top + i] * since, on_k = -(s.beta[top + i] * s.rstd_k[top + i]) * since;
    const float2 rising_q = on_q * unpack<kType>(pair_at(q, i)), rising_k = on_k * unpack<kType>(pair_at(k, i));
    pair_at(q, i) = pack<kType>(rising_q.x, rising_q.y);
    pair_at(k, i) = pack<kType>(rising_k.x, rising_k.y);
  }
  *reinterpret_cast<float2*>(&s.total[tile][channel]) = since;
}

// Step 5 ---------------------------------------------------------------------------------------------------------------

// Of channels g and g + 8 of a warp.
using TileTotals = float2[kTiles];

// The decays of the tiles between two.
__device__ __forceinline__ float2 between(const TileTotals& total, int first, int last) {
  float2 product = make_float2(1, 1);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (t > first && t < last) product = product * total[t];
  }
  return product;
}

__device__ __forceinline__ void scale_channels(float2 factor, float (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] *= e < 2 ? factor.x : factor.y;
}

// sum += the products of rows (an A fragment) with sums at the same places, by channel.
template <DType kType>
__device__ __forceinline__ void dot_tokens(const uint32_t (&rows)[4], const float (&left)[4], const float (&right)[4],
                                           float2& sum) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float(&x)[4] = n == 0 ? left : right;
    const float2 low = unpack<kType>(rows[2 * n]), high = unpack<kType>(rows[2 * n + 1]);
    sum.x = fmaf(low.y, x[1], fmaf(low.x, x[0], sum.x));
    sum.y = fmaf(high.y, x[3], fmaf(high.x, x[2], sum.y));
  }
}

// X, in place of S d_o^T and S Y^T. Adds to `over` what the tiles after t read from before t.
template <DType kType, int kK>
__device__ __forceinline__ void add_reads(Shared<kK>& s, float scale, const TileTotals& total, int warp, int lane,
                                          Channels& query, Channels& reader, TileTotals& over) {
  const SharedTile<kK> falling(s.tiles.falling), q(s.rising.q), k(s.rising.k);
  const BelowDiagonal &P = s.pairs.below[kPairsOfP], &A = s.pairs.below[kPairsOfA];
#pragma unroll
  for (int n = 2; n < kChunkRows / 8; ++n) scale_channels(make_float2(scale, scale), query[n]);
#pragma unroll
  for (int row = 1; row < kTiles; ++row) {
#pragma unroll
    for (int column = 0; column < row; ++column) {
      const int left = 2 * row, right = 2 * row + 1;
#pragma unroll
      for (int n = left; n <= right; ++n) {
        scale_channels(total[column], query[n]);
        scale_channels(total[column], reader[n]);
      }
      uint32_t a[4], b[4];  // anew for every column: unpacked and kept they would cost registers
      float2 sum = make_float2(0, 0);
      q.load_c_transposed(16 * row, warp, lane, a);
      dot_tokens<kType>(a, query[left], query[right], sum);
      k.load_c_transposed(16 * row, warp, lane, a);
      dot_tokens<kType>(a, reader[left], reader[right], sum);
      sum = sum * between(total, column, row);
      over[column] = make_float2(over[column].x + sum.x, over[column].y + sum.y);
      falling.load_c_transposed(16 * column, warp, lane, a);
      P.block(row, column).load_b(0, 0, lane, b);
      mma<kType>(query[left], a, b[0], b[1]);
      mma<kType>(query[right], a, b[2], b[3]);
      A.block(row, column).load_b(0, 0, lane, b);
      mma<kType>(reader[left], a, b[0], b[1]);
      mma<kType>(reader[right], a, b[2], b[3]);
    }
  }
}

// F, in place of G R^T. Adds to `over` what the tiles before t wrote to the state after the chunk.
template <DType kType, int kK>
__device__ __forceinline__ void add_writes(Shared<kK>& s, const TileTotals& total, int warp, int lane,
                                           TileTotals& over) {
  const SharedTile<kK> falling(s.tiles.falling), q(s.rising.q), k(s.rising.k);
  const BelowDiagonal &P = s.pairs.below[kPairsOfP], &A = s.pairs.below[kPairsOfA];
  const OwnSums<kK> writer(s.writer, warp, lane);
  float2 written = make_float2(0, 0);
#pragma unroll
  for (int column = 0; column < kTiles - 1; ++column) {
    ChannelTile F;
    writer.load(2 * column, F[0]);
    writer.load(2 * column + 1, F[1]);
    uint32_t a[4], b[4];
    falling.load_c_transposed(16 * column, warp, lane, a);
    float2 sum = make_float2(0, 0);
    dot_tokens<kType>(a, F[0], F[1], sum);
    sum = sum * between(total, column, kTiles);
    written = make_float2(written.x + sum.x, written.y + sum.y);
    over[column + 1] = make_float2(over[column + 1].x + written.x, over[column + 1].y + written.y);
#pragma unroll
    for (int row = kTiles - 1; row > column; --row) {
      scale_channels(total[row], F[0]);
      scale_channels(total[row], F[1]);
      q.load_c_transposed(16 * row, warp, lane, a);
      P.block(row, column).load_b_transposed(0, 0, lane, b);
      mma<kType>(F[0], a, b[0], b[1]);
      mma<kType>(F[1], a, b[2], b[3]);
      k.load_c_transposed(16 * row, warp, lane, a);
      A.block(row, column).load_b_transposed(0, 0, lane, b);
      mma<kType>(F[0], a, b[0], b[1]);
      mma<kType>(F[1], a, b[2], b[3]);
    }
    writer.store(2 * column, F[0]);
    writer.store(2 * column + 1, F[1]);
  }
}

// Both, and `over` with `states`, what passes over the whole chunk.
template <DType kType, int kK>
__device__ __forceinline__ void add_tiles(Shared<kK>& s, float scale, float2 states, int warp, int lane,
                                          Channels& query, Channels& reader) {
  const int channel = 16 * warp + lane / 4;
  TileTotals total, over;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    total[t] = make_float2(s.total[t][channel], s.total[t][channel + 8]);
    over[t] = make_float2(0, 0);
  }
  add_reads<kType>(s, scale, total, warp, lane, query, reader, over);
  add_writes<kType>(s, total, warp, opaque(lane), over);  // addresses are not worth their registers
  __syncwarp();  // all lanes have read the totals
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float low = states.x + sum_over_lanes<4>(over[t].x), high = states.y + sum_over_lanes<4>(over[t].y);
    if (lane % 4 == 0) {
      s.over[t][channel] = low;
      s.over[t][channel + 8] = high;
    }
  }
}

// Step 6 ---------------------------------------------------------------------------------------------------------------

// One channel of a tile of 16 tokens.
struct TileChannel {
  int tile, channel;
  int count;         // tokens that exist; 0 of a channel that does not
  float rate, bias;  // of the gate
};

template <int kK>
__device__ __forceinline__ TileChannel tile_channel(const DeltaRuleDeviceProblem& p, const Item& item, int at) {
  TileChannel own{at / kK, at % kK, 0, 0.0f, 0.0f};
  if (own.channel < p.head_dim_k) own.count = static_cast<int>(item.span.length) - kRows * own.tile;
  if (p.gate_in_kernel) {
    own.rate = gate_rate(p, item.head);
    if (own.channel < p.head_dim_k) own.bias = gate_bias(p, item.head, own.channel);
  }
  return own;
}

// The offset of the channel's element of the first token.
__device__ __forceinline__ int64_t start_of(const DeviceTensor& x, const Item& item, int head, const TileChannel& own) {
  return row_offset(x, item.span.batch, item.span.begin + kRows * own.tile, head) + own.channel * x.strides[3];
}

// What the gate tensor holds; 0 where there is nothing.
__device__ __forceinline__ void load_gates(const DeltaRuleDeviceProblem& p, const Item& item, const TileChannel& own,
                                           float (&x)[kRows]) {
  with_type(p.g.dtype, [&](auto type) {
    constexpr DType kGate = decltype(type)::value;
    const char* g = element_at(p.g.data, kGate, start_of(p.g, item, item.head, own));
    const int64_t step = byte_offset(kGate, p.g.strides[1]);
#pragma unroll
    for (int i = 0; i < kRows; ++i, g += step) x[i] = i < own.count ? load_float(g, kGate, 0) : 0.0f;
  });
}

// q or k, normalised.
template <DType kType>
__device__ __forceinline__ void load_keys(const DeviceTensor& x, const Item& item, const TileChannel& own,
                                          const float* rstd, float (&values)[kRows]) {
  const auto* from = static_cast<const uint16_t*>(x.data) + start_of(x, item, item.key_head, own);
  const int64_t step = x.strides[1];
#pragma unroll
  for (int i = 0; i < kRows; ++i, from += step) {
    const uint32_t bits = i < own.count ? *from : 0;
    values[i] = rstd[kRows * own.tile + i] * decode(bits, kType);
  }
}

// The walk over the pairs of a tile: dg, and in the tiles of sums dq, dk and the terms of dbeta.
template <int kK>
__device__ __forceinline__ void walk_pairs(Shared<kK>& s, const TileChannel& own, const float (&q)[kRows],
                                           const float (&k)[kRows], const float (&decay)[kRows], float (&dg)[kRows]) {
  const SumTile<kK> query{s.query}, reader{s.reader}, writer{s.writer};
  const Triangle &P = s.pairs.diagonal[kPairsOfP][own.tile], &A = s.pairs.diagonal[kPairsOfA][own.tile];
  const int top = kRows * own.tile, channel = own.channel;
  float factor[kRows], dk[kRows];  // exp(gamma_i - gamma_j)
  float rise = 1;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float beta_k = -s.beta[top + i] * k[i];
    rise *= decay[i];
    float dq = rise * query.at(top + i, channel), read = rise * reader.at(top + i, channel);
    float crossing = fmaf(beta_k, read, q[i] * dq);  // the sum of M_ij' over j' < j, those before the tile among them
    float P_i[kRows], A_i[kRows];
    P.load(i, i + 1, P_i);
    A.load(i, i, A_i);
#pragma unroll
    for (int j = 0; j < i; ++j) {
      dg[j] += crossing;
      factor[j] *= decay[i];
      const float key = factor[j] * k[j], x = fmaf(A_i[j], beta_k, P_i[j] * q[i]);
      dq = fmaf(P_i[j], key, dq);
      read = fmaf(A_i[j], key, read);
      dk[j] = fmaf(factor[j], x, dk[j]);
      crossing = fmaf(key, x, crossing);
    }
    dg[i] = crossing;
    factor[i] = 1;
    dk[i] = fmaf(P_i[i], q[i], -s.beta[top + i] * read);
    query.at(top + i, channel) = fmaf(P_i[i], k[i], dq);
    reader.at(top + i, channel) = -k[i] * read;
  }
  float crossing = s.over[own.tile][channel];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    float& sum = writer.at(top + j, channel);
    const float write = factor[j] * sum;
    dg[j] += crossing;
    crossing = fmaf(k[j], write, crossing);
    sum = dk[j] + write;
  }
}

// From dg to the gradient of what the gate tensor holds, and the tile's share of the gate's parameters.
template <int kK>
__device__ __forceinline__ void store_gates(const GradientArgs& args, const Item& item, Shared<kK>& s,
                                            const TileChannel& own, float (&dg)[kRows]) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const DeviceTensor& out = args.dg;
  const int64_t start = start_of(out, item, item.head, own);
  float bias_sum = 0, a_log_sum = 0;
  with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
    float x[kRows] = {};
    if (kKind != GateKind::kGiven) load_gates(p, item, own, x);  // again: kept, they would cost registers
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const GateGradient d = gate_adjoint<kKind>(p, x[i], own.rate, own.bias, dg[i]);
      dg[i] = d.x;
      bias_sum += i < own.count ? d.x : 0.0f;
      a_log_sum += i < own.count ? d.a_log : 0.0f;
    }
  });
  if (out.present()) {
    with_type(out.dtype, [&](auto type) {
      char* to = element_at(out.data, type.value, start);
      const int64_t step = byte_offset(type.value, out.strides[1]);
#pragma unroll
      for (int i = 0; i < kRows; ++i, to += step) {
        if (i < own.count) store_float(to, type.value, 0, dg[i]);
      }
    });
  }
  if (args.parameter_parts == nullptr) return;
  s.bias[own.tile][own.channel] = bias_sum;
  a_log_sum = sum_over_lanes<kWarpSize>(a_log_sum);
  if (own.channel % kWarpSize == 0) s.a_log[(own.tile * kK + own.channel) / kWarpSize] = a_log_sum;
}

// dg over the ranges of columns of a head: of all but the last, kept for the next.
template <int kK>
__device__ __forceinline__ void carry_gates(const GradientArgs& args, const Item& item, const TileChannel& own,
                                            float (&dg)[kRows]) {
  if (item.opens && item.closes) return;
  const int64_t sums = blockIdx.x * int64_t{kKeySumsPerChannel} + 2;
  float* slot = args.key_sums + (sums * kChunkRows + kRows * own.tile) * kK + own.channel;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (!item.opens) dg[i] += slot[i * kK];
    if (!item.closes) slot[i * kK] = dg[i];
  }
}

template <DType kType, int kK>
__device__ __forceinline__ void walk_tile(const GradientArgs& args, const Item& item, Shared<kK>& s, int at) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const TileChannel own = tile_channel<kK>(p, item, at);
  float q[kRows], k[kRows], decay[kRows], dg[kRows];
  load_gates(p, item, own, decay);
  load_keys<kType>(p.q, item, own, s.rstd_q, q);
  load_keys<kType>(p.k, item, own, s.rstd_k, k);
  with_gate_kind(p, [&](auto kind) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float value = decay_of<decltype(kind)::value>(p, decay[i], own.rate, own.bias);
      decay[i] = i < own.count ? value : 1.0f;
    }
  });
  walk_pairs(s, own, q, k, decay, dg);
  carry_gates<kK>(args, item, own, dg);
  if (item.closes) store_gates(args, item, s, own, dg);
}

// The chunk's share of dA_log and ddt_bias.
template <int kK>
__device__ __forceinline__ void store_parameters(const GradientArgs& args, const Item& item, const Shared<kK>& s,
                                                 int thread) {
  const int K = args.chunk.problem.head_dim_k, channel = thread;
  double* parts = args.parameter_parts + item.at * (1 + K);
  if (channel < K) {
    double sum = 0;
    for (int t = 0; t < kTiles; ++t) sum += s.bias[t][channel];
    parts[1 + channel] = sum;
  }
  if (thread == Shape<kK>::kThreads - 1) {
    double sum = 0;
    for (const float part : s.a_log) sum += part;
    parts[0] = sum;
  }
}

// Step 7 ---------------------------------------------------------------------------------------------------------------

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

  __device__ __forceinline__ void store(const DeviceTensor& out, bool vectors, const Sums& y) const {
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
#pragma unroll
    for (int n = 0; n < Lanes::kEights; ++n) {
      const int channel = own.channel(n);
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const int64_t offset = start + (channel + e) * out.strides[3];
        if (channel + e >= K) continue;
        if (out.aligned_vec4) {
          with_type(out.dtype, [&](auto type) {
            store_vec4<type.value>(element_at(out.data, type.value, offset), &y[n][e]);
          });
        } else {
          scatter_vec4(out.data, out.dtype, offset, out.strides[3], K - channel - e, &y[n][e]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(float* sums, int which, const DeviceTensor& x, const float* rstd,
                                         const DeviceTensor& out, bool vectors) const {
    if (!out.present()) return;
    Sums y;
    if (!add_up(sums, which, y)) return;
    if (args.chunk.problem.qk_l2norm) through_norm(x, rstd[own.row], y);
    store(out, vectors, y);
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
    for (int e = 0; e < 8; ++e) sum += x[e];
  }
  sum = s.dbeta[own.row] + sum_over_lanes<TokenLanes<kK>::kLanes>(sum);
  if (own.lane != 0) return;
  s.dbeta[own.row] = sum;
  if (!item.closes || own.row >= item.span.length) return;
  const DeviceTensor& out = args.dbeta;
  store_float(out.data, out.dtype, row_offset(out, item.span.batch, item.span.begin + own.row, item.head),
              beta_adjoint(args.chunk.problem, s.beta[own.row], sum));
}

// The kernel -----------------------------------------------------------------------------------------------------------

template <DType kType, int kK>
struct Gradients {
  using X = Shape<kK>;

  const GradientArgs& args;
  Shared<kK>& s;

  // Asked for by every step: what is computed from it is not kept from one to the next.
  __device__ __forceinline__ static int thread_index() { return opaque(static_cast<int>(threadIdx.x)); }

  // Steps 1 and 2: afterwards d_o is where the reader was, and the pairs are where J was.
  __device__ __forceinline__ void pair_gradients() const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const Item& item = s.item;
    int thread = thread_index();
    if (thread / kWarpSize < X::kColumns / 16) make_writes<kType>(s, thread / kWarpSize, thread % kWarpSize);
    __syncthreads();
    thread = thread_index();
    load_value_rows<X::kThreads>(SharedTile<X::kColumns>(s.d_o), args.d_o, args.vector_d_o, item, p.head_dim_v, thread);
    commit_copies();
    if (thread < kChunkRows) {
      float sum = 0;
      for (const auto& yv : s.value_side.yv) sum += yv[thread];
      s.dbeta[thread] += sum;
    }
    wait_copies<0>();
    __syncthreads();
    thread = thread_index();
    make_all_pairs<kType>(s, p.scale, static_cast<int>(item.span.length), thread / kWarpSize, thread % kWarpSize);
  }

  // Step 3. Returns e_n <S, G> of the lane's channels.
  __device__ __forceinline__ float2 state_products(Channels& query, Channels& reader) const {
    const Item& item = s.item;
    int thread = thread_index(), warp = thread / kWarpSize, lane = thread % kWarpSize;
    read_state<kType>(s, warp, lane, query, reader);
    __syncthreads();
    thread = thread_index(), warp = thread / kWarpSize, lane = thread % kWarpSize;
    copy_rows<X::kColumns, X::kThreads>(SharedTile<kK>(s.G), args.G + (item.at * args.padded_v + item.column) * kK, kK,
                                        args.padded_v - item.column, kK, thread);
    commit_copies();
    const float* total = args.chunk.factors.total + item.at * kK + 16 * warp + lane / 4;
    const float2 e_n = make_float2(total[0], total[8]);
    wait_copies<0>();
    __syncthreads();
    const float2 states = dot_states<kType>(s, warp, lane);
    __syncthreads();
    read_gradient<kType>(s, warp, lane);
    return e_n * states;
  }

  // The sums of the first tile to shared memory, or back.
  template <bool kStore>
  __device__ __forceinline__ void exchange_first(int thread, Channels& query, Channels& reader) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &kept_query = s.tiles.first[n][e][thread], &kept_reader = s.tiles.first[2 + n][e][thread];
        if constexpr (kStore) {
          kept_query = args.chunk.problem.scale * query[n][e];
          kept_reader = reader[n][e];
        } else {
          query[n][e] = kept_query;
          reader[n][e] = kept_reader;
        }
      }
    }
  }

  // Steps 4 and 5, X in registers on return.
  __device__ __forceinline__ void tile_products(float2 states, Channels& query, Channels& reader) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const Item& item = s.item;
    const auto load = [&](const DeviceTensor& x, uint16_t* rows, int thread) {
      const auto* start = static_cast<const uint16_t*>(x.data) + row_offset(x, item.span.batch, item.span.begin, item.key_head);
      load_rows<kChunkRows, X::kThreads>(SharedTile<kK>(rows), x, start, static_cast<int>(item.span.length), 0,
                                         p.head_dim_k, args.chunk.vector_keys, thread);
    };
    int thread = thread_index();
    exchange_first<true>(thread, query, reader);
    load(p.q, s.rising.q, thread);
    load(p.k, s.rising.k, thread);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    scale_rows<kType>(p, item, s, thread_index());
    __syncthreads();
    thread = thread_index();
    add_tiles<kType>(s, p.scale, states, thread / kWarpSize, thread % kWarpSize, query, reader);
    exchange_first<false>(thread, query, reader);
  }

  // Steps 1 to 5.
  __device__ __forceinline__ void make_sums() const {
    pair_gradients();
    Channels query = {}, reader = {};
    const float2 states = state_products(query, reader);
    __syncthreads();
    tile_products(states, query, reader);
    __syncthreads();
    const int thread = thread_index(), warp = thread / kWarpSize, lane = thread % kWarpSize;
    const OwnSums<kK> own_query(s.query, warp, lane), own_reader(s.reader, warp, lane);
#pragma unroll
    for (int n = 0; n < kChunkRows / 8; ++n) {
      own_query.store(n, query[n]);
      own_reader.store(n, reader[n]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run(const Item& next) const {
    if (threadIdx.x == 0) s.item = next;
    load_first(args, next, s, thread_index());
    wait_copies<0>();
    __syncthreads();
    make_sums();
    const Item& item = s.item;
#pragma unroll 1
    for (int at = thread_index(); at < kTiles * kK; at += X::kThreads) {
      walk_tile<kType>(args, item, s, at);
    }
    __syncthreads();
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const int thread = thread_index();
    const TokenLanes<kK> own(thread);
    const KeyRows<kType, kK> rows{args, item, own};
    rows.finish(s.query, 0, p.q, s.rstd_q, args.dq, args.vector_dq);
    rows.finish(s.writer, 1, p.k, s.rstd_k, args.dk, args.vector_dk);
    finish_beta(args, item, s, own);
    if (args.parameter_parts != nullptr && item.closes) store_parameters(args, item, s, thread);
  }
};

template <DType kType, int kK>
__global__ void __launch_bounds__(Shape<kK>::kThreads, Shape<kK>::kBlocksOfSM)
    channel_gradients_kernel(const __grid_constant__ GradientArgs args) {
  wait_for_previous_kernels();
  const Gradients<kType, kK> gradients{args, dynamic_shared<Shared<kK>>()};
  for_each_item<Shape<kK>::kColumns>(args, [&](const Item& item) { gradients.run(item); });
}

}  // namespace

template <DType kType>
void launch_gradients_per_channel(const GradientArgs& args, int padded_k, int64_t blocks, const Context& context) {
  with_padded_k(padded_k, [&]<int kK>() {
    launch<channel_gradients_kernel<kType, kK>>(
        "delta_rule chunk_16bit gradients per channel", context,
        {static_cast<unsigned>(blocks), Shape<kK>::kThreads, sizeof(Shared<kK>), true}, args);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
