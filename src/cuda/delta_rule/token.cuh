// What the options make of a token's raw gate and beta values.
#pragma once

#include "cuda/common/activations.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/delta_rule/device_problem.h"

namespace fastweight::cuda {

// 1 / sqrt(sum x^2 + eps) with this eps is the factor of the l2 norm.
inline constexpr float kL2NormEps = 1e-6f;

__device__ __forceinline__ float beta_of(const DeltaRuleDeviceProblem& problem, float x) {
  return problem.beta_sigmoid ? problem.beta_factor * sigmoid(x) : x;
}

// exp(A_log) of a value head; 1 without A_log.
__device__ __forceinline__ float gate_rate(const DeltaRuleDeviceProblem& problem, int head) {
  const DeviceTensor& x = problem.a_log;
  return x.present() ? expf(load_float(x.data, x.dtype, head * x.strides[0])) : 1.0f;
}

// dt_bias of a value head (and key channel, where the gate is per channel); 0 without.
__device__ __forceinline__ float gate_bias(const DeltaRuleDeviceProblem& problem, int head, int channel) {
  const DeviceTensor& x = problem.dt_bias;
  if (!x.present()) return 0.0f;
  const int64_t offset =
      head * x.strides[0] + (problem.gate == Gate::kPerChannel ? channel * x.strides[1] : int64_t{0});
  return load_float(x.data, x.dtype, offset);
}

// g, the logarithm of the decay, from what the gate tensor holds.
__device__ __forceinline__ float log_decay(const DeltaRuleDeviceProblem& problem, float x, float rate, float bias) {
  if (!problem.gate_in_kernel) return x;
  if (problem.has_lower_bound) return problem.lower_bound * sigmoid(rate * (x + bias));
  return -rate * softplus(x + bias);
}

}  // namespace fastweight::cuda
