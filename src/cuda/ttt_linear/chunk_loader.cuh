// The operands of the mini-batches of a sequence on their way to shared memory.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/tile_rows.cuh"
#include "cuda/ttt_linear/chunk.cuh"

namespace fastweight::cuda::ttt {
namespace {

// Brings one mini-batch after the other, by `threads` threads of which this is number `thread`; kThreads where that is
// known, or 0; without q where nobody reads it; every kEvery-th of them. Rows are copied in pieces of 16 bytes that never
// see a register where the layout allows it. Step sizes
// pass through registers: they are loaded a mini-batch before they are stored, out of the L2 cache that was asked for
// them earlier, and decoded only then.
template <int kD, int kC, int kThreads = 0, bool kQueries = true, int kEvery = 1>
class ChunkLoader {
 public:
  __device__ ChunkLoader(const ChunkArgs& args, const SequenceSpan& span, int head, int thread, int threads)
      : args_(args),
        thread_(thread),
        threads_(kThreads > 0 ? kThreads : threads),
        row_(thread / kSegments),
        segment_(thread % kSegments) {
#pragma unroll
    for (int i = kFirst; i < 3; ++i) {
      const DeviceTensor& x = tensor(i);
      rows_[i] = static_cast<const uint16_t*>(x.data) + row_offset(x, span.batch, span.begin, head);
      if (args_.vectors) rows_[i] += row_ * x.strides[1] + 8 * segment_;
    }
    const DeviceTensor& eta = args.problem.eta;
    eta_ = element_at(eta.data, eta.dtype, row_offset(eta, span.batch, span.begin + thread, head));
    load_eta(span.length);
  }

  // Starts the copies of the next mini-batch, which begins `left` tokens before the end of the sequence; nothing where
  // that is behind the end. The caller commits them and waits.
  __device__ __forceinline__ void next(int64_t left, Stage<kD, kC>& stage) {
    if (left <= 0) return;
    const int rows = static_cast<int>(min(left, int64_t{kC})), D = args_.problem.head_dim;
    if (args_.vectors) {
      copy_rows(rows, stage);
    } else {
#pragma unroll
      for (int i = kFirst; i < 3; ++i) {
        const DeviceTensor& x = tensor(i);
        gather_tile<kC, kD>({stage.rows[i]}, x, rows_[i] - static_cast<const uint16_t*>(x.data), rows, 0, D, thread_,
                            threads_);
      }
    }
#pragma unroll
    for (int i = kFirst; i < 3; ++i) rows_[i] += kStep * tensor(i).strides[1];
    store_eta(stage.eta);
    eta_ += byte_offset(args_.problem.eta.dtype, kStep * args_.problem.eta.strides[1]);
    load_eta(left - kStep);
  }

 private:
  static constexpr int kFirst = kQueries ? 0 : 1;
  static constexpr int kSegments = SharedTile<kD>::kSegments;
  static constexpr int kEtas = kC / kWarpSize > 1 ? kC / kWarpSize : 1;  // of a thread, when there is one warp
  static constexpr int kStep = kEvery * kC;                              // tokens
  static constexpr int kPrefetchAhead = 3;                               // steps

  __device__ __forceinline__ const DeviceTensor& tensor(int i) const {
    return i == 0 ? args_.problem.q : i == 1 ? args_.problem.k : args_.problem.v;
  }

  __device__ __forceinline__ void copy_rows(int rows, Stage<kD, kC>& stage) const {
    const bool exists = 8 * segment_ < args_.problem.head_dim;
    const int step = threads_ / kSegments;
#pragma unroll
    for (int i = kFirst; i < 3; ++i) {
      const uint16_t* from = rows_[i];
      const SharedTile<kD> tile{stage.rows[i]};
      if constexpr (kThreads > 0) {
#pragma unroll
        for (int j = 0; j < kC; j += kThreads / kSegments, from += kThreads / kSegments * tensor(i).strides[1]) {
          copy_async(tile.address(row_ + j, segment_), from, exists && row_ + j < rows);
        }
      } else {
        for (int row = row_; row < kC; row += step, from += step * tensor(i).strides[1]) {
          copy_async(tile.address(row, segment_), from, exists && row < rows);
        }
      }
    }
  }

  __device__ __forceinline__ void load_eta(int64_t left) {
    const DeviceTensor& eta = args_.problem.eta;
#pragma unroll
    for (int i = 0; i < kEtas; ++i) {
      const int row = thread_ + i * threads_;
      eta_bits_[i] = 0;
      if (row >= kC || row >= left) continue;
      const char* address = eta_ + byte_offset(eta.dtype, i * threads_ * eta.strides[1]);
      eta_bits_[i] = load_bits(address, eta.dtype);
      if (row + kPrefetchAhead * kStep < left)
        prefetch(address + byte_offset(eta.dtype, kPrefetchAhead * kStep * eta.strides[1]));
    }
  }
  __device__ __forceinline__ void store_eta(float* eta) const {
#pragma unroll
    for (int i = 0; i < kEtas; ++i) {
      const int row = thread_ + i * threads_;
      if (row < kC) eta[row] = decode(eta_bits_[i], args_.problem.eta.dtype);
    }
  }

  const ChunkArgs& args_;
  int thread_, threads_;
  int row_, segment_;        // what the thread copies first of a mini-batch
  const uint16_t* rows_[3];  // there, of q, k and v
  const char* eta_;          // the thread's step size in it
  uint32_t eta_bits_[kEtas];
};

}  // namespace
}  // namespace fastweight::cuda::ttt
