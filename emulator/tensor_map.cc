#include "tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "async.h"

namespace emulator {
namespace {

constexpr uint32_t kMagic = 0x7e4502ab;

// Refuses what the driver refuses. Only what this project uses exists: 16- and 32-bit floats, no interleaving, zeros
// outside.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (rank < 1 || rank > 5 || address % 16 != 0 || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMapData made{};
  made.magic = kMagic;
  made.rank = static_cast<uint8_t>(rank);
  made.data = static_cast<char*>(data);
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
      made.element_bytes = 2;
      break;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      made.element_bytes = 4;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  uint32_t most = 0;  // bytes of a row of the box
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      break;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      made.swizzled_bits = 3;
      most = 64;
      break;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      made.swizzled_bits = 7;
      most = 128;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  made.strides[0] = made.element_bytes;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] < 1 || sizes[i] > uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] < 1 || box[i] > 256 || steps[i] < 1 || steps[i] > 8) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0) {
      const cuuint64_t stride = strides[i - 1];
      if (stride % 16 != 0 || stride >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
      made.strides[i] = stride;
    }
    made.last[i] = static_cast<uint32_t>(sizes[i] - 1);
    made.box[i] = static_cast<uint16_t>(box[i]);
    made.steps[i] = static_cast<uint8_t>(i == 0 ? 1 : steps[i]);  // the driver ignores the first
  }
  const uint32_t row = box[0] * made.element_bytes;
  if (row % 16 != 0 || (most > 0 && row > most)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

uint32_t count_along(const TensorMapData& map, int i) { return (map.box[i] + map.steps[i] - 1u) / map.steps[i]; }

}  // namespace

const TensorMapData& data_of(const CUtensorMap& map) {
  const auto& data = *reinterpret_cast<const TensorMapData*>(&map);
  if (data.magic != kMagic) fail("a tensor map that was not encoded");
  return data;
}

uint32_t box_bytes(const TensorMapData& map) {
  uint32_t bytes = map.element_bytes;
  for (int i = 0; i < map.rank; ++i) bytes *= count_along(map, i);
  return bytes;
}

void for_each_in_box(const TensorMapData& map, const int* place, uint32_t start,
                     const std::function<void(uint32_t shared, char* global, uint32_t inside)>& visit) {
  const uint32_t bytes = box_bytes(map), row = map.box[0] * uint32_t{map.element_bytes};
  const int64_t row_inside = (int64_t{map.last[0]} + 1 - place[0]) * map.element_bytes;
  for (uint32_t offset = 0; offset < bytes; offset += kSegment) {
    const uint32_t along_row = offset % row;
    uint32_t rest = offset / row;
    char* global = map.data + int64_t{place[0]} * map.element_bytes + along_row;
    int64_t inside = row_inside - int64_t{along_row};
    for (int i = 1; i < map.rank; ++i) {
      const uint32_t count = count_along(map, i);
      const int64_t at = place[i] + int64_t{rest % count} * map.steps[i];
      rest /= count;
      if (at > int64_t{map.last[i]}) inside = 0;
      global += at * static_cast<int64_t>(map.strides[i]);
    }
    const uint32_t plain = start + offset;
    visit(plain ^ ((plain >> 7 & map.swizzled_bits) << 4), global,
          static_cast<uint32_t>(std::clamp<int64_t>(inside, 0, kSegment)));
  }
}

}  // namespace emulator

// The one function of the driver that is asked for.
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                        unsigned long long, cudaDriverEntryPointQueryResult* found) {
  const bool known = std::string_view(symbol) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&emulator::encode_tiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
