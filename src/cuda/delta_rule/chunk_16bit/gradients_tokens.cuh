// Of the kernel in gradients.cuh: the numbers per token, dg and dbeta, from sums of the steps before.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_keys.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

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

// sum_{i >= m > j} M_ij + sum_{i >= m} a_i + sum_{j < m} b_j, by the two warps of 64 threads m. M in blocks: the rows of
// this token's block from m on, its columns before m, whole blocks that lie around it, and the diagonal block. Only sums,
// no differences. M comes as its sums: over the rows of block `row`, column_at(row, j); over the columns of row m before its
// diagonal block, `below`; and within the diagonal block, `within`.
template <class ColumnAt, class A, class B>
__device__ __forceinline__ float gate_gradient(float below, float within, const ColumnAt& column_at, const A& a_at,
                                               const B& b_at, int m, int lane) {
  const int block = m / 16, l = m % 16;
  float column = 0, around = 0;
#pragma unroll
  for (int row = 1; row < kBlocks; ++row) {
    if (row <= block) continue;
    column += column_at(row, m);
#pragma unroll
    for (int before = 0; before < kBlocks - 2; ++before) {
      if (before < block) around += column_at(row, 16 * before + l);
    }
  }
  const float pairs = within + sum_since<16>(below, lane) + sum_before<16>(column, lane) + sum_over_lanes<16>(around);
  const bool later = m >= kWarpSize;
  const float other = sum_over_lanes<kWarpSize>(later ? b_at(lane) : a_at(kWarpSize + lane));
  const float a_sum = sum_since<kWarpSize>(a_at(m), lane) + (later ? 0.0f : other);
  const float b_sum = sum_before<kWarpSize>(b_at(m), lane) + (later ? other : 0.0f);
  return pairs + a_sum + b_sum;
}

template <int kK>
__device__ __forceinline__ float gate_gradient(const Shared<kK>& s, int m, int lane) {
  return gate_gradient(
      s.row_below_P[m] + s.beta[m] * (s.row_below_A[0][m] + s.row_below_A[1][m]),
      s.within[kPairsOfP][m] + s.within[kPairsOfA][m],
      [&](int row, int j) { return s.columns[kPairsOfP][row][j] + s.columns[kPairsOfA][row][j]; },
      [&](int i) { return (s.a_q[0][i] + s.a_q[1][i]) + s.beta[i] * (s.a_k[0][i] + s.a_k[1][i]); },
      [&](int j) { return s.b[0][j] + s.b[1][j]; }, m, lane);
}

// dg and dbeta of a value head to the caller, and its share of the gates' parameters. By two warps, which have four numbers
// to exchange their sums.
__device__ __forceinline__ void finish_head(const GradientArgs& args, const Item& item, float beta, double* halves,
                                            int m, int lane, const TokenSums& sums) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const bool exists = m < item.span.length;
  const int64_t token = item.span.begin + m;
  if (args.dbeta.present() && exists) {
    store_float(args.dbeta.data, args.dbeta.dtype, row_offset(args.dbeta, item.span.batch, token, item.head),
                beta_adjoint(p, beta, sums.dbeta));
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
  named_barrier<1>(kChunkRows);
  if (lane == 0) {
    halves[m / kWarpSize * 2] = a_log;
    halves[m / kWarpSize * 2 + 1] = bias;
  }
  named_barrier<2>(kChunkRows);
  if (m < 2) args.parameter_parts[item.at * 2 + m] = halves[m] + halves[2 + m];
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
