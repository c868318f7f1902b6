// What the scans over the chunks of a sequence share: the part of the problem that a block has, and the state in the
// registers of its warps.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/sequences.h"
#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/device_problem.h"
#include "cuda/delta_rule/state_address.cuh"

namespace fastweight::cuda {

// Value columns are the rows of mma tiles.
inline constexpr int kTileColumns = 16;

// The work of a block: a range of columns of one value head of one sequence.
struct ScanPart {
  int64_t sequence;
  int head, key_head;
  int column;           // the block's first
  int64_t first_chunk;  // of the sequence, in the order of all chunks
};

// Parts run over (sequence, value head, range of `columns` of `width` columns), the last fastest.
__device__ __forceinline__ ScanPart scan_part_at(const DeltaRuleDeviceProblem& problem, const ChunkedSequences& chunked,
                                                 int64_t at, int width, int columns) {
  ScanPart part;
  const int ranges = (width + columns - 1) / columns;
  const int64_t row = at / ranges;
  part.column = static_cast<int>(at - row * ranges) * columns;
  part.sequence = row / problem.num_value_heads;
  part.head = static_cast<int>(row - part.sequence * problem.num_value_heads);
  part.key_head = part.head / problem.group;
  part.first_chunk = chunked.first_chunk == nullptr
                         ? part.sequence * chunks_of(problem.sequences.tokens, chunked.chunk_size)
                         : chunked.first_chunk[part.sequence];
  return part;
}
__device__ __forceinline__ ScanPart scan_part_at(const DeltaRuleDeviceProblem& problem, const ChunkedSequences& chunked,
                                                 int64_t at, int columns) {
  return scan_part_at(problem, chunked, at, problem.head_dim_v, columns);
}

// S^T as C tiles: rows are the warp's columns of V, columns the key channels. Moves it from or to a state in memory.
template <int kK, class Access>
__device__ __forceinline__ void for_each_element(const DeviceStates& states, int64_t base, int column, int K, int V,
                                                 int lane, float (&S)[kK / 8][4], const Access& access) {
  const int v = column + lane / 4, k = 2 * (lane % 4);
  int64_t offset = base + k * states.k_stride + v * states.v_stride;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n, offset += 8 * states.k_stride) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (v + e / 2 * 8 < V && 8 * n + k + e % 2 < K) {
        access(offset + e % 2 * states.k_stride + e / 2 * 8 * states.v_stride, S[n][e]);
      }
    }
  }
}

// Of the [N, HV] states of the sequences.
__device__ __forceinline__ int64_t state_offset(const DeviceStates& states, const ScanPart& part) {
  return part.sequence * states.outer_strides[0] + part.head * states.outer_strides[1];
}

template <int kK>
__device__ __forceinline__ void load_state(const DeviceStates& states, int64_t base, int column, int K, int V, int lane,
                                           float (&S)[kK / 8][4]) {
  for_each_element<kK>(states, base, column, K, V, lane, S,
                       [&](int64_t offset, float& value) { value = load_float(states.data, states.dtype, offset); });
}

template <int kK>
__device__ __forceinline__ void store_state(const DeviceStates& states, int64_t base, int column, int K, int V,
                                            int lane, float (&S)[kK / 8][4]) {
  for_each_element<kK>(states, base, column, K, V, lane, S,
                       [&](int64_t offset, float& value) { store_float(states.data, states.dtype, offset, value); });
}

}  // namespace fastweight::cuda
