// What the host gives the scan back of chunk_sm90.
#pragma once

#include <cstddef>

#include "cuda/delta_rule/chunk_16bit/gradient.cuh"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda::chunk_sm90 {

struct ScanBackMaps {
  TensorMap k, q, d_o, dv;  // token_map with boxes of 64 x 64; dv unused where nobody wants it
  LowerMaps lower;
  TensorMap G, Y;  // rows_map
};

// `items` matrices [items][rows][columns] of a row per value column, in boxes of 64 x 64: {column, row, item}.
TensorMap rows_map(const uint16_t* matrices, DType dtype, int rows, int columns, int64_t items);

size_t scan_back_bytes(int padded_k);  // of shared memory in the widest block

// One launch, or four where sequences are cut into segments, of blocks with 64 or 128 value columns, K up to 64 or above 128
// always 64. For bf16 and fp16, a file each.
template <DType kType>
void launch_scan_back(const chunk_16bit::GradientArgs& args, const ScanBackMaps& maps, int columns,
                      const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
