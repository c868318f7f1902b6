// How Hopper permutes the bytes of a tile in shared memory, for the copies that write it (tma.cuh) and the products that
// read it (wgmma.cuh) alike. Compiled by both compilers.
//
// A byte's address has the number of its 16-byte segment within 128 bytes in bits 4 to 6, and that of its 128 bytes
// within 1024 in bits 7 to 9. The segment is exclusively or'ed with the latter, or with its lower bits:
//
//     k128   bits 6 5 4 ^= bits 9 8 7      rows of 128 bytes, the pattern repeats after  8 rows
//     k64    bits   5 4 ^= bits   8 7      rows of  64 bytes, the pattern repeats after  8 rows
//     kNone                                rows of  16 bytes
//
// so eight rows of a column of segments lie in different banks. Addresses count, not offsets in a tile: tiles begin at
// multiples of `pattern_bytes`.
#pragma once

#include <cstdint>

#include "cuda/common/tensor.h"

namespace fastweight::cuda {

enum class Swizzle { kNone, k64, k128 };

// Of one row of a panel: as many columns as stay together.
FW_HOST_DEVICE constexpr int row_bytes(Swizzle swizzle) {
  return swizzle == Swizzle::k128 ? 128 : swizzle == Swizzle::k64 ? 64 : 16;
}

// What tiles are aligned to. Copies ask for 128 bytes whatever the pattern.
FW_HOST_DEVICE constexpr int pattern_bytes(Swizzle swizzle) {
  return swizzle == Swizzle::k128 ? 1024 : swizzle == Swizzle::k64 ? 512 : 128;
}

FW_HOST_DEVICE constexpr uint32_t swizzled(Swizzle swizzle, uint32_t address) {
  const uint32_t moved = swizzle == Swizzle::k128 ? 0x70 : swizzle == Swizzle::k64 ? 0x30 : 0;
  return address ^ (address >> 3 & moved);
}

}  // namespace fastweight::cuda
