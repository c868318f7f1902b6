// A lane's share of a state (StateTile of recurrent.cuh) and of a row of values, from and to memory in any layout.
#pragma once

#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/common/tensor.h"
#include "cuda/delta_rule/recurrent/recurrent.cuh"

namespace fastweight::cuda::recurrent {

template <int kPlaces, DType kType, bool kAlongK>
__device__ __forceinline__ void load_state_vec4s(const DeviceStates& states, int64_t offset, const Part& part, int K,
                                                 int V, StateTile& S) {
  RawVec4 raw[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + (kAlongK ? 0 : i % 4);
    const int column = part.column + (kAlongK ? i % 4 : 0);
    raw[i] = {};
    if (key < K && column < V) {
      raw[i] =
          load_vec4<kType>(element_at(states.data, kType, offset + key * states.k_stride + column * states.v_stride));
    }
  }
  decode_state<kType, kAlongK>(raw, S);
}

template <int kPlaces, DType kType, bool kAlongK>
__device__ __forceinline__ void store_state_vec4s(const DeviceStates& states, int64_t offset, const Part& part, int K,
                                                  int V, const StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + (kAlongK ? 0 : i % 4);
    const int column = part.column + (kAlongK ? i % 4 : 0);
    float values[4];
    vec4_of<kAlongK>(S, i, values);
    if (key < K && column < V) {
      store_vec4<kType>(element_at(states.data, kType, offset + key * states.k_stride + column * states.v_stride),
                        values);
    }
  }
}

// vec4s(type, along_k) for fp32 and bf16 states with vec4s, each() for all others.
template <class Vec4s, class Each>
__device__ __forceinline__ void with_layout(const DeviceStates& states, const Vec4s& vec4s, const Each& each) {
  if ((!states.k_aligned_vec4 && !states.v_aligned_vec4) || states.dtype == DType::kF16) {
    each();
  } else if (states.dtype == DType::kF32) {
    constexpr std::integral_constant<DType, DType::kF32> kType;
    states.k_aligned_vec4 ? vec4s(kType, std::true_type()) : vec4s(kType, std::false_type());
  } else {
    constexpr std::integral_constant<DType, DType::kBF16> kType;
    states.k_aligned_vec4 ? vec4s(kType, std::true_type()) : vec4s(kType, std::false_type());
  }
}

template <int kPlaces>
__device__ __forceinline__ void load_state(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                           StateTile& S) {
  const auto vec4s = [&](auto type, auto along_k) {
    load_state_vec4s<kPlaces, type.value, along_k.value>(states, offset, part, K, V, S);
  };
  with_layout(states, vec4s, [&] {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of<kPlaces>(part, i / 4) + i % 4;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = part.column + j;
        const bool inside = key < K && column < V;
        const int64_t element = offset + key * states.k_stride + column * states.v_stride;
        S.s[i][j] = inside ? load_float(states.data, states.dtype, element) : 0.0f;
      }
    }
  });
}

template <int kPlaces>
__device__ __forceinline__ void store_state(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                            const StateTile& S) {
  const auto vec4s = [&](auto type, auto along_k) {
    store_state_vec4s<kPlaces, type.value, along_k.value>(states, offset, part, K, V, S);
  };
  with_layout(states, vec4s, [&] {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of<kPlaces>(part, i / 4) + i % 4;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = part.column + j;
        const int64_t element = offset + key * states.k_stride + column * states.v_stride;
        if (key < K && column < V) store_float(states.data, states.dtype, element, S.s[i][j]);
      }
    }
  });
}

// The row of a token and head; null where the tensor is absent.
__device__ __forceinline__ const char* row_at(const DeviceTensor& x, int64_t batch, int64_t token, int head) {
  return x.present() ? element_at(x.data, x.dtype, row_offset(x, batch, token, head)) : nullptr;
}

// The columns that all lanes of a place have, by one of them.
__device__ __forceinline__ void store_columns(const DeviceTensor& x, const Part& part, int V, char* row,
                                              const float (&values)[kColumns]) {
  if (part.place != 0 || part.column >= V) return;
  if (x.aligned_vec4) {
    with_type(x.dtype, [&](auto type) { store_vec4<type.value>(row + byte_offset(type.value, part.column), values); });
  } else {
    const int64_t stride = x.strides[3];
    scatter_vec4(row, x.dtype, part.column * stride, stride, V - part.column, values);
  }
}

}  // namespace fastweight::cuda::recurrent
