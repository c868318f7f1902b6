// The shared memory of the scan over chunks, and the copies that fill it.
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/scan_part.cuh"

namespace fastweight::cuda {

// A block has kPairs warps that advance the state and as many that compute o; each has kTiles tiles of 16 columns.
template <int kTiles, int kPairs>
inline constexpr int kColumnsOfBlock = kPairs* kTiles* kTileColumns;

// One chunk's operands. Per channel, reads and writes have keys of their own, and the tokens' factors are inside them.
template <int kK, bool kPerChannel, int kColumns>
struct Stage {
  static constexpr int kPaddedColumns = (kColumns + 63) / 64 * 64;

  alignas(128) uint16_t key_rows[(kPerChannel ? 3 : 2) * kChunkRows * kK];
  alignas(128) uint16_t value_rows[kChunkRows * kPaddedColumns];
  alignas(128) uint16_t T[kChunkRows * kChunkRows];
  alignas(128) uint16_t P[kChunkRows * kChunkRows];
  alignas(16) float token[kPerChannel ? 4 : kTokenFactors * kChunkRows];
  alignas(16) float total[kPerChannel ? kK : 4];

  __device__ SharedTile<kK> read_keys() { return {key_rows}; }
  __device__ SharedTile<kK> queries() { return {key_rows + kChunkRows * kK}; }
  __device__ SharedTile<kK> write_keys() { return {kPerChannel ? key_rows + 2 * kChunkRows * kK : key_rows}; }
  // v, and when all of it has been read, o.
  __device__ SharedTile<kPaddedColumns> values() { return {value_rows}; }
};

// What the two kinds of warps hand each other: S^T of the chunk's start and N^T, rounded to operands. A row per column.
template <int kK, int kColumns>
struct WarpExchange {
  alignas(128) uint16_t state[kColumns * kK];
  alignas(128) uint16_t written[kColumns * kChunkRows];

  __device__ SharedTile<kK> S() { return {state}; }
  __device__ SharedTile<kChunkRows> N() { return {written}; }
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
      k_ = args.factors.keys + item * 3 * kChunkRows * kK;
    } else {
      k_ = row(p.k, span, part.key_head);
      q_ = row(p.q, span, part.key_head);
      token_ = args.factors.token + item * kTokenFactors * kChunkRows;
    }
    v_ = row(p.v, span, part.head);
    T_ = args.factors.T + item * kChunkRows * kChunkRows;
    P_ = args.factors.P + item * kChunkRows * kChunkRows;
    total_ = args.factors.total + item * kTotalWidth;
  }

  // Starts the copies of the next chunk; the caller commits them.
  __device__ __forceinline__ void next(Stage<kK, kPerChannel, kColumns>& stage) {
    const DeltaRuleDeviceProblem& p = args_.problem;
    const int64_t C = args_.chunked.chunk_size, heads = p.num_value_heads;
    const int rows = static_cast<int>(min(left_, C));
    if constexpr (kPerChannel) {
      copy_tile<kThreads>(stage.read_keys(), k_, thread_);
      copy_tile<kThreads>(stage.queries(), k_ + kChunkRows * kK, thread_);
      copy_tile<kThreads>(stage.write_keys(), k_ + 2 * kChunkRows * kK, thread_);
      k_ += heads * 3 * kChunkRows * kK;
    } else {
      load_rows<kChunkRows, kThreads>(stage.read_keys(), p.k, k_, rows, 0, p.head_dim_k, args_.vector_keys, thread_);
      load_rows<kChunkRows, kThreads>(stage.queries(), p.q, q_, rows, 0, p.head_dim_k, args_.vector_keys, thread_);
      copy_floats(stage.token, token_, kTokenFactors * kChunkRows, thread_, kThreads);
      k_ += C * p.k.strides[1];
      q_ += C * p.q.strides[1];
      token_ += heads * kTokenFactors * kChunkRows;
    }
    load_rows<kChunkRows, kThreads>(stage.values(), p.v, v_, rows, first_, min(p.head_dim_v, first_ + kColumns),
                                    args_.vector_values, thread_);
    copy_lower<kThreads>({stage.T}, T_, thread_);
    copy_lower<kThreads>({stage.P}, P_, thread_);
    copy_floats(stage.total, total_, kTotalWidth, thread_, kThreads);
    v_ += C * p.v.strides[1];
    T_ += heads * kChunkRows * kChunkRows;
    P_ += heads * kChunkRows * kChunkRows;
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
  const uint16_t *k_, *q_, *v_, *T_, *P_;
  const float *token_, *total_;
};

}  // namespace fastweight::cuda
