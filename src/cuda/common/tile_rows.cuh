// Rows of tokens from memory to shared tiles.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/common/tensor.h"

namespace fastweight::cuda {

// Columns [first, first + kColumns) of `rows` rows of a [B, T, H, width] tensor of 16-bit elements into a tile of kRows
// rows, element by element through registers; zeros elsewhere. Thread `thread` of `threads` does its part.
template <int kRows, int kColumns>
__device__ __forceinline__ void gather_tile(const SharedTile<kColumns>& tile, const DeviceTensor& x, int64_t offset,
                                            int rows, int first, int width, unsigned thread, unsigned threads) {
  constexpr int kSegments = SharedTile<kColumns>::kSegments;
  const int segment = thread % kSegments, step = threads / kSegments;
  const int column = first + segment * 8;
  const int64_t row_stride = x.strides[1];
  int row = thread / kSegments;
  const uint16_t* from = static_cast<const uint16_t*>(x.data) + offset + row * row_stride;
#pragma unroll 1
  for (; row < kRows; row += step, from += step * row_stride) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = column + 2 * i + h;
        pair[h] = row < rows && c < width ? from[c * x.strides[3]] : 0;
      }
      words[i] = pair[0] | pair[1] << 16;
    }
    *reinterpret_cast<uint4*>(tile.segment(row, segment)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The same for rows that begin at `start`, by thread `thread` of kThreads: in asynchronous copies of 16 bytes where the
// layout has such `vectors`, which the caller commits and waits for. Steps of a multiple of eight rows leave the order
// of segments alone: copies then differ by constants.
template <int kRows, int kThreads, int kColumns>
__device__ __forceinline__ void load_rows(const SharedTile<kColumns>& tile, const DeviceTensor& x,
                                          const uint16_t* start, int rows, int first, int width, bool vectors,
                                          int thread) {
  constexpr int kSegments = SharedTile<kColumns>::kSegments, kStep = kThreads / kSegments;
  static_assert(kRows % kStep == 0);
  const int segment = thread % kSegments, top = thread / kSegments, column = first + segment * 8;
  if (vectors) {
    const uint16_t* from = start + top * x.strides[1] + column;
    if (rows >= kRows && first + kColumns <= width) {
#pragma unroll
      for (int i = 0; i < kRows; i += kStep, from += kStep * x.strides[1]) {
        copy_async(tile.address(top + i, segment), from, true);
      }
      return;
    }
    const int count = column < width ? rows : 0;
#pragma unroll 1
    for (int i = 0; i < kRows; i += kStep, from += kStep * x.strides[1]) {
      const bool valid = top + i < count;
      copy_async(tile.address(top + i, segment), valid ? from : start, valid);
    }
    return;
  }
#pragma unroll 1
  for (int row = top; row < kRows; row += kStep) {
    const uint16_t* from = start + row * x.strides[1];
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t element = row < rows && column + e < width ? from[(column + e) * x.strides[3]] : 0;
      words[e / 2] |= element << (e % 2 * 16);
    }
    *reinterpret_cast<uint4*>(tile.segment(row, segment)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace fastweight::cuda
