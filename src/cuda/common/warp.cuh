// Sums over the lanes of a warp.
#pragma once

#include <cstdint>

namespace fastweight::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kAllLanes = 0xffffffff;

// The number of this warp in its block, of which the compiler knows that it is the same for all lanes: branches on it need
// no care for lanes that have gone another way.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

// Every lane gets the sum over its aligned group of kLanes lanes. The tree is fixed: halves first, neighbours last.
template <int kLanes>
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

}  // namespace fastweight::cuda
