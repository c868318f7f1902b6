// Kernels around single TMA copies, for tma_test.cc.
#pragma once

#include <cstdint>

#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda {

struct BoxPlace {
  int at[5];
};

// The box of the map as it lies in shared memory, `bytes` of it, to `out` in device memory. Ranks 2 to 5.
void load_one_box(const TensorMap& map, int rank, const BoxPlace& place, uint32_t bytes, void* out);

// `bytes` from `in` to shared memory, from where the box is stored.
void store_one_box(const TensorMap& map, int rank, const BoxPlace& place, uint32_t bytes, const void* in);

// Element (i, j) of a [64 x 128] tile in panels of 64 columns that two copies of a 2-D map fill, to out[64][128]: as
// wgmma finds it.
void read_tile(const TensorMap& map, const BoxPlace& place, uint16_t* out);

// `tiles` tiles of 4096 bytes from `in`, one after the other to a ring of three buffers and from there into the boxes of
// a 2-D map, 32 rows of 64 elements each, whose reads of the ring are waited for before it is filled again.
void copy_through_ring(const void* in, int tiles, const TensorMap& map);

}  // namespace fastweight::cuda
