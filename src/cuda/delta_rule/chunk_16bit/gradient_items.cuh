// What a block of the gradients' kernels works on, and the copies of its operands to shared memory.
//
// A block per (chunk, key head); it takes the value heads of the group, and of each a range of value columns at a time,
// whose contributions add up.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradient.cuh"

namespace fastweight::cuda::chunk_16bit {

// One range of value columns of one value head of a chunk.
struct Item {
  ChunkSpan span;
  int64_t at;  // chunk HV + head
  int head, key_head;
  int column;          // the first
  bool first, last;    // of the key head
  bool opens, closes;  // the value head
};

// Rows of 16-bit elements, of `width` each, to a tile; zeros beyond. Thread `thread` of kThreads does its part, here and
// below; the caller commits the copies.
template <int kRows, int kThreads, int kColumns>
__device__ __forceinline__ void copy_rows(const SharedTile<kColumns>& tile, const uint16_t* source, int64_t row_stride,
                                          int rows, int width, int thread) {
  constexpr int kSegments = SharedTile<kColumns>::kSegments, kStep = kThreads / kSegments;
  const int segment = thread % kSegments, top = thread / kSegments;
  const uint16_t* from = source + top * row_stride + 8 * segment;
  const int count = 8 * segment < width ? rows : 0;
#pragma unroll 4
  for (int i = 0; i < kRows; i += kStep, from += kStep * row_stride) {
    const bool valid = top + i < count;
    copy_async(tile.address(top + i, segment), valid ? from : source, valid);
  }
}

template <int kThreads>
__device__ __forceinline__ void copy_lower_blocks(const LowerBlocks& tile, const uint16_t* source, int thread) {
#pragma unroll
  for (int at = thread; at < kChunkRows * 8; at += kThreads) {
    const int row = at / 8, segment = at % 8;
    if (!above_diagonal(row, segment)) copy_async(tile.address(row, segment), source + at * 8, true);
  }
}

__device__ __forceinline__ const uint16_t* state_before(const GradientArgs& args, const Item& item) {
  const DeviceStates& S = args.S;
  const int64_t chunk = first_chunk_of(args.chunk.chunked, item.span.sequence) + item.span.position;
  const int64_t offset = item.span.batch * S.outer_strides[0] + chunk * S.outer_strides[1] +
                         item.head * S.outer_strides[2] + item.column * S.v_stride;
  return static_cast<const uint16_t*>(S.data) + offset;
}

template <int kThreads, int kColumns>
__device__ __forceinline__ void load_value_rows(const SharedTile<kColumns>& tile, const DeviceTensor& x, bool vectors,
                                                const Item& item, int V, int thread) {
  const auto* start = static_cast<const uint16_t*>(x.data) + row_offset(x, item.span.batch, item.span.begin, item.head);
  load_rows<kChunkRows, kThreads>(tile, x, start, x.present() ? static_cast<int>(item.span.length) : 0, item.column, V,
                                  vectors, thread);
}

// Part `part` of the key head's in a chunk, where `pair` counts the pairs of a chunk and a key head. The sequence is -1
// where there is no such chunk.
template <int kColumns>
__device__ __forceinline__ Item item_at(const GradientArgs& args, int64_t pair, int part) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const int heads = p.num_value_heads / p.group, ranges = (p.head_dim_v + kColumns - 1) / kColumns;
  const int64_t chunk = pair / heads;
  const int h = part / ranges, range = part - h * ranges;
  Item item;
  item.span = chunk_at(args.chunk.chunked, chunk);
  item.key_head = static_cast<int>(pair - chunk * heads);
  item.head = item.key_head * p.group + h;
  item.at = chunk * p.num_value_heads + item.head;
  item.column = range * kColumns;
  item.opens = range == 0;
  item.closes = range == ranges - 1;
  item.first = part == 0;
  item.last = part == p.group * ranges - 1;
  return item;
}

// body(item) for the block's share of all items. All threads leave an item before the next one begins.
template <int kColumns, class Body>
__device__ __forceinline__ void for_each_item(const GradientArgs& args, const Body& body) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const int64_t pairs = args.chunk.num_chunks * (p.num_value_heads / p.group);
  const int parts = p.group * ((p.head_dim_v + kColumns - 1) / kColumns);
  for (int64_t pair = blockIdx.x; pair < pairs; pair += gridDim.x) {
    for (int part = 0; part < parts; ++part) {
      const Item item = item_at<kColumns>(args, pair, part);
      if (item.span.sequence < 0) return;  // chunks are numbered without gaps: none follows
      body(item);
      __syncthreads();
    }
  }
}

}  // namespace fastweight::cuda::chunk_16bit
