// Tensor maps: what a copy of tma.cuh knows of a tensor in global memory. Made on the host for one call, given to kernels
// by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/swizzle.h"
#include "fastweight/tensor.h"

namespace fastweight::cuda {

using TensorMap = CUtensorMap;

// The fastest dimension first; its elements lie together. Addresses and strides are multiples of 16 bytes.
struct TensorMapSpec {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  int rank = 0;
  int64_t sizes[5] = {};
  int64_t strides[5] = {};          // in elements; the first is 1
  int box[5] = {};                  // what a copy moves, at most 256 along each dimension
  int steps[5] = {1, 1, 1, 1, 1};   // every so many elements of the box are copied; the first is 1
  Swizzle swizzle = Swizzle::k128;  // the first dimension of the box is a row of the pattern, kNone: any 16 bytes
};

// Throws Error(kDevice) where the driver refuses it or is too old to know.
TensorMap tensor_map(const TensorMapSpec& spec);

// Rows of tokens of a [B, T, H, D] tensor, `rows` at once of `columns` columns of one head, of which only those of a part
// of a sequence are copied: loads give zeros for the others, stores leave them alone. The map has two dimensions that
// both go from token to token. The place along one says how many tokens of the box exist, because the box begins so near
// the end of the dimension; the place along the other makes up for it:
//
//     {column, head, rows - count, token + count, batch}      tokens [token, token + count), count <= rows
//
// The address that the map begins at lies `rows` tokens before the tensor; no copy goes there.
TensorMap token_map(const TensorView& tensor, int rows, int columns, Swizzle swizzle);

// Whether there is such a map: elements of so many bytes, rows that lie together, strides of multiples of 16 bytes.
bool has_token_map(const TensorView& tensor, int64_t element_bytes = sizeof(uint16_t));

}  // namespace fastweight::cuda
