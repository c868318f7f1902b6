// The shared memory of the scan over chunks, and the copies that fill it.
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_16bit/window.cuh"

namespace fastweight::cuda::chunk_16bit {

// A block has kPairs warps that advance the state and as many that compute o; each has kTiles tiles of 16 columns.
template <int kTiles, int kPairs>
inline constexpr int kColumnsOfBlock = kPairs* kTiles* kTileColumns;

// One chunk's operands. Per channel, readers and writers are copies of their own, and the tokens' decays are inside
// them.
template <int kK, bool kPerChannel, int kColumns>
struct Stage {
  static constexpr int kPaddedColumns = (kColumns + 63) / 64 * 64;

  alignas(128) uint16_t key_rows[(kPerChannel ? kKeyCopies : 2) * kChunkRows * kK];
  alignas(128) uint16_t value_rows[kChunkRows * kPaddedColumns];
  alignas(128) uint16_t J[kChunkRows * kChunkRows];
  alignas(128) uint16_t sP[kChunkRows * kChunkRows];
  alignas(16) float token[kTokenFactors<kPerChannel> * kChunkRows];
  alignas(16) float total[kPerChannel ? kK : 4];

  __device__ SharedTile<kK> reader() { return {key_rows + kReader * kChunkRows * kK}; }
  __device__ SharedTile<kK> queries() { return {key_rows + kQuery * kChunkRows * kK}; }
  __device__ SharedTile<kK> writer() { return {key_rows + (kPerChannel ? kWriter : kReader) * kChunkRows * kK}; }
  // v, and when all of it has been read, o.
  __device__ SharedTile<kPaddedColumns> values() { return {value_rows}; }
};

// What the two kinds of warps hand each other: S^T of the chunk's start and R^T, rounded to operands. A row per column.
template <int kK, int kColumns>
struct WarpExchange {
  BlockWork work;
  alignas(128) uint16_t state[kColumns * kK];
  alignas(128) uint16_t written[kColumns * kChunkRows];

  __device__ SharedTile<kK> S() { return {state}; }
  __device__ SharedTile<kChunkRows> R() { return {written}; }
};

template <int kK, bool kPerChannel, int kColumns>
constexpr size_t scan_bytes(int stages) {
  return sizeof(WarpExchange<kK, kColumns>) + static_cast<size_t>(stages) * sizeof(Stage<kK, kPerChannel, kColumns>);
}

// The same of the scan back: G^T of the chunk's end, Y^T, and dv on its way to memory.
template <int kK, int kColumns>
struct BackExchange {
  static constexpr int kPaddedColumns = (kColumns + 63) / 64 * 64;

  BlockWork work;
  alignas(128) uint16_t G_rows[kColumns * kK];
  alignas(128) uint16_t Y_rows[kColumns * kChunkRows];
  alignas(128) uint16_t dv_rows[kChunkRows * kPaddedColumns];

  __device__ SharedTile<kK> G() { return {G_rows}; }
  __device__ SharedTile<kChunkRows> Y() { return {Y_rows}; }
  __device__ SharedTile<kPaddedColumns> dv() { return {dv_rows}; }
};

template <int kK, bool kPerChannel, int kColumns>
constexpr size_t scan_back_bytes(int stages) {
  return sizeof(BackExchange<kK, kColumns>) + static_cast<size_t>(stages) * sizeof(Stage<kK, kPerChannel, kColumns>);
}

// The operands of the chunks of a walk on their way to shared memory, from the first to the last or, kBack, from the
// last to the first, by thread `thread` of kThreads. `values` has the rows that go with the keys: v, or d_o in a
// backward, zeros where it is absent.
template <int kK, bool kPerChannel, int kColumns, int kThreads, bool kBack = false>
class ChunkLoader {
 public:
  __device__ ChunkLoader(const ChunkArgs& args, const DeviceTensor& values, bool vector_values, const ScanPart& part,
                         const Walk& walk, int thread)
      : args_(args),
        values_(values),
        vector_values_(vector_values),
        first_(part.column),
        thread_(thread),
        position_(kBack ? walk.chunks - 1 : 0),
        length_(walk.span.length) {
    const DeltaRuleDeviceProblem& p = args.problem;
    const SequenceSpan& span = walk.span;
    const int64_t C = args.chunked.chunk_size, token = span.begin + position_ * C;
    const int64_t chunk = walk.first_chunk + position_, item = args.factors_at(chunk) + part.head;
    const int64_t copies = kPerChannel ? args.copies_at(chunk) + part.head : item;
    if constexpr (kPerChannel) {
      k_ = args.factors.keys + copies * kKeyCopies * kChunkRows * kK;
    } else {
      k_ = row(p.k, span.batch, token, part.key_head);
      q_ = row(p.q, span.batch, token, part.key_head);
    }
    values_at_ = row(values, span.batch, token, part.head);
    token_ = args.factors.token + item * kTokenFactors<kPerChannel> * kChunkRows;
    lower_ = args.factors.J(item);
    total_ = args.factors.total + copies * kTotalWidth;
  }

  // Starts the copies of the next chunk; the caller commits them.
  __device__ __forceinline__ void next(Stage<kK, kPerChannel, kColumns>& stage) {
    const DeltaRuleDeviceProblem& p = args_.problem;
    const int64_t C = args_.chunked.chunk_size;
    const int64_t tokens = kBack ? -C : C, items = kBack ? -p.num_value_heads : p.num_value_heads;
    const int rows = static_cast<int>(min(length_ - position_ * C, C));
    if constexpr (kPerChannel) {
      copy_tile<kThreads>(stage.reader(), k_ + kReader * kChunkRows * kK, thread_);
      copy_tile<kThreads>(stage.queries(), k_ + kQuery * kChunkRows * kK, thread_);
      copy_tile<kThreads>(stage.writer(), k_ + kWriter * kChunkRows * kK, thread_);
      k_ += items * kKeyCopies * kChunkRows * kK;
    } else {
      load_rows<kChunkRows, kThreads>(stage.reader(), p.k, k_, rows, 0, p.head_dim_k, args_.vector_keys, thread_);
      load_rows<kChunkRows, kThreads>(stage.queries(), p.q, q_, rows, 0, p.head_dim_k, args_.vector_keys, thread_);
      k_ += tokens * p.k.strides[1];
      q_ += tokens * p.q.strides[1];
    }
    load_rows<kChunkRows, kThreads>(stage.values(), values_, values_at_, values_.present() ? rows : 0, first_,
                                    min(p.head_dim_v, first_ + kColumns), vector_values_, thread_);
    copy_floats(stage.token, token_, kTokenFactors<kPerChannel> * kChunkRows, thread_, kThreads);
    copy_lower<kThreads>({stage.J}, lower_ + kLowerJ * kLowerElements, thread_);
    copy_lower<kThreads>({stage.sP}, lower_ + kLowerP * kLowerElements, thread_);
    copy_floats(stage.total, total_, kTotalWidth, thread_, kThreads);
    values_at_ += tokens * values_.strides[1];
    token_ += items * kTokenFactors<kPerChannel> * kChunkRows;
    lower_ += items * kLowerMatrices * kLowerElements;
    total_ += items * kTotalWidth;
    position_ += kBack ? -1 : 1;
  }

 private:
  static constexpr int kTotalWidth = kPerChannel ? kK : 4;

  __device__ static const uint16_t* row(const DeviceTensor& x, int64_t batch, int64_t token, int head) {
    return static_cast<const uint16_t*>(x.data) + row_offset(x, batch, token, head);
  }

  const ChunkArgs& args_;
  const DeviceTensor& values_;
  const bool vector_values_;
  const int first_, thread_;
  int position_;  // of the next chunk in the walk
  const int64_t length_;
  const uint16_t *k_, *q_, *values_at_, *lower_;
  const float *token_, *total_;
};

}  // namespace fastweight::cuda::chunk_16bit
