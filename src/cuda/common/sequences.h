// Sequences and their chunks from offsets in device memory. The host never reads the offsets: a call that is captured
// in a graph can be replayed with other lengths. Compiled by both compilers.
//
// Offsets that are out of order or out of range cannot be refused. They are clamped to the tokens that exist, so that
// such a call reads and writes nothing outside its tensors; what it computes is then of no use. Tokens after the last
// offset belong to no sequence: nothing reads them and their outputs keep what they held.
#pragma once

#include <cstdint>

#include "cuda/common/tensor.h"

namespace fastweight::cuda {

struct Sequences {
  const void* offsets = nullptr;  // [count + 1]; null: every batch row is a sequence of `tokens` tokens
  DType dtype = DType::kI32;
  int64_t stride = 1;
  int64_t count = 0;   // N
  int64_t tokens = 0;  // T
};

// Tokens [begin, begin + length) of batch row `batch`.
struct SequenceSpan {
  int64_t batch, begin, length;
};

FW_HOST_DEVICE inline int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

FW_HOST_DEVICE inline int64_t load_integer(const void* data, DType dtype, int64_t offset) {
  return dtype == DType::kI32 ? static_cast<const int32_t*>(data)[offset] : static_cast<const int64_t*>(data)[offset];
}

FW_HOST_DEVICE inline SequenceSpan sequence_at(const Sequences& sequences, int64_t n) {
  if (sequences.offsets == nullptr) return {n, 0, sequences.tokens};
  const int64_t first = load_integer(sequences.offsets, sequences.dtype, n * sequences.stride);
  const int64_t last = load_integer(sequences.offsets, sequences.dtype, (n + 1) * sequences.stride);
  const int64_t begin = clamped(first, 0, sequences.tokens);
  return {0, begin, clamped(last, begin, sequences.tokens) - begin};
}

// Index, here and below: a type that all numbers of tokens and chunks fit in. 32 bits divide with a fraction of the
// instructions and registers.
template <class Index = int64_t>
FW_HOST_DEVICE constexpr int64_t chunks_of(int64_t length, int64_t chunk_size) {
  return static_cast<Index>(length + chunk_size - 1) / static_cast<Index>(chunk_size);
}

// How many chunks there are at most, over all sequences: what a grid with one block per chunk is launched with.
FW_HOST_DEVICE inline int64_t max_chunks(const Sequences& sequences, int64_t chunk_size) {
  if (sequences.offsets == nullptr) return sequences.count * chunks_of(sequences.tokens, chunk_size);
  const int64_t bound = sequences.tokens / chunk_size + sequences.count;
  return bound < sequences.tokens ? bound : sequences.tokens;
}

// Which chunks of every batch row a launch works on, where scratch memory is not to grow with the length: those with
// the places [begin, end) in the row. With offsets there is one row, of all sequences.
struct ChunkWindow {
  int64_t begin = 0, end = 0;  // within the row
  int64_t row = 0;             // chunks of a row; with offsets a bound

  FW_HOST_DEVICE int64_t width() const { return end - begin; }
  FW_HOST_DEVICE bool is_all() const { return width() == row; }
  // Chunks are numbered row after row; the chunks of a window have slots in the same order.
  FW_HOST_DEVICE int64_t slot_of(int64_t chunk) const {
    if (is_all()) return chunk;
    const int64_t above = chunk / row;
    return above * width() + chunk - above * row - begin;
  }
  template <class Index = int64_t>
  FW_HOST_DEVICE int64_t chunk_in(int64_t slot) const {
    if (is_all()) return slot;
    const int64_t above = static_cast<Index>(slot) / static_cast<Index>(width());
    return above * row + slot - above * width() + begin;
  }
};

// Sequences with the number of chunks before each. `first_chunk` is [count + 1] in device memory, filled by
// build_first_chunks; null for a fixed length, which needs none.
struct ChunkedSequences {
  Sequences sequences;
  const int64_t* first_chunk = nullptr;
  int64_t chunk_size = 64;
};

inline ChunkWindow whole_window(const ChunkedSequences& chunked) {
  const Sequences& sequences = chunked.sequences;
  const int64_t row = sequences.offsets == nullptr ? chunks_of(sequences.tokens, chunked.chunk_size)
                                                   : max_chunks(sequences, chunked.chunk_size);
  return {0, row, row};
}

// Where chunk-start states of sequence n begin along the chunk axis of its batch row.
FW_HOST_DEVICE inline int64_t first_chunk_of(const ChunkedSequences& chunked, int64_t n) {
  return chunked.first_chunk == nullptr ? 0 : chunked.first_chunk[n];
}

// Chunk `chunk` in the order of the sequences: its tokens, and its position within its sequence. Past the last chunk
// the sequence is -1.
struct ChunkSpan {
  int64_t sequence = -1;
  int64_t batch = 0, begin = 0, length = 0;
  int64_t position = 0;
};

template <class Index = int64_t>
FW_HOST_DEVICE inline ChunkSpan chunk_at(const ChunkedSequences& chunked, int64_t chunk) {
  const Sequences& sequences = chunked.sequences;
  const int64_t C = chunked.chunk_size;
  ChunkSpan span;
  if (sequences.offsets == nullptr) {
    const int64_t each = chunks_of<Index>(sequences.tokens, C);
    if (chunk >= sequences.count * each) return span;
    span.sequence = static_cast<Index>(chunk) / static_cast<Index>(each);
    span.position = chunk - span.sequence * each;
  } else {
    if (chunk >= chunked.first_chunk[sequences.count]) return span;
    // The last sequence that begins at or before this chunk; the empty ones before it begin there too.
    int64_t low = 0, high = sequences.count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (chunked.first_chunk[middle] <= chunk) {
        low = middle;
      } else {
        high = middle;
      }
    }
    span.sequence = low;
    span.position = chunk - chunked.first_chunk[low];
  }
  const SequenceSpan whole = sequence_at(sequences, span.sequence);
  const int64_t first = span.position * C;
  span.batch = whole.batch;
  span.begin = whole.begin + first;
  span.length = whole.length - first < C ? whole.length - first : C;
  return span;
}

// Where `offsets` are the caller's cu_seqlens, absent for a fixed length.
inline Sequences device_sequences(const TensorView& offsets, int64_t count, int64_t tokens) {
  Sequences sequences;
  sequences.count = count;
  sequences.tokens = tokens;
  if (!offsets.present()) return sequences;
  sequences.offsets = offsets.data;
  sequences.dtype = offsets.dtype;
  sequences.stride = offsets.strides[0];
  return sequences;
}

}  // namespace fastweight::cuda
