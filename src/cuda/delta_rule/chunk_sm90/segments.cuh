// What a block of a scan has where sequences are cut into segments. See segment_plan.h.
#pragma once

#include "cuda/delta_rule/chunk_16bit/window.cuh"
#include "cuda/delta_rule/chunk_sm90/segments.h"
#include "cuda/delta_rule/chunk_sm90/tiles.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::Walk;

__device__ __forceinline__ int64_t segment_tokens(const ScanArgs& args) {
  return args.segments.chunks * args.chunked.chunk_size;
}

// A matrix of the segment that begins at token `begin` of a row. Offsets out of order may name one that there is no memory
// for; they get another.
__device__ __forceinline__ float* segment_map(const ScanArgs& args, int64_t batch, int64_t begin, int head,
                                              MapPart part) {
  const Segments& segments = args.segments;
  const int64_t slot = clamped(begin / segment_tokens(args) - segments.first, 0, max(segments.count - 1, int64_t{0}));
  return segments.maps +
         (((batch * segments.count + slot) * args.problem.num_value_heads + head) * segments.parts + part) * kMapFloats;
}
// The matrix of a row and a head that windows hand over.
__device__ __forceinline__ int64_t composed_at(const ScanArgs& args, int64_t batch, int head) {
  return (batch * args.problem.num_value_heads + head) * kMapFloats;
}

// What a block of a scan is at.
struct ScanWork {
  ScanPart part;
  Walk walk;
  bool is_tail;  // or all of a sequence that is not cut: no segment
};

// Of a sequence: its segment with the index, or the tail where the index is the number of segments.
struct SegmentPlace {
  int64_t sequence, index;
  bool exists;
};

// With offsets: of all segments the i-th.
__device__ __forceinline__ SegmentPlace segment_in_order(const ScanArgs& args, int64_t i) {
  const int64_t* before = args.segments.before;
  int64_t low = 0, high = args.problem.sequences.count;
  if (i >= before[high]) return {0, 0, false};
  // The last sequence that has no more before it; those without segments come before it.
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (before[middle] <= i ? low : high) = middle;
  }
  return {low, i - before[low], true};
}

// The i-th segment of those that a launch counts: of a fixed length those with the window's numbers in all rows, with offsets
// all up to the last of these numbers, which the i-th has at least.
__device__ __forceinline__ SegmentPlace segment_at(const ScanArgs& args, int64_t i) {
  const Sequences& sequences = args.problem.sequences;
  if (sequences.offsets != nullptr) return segment_in_order(args, i);
  const int64_t row = i / args.segments.count, index = args.segments.first + i - row * args.segments.count;
  return {row, index, index < segments_of(sequences.tokens, segment_tokens(args))};
}
inline int64_t count_segments(const ScanArgs& args) {
  const Segments& segments = args.segments;
  const Sequences& sequences = args.problem.sequences;
  return sequences.offsets != nullptr ? segments.first + segments.count : sequences.count * segments.count;
}

// Parts of a scan over segments: ranges of `columns` columns of a value head of a tail or a segment, the tails, which may
// be longer, first. Of a scan of maps: of the columns of h and M of a segment.
template <bool kMaps>
__device__ __forceinline__ ScanWork segment_part_at(const ScanArgs& args, int64_t at, int columns) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t C = args.chunked.chunk_size, n = args.segments.chunks, tails = kMaps ? 0 : p.sequences.count;
  const int ranges = ((kMaps ? 2 * kMapWidth : p.head_dim_v) + columns - 1) / columns;
  const int64_t row = at / ranges, piece = row / p.num_value_heads;
  const bool is_tail = piece < tails;
  const SegmentPlace place = is_tail ? SegmentPlace{piece, 0, true} : segment_at(args, piece - tails);
  // Of the sequence, and then of the segment.
  ScanWork work;
  work.is_tail = is_tail;
  const int64_t of_sequence = place.sequence * p.num_value_heads + (row - piece * p.num_value_heads);
  work.part = scan_part_at(p, args.chunked, of_sequence * ranges + (at - row * ranges), ranges * columns, columns);
  Walk& walk = work.walk;
  walk = {sequence_at(p.sequences, place.sequence), work.part.first_chunk, 0, 0, true, true, place.exists};
  const int64_t index = is_tail ? segments_of(walk.span.length, n * C) : place.index;
  const int64_t rest = chunks_of_part(args, work.part, walk.span.length) - index * n;
  walk.position = index * n;
  walk.first_chunk += walk.position;
  walk.chunks = static_cast<int>(max(is_tail ? rest : min(rest, n), int64_t{0}));
  walk.span.begin += walk.position * C;
  walk.span.length -= walk.position * C;
  if (!is_tail) walk.span.length = n * C;
  if (walk.exists) clip_to_window(args, work.part, walk);
  return work;
}

// Parts of a scan over whole sequences, or over either.
template <int kK, bool kMaps>
__device__ __forceinline__ ScanWork work_at(const ScanArgs& args, int64_t at, int columns) {
  if constexpr (kK == kMapWidth) {
    if (kMaps || args.segments.chunks > 0) return segment_part_at<kMaps>(args, at, columns);
  }
  ScanWork work;
  work.part = scan_part_at(args.problem, args.chunked, at, columns);
  work.walk = walk_of(args, work.part);
  work.is_tail = true;
  return work;
}

// Which parts a launch walks over. Of those of `columns` columns there are first the ones of tails, and then those of segments,
// which are all that a scan of maps has.
struct PartRange {
  int64_t begin, end;
};
inline PartRange tail_parts(const ScanArgs& args, int columns) {
  const DeltaRuleDeviceProblem& p = args.problem;
  return {0, p.sequences.count * p.num_value_heads * ((p.head_dim_v + columns - 1) / columns)};
}
inline PartRange segment_parts(const ScanArgs& args, int columns) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t first = tail_parts(args, columns).end;
  return {first, first + count_segments(args) * p.num_value_heads * ((p.head_dim_v + columns - 1) / columns)};
}
inline PartRange map_parts(const ScanArgs& args, int columns) {
  return {0, count_segments(args) * args.problem.num_value_heads * (2 * kMapWidth / columns)};
}

// Of a scan forward, how many.
template <bool kMaps>
int64_t count_forward_parts(const ForwardArgs& args, int columns) {
  if (kMaps) return map_parts(args, columns).end;
  // The tails come first: they are enough where nothing but final states is wanted.
  const bool walks_segments = args.segments.chunks > 0 && (args.o.present() || args.chunk_states.present());
  return walks_segments ? segment_parts(args, columns).end : tail_parts(args, columns).end;
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
