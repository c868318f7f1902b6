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
  bool opens, closes;   // the sequence, or the segment of it that is walked over, begins, and ends, here
  bool exists;          // anything is to be done
};

// Of a walk over a sequence or a segment, what lies in the window.
__device__ __forceinline__ void clip_to_window(const ChunkArgs& args, const ScanPart& part, Walk& walk) {
  const int64_t C = args.chunked.chunk_size;
  if (args.window.is_all()) return;
  const int64_t place = first_chunk_of(args.chunked, part.sequence) + walk.position, all = walk.chunks;  // in the row
  if (all == 0) {
    // Of an empty sequence in the first window; what is left of one behind its segments, where the last of them ends.
    walk.exists = walk.position == 0 ? args.window.begin == 0 : args.window.begin < place && place <= args.window.end;
    return;
  }
  const int64_t begin = max(args.window.begin, place), end = min(args.window.end, place + all), skipped = begin - place;
  walk.exists = begin < end;
  walk.position += skipped;
  walk.chunks = static_cast<int>(max(end - begin, int64_t{0}));
  walk.first_chunk += skipped;
  walk.opens = begin == place;
  walk.closes = end == place + all;
  walk.span.begin += skipped * C;
  walk.span.length -= skipped * C;
  if (!walk.closes) walk.span.length = walk.chunks * C;
}

// Offsets out of order may claim more chunks than there is scratch memory for.
__device__ __forceinline__ int64_t chunks_of_part(const ChunkArgs& args, const ScanPart& part, int64_t length) {
  return max(min(chunks_of(length, args.chunked.chunk_size), args.num_chunks - part.first_chunk), int64_t{0});
}

__device__ __forceinline__ Walk walk_of(const ChunkArgs& args, const ScanPart& part) {
  Walk walk{sequence_at(args.problem.sequences, part.sequence), part.first_chunk, 0, 0, true, true, true};
  walk.chunks = static_cast<int>(chunks_of_part(args, part, walk.span.length));
  clip_to_window(args, part, walk);
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

// C tiles of a thread, one of kThreads. Past the L1 cache, which may hold what was there windows ago: a scan that waits late
// reads them before it has waited for other kernels.
template <int kThreads, int kTiles>
__device__ __forceinline__ void take_tiles(const float* from, float (&S)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(from + n * 4 * kThreads));
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
