// What a block of the gradients' kernels works on, item by item, and the copies of its operands to shared memory.
#pragma once

#include <type_traits>

#include "cuda/delta_rule/chunk_16bit/gradient.cuh"

namespace fastweight::cuda::chunk_16bit {

// One range of value columns of one value head of a chunk, and its place in the walk of a block.
struct Item {
  ChunkSpan span;   // sequence -1: there is none
  int64_t pair;     // slot H + key head
  int64_t at;       // chunk HV + head
  int64_t factors;  // where those of the chunk and the head are
  int64_t slot;     // slot HV + head, of G and Y
  int head, key_head;
  int column;          // the first
  bool first, last;    // of the key head
  bool opens, closes;  // the value head
  bool ready;          // what the scan back leaves has been seen; where nobody looks it is not used
};

// Where the copies of the keys are.
__device__ __forceinline__ int64_t copies_of(const ChunkArgs& args, const Item& item) {
  return args.copies_of_window ? item.slot : item.at;
}

// What follows from an item's pair, column and the number h of its head in the group. Index: as of chunk_at, for pairs too.
template <int kColumns, class Index>
__device__ __forceinline__ void describe(const ChunkArgs& args, int h, Item& item) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int heads = p.num_value_heads / p.group;
  const int64_t slot = static_cast<Index>(item.pair) / heads, chunk = args.window.template chunk_in<Index>(slot);
  item.key_head = static_cast<int>(item.pair - slot * heads);
  item.head = item.key_head * p.group + h;
  item.at = chunk * p.num_value_heads + item.head;
  item.factors = args.factors_at(chunk) + item.head;
  item.slot = slot * p.num_value_heads + item.head;
  item.opens = item.column == 0;
  item.closes = item.column + kColumns >= p.head_dim_v;
  item.first = h == 0 && item.opens;
  item.last = h == p.group - 1 && item.closes;
  if (item.first) {
    item.span = {};
    if (slot < chunks_in_window(args)) item.span = chunk_at<Index>(args.chunked, chunk);
  }
}

template <int kColumns, class Index = int64_t>
__device__ __forceinline__ void first_item(const ChunkArgs& args, int64_t pair, Item& item) {
  item.pair = pair;
  item.column = 0;
  describe<kColumns, Index>(args, 0, item);
}

// `pair` is the one to take after this item's, if this is its last item.
template <int kColumns, class Index = int64_t>
__device__ __forceinline__ void find_next(const ChunkArgs& args, const Item& item, int64_t pair, Item& next) {
  next.span = item.span;
  next.pair = item.last ? pair : item.pair;
  next.column = item.closes ? 0 : item.column + kColumns;
  const int h = item.head - item.key_head * args.problem.group;
  describe<kColumns, Index>(args, item.last ? 0 : item.closes ? h + 1 : h, next);
}

// Pair n in the order in which the scan back leaves them: the last chunks of all rows first.
template <class Index = int64_t>
__device__ __forceinline__ Index pair_from_the_end(const ChunkArgs& args, std::type_identity_t<Index> n) {
  const Sequences& sequences = args.problem.sequences;
  const int heads = args.problem.num_value_heads / args.problem.group;
  const bool one_row = sequences.offsets != nullptr;
  const Index rows = one_row ? 1 : static_cast<Index>(sequences.count), width = static_cast<Index>(args.window.width());
  const int64_t end = one_row ? min(args.chunked.first_chunk[sequences.count], args.window.end) : args.window.end;
  const Index turn = n / heads, head = n - turn * heads, place = turn / rows, row = turn - place * rows;
  const Index position = static_cast<Index>(end - args.window.begin) - 1 - place;
  return (position < 0 ? rows * width : row * width + position) * heads + head;
}

// Where a block takes one pair of a chunk and a key head after the other: beside the scan back whichever is next, after it
// every gridDim.x-th. By one thread.
template <class Index = int64_t>
__device__ __forceinline__ Index first_pair(const GradientArgs& args) {
  if (!args.progress.present()) return static_cast<Index>(blockIdx.x);
  return pair_from_the_end<Index>(args.chunk, claim(args.progress.counter));
}
// After the item, if that is the last one of its pair.
template <class Index = int64_t>
__device__ __forceinline__ Index pair_after(const GradientArgs& args, const Item& item) {
  const auto pair = static_cast<Index>(item.pair);
  if (!args.progress.present()) return pair + static_cast<Index>(gridDim.x);
  return item.last ? pair_from_the_end<Index>(args.chunk, claim(args.progress.counter)) : pair;
}

// Whether the scan back has left what the item needs.
__device__ __forceinline__ bool is_ready(const GradientArgs& args, const Item& item) {
  if (item.span.sequence < 0) return false;
  bool ready = true;
  for (int range = 0; range < args.progress.ranges; ++range) {
    ready = ready && is_published(args.progress.ready_at(item.at) + range);
  }
  return ready;
}

// Rows of 16-bit elements, of `width` each, to a tile; zeros beyond. Thread `thread` of kThreads does its part, here and
// below; the caller commits the copies.
template <int kRows, int kThreads, int kColumns>
__device__ __forceinline__ void copy_rows(const SharedTile<kColumns>& tile, const uint16_t* source, int64_t row_stride,
                                          int rows, int width, int thread) {
  constexpr int kSegments = SharedTile<kColumns>::kSegments, kStep = kThreads / kSegments;
  const int segment = thread % kSegments, top = thread / kSegments;
  const uint16_t* from = source + top * row_stride + 8 * segment;
  if (rows >= kRows && width >= kColumns) {
#pragma unroll 4
    for (int i = 0; i < kRows; i += kStep, from += kStep * row_stride) {
      copy_async(tile.address(top + i, segment), from, true);
    }
    return;
  }
  const int count = 8 * segment < width ? rows : 0;
#pragma unroll 1
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
    if (above_diagonal(row, segment)) continue;
    copy_async(tile.address(row, segment), source + lower_offset(row, segment * 8), true);
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

// Rows of q or k.
template <int kThreads, int kK>
__device__ __forceinline__ void load_key_rows(const ChunkArgs& args, const DeviceTensor& x, const Item& item,
                                              const SharedTile<kK>& tile, int thread) {
  const auto* start =
      static_cast<const uint16_t*>(x.data) + row_offset(x, item.span.batch, item.span.begin, item.key_head);
  load_rows<kChunkRows, kThreads>(tile, x, start, static_cast<int>(item.span.length), 0, args.problem.head_dim_k,
                                  args.vector_keys, thread);
}

}  // namespace fastweight::cuda::chunk_16bit
