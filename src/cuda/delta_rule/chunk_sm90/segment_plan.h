// Few heads, long sequences: a scan has two blocks for a head and takes as long as its chunks take one after the other,
// while most of the device is idle. A long sequence is therefore cut into segments of n chunks, all of whose scans run at
// once. A segment is an affine map of the state,
//
//     S_out = M S_in + h,      M [K, K],  h [K, V]
//
// and a scan makes both: h from the state 0, and M from the identity as K more value columns whose values are 0. Three
// launches instead of one:
//
//     maps       h and M of all segments, in blocks of 128 columns without outputs         scan.cuh, scan_per_channel.cuh
//     compose    S_{j+1} = M_j S_j + h_j in fp32, from the initial state on                compose.cu
//     outputs    the scan as ever, of segments instead of sequences, each from its S_j
//
// The gradient of the state goes the same way back, G_in = M^T G_out + e:
//
//     tails      the scan back over what is behind the segments          scan_back.cuh, scan_back_per_channel.cuh
//     maps       beside it, e from the gradient 0, M^T from the identity
//     compose    G_j = M_j^T G_{j+1} + e_j, from what the tail leaves or the final state's, down to the initial state's
//     segments   the scan back as ever, each from its G_{j+1}
//
// With P = multiprocessors / (2 heads) segments at once, t_m and t_o for a chunk of the scans of maps and outputs, and t_c
// for a step of the composition, a sequence of N chunks takes about
//
//     N / P (t_m + t_o) + N / n t_c       if there are P segments or more        N t_o without segments
//
// On an H200 t_o = 1.2 us, from times of whole calls; t_m = 1.4 and t_c = 1.4 are estimates. A sequence of 8192 tokens takes
// 0.112 ms instead of 0.174 with 8 heads of GDN, and 0.17 instead of 0.23 with 12 of KDA. P = 5 gives 0.43 + 0.07 of the
// time without; P = 4, with 16 heads on 132 multiprocessors, 0.54 + 0.07, which two such sequences at once already lose. So
// a head count is cut from P = 5 on, in both directions.
//
// n = 16 is where a sequence of 8192 tokens and 8 heads has one wave of blocks; fewer chunks make the composition longer than
// the scans. With P below 8 it would have two waves, the second half empty, and n = 26 gives it one: four segments, and what is
// left of it beside them. 12 heads of KDA, forward, in ms:
//
//     tokens   4096    6144    8192    12288   16384   32768
//     n = 16   0.115   0.153   0.196   0.290   0.333   0.606
//     n = 26   0.114   0.156   0.173   0.271   0.326   0.570
//
// The bits of a sequence must not depend on the batch, so a batch that would fill the device by itself is cut as well, and
// its scans take up to (t_m + t_o) / t_o as long: 16 sequences of 8192 tokens and 8 heads take 1.11 ms instead of 0.52. Short
// sequences are spared by a rule on their own length: segments come in fours, and what is left of a sequence, or all of one
// shorter than that, is its tail, which is not cut. Cuts between calls at multiples of four segments therefore show in no
// bit: both calls have the segments that the whole has.
//
// Maps are 128 x 128: K padded to 128, and V up to 128, are cut (segments.h).
#pragma once

#include <cstdint>

#include "cuda/common/sequences.h"

namespace fastweight::cuda::chunk_sm90 {

inline constexpr int kSegmentGroup = 4;                             // segments that a sequence has, or multiples
inline constexpr int kSegmentChunks = 16, kLongSegmentChunks = 26;  // n
inline constexpr int kLeastAtOnce = 5, kManyAtOnce = 8;             // P, for any segments and for the short ones

// The chunks of a segment; 0: no sequence is cut. Nothing but heads, device and the caller's wish decides.
constexpr int segment_chunks(int64_t value_heads, int multiprocessors, int wish) {
  if (wish != 0) return wish > 0 ? wish : 0;
  const int64_t blocks = 2 * value_heads;
  if (blocks * kManyAtOnce <= multiprocessors) return kSegmentChunks;
  return blocks * kLeastAtOnce <= multiprocessors ? kLongSegmentChunks : 0;
}

// How many segments a sequence has.
FW_HOST_DEVICE constexpr int64_t segments_of(int64_t length, int64_t segment_tokens) {
  return length / (kSegmentGroup * segment_tokens) * kSegmentGroup;
}

// Segments have numbers in their row: one that begins at token b, of `tokens` tokens, has number b / tokens. No two have
// the same, and the one before it in the sequence has the number before it.
struct SegmentRange {
  int64_t first, count;
};

// Those that a window may meet, and a few more. With offsets a chunk whose place in the row is p begins at token p C, or up
// to a chunk per sequence before it.
inline SegmentRange segments_in(const Sequences& sequences, int64_t chunk_size, int64_t n, const ChunkWindow& window) {
  const int64_t all = sequences.tokens / (n * chunk_size);
  const int64_t early = n + (sequences.offsets == nullptr ? 0 : sequences.count);
  const int64_t first = window.begin > early ? (window.begin - early) / n : 0;
  const int64_t end = (window.end + n - 1) / n < all ? (window.end + n - 1) / n : all;
  return {first, end > first ? end - first : 0};
}

// Segments, tails and sequences that are not cut, which a scan forward walks over: about as many with offsets, else all.
inline int64_t count_walks(const Sequences& sequences, int64_t segment_tokens) {
  if (segment_tokens == 0) return sequences.count;
  if (sequences.offsets != nullptr) {
    const int64_t segments = segments_of(sequences.tokens, segment_tokens);
    return segments > sequences.count ? segments : sequences.count;
  }
  const int64_t segments = segments_of(sequences.tokens, segment_tokens);
  return sequences.count * (segments + (segments * segment_tokens < sequences.tokens ? 1 : 0));
}

inline int64_t count_rows(const Sequences& sequences) { return sequences.offsets == nullptr ? sequences.count : 1; }

}  // namespace fastweight::cuda::chunk_sm90
