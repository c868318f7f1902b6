// What the scans over the tiles of a sequence share, forward and backward: the operands of a tile in shared memory,
// rows of values in registers, and the products of both with a state that is transposed, as scan.cu has it.
#pragma once

#include "cuda/delta_rule/chunk_fp32/chunk.cuh"
#include "cuda/delta_rule/scan_part.cuh"

namespace fastweight::cuda::chunk_fp32 {

inline constexpr int kTokenTiles = kTileRows / 8;  // C tiles along the tokens

// X^T, O^T, .. of a tile: element e of C tile n belongs to token 8 n + 2 t + e % 2 and column g + 8 (e / 2).
using Values = float[kTokenTiles][4];

// J or sP in shared memory, in rows that four lanes along a row read without conflicts.
struct LowerTile {
  static constexpr int kPitch = kTileRows + 8;
  alignas(16) float data[kTileRows * kPitch];

  // B of the transposed matrix, as FloatTile::pair_along.
  __device__ __forceinline__ float2 pair_along(int n, int m, int lane) const {
    return *reinterpret_cast<const float2*>(data + (8 * n + lane / 4) * kPitch + 8 * m + 2 * (lane % 4));
  }
  // B of the matrix itself, as FloatTile::pair_across.
  __device__ __forceinline__ float2 pair_across(int m, int n, int lane) const {
    const float* x = data + (8 * m + 2 * (lane % 4)) * kPitch + 8 * n + lane / 4;
    return make_float2(x[0], x[kPitch]);
  }
};

// One tile's operands. Per channel, readers and writers are copies of their own.
template <int kK, bool kPerChannel>
struct Stage {
  alignas(128) float keys[(kPerChannel ? kKeyCopies : 2) * kTileRows * kK];
  LowerTile J, sP;
  alignas(16) float token[kTokenFactors * kTileRows];
  alignas(16) float total[kPerChannel ? kK : 4];

  __device__ FloatTile<kK> tile(int copy) { return {keys + copy * kTileRows * kK}; }
  __device__ FloatTile<kK> reader() { return tile(kReader); }
  __device__ FloatTile<kK> queries() { return tile(kQuery); }
  __device__ FloatTile<kK> writer() { return tile(kPerChannel ? kWriter : kReader); }
};

__device__ __forceinline__ void copy_lower(LowerTile& tile, const float* source) {
  for (int at = threadIdx.x; at < kSquare / 4; at += blockDim.x) {
    const int row = at / (kTileRows / 4), column = at % (kTileRows / 4) * 4;
    copy_async(shared_address(tile.data + row * LowerTile::kPitch + column), source + at * 4, true);
  }
}

template <int kK, bool kPerChannel>
__device__ __forceinline__ void load_stage(const TileArgs& args, const ScanPart& part, const SequenceSpan& span,
                                           int64_t position, Stage<kK, kPerChannel>& stage) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t item = (part.first_chunk + position) * p.num_value_heads + part.head;
  if constexpr (kPerChannel) {
    const float* keys = args.factors.keys + item * kKeyCopies * kTileRows * kK;
    for (int at = threadIdx.x; at < kKeyCopies * kTileRows * kK / 4; at += blockDim.x) {
      const FloatTile<kK> tile = stage.tile(at / (kTileRows * kK / 4));
      const int row = at / (kK / 4) % kTileRows, column = at % (kK / 4) * 4;
      copy_async(shared_address(&tile.at(row, column)), keys + at * 4, true);
    }
  } else {
    const int64_t first = position * kTileRows, token = span.begin + first;
    const int rows = static_cast<int>(min(span.length - first, int64_t{kTileRows}));
    load_rows(stage.reader(), p.k, row_offset(p.k, span.batch, token, part.key_head), rows, p.head_dim_k);
    load_rows(stage.queries(), p.q, row_offset(p.q, span.batch, token, part.key_head), rows, p.head_dim_k);
  }
  copy_lower(stage.J, args.factors.J + item * kSquare);
  copy_lower(stage.sP, args.factors.sP + item * kSquare);
  copy_floats(stage.token, args.factors.token + item * kTokenFactors * kTileRows, kTokenFactors * kTileRows,
              threadIdx.x, blockDim.x);
  copy_floats(stage.total, args.factors.total + item * args.factors.total_width, args.factors.total_width, threadIdx.x,
              blockDim.x);
}

// The warp's columns of the rows of a tile, in a [B, T, HV, V] tensor.
struct ValueRows {
  int64_t offset;  // of the first token
  int rows;
  int column, width;  // the warp's first column; V
};

// access(offset, n, e) for the lane's elements that exist.
template <class Access>
__device__ __forceinline__ void for_each_value(const DeviceTensor& x, const ValueRows& at, int lane,
                                               const Access& access) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 8 * n + 2 * (lane % 4) + e % 2, column = at.column + lane / 4 + e / 2 * 8;
      if (row < at.rows && column < at.width) {
        access(at.offset + row * x.strides[1] + column * x.strides[3], n, e);
      }
    }
  }
}

using RawValues = uint32_t[kTokenTiles][4];

// Only loads, so that nobody waits before the values are used.
__device__ __forceinline__ void load_values(const DeviceTensor& x, const ValueRows& at, int lane, RawValues& bits) {
  with_type(x.dtype, [&](auto type) {
    for_each_value(x, at, lane, [&](int64_t offset, int n, int e) {
      bits[n][e] = load_bits(element_at(x.data, type.value, offset), type.value);
    });
  });
}

__device__ __forceinline__ void store_values(const DeviceTensor& x, const ValueRows& at, int lane,
                                             const Values& values) {
  with_type(x.dtype, [&](auto type) {
    for_each_value(x, at, lane,
                   [&](int64_t offset, int n, int e) { store_float(x.data, type.value, offset, values[n][e]); });
  });
}

// X = S^T rows^T of one tile of rows, interrupted after 128 channels.
template <int kK>
__device__ __forceinline__ void multiply_state(const FloatTile<kK>& rows, int lane, const float (&S)[kK / 8][4],
                                               Values& X) {
  constexpr int kPiece = kK < 128 ? kK / 8 : 16;  // C tiles of S
#pragma unroll
  for (int first = 0; first < kK / 8; first += kPiece) {
    SplitSum x[kTokenTiles];
#pragma unroll
    for (int m = first; m < first + kPiece; ++m) {
      const SplitTile s = split_tile(S[m]);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) multiply(x[n], s, rows.pair_along(n, m, lane));
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) X[n][e] = first == 0 ? x[n].total(e) : X[n][e] + x[n].total(e);
    }
  }
}

// The factors of the two tokens of a C tile that a lane has.
__device__ __forceinline__ float2 token_pair(const float* token, int factor, int n, int lane) {
  return *reinterpret_cast<const float2*>(token + factor * kTileRows + 8 * n + 2 * (lane % 4));
}

// left right^T, where right is lower triangular.
__device__ __forceinline__ void multiply_lower(const SplitTile (&left)[kTokenTiles], const LowerTile& right, int lane,
                                               SplitSum (&sum)[kTokenTiles]) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int m = 0; m <= n; ++m) multiply(sum[n], left[m], right.pair_along(n, m, lane));
  }
}

// R^T of bD^T = (diag(beta) D)^T with one beta per token: bD^T J^T, in its place.
__device__ __forceinline__ void apply_inverse(const LowerTile& J, int lane, Values& bD) {
  SplitTile left[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) left[n] = split_tile(bD[n]);
  SplitSum sum[kTokenTiles];
  multiply_lower(left, J, lane, sum);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) bD[n][e] = sum[n].total(e);
  }
}

// bD^T = beta v^T - (beta e) X, in place of X. A beta per value channel is left to substitute: then it is D^T.
__device__ __forceinline__ void subtract_reads(const RawValues& v, DType dtype, const float* token, int lane,
                                               Values& X) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 on_v = token_pair(token, kOnValue, n, lane);
    const float2 on_x = token_pair(token, kOnKeyRead, n, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = e % 2 == 0 ? on_x.x : on_x.y;
      X[n][e] = fmaf(e % 2 == 0 ? on_v.x : on_v.y, decode(v[n][e], dtype), -factor * X[n][e]);
    }
  }
}

// S^T = e_n S^T + (w R)^T k
template <int kK, bool kPerChannel>
__device__ __forceinline__ void write_state(Stage<kK, kPerChannel>& stage, const SplitTile (&left)[kTokenTiles],
                                            int lane, float (&S)[kK / 8][4]) {
  const FloatTile<kK> writer = stage.writer();
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    SplitSum sum;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) multiply(sum, left[m], writer.pair_across(m, n, lane));
    const float2 total = kPerChannel ? *reinterpret_cast<const float2*>(stage.total + 8 * n + 2 * (lane % 4))
                                     : make_float2(stage.total[0], stage.total[0]);
#pragma unroll
    for (int e = 0; e < 4; ++e) S[n][e] = fmaf(e % 2 == 0 ? total.x : total.y, S[n][e], sum.total(e));
  }
}

}  // namespace fastweight::cuda::chunk_fp32
