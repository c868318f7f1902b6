// The gate per channel, as token.cuh and adjoints.cuh have it, by the special function unit: the kernels compute K of them
// for every token, some of them twice.
#pragma once

#include <type_traits>

#include "cuda/common/instructions.cuh"
#include "cuda/delta_rule/device_problem.h"

namespace fastweight::cuda::chunk_16bit {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// 1 / (1 + 2^x)
__device__ __forceinline__ float sigmoid_of_log2(float x) { return reciprocal_approx(1.0f + exp2_approx(x)); }

// The relative error is below 2^-15; it is largest where the series ends, at e^x = 2^-6.
__device__ __forceinline__ float softplus_approx(float x) {
  const float e = exp2_approx(kLog2E * x);
  const float series = e * fmaf(-e, fmaf(-e, fmaf(-e, 0.25f, 1.0f / 3), 0.5f), 1.0f);
  return x > 20.0f ? x : e < 0x1p-6f ? series : kLn2 * log2_approx(1.0f + e);
}

enum class GateKind { kGiven, kSoftplus, kBounded };

// body(std::integral_constant<GateKind, kind>), around a loop.
template <class Body>
__device__ __forceinline__ void with_gate_kind(const DeltaRuleDeviceProblem& p, const Body& body) {
  if (!p.gate_in_kernel) {
    body(std::integral_constant<GateKind, GateKind::kGiven>());
  } else if (p.has_lower_bound) {
    body(std::integral_constant<GateKind, GateKind::kBounded>());
  } else {
    body(std::integral_constant<GateKind, GateKind::kSoftplus>());
  }
}

// exp(g) of what the gate tensor holds, and what dg is multiplied with: for the gradient of that, and for the element's
// term of dA_log.
struct GateTerms {
  float decay, dx, a_log;
};

template <GateKind kKind>
__device__ __forceinline__ GateTerms gate_of(const DeltaRuleDeviceProblem& p, float x, float rate, float bias) {
  const float z = x + bias;
  if constexpr (kKind == GateKind::kBounded) {
    const float y = sigmoid_of_log2((-kLog2E * rate) * z), dx = (p.lower_bound * rate) * fmaf(-y, y, y);
    return {exp2_approx((kLog2E * p.lower_bound) * y), dx, dx * z};
  } else if constexpr (kKind == GateKind::kSoftplus) {
    const float g = -rate * softplus_approx(z);
    return {exp2_approx(kLog2E * g), -rate * sigmoid_of_log2(-kLog2E * z), g};
  } else {
    return {exp2_approx(kLog2E * x), 1, 0};
  }
}

}  // namespace fastweight::cuda::chunk_16bit
