// Rows of tokens, and what a lane of a token-by-token kernel writes to them.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/delta_rule/recurrent/recurrent.cuh"

namespace fastweight::cuda::recurrent {

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
