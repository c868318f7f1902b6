// The gradients of every chunk with no decay or one per head. See gradient.cuh for the equations.
//
// A block per (chunk, key head); it takes the value heads of the group, and of each a range of value columns at a time,
// whose contributions add up. One such range:
//
//     1   R^T = bD^T J^T, transposed as in the scans: a warp has 16 value columns
//     2   dP and dA, in blocks of 16 x 16 dealt to the warps; with all decays and norms they become operands, P' and A'
//     3   a warp has 16 tokens and a half of the channels (of 64 channels all):
//             dq = scale e (d_o S^T) + P' k,     dk = -beta e (Y S^T) + w (R G^T) + (A' + A'^T) k + P'^T q
//
// q and k stay as they are. With the factors of the norms, rows of P' and A' have both rstd_i and rstd_j, so that dq and
// dk come out as rstd dy of y = rstd x; then dx = rstd dy - rstd^2 x (x . rstd dy). These inner products, dbeta and dg
// are sums of what step 3 gives before the products of step 2 are added, and of rows and columns of M:
//
//     q . dq = a^q + row sums of M^P,     k . dk = beta (a^k + row sums of M^A) + b + column sums of M^P + beta M^A
//     dbeta  = Y . v + a^k + row sums of M^A                               M^A without beta
//
// The buffers of S, v and J are used again for G, d_o, q and P': two blocks of K = V = 128 fit a multiprocessor of Hopper,
// one of which computes while the other waits.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/adjoints.cuh"
#include "cuda/delta_rule/chunk_16bit/gradient_items.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

constexpr int kBlocks = kChunkRows / 16;  // of 16 tokens

template <int kK>
struct Shape {
  static constexpr int kColumns = kK == 128 ? 128 : 64;  // of values
  static constexpr int kWarps = kK == 64 ? 4 : 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kGroups = kWarps / kBlocks;  // of channels, in step 3
  static constexpr int kChannels = kK / kGroups;    // of a warp
};

enum PairKind { kPairsOfP, kPairsOfA, kNoPairs };

template <int kK>
struct Shared {
  using S = Shape<kK>;

  alignas(128) uint16_t k[kChunkRows * kK];
  alignas(128) uint16_t state[S::kColumns * kK];  // S, then G
  union {
    alignas(128) uint16_t values[kChunkRows * S::kColumns];  // v, then d_o
    alignas(128) uint16_t q[kChunkRows * kK];
  };
  alignas(128) uint16_t Y[S::kColumns * kChunkRows];
  alignas(128) uint16_t R[S::kColumns * kChunkRows];
  alignas(128) uint16_t P[LowerBlocks::kElements];  // J, then P'
  alignas(128) uint16_t A[LowerBlocks::kElements];  // A'

  float gamma[kChunkRows];  // in log2
  float rstd_q[kChunkRows], rstd_k[kChunkRows], beta[kChunkRows];
  float on_read[kChunkRows];  // e rstd_k, of k S
  union {
    float yv[2][kChunkRows];                // Y . v, in two halves of the columns
    float columns[2][kBlocks][kChunkRows];  // sums over the rows of a block, of M^P and beta M^A
  };
  float row_of_P[kChunkRows];     // sums over the columns of M^P; then q . dq
  float row_below_P[kChunkRows];  // without the diagonal block
  float row_of_A[2][kChunkRows];  // of M^A, in two parts; then the first is k . dk
  float row_below_A[2][kChunkRows];
  float within[2][kChunkRows];  // sum_{i >= m > j} within the diagonal block of M^P and beta M^A
  float a_q[2][kChunkRows], a_k[2][kChunkRows], b[2][kChunkRows];  // by group of channels
  float state_dot[S::kWarps];
  Item items[2];  // the one at hand and the next; here they take no registers

  __device__ SharedTile<kK> keys() { return {k}; }
  __device__ SharedTile<kK> queries() { return {q}; }
  __device__ SharedTile<kK> state_rows() { return {state}; }
  __device__ SharedTile<S::kColumns> value_rows() { return {values}; }
  __device__ SharedTile<kChunkRows> Y_rows() { return {Y}; }
  __device__ SharedTile<kChunkRows> R_rows() { return {R}; }
};

// The numbers of a token.
struct TokenNumbers {
  float gamma, rstd_q, rstd_k, beta, on_read;
};

__device__ __forceinline__ TokenNumbers load_numbers(const ChunkFactors& factors, int64_t at, int i) {
  const float* row = factors.row + at * kRowNumbers * kChunkRows + i;
  const float* token = factors.token + at * kTokenFactors<false> * kChunkRows + i;
  return {row[kGamma * kChunkRows], row[kRstdOfQ * kChunkRows], row[kRstdOfK * kChunkRows],
          token[kOnValue * kChunkRows], token[kOnKeyRead * kChunkRows]};
}

template <int kK>
__device__ __forceinline__ void store_numbers(const TokenNumbers& x, Shared<kK>& s, int i) {
  s.gamma[i] = x.gamma;
  s.rstd_q[i] = x.rstd_q;
  s.rstd_k[i] = x.rstd_k;
  s.beta[i] = x.beta;
  s.on_read[i] = x.on_read;
  s.row_of_A[1][i] = s.row_below_A[1][i] = 0;
  if (Shape<kK>::kGroups == 1) s.a_q[1][i] = s.a_k[1][i] = s.b[1][i] = 0;
}

// What step 1 needs, but for the keys. The caller commits the copies.
template <int kK>
__device__ __forceinline__ void load_first(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  copy_rows<X::kColumns, X::kThreads>(s.state_rows(), state_before(args, item), args.S.v_stride,
                                      p.head_dim_v - item.column, args.S_width, thread);
  load_value_rows<X::kThreads>(s.value_rows(), p.v, args.chunk.vector_values, item, p.head_dim_v, thread);
  copy_rows<X::kColumns, X::kThreads>(s.Y_rows(), args.Y + (item.at * args.padded_v + item.column) * kChunkRows,
                                      kChunkRows, args.padded_v - item.column, kChunkRows, thread);
  copy_lower_blocks<X::kThreads>(s.P, args.chunk.factors.J + item.at * kChunkRows * kChunkRows, thread);
}

// Step 1 ---------------------------------------------------------------------------------------------------------------

// [16 value columns x 64 tokens] as C tiles.
using Columns = float[kChunkRows / 8][4];

// bD^T of the warp's columns as A fragments.
template <DType kType, int kK>
__device__ __forceinline__ void residuals(Shared<kK>& s, int warp, int lane, uint32_t (&bD)[kBlocks][4]) {
  Columns X = {};
#pragma unroll 4
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[4], b[kBlocks][4];
    s.state_rows().load_a(16 * warp, m, lane, a);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) s.keys().load_b(16 * n, m, lane, b[n]);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      mma<kType>(X[2 * n], a, b[n][0], b[n][1]);
      mma<kType>(X[2 * n + 1], a, b[n][2], b[n][3]);
    }
  }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    uint32_t v[4];
    s.value_rows().load_c_transposed(16 * m, warp, lane, v);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 16 * m + 8 * h + 2 * (lane % 4), n = 2 * m + h;
      const float2 low = unpack<kType>(v[2 * h]), high = unpack<kType>(v[2 * h + 1]);
      const float2 e = *reinterpret_cast<const float2*>(s.on_read + j);
      const float2 beta = *reinterpret_cast<const float2*>(s.beta + j);
      X[n][0] = beta.x * fmaf(-e.x, X[n][0], low.x);
      X[n][1] = beta.y * fmaf(-e.y, X[n][1], low.y);
      X[n][2] = beta.x * fmaf(-e.x, X[n][2], high.x);
      X[n][3] = beta.y * fmaf(-e.y, X[n][3], high.y);
    }
    pack_a<kType>(X[2 * m], X[2 * m + 1], bD[m]);
  }
}

// Y . v: the diagonal of v Y^T, in blocks of 16 tokens and halves of the columns.
template <DType kType, int kK>
__device__ __forceinline__ void dot_values(Shared<kK>& s, int block, int half, int lane) {
  constexpr int kSteps = Shape<kK>::kColumns / 32;
  float c[2][4] = {};
#pragma unroll
  for (int m = half * kSteps; m < (half + 1) * kSteps; ++m) {
    uint32_t a[4], b[4];
    s.value_rows().load_a(16 * block, m, lane, a);
    s.Y_rows().load_b_transposed(16 * m, block, lane, b);
    mma<kType>(c[0], a, b[0], b[1]);
    mma<kType>(c[1], a, b[2], b[3]);
  }
  const int g = lane / 4;
  if (g / 2 == lane % 4) {
    s.yv[half][16 * block + g] = g % 2 == 0 ? c[0][0] : c[0][1];
    s.yv[half][16 * block + g + 8] = g % 2 == 0 ? c[1][2] : c[1][3];
  }
}

// R^T = bD^T J^T of the warp's columns.
template <DType kType, int kK>
__device__ __forceinline__ void writes(Shared<kK>& s, int warp, int lane, const uint32_t (&bD)[kBlocks][4]) {
  Columns R = {};
  const LowerBlocks J = s.P;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int n = m; n < kBlocks; ++n) {
      uint32_t b[4];
      J.load_b(16 * n, m, lane, b);
      mma<kType>(R[2 * n], bD[m], b[0], b[1]);
      mma<kType>(R[2 * n + 1], bD[m], b[2], b[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    uint32_t a[4];
    pack_a<kType>(R[2 * m], R[2 * m + 1], a);
    s.R_rows().store_a(16 * warp, m, lane, a);
  }
}

// Step 2 ---------------------------------------------------------------------------------------------------------------

// Blocks (row, first .. first + count - 1) of dP or dA. A block of dA costs twice as much, its k k^T included: no warp has
// more than four blocks' work.
struct PairTask {
  int kind, row, first, count;

  // In a byte, and back.
  constexpr uint64_t packed() const { return static_cast<uint64_t>(kind | row << 2 | first << 4 | (count - 1) << 6); }
  __device__ __forceinline__ static PairTask of(uint32_t byte) {
    return {static_cast<int>(byte & 3), static_cast<int>(byte >> 2 & 3), static_cast<int>(byte >> 4 & 3),
            static_cast<int>(byte >> 6 & 3) + 1};
  }
};
constexpr int kTaskLists = 8;

// A byte for each warp.
constexpr uint64_t pack_tasks(const PairTask (&tasks)[kTaskLists]) {
  uint64_t packed = 0;
  for (int i = 0; i < kTaskLists; ++i) packed |= tasks[i].packed() << 8 * i;
  return packed;
}
constexpr uint64_t kFirstTasks = pack_tasks({{kPairsOfP, 3, 0, 4},
                                             {kPairsOfP, 2, 0, 3},
                                             {kPairsOfP, 1, 0, 2},
                                             {kPairsOfA, 1, 0, 2},
                                             {kPairsOfA, 2, 0, 2},
                                             {kPairsOfA, 3, 0, 2},
                                             {kPairsOfA, 3, 2, 2},
                                             {kPairsOfA, 2, 2, 1}});
constexpr uint64_t kSecondTasks = pack_tasks({{kNoPairs, 0, 0, 1},
                                              {kPairsOfP, 0, 0, 1},
                                              {kPairsOfA, 0, 0, 1},
                                              {kNoPairs, 0, 0, 1},
                                              {kNoPairs, 0, 0, 1},
                                              {kNoPairs, 0, 0, 1},
                                              {kNoPairs, 0, 0, 1},
                                              {kNoPairs, 0, 0, 1}});

// C tiles of kCount blocks side by side.
template <int kCount>
using Pairs = float[2 * kCount][4];

// sum_{i >= m > j} of the elements of a diagonal block, for m = g and g + 8; every lane of a quad gets it.
__device__ __forceinline__ float2 sums_within(const float (&M)[4], const float (&right)[4], int lane) {
  float upper[4] = {M[0], M[1], right[0], right[1]}, lower[4] = {M[2], M[3], right[2], right[3]};
  float2 sums = make_float2(0, 0);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    // Sums over rows from g on.
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
      const float below_upper = __shfl_down_sync(kAllLanes, upper[e], distance);
      const float below_lower = __shfl_down_sync(kAllLanes, lower[e], distance);
      if (lane + distance < kWarpSize) {
        upper[e] += below_upper;
        lower[e] += below_lower;
      }
    }
    upper[e] += __shfl_sync(kAllLanes, lower[e], lane % 4);
    const int j = e / 2 * 8 + 2 * (lane % 4) + e % 2;
    if (j < lane / 4) sums.x += upper[e];
    if (j < lane / 4 + 8) sums.y += lower[e];
  }
  return make_float2(sum_over_lanes<4>(sums.x), sum_over_lanes<4>(sums.y));
}

// Sums over the 16 rows. The lanes of a column halve their columns with each sum, so that a lane ends with one number of
// eight columns side by side.
template <int kCount>
__device__ __forceinline__ void store_column_sums(float* columns, int count, int lane, const Pairs<kCount>& M) {
#pragma unroll
  for (int block = 0; block < kCount; ++block) {
    if (block >= count) continue;
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = M[2 * block + c / 2][c % 2] + M[2 * block + c / 2][c % 2 + 2];
    const bool far = lane & 16, odd = lane & 8;
    float y[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float given = far ? x[c] : x[c + 2], kept = far ? x[c + 2] : x[c];
      y[c] = kept + __shfl_xor_sync(kAllLanes, given, 16);
    }
    const float given = odd ? y[0] : y[1], kept = odd ? y[1] : y[0];
    float z = kept + __shfl_xor_sync(kAllLanes, given, 8);
    z += __shfl_xor_sync(kAllLanes, z, 4);
    if ((lane & 4) == 0) columns[16 * block + (far ? 8 : 0) + 2 * (lane % 4) + (odd ? 1 : 0)] = z;
  }
}

// The sums of M over rows, columns and within the diagonal block. `on_rows` has the factors that a row's elements have in
// the sums over columns and within.
template <int kCount, int kK>
__device__ __forceinline__ void add_up(Shared<kK>& s, const PairTask& task, int part, float2 on_rows, int lane,
                                       Pairs<kCount>& M) {
  float2 row = make_float2(0, 0), below = make_float2(0, 0);
#pragma unroll
  for (int n = 0; n < 2 * kCount; ++n) {
    if (n / 2 >= task.count) continue;
    const float2 sum = make_float2(M[n][0] + M[n][1], M[n][2] + M[n][3]);
    row.x += sum.x;
    row.y += sum.y;
    if (task.first + n / 2 < task.row) {
      below.x += sum.x;
      below.y += sum.y;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) M[n][e] *= e < 2 ? on_rows.x : on_rows.y;
  }
  store_column_sums<kCount>(s.columns[task.kind][task.row] + 16 * task.first, task.count, lane, M);
  row = make_float2(sum_over_lanes<4>(row.x), sum_over_lanes<4>(row.y));
  below = make_float2(sum_over_lanes<4>(below.x), sum_over_lanes<4>(below.y));
  const int i = 16 * task.row + lane / 4;
  if (lane % 4 == 0) {
    float* rows = task.kind == kPairsOfP ? s.row_of_P : s.row_of_A[part];
    float* rows_below = task.kind == kPairsOfP ? s.row_below_P : s.row_below_A[part];
    rows[i] = row.x;
    rows[i + 8] = row.y;
    rows_below[i] = below.x;
    rows_below[i + 8] = below.y;
  }
#pragma unroll
  for (int block = 0; block < kCount; ++block) {
    if (block >= task.count || task.first + block != task.row) continue;
    const float2 within = sums_within(M[2 * block], M[2 * block + 1], lane);
    if (lane % 4 == 0) {
      s.within[task.kind][i] = within.x;
      s.within[task.kind][i + 8] = within.y;
    }
  }
}

// x R^T, where load_x gives the A fragments of 16 rows.
template <DType kType, int kCount, int kK, class LoadX>
__device__ __forceinline__ void multiply_by_R(Shared<kK>& s, const PairTask& task, int lane, const LoadX& load_x,
                                              Pairs<kCount>& c) {
#pragma unroll 2
  for (int m = 0; m < Shape<kK>::kColumns / 16; ++m) {
    uint32_t a[4];
    load_x(m, a);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (n >= task.count) continue;
      uint32_t b[4];
      s.R_rows().load_b_transposed(16 * m, task.first + n, lane, b);
      mma<kType>(c[2 * n], a, b[0], b[1]);
      mma<kType>(c[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Turns the gradients x of pairs (i, j) into operands, x times `on_rows` times rstd_j exp(gamma_i - gamma_j), and into M,
// which value(n, e, x, f) makes of element e of tile n, its gradient and f = rstd_j exp(gamma_i - gamma_j). Zeros where j
// exceeds i - kBelow.
template <DType kType, int kBelow, int kCount, int kK, class Value>
__device__ __forceinline__ void store_pairs(const Shared<kK>& s, const LowerBlocks& tile, const PairTask& task,
                                            float2 on_rows, int lane, Pairs<kCount>& c, const Value& value) {
  const int i = 16 * task.row + lane / 4;
  const float gamma_i[2] = {s.gamma[i], s.gamma[i + 8]};
#pragma unroll
  for (int n = 0; n < 2 * kCount; ++n) {
    if (n / 2 >= task.count) continue;
    const int j = 16 * task.first + 8 * n + 2 * (lane % 4);
    const float2 gamma_j = *reinterpret_cast<const float2*>(s.gamma + j);
    const float2 rstd_j = *reinterpret_cast<const float2*>(s.rstd_k + j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float on_row = half == 0 ? on_rows.x : on_rows.y;
      float operand[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = c[n][2 * half + e];
        const bool there = i + 8 * half >= j + e + kBelow;
        const float f = (e == 0 ? rstd_j.x : rstd_j.y) * exp2_approx(gamma_i[half] - (e == 0 ? gamma_j.x : gamma_j.y));
        operand[e] = there ? on_row * f * x : 0.0f;
        x = there ? value(n, 2 * half + e, x, f) : 0.0f;
      }
      *reinterpret_cast<uint32_t*>(tile.segment(i + 8 * half, j / 8) + j % 8) = pack<kType>(operand[0], operand[1]);
    }
  }
}

template <DType kType, int kK>
__device__ __forceinline__ void pairs_of_P(const GradientArgs& args, const Item& item, Shared<kK>& s,
                                           const PairTask& task, int lane) {
  constexpr int kCount = 4;
  Pairs<kCount> c = {};
  multiply_by_R<kType, kCount>(
      s, task, lane, [&](int m, uint32_t(&a)[4]) { s.value_rows().load_a(16 * task.row, m, lane, a); }, c);
  const uint16_t* sP = args.chunk.factors.sP + item.at * kChunkRows * kChunkRows;
  const float scale = args.chunk.problem.scale;
  uint32_t values[2 * kCount][2];
#pragma unroll
  for (int n = 0; n < 2 * kCount; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * task.row + lane / 4 + 8 * half, j = 16 * task.first + 8 * n + 2 * (lane % 4);
      values[n][half] = n / 2 < task.count ? *reinterpret_cast<const uint32_t*>(sP + i * kChunkRows + j) : 0;
    }
  }
  const int i = 16 * task.row + lane / 4;
  const float2 on_rows = make_float2(scale * s.rstd_q[i], scale * s.rstd_q[i + 8]);
  store_pairs<kType, 0, kCount>(s, s.P, task, on_rows, lane, c, [&](int n, int e, float x, float) {
    const float2 pair = unpack<kType>(values[n][e / 2]);
    return x * (e % 2 == 0 ? pair.x : pair.y);
  });
  add_up<kCount>(s, task, 0, make_float2(1, 1), lane, c);
}

template <DType kType, int kK>
__device__ __forceinline__ void pairs_of_A(Shared<kK>& s, const PairTask& task, int lane) {
  constexpr int kCount = 2;
  Pairs<kCount> c = {}, kk = {};
  multiply_by_R<kType, kCount>(
      s, task, lane, [&](int m, uint32_t(&a)[4]) { s.Y_rows().load_c_transposed(16 * m, task.row, lane, a); }, c);
#pragma unroll 2
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[4];
    s.keys().load_a(16 * task.row, m, lane, a);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (n >= task.count) continue;
      uint32_t b[4];
      s.keys().load_b(16 * (task.first + n), m, lane, b);
      mma<kType>(kk[2 * n], a, b[0], b[1]);
      mma<kType>(kk[2 * n + 1], a, b[2], b[3]);
    }
  }
  const int i = 16 * task.row + lane / 4;
  const float2 rstd = make_float2(-s.rstd_k[i], -s.rstd_k[i + 8]), beta = make_float2(s.beta[i], s.beta[i + 8]);
  const float2 on_rows = make_float2(beta.x * rstd.x, beta.y * rstd.y);
  store_pairs<kType, 1, kCount>(s, s.A, task, on_rows, lane, c, [&](int n, int e, float x, float f) {
    return x * ((e < 2 ? rstd.x : rstd.y) * f) * kk[n][e];
  });
  add_up<kCount>(s, task, task.first > 0 ? 1 : 0, beta, lane, c);
}

// Step 3 ---------------------------------------------------------------------------------------------------------------

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

// Numbers per token ----------------------------------------------------------------------------------------------------

// Sums over the aligned lanes before this one, and over those from this one on.
template <int kLanes>
__device__ __forceinline__ float sum_before(float value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane % kLanes >= distance) value += before;
  }
  const float before = __shfl_up_sync(kAllLanes, value, 1);
  return lane % kLanes == 0 ? 0.0f : before;
}
template <int kLanes>
__device__ __forceinline__ float sum_since(float value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float after = __shfl_down_sync(kAllLanes, value, distance);
    if (lane % kLanes + distance < kLanes) value += after;
  }
  return value;
}

// What the first 64 threads have of their token, over the ranges of a head or of all heads.
struct TokenSums {
  float yv = 0, dg = 0, dbeta = 0;
  float along_q = 0, along_k = 0;
};

// sum_{i >= m > j} M_ij + sum_{i >= m} a_i + sum_{j < m} b_j, by the first two warps. M in blocks: the rows of this
// token's block from m on, its columns before m, whole blocks that lie around it, and the diagonal block. Only sums, no
// differences.
template <int kK>
__device__ __forceinline__ float gate_gradient(const Shared<kK>& s, int m, int lane) {
  const int block = m / 16, l = m % 16;
  const float beta = s.beta[m];
  float column = 0, around = 0;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
    for (int row = 1; row < kBlocks; ++row) {
      if (row <= block) continue;
      column += s.columns[kind][row][m];
#pragma unroll
      for (int before = 0; before < kBlocks - 2; ++before) {
        if (before < block) around += s.columns[kind][row][16 * before + l];
      }
    }
  }
  const float below = s.row_below_P[m] + beta * (s.row_below_A[0][m] + s.row_below_A[1][m]);
  const float pairs = (s.within[kPairsOfP][m] + s.within[kPairsOfA][m]) + sum_since<16>(below, lane) +
                      sum_before<16>(column, lane) + sum_over_lanes<16>(around);
  const auto a_at = [&](int i) { return (s.a_q[0][i] + s.a_q[1][i]) + s.beta[i] * (s.a_k[0][i] + s.a_k[1][i]); };
  const auto b_at = [&](int j) { return s.b[0][j] + s.b[1][j]; };
  const bool later = m >= kWarpSize;
  const float other = sum_over_lanes<kWarpSize>(later ? b_at(lane) : a_at(kWarpSize + lane));
  const float a_sum = sum_since<kWarpSize>(a_at(m), lane) + (later ? 0.0f : other);
  const float b_sum = sum_before<kWarpSize>(b_at(m), lane) + (later ? other : 0.0f);
  return pairs + a_sum + b_sum;
}

// dg and dbeta of a value head to the caller, and its share of the gates' parameters. By the first two warps.
template <int kK>
__device__ __forceinline__ void finish_head(const GradientArgs& args, const Item& item, Shared<kK>& s, int m, int lane,
                                            const TokenSums& sums) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const bool exists = m < item.span.length;
  const int64_t token = item.span.begin + m;
  if (args.dbeta.present() && exists) {
    store_float(args.dbeta.data, args.dbeta.dtype, row_offset(args.dbeta, item.span.batch, token, item.head),
                beta_adjoint(p, s.beta[m], sums.dbeta));
  }
  if (p.gate == Gate::kNone) return;
  GateGradient d = {0.0f, 0.0f};
  if (exists) {
    d = {sums.dg, 0.0f};
    if (p.gate_in_kernel) {
      const float x = load_float(p.g.data, p.g.dtype, row_offset(p.g, item.span.batch, token, item.head));
      d = log_decay_adjoint(p, x, gate_rate(p, item.head), gate_bias(p, item.head, 0), sums.dg);
    }
    if (args.dg.present()) {
      store_float(args.dg.data, args.dg.dtype, row_offset(args.dg, item.span.batch, token, item.head), d.x);
    }
  }
  if (args.parameter_parts == nullptr) return;
  double a_log = d.a_log, bias = d.x;
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    a_log += __shfl_xor_sync(kAllLanes, a_log, distance);
    bias += __shfl_xor_sync(kAllLanes, bias, distance);
  }
  auto* halves = reinterpret_cast<double*>(s.within);  // read by both warps before, and by no other
  named_barrier<1>(kChunkRows);
  if (lane == 0) {
    halves[m / kWarpSize * 2] = a_log;
    halves[m / kWarpSize * 2 + 1] = bias;
  }
  named_barrier<2>(kChunkRows);
  if (m < 2) args.parameter_parts[item.at * 2 + m] = halves[m] + halves[2 + m];
}

// The kernel -----------------------------------------------------------------------------------------------------------

// Two blocks of K = 128 on a multiprocessor of 228 KB, each with 1 KB of the system's.
static_assert(sizeof(Shared<128>) <= (228 / 2 - 1) * 1024);

template <DType kType, int kK>
struct Gradients {
  using X = Shape<kK>;

  const GradientArgs& args;
  Shared<kK>& s;
  int warp, lane, thread;
  TokenNumbers numbers = {};  // of the item that is on its way; of the first 64 threads

  // A barrier after which nothing is known of a thread's number: what is computed from it is computed where it is
  // needed, not in an earlier step and kept. Registers are short.
  __device__ __forceinline__ void step() {
    __syncthreads();
    lane = opaque_below<kWarpSize>(lane);
    thread = opaque_below<X::kThreads>(thread);
  }
  __device__ __forceinline__ int block() const { return warp % kBlocks; }                   // of 16 tokens
  __device__ __forceinline__ int group() const { return warp / kBlocks; }                   // of channels
  __device__ __forceinline__ int channel() const { return group() * (X::kChannels / 16); }  // the first, in 16s
  __device__ __forceinline__ int token() const { return thread; }                           // of the numbers
  __device__ __forceinline__ bool has_token() const { return thread < kChunkRows; }

  // The lane's two rows with a factor for each.
  template <class Factor>
  __device__ __forceinline__ RowPair rows(const Factor& factor) const {
    const int i = 16 * block() + lane / 4;
    return {i, make_float2(factor(i), factor(i + 8))};
  }

  // Steps 1 and 2: afterwards d_o is where v was, and P' where J was.
  __device__ __forceinline__ void pair_gradients(const Item& item, TokenSums& sums) {
    uint32_t bD[kBlocks][4];
    const bool has_columns = warp < X::kColumns / 16;
    if (has_columns) residuals<kType>(s, warp, lane, bD);
#pragma unroll
    for (int at = 0; at < 2 * kBlocks; at += X::kWarps) {
      dot_values<kType>(s, (warp + at) % kBlocks, (warp + at) / kBlocks, lane);
    }
    step();
    load_value_rows<X::kThreads>(s.value_rows(), args.d_o, args.vector_d_o, item, args.chunk.problem.head_dim_v,
                                 thread);
    commit_copies();
    if (has_token()) sums.yv = s.yv[0][token()] + s.yv[1][token()];
    if (has_columns) writes<kType>(s, warp, lane, bD);
    wait_copies<0>();
    step();
#pragma unroll 1
    for (int at = warp; at < 2 * kTaskLists; at += X::kWarps) {
      const uint64_t tasks = at < kTaskLists ? kFirstTasks : kSecondTasks;
      const PairTask task = PairTask::of(static_cast<uint32_t>(tasks >> 8 * (at % kTaskLists)));
      if (task.kind == kPairsOfP) pairs_of_P<kType>(args, item, s, task, lane);
      if (task.kind == kPairsOfA) pairs_of_A<kType>(s, task, lane);
    }
  }

  // Products with the pairs of tokens: rows of A' k and columns of A'^T k.
  __device__ __forceinline__ void add_pairs_of_A(Rows<kK>& dk) const {
    const LowerBlocks A = s.A;
#pragma unroll 1
    for (int m = 0; m < kBlocks; ++m) {
      uint32_t a[4];
      if (m <= block()) {
        A.load_a(16 * block(), m, lane, a);
        add_rows<kType, kK>(a, s.keys(), m, channel(), lane, dk);
      }
      if (m >= block()) {
        A.load_c_transposed(16 * m, block(), lane, a);
        add_rows<kType, kK>(a, s.keys(), m, channel(), lane, dk);
      }
    }
  }

  // P' k and P'^T q.
  __device__ __forceinline__ void add_pairs_of_P(Rows<kK>& dq, Rows<kK>& dk) const {
    const LowerBlocks P = s.P;
#pragma unroll 1
    for (int m = 0; m < kBlocks; ++m) {
      uint32_t a[4];
      if (m <= block()) {
        P.load_a(16 * block(), m, lane, a);
        add_rows<kType, kK>(a, s.keys(), m, channel(), lane, dq);
      }
      if (m >= block()) {
        P.load_c_transposed(16 * m, block(), lane, a);
        add_rows<kType, kK>(a, s.queries(), m, channel(), lane, dk);
      }
    }
  }

  // Adds what the item has, and stores the sum after the last one. For the norm, along_of(i) is the item's share of x . dx
  // of row i; where there are several items, the first 64 threads have the sum of the shares and publish it in `along`.
  template <class AlongOf>
  __device__ __forceinline__ void finish_rows(const DeviceTensor& out, bool vectors, const Item& item, int which,
                                              const SharedTile<kK>& tile, const float* rstd, float* along, float sum,
                                              const AlongOf& along_of, Rows<kK>& x) {
    const bool norm = args.chunk.problem.qk_l2norm, only = item.first && item.last;
    if (norm && !only) {
      if (has_token()) along[token()] = sum;
      step();
    }
    carry<kK>(args, item, which, thread, x);
    if (!item.last || !out.present()) return;
    const int i = 16 * block() + lane / 4;
    if (norm) {
      const RowPair own = rows([&](int j) { return rstd[j] * rstd[j] * (only ? along_of(j) : along[j]); });
      subtract_along<kType, kK>(tile, own, channel(), lane, x);
    }
    store_key_rows<kType, kK>(out, vectors, item, args.chunk.problem.head_dim_k, i, channel(), lane, x);
  }

  // The item's share of q . dq and k . dk of a row, and of dbeta but for Y . v.
  __device__ __forceinline__ float along_q(int i) const { return s.row_of_P[i] + s.a_q[0][i] + s.a_q[1][i]; }
  __device__ __forceinline__ float reading(int i) const {
    return s.a_k[0][i] + s.a_k[1][i] + s.row_of_A[0][i] + s.row_of_A[1][i];
  }
  __device__ __forceinline__ float along_k(int i) const {
    float writing = s.b[0][i] + s.b[1][i];
    for (int row = i / 16; row < kBlocks; ++row) {
      writing += s.columns[kPairsOfP][row][i] + s.columns[kPairsOfA][row][i];
    }
    return s.beta[i] * reading(i) + writing;
  }

  // Step 3.
  __device__ __forceinline__ void key_gradients(const Item& item, TokenSums& sums) {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    Rows<kK> dq = {}, dk = {};
    read_state<kType, kK>(s, block(), channel(), lane, dq, dk);
    step();
    load_key_rows<X::kThreads, kK>(args.chunk, p.q, item, s.queries(), thread);
    commit_copies();
    copy_rows<X::kColumns, X::kThreads>(s.state_rows(), args.G + (item.at * args.padded_v + item.column) * kK, kK,
                                        args.padded_v - item.column, kK, thread);
    commit_copies();
    scale_and_dot<kType, kK>(s.keys(), rows([&](int i) { return -s.on_read[i]; }), channel(), lane, dk, s.a_k[group()]);
    const RowPair beta = rows([&](int i) { return s.beta[i]; });
#pragma unroll
    for (int n = 0; n < X::kChannels / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] *= e < 2 ? beta.factor.x : beta.factor.y;
    }
    add_pairs_of_A(dk);
    wait_copies<1>();
    step();
    scale_and_dot<kType, kK>(s.queries(), rows([&](int i) { return p.scale * exp2_approx(s.gamma[i]) * s.rstd_q[i]; }),
                             channel(), lane, dq, s.a_q[group()]);
    add_pairs_of_P(dq, dk);
    wait_copies<0>();
    step();
    if (has_token()) sums.along_q += along_q(token());
    finish_rows(
        args.dq, args.vector_dq, item, 0, s.queries(), s.rstd_q, s.row_of_P, sums.along_q,
        [&](int i) { return along_q(i); }, dq);
    add_writing(item, dk);
    if (thread == 0) s.items[&item == s.items].ready = is_ready(other(item));
    step();
    if (other(item).ready) load_operands(other(item));
    if (has_token()) {
      sums.dbeta += sums.yv + reading(token());
      sums.along_k += along_k(token());
    }
    finish_rows(
        args.dk, args.vector_dk, item, 1, s.keys(), s.rstd_k, s.row_of_A[0], sums.along_k,
        [&](int i) { return along_k(i); }, dk);
  }

  // dk += w (R G^T)
  __device__ __forceinline__ void add_writing(const Item& item, Rows<kK>& dk) const {
    Rows<kK> x = {};
#pragma unroll 2
    for (int m = 0; m < X::kColumns / 16; ++m) {
      uint32_t R[4];
      s.R_rows().load_c_transposed(16 * m, block(), lane, R);
      add_rows<kType, kK>(R, s.state_rows(), m, channel(), lane, x);
    }
    const float last = s.gamma[kChunkRows - 1];
    scale_and_dot<kType, kK>(s.keys(), rows([&](int j) { return exp2_approx(last - s.gamma[j]) * s.rstd_k[j]; }),
                             channel(), lane, x, s.b[group()]);
#pragma unroll
    for (int n = 0; n < X::kChannels / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] += x[n][e];
    }
    if (args.chunk.problem.gate != Gate::kNone) dot_states<kType>(args, item, s, warp, lane);
  }

  __device__ __forceinline__ const Item& other(const Item& item) const { return s.items[&item == s.items]; }

  // The item is on its way. Starts the copies of the next one.
  __device__ __forceinline__ void run(const Item& item, TokenSums& sums) {
    if (has_token()) store_numbers(numbers, s, thread);
    wait_copies<0>();
    step();
    const BackProgress& progress = args.chunk.factors.progress;
    uint32_t claimed = 0;
    if (thread == 0 && item.last && progress.present()) claimed = claim(progress.counter);
    if (item.first) sums.along_q = sums.along_k = 0;
    if (item.opens) sums.dg = sums.dbeta = 0;
    pair_gradients(item, sums);
    if (thread == 0) {
      const int64_t pair = progress.present() ? pair_from_the_end(args.chunk, claimed) : item.pair + gridDim.x;
      find_next<X::kColumns>(args.chunk, item, pair, s.items[&item == s.items]);
    }
    key_gradients(item, sums);
    if (has_token()) {
      if (args.chunk.problem.gate != Gate::kNone) {
        float states = 0;
        for (int w = 0; w < X::kWarps; ++w) states += s.state_dot[w];
        sums.dg += gate_gradient(s, token(), lane) + exp2_approx(s.gamma[kChunkRows - 1]) * states;
      }
      if (item.closes) finish_head(args, item, s, token(), lane, sums);
    }
    step();
    const Item& next = other(item);
    if (next.span.sequence < 0) return;
    if (next.first) load_keys_of(next);
    if (!next.ready) {
      wait_until_ready(next);
      load_operands(next);
    }
  }

  // Whether the scan back has left what the item needs.
  __device__ __forceinline__ bool is_ready(const Item& item) const {
    if (item.span.sequence < 0) return false;
    const BackProgress& progress = args.chunk.factors.progress;
    bool ready = true;
    for (int range = 0; range < progress.ranges; ++range) {
      ready = ready && is_published(progress.ready + item.at * progress.ranges + range);
    }
    return ready;
  }
  __device__ __forceinline__ void wait_until_ready(const Item& item) {
    if (thread == 0) {
      while (!is_ready(item)) {
      }
    }
    step();
  }

  // Of an item that is ready.
  __device__ __forceinline__ void load_operands(const Item& item) {
    load_first(args, item, s, thread);
    commit_copies();
    if (has_token()) numbers = load_numbers(args.chunk.factors, item.at, thread);
  }

  // The keys stay for all items of a key head.
  __device__ __forceinline__ void load_keys_of(const Item& item) const {
    load_key_rows<X::kThreads, kK>(args.chunk, args.chunk.problem.k, item, s.keys(), thread);
    commit_copies();
  }

  // A block takes one pair of a chunk and a key head after the other: beside the scan back whichever is next, after it
  // every gridDim.x-th.
  __device__ __forceinline__ void run_all() {
    const BackProgress& progress = args.chunk.factors.progress;
    if (!progress.present()) wait_for_previous_kernels();
    if (thread == 0) {
      const int64_t pair =
          progress.present() ? pair_from_the_end(args.chunk, claim(progress.counter)) : int64_t{blockIdx.x};
      first_item<X::kColumns>(args.chunk, pair, s.items[0]);
    }
    step();
    if (s.items[0].span.sequence < 0) return;
    load_keys_of(s.items[0]);
    wait_until_ready(s.items[0]);
    load_operands(s.items[0]);
    TokenSums sums;
    for (int turn = 0; s.items[turn].span.sequence >= 0; turn ^= 1) run(s.items[turn], sums);
  }
};

template <DType kType, int kK>
__global__ void __launch_bounds__(Shape<kK>::kThreads, kK == 256   ? 1
                                                       : kK == 128 ? 2
                                                                   : 4)
    gradients_kernel(const __grid_constant__ GradientArgs args) {
  // With BackProgress the scan back lets this kernel start when it has waited for all kernels before itself, and what it
  // leaves is taken as it comes; that it ends before this kernel does is for those after.
  Gradients<kType, kK>{args, dynamic_shared<Shared<kK>>(), uniform_warp(), static_cast<int>(threadIdx.x) % kWarpSize,
                       static_cast<int>(threadIdx.x)}
      .run_all();
  wait_for_previous_kernels();
}

}  // namespace

template <DType kType>
void launch_gradients_of(const GradientArgs& args, int padded_k, int64_t blocks, const Context& context) {
  with_padded_k(padded_k, [&]<int kK>() {
    launch<gradients_kernel<kType, kK>>("delta_rule chunk_16bit gradients", context,
                                        {static_cast<unsigned>(blocks), Shape<kK>::kThreads, sizeof(Shared<kK>), true},
                                        args);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
