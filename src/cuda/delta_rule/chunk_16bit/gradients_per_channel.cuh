// The gradients of every chunk with one decay per key channel. See gradient.cuh for the equations.
//
// A pair of tokens i >= j has the factor exp(gamma_i - gamma_j) in every channel, a product of the decays of single
// tokens as in factors_per_channel.cu. A chunk is four tiles of 16 tokens; rise_i is the product of the decays from the
// start of i's tile through i, fall_j of those after j to the end of j's tile, total_t of all of a tile. The products
// between tiles are made on tensor cores, and scaled by channels in their fp32 sums:
//
//     X_i = (..((d_o S^T)_i total_0 + P_i0 (fall k)_0) total_1 + ..)     what q_i reads from outside its tile, over
//                                                                       rise_i; the reader likewise, with Y S^T and A
//     F_j = (..((R G^T)_j total_3 + P_3j^T (rise q)_3 + A_3j^T (rise k)_3) total_2 + ..)
//                                                                       what k_j writes to outside, over fall_j
//
// with P = scale dP, A = -dA and -beta rise k for the reader's rise k. Of dg, what passes over all tokens of a tile is
//
//     over_t = sum of M_ij over the tiles I > t > J, with the state before as a J and the state after as an I:
//
// X after the factor total_t, times rise x.
//
// A tile is mild if no decay of a token is below 2^-7.5 and no total_t below 2^-117 (fp16: 2^-4), in any channel. Its
// own pairs i > j are then one more step of the sums, on tensor cores, and fall_j is total_t / rise_j:
//
//     X'_i = X_i total_t + P_tt (fall k)_t            dq_i = rise_i / total_t X'_i + P_ii k_i
//     F'_j = F_j total_t + P_tt^T (rise q)_t + ..     dk_j = F'_j / rise_j + P_jj q_j - beta_j (rise / total X')_j
//
// and dg of the tile follows from its sums,
//
//     dg_m+1 = dg_m + fall_m k_m F'_m / total_t - rise_m x_m X'_m / total_t
//
// where dg of the first token is over_t and all that the tile reads from before it. Both terms are made of the rounded
// operands, fall k and rise x, so that the term M_ij of a pair goes as it came but for the rounding of fp32 sums: dg_m
// has an error of some 2^-22 of the terms that pass the tile. Those that exp(g_m) multiplies are not smaller than
// 2^-7.5 of such terms, unless the keys make them so: the error stays below that of the operands.
//
// The other tiles are strong, those with a NaN among them. Their pairs are walked in fp32 by a thread per channel, down
// the rows i, with exp(gamma_i - gamma_j) of all j < i in registers:
//
//     dq_i = rise_i X_i + pairs,     dk_j = fall_j F_j + pairs - beta_j (rise_j X_j + pairs)
//
// The same walk sums dg of its own terms: rise_i X_i belongs to pairs of i and something before the tile, fall_j F_j to
// pairs of something after it and j. Every term of dg_m is one that exp(g_m) multiplies, and no quotient of decays is
// formed: any gate is safe, at the precision of the operands.
//
// A block has K / 16 warps. In steps 1 to 5 channels, or value columns, are the rows of the products and tokens their
// columns.
//
//     1   a warp has 16 value columns: R^T = bD^T J^T
//     2   blocks of 16 x 16 of P and A, dealt to the warps: rounded to operands, the diagonal of P in fp32
//     3   a warp has 16 channels: S d_o^T and S Y^T in registers, <S, G>, and G R^T
//     4   a thread has two channels of a tile: the rising and falling rows
//     5   a warp has 16 channels: X, F and over
//     6   a thread has two channels of a mild tile, or a channel of a strong one: dg, and what makes dq, dk and dbeta
//     7   some threads have a token: the adjoints of the norms, dq, dk, dbeta
//
// Three tiles of [64 x K] numbers, fp32 in the end, hold all operands one after the other: two blocks of K = 128 fit a
// multiprocessor of Hopper, one of which computes while the other waits.
#pragma once

#include <algorithm>
#include <type_traits>

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

// Columns [16 m, 16 m + 16) of a SharedTile, as its first. For an m that is known at run time and rows that are known
// before: their addresses differ by constants.
template <int kColumns>
struct TileColumns : TileFragments<TileColumns<kColumns>> {
  uint32_t start;
  int m;

  __device__ __forceinline__ TileColumns(const uint16_t* tile, int block) : start(shared_address(tile)), m(block) {}
  __device__ __forceinline__ uint32_t address(int row, int, int h) const {
    return start + 2 * static_cast<uint32_t>(SharedTile<kColumns>::offset(row, 2 * m + h));
  }
};

// A block of 16 x 16 elements, by LowerBlocks' rules. Blocks of a matrix differ by constants.
struct PairBlock : TileFragments<PairBlock> {
  static constexpr int kElements = 256;

  uint32_t start;

  __device__ __forceinline__ explicit PairBlock(const uint16_t* memory) : start(shared_address(memory)) {}
  __device__ __forceinline__ uint32_t address(int row, int, int h) const {
    return start + static_cast<uint32_t>(32 * row + ((h ^ row >> 2) & 1) * 16);
  }
};

// The blocks on and below the diagonal of a strictly lower triangular matrix [64 x 64].
struct PairBlocks {
  uint16_t data[kTiles * (kTiles + 1) / 2][PairBlock::kElements];

  __device__ __forceinline__ PairBlock block(int row, int column) const {
    return PairBlock(data[row * (row + 1) / 2 + column]);
  }
  // The first `count` elements of row i of the tile's block on the diagonal, and what fills the last eight.
  template <DType kType>
  __device__ __forceinline__ void load_row(int tile, int i, int count, float (&x)[kRows]) const {
    const uint16_t* row = data[tile * (tile + 3) / 2] + kRows * i;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (8 * h >= count) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(row + ((h ^ i >> 2) & 1) * 8);
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 values = unpack<kType>(pairs[e]);
        x[8 * h + 2 * e] = values.x, x[8 * h + 2 * e + 1] = values.y;
      }
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
    } first;                  // step 1
    alignas(128) Values d_o;  // steps 2 and 3
    alignas(128) State G;     // step 3
    struct {
      alignas(128) Keys falling;
      float first[4][4][Shape<kK>::kThreads];  // sums of the first tile, which add_tiles leaves alone, out of registers
    } tiles;                                   // steps 4 and 5
    alignas(128) Sums query;                   // step 6: X of q, then dq
  };
  union {
    struct {
      alignas(128) Values R, Y;  // transposed: steps 1 to 3
    } columns;
    struct {
      alignas(128) Keys q, k;  // rising: steps 4 and 5
    } rising;
    alignas(128) Sums reader;  // step 6: X of the reader, then the terms of -dbeta
  };
  union {
    struct {
      alignas(128) uint16_t J[LowerBlocks::kElements];
      float yv[kColumns / 16][kChunkRows];  // Y . v of the warps' columns
    } value_side;                           // step 1
    struct {
      alignas(128) PairBlocks blocks[2];       // by PairKind
      alignas(16) float diagonal[kChunkRows];  // of P
    } pairs;                                   // from step 2 on
  };
  alignas(16) float total[kTiles][kK];
  union {
    alignas(16) float over[kTiles][kK];  // steps 5 and 6; of a mild tile with what the tile reads from before it
    alignas(16) float bias[kTiles][kK];  // from step 6 on: the tile's share of ddt_bias
  };
  float a_log[kTiles * kK / kWarpSize];  // the share of dA_log of the warps' tiles and channels
  alignas(16) float beta[kChunkRows], rstd_q[kChunkRows], rstd_k[kChunkRows];
  float dbeta[kChunkRows];  // over the ranges of columns
  // Whether a tile is strong by the warps that have its channels: together a word, not 0 if any says so.
  using StrongPart = std::conditional_t<kK == 64, uint32_t, std::conditional_t<kK == 128, uint16_t, uint8_t>>;
  alignas(16) StrongPart strong[kTiles][kK / 64];
  Item items[2];  // the one at hand and the next; here they take no registers

  __device__ __forceinline__ bool is_strong(int tile) const {
    return *reinterpret_cast<const uint32_t*>(strong[tile]) != 0;
  }
};

// [16 channels x 64 tokens] as C tiles.
using Channels = float[kChunkRows / 8][4];
// The same in tiles of tokens.
using ChannelTile = float[2][4];
using TileSums = ChannelTile[kTiles];

// Loads ---------------------------------------------------------------------------------------------------------------

// What step 1 needs, and Y, in three parts: as their places become free. The caller commits the copies.
template <int kK>
__device__ __forceinline__ void load_state(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  copy_rows<X::kColumns, X::kThreads>(SharedTile<kK>(s.S), state_before(args, item), args.S.v_stride,
                                      args.chunk.problem.head_dim_v - item.column, args.S_width, thread);
}

template <int kK>
__device__ __forceinline__ void load_values(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const ChunkFactors& factors = args.chunk.factors;
  copy_rows<kChunkRows, X::kThreads>(SharedTile<kK>(s.first.reader),
                                     factors.keys + (item.at * kKeyCopies + kReader) * kChunkRows * kK, kK, kChunkRows,
                                     kK, thread);
  load_value_rows<X::kThreads>(SharedTile<X::kColumns>(s.first.v), p.v, args.chunk.vector_values, item, p.head_dim_v,
                               thread);
  copy_lower_blocks<X::kThreads>(s.value_side.J, factors.J + item.at * kChunkRows * kChunkRows, thread);
}

template <int kK>
__device__ __forceinline__ void load_columns(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  copy_rows<X::kColumns, X::kThreads>(SharedTile<kChunkRows>(s.columns.Y),
                                      args.Y + (item.at * args.padded_v + item.column) * kChunkRows, kChunkRows,
                                      args.padded_v - item.column, kChunkRows, thread);
  if (thread >= kChunkRows) return;
  const ChunkFactors& factors = args.chunk.factors;
  const float* row = factors.row + item.at * kRowNumbers * kChunkRows + thread;
  s.rstd_q[thread] = row[kRstdOfQ * kChunkRows];
  s.rstd_k[thread] = row[kRstdOfK * kChunkRows];
  s.beta[thread] = factors.token[item.at * kChunkRows + thread];
  if (item.opens) s.dbeta[thread] = 0;
}

// Columns [first, end) of the tokens' rows at `head`, to the L2 cache.
template <int kThreads>
__device__ __forceinline__ void prefetch_rows(const DeviceTensor& x, const Item& item, int head, int first, int end,
                                              int thread) {
  if (!x.present()) return;
  const int line = 128 / static_cast<int>(byte_offset(x.dtype, 1));
#pragma unroll 1
  for (int row = thread; row < item.span.length; row += kThreads) {
    const int64_t start = row_offset(x, item.span.batch, item.span.begin + row, head);
#pragma unroll 1
    for (int at = first; at < end; at += line) {
      prefetch(element_at(static_cast<const char*>(x.data), x.dtype, start + at * x.strides[3]));
    }
  }
}

// What is loaded in the midst of an item: a quarter of the warps each has a tensor, and all have G.
template <int kK>
__device__ __forceinline__ void prefetch_operands(const GradientArgs& args, const Item& item, int thread) {
  constexpr int kThreads = Shape<kK>::kThreads, kQuarter = kThreads / 4, kColumns = Shape<kK>::kColumns;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const int quarter = uniform_warp() / (Shape<kK>::kWarps / 4), own = thread % kQuarter;
  if (quarter == 0) {
    prefetch_rows<kQuarter>(args.d_o, item, item.head, item.column, min(p.head_dim_v, item.column + kColumns), own);
  } else if (quarter == 1) {
    prefetch_rows<kQuarter>(p.g, item, item.head, 0, p.head_dim_k, own);
  } else if (quarter == 2) {
    prefetch_rows<kQuarter>(p.q, item, item.key_head, 0, p.head_dim_k, own);
  } else {
    prefetch_rows<kQuarter>(p.k, item, item.key_head, 0, p.head_dim_k, own);
  }
  const uint16_t* G = args.G + (item.at * args.padded_v + item.column) * kK;
  const int lines = min(kColumns, args.padded_v - item.column) * (kK / 64);
#pragma unroll 1
  for (int at = thread; at < lines; at += kThreads) prefetch(G + 64 * at);
}

// The gate, as token.cuh and adjoints.cuh have it, by the special function unit: this kernel needs each decay twice.
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// 1 / (1 + 2^x)
__device__ __forceinline__ float sigmoid_of_log2(float x) { return reciprocal_approx(1.0f + exp2_approx(x)); }

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

// exp(g) of what the gate tensor holds, and what dg is multiplied with: for the gradient of that, and for the element's
// term of dA_log.
struct Gate {
  float decay, dx, a_log;
};

template <GateKind kKind>
__device__ __forceinline__ Gate gate_of(const DeltaRuleDeviceProblem& p, float x, float rate, float bias) {
  const float z = x + bias;
  if constexpr (kKind == GateKind::kBounded) {
    const float y = sigmoid_of_log2((-kLog2E * rate) * z), dx = (p.lower_bound * rate) * fmaf(-y, y, y);
    return {exp2_approx((kLog2E * p.lower_bound) * y), dx, dx * z};
  } else if constexpr (kKind == GateKind::kSoftplus) {
    const float g = -rate * softplus_approx(z);
    return {exp2_approx(kLog2E * g), -rate * sigmoid_of_log2(-kLog2E * z), g};
  } else {
    return {exp2_approx(kLog2E * x), 1, 0};
  }
}

// Step 1 --------------------------------------------------------------------------------------------------------------

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
  const SharedTile<kK> S(s.S);
  const TileColumns<Shape<kK>::kColumns> values(s.first.v, warp);
  const SharedTile<kChunkRows> Y_rows(s.columns.Y);
#pragma unroll 4
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[4];
    S.load_a(16 * warp, m, lane, a);
    const TileColumns<kK> reader(s.first.reader, m);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t b[4];
      reader.load_b(16 * n, 0, lane, b);
      mma<kType>(X[2 * n], a, b[0], b[1]);
      mma<kType>(X[2 * n + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    uint32_t v_pairs[4], Y_pairs[4];
    values.load_c_transposed(16 * m, 0, lane, v_pairs);
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

// Step 2 --------------------------------------------------------------------------------------------------------------

// Block (row, column) of P = scale lower(d_o R^T) or of A = slower(Y R^T).
template <DType kType, int kK>
__device__ __forceinline__ void make_pairs(Shared<kK>& s, float scale, int tokens, int kind, int row, int column,
                                           int lane) {
  constexpr int kColumns = Shape<kK>::kColumns;
  const SharedTile<kChunkRows> R(s.columns.R);
  float c[2][4] = {};
  const auto add = [&](int m, const uint32_t(&a)[4]) {
    uint32_t b[4];
    R.load_b_transposed(16 * m, column, lane, b);
    mma<kType>(c[0], a, b[0], b[1]);
    mma<kType>(c[1], a, b[2], b[3]);
  };
  uint32_t a[4];
  if (kind == kPairsOfP) {
#pragma unroll
    for (int m = 0; m < kColumns / 16; ++m) {
      SharedTile<kColumns>(s.d_o).load_a(16 * row, m, lane, a);
      add(m, a);
    }
  } else {
#pragma unroll
    for (int m = 0; m < kColumns / 16; ++m) {
      SharedTile<kChunkRows>(s.columns.Y).load_c_transposed(16 * m, row, lane, a);
      add(m, a);
    }
  }
  const float factor = kind == kPairsOfP ? scale : 1.0f;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = lane / 4 + e / 2 * 8, j = 8 * n + 2 * (lane % 4) + e % 2;
      c[n][e] = 16 * row + i < tokens ? factor * c[n][e] : 0.0f;
      if (row != column) continue;
      if (kind == kPairsOfP && i == j) s.pairs.diagonal[16 * row + i] = c[n][e];
      if (i <= j) c[n][e] = 0;
    }
  }
  pack_a<kType>(c[0], c[1], a);
  s.pairs.blocks[kind].block(row, column).store_a(0, 0, lane, a);
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

// Step 3 --------------------------------------------------------------------------------------------------------------

// S d_o^T and S Y^T.
template <DType kType, int kK>
__device__ __forceinline__ void read_state(Shared<kK>& s, int warp, int lane, TileSums& query, TileSums& reader) {
  constexpr int kColumns = Shape<kK>::kColumns;
  const TileColumns<kK> S(s.S, warp);
  const SharedTile<kColumns> d_o(s.d_o);
  const SharedTile<kChunkRows> Y(s.columns.Y);
#pragma unroll
  for (int m = 0; m < kColumns / 16; ++m) {
    uint32_t a[4];
    S.load_c_transposed(16 * m, 0, lane, a);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t b[4];
      d_o.load_b(16 * n, m, lane, b);
      mma<kType>(query[n][0], a, b[0], b[1]);
      mma<kType>(query[n][1], a, b[2], b[3]);
      Y.load_b_transposed(16 * m, n, lane, b);
      mma<kType>(reader[n][0], a, b[0], b[1]);
      mma<kType>(reader[n][1], a, b[2], b[3]);
    }
  }
}

// <S, G> of channels g and g + 8 of the warp's: the diagonal of S G^T.
template <DType kType, int kK>
__device__ __forceinline__ float2 dot_states(Shared<kK>& s, int warp, int lane) {
  const TileColumns<kK> S(s.S, warp), G(s.G, warp);
  float c[2][4] = {};
#pragma unroll 4
  for (int m = 0; m < Shape<kK>::kColumns / 16; ++m) {
    uint32_t a[4], b[4];  // an A fragment of channels by columns is also a B fragment of columns by channels
    S.load_c_transposed(16 * m, 0, lane, a);
    G.load_c_transposed(16 * m, 0, lane, b);
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
  const TileColumns<kK> G(s.G, warp);
  const SharedTile<kChunkRows> R(s.columns.R);
  const OwnSums<kK> writer(s.writer, warp, lane);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float c[4][4] = {};
#pragma unroll
    for (int m = 0; m < Shape<kK>::kColumns / 16; ++m) {
      uint32_t a[4];
      G.load_c_transposed(16 * m, 0, lane, a);
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

// Step 4 --------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator*(float a, float2 b) { return make_float2(a * b.x, a * b.y); }

// Two channels of a tile of 16 tokens.
struct ChannelPair {
  int tile, channel;
  int rows;     // tokens of the tile that exist, or more
  int columns;  // channels that exist, or more; none below 1
  float rate;   // of the gate
  float2 bias;
};

template <int kK>
__device__ __forceinline__ ChannelPair channel_pair(const DeltaRuleDeviceProblem& p, const Item& item, int thread) {
  ChannelPair own{thread / (kK / 2), thread % (kK / 2) * 2, 0, 0, 0.0f, make_float2(0, 0)};
  own.rows = static_cast<int>(item.span.length) - kRows * own.tile;
  own.columns = p.head_dim_k - own.channel;
  if (p.gate_in_kernel) {
    own.rate = gate_rate(p, item.head);
    if (own.columns > 0) own.bias.x = gate_bias(p, item.head, own.channel);
    if (own.columns > 1) own.bias.y = gate_bias(p, item.head, own.channel + 1);
  }
  return own;
}

// The pair's elements of a tensor, from the first token of the tile on.
struct PairRows {
  char* at;
  int64_t step, other;  // bytes to the next token, to the other channel
  DType dtype;
  bool together;

  __device__ __forceinline__ PairRows(const DeviceTensor& x, DType type, const Item& item, int head,
                                      const ChannelPair& own)
      : step(byte_offset(type, x.strides[1])),
        other(byte_offset(type, x.strides[3])),
        dtype(type),
        together(x.aligned_vec4) {
    const int64_t row = row_offset(x, item.span.batch, item.span.begin + kRows * own.tile, head);
    at = opaque(element_at(static_cast<char*>(x.data), type, row + own.channel * x.strides[3]));
  }

  // The elements of the next kCount tokens, as they lie in memory: two words, or one of two elements. 0 where there is
  // nothing: beyond `rows` tokens or `columns` channels.
  template <int kCount>
  __device__ __forceinline__ void load(int rows, int columns, uint2 (&words)[kCount]) {
    const int count = columns > 0 ? rows : 0;
    if (count < kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[i] = make_uint2(0, 0);
    }
    if (together && dtype == DType::kF32) {
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i < count) words[i] = *reinterpret_cast<const uint2*>(at);
      }
    } else if (together) {
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i < count) words[i].x = *reinterpret_cast<const uint32_t*>(at);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i >= count) continue;
        const uint32_t low = load_bits(at, dtype), high = columns > 1 ? load_bits(at + other, dtype) : 0;
        words[i] = dtype == DType::kF32 ? make_uint2(low, high) : make_uint2(low | high << 16, 0);
      }
    }
  }

  // To the next kCount tokens.
  template <int kCount>
  __device__ __forceinline__ void store(int rows, int columns, const float2 (&x)[kCount]) {
    const int count = columns > 0 ? rows : 0;
    with_type(dtype, [&](auto type) {
      constexpr DType kType = decltype(type)::value;
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i >= count) continue;
        if (!together) {
          store_float(at, kType, 0, x[i].x);
          if (columns > 1) store_float(at + other, kType, 0, x[i].y);
        } else if constexpr (kType == DType::kF32) {
          *reinterpret_cast<float2*>(at) = x[i];
        } else {
          *reinterpret_cast<uint32_t*>(at) = pack<kType>(x[i].x, x[i].y);
        }
      }
    });
  }
};

template <int kCount>
__device__ __forceinline__ void decode_pairs(DType dtype, const uint2 (&words)[kCount], float2 (&x)[kCount]) {
  if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = make_float2(__uint_as_float(words[i].x), __uint_as_float(words[i].y));
  } else if (dtype == DType::kBF16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = unpack<DType::kBF16>(words[i].x);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = unpack<DType::kF16>(words[i].x);
  }
}

// exp(g) of the tile; 1 where there is none.
__device__ __forceinline__ void load_decays(const DeltaRuleDeviceProblem& p, const Item& item, const ChannelPair& own,
                                            float2 (&decay)[kRows]) {
  uint2 words[kRows];
  PairRows(p.g, p.g.dtype, item, item.head, own).load(own.rows, own.columns, words);
  decode_pairs(p.g.dtype, words, decay);
  with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      decay[i] = make_float2(gate_of<kKind>(p, decay[i].x, own.rate, own.bias.x).decay,
                             gate_of<kKind>(p, decay[i].y, own.rate, own.bias.y).decay);
    }
  });
  if (own.rows >= kRows && own.columns > 1) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= own.rows || own.columns <= 0) decay[i].x = 1;
    if (i >= own.rows || own.columns <= 1) decay[i].y = 1;
  }
}

// Whether the pairs of a tile can be made of its rising and falling rows, given the least decay of a token and that of
// the whole tile: see above. No NaN is mild.
template <DType kType>
__device__ __forceinline__ bool is_mild(float least, float total) {
  constexpr float kLeastOfToken = 0x1.6a09e6p-8f, kLeastOfTile = kType == DType::kBF16 ? 0x1p-117f : 0x1p-4f;
  return least >= kLeastOfToken && total >= kLeastOfTile;
}

// The decays after a token to the end of a mild tile, of those from its start through the token.
struct MildDecays {
  float2 fall, inverse_rise;

  __device__ __forceinline__ MildDecays(float2 rise, float2 total)
      : inverse_rise(make_float2(reciprocal_approx(rise.x), reciprocal_approx(rise.y))) {
    fall = total * inverse_rise;
  }
};

// One token's q and k, normalised, and -beta k.
struct TokenKeys {
  float2 q, k, reader;

  TokenKeys() = default;
  __device__ __forceinline__ TokenKeys(float2 raw_q, float2 raw_k, float rstd_q, float rstd_k, float beta)
      : q(rstd_q * raw_q), k(rstd_k * raw_k), reader(-beta * k) {}
};

// Numbers of tokens, four at a time.
struct Four {
  float x[4];

  __device__ __forceinline__ explicit Four(const float* from) {
    const float4 all = *reinterpret_cast<const float4*>(from);
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
  }
};

template <DType kType>
__device__ __forceinline__ uint32_t round_pair(float2 x) {
  return pack<kType>(x.x, x.y);
}

// The falling rows; the rising ones in place of q and k; the decays of whole tiles, and which tiles are strong.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows(const DeltaRuleDeviceProblem& p, const Item& item, Shared<kK>& s,
                                           int thread) {
  const SharedTile<kK> q(s.rising.q), k(s.rising.k), falling(s.tiles.falling);
  const ChannelPair own = channel_pair<kK>(p, item, thread);
  const int top = kRows * own.tile;
  const auto pair_at = [&](const SharedTile<kK>& rows, int i) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(&rows.at(top + i, own.channel));
  };
  float2 decay[kRows];
  load_decays(p, item, own, decay);
  float2 total = decay[0], least = decay[0];
#pragma unroll
  for (int i = 1; i < kRows; ++i) {
    total = total * decay[i];
    least = make_float2(fminf(least.x, decay[i].x), fminf(least.y, decay[i].y));
  }
  *reinterpret_cast<float2*>(&s.total[own.tile][own.channel]) = total;
  const bool mild = is_mild<kType>(least.x, total.x) && is_mild<kType>(least.y, total.y);
  if (!mild) {
    float2 until = make_float2(1, 1);
#pragma unroll
    for (int i = kRows - 1; i >= 0; --i) {
      pair_at(falling, i) = round_pair<kType>(until * (s.rstd_k[top + i] * unpack<kType>(pair_at(k, i))));
      until = until * decay[i];
    }
  }
  float2 since = make_float2(1, 1);
#pragma unroll
  for (int first = 0; first < kRows; first += 4) {
    const Four rstd_q(s.rstd_q + top + first), rstd_k(s.rstd_k + top + first), beta(s.beta + top + first);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = first + e;
      since = since * decay[i];
      const MildDecays decays(since, total);
      const TokenKeys keys(unpack<kType>(pair_at(q, i)), unpack<kType>(pair_at(k, i)), rstd_q.x[e], rstd_k.x[e],
                           beta.x[e]);
      if (mild) pair_at(falling, i) = round_pair<kType>(decays.fall * keys.k);
      pair_at(q, i) = round_pair<kType>(since * keys.q);
      pair_at(k, i) = round_pair<kType>(since * keys.reader);
    }
  }
  const bool any_strong = __any_sync(kAllLanes, !mild);
  if (thread % kWarpSize == 0) s.strong[own.tile][own.channel / 64] = any_strong;
}

// Step 5 --------------------------------------------------------------------------------------------------------------

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

// The rising rows of a tile with X at the same places, by channel.
template <DType kType, int kK>
__device__ __forceinline__ float2 dot_reads(Shared<kK>& s, int row, int warp, int lane, const ChannelTile& query,
                                            const ChannelTile& reader) {
  const TileColumns<kK> q(s.rising.q, warp), k(s.rising.k, warp);
  uint32_t a[4];  // anew for every column: unpacked and kept they would cost registers
  float2 sum = make_float2(0, 0);
  q.load_c_transposed(16 * row, 0, lane, a);
  dot_tokens<kType>(a, query[0], query[1], sum);
  k.load_c_transposed(16 * row, 0, lane, a);
  dot_tokens<kType>(a, reader[0], reader[1], sum);
  return sum;
}

// X += the block (row, column) of the pairs with the falling rows.
template <DType kType, int kK>
__device__ __forceinline__ void add_read(Shared<kK>& s, int row, int column, int warp, int lane, ChannelTile& query,
                                         ChannelTile& reader) {
  uint32_t a[4], b[4];
  TileColumns<kK>(s.tiles.falling, warp).load_c_transposed(16 * column, 0, lane, a);
  s.pairs.blocks[kPairsOfP].block(row, column).load_b(0, 0, lane, b);
  mma<kType>(query[0], a, b[0], b[1]);
  mma<kType>(query[1], a, b[2], b[3]);
  s.pairs.blocks[kPairsOfA].block(row, column).load_b(0, 0, lane, b);
  mma<kType>(reader[0], a, b[0], b[1]);
  mma<kType>(reader[1], a, b[2], b[3]);
}

__device__ __forceinline__ void add_to(float2& sum, float2 x) { sum = make_float2(sum.x + x.x, sum.y + x.y); }

__device__ __forceinline__ void scale_tile(float2 factor, ChannelTile& x) {
  scale_channels(factor, x[0]);
  scale_channels(factor, x[1]);
}

// The sums of the first tile to shared memory, or back.
template <bool kStore, int kK>
__device__ __forceinline__ void exchange_first(Shared<kK>& s, int warp, int lane, ChannelTile& query,
                                               ChannelTile& reader) {
  const int thread = kWarpSize * warp + lane;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float &kept_query = s.tiles.first[n][e][thread], &kept_reader = s.tiles.first[2 + n][e][thread];
      if constexpr (kStore) {
        kept_query = query[n][e];
        kept_reader = reader[n][e];
      } else {
        query[n][e] = kept_query;
        reader[n][e] = kept_reader;
      }
    }
  }
}

// X of one tile, in place of S d_o^T and S Y^T. Adds to `over` what the tile reads from before the tiles before it, and
// from before itself if it is mild.
template <DType kType, int kK>
__device__ __forceinline__ void add_reads(Shared<kK>& s, const TileTotals& total, int row, int warp, int lane,
                                          ChannelTile& query, ChannelTile& reader, TileTotals& over) {
#pragma unroll
  for (int column = 0; column < row; ++column) {
    scale_tile(total[column], query);
    scale_tile(total[column], reader);
    add_to(over[column], between(total, column, row) * dot_reads<kType>(s, row, warp, lane, query, reader));
    add_read<kType>(s, row, column, warp, lane, query, reader);
  }
  if (s.is_strong(row)) return;
  add_to(over[row], dot_reads<kType>(s, row, warp, lane, query, reader));
  scale_tile(total[row], query);
  scale_tile(total[row], reader);
  add_read<kType>(s, row, row, warp, lane, query, reader);
}

// F += the transposed block (row, column) of the pairs with the rising rows, after the decays of that tile.
template <DType kType, int kK>
__device__ __forceinline__ void add_write(Shared<kK>& s, float2 total, int row, int column, int warp, int lane,
                                          ChannelTile& F) {
  uint32_t a[4], b[4];
  scale_tile(total, F);
  TileColumns<kK>(s.rising.q, warp).load_c_transposed(16 * row, 0, lane, a);
  s.pairs.blocks[kPairsOfP].block(row, column).load_b_transposed(0, 0, lane, b);
  mma<kType>(F[0], a, b[0], b[1]);
  mma<kType>(F[1], a, b[2], b[3]);
  TileColumns<kK>(s.rising.k, warp).load_c_transposed(16 * row, 0, lane, a);
  s.pairs.blocks[kPairsOfA].block(row, column).load_b_transposed(0, 0, lane, b);
  mma<kType>(F[0], a, b[0], b[1]);
  mma<kType>(F[1], a, b[2], b[3]);
}

// F, in place of G R^T. Adds to `over` what the tiles before t wrote to the state after the chunk.
template <DType kType, int kK>
__device__ __forceinline__ void add_writes(Shared<kK>& s, const TileTotals& total, int warp, int lane,
                                           TileTotals& over) {
  const TileColumns<kK> falling(s.tiles.falling, warp);
  const OwnSums<kK> writer(s.writer, warp, lane);
  float2 written = make_float2(0, 0);
#pragma unroll
  for (int column = 0; column < kTiles; ++column) {
    ChannelTile F;
    writer.load(2 * column, F[0]);
    writer.load(2 * column + 1, F[1]);
    if (column < kTiles - 1) {
      uint32_t a[4];
      falling.load_c_transposed(16 * column, 0, lane, a);
      float2 sum = make_float2(0, 0);
      dot_tokens<kType>(a, F[0], F[1], sum);
      add_to(written, between(total, column, kTiles) * sum);
      add_to(over[column + 1], written);
    }
#pragma unroll
    for (int row = kTiles - 1; row > column; --row) {
      add_write<kType>(s, total[row], row, column, warp, lane, F);
    }
    if (!s.is_strong(column)) add_write<kType>(s, total[column], column, column, warp, lane, F);
    writer.store(2 * column, F[0]);
    writer.store(2 * column + 1, F[1]);
  }
}

// Both, and `over` with `states`, what passes over the whole chunk. The sums of the first tile lie in shared memory.
template <DType kType, int kK>
__device__ __forceinline__ void add_tiles(Shared<kK>& s, float2 states, int warp, int lane, TileSums& query,
                                          TileSums& reader) {
  const int channel = 16 * warp + lane / 4;
  TileTotals total, over;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    total[t] = make_float2(s.total[t][channel], s.total[t][channel + 8]);
    over[t] = make_float2(0, 0);
  }
#pragma unroll
  for (int row = 1; row < kTiles; ++row) {
    add_reads<kType>(s, total, row, warp, lane, query[row], reader[row], over);
  }
  add_writes<kType>(s, total, warp, opaque_below<kWarpSize>(lane), over);  // addresses are not worth their registers
  exchange_first<false>(s, warp, lane, query[0], reader[0]);
  add_reads<kType>(s, total, 0, warp, lane, query[0], reader[0], over);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float low = states.x + sum_over_lanes<4>(over[t].x), high = states.y + sum_over_lanes<4>(over[t].y);
    if (lane % 4 == 0) {
      s.over[t][channel] = low;
      s.over[t][channel + 8] = high;
    }
  }
}

// Step 6 --------------------------------------------------------------------------------------------------------------

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

// The walk over the pairs of a tile: dg, and in the tiles of sums dq, dk and the terms of -dbeta.
template <DType kType, int kK>
__device__ __forceinline__ void walk_pairs(Shared<kK>& s, const TileChannel& own, const float (&q)[kRows],
                                           const float (&k)[kRows], const float (&decay)[kRows], float (&dg)[kRows]) {
  const SumTile<kK> query{s.query}, reader{s.reader}, writer{s.writer};
  const PairBlocks &P = s.pairs.blocks[kPairsOfP], &A = s.pairs.blocks[kPairsOfA];
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
    P.template load_row<kType>(own.tile, i, i, P_i);
    A.template load_row<kType>(own.tile, i, i, A_i);
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
    const float P_ii = s.pairs.diagonal[top + i];
    dk[i] = fmaf(P_ii, q[i], -s.beta[top + i] * read);
    query.at(top + i, channel) = fmaf(P_ii, k[i], dq);
    reader.at(top + i, channel) = k[i] * read;
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
      const Gate gate = gate_of<kKind>(p, x[i], own.rate, own.bias);
      a_log_sum += i < own.count ? gate.a_log * dg[i] : 0.0f;
      dg[i] *= gate.dx;
      bias_sum += i < own.count ? dg[i] : 0.0f;
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
      const float value = gate_of<decltype(kind)::value>(p, decay[i], own.rate, own.bias).decay;
      decay[i] = i < own.count ? value : 1.0f;
    }
  });
  walk_pairs<kType>(s, own, q, k, decay, dg);
  carry_gates<kK>(args, item, own, dg);
  if (item.closes) store_gates(args, item, s, own, dg);
}

// Two channels of a mild tile, token after token: in the tiles of sums dq, dk and the terms of -dbeta; dg.
template <DType kType, int kK>
struct MildTile {
  static constexpr int kStep = 4;  // tokens at a time

  const GradientArgs& args;
  const Item& item;
  Shared<kK>& s;
  const ChannelPair& own;
  PairRows g_rows, q_rows, k_rows, dg_rows;
  uint2 next_g[kStep], next_q[kStep], next_k[kStep];  // on their way while the tokens at hand are computed with
  float2 total, inverse;                              // of the tile's decays
  float2 since = make_float2(1, 1);                   // the start of the tile
  float2 crossing;                                    // the sum of M_ij over i >= m > j
  float2 bias_sum = make_float2(0, 0);
  float a_log_sum = 0;

  __device__ __forceinline__ MildTile(const GradientArgs& gradients, const Item& one, Shared<kK>& shared,
                                      const ChannelPair& pair)
      : args(gradients),
        item(one),
        s(shared),
        own(pair),
        g_rows(args.chunk.problem.g, args.chunk.problem.g.dtype, item, item.head, own),
        q_rows(args.chunk.problem.q, kType, item, item.key_head, own),
        k_rows(args.chunk.problem.k, kType, item, item.key_head, own),
        dg_rows(args.dg, args.dg.dtype, item, item.head, own) {}

  // Gates, q and k of the tokens from `first` on.
  __device__ __forceinline__ void load(int first) {
    const int rows = first < kRows ? own.rows - first : 0;
    g_rows.load(rows, own.columns, next_g);
    q_rows.load(rows, own.columns, next_q);
    k_rows.load(rows, own.columns, next_k);
  }

  __device__ __forceinline__ float2& sum_at(float* sums, int row) const {
    return *reinterpret_cast<float2*>(&SumTile<kK>{sums}.at(row, own.channel));
  }

  // One token. The terms of dg are made of the operands as they were rounded: those of a row and those of
  // a column are then the same numbers, and a pair that is past leaves nothing in the sum.
  __device__ __forceinline__ float2 next(int row, const TokenKeys& keys, float beta, float P_ii, float2 decay) {
    since = since * decay;
    const MildDecays decays(since, total);
    float2 &query = sum_at(s.query, row), &reader = sum_at(s.reader, row), &writer = sum_at(s.writer, row);
    const float2 X = query, X_reader = reader, F = writer, dg = crossing;
    const auto rounded = [&](float2 x) { return inverse * unpack<kType>(round_pair<kType>(x)); };
    const float2 q = rounded(since * keys.q), k = rounded(since * keys.reader), fall = rounded(decays.fall * keys.k);
    crossing.x += fmaf(fall.x, F.x, -fmaf(q.x, X.x, k.x * X_reader.x));
    crossing.y += fmaf(fall.y, F.y, -fmaf(q.y, X.y, k.y * X_reader.y));
    const float2 up = inverse * since, read = up * X_reader, dq = up * X, dk = decays.inverse_rise * F;
    query = make_float2(fmaf(P_ii, keys.k.x, dq.x), fmaf(P_ii, keys.k.y, dq.y));
    writer =
        make_float2(fmaf(P_ii, keys.q.x, fmaf(-beta, read.x, dk.x)), fmaf(P_ii, keys.q.y, fmaf(-beta, read.y, dk.y)));
    reader = keys.k * read;
    return dg;
  }

  // dg over the ranges of columns of a head, as carry_gates.
  __device__ __forceinline__ void carry(int first, float2 (&dg)[kStep]) const {
    if (item.opens && item.closes) return;
    const int64_t sums = blockIdx.x * int64_t{kKeySumsPerChannel} + 2;
    float* slot = args.key_sums + (sums * kChunkRows + kRows * own.tile + first) * kK + own.channel;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      auto& kept = *reinterpret_cast<float2*>(slot + i * kK);
      if (!item.opens) add_to(dg[i], kept);
      if (!item.closes) kept = dg[i];
    }
  }

  // From dg to the gradient of what the gate tensor holds.
  __device__ __forceinline__ void finish_gates(int first, const Gate (&gate)[kStep][2], float2 (&dg)[kStep]) {
    if (own.rows - first < kStep || own.columns <= 1) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (first + i >= own.rows || own.columns <= 0) dg[i].x = 0;
        if (first + i >= own.rows || own.columns <= 1) dg[i].y = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      a_log_sum = fmaf(gate[i][0].a_log, dg[i].x, fmaf(gate[i][1].a_log, dg[i].y, a_log_sum));
      dg[i] = make_float2(gate[i][0].dx * dg[i].x, gate[i][1].dx * dg[i].y);
      add_to(bias_sum, dg[i]);
    }
    if (args.dg.present()) dg_rows.store(own.rows - first, own.columns, dg);
  }

  __device__ __forceinline__ void gates_of(Gate (&gate)[kStep][2]) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    float2 x[kStep];
    decode_pairs(p.g.dtype, next_g, x);
    with_gate_kind(p, [&](auto kind) {
      constexpr GateKind kKind = decltype(kind)::value;
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        gate[i][0] = gate_of<kKind>(p, x[i].x, own.rate, own.bias.x);
        gate[i][1] = gate_of<kKind>(p, x[i].y, own.rate, own.bias.y);
      }
    });
    if (own.columns > 1) return;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {  // tokens that do not exist come last, and what is made of them goes nowhere
      if (own.columns <= 0) gate[i][0].decay = 1;
      gate[i][1].decay = 1;
    }
  }

  __device__ __forceinline__ void run() {
    load(0);
    total = *reinterpret_cast<const float2*>(&s.total[own.tile][own.channel]);
    crossing = *reinterpret_cast<const float2*>(&s.over[own.tile][own.channel]);
    inverse = make_float2(reciprocal_approx(total.x), reciprocal_approx(total.y));
#pragma unroll 1
    for (int first = 0; first < kRows; first += kStep) {
      const int row = kRows * own.tile + first;
      const Four rstd_q(s.rstd_q + row), rstd_k(s.rstd_k + row), beta(s.beta + row), P(s.pairs.diagonal + row);
      TokenKeys keys[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const float2 raw_q = unpack<kType>(next_q[i].x), raw_k = unpack<kType>(next_k[i].x);
        keys[i] = TokenKeys(raw_q, raw_k, rstd_q.x[i], rstd_k.x[i], beta.x[i]);
      }
      Gate gate[kStep][2];
      gates_of(gate);
      load(first + kStep);
      float2 dg[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        dg[i] = next(row + i, keys[i], beta.x[i], P.x[i], make_float2(gate[i][0].decay, gate[i][1].decay));
      }
      carry(first, dg);
      if (item.closes) finish_gates(first, gate, dg);
    }
    if (!item.closes || args.parameter_parts == nullptr) return;
    *reinterpret_cast<float2*>(&s.bias[own.tile][own.channel]) = bias_sum;
    a_log_sum = sum_over_lanes<kWarpSize>(a_log_sum);
    const int channels = own.tile * kK + own.channel;  // a warp has 64, of which store_gates would make two sums
    if (channels % (2 * kWarpSize) != 0) return;
    s.a_log[channels / kWarpSize] = a_log_sum;
    s.a_log[channels / kWarpSize + 1] = 0;
  }
};

// Step 6 of all tiles.
template <DType kType, int kK>
__device__ __forceinline__ void finish_tiles(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  const ChannelPair own = channel_pair<kK>(args.chunk.problem, item, thread);
  if (!s.is_strong(own.tile)) MildTile<kType, kK>(args, item, s, own).run();
#pragma unroll 1
  for (int at = thread; at < kTiles * kK; at += Shape<kK>::kThreads) {
    if (s.is_strong(at / kK)) walk_tile<kType>(args, item, s, at);
  }
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

// Step 7 --------------------------------------------------------------------------------------------------------------

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
  sum = s.dbeta[own.row] + sum_over_lanes<TokenLanes<kK>::kLanes>(sum);
  if (own.lane != 0) return;
  s.dbeta[own.row] = sum;
  if (!item.closes || own.row >= item.span.length) return;
  const DeviceTensor& out = args.dbeta;
  store_float(out.data, out.dtype, row_offset(out, item.span.batch, item.span.begin + own.row, item.head),
              beta_adjoint(args.chunk.problem, s.beta[own.row], sum));
}

// The kernel ----------------------------------------------------------------------------------------------------------

template <DType kType, int kK>
struct Gradients {
  using X = Shape<kK>;

  const GradientArgs& args;
  Shared<kK>& s;

  // Asked for by every step: what is computed from it is not kept from one to the next.
  __device__ __forceinline__ static int thread_index() {
    return opaque_below<X::kThreads>(static_cast<int>(threadIdx.x));
  }

  // Steps 1 and 2: afterwards d_o is where the reader was, and the pairs are where J was.
  __device__ __forceinline__ void pair_gradients(const Item& item) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (uniform_warp() < X::kColumns / 16) make_writes<kType>(s, uniform_warp(), thread_index() % kWarpSize);
    __syncthreads();
    const int thread = thread_index();
    load_value_rows<X::kThreads>(SharedTile<X::kColumns>(s.d_o), args.d_o, args.vector_d_o, item, p.head_dim_v, thread);
    commit_copies();
    if (thread < kChunkRows) {
      float sum = 0;
      for (const auto& yv : s.value_side.yv) sum += yv[thread];
      s.dbeta[thread] += sum;
    }
    wait_copies<0>();
    __syncthreads();
    make_all_pairs<kType>(s, p.scale, static_cast<int>(item.span.length), uniform_warp(), thread_index() % kWarpSize);
  }

  // Step 3. Returns e_n <S, G> of the lane's channels.
  __device__ __forceinline__ float2 state_products(const Item& item, TileSums& query, TileSums& reader) const {
    const int warp = uniform_warp();
    read_state<kType>(s, warp, thread_index() % kWarpSize, query, reader);
    __syncthreads();
    const int thread = thread_index();
    copy_rows<X::kColumns, X::kThreads>(SharedTile<kK>(s.G), args.G + (item.at * args.padded_v + item.column) * kK, kK,
                                        args.padded_v - item.column, kK, thread);
    commit_copies();
    const float* total = args.chunk.factors.total + item.at * kK + 16 * warp + thread % kWarpSize / 4;
    const float2 e_n = make_float2(total[0], total[8]);
    wait_copies<0>();
    __syncthreads();
    const float2 states = dot_states<kType>(s, warp, thread_index() % kWarpSize);
    __syncthreads();
    read_gradient<kType>(s, warp, thread_index() % kWarpSize);
    return e_n * states;
  }

  // Steps 4 and 5, X in registers on return.
  __device__ __forceinline__ void tile_products(const Item& item, float2 states, TileSums& query,
                                                TileSums& reader) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const int thread = thread_index();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) scale_tile(make_float2(p.scale, p.scale), query[t]);
    exchange_first<true>(s, thread / kWarpSize, thread % kWarpSize, query[0], reader[0]);
    load_key_rows<X::kThreads, kK>(args.chunk, p.q, item, s.rising.q, thread);
    load_key_rows<X::kThreads, kK>(args.chunk, p.k, item, s.rising.k, thread);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    scale_rows<kType>(p, item, s, thread_index());
    __syncthreads();
    add_tiles<kType>(s, states, uniform_warp(), thread_index() % kWarpSize, query, reader);
  }

  // Steps 1 to 5.
  __device__ __forceinline__ void make_sums(const Item& item) const {
    pair_gradients(item);
    TileSums query = {}, reader = {};
    const float2 states = state_products(item, query, reader);
    __syncthreads();
    tile_products(item, states, query, reader);
    __syncthreads();
    const int warp = uniform_warp(), lane = thread_index() % kWarpSize;
    const OwnSums<kK> own_query(s.query, warp, lane), own_reader(s.reader, warp, lane);
#pragma unroll
    for (int n = 0; n < kChunkRows / 8; ++n) {
      own_query.store(n, query[n / 2][n % 2]);
      own_reader.store(n, reader[n / 2][n % 2]);
    }
    __syncthreads();
  }

  // Step 7. What is finished makes room for the operands of the next item.
  __device__ __forceinline__ void finish(const Item& item, const Item& next) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const bool more = next.span.sequence >= 0;
    const int thread = thread_index();
    const TokenLanes<kK> own(thread);
    const KeyRows<kType, kK> rows{args, item, own};
#pragma unroll 1
    for (int which = 1; which >= 0; --which) {  // dk, then dq
      const bool keys = which == 1;
      const DeviceTensor x = keys ? p.k : p.q, out = keys ? args.dk : args.dq;
      rows.finish(keys ? s.writer : s.query, which, x, keys ? s.rstd_k : s.rstd_q, out,
                  keys ? args.vector_dk : args.vector_dq);
      __syncthreads();
      if (!more) continue;
      if (keys) {
        load_state(args, next, s, thread);
      } else {
        load_values(args, next, s, thread);
      }
    }
    finish_beta(args, item, s, own);
    if (args.parameter_parts != nullptr && item.closes) store_parameters(args, item, s, thread);
    __syncthreads();
    if (more) {
      load_columns(args, next, s, thread);
      prefetch_operands<kK>(args, next, thread);
    }
    commit_copies();
  }

  __device__ __forceinline__ void run(const Item& item, Item& next) const {
    wait_copies<0>();
    __syncthreads();
    if (threadIdx.x == 0) find_next<X::kColumns>(args.chunk, item, next);
    make_sums(item);
    finish_tiles<kType>(args, item, s, thread_index());
    __syncthreads();
    finish(item, next);
  }

  // A block takes every gridDim.x-th pair of a chunk and a key head.
  __device__ __forceinline__ void run_all() const {
    if (threadIdx.x == 0) first_item<X::kColumns>(args.chunk, s.items[0]);
    __syncthreads();
    if (s.items[0].span.sequence < 0) return;
    const int thread = thread_index();
    load_state(args, s.items[0], s, thread);
    load_values(args, s.items[0], s, thread);
    load_columns(args, s.items[0], s, thread);
    commit_copies();
    for (int turn = 0; s.items[turn].span.sequence >= 0; turn ^= 1) run(s.items[turn], s.items[turn ^ 1]);
  }
};

// Two blocks of K = 128 on a multiprocessor of 228 KB, each with 1 KB of the system's.
static_assert(sizeof(Shared<128>) <= (228 / 2 - 1) * 1024);

template <DType kType, int kK>
__global__ void __launch_bounds__(Shape<kK>::kThreads, Shape<kK>::kBlocksOfSM)
    channel_gradients_kernel(const __grid_constant__ GradientArgs args) {
  wait_for_previous_kernels();
  Gradients<kType, kK>{args, dynamic_shared<Shared<kK>>()}.run_all();
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
