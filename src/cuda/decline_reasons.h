// What the entries of the implementation lists say to a problem.
#pragma once

#include <cstdint>
#include <string>

namespace fastweight::cuda {

template <class Problem>
std::string no_fp64(const Problem& problem) {
  return problem.has_fp64 ? "computes in fp32; fp64 tensors run on the CPU's reference" : "";
}

// Kernels count heads in 32 bits, some by the width of a grid at a time.
inline std::string too_many_heads(int64_t heads) {
  constexpr int64_t kMostHeads = int64_t{1} << 30;
  if (heads <= kMostHeads) return "";
  return "takes up to " + std::to_string(kMostHeads) + " heads, got " + std::to_string(heads);
}

template <class Problem>
bool always(const Problem&) {
  return true;
}

}  // namespace fastweight::cuda
