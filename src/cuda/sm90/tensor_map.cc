#include "cuda/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/common/error.h"
#include "fastweight/error.h"

namespace fastweight::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the driver that the runtime has loaded: nothing is linked against it.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
#else
  check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
             "cudaGetDriverEntryPoint");
#endif
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Error(ErrorCode::kDevice, "the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<Encode>(function);
}

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

CUtensorMapSwizzle pattern_of(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::k128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case Swizzle::k64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

// Elements in 16 bytes.
int64_t group_of(const TensorView& tensor) { return 16 / element_size(tensor.dtype); }

}  // namespace

TensorMap tensor_map(const TensorMapSpec& spec) {
  static const Encode encode = find_encode();
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], steps[5];
  for (int i = 0; i < spec.rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(spec.sizes[i]);
    box[i] = static_cast<cuuint32_t>(spec.box[i]);
    steps[i] = static_cast<cuuint32_t>(spec.steps[i]);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(spec.strides[i] * element_size(spec.dtype));
  }
  TensorMap map{};
  const CUresult status =
      encode(&map, type_of(spec.dtype), static_cast<cuuint32_t>(spec.rank), const_cast<void*>(spec.data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, pattern_of(spec.swizzle),
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice, "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)));
  }
  return map;
}

bool has_token_map(const TensorView& tensor, int64_t element_bytes) {
  if (element_bytes > 4) return false;  // of the types that maps know, none has more
  if (tensor.rank != 4 || element_size(tensor.dtype) != element_bytes) return false;
  if (!has_groups(tensor, 3, group_of(tensor))) return false;
  if (tensor.shape[0] == 0 || tensor.shape[1] == 0) return true;  // nobody makes it
  for (size_t axis = 0; axis < 3; ++axis) {
    if (tensor.shape[axis] > 1 && tensor.strides[axis] <= 0) return false;
  }
  return true;
}

TensorMap token_map(const TensorView& tensor, int rows, int columns, Swizzle swizzle) {
  const auto& shape = tensor.shape;
  // The stride along a dimension of one element may be anything; the map gets that of a dense tensor.
  const auto stride = [&](size_t axis, int64_t dense) { return shape[axis] > 1 ? tensor.strides[axis] : dense; };
  const int64_t group = group_of(tensor), of_heads = stride(2, (shape[3] + group - 1) / group * group);
  const int64_t of_tokens = stride(1, shape[2] * of_heads), of_batches = stride(0, shape[1] * of_tokens);
  TensorMapSpec spec;
  spec.data = static_cast<const char*>(tensor.data) - rows * of_tokens * element_size(tensor.dtype);
  spec.dtype = tensor.dtype;
  spec.rank = 5;
  const int64_t sizes[5] = {shape[3], shape[2], rows, shape[1] + 1, shape[0]};
  const int64_t strides[5] = {1, of_heads, of_tokens, of_tokens, of_batches};
  const int box[5] = {columns, 1, rows, 1, 1};
  for (int i = 0; i < 5; ++i) {
    spec.sizes[i] = sizes[i];
    spec.strides[i] = strides[i];
    spec.box[i] = box[i];
  }
  spec.swizzle = swizzle;
  return tensor_map(spec);
}

}  // namespace fastweight::cuda
