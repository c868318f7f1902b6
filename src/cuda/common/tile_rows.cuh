// Rows of tokens from memory to shared tiles.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/common/tensor.h"

namespace fastweight::cuda {

// Columns [first, first + kColumns) of `rows` rows of a [B, T, H, width] tensor of 16-bit elements into a tile of kRows
// rows; zeros elsewhere. Vector copies are asynchronous: the caller commits them and waits.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_tile(const SharedTile<kColumns>& tile, const DeviceTensor& x, int64_t offset,
                                          int rows, int first, int width, bool vectors) {
  constexpr int kSegments = SharedTile<kColumns>::kSegments;
  const int segment = threadIdx.x % kSegments, step = blockDim.x / kSegments;
  const int column = first + segment * 8;
  const int64_t row_stride = x.strides[1];
  int row = threadIdx.x / kSegments;
  const auto* start = static_cast<const uint16_t*>(x.data) + offset;
  const uint16_t* from = start + row * row_stride;
  if (vectors) {
    from += column;
    for (; row < kRows; row += step, from += step * row_stride) {
      const bool valid = row < rows && column < width;
      copy_async(tile.address(row, segment), valid ? from : start, valid);
    }
    return;
  }
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

}  // namespace fastweight::cuda
