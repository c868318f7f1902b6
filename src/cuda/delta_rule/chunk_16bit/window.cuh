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

// A state at the edge of a walk: the caller's, of the sequence, or one that the windows hand on, of the row.
__device__ __forceinline__ StateAddress edge_state(const DeviceStates& of_sequence, const DeviceStates& of_row,
                                                   bool at_edge, const ScanPart& part, const Walk& walk) {
  const DeviceStates states = at_edge ? of_sequence : of_row;
  const int64_t outer = at_edge ? part.sequence : walk.span.batch;
  return {states, outer * states.outer_strides[0] + part.head * states.outer_strides[1], states.present()};
}

}  // namespace fastweight::cuda::chunk_16bit
