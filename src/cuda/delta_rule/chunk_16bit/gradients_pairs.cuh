// Of the kernel in gradients.cuh: step 2, the gradients of pairs of tokens, and the sums of M.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_writes.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

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
  const uint16_t* sP = args.chunk.factors.sP(item.factors);
  const float scale = args.chunk.problem.scale;
  uint32_t values[2 * kCount][2];
#pragma unroll
  for (int n = 0; n < 2 * kCount; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = lower_offset(task.row, lane / 4 + 8 * half, 16 * task.first + 8 * n + 2 * (lane % 4));
      values[n][half] = n / 2 < task.count ? *reinterpret_cast<const uint32_t*>(sP + at) : 0;
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

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
