// How chunk_fp32 lies on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fastweight::cuda::ttt::chunk_fp32 {

struct Config {
  int threads = 256;       // of a block
  size_t bytes = 0;        // of the matrices of a block
  bool in_shared = false;  // they lie in shared memory; else in scratch memory, and few blocks go round
  int64_t blocks = 0;

  size_t shared_bytes() const { return in_shared ? bytes : 0; }
  std::string text() const {
    return std::to_string(threads) + " threads, " + std::to_string(bytes) + " bytes of " +
           (in_shared ? "shared" : "scratch") + " memory";
  }
};

// heads: of all sequences.
Config forward_config(int64_t head_dim, int32_t mini_batch, int64_t heads, int multiprocessors, size_t shared_limit);
Config backward_config(int64_t head_dim, int32_t mini_batch, int64_t heads, int multiprocessors, size_t shared_limit);

}  // namespace fastweight::cuda::ttt::chunk_fp32
