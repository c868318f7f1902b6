// The decays of a chunk where they are one per head.
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"

namespace fastweight::cuda::chunk_16bit {

// What the gate tensor holds for two neighbouring tokens of a lane, as it lay in memory: who loads it early need not wait.
struct RawGates {
  uint32_t bits[2] = {0, 0};
};

__device__ __forceinline__ RawGates load_gates(const DeltaRuleDeviceProblem& p, const ChunkSpan& span, int head,
                                               int lane) {
  RawGates raw;
  if (p.gate == Gate::kNone) return raw;
  const char* first = element_at(p.g.data, p.g.dtype, row_offset(p.g, span.batch, span.begin + 2 * lane, head));
  if (2 * lane < span.length) raw.bits[0] = load_bits(first, p.g.dtype);
  if (2 * lane + 1 < span.length) raw.bits[1] = load_bits(first + byte_offset(p.g.dtype, p.g.strides[1]), p.g.dtype);
  return raw;
}

// Running sums of the log2 decays of a chunk of so many tokens by one warp.
__device__ __forceinline__ void sum_gates(const DeltaRuleDeviceProblem& p, const RawGates& raw, int64_t length,
                                          int head, int lane, float* gamma) {
  float g[2] = {0, 0};
  if (p.gate != Gate::kNone) {
    const float rate = p.gate_in_kernel ? gate_rate(p, head) : 0.0f;
    const float bias = p.gate_in_kernel ? gate_bias(p, head, 0) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i < length) g[i] = log2_decay(p, decode(raw.bits[i], p.g.dtype), rate, bias);
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
