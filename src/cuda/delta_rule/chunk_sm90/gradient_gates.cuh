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

// Sums over the tokens of a tile, of two C tiles, through each token or, where not kThrough, from each on, added to others:
// products with a triangle of ones, of the numbers in two parts of tf32. That takes half the instructions of sums over
// lanes, and is off by less than 2^-20 of the numbers. `first` has the tokens that the sums begin with. What is not finite
// makes NaNs of the sums of all 8 tokens of its C tile, as 0 times it is NaN, and of the other tile only where the sums go
// through it.
template <bool kThrough>
__device__ __forceinline__ void sum_tokens(const float (&first)[4], const float (&second)[4], int lane,
                                           float (&sum_of_first)[4], float (&sum_of_second)[4]) {
  const int g = lane / 4, even = 2 * (lane % 4);  // the columns of A are the tokens 0, 2, 4, 6, 1, 3, 5, 7
  const auto one = [](bool is) { return is ? __float_as_uint(1.0f) : 0; };
  const uint32_t b0 = one(kThrough ? even <= g : even >= g), b1 = one(kThrough ? even < g : even + 1 >= g);
  const uint32_t ones = __float_as_uint(1.0f);
  const auto split = [](const float(&x)[4], uint32_t(&high)[4], uint32_t(&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = x[i % 2 * 2 + i / 2];
      high[i] = __float_as_uint(y) & 0xffffe000u;
      low[i] = __float_as_uint(y - __uint_as_float(high[i]));
    }
  };
  uint32_t high[2][4], low[2][4];
  split(first, high[0], low[0]);
  split(second, high[1], low[1]);
  mma_tf32(sum_of_first, low[0], b0, b1);
  mma_tf32(sum_of_second, low[0], ones, ones);
  mma_tf32(sum_of_second, low[1], b0, b1);
  mma_tf32(sum_of_first, high[0], b0, b1);
  mma_tf32(sum_of_second, high[0], ones, ones);
  mma_tf32(sum_of_second, high[1], b0, b1);
}

// The sums through each token in place of the numbers.
__device__ __forceinline__ void sum_tile(float (&left)[4], float (&right)[4], int lane) {
  float of_left[4] = {}, of_right[4] = {};
  sum_tokens<true>(left, right, lane, of_left, of_right);
#pragma unroll
  for (int e = 0; e < 4; ++e) left[e] = of_left[e], right[e] = of_right[e];
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
