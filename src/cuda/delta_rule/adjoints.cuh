// The way back through what the options make of a token's raw values (token.cuh): gates, beta and the l2 norm.
#pragma once

#include "cuda/common/activations.cuh"
#include "cuda/delta_rule/device_problem.h"

namespace fastweight::cuda {

struct GateGradient {
  float x;      // of what the gate tensor holds; its sum over tokens is dt_bias's gradient
  float a_log;  // this element's term of the sum over tokens, and over channels, that is A_log's gradient
};

// From dg at the raw value x, with z = x + bias and a = rate:
//
//     dx = -a sigmoid(z) dg,         dA_log: dg g
//     dx = bound y (1 - y) a dg,     dA_log: dx z          y = sigmoid(a z)
__device__ __forceinline__ GateGradient log_decay_adjoint(const DeltaRuleDeviceProblem& problem, float x, float rate,
                                                          float bias, float dg) {
  if (!problem.gate_in_kernel) return {dg, 0.0f};
  const float z = x + bias;
  if (problem.has_lower_bound) {
    const float y = sigmoid(rate * z), dx = problem.lower_bound * (y * (1.0f - y)) * (rate * dg);
    return {dx, dx * z};
  }
  return {-(rate * sigmoid(z)) * dg, -(rate * softplus(z)) * dg};
}

// From dbeta to the gradient of what the beta tensor holds: of beta = c s, s = sigmoid(x), that is
// c s (1 - s) = beta (1 - beta / c) times as much.
__device__ __forceinline__ float beta_adjoint(const DeltaRuleDeviceProblem& problem, float beta, float dbeta) {
  return problem.beta_sigmoid ? beta * (1.0f - beta / problem.beta_factor) * dbeta : dbeta;
}

// One channel of dx of y = rstd x, given the channel's dy and along = dy . y.
__device__ __forceinline__ float norm_adjoint(float x, float rstd, float along, float dy) {
  return rstd * fmaf(-(rstd * x), along, dy);
}

}  // namespace fastweight::cuda
