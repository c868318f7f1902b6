// The part of a problem that every kernel of the family reads, as a kernel argument: pointers, strides, sizes and the
// resolved options. Built once per call from the validated problem; a kernel adds its own outputs beside it.
#pragma once

#include <cstdint>

#include "core/ttt_linear_problem.h"
#include "cuda/common/sequences.h"
#include "cuda/common/tensor.h"

namespace fastweight::cuda::ttt {

struct DeviceProblem {
  DeviceTensor q, k, v;  // [B, T, H, D]
  DeviceTensor w, b;     // [H, D]
  DeviceTensor eta;      // [B, T, H]
  Sequences sequences;

  int32_t num_heads = 0;   // H
  int32_t head_dim = 0;    // D
  int32_t mini_batch = 0;  // C
  float scale = 1;
  float eps = 0;
  float inverse_head_dim = 1;  // 1 / D
};

template <class Args>
DeviceProblem device_problem(const TttLinearProblem<Args>& problem) {
  const TttLinearInputs& in = problem.args.in;
  const TttLinearSizes& sizes = problem.sizes;
  DeviceProblem device;
  device.q = device_tensor(in.q);
  device.k = device_tensor(in.k);
  device.v = device_tensor(in.v);
  device.w = device_tensor(in.w);
  device.b = device_tensor(in.b);
  device.eta = device_tensor(in.eta);
  device.sequences = device_sequences(in.cu_seqlens, sizes.num_sequences, sizes.tokens);
  device.num_heads = static_cast<int32_t>(sizes.num_heads);
  device.head_dim = static_cast<int32_t>(sizes.head_dim);
  device.mini_batch = problem.args.options.mini_batch;
  device.scale = static_cast<float>(problem.scale);
  device.inverse_head_dim = 1.0f / static_cast<float>(sizes.head_dim);
  device.eps = static_cast<float>(problem.args.options.eps);
  return device;
}

}  // namespace fastweight::cuda::ttt
