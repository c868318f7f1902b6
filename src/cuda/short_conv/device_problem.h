// The part of a problem that the kernels of the short convolution read, as a kernel argument: pointers, strides, sizes
// and options. Built once per call from the validated problem.
#pragma once

#include <cstdint>

#include "core/short_conv_problem.h"
#include "cuda/common/sequences.h"
#include "cuda/common/tensor.h"

namespace fastweight::cuda {

struct ShortConvDeviceProblem {
  DeviceTensor x;             // [B, T, D]
  DeviceTensor w;             // [D, W]
  DeviceTensor bias;          // [D]; absent: 0
  DeviceTensor residual;      // [B, T, D]; absent: 0
  DeviceTensor y;             // [B, T, D]
  DeviceTensor state_before;  // [slots, D, W]; absent: 0
  DeviceTensor state_after;   // [slots, D, W]; absent: not wanted. In a step the same memory
  Sequences sequences;

  int64_t channels = 0;  // D
  int32_t width = 0;     // W
  bool silu = false;
};

namespace short_conv_detail {

template <class Args>
ShortConvDeviceProblem common_part(const ShortConvProblem<Args>& problem) {
  const ShortConvInputs& in = problem.args.in;
  ShortConvDeviceProblem device;
  device.x = device_tensor(in.x);
  device.w = device_tensor(in.w);
  device.bias = device_tensor(in.bias);
  if constexpr (requires { problem.args.y; }) {
    device.residual = device_tensor(problem.args.residual);
    device.y = device_tensor(problem.args.y);
  }
  device.sequences = device_sequences(in.cu_seqlens, problem.sizes.num_sequences, problem.sizes.tokens);
  device.channels = problem.sizes.channels;
  device.width = static_cast<int32_t>(problem.sizes.width);
  device.silu = problem.args.options.activation == Activation::kSilu;
  return device;
}

}  // namespace short_conv_detail

inline ShortConvDeviceProblem device_problem(const ShortConvForwardProblem& problem) {
  ShortConvDeviceProblem device = short_conv_detail::common_part(problem);
  device.state_before = device_tensor(problem.args.in.initial_state);
  device.state_after = device_tensor(problem.args.final_state);
  return device;
}

// Its gradients are the kernels' own.
inline ShortConvDeviceProblem device_problem(const ShortConvBackwardProblem& problem) {
  ShortConvDeviceProblem device = short_conv_detail::common_part(problem);
  device.state_before = device_tensor(problem.args.in.initial_state);
  return device;
}

inline ShortConvDeviceProblem device_problem(const ShortConvStepProblem& problem) {
  ShortConvDeviceProblem device = short_conv_detail::common_part(problem);
  device.state_before = device.state_after = device_tensor(problem.args.state);
  return device;
}

}  // namespace fastweight::cuda
