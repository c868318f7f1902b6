// Of the kernel in gradients.cuh: what a block has in shared memory, and the copies of an item's first operands.
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
  copy_rows<X::kColumns, X::kThreads>(s.Y_rows(), args.Y + (item.slot * args.padded_v + item.column) * kChunkRows,
                                      kChunkRows, args.padded_v - item.column, kChunkRows, thread);
  copy_lower_blocks<X::kThreads>(s.P, args.chunk.factors.J(item.factors), thread);
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
