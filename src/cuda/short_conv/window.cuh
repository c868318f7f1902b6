// A thread's place in the problem, the last inputs of its channels, and the filter.
//
// A thread has kChannels neighbouring channels: 4, or 1. Filter and window are right-aligned in kTaps rows of
// registers; taps before the first one are skipped, not multiplied by 0: an infinite input W tokens back must not reach
// an output.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/short_conv/device_problem.h"

namespace fastweight::cuda {

inline constexpr int kMostTaps = 16;

// Some channels of a sequence.
struct Place {
  int64_t batch = 0, begin = 0;  // the sequence's first token
  int64_t length = 0;            // of the sequence
  int64_t slot = 0;              // of its states; below 0: skip it
  int64_t channel = 0;           // the first
  int count = 0;                 // of channels
};

__device__ __forceinline__ void set_sequence(const ShortConvDeviceProblem& p, int64_t sequence, Place& place) {
  const SequenceSpan span = sequence_at(p.sequences, sequence);
  place.batch = span.batch;
  place.begin = span.begin;
  place.length = span.length;
  place.slot = sequence;
}

template <int kChannels>
__device__ __forceinline__ int channels_from(const ShortConvDeviceProblem& p, int64_t channel) {
  const int64_t left = p.channels - channel;
  return left < kChannels ? static_cast<int>(left) : kChannels;
}

// Channels of the columns of a [.., D, W] tensor, right-aligned: row kTaps - W + i is column i. `offset` is that of the
// first channel, `axis` that of the channels.
template <int kTaps, int kChannels>
__device__ __forceinline__ void load_columns(const DeviceTensor& x, int axis, int64_t offset, int width, int count,
                                             float (&rows)[kTaps][kChannels]) {
  if (x.aligned_vec4 && width == kTaps) {
    with_type(x.dtype, [&](auto type) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int64_t channel = offset + (c < count ? c : 0) * x.strides[axis];
#pragma unroll
        for (int i = 0; i < kTaps; i += 4) {
          float values[4];
          decode_vec4<type.value>(load_vec4<type.value>(element_at(x.data, type.value, channel + i)), values);
#pragma unroll
          for (int e = 0; e < 4; ++e) rows[i + e][c] = values[e];
        }
      }
    });
    return;
  }
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int column = i - (kTaps - width);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const bool there = column >= 0 && c < count;
      rows[i][c] =
          there ? load_float(x.data, x.dtype, offset + c * x.strides[axis] + column * x.strides[axis + 1]) : 0.0f;
    }
  }
}

template <int kChannels>
__device__ __forceinline__ void load_bias(const ShortConvDeviceProblem& p, const Place& place,
                                          float (&bias)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const bool there = p.bias.present() && c < place.count;
    bias[c] = there ? load_float(p.bias.data, p.bias.dtype, (place.channel + c) * p.bias.strides[0]) : 0.0f;
  }
}

// Token t of the sequence in a [B, T, D] tensor.
__device__ __forceinline__ int64_t token_offset(const DeviceTensor& x, const Place& place, int64_t t) {
  return place.batch * x.strides[0] + (place.begin + t) * x.strides[1] + place.channel * x.strides[2];
}

template <DType kType, int kChannels>
__device__ __forceinline__ RawVec4 load_token(const DeviceTensor& x, int64_t offset, int count) {
  if constexpr (kChannels == 1) {
    return {load_bits(element_at(x.data, kType, offset), kType), 0, 0, 0};
  } else {
    if (x.aligned_vec4) return load_vec4<kType>(element_at(x.data, kType, offset));
    return gather_vec4(x.data, kType, offset, x.strides[2], count);
  }
}

template <DType kType, int kChannels>
__device__ __forceinline__ void decode_token(const RawVec4& raw, float (&values)[kChannels]) {
  if constexpr (kChannels == 1) {
    values[0] = decode(raw.words[0], kType);
  } else {
    decode_vec4<kType>(raw, values);
  }
}

// To a tensor of type kType or fp32.
template <DType kType, int kChannels>
__device__ __forceinline__ void store_token(const DeviceTensor& y, int64_t offset, int count,
                                            const float (&values)[kChannels]) {
  if constexpr (kChannels == 1) {
    store_float(y.data, y.dtype, offset, values[0]);
  } else if (!y.aligned_vec4) {
    scatter_vec4(y.data, y.dtype, offset, y.strides[2], count, values);
  } else if (kType == DType::kF32 || y.dtype == DType::kF32) {
    store_vec4<DType::kF32>(element_at(y.data, DType::kF32, offset), values);
  } else {
    store_vec4<kType>(element_at(y.data, kType, offset), values);
  }
}

// x_{t - kTaps + 1} .. x_{t - 1}. Where t is not 0 it is kMostTaps or more, so the rows are those of the state or
// tokens, never both.
template <DType kType, int kTaps, int kChannels>
__device__ __forceinline__ void open_window(const ShortConvDeviceProblem& p, const Place& place, int64_t t,
                                            float (&window)[kTaps][kChannels]) {
  if (t == 0) {
    const DeviceTensor& state = p.state_before;
    float rows[kTaps][kChannels] = {};
    if (state.present()) {
      load_columns(state, 1, place.slot * state.strides[0] + place.channel * state.strides[1], p.width, place.count,
                   rows);
    }
#pragma unroll
    for (int i = 1; i < kTaps; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) window[i - 1][c] = rows[i][c];
    }
    return;
  }
  const int64_t offset = token_offset(p.x, place, t - kTaps + 1);
  RawVec4 raw[kTaps];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    raw[i] = load_token<kType, kChannels>(p.x, offset + i * p.x.strides[1], place.count);
  }
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) decode_token<kType>(raw[i], window[i]);
}

// Row kTaps - 1 is the current token's; a token later every row is one further up.
template <int kTaps, int kChannels>
__device__ __forceinline__ void advance_window(float (&window)[kTaps][kChannels]) {
#pragma unroll
  for (int j = 1; j < kTaps; ++j) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) window[j - 1][c] = window[j][c];
  }
}

// z = bias + sum_i w_i x_i, the sum from the oldest row on.
template <int kTaps, int kChannels>
__device__ __forceinline__ void convolve(int width, const float (&w)[kTaps][kChannels], const float (&bias)[kChannels],
                                         const float (&window)[kTaps][kChannels], float (&z)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) z[c] = bias[c];
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    if (tap < kTaps - width) continue;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) z[c] = fmaf(w[tap][c], window[tap][c], z[c]);
  }
}

}  // namespace fastweight::cuda
