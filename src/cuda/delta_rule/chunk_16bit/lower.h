// How the lower triangular matrices J and sP of a chunk lie in memory: the ten blocks of 16 on and below the diagonal, as
// 16 dense rows of 16 elements, then 16 of 32, of 48 and of 64.
#pragma once

#include "cuda/common/tensor.h"

namespace fastweight::cuda::chunk_16bit {

inline constexpr int kLowerElements = 10 * 16 * 16;

// How long the rows [16 block, +16) are, and where element (16 block + row, j) lies. They begin at multiples of 32 bytes.
FW_HOST_DEVICE constexpr int lower_pitch(int block) { return 16 * (block + 1); }
FW_HOST_DEVICE constexpr int lower_offset(int block, int row, int j) {
  return lower_pitch(block) * (8 * block + row) + j;
}
FW_HOST_DEVICE constexpr int lower_offset(int i, int j) { return lower_offset(i / 16, i % 16, j); }

// Which of the two matrices of a (chunk, value head), in their order in memory.
enum LowerMatrix { kLowerJ, kLowerP };
inline constexpr int kLowerMatrices = 2;

}  // namespace fastweight::cuda::chunk_16bit
