// The shared memory of the scan over chunks, and the copies that fill it.
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/scan_part.cuh"

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
  alignas(128) uint16_t state[kColumns * kK];
  alignas(128) uint16_t written[kColumns * kChunkRows];

  __device__ SharedTile<kK> S() { return {state}; }
  __device__ SharedTile<kChunkRows> R() { return {written}; }
};

template <int kK, bool kPerChannel, int kColumns>
constexpr size_t scan_bytes(int stages) {
  return sizeof(WarpExchange<kK, kColumns>) + static_cast<size_t>(stages) * sizeof(Stage<kK, kPerChannel, kColumns>);
}

// The operands of the chunks of a sequence on their way to shared memory, in order, by thread `thread` of kThreads.
template <int kK, bool kPerChannel, int kColumns, int kThreads>
class ChunkLoader {
 public:
  __device__ ChunkLoader(const ChunkArgs& args, const ScanPart& part, const SequenceSpan& span, int thread)
      : args_(args), first_(part.column), thread_(thread), left_(span.length) {
    const DeltaRuleDeviceProblem& p = args.problem;
    const int64_t item = part.first_chunk * p.num_value_heads + part.head;
    if constexpr (kPerChannel) {
      k_ = args.factors.keys + item * kKeyCopies * kChunkRows * kK;
    } else {
      k_ = row(p.k, span, part.key_head);
      q_ = row(p.q, span, part.key_head);
      token_ = args.factors.token + item * kTokenFactors * kChunkRows;
    }
    v_ = row(p.v, span, part.head);
    J_ = args.factors.J + item * kChunkRows * kChunkRows;
    sP_ = args.factors.sP + item * kChunkRows * kChunkRows;
    total_ = args.factors.total + item * kTotalWidth;
  }

  // Starts the copies of the next chunk; the caller commits them.
  __device__ __forceinline__ void next(Stage<kK, kPerChannel, kColumns>& stage) {
    const DeltaRuleDeviceProblem& p = args_.problem;
    const int64_t C = args_.chunked.chunk_size, heads = p.num_value_heads;
    const int rows = static_cast<int>(min(left_, C));
    if constexpr (kPerChannel) {
      copy_tile<kThreads>(stage.reader(), k_ + kReader * kChunkRows * kK, thread_);
      copy_tile<kThreads>(stage.queries(), k_ + kQuery * kChunkRows * kK, thread_);
      copy_tile<kThreads>(stage.writer(), k_ + kWriter * kChunkRows * kK, thread_);
      k_ += heads * kKeyCopies * kChunkRows * kK;
    } else {
      load_rows<kChunkRows, kThreads>(stage.reader(), p.k, k_, rows, 0, p.head_dim_k, args_.vector_keys, thread_);
      load_rows<kChunkRows, kThreads>(stage.queries(), p.q, q_, rows, 0, p.head_dim_k, args_.vector_keys, thread_);
      copy_floats(stage.token, token_, kTokenFactors * kChunkRows, thread_, kThreads);
      k_ += C * p.k.strides[1];
      q_ += C * p.q.strides[1];
      token_ += heads * kTokenFactors * kChunkRows;
    }
    load_rows<kChunkRows, kThreads>(stage.values(), p.v, v_, rows, first_, min(p.head_dim_v, first_ + kColumns),
                                    args_.vector_values, thread_);
    copy_lower<kThreads>({stage.J}, J_, thread_);
    copy_lower<kThreads>({stage.sP}, sP_, thread_);
    copy_floats(stage.total, total_, kTotalWidth, thread_, kThreads);
    v_ += C * p.v.strides[1];
    J_ += heads * kChunkRows * kChunkRows;
    sP_ += heads * kChunkRows * kChunkRows;
    total_ += heads * kTotalWidth;
    left_ -= C;
  }

 private:
  static constexpr int kTotalWidth = kPerChannel ? kK : 4;

  __device__ static const uint16_t* row(const DeviceTensor& x, const SequenceSpan& span, int head) {
    return static_cast<const uint16_t*>(x.data) + row_offset(x, span.batch, span.begin, head);
  }

  const ChunkArgs& args_;
  const int first_, thread_;
  int64_t left_;  // tokens
  const uint16_t *k_, *q_, *v_, *J_, *sP_;
  const float *token_, *total_;
};

}  // namespace fastweight::cuda::chunk_16bit
