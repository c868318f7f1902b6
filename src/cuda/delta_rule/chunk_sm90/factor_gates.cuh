// The gates of a thread's channels and rows in the factors with a decay per channel (factors_per_channel.cu), and their running
// sums.
#pragma once

#include "cuda/delta_rule/chunk_sm90/factor_channels.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::GateKind;
using chunk_16bit::kLog2E;

// How many of a thread's rows, or more, are tokens with its channels: K is a multiple of 8.
template <int kK>
__device__ __forceinline__ int tokens_from(const Place<kK>& own, int tokens, int K) {
  return static_cast<int>(own.channel) < K ? tokens - static_cast<int>(own.top) : 0;
}

// What the gate tensor holds, where TMA cannot bring it; zeros beyond the tokens and channels.
template <int kK>
__device__ __forceinline__ void load_gates(const DeviceTensor& g, const ChunkSpan& span, int head, int K,
                                           const Place<kK>& own, float4 (&x)[kOwnRows]) {
  const int64_t offset = row_offset(g, span.batch, span.begin + own.top, head) + own.channel * g.strides[3];
  const int rows = tokens_from(own, static_cast<int>(span.length), K);
  with_type(g.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const char* from = element_at(g.data, kType, offset);
    const int64_t step = byte_offset(kType, g.strides[1]);
    RawVec4 raw[kOwnRows] = {};
    if (g.aligned_vec4) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i, from += step) {
        if (i < rows) raw[i] = load_vec4<kType>(from);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i, from += step) {
        raw[i] = gather_vec4(from, kType, 0, g.strides[3], i < rows ? kOwnChannels : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) decode_vec4<kType>(raw[i], &x[i].x);
  });
}

// What the gates of a value head have in common, where the kernel makes them of raw ones: by one warp.
template <int kK>
__device__ __forceinline__ void store_gate_numbers(Shared<kK>& s, const DeltaRuleDeviceProblem& p, int lane) {
  if (!p.gate_in_kernel) return;
  const int head = s.item.head, channel = lane * kOwnChannels;
  if (lane == 0) s.rate = gate_rate(p, head);
  if (channel >= kK) return;
  float4 numbers = all_four(0);
  const DeviceTensor& bias = p.dt_bias;
  if (bias.present() && channel < p.head_dim_k) {
    const int64_t offset = head * bias.strides[0] + channel * bias.strides[1];
    with_type(bias.dtype, [&](auto type) {
      constexpr DType kType = decltype(type)::value;
      const RawVec4 raw = bias.aligned_vec4 ? load_vec4<kType>(element_at(bias.data, kType, offset))
                                            : gather_vec4(bias.data, kType, offset, bias.strides[1], kOwnChannels);
      decode_vec4<kType>(raw, &numbers.x);
    });
  }
  four_at(s.bias + channel) = numbers;
}

// Of a thread's channels.
struct GateNumbers {
  float rate, bound;
  float4 bias;

  template <int kK>
  __device__ __forceinline__ GateNumbers(Shared<kK>& s, const DeltaRuleDeviceProblem& p, const Place<kK>& own)
      : rate(s.rate), bound(fmaxf(kLog2E * p.lower_bound, -150.0f)), bias(four_at(s.bias + own.channel)) {}
};

// log2 of the decay, of what the gate tensor holds, in units of unit_of.
template <GateKind kKind>
__device__ __forceinline__ float unit_of(const GateNumbers& gate) {
  return kKind == GateKind::kBounded ? gate.bound : 1.0f;
}
template <GateKind kKind>
__device__ __forceinline__ float log2_of(const GateNumbers& gate, float bias, float x) {
  if constexpr (kKind == GateKind::kBounded) {
    const float turned = -kLog2E * gate.rate;
    return chunk_16bit::sigmoid_of_log2(::fmaf(turned, x, turned * bias));
  } else if constexpr (kKind == GateKind::kSoftplus) {
    return max_or_nan((-kLog2E * gate.rate) * chunk_16bit::softplus_approx(x + bias), -150.0f);
  } else {
    return max_or_nan(kLog2E * x, -150.0f);
  }
}

// The running sums in place of the gates. Rows beyond the tokens, and channels beyond K, have no decay. Returns whether a
// decay is above 1, as only gates from outside can be.
__device__ __forceinline__ bool sum_gates(const DeltaRuleDeviceProblem& p, const GateNumbers& gate, int rows,
                                          Sums& sums) {
  bool rises = false;
  chunk_16bit::with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
    sums.unit = unit_of<kKind>(gate);
    float4 sum = all_four(0);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const float4 x = sums.c[i];
      const float4 g = make_float4(log2_of<kKind>(gate, gate.bias.x, x.x), log2_of<kKind>(gate, gate.bias.y, x.y),
                                   log2_of<kKind>(gate, gate.bias.z, x.z), log2_of<kKind>(gate, gate.bias.w, x.w));
      sum = sum + g;
      if (kKind == GateKind::kGiven) rises = rises || g.x > 0 || g.y > 0 || g.z > 0 || g.w > 0;
      sums.c[i] = sum;
    }
  });
  if (rows < kOwnRows) {
    float4 sum = all_four(0);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (i < rows) sum = sums.c[i];
      sums.c[i] = sum;
    }
  }
  return rises;
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
