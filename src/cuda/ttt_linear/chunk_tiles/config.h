// How chunk_tiles lies on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fastweight::cuda::ttt {

struct TilesConfig {
  int padded_dim = 0;       // of the kernel: 64 or 128
  int mini_batch = 0;       // 32 or 64
  int threads = 0;          // of a block: a warp for every 16 columns
  int stages = 0;           // mini-batches in shared memory: the one at hand and those on their way
  size_t shared_bytes = 0;  // of a block

  std::string text() const {
    return "D <= " + std::to_string(padded_dim) + ", C = " + std::to_string(mini_batch) + ", " +
           std::to_string(threads) + " threads, " + std::to_string(stages) + " stages, " +
           std::to_string(shared_bytes) + " bytes of shared memory";
  }
};

// With as many stages, from 2 to 4, as fit into what a block of the device may have; if not even 2 do, with 2.
TilesConfig tiles_config(int64_t head_dim, int32_t mini_batch, size_t available_shared_bytes);

}  // namespace fastweight::cuda::ttt
