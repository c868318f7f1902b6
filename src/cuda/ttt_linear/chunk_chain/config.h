// How chunk_chain lies on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fastweight::cuda::ttt {

struct ChainConfig {
  int padded_dim = 0;       // of the kernel: 64 or 128
  bool full = false;        // D is the kernel's, no column has to be masked
  bool solo = false;        // partners have a mini-batch each
  int threads = 0;          // of a block: for every 16 columns a warp of the chain and a partner
  size_t shared_bytes = 0;  // of a block

  std::string text() const {
    return (full ? "D = " : "D < ") + std::to_string(padded_dim) + (solo ? ", a mini-batch per partner, " : ", ") +
           std::to_string(threads) + " threads, " + std::to_string(shared_bytes) + " bytes of shared memory";
  }
};

ChainConfig chain_config(int64_t head_dim);
// Of a forward on a device with so much shared memory.
ChainConfig forward_config(int64_t head_dim, size_t shared_limit);

// Of the backward.
struct ReverseConfig {
  int padded_dim = 0;  // of the kernel: 64 or 128
  bool full = false;   // D is the kernel's
  int groups = 0;      // of partners: four of a warp each for D = 64, else two, or one where shared memory is short
  int threads = 0;     // of a block: for every 16 columns a warp of the chain and one of a group, unless it has one
  size_t shared_bytes = 0;  // of a block

  std::string text() const {
    return (full ? "D = " : "D < ") + std::to_string(padded_dim) + ", " + std::to_string(groups) +
           (groups == 1 ? " group, " : " groups, ") + std::to_string(threads) + " threads, " +
           std::to_string(shared_bytes) + " bytes of shared memory";
  }
};

ReverseConfig reverse_config(int64_t head_dim, size_t shared_limit);

}  // namespace fastweight::cuda::ttt
