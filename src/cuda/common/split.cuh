// Products of fp32 numbers on tensor cores. A number is the sum of two tf32 numbers, x = high + low, and
//
//     a b = high_a high_b + (low_a high_b + high_a low_b)
//
// leaves out low_a low_b, 2^-22 of the product, and what `low` loses beyond its ten bits, as little. The unit cuts off
// what an addition to its accumulators does not keep, always towards zero: large and small products have accumulators
// of their own, and long sums are interrupted (`total`) and go on in fp32, rounded to nearest.
//
// The inner index of a product may stand in any order, so that a C tile is an A fragment as it lies: the two columns of
// a lane, 2t and 2t + 1, are the inner indices t and t + 4 of the instruction. B then has the rows 2t and 2t + 1 in its
// two registers.
#pragma once

#include <cstdint>

#include "cuda/common/instructions.cuh"

namespace fastweight::cuda {

struct SplitNumber {
  uint32_t high, low;
};

__device__ __forceinline__ SplitNumber split(float x) {
  const uint32_t high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;  // to nearest
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

// An A fragment.
struct SplitTile {
  uint32_t high[4], low[4];
};

__device__ __forceinline__ SplitTile split_tile(const float (&c)[4]) {
  SplitTile a;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const SplitNumber x = split(c[e]);
    const int at = (e % 2) * 2 + e / 2;  // c1 and c2 change places
    a.high[at] = x.high;
    a.low[at] = x.low;
  }
  return a;
}

// A C tile that is being summed.
struct SplitSum {
  float large[4] = {}, small[4] = {};

  __device__ __forceinline__ float total(int e) const { return large[e] + small[e]; }
};

// sum += a b, where b has the rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void multiply(SplitSum& sum, const SplitTile& a, float2 b) {
  const SplitNumber b0 = split(b.x), b1 = split(b.y);
  mma_tf32(sum.small, a.low, b0.high, b1.high);
  mma_tf32(sum.small, a.high, b0.low, b1.low);
  mma_tf32(sum.large, a.high, b0.high, b1.high);
}

// Rows of fp32 numbers in shared memory, kColumns (a multiple of 32) each. Columns in groups of 8; group p of row r
// lies at p ^ ((r ^ r / 4) % 4), which puts into different banks what a warp reads at once, along rows (`pair_along`:
// four rows, one group) and across (`pair_across`: every second row of eight, one group).
template <int kColumns>
struct FloatTile {
  static_assert(kColumns % 32 == 0);
  static constexpr int kVec4s = kColumns / 4;

  float* data;

  // The lowest two bits of the group are apart, so that unrolled loops find few different values and constant
  // displacements from them.
  __device__ __forceinline__ static int offset(int row, int column) {
    const int group = column / 8;
    return row * kColumns + group / 4 * 32 + ((group ^ row ^ row / 4) & 3) * 8 + column % 8;
  }
  __device__ __forceinline__ float& at(int row, int column) const { return data[offset(row, column)]; }
  __device__ __forceinline__ float4& vec4(int row, int q) const {
    return *reinterpret_cast<float4*>(data + offset(row, 4 * q));
  }

  // B of the transposed tile: inner index along columns [8 m, 8 m + 8), n along rows [8 n, 8 n + 8).
  __device__ __forceinline__ float2 pair_along(int n, int m, int lane) const {
    return *reinterpret_cast<const float2*>(data + offset(8 * n + lane / 4, 8 * m + 2 * (lane % 4)));
  }
  // B of the tile itself: inner index along rows [8 m, 8 m + 8), n along columns [8 n, 8 n + 8).
  __device__ __forceinline__ float2 pair_across(int m, int n, int lane) const {
    const int row = 8 * m + 2 * (lane % 4), column = 8 * n + lane / 4;
    return make_float2(at(row, column), at(row + 1, column));
  }
};

}  // namespace fastweight::cuda
