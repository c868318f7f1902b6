// Tensor maps as the emulator's driver makes them, and the copies that use them.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>

namespace emulator {

// What a CUtensorMap holds here.
struct TensorMapData {
  uint32_t magic;
  uint8_t rank, element_bytes, swizzled_bits, filler;  // bits of the address above bit 4 that the pattern changes
  char* data;
  uint64_t strides[5];  // in bytes
  uint32_t last[5];     // sizes - 1
  uint16_t box[5];
  uint8_t steps[5];
};
static_assert(sizeof(TensorMapData) <= sizeof(CUtensorMap));

const TensorMapData& data_of(const CUtensorMap& map);

// Of the box, as it lies in shared memory.
uint32_t box_bytes(const TensorMapData& map);

// What the patterns of shared memory leave together.
inline constexpr uint32_t kSegment = 16;  // bytes

// visit(shared, global, inside) for every segment of the box at `place`, which begins inside of the tensor: where it lies,
// and how many of its bytes, the first ones, are the tensor's. `start` is where the box begins in shared memory.
void for_each_in_box(const TensorMapData& map, const int* place, uint32_t start,
                     const std::function<void(uint32_t shared, char* global, uint32_t inside)>& visit);

}  // namespace emulator
