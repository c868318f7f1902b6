// Activations of single numbers.
#pragma once

#include "cuda/common/mma.cuh"

namespace fastweight::cuda {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// exp(x) in three instructions, relative error below 2^-22 (1 + |x| / 4); 0 far below.
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(1.4426950408889634f * x); }

// x / (1 + exp(-x)), as good as the exponential.
__device__ __forceinline__ float silu_approx(float x) { return x * reciprocal_approx(1.0f + exp_approx(-x)); }

}  // namespace fastweight::cuda
