// The chunk form with the accuracy of fp32, for tensors of any type: what its kernels share. Every product of the scan is
// one of split numbers (common/split.cuh), everything else is fp32. ../chunk.cuh has the equations.
//
// A tile is 16 tokens whatever options.chunk_size, which is a multiple: the scan waits for the tensor cores, and short
// tiles ask least of them (with n rows 3 K V + 2 n V multiply-adds per token, each in three products) and leave the
// factors so few that the multiply-add units do them. Decays between tokens are products of the tokens' own decays,
// never a difference of sums and never divided by: a gate of -1000 is a factor of 0 and costs its neighbours no digits.
#pragma once

#include "core/workspace.h"
#include "cuda/common/split.cuh"
#include "cuda/common/unit_lower.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/chunk.cuh"
#include "cuda/delta_rule/chunk_fp32/config.h"

namespace fastweight::cuda::chunk_fp32 {

inline constexpr int kTileRows = 16;
inline constexpr int kSquare = kTileRows * kTileRows;
inline constexpr int kTokenFactors = 4;

// What the scan needs of every (tile, value head), in scratch memory.
struct TileFactors {
  float* J = nullptr;      // [tiles][HV][16][16]; beta per value channel: A without beta, which is not inverted
  float* sP = nullptr;     // [tiles][HV][16][16]
  float* A = nullptr;      // [tiles][HV][16][16], of the backward with one decay per head; else not kept
  float* token = nullptr;  // [tiles][HV][4][16], by TokenFactor
  float* total = nullptr;  // [tiles][HV][total_width]: e_n, per channel or once
  float* keys = nullptr;   // per channel [tiles][HV][3][16][padded K], by KeyCopy
  int total_width = 4;     // padded K per channel, else 4 of which the first counts
};

// Takes the factors of so many (tile, value head) pairs.
inline TileFactors take_factors(ScratchLayout& layout, int64_t items, int padded_k, bool per_channel, bool with_A) {
  TileFactors factors;
  factors.total_width = per_channel ? padded_k : 4;
  factors.J = layout.take<float>(items * kSquare);
  factors.sP = layout.take<float>(items * kSquare);
  if (with_A) factors.A = layout.take<float>(items * kSquare);
  factors.token = layout.take<float>(items * kTokenFactors * kTileRows);
  factors.total = layout.take<float>(items * factors.total_width);
  factors.keys = layout.take<float>(per_channel ? items * kKeyCopies * kTileRows * padded_k : 0);
  return factors;
}

struct TileArgs {
  DeltaRuleDeviceProblem problem;
  ChunkedSequences tiles;  // in chunks of kTileRows
  int64_t num_tiles = 0;   // at most, over all sequences
  TileFactors factors;
  DeviceTensor o;
  DeviceStates initial_state, final_state, chunk_states;
  ChunkedSequences chunked;  // in chunks of options.chunk_size, where chunk_states are wanted
  int64_t state_chunks = 0;  // of chunk_states
};

// `rows` rows of a [.., width] tensor into a tile; zeros elsewhere. Copies of fp32 are asynchronous: the caller commits
// them and waits.
template <int kColumns>
__device__ __forceinline__ void load_rows(const FloatTile<kColumns>& tile, const DeviceTensor& x, int64_t offset,
                                          int rows, int width) {
  constexpr int kVec4s = FloatTile<kColumns>::kVec4s;
  const bool as_it_lies = x.dtype == DType::kF32 && x.aligned_vec4;
  for (int at = threadIdx.x; at < kTileRows * kVec4s; at += blockDim.x) {
    const int row = at / kVec4s, column = at % kVec4s * 4;
    const bool inside = row < rows && column < width;
    const char* from = element_at(x.data, x.dtype, offset + (inside ? row : 0) * x.strides[1]);
    if (as_it_lies) {
      copy_async(shared_address(&tile.at(row, column)), from + byte_offset(DType::kF32, inside ? column : 0), inside);
      continue;
    }
    float values[4] = {};
    if (inside) {
      const RawVec4 raw = load_part(x, from, column, width);
      with_type(x.dtype, [&](auto type) { decode_vec4<type.value>(raw, values); });
    }
    tile.vec4(row, column / 4) = make_float4(values[0], values[1], values[2], values[3]);
  }
}

// One launch over all (tile, value head) pairs, and the shared memory that a block takes.
void launch_factors(const TileArgs& args, int padded_k, const Context& context);
size_t factors_bytes(int padded_k, bool per_channel);

// The scan, in one launch.
void launch_scan(const TileArgs& args, const ScanConfig& config, const Context& context);
size_t scan_bytes(int padded_k, bool per_channel);

}  // namespace fastweight::cuda::chunk_fp32
