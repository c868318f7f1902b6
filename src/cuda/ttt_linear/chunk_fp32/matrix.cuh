// Matrices of fp32 numbers that the threads of a block share, in shared memory or, where they do not fit, in global
// memory, and products of them on the multiply-add units: a thread makes 4 x 4 results, each one chain of fmaf in the
// order of the inner index. So a result depends neither on where the matrices lie nor on the number of threads.
#pragma once

#include <cstdint>

#include "cuda/common/instructions.cuh"

namespace fastweight::cuda::ttt::chunk_fp32 {

// A row has `ld` numbers, a multiple of 32, in vec4s. Vec4 q of row r lies at q ^ (r / 4 % 8): the 4 x 4 tiles of eight
// neighbouring threads are in different banks, along rows and across.
struct Matrix {
  float* data;
  int ld;
  int first;  // row 0 is this row of the memory

  __device__ __forceinline__ float4& vec4(int row, int q) const {
    const int r = first + row;
    return *reinterpret_cast<float4*>(data + r * ld + ((q ^ (r / 4 & 7)) * 4));
  }
  __device__ __forceinline__ float& at(int row, int column) const { return (&vec4(row, column / 4).x)[column % 4]; }
  __device__ __forceinline__ Matrix from_row(int row) const { return {data, ld, first + row}; }

  __device__ __forceinline__ void load(int row, int q, float (&values)[4]) const {
    const float4 x = vec4(row, q);
    values[0] = x.x;
    values[1] = x.y;
    values[2] = x.z;
    values[3] = x.w;
  }
  __device__ __forceinline__ void store(int row, int q, const float (&values)[4]) const {
    vec4(row, q) = make_float4(values[0], values[1], values[2], values[3]);
  }
};

// Rows [i, i + 4) and columns [j, j + 4) of a product; i, j and the bounds of the inner index are multiples of 4.
struct Tile {
  float x[4][4] = {};
  int i, j;

  __device__ __forceinline__ Tile(int row, int column) : i(row), j(column) {}

  // += A B
  __device__ __forceinline__ void add(const Matrix& A, const Matrix& B, int depth) {
#pragma unroll 1
    for (int m = 0; m < depth; m += 4) {
      float a[4][4], b[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        A.load(i + r, m / 4, a[r]);
        B.load(m + r, j / 4, b[r]);
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int e = 0; e < 16; ++e) x[e / 4][e % 4] = fmaf(a[e / 4][s], b[s][e % 4], x[e / 4][e % 4]);
      }
    }
  }

  // += A B^T
  __device__ __forceinline__ void add_right_transposed(const Matrix& A, const Matrix& B, int depth) {
#pragma unroll 1
    for (int m = 0; m < depth; m += 4) {
      float a[4][4], b[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        A.load(i + r, m / 4, a[r]);
        B.load(j + r, m / 4, b[r]);
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int e = 0; e < 16; ++e) x[e / 4][e % 4] = fmaf(a[e / 4][s], b[e % 4][s], x[e / 4][e % 4]);
      }
    }
  }

  // += A^T B over the rows [begin, end) of both; weight(row) is a factor of the rows of A.
  template <class Weight>
  __device__ __forceinline__ void add_left_transposed(const Matrix& A, const Matrix& B, int begin, int end,
                                                      const Weight& weight) {
#pragma unroll 2
    for (int m = begin; m < end; ++m) {
      float a[4], b[4];
      A.load(m, i / 4, a);
      B.load(m, j / 4, b);
      const float factor = weight(m);
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] *= factor;
#pragma unroll
      for (int e = 0; e < 16; ++e) x[e / 4][e % 4] = fmaf(a[e / 4], b[e % 4], x[e / 4][e % 4]);
    }
  }
};

// Deals the tiles of the products between two barriers to the threads of the block: those of the next product go on where
// those of the one before ended, so that small products run side by side.
class TileDealer {
 public:
  // body(tile)
  template <class Body>
  __device__ __forceinline__ void deal(int rows, int columns, const Body& body) {
    const int across = columns / 4, count = rows / 4 * across, threads = static_cast<int>(blockDim.x);
    int n = static_cast<int>(threadIdx.x) - next_;
    if (n < 0) n += threads;
#pragma unroll 1
    for (; n < count; n += threads) {
      Tile tile(n / across * 4, n % across * 4);
      body(tile);
    }
    next_ = (next_ + count) % threads;
  }

 private:
  int next_ = 0;  // the thread that gets the next tile
};

}  // namespace fastweight::cuda::ttt::chunk_fp32
