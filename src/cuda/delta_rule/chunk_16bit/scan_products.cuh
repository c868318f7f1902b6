// What the two scans over the chunks of a sequence share: products of a warp's columns with the operands of a chunk, and
// the ways of their results to memory. The value side is transposed: a warp has kTiles tiles of 16 value columns as the
// rows of its C tiles.
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_16bit/stage.cuh"

namespace fastweight::cuda::chunk_16bit {

inline constexpr int kTokenTiles = kChunkRows / 8;  // C tiles along the tokens of a chunk

// [16 kTiles columns x 64 tokens], as C tiles.
template <int kTiles>
using Sums = float[kTiles][kTokenTiles][4];

// The columns of a C tile are tokens: its elements 0 and 2 belong to one, 1 and 3 to the next.
__device__ __forceinline__ float2 token_pair(const float* token, int factor, int tile, int lane) {
  return *reinterpret_cast<const float2*>(token + factor * kChunkRows + 8 * tile + 2 * (lane % 4));
}

template <int kTiles>
__device__ __forceinline__ void clear(Sums<kTiles>& sums) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) sums[i][n][0] = sums[i][n][1] = sums[i][n][2] = sums[i][n][3] = 0;
  }
}

// sums += left right^T for columns [16 m, 16 m + 16) of both.
template <DType kType, int kK, int kTiles>
__device__ __forceinline__ void multiply_rows(const uint32_t (&left)[kTiles][4], const SharedTile<kK>& right, int m,
                                              int lane, Sums<kTiles>& sums) {
#pragma unroll
  for (int n = 0; n < kChunkRows / 16; ++n) {
    uint32_t b[4];
    right.load_b(16 * n, m, lane, b);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mma<kType>(sums[i][2 * n], left[i], b[0], b[1]);
      mma<kType>(sums[i][2 * n + 1], left[i], b[2], b[3]);
    }
  }
}

// sums += S^T q^T, with S as handed over.
template <DType kType, int kK, int kTiles>
__device__ __forceinline__ void read_state(const SharedTile<kK>& handed, int row, const SharedTile<kK>& queries,
                                           int lane, Sums<kTiles>& sums) {
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) handed.load_a(row + 16 * i, m, lane, a[i]);
    multiply_rows<kType, kK, kTiles>(a, queries, m, lane, sums);
  }
}

// sums += left right^T for the lower triangular right [64 x 64]: column block m of left meets row blocks from m on.
template <DType kType, int kTiles>
__device__ __forceinline__ void multiply_lower(const uint32_t (&left)[kTiles][4], const SharedTile<kChunkRows>& right,
                                               int m, int lane, Sums<kTiles>& sums) {
#pragma unroll
  for (int n = m; n < kChunkRows / 16; ++n) {
    uint32_t b[4];
    right.load_b(16 * n, m, lane, b);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mma<kType>(sums[i][2 * n], left[i], b[0], b[1]);
      mma<kType>(sums[i][2 * n + 1], left[i], b[2], b[3]);
    }
  }
}

// Token factors on the columns of sums.
template <int kTiles>
__device__ __forceinline__ void scale_tokens(const float* token, int factor, int n, int lane, Sums<kTiles>& sums) {
  const float2 on = token_pair(token, factor, n, lane);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    sums[i][n][0] *= on.x;
    sums[i][n][1] *= on.y;
    sums[i][n][2] *= on.x;
    sums[i][n][3] *= on.y;
  }
}

// X += S^T k^T, with S rounded to operands, which are handed over.
template <DType kType, int kK, int kTiles>
__device__ __forceinline__ void read_state(const float (&S)[kTiles][kK / 8][4], const SharedTile<kK>& handed, int row,
                                           const SharedTile<kK>& reader, int lane, Sums<kTiles>& X) {
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      pack_a<kType>(S[i][2 * m], S[i][2 * m + 1], a[i]);
      handed.store_a(row + 16 * i, m, lane, a[i]);
    }
    multiply_rows<kType, kK, kTiles>(a, reader, m, lane, X);
  }
}

// The warp's columns of o or dv, [row, row + 16 kTiles) of the block's, through a tile to `rows` rows of the caller's
// tensor, the first at `offset`. `first` is the block's first column, V the tensor's width.
template <DType kType, int kTiles, int kColumns>
__device__ __forceinline__ void store_values(const DeviceTensor& x, bool vectors, int V,
                                             const SharedTile<kColumns>& tile, int row, int lane, int64_t offset,
                                             int rows, int first, const Sums<kTiles>& sums) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int m = 0; m < kChunkRows / 16; ++m) {
      uint32_t c[4];
      pack_a<kType>(sums[i][2 * m], sums[i][2 * m + 1], c);
      tile.store_c_transposed(16 * m, row / 16 + i, lane, c);
    }
  }
  __syncwarp();
  constexpr int kSegments = 2 * kTiles, kStep = kWarpSize / kSegments;  // of a row of the warp; rows at a time
  const int64_t row_stride = x.strides[1], stride = x.strides[3];
  const int segment = row / 8 + lane % kSegments, column = first + 8 * segment;
  const int top = lane / kSegments, count = column < V ? rows : 0;
  offset += top * row_stride + column * stride;
  if (vectors) {
    auto* to = static_cast<uint16_t*>(x.data) + offset;
    const auto from = [&](int i) { return reinterpret_cast<const uint4*>(tile.segment(top + i, segment)); };
    if (rows == kChunkRows && first + kColumns <= V) {
      uint4 words[kChunkRows / kStep];  // all loads before the first store
#pragma unroll
      for (int i = 0; i < kChunkRows; i += kStep) words[i / kStep] = *from(i);
#pragma unroll
      for (int i = 0; i < kChunkRows; i += kStep, to += kStep * row_stride) {
        *reinterpret_cast<uint4*>(to) = words[i / kStep];
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kChunkRows; i += kStep, to += kStep * row_stride) {
      if (top + i < count) *reinterpret_cast<uint4*>(to) = *from(i);
    }
  } else {
#pragma unroll 1
    for (int i = top; i < count; i += kStep, offset += kStep * row_stride) {
      for (int e = 0; e < 8 && column + e < V; ++e) {
        store_float(x.data, x.dtype, offset + e * stride, unpack<kType>(tile.segment(i, segment)[e]).x);
      }
    }
  }
}

// The warp's rows of a tile that was handed over, [row, row + kCount) of the block's, to memory: `first` of them are
// there, of `width` elements each, a multiple of eight.
template <int kCount, int kColumns>
__device__ __forceinline__ void store_handed(const SharedTile<kColumns>& tile, int row, int first, int width, int lane,
                                             uint16_t* to, int64_t row_stride) {
  constexpr int kSegments = SharedTile<kColumns>::kSegments, kStep = kWarpSize / kSegments;
  constexpr int kAtOnce = kCount / kStep < 8 ? kCount / kStep : 8;  // loads before their stores
  const int segment = lane % kSegments, top = lane / kSegments;
  const auto from = [&](int i) { return reinterpret_cast<const uint4*>(tile.segment(row + top + i, segment)); };
  to += top * row_stride + 8 * segment;
  if (first >= kCount && width >= kColumns) {
#pragma unroll
    for (int start = 0; start < kCount; start += kAtOnce * kStep) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) words[i] = *from(start + i * kStep);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, to += kStep * row_stride) *reinterpret_cast<uint4*>(to) = words[i];
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kCount; i += kStep, to += kStep * row_stride) {
    if (top + i < first && 8 * segment < width) *reinterpret_cast<uint4*>(to) = *from(i);
  }
}

// Calls body.template operator()<kK, kPerChannel, kTiles, kPairs>() for the instance of a scan that a config names. Two
// tiles of columns with 256 channels would exceed the registers.
template <class Body>
void with_scan_instance(const ScanConfig& config, const Body& body) {
  with_padded_k_and_gate(config.padded_k, config.per_channel, [&]<int kK, bool kPerChannel>() {
    if (config.tiles == 2) {
      if constexpr (kK <= 128) body.template operator()<kK, kPerChannel, 2, 4>();
    } else if (config.pairs == 2) {
      body.template operator()<kK, kPerChannel, 1, 2>();
    } else {
      body.template operator()<kK, kPerChannel, 1, 4>();
    }
  });
}

}  // namespace fastweight::cuda::chunk_16bit
