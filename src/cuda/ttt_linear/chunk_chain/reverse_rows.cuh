// What the warps of the reverse kernel have in common: signals, 16-bit operands of rows, results to memory.
#pragma once

#include "cuda/common/warp_roles.cuh"
#include "cuda/ttt_linear/chunk_chain/backward.cuh"
#include "cuda/ttt_linear/chunk_chain/solo_rows.cuh"
#include "cuda/ttt_linear/chunk_chain/turn_signal.cuh"
#include "cuda/ttt_linear/chunk_rows.cuh"

namespace fastweight::cuda::ttt {
namespace {

// What the warps tell each other (warp_roles.cuh), by the number of the mini-batch in the order of the chain. A group
// prepares t + 2 before it knows that t is done, so the signals of its mini-batches alternate.
static_assert(kTurns == 2 * kMostGroups);
enum { kPrepared = 1, kDone = kPrepared + kTurns, kRowSums = kDone + kTurns, kGroupRows };

struct ReverseSignals {
  int threads;  // of the chain, and of a group
  TurnSignal<kPrepared> prepared{2 * threads};
  TurnSignal<kDone> done{2 * threads};
  WarpSignal<kRowSums> row_sums{threads};  // B: of all warps of the chain

  // Of all warps of a group.
  __device__ __forceinline__ void meet_group(int group) const {
    group == 0 ? WarpSignal<kGroupRows>{threads}.wait() : WarpSignal<kGroupRows + 1>{threads}.wait();
  }
};

// The tokens of mini-batch number t in the order of the chain.
struct ReverseOrder {
  int64_t batch, begin;
  int64_t count;  // of mini-batches
  int first;      // tokens of the first in this order, the last of the sequence

  __device__ explicit ReverseOrder(const SequenceSpan& span)
      : batch(span.batch),
        begin(span.begin),
        count(chunks_of(span.length, kTileRows)),
        first(static_cast<int>(span.length - (count - 1) * kTileRows)) {}

  __device__ __forceinline__ int64_t number(int64_t t) const { return count - 1 - t; }
  __device__ __forceinline__ int64_t token(int64_t t) const { return begin + number(t) * kTileRows; }
  __device__ __forceinline__ int tokens(int64_t t) const { return t == 0 ? first : kTileRows; }
};

// The fragment of 16 tokens and the warp's columns; number 2 m + half has the tokens of `half` and columns 2m, 2m + 1 of
// each lane. And transposed: the left operand of x^T k, which is also the right one of P x.
template <DType kType>
__device__ __forceinline__ uint4 pack_rows(const float (&x)[2][4], float factor) {
  uint32_t a[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = &x[i % 2][i / 2 * 2];
    a[i] = pack<kType>(factor * pair[0], factor * pair[1]);
  }
  return make_uint4(a[0], a[1], a[2], a[3]);
}
template <DType kType, bool kFull>
__device__ __forceinline__ uint4 pack_rows(const float (&x)[2][4], float factor, const Columns<kFull>& columns) {
  const uint4 a = pack_rows<kType>(x, factor);
  return make_uint4(columns.masked_pair(0, a.x), columns.masked_pair(0, a.y), columns.masked_pair(1, a.z),
                    columns.masked_pair(1, a.w));
}
__device__ __forceinline__ void transpose_rows(const uint4& a, uint32_t (&transposed)[4]) {
  transposed[0] = transpose_8x8(a.x);
  transposed[1] = transpose_8x8(a.z);
  transposed[2] = transpose_8x8(a.y);
  transposed[3] = transpose_8x8(a.w);
}

// The power of two below the largest of the warp's numbers, and 1 for bf16, which has the range of fp32.
template <DType kType, int kCount>
__device__ __forceinline__ float unit_of(const float (&x)[kCount]) {
  if constexpr (kType == DType::kBF16) return 1.0f;
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
  }
  return fmaxf(__uint_as_float(__float_as_uint(most) & 0x7f800000u), 0x1p-100f);
}

// Element i of the C tiles of a matrix [16 x 16], or 0 above its diagonal.
__device__ __forceinline__ float lower(const Lane& at, int i, float value) {
  return 8 * (i / 4) + 2 * at.t + i % 2 <= at.row(0, i / 2 % 2) ? value : 0.0f;
}

// (diag(eta) X)^T of a matrix [16 x 16] in C tiles as an A fragment, in units that are returned.
template <DType kType>
__device__ __forceinline__ float transpose_weighted(const float (&X)[2][4], const float (&eta)[2], uint32_t (&a)[4]) {
  float weighted[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) weighted[i] = eta[i / 2 % 2] * X[i / 4][i % 4];
  const float unit = unit_of<kType>(weighted), inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int from = i % 2 * 4 + i / 2 * 2;  // tokens of rows and columns change places
    a[i] = transpose_8x8(pack<kType>(inverse * weighted[from], inverse * weighted[from + 1]));
  }
  return unit;
}

// c += rows of `a` times a state, or its gradient, along the columns of warp w: the 16 keys [16 m, 16 m + 16).
template <DType kType, int kD>
__device__ __forceinline__ void multiply_transposed(float (&c)[2][4], const uint4& rows, const StateTile<kD>& state,
                                                    int w, int m, int lane) {
  const uint32_t a[4] = {rows.x, rows.y, rows.z, rows.w};
  uint32_t b[4];
  ldmatrix_transposed(state.address(w, m, lane), b);
  mma<kType>(c[0], a, b[0], b[2]);
  mma<kType>(c[1], a, b[1], b[3]);
}

// The lane's pairs of 16 keys of a result [16 tokens x D] to memory; values[j] has keys 8 j + 2 t and the one after it, of
// token g and of token g + 8. The result has the type of q and pairs lie together, or else anything is possible.
template <DType kType>
__device__ __forceinline__ void store_keys(const DeviceTensor& x, int64_t offset, int count, int D, const Lane& at,
                                           const float (&values)[2][4]) {
  const int key = kWarpColumns * at.warp + 2 * at.t;
  if (x.aligned_vec4 && x.dtype == kType) {
    auto* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(x.data) + offset + at.g * x.strides[1] + key);
#pragma unroll
    for (int half = 0; half < 2; ++half, to += 4 * x.strides[1]) {
      const bool exists = at.row(0, half) < count;
      if (exists && key < D) to[0] = pack<kType>(values[0][2 * half], values[0][2 * half + 1]);
      if (exists && key + 8 < D) to[4] = pack<kType>(values[1][2 * half], values[1][2 * half + 1]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = at.row(0, i / 2 % 2), column = key + i / 4 * 8 + i % 2;
    if (row >= count || column >= D) continue;
    store_float(x.data, x.dtype, offset + row * x.strides[1] + column * x.strides[3], values[i / 4][i % 4]);
  }
}

// Sums over the rows of a warp's columns to one row of shared memory, in fp64.
__device__ __forceinline__ void put_parameters(const float (&dw)[4], const float (&db)[4], const Lane& at,
                                               double* dw_row, double* db_row) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    auto w = static_cast<double>(dw[e]), b = static_cast<double>(db[e]);
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
      w += __shfl_xor_sync(kAllLanes, w, distance);
      b += __shfl_xor_sync(kAllLanes, b, distance);
    }
    if (at.g == 0) {
      dw_row[at.column + e] = w;
      db_row[at.column + e] = b;
    }
  }
}

}  // namespace
}  // namespace fastweight::cuda::ttt
