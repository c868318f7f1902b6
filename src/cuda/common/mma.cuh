// Tensor-core products of 16-bit operands with fp32 accumulators: pairs of elements, and the shared-memory tiles that
// feed the products. The fragments' layout is in instructions.cuh.
//
// Two C tiles side by side, rounded, are an A fragment: results chain into the next product without leaving registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/instructions.cuh"
#include "fastweight/tensor.h"

namespace fastweight::cuda {

// A pair back to two fp32 values.
template <DType kType>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kType == DType::kBF16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// The A fragment of columns 16 m .. 16 m + 15 of a row of C tiles.
template <DType kType>
__device__ __forceinline__ void pack_a(const float (&left)[4], const float (&right)[4], uint32_t (&a)[4]) {
  a[0] = pack<kType>(left[0], left[1]);
  a[1] = pack<kType>(left[2], left[3]);
  a[2] = pack<kType>(right[0], right[1]);
  a[3] = pack<kType>(right[2], right[3]);
}

// What that rounding took, in place of the numbers.
template <DType kType>
__device__ __forceinline__ void subtract_a(const uint32_t (&a)[4], float (&left)[4], float (&right)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float(&x)[4] = w < 2 ? left : right;
    const float2 rounded = unpack<kType>(a[w]);
    x[w % 2 * 2] -= rounded.x;
    x[w % 2 * 2 + 1] -= rounded.y;
  }
}

// How fragments move between registers and a tile of 16-bit elements in shared memory. A tile is cut into segments of
// eight elements, and Tile::address(row, 2 m, h) is where segment 2 m + h of a row lies: the lane's part, row and h, and
// the constant part are apart, so that one register and an instruction make all addresses of a lane.
template <class Tile>
struct TileFragments {
  // A fragment of rows [row, row + 16) and columns [16 m, 16 m + 16).
  __device__ __forceinline__ void load_a(int row, int m, int lane, uint32_t (&a)[4]) const {
    ldmatrix(at(row + lane % 16, m, lane / 16), a);
  }
  __device__ __forceinline__ void store_a(int row, int m, int lane, const uint32_t (&a)[4]) const {
    stmatrix(at(row + lane % 16, m, lane / 16), a);
  }
  // B fragments of the transposed tile: inner index along the columns [16 m, 16 m + 16), n along the rows [row, row +
  // 16). Registers 0, 1: the first eight rows; 2, 3: the others.
  __device__ __forceinline__ void load_b(int row, int m, int lane, uint32_t (&b)[4]) const {
    ldmatrix(at(row + lane / 16 * 8 + lane % 8, m, lane / 8 % 2), b);
  }
  // B fragments of the tile itself: inner index along the rows [row, row + 16), n along columns [16 m, 16 m + 16).
  __device__ __forceinline__ void load_b_transposed(int row, int m, int lane, uint32_t (&b)[4]) const {
    ldmatrix_transposed(at(row + lane % 16, m, lane / 16), b);
  }
  // C layout of the transposed tile, as pairs along the rows [row, row + 16): registers 0 and 1 hold columns g and g +
  // 8 of [16 m, 16 m + 16) for the first eight rows, 2 and 3 for the others. Also the A fragment of the transposed tile.
  __device__ __forceinline__ void load_c_transposed(int row, int m, int lane, uint32_t (&c)[4]) const {
    ldmatrix_transposed(at(row + lane / 16 * 8 + lane % 8, m, lane / 8 % 2), c);
  }
  __device__ __forceinline__ void store_c_transposed(int row, int m, int lane, const uint32_t (&c)[4]) const {
    stmatrix_transposed(at(row + lane / 16 * 8 + lane % 8, m, lane / 8 % 2), c);
  }

 private:
  __device__ __forceinline__ uint32_t at(int row, int m, int h) const {
    return static_cast<const Tile&>(*this).address(row, 2 * m, h);
  }
};

// Rows of kColumns (a multiple of 64), aligned to 128 bytes. Segment s of row r lies at s ^ (r % 8): the eight rows of a
// matrix are in different banks.
template <int kColumns>
struct SharedTile : TileFragments<SharedTile<kColumns>> {
  static_assert(kColumns % 64 == 0);
  static constexpr int kSegments = kColumns / 8;

  uint16_t* data;

  __device__ __forceinline__ SharedTile(uint16_t* memory) : data(memory) {}
  __device__ __forceinline__ static int offset(int row, int segment) {
    return row * kColumns + (segment ^ (row & 7)) * 8;
  }
  __device__ __forceinline__ uint16_t* segment(int row, int s) const { return data + offset(row, s); }
  __device__ __forceinline__ uint16_t& at(int row, int column) const {
    return data[offset(row, column / 8) + column % 8];
  }
  // 32-bit arithmetic from one base: rows that differ by a multiple of 8 are constant displacements.
  __device__ __forceinline__ uint32_t address(int row, int s) const {
    return shared_address(data) + 2 * static_cast<uint32_t>(offset(row, s));
  }
  __device__ __forceinline__ uint32_t address(int row, int even, int h) const {
    const uint32_t own = shared_address(data) + static_cast<uint32_t>(2 * kColumns * row + ((h ^ row) & 7) * 16);
    return (own ^ static_cast<uint32_t>((even & 7) * 16)) + static_cast<uint32_t>(even / 8 * 128);
  }
};

// A lower triangular matrix [64 x 64]: the ten blocks of 16 x 16 on and below the diagonal, densely one after the other.
// In a block, the two segments of row r change places where r / 4 is odd: as above, eight rows in different banks.
struct LowerBlocks : TileFragments<LowerBlocks> {
  static constexpr int kElements = 10 * 256;

  uint16_t* data;

  __device__ __forceinline__ LowerBlocks(uint16_t* memory) : data(memory) {}
  __device__ __forceinline__ static int offset(int row, int segment) {
    const int block = row / 16 * (row / 16 + 1) / 2 + segment / 2;
    return block * 256 + row % 16 * 16 + ((segment ^ row >> 2) & 1) * 8;
  }
  __device__ __forceinline__ uint16_t* segment(int row, int s) const { return data + offset(row, s); }
  __device__ __forceinline__ uint32_t address(int row, int s) const {
    return shared_address(data) + 2 * static_cast<uint32_t>(offset(row, s));
  }
  __device__ __forceinline__ uint32_t address(int row, int even, int h) const { return address(row, even + h); }
};

}  // namespace fastweight::cuda
