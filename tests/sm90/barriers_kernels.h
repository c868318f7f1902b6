// Kernels whose warps have different work, for barriers_test.cc.
#pragma once

#include <cstdint>

namespace fastweight::cuda {

inline constexpr int kRingFloats = 256;   // in a tile
inline constexpr int kRingReaders = 256;  // threads

// One warp loads `tiles` tiles of floats through a ring of three buffers; two warpgroups with more registers read each of
// them, thread i writes in[tile][kRingFloats - 1 - i] + tile to out[tile][i].
void reverse_tiles(const float* in, int tiles, float* out);

// counts[warp] = how many lanes of each of eight warps are elected, and whether it is the same one the second time.
void elect(uint32_t* counts, uint32_t* same);

// Threads of four warps arrive at a barrier for `phases` phases: one thread of each warp, and one that expects no bytes.
// seen[phase] = the sum of what the warps wrote before they arrived.
void count_phases(int phases, int* seen);

inline constexpr int kRotatingGroups = 3;  // warpgroups
inline constexpr int kRotation = 33;       // threads
// Thread i of warpgroup g begins with i and goes through `turns` (g + 1) turns, in each of which all take over the number of
// the thread that is kRotation further on in the warpgroup, plus 1. out[128 g + i] = what it ends with.
void rotate_in_groups(int turns, int* out);

}  // namespace fastweight::cuda
