// How chunk_16bit cuts a problem: which instance of its scan runs. Chosen on the host from the problem's sizes and two
// numbers of the device, apart from the launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fastweight::cuda::chunk_16bit {

// What the choice depends on.
struct ScanSizes {
  int64_t heads = 0;  // value heads of all sequences
  int head_dim_k = 0, head_dim_v = 0;
  bool per_channel = false;  // one decay per key channel
};

struct ScanConfig {
  int padded_k = 64;         // 64, 128 or 256
  bool per_channel = false;  // keys with their decays instead of numbers per token
  int tiles = 1;             // of 16 value columns in a warp
  int pairs = 4;             // of warps in a block: one advances the state, the other computes o
  int stages = 2;            // chunks in shared memory

  int columns() const { return 16 * tiles * pairs; }  // of a block
  int warps() const { return 2 * pairs; }
  std::string text() const;
};

// For a device with so many multiprocessors and so much shared memory for a block.
ScanConfig scan_config(const ScanSizes& sizes, int multiprocessors, size_t shared_limit);
ScanConfig scan_back_config(const ScanSizes& sizes, int multiprocessors, size_t shared_limit);

}  // namespace fastweight::cuda::chunk_16bit
