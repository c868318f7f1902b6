// Tiles of 16-bit elements in shared memory that TMA writes and wgmma reads, and the descriptors by which wgmma finds
// them. No assembly here: emulated and real kernels compute the same descriptors.
//
// A tile is cut into panels, as wide as a row of the pattern (swizzle.h): 64 columns with k128, 32 with k64, 8 without.
// A panel is what one TMA copy writes, rows one after the other; panels follow each other.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/sm90/swizzle.h"

namespace fastweight::cuda {

// An operand of wgmma in shared memory. m or n runs along the rows of its tile or, kAlongColumns, along the columns; the
// inner index runs along the others. In PTX the two are K-major and MN-major.
//
//     bits  0 - 13   address / 16             bits 32 - 45   SBO / 16
//     bits 16 - 29   LBO / 16                 bits 62 - 63   pattern: 0 none, 1 k128, 2 k64
//
//                     along rows                                 along columns
//     k128, k64       SBO: from 8 rows to the next               SBO: from 8 rows to the next
//                     LBO: not used                              LBO: from a panel to the next
//     kNone           SBO: from 8 rows to the next               SBO: from a panel to the next
//                     LBO: from a panel to the next              LBO: from 8 rows to the next
template <bool kAlongColumns>
struct WgmmaOperand {
  uint64_t descriptor;
};

template <int kRows, int kColumns, Swizzle kSwizzle = Swizzle::k128>
struct PanelTile : TileFragments<PanelTile<kRows, kColumns, kSwizzle>> {
  static constexpr int kRowBytes = row_bytes(kSwizzle);
  static constexpr int kPanelColumns = kRowBytes / 2;
  static constexpr int kPanels = kColumns / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kRows % 8 == 0 && kColumns % kPanelColumns == 0 && kColumns % 16 == 0);

  uint32_t start;  // aligned to pattern_bytes(kSwizzle)

  __device__ __forceinline__ explicit PanelTile(const void* memory) : start(shared_address(memory)) {}

  __device__ __forceinline__ uint32_t panel(int p) const { return start + static_cast<uint32_t>(p * kPanelBytes); }

  // Rows from `row` on, a multiple of 8; inner index along the columns [16 m, 16 m + 16).
  __device__ __forceinline__ WgmmaOperand<false> along_rows(int row, int m) const {
    constexpr int kGroup = 8 * kRowBytes;
    const int first = (32 * m / kRowBytes * kPanelBytes + 32 * m % kRowBytes) / 16 + row * (kRowBytes / 16);
    return {describe(first, kSwizzle == Swizzle::kNone ? kPanelBytes : 16, kGroup)};
  }

  // Columns from `column` on, a multiple of 8: the first of a panel, or such that all of them lie in one; inner index along
  // the rows [16 m, 16 m + 16).
  __device__ __forceinline__ WgmmaOperand<true> along_columns(int column, int m) const {
    constexpr int kGroup = 8 * kRowBytes;
    const auto from = static_cast<uint32_t>(column);
    const auto first =
        static_cast<int>(from / kPanelColumns * (kPanelBytes / 16) + from % kPanelColumns / 8) + m * kRowBytes;
    return {kSwizzle == Swizzle::kNone ? describe(first, kGroup, kPanelBytes) : describe(first, kPanelBytes, kGroup)};
  }

  // Where segment `even + h` of a row lies, eight elements.
  __device__ __forceinline__ uint32_t address(int row, int even, int h) const {
    constexpr int kSegments = kPanelColumns / 8;
    if constexpr (kSwizzle == Swizzle::k128) {  // the lane's part, and one instruction for each constant part
      const uint32_t own = start + static_cast<uint32_t>(row * kRowBytes + ((h ^ row) & 7) * 16);
      return (own ^ static_cast<uint32_t>((even & 7) * 16)) + static_cast<uint32_t>(even / kSegments * kPanelBytes);
    }
    const int segment = even + h;
    return swizzled(kSwizzle, start + static_cast<uint32_t>(segment / kSegments * kPanelBytes + row * kRowBytes +
                                                            segment % kSegments * 16));
  }

 private:
  // `first`: where it begins in the tile, in 16 bytes. The lower word alone depends on the tile and the place in it: one
  // addition for each place.
  __device__ __forceinline__ uint64_t describe(int first, int lbo, int sbo) const {
    constexpr uint32_t kPattern = kSwizzle == Swizzle::k128 ? 1 : kSwizzle == Swizzle::k64 ? 2 : 0;
    const uint32_t low = (start / 16 | static_cast<uint32_t>(lbo / 16) << 16) + static_cast<uint32_t>(first);
    const uint32_t high = static_cast<uint32_t>(sbo / 16) | kPattern << 30;
    return uint64_t{high} << 32 | low;
  }
};

}  // namespace fastweight::cuda
