// Forward in the chunk form: the scan over the chunks of a sequence. See ../chunk.cuh for the equations.
//
// A block has one (sequence, value head) and a range of value columns. Everything on the value side is transposed, so
// that the state, S^T [columns x K], stays in registers as fp32 accumulators of the products that advance it. Half of
// the warps advance the state, the other half computes o, each pair for the same columns:
//
//     state warps    X = S^T k^T    D^T = v^T - e X    R^T = bD^T J^T    S^T = e_n S^T + w R^T k
//     output warps   O = S^T q^T    O = scale e O                        O = O + R^T sP^T
//
// S and R pass through shared memory as operands. The right operands are shared by all warps; the output warps, which
// have less to do, copy those of the next chunk meanwhile. The state warps are the chain from chunk to chunk: they wait
// for the others only where these have long been ready.
//
// A column's sums do not depend on other columns: how many of them a warp has, and a block, changes no bit.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/warp_roles.cuh"
#include "cuda/delta_rule/chunk_16bit/scan_products.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// X becomes R^T, which is handed over.
template <DType kType, int kTiles, int kK, bool kPerChannel, int kColumns>
__device__ __forceinline__ void finish_writes(Stage<kK, kPerChannel, kColumns>& stage, const SharedTile<kChunkRows>& R,
                                              int row, int lane, Sums<kTiles>& X) {
  // bD = beta (v - e X); per channel the reader has the factor e.
  uint32_t bD[kChunkRows / 16][kTiles][4];
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
    uint32_t v[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) stage.values().load_c_transposed(16 * m, row / 16 + i, lane, v[i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * m + h;
      const float2 on_x = kPerChannel ? make_float2(1.0f, 1.0f) : token_pair(stage.token, kOnKeyRead, n, lane);
      const float2 beta = token_pair(stage.token, kBetaFactor<kPerChannel>, n, lane);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float2 low = unpack<kType>(v[i][2 * h]), high = unpack<kType>(v[i][2 * h + 1]);
        X[i][n][0] = beta.x * fmaf(-on_x.x, X[i][n][0], low.x);
        X[i][n][1] = beta.y * fmaf(-on_x.y, X[i][n][1], low.y);
        X[i][n][2] = beta.x * fmaf(-on_x.x, X[i][n][2], high.x);
        X[i][n][3] = beta.y * fmaf(-on_x.y, X[i][n][3], high.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) pack_a<kType>(X[i][2 * m], X[i][2 * m + 1], bD[m][i]);
  }
  clear<kTiles>(X);
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) multiply_lower<kType, kTiles>(bD[m], {stage.J}, m, lane, X);
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t a[4];
      pack_a<kType>(X[i][2 * m], X[i][2 * m + 1], a);
      R.store_a(row + 16 * i, m, lane, a);
    }
  }
}

// S^T = e_n S^T + (w R)^T k; per channel the writer has the factor w. Scales R.
template <DType kType, int kTiles, int kK, bool kPerChannel, int kColumns>
__device__ __forceinline__ void advance_state(Stage<kK, kPerChannel, kColumns>& stage, int lane, Sums<kTiles>& R,
                                              float (&S)[kTiles][kK / 8][4]) {
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    const float2 total = kPerChannel ? *reinterpret_cast<const float2*>(stage.total + 8 * n + 2 * (lane % 4))
                                     : make_float2(stage.total[0], stage.total[0]);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      S[i][n][0] *= total.x;
      S[i][n][1] *= total.y;
      S[i][n][2] *= total.x;
      S[i][n][3] *= total.y;
    }
  }
  const SharedTile<kK> writer = stage.writer();
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
    if constexpr (!kPerChannel) {
      scale_tokens<kTiles>(stage.token, kOnWrite, 2 * m, lane, R);
      scale_tokens<kTiles>(stage.token, kOnWrite, 2 * m + 1, lane, R);
    }
    uint32_t a[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) pack_a<kType>(R[i][2 * m], R[i][2 * m + 1], a[i]);
#pragma unroll
    for (int n = 0; n < kK / 16; ++n) {
      uint32_t b[4];
      writer.load_b_transposed(16 * m, n, lane, b);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        mma<kType>(S[i][2 * n], a[i], b[0], b[1]);
        mma<kType>(S[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// O += R^T sP^T
template <DType kType, int kTiles>
__device__ __forceinline__ void add_writes(const SharedTile<kChunkRows>& R, int row, const SharedTile<kChunkRows>& sP,
                                           int lane, Sums<kTiles>& O) {
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) R.load_a(row + 16 * i, m, lane, a[i]);
    multiply_lower<kType, kTiles>(a, sP, m, lane, O);
  }
}

// What the two kinds of warps of a block tell each other. All of them take part in every signal (warp_roles.cuh); the
// output warps produce the stages, the state warps consume them, and the output warps read them too.
//
//     stage filled     the output warps have copied the chunk's operands, and need S and R of the chunk before no more
//     state ready      the state warps have written S of the chunk
//     writes ready     the state warps have written R of the chunk, and need v no more
//     stage released   the state warps need the chunk's operands no more; not after the last chunk
//
// The output warps wait for both of the state warps' signals of a chunk before they commit the next stage: neither kind
// can be ahead by a turn, but in the releases.
enum { kStageFilled = 1, kStateReady, kWritesReady, kStageReleased };

template <DType kType, int kK, bool kPerChannel, int kTiles, int kPairs>
struct Scan {
  static constexpr int kColumns = kColumnsOfBlock<kTiles, kPairs>;
  static constexpr int kThreads = 2 * kPairs * kWarpSize;
  using Stages = Stage<kK, kPerChannel, kColumns>*;

  const ChunkArgs& args;
  const ScanPart& part;
  const Walk& walk;
  WarpExchange<kK, kColumns>& exchange;
  Stages stage;
  bool two_stages;
  int row, lane;  // the warp's first column in the block
  StagePipeline<kStageFilled, kStageReleased> stages{kThreads};
  WarpSignal<kStateReady> state_ready{kThreads};
  WarpSignal<kWritesReady> writes_ready{kThreads};

  __device__ __forceinline__ Stage<kK, kPerChannel, kColumns>& stage_of(int c) const {
    return stage[two_stages ? c % 2 : 0];
  }

  __device__ __forceinline__ void load_states(int K, int V, float (&S)[kTiles][kK / 8][4]) const {
    const StateAddress place = edge_state(args.initial_state, args.carried.taken, walk.opens, part, walk);
    if (!place.exists) return;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      load_state<kK>(place.states, place.offset, part.column + row + 16 * i, K, V, lane, S[i]);
    }
  }

  // The state before chunk c of the walk, or after the last one.
  __device__ __forceinline__ void save_states(int c, bool last, int K, int V, float (&S)[kTiles][kK / 8][4]) const {
    const StateAddress place = last ? edge_state(args.final_state, args.carried.given, walk.closes, part, walk)
                                    : chunk_state_address(args, part, walk.span.batch, walk.position + c);
    const int there = opaque_below<kWarpSize>(lane);
    if (place.exists) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        store_state<kK>(place.states, place.offset, part.column + row + 16 * i, K, V, there, S[i]);
      }
    }
  }

  // The state before chunk c as it was handed over.
  __device__ __forceinline__ void save_state_rows(int c) const {
    const StateAddress place = chunk_state_address(args, part, walk.span.batch, walk.position + c);
    if (!place.exists) return;
    const int column = part.column + row;
    store_handed<16 * kTiles>(exchange.S(), row, args.problem.head_dim_v - column, args.state_width, lane,
                              static_cast<uint16_t*>(place.states.data) + place.offset + column * place.states.v_stride,
                              place.states.v_stride);
  }

  // The state is saved in one place of the code, which its compile time asks for.
  __device__ __forceinline__ void advance_states() const {
    const int K = args.problem.head_dim_k, V = args.problem.head_dim_v;
    float S[kTiles][kK / 8][4] = {};
    load_states(K, V, S);
    for (int c = 0;; ++c) {
      // Where registers are short, no address is kept from chunk to chunk; elsewhere that costs time.
      const int here = kPerChannel || kK > 128 ? opaque_below<kWarpSize>(lane) : lane;
      const bool last = c == walk.chunks;
      if (last || (args.chunk_states.present() && args.state_width == 0)) save_states(c, last, K, V, S);
      if (last) return;
      stages.consumer_wait();
      Stage<kK, kPerChannel, kColumns>& current = stage_of(c);
      Sums<kTiles> X;
      clear<kTiles>(X);
      read_state<kType, kK, kTiles>(S, exchange.S(), row, current.reader(), here, X);
      state_ready.arrive();
      finish_writes<kType, kTiles>(current, exchange.R(), row, here, X);
      writes_ready.arrive();
      advance_state<kType, kTiles>(current, here, X, S);
      if (c + 1 < walk.chunks) stages.consumer_release(c);
    }
  }

  __device__ __forceinline__ void compute_outputs(int thread) const {
    if (walk.chunks == 0) return;
    const int64_t C = args.chunked.chunk_size;
    ChunkLoader<kK, kPerChannel, kColumns, kThreads / 2> loader(args, args.problem.v, args.vector_values, part, walk,
                                                                thread);
    int64_t o = row_offset(args.o, walk.span.batch, walk.span.begin, part.head);
    loader.next(stage[0]);
    commit_copies();
    wait_copies<0>();
    if (two_stages) stages.producer_commit();
    for (int c = 0; c < walk.chunks; ++c, o += C * args.o.strides[1]) {
      Stage<kK, kPerChannel, kColumns>& current = stage_of(c);
      const bool more = c + 1 < walk.chunks;
      if (c > 0) stages.producer_acquire(c - 1);
      if (two_stages) {
        if (more) loader.next(stage_of(c + 1));
        commit_copies();
      } else {
        if (c > 0) loader.next(current);
        commit_copies();
        wait_copies<0>();
        stages.producer_commit_and_wait();
      }
      state_ready.wait();
      Sums<kTiles> O;
      if (args.o.present()) {
        clear<kTiles>(O);
        read_state<kType, kK, kTiles>(exchange.S(), row, current.queries(), lane, O);
        if constexpr (!kPerChannel) {
#pragma unroll
          for (int n = 0; n < kTokenTiles; ++n) scale_tokens<kTiles>(current.token, kOnQueryRead, n, lane, O);
        }
      }
      if (args.state_width > 0) save_state_rows(c);  // while the state warps compute R
      writes_ready.wait();
      if (args.o.present()) add_writes<kType, kTiles>(exchange.R(), row, {current.sP}, lane, O);
      if (two_stages && more) {
        wait_copies<0>();
        stages.producer_commit();
      }
      if (args.o.present()) {
        store_values<kType, kTiles>(args.o, args.vector_outputs, args.problem.head_dim_v, current.values(), row, lane,
                                    o, static_cast<int>(min(walk.span.length - c * C, C)), part.column, O);
      }
    }
  }
};

// A block per part; a smaller grid goes round.
template <DType kType, int kK, bool kPerChannel, int kTiles, int kPairs>
__global__ void __launch_bounds__(2 * kPairs * kWarpSize, 1)
    scan_kernel(const __grid_constant__ ChunkArgs args, bool two_stages, int64_t parts) {
  using Part = Scan<kType, kK, kPerChannel, kTiles, kPairs>;
  wait_for_previous_kernels();
  auto& exchange = dynamic_shared<WarpExchange<kK, Part::kColumns>>();
  auto* stage = reinterpret_cast<typename Part::Stages>(&exchange + 1);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const DeltaRuleDeviceProblem& p = args.problem;
  for (int64_t at = blockIdx.x; at < parts; at += gridDim.x) {
    const ScanPart part = scan_part_at(p, args.chunked, at, Part::kColumns);
    const Walk walk = walk_of(args, part);
    if (!walk.exists) continue;
    const int row = warp % kPairs * 16 * kTiles;
    const Part scan{args, part, walk, exchange, stage, two_stages, row, lane};
    if (warp < kPairs) {
      scan.advance_states();
    } else {
      scan.compute_outputs(static_cast<int>(threadIdx.x) - kPairs * kWarpSize);
    }
    __syncthreads();  // before the next part's first copies
  }
}

template <DType kType, int kK, bool kPerChannel, int kTiles, int kPairs>
void launch_scan(const ChunkArgs& args, const ScanConfig& config, const Context& context) {
  constexpr int kColumns = kColumnsOfBlock<kTiles, kPairs>;
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t parts = p.sequences.count * p.num_value_heads * ((p.head_dim_v + kColumns - 1) / kColumns);
  launch<scan_kernel<kType, kK, kPerChannel, kTiles, kPairs>>(
      "delta_rule chunk_16bit scan", context,
      {static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)), 2 * kPairs * kWarpSize,
       scan_bytes<kK, kPerChannel, kColumns>(config.stages), true},
      args, config.stages == 2, parts);
}

}  // namespace

template <DType kType>
void launch_scan(const ChunkArgs& args, const ScanConfig& config, const Context& context) {
  with_scan_instance(config, [&]<int kK, bool kPerChannel, int kTiles, int kPairs>() {
    launch_scan<kType, kK, kPerChannel, kTiles, kPairs>(args, config, context);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
