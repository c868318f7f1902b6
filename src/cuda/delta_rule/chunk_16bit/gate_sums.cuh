// The decays of a chunk where they are one per head.
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"

namespace fastweight::cuda::chunk_16bit {

// Running sums of the log2 decays of a chunk by one warp, two neighbouring tokens per lane.
__device__ __forceinline__ void sum_gates(const DeltaRuleDeviceProblem& p, const ChunkSpan& span, int head, int lane,
                                          float* gamma) {
  float g[2] = {0, 0};
  if (p.gate != Gate::kNone) {
    const float rate = p.gate_in_kernel ? gate_rate(p, head) : 0.0f;
    const float bias = p.gate_in_kernel ? gate_bias(p, head, 0) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      if (row >= span.length) continue;
      const float x = load_float(p.g.data, p.g.dtype, row_offset(p.g, span.batch, span.begin + row, head));
      g[i] = log2_decay(p, x, rate, bias);
    }
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const float below = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += below;
  }
  gamma[2 * lane] = sum - g[1];
  gamma[2 * lane + 1] = sum;
}

}  // namespace fastweight::cuda::chunk_16bit
