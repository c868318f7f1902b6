// The gates of a thread's channels and tokens in the gradients with a decay per channel (gradients_per_channel.cuh), and sums
// over tokens and over channels.
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_channels.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::GateKind;
using chunk_16bit::GateTerms;
using chunk_16bit::kLog2E;

// The gates of a thread's channels and tokens.
struct OwnGates {
  int channel;  // the first; the other one is 8 beyond
  int token;    // the first
  int rows;     // tokens from there on
  int columns;  // channels from the first on
  bool all;     // of the chunk, all tokens and channels exist

  __device__ __forceinline__ bool has(int n, int e) const { return 8 * n + e % 2 < rows && e / 2 * 8 < columns; }

  // 0 in place of what does not exist.
  __device__ __forceinline__ void clear_others(ChannelSums& x) const {
    if (all) return;
#pragma unroll
    for (int n = 0; n < kHalfRows / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = has(n, e) ? x[n][e] : 0.0f;
    }
  }

  // body(n, e, place) with the place of the tensor's element of this chunk and head.
  template <DType kOf, class Body>
  __device__ __forceinline__ void for_each(const DeviceTensor& x, const Item& item, const Body& body) const {
    const int64_t step = byte_offset(kOf, x.strides[1]);
    const int64_t first = row_offset(x, item.span.batch, item.span.begin + token, item.head);
    char* at = opaque(element_at(static_cast<char*>(x.data), kOf, first + channel * x.strides[3]));
    if (all && x.strides[3] == 1) {
#pragma unroll
      for (int n = 0; n < kHalfRows / 8; ++n, at += 8 * step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) body(n, e, at + (e % 2) * step + byte_offset(kOf, e / 2 * 8));
      }
      return;
    }
    const int64_t other = byte_offset(kOf, 8 * x.strides[3]);
#pragma unroll
    for (int n = 0; n < kHalfRows / 8; ++n, at += 8 * step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (has(n, e)) body(n, e, at + (e % 2) * step + (e / 2) * other);
      }
    }
  }
};

// What the gate tensor holds; 0 where there is nothing.
__device__ __forceinline__ void load_channel_gates(const DeltaRuleDeviceProblem& p, const Item& item,
                                                   const OwnGates& own, ChannelSums& x) {
#pragma unroll
  for (auto& tile : x) tile[0] = tile[1] = tile[2] = tile[3] = 0;
  with_type(p.g.dtype, [&](auto type) {
    constexpr DType kGate = decltype(type)::value;
    own.for_each<kGate>(p.g, item, [&](int n, int e, const char* at) { x[n][e] = load_float(at, kGate, 0); });
  });
}

// The gate's parameters, as they come from memory: rate() is the first that waits for them.
struct ChannelGate {
  float a_log;
  OfChannels bias;

  __device__ __forceinline__ ChannelGate(const DeltaRuleDeviceProblem& p, int head, const OwnGates& own)
      : a_log(0), bias{0, 0} {
    if (!p.gate_in_kernel) return;
    if (p.a_log.present()) a_log = load_float(p.a_log.data, p.a_log.dtype, head * p.a_log.strides[0]);
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = 8 * h < own.columns ? gate_bias(p, head, own.channel + 8 * h) : 0.0f;
  }
  __device__ __forceinline__ float rate() const { return expf(a_log); }  // 1 without
};

// log2 of the decay.
template <GateKind kKind>
__device__ __forceinline__ float log2_of_gate(const DeltaRuleDeviceProblem& p, float rate, float bias, float x) {
  if constexpr (kKind == GateKind::kBounded) {
    const float turned = -kLog2E * rate;
    return (kLog2E * p.lower_bound) * chunk_16bit::sigmoid_of_log2(fmaf(turned, x, turned * bias));
  } else if constexpr (kKind == GateKind::kSoftplus) {
    return (-kLog2E * rate) * chunk_16bit::softplus_approx(x + bias);
  } else {
    return kLog2E * x;
  }
}

// Sums over the tokens of a tile through each, in their place: products with a triangle of ones, of the numbers in two
// parts of bf16. That takes half the instructions of sums over lanes. The error is below 2^-17 of the sum.
__device__ __forceinline__ void sum_tile(float (&left)[4], float (&right)[4], int lane) {
  constexpr uint32_t kOne = 0x3f80, kOnes = kOne << 16 | kOne;  // in bf16
  const int g = lane / 4, t = lane % 4;
  const uint32_t triangle = 2 * t + 1 <= g ? kOnes : 2 * t <= g ? kOne : 0;  // tokens 2t, 2t + 1 of those through g
  uint32_t high[4], low[4];
  pack_a<DType::kBF16>(left, right, high);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float(&x)[4] = w < 2 ? left : right;
    const float2 y = unpack<DType::kBF16>(high[w]);
    low[w] = pack<DType::kBF16>(x[w % 2 * 2] - y.x, x[w % 2 * 2 + 1] - y.y);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) left[e] = right[e] = 0;
  mma<DType::kBF16>(left, low, triangle, 0);
  mma<DType::kBF16>(right, low, kOnes, triangle);
  mma<DType::kBF16>(left, high, triangle, 0);
  mma<DType::kBF16>(right, high, kOnes, triangle);
}

// The sum over the tokens of a C tile after the lane's two, of which it has the sum x; and that of all.
__device__ __forceinline__ float2 sum_after(float x, int t) {
  float through = x;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const float other = __shfl_down_sync(kAllLanes, through, distance, 4);
    through = t + distance < 4 ? through + other : through;
  }
  const float after = __shfl_down_sync(kAllLanes, through, 1, 4);
  return make_float2(t < 3 ? after : 0.0f, __shfl_sync(kAllLanes, through, 0, 4));
}

// Eight sums over the lanes of the same t: a lane gets number lane / 4.
__device__ __forceinline__ float sum_over_channels(const float (&x)[8], int lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool high = (lane & 16) != 0;
    four[i] = (high ? x[4 + i] : x[i]) + __shfl_xor_sync(kAllLanes, high ? x[i] : x[4 + i], 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool high = (lane & 8) != 0;
    two[i] = (high ? four[2 + i] : four[i]) + __shfl_xor_sync(kAllLanes, high ? four[i] : four[2 + i], 8);
  }
  const bool high = (lane & 4) != 0;
  return (high ? two[1] : two[0]) + __shfl_xor_sync(kAllLanes, high ? two[0] : two[1], 4);
}

// The least of log2 of a token's decay, and of a tile's, that is mild: those of chunk_16bit's kernel.
constexpr float kLeastOfToken = -7.5f;
template <DType kType>
__device__ __forceinline__ bool is_mild(float total) {
  return total >= (kType == DType::kBF16 ? -117.0f : -4.0f);
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
