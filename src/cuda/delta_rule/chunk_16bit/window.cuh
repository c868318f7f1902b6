// The chunks of a sequence that a scan walks over in one launch: all of them, or those that lie in its window.
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/scan_part.cuh"

namespace fastweight::cuda::chunk_16bit {

struct Walk {
  SequenceSpan span;    // their tokens
  int64_t first_chunk;  // in the order of all chunks
  int64_t position;     // of the first, in the sequence
  int chunks;           // none: the sequence is empty, and what goes in comes out
  bool opens, closes;   // the sequence begins, and ends, here
  bool exists;          // anything is to be done
};

__device__ __forceinline__ Walk walk_of(const ChunkArgs& args, const ScanPart& part) {
  const int64_t C = args.chunked.chunk_size;
  Walk walk{sequence_at(args.problem.sequences, part.sequence), part.first_chunk, 0, 0, true, true, true};
  // Offsets out of order may claim more chunks than there is scratch memory for.
  const int64_t all = max(min(chunks_of(walk.span.length, C), args.num_chunks - part.first_chunk), int64_t{0});
  walk.chunks = static_cast<int>(all);
  if (args.window.is_all()) return walk;
  if (all == 0) {
    walk.exists = args.window.begin == 0;
    return walk;
  }
  const int64_t place = first_chunk_of(args.chunked, part.sequence);  // in the row
  const int64_t begin = max(args.window.begin, place), end = min(args.window.end, place + all);
  walk.exists = begin < end;
  walk.position = begin - place;
  walk.chunks = static_cast<int>(max(end - begin, int64_t{0}));
  walk.first_chunk += walk.position;
  walk.opens = begin == place;
  walk.closes = end == place + all;
  walk.span.begin += walk.position * C;
  walk.span.length -= walk.position * C;
  if (!walk.closes) walk.span.length = walk.chunks * C;
  return walk;
}

// What a block is at: in shared memory, because the registers of the scans are few.
struct BlockWork {
  ScanPart part;
  Walk walk;
};

// Of the block's part `at`, found by one thread. All threads leave the part before it.
__device__ __forceinline__ void begin_work(const ChunkArgs& args, int64_t at, int width, int columns, BlockWork& work) {
  if (threadIdx.x == 0) {
    work.part = scan_part_at(args.problem, args.chunked, at, width, columns);
    work.walk = walk_of(args, work.part);
  }
  __syncthreads();
}

// Where a walk's share of the states between windows begins: those of the thread's registers, a piece of kThreads float4
// after the other.
template <class Float>
__device__ __forceinline__ Float* carried_at(const ChunkArgs& args, Float* states, const ScanPart& part,
                                             const Walk& walk, int columns, int floats, int thread) {
  const int ranges = (args.padded_v() + columns - 1) / columns;
  const int64_t head = walk.span.batch * args.problem.num_value_heads + part.head;
  return states + (head * ranges + part.column / columns) * floats + 4 * thread;
}

// C tiles of a thread, one of kThreads.
template <int kThreads, int kTiles>
__device__ __forceinline__ void take_tiles(const float* from, float (&S)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float4 x = *reinterpret_cast<const float4*>(from + n * 4 * kThreads);
    S[n][0] = x.x, S[n][1] = x.y, S[n][2] = x.z, S[n][3] = x.w;
  }
}
template <int kThreads, int kTiles>
__device__ __forceinline__ void give_tiles(float* to, const float (&S)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    *reinterpret_cast<float4*>(to + n * 4 * kThreads) = make_float4(S[n][0], S[n][1], S[n][2], S[n][3]);
  }
}

// The state in the registers of the block's first kPairs warps, from the window before or to the next.
template <int kTiles, int kK, int kPairs>
__device__ __forceinline__ void take_carried(const ChunkArgs& args, const ScanPart& part, const Walk& walk,
                                             float (&S)[kTiles][kK / 8][4]) {
  constexpr int kThreads = kPairs * kWarpSize, kColumns = 16 * kTiles * kPairs;
  const float* from =
      carried_at(args, args.carried.taken, part, walk, kColumns, kColumns * kK, static_cast<int>(threadIdx.x));
#pragma unroll
  for (int i = 0; i < kTiles; ++i) take_tiles<kThreads>(from + i * (kK / 2) * kThreads, S[i]);
}
template <int kTiles, int kK, int kPairs>
__device__ __forceinline__ void give_carried(const ChunkArgs& args, const ScanPart& part, const Walk& walk,
                                             const float (&S)[kTiles][kK / 8][4]) {
  constexpr int kThreads = kPairs * kWarpSize, kColumns = 16 * kTiles * kPairs;
  float* to = carried_at(args, args.carried.given, part, walk, kColumns, kColumns * kK, static_cast<int>(threadIdx.x));
#pragma unroll
  for (int i = 0; i < kTiles; ++i) give_tiles<kThreads>(to + i * (kK / 2) * kThreads, S[i]);
}

}  // namespace fastweight::cuda::chunk_16bit
