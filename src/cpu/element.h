// Single elements of tensors of any floating type.
#pragma once

#include <cstdint>

#include "cpu/scalar_types.h"
#include "fastweight/tensor.h"

namespace fastweight::cpu {

// Where the element with this row-major index lies, in elements from the start.
inline int64_t element_offset(const TensorView& x, int64_t index) {
  int64_t offset = 0;
  for (int axis = x.rank - 1; axis >= 0; --axis) {
    const auto a = static_cast<size_t>(axis);
    offset += index % x.shape[a] * x.strides[a];
    index /= x.shape[a];
  }
  return offset;
}

inline double load_element(const TensorView& x, int64_t index) {
  return load_as_double(x.data, x.dtype, element_offset(x, index));
}

inline void store_element(const TensorView& x, int64_t index, double value) {
  store_double(x.data, x.dtype, element_offset(x, index), value);
}

}  // namespace fastweight::cpu
