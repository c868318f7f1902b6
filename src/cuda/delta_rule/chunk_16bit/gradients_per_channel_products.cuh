// Of the kernel in gradients_per_channel.cuh: steps 1 to 3, products on the value side and of pairs of tokens.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_per_channel_shared.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

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

// bD^T of the warp's columns as A fragments, and in X, which is 0 before, what their rounding took.
template <DType kType, int kK>
__device__ __forceinline__ void residuals(Shared<kK>& s, int warp, int lane, Channels& X, uint32_t (&bD)[kTiles][4]) {
  const SharedTile<kK> S(s.S);
  const TileColumns<Shape<kK>::kColumns> values(s.first.v, warp);
  const SharedTile<kChunkRows> Y_rows(s.columns.Y);
#pragma unroll 2
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
    subtract_a<kType>(bD[m], X[2 * m], X[2 * m + 1]);
  }
}

// R^T = bD^T J^T of the warp's columns.
template <DType kType, int kK>
__device__ __forceinline__ void make_writes(Shared<kK>& s, int warp, int lane) {
  uint32_t bD[kTiles][4];
  Channels R = {};
  residuals<kType>(s, warp, lane, R, bD);
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
#pragma unroll 2
    for (int m = 0; m < kColumns / 16; ++m) {
      SharedTile<kColumns>(s.d_o).load_a(16 * row, m, lane, a);
      add(m, a);
    }
  } else {
#pragma unroll 2
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
#pragma unroll 2
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

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
