// How chunk_fp32 cuts a problem, chosen on the host apart from the launch.
#pragma once

#include <cstdint>
#include <string>

namespace fastweight::cuda::chunk_fp32 {

inline constexpr int kMostWarps = 4;  // of a block

struct ScanConfig {
  int padded_k = 64;  // 64, 128 or 256
  bool per_channel = false;
  int warps = kMostWarps;  // of a block, each with 16 value columns

  int columns() const { return 16 * warps; }
  std::string text() const;
};

// For a device with so many multiprocessors; `heads` are the value heads of all sequences.
ScanConfig scan_config(int64_t heads, int head_dim_k, int head_dim_v, bool per_channel, int multiprocessors);

}  // namespace fastweight::cuda::chunk_fp32
