// The part of a problem that every kernel of the family reads, as a kernel argument: pointers, strides, sizes and the
// resolved options. Built once per call from the validated problem; a kernel adds its own outputs beside it.
//
// k has two roles: the reader, with which the correction reads the state, and the writer, with which it is written. In
// the kernels each use of k, in a tile or in registers, has the name of its role. All members of the family that run
// here have one key for both, so both names stand for the same memory; a member with another reader (Comba's p) brings
// its tensor here and gives the role of the reader memory of its own.
#pragma once

#include <cstdint>

#include "core/delta_rule_problem.h"
#include "cuda/common/sequences.h"
#include "cuda/common/tensor.h"

namespace fastweight::cuda {

struct DeltaRuleDeviceProblem {
  DeviceTensor q;        // [B, T, H, K]
  DeviceTensor k;        // [B, T, H, K]
  DeviceTensor v;        // [B, T, HV, V]
  DeviceTensor g;        // [B, T, HV] or [B, T, HV, K]
  DeviceTensor beta;     // [B, T, HV] or [B, T, HV, V]; absent: 1
  DeviceTensor a_log;    // [HV]; absent: 0
  DeviceTensor dt_bias;  // [HV] or [HV, K]; absent: 0
  Sequences sequences;

  int32_t num_value_heads = 0;  // HV
  int32_t group = 1;            // HV / H
  int32_t head_dim_k = 0;       // K
  int32_t head_dim_v = 0;       // V

  Gate gate = Gate::kNone;
  bool qk_l2norm = false;
  bool beta_sigmoid = false;
  bool beta_per_value = false;
  bool gate_in_kernel = false;
  bool has_lower_bound = false;
  bool qkv_aligned_vec4 = false;  // all of q, k and v have vec4s (see DeviceTensor)

  float scale = 1;
  float beta_factor = 1;  // of the sigmoid
  float lower_bound = 0;
};

template <class Args>
DeltaRuleDeviceProblem device_problem(const DeltaRuleProblem<Args>& problem) {
  const DeltaRuleInputs& in = problem.args.in;
  const DeltaRuleOptions& options = problem.args.options;
  const DeltaRuleSizes& sizes = problem.sizes;
  DeltaRuleDeviceProblem device;
  device.q = device_tensor(in.q);
  device.k = device_tensor(in.k);
  device.v = device_tensor(in.v);
  device.g = device_tensor(in.g);
  device.beta = device_tensor(in.beta);
  device.a_log = device_tensor(in.a_log);
  device.dt_bias = device_tensor(in.dt_bias);
  device.sequences = device_sequences(in.cu_seqlens, sizes.num_sequences, sizes.tokens);
  device.num_value_heads = static_cast<int32_t>(sizes.num_value_heads);
  device.group = static_cast<int32_t>(sizes.group);
  device.head_dim_k = static_cast<int32_t>(sizes.head_dim_k);
  device.head_dim_v = static_cast<int32_t>(sizes.head_dim_v);
  device.gate = options.gate;
  device.qk_l2norm = options.qk_l2norm;
  device.beta_sigmoid = options.beta_sigmoid;
  device.beta_per_value = in.beta.rank == 4;
  device.gate_in_kernel = options.gate_in_kernel;
  device.has_lower_bound = options.lower_bound != DeltaRuleOptions::kUnset;
  device.qkv_aligned_vec4 = device.q.aligned_vec4 && device.k.aligned_vec4 && device.v.aligned_vec4;
  device.scale = static_cast<float>(problem.scale);
  device.beta_factor = options.allow_neg_eigval ? 2.0f : 1.0f;
  device.lower_bound = device.has_lower_bound ? static_cast<float>(options.lower_bound) : 0.0f;
  return device;
}

}  // namespace fastweight::cuda
