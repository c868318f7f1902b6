// Backward in the chunk form: the scan from the last chunk of a sequence to the first. See gradient.cuh for the equations.
//
// A block has the columns of one value head of one sequence as in the forward scan (scan.cuh), and G^T [columns x K] in
// the registers of half of its warps:
//
//     state warps   X = G^T k^T    dR^T = w X + d_o^T sP    Y^T = dR^T J    G^T = e_n G^T + scale e d_o^T q - beta e Y^T k
//     copy warps    operands of the next chunk; G, Y and dv = beta Y to memory
//
// G and Y pass through shared memory as operands, the form in which the gradients of the chunk want them. Where this scan
// leaves multiprocessors idle, the gradients of a chunk begin there as soon as both are in memory.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/warp_roles.cuh"
#include "cuda/delta_rule/chunk_16bit/gradient.cuh"
#include "cuda/delta_rule/chunk_16bit/scan_products.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// sums += left right for the lower triangular right [64 x 64]: column block m of left meets column blocks up to m.
template <DType kType, int kTiles>
__device__ __forceinline__ void multiply_by_lower(const uint32_t (&left)[kTiles][4],
                                                  const SharedTile<kChunkRows>& right, int m, int lane,
                                                  Sums<kTiles>& sums) {
#pragma unroll
  for (int n = 0; n <= m; ++n) {
    uint32_t b[4];
    right.load_b_transposed(16 * m, n, lane, b);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mma<kType>(sums[i][2 * n], left[i], b[0], b[1]);
      mma<kType>(sums[i][2 * n + 1], left[i], b[2], b[3]);
    }
  }
}

// X = G^T k^T becomes Y^T, which is handed over.
template <DType kType, int kTiles, int kK, bool kPerChannel, int kColumns>
__device__ __forceinline__ void finish_Y(Stage<kK, kPerChannel, kColumns>& stage, BackExchange<kK, kColumns>& exchange,
                                         bool wants_dv, int row, int lane, Sums<kTiles>& X) {
  if constexpr (!kPerChannel) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) scale_tokens<kTiles>(stage.token, kOnWrite, n, lane, X);
  }
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
    uint32_t d_o[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) stage.values().load_c_transposed(16 * m, row / 16 + i, lane, d_o[i]);
    multiply_by_lower<kType, kTiles>(d_o, {stage.sP}, m, lane, X);
  }
  uint32_t dR[kChunkRows / 16][kTiles][4];
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      pack_a<kType>(X[i][2 * m], X[i][2 * m + 1], dR[m][i]);
      subtract_a<kType>(dR[m][i], X[i][2 * m], X[i][2 * m + 1]);  // the diagonal of J, 1, meets dR in fp32
    }
  }
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) multiply_by_lower<kType, kTiles>(dR[m], {stage.J}, m, lane, X);
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t a[4];
      pack_a<kType>(X[i][2 * m], X[i][2 * m + 1], a);
      exchange.Y().store_a(row + 16 * i, m, lane, a);
    }
  }
  if (!wants_dv) return;
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {  // dv = beta Y
    const float2 beta[2] = {token_pair(stage.token, kBetaFactor<kPerChannel>, 2 * m, lane),
                            token_pair(stage.token, kBetaFactor<kPerChannel>, 2 * m + 1, lane)};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t c[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* y = &X[i][2 * m + e / 2][e % 2 * 2];
        c[e] = pack<kType>(beta[e / 2].x * y[0], beta[e / 2].y * y[1]);
      }
      exchange.dv().store_c_transposed(16 * m, row / 16 + i, lane, c);
    }
  }
}

// G += left right for 16 tokens, rows [16 m, +16) of right.
template <DType kType, int kTiles, int kK>
__device__ __forceinline__ void add_product(const uint32_t (&left)[kTiles][4], const SharedTile<kK>& right, int m,
                                            int lane, float (&G)[kTiles][kK / 8][4]) {
#pragma unroll
  for (int n = 0; n < kK / 16; ++n) {
    uint32_t b[4];
    right.load_b_transposed(16 * m, n, lane, b);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mma<kType>(G[i][2 * n], left[i], b[0], b[1]);
      mma<kType>(G[i][2 * n + 1], left[i], b[2], b[3]);
    }
  }
}

// A pair of 16-bit numbers of two tokens times their factors.
template <DType kType>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float2 factor) {
  const float2 x = unpack<kType>(pair);
  return pack<kType>(factor.x * x.x, factor.y * x.y);
}

// G^T = e_n G^T + (scale e d_o)^T q - (beta e Y)^T k; per channel the keys have scale and e. Scales Y.
template <DType kType, int kTiles, int kK, bool kPerChannel, int kColumns>
__device__ __forceinline__ void retreat_state(Stage<kK, kPerChannel, kColumns>& stage, int row, int lane,
                                              Sums<kTiles>& Y, float (&G)[kTiles][kK / 8][4]) {
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    const float2 total = kPerChannel ? *reinterpret_cast<const float2*>(stage.total + 8 * n + 2 * (lane % 4))
                                     : make_float2(stage.total[0], stage.total[0]);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      G[i][n][0] *= total.x;
      G[i][n][1] *= total.y;
      G[i][n][2] *= total.x;
      G[i][n][3] *= total.y;
    }
  }
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      stage.values().load_c_transposed(16 * m, row / 16 + i, lane, a[i]);
      if constexpr (!kPerChannel) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          a[i][e] = scaled<kType>(a[i][e], token_pair(stage.token, kOnQueryRead, 2 * m + e / 2, lane));
        }
      }
    }
    add_product<kType, kTiles, kK>(a, stage.queries(), m, lane, G);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * m + h;
      const float2 beta = token_pair(stage.token, kBetaFactor<kPerChannel>, n, lane);
      const float2 e = kPerChannel ? make_float2(1.0f, 1.0f) : token_pair(stage.token, kOnKeyRead, n, lane);
      const float2 factor = make_float2(-beta.x * e.x, -beta.y * e.y);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        a[i][2 * h] = pack<kType>(factor.x * Y[i][n][0], factor.y * Y[i][n][1]);
        a[i][2 * h + 1] = pack<kType>(factor.x * Y[i][n][2], factor.y * Y[i][n][3]);
      }
    }
    add_product<kType, kTiles, kK>(a, stage.reader(), m, lane, G);
  }
}

// As in the forward scan, with G in place of S and Y in place of R:
//
//     stage filled     the copy warps have copied the chunk's operands, and need G and Y of the chunk before no more
//     state ready      the state warps have written G of the chunk
//     writes ready     the state warps have written Y of the chunk
//     stage released   the state warps need the chunk's operands no more; not after the last chunk of the walk
//     chunk stored     among the copy warps: G and Y of the chunk are on their way to memory
enum { kBackStageFilled = 1, kGReady, kYReady, kBackStageReleased, kChunkStored = kBackStageReleased + 2 };

template <DType kType, int kK, bool kPerChannel, int kTiles, int kPairs>
struct BackScan {
  static constexpr int kColumns = kColumnsOfBlock<kTiles, kPairs>;
  static constexpr int kThreads = 2 * kPairs * kWarpSize;
  using OneStage = Stage<kK, kPerChannel, kColumns>;

  const GradientArgs& args;
  const ScanPart& part;
  const Walk& walk;
  BackExchange<kK, kColumns>& exchange;
  OneStage* stage;
  bool two_stages;
  int row, lane;  // the warp's first column in the block
  StagePipeline<kBackStageFilled, kBackStageReleased> stages{kThreads};
  WarpSignal<kGReady> G_ready{kThreads};
  WarpSignal<kYReady> Y_ready{kThreads};
  WarpSignal<kChunkStored> chunk_stored{kThreads / 2};

  __device__ __forceinline__ OneStage& stage_of(int turn) const { return stage[two_stages ? turn % 2 : 0]; }

  // Turn t is chunk walk.chunks - 1 - t.
  __device__ __forceinline__ void retreat_states() const {
    const int K = args.chunk.problem.head_dim_k, V = args.chunk.problem.head_dim_v;
    float G[kTiles][kK / 8][4] = {};
    if (!walk.closes) {
      take_carried<kTiles, kK, kPairs>(args.chunk, part, walk, G);
    } else if (args.d_final_state.present()) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        load_state<kK>(args.d_final_state, state_offset(args.d_final_state, part), part.column + row + 16 * i, K, V,
                       lane, G[i]);
      }
    }
    for (int turn = 0; turn < walk.chunks; ++turn) {
      const int here = kPerChannel || kK > 128 ? opaque_below<kWarpSize>(lane) : lane;
      stages.consumer_wait();
      OneStage& current = stage_of(turn);
      Sums<kTiles> X;
      clear<kTiles>(X);
      read_state<kType, kK, kTiles>(G, exchange.G(), row, current.writer(), here, X);
      G_ready.arrive();
      finish_Y<kType, kTiles>(current, exchange, args.dv.present(), row, here, X);
      Y_ready.arrive();
      retreat_state<kType, kTiles>(current, row, here, X, G);
      if (turn + 1 < walk.chunks) stages.consumer_release(turn);
    }
    if (!walk.opens) {
      give_carried<kTiles, kK, kPairs>(args.chunk, part, walk, G);
    } else if (args.d_initial_state.present()) {
      const int there = opaque_below<kWarpSize>(lane);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        store_state<kK>(args.d_initial_state, state_offset(args.d_initial_state, part), part.column + row + 16 * i, K,
                        V, there, G[i]);
      }
    }
  }

  __device__ __forceinline__ void copy(int thread) const {
    if (walk.chunks == 0) return;
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const int64_t C = args.chunk.chunked.chunk_size;
    ChunkLoader<kK, kPerChannel, kColumns, kThreads / 2, true> loader(args.chunk, args.d_o, args.vector_d_o, part, walk,
                                                                      thread);
    loader.next(stage[0]);
    commit_copies();
    wait_copies<0>();
    if (two_stages) stages.producer_commit();
    for (int turn = 0; turn < walk.chunks; ++turn) {
      OneStage& current = stage_of(turn);
      const int c = walk.chunks - 1 - turn;
      const bool more = turn + 1 < walk.chunks;
      const int64_t chunk = walk.first_chunk + c;
      const int64_t slot = args.chunk.window.slot_of(chunk) * p.num_value_heads + part.head;
      if (turn > 0) stages.producer_acquire(turn - 1);
      if (two_stages) {
        if (more) loader.next(stage_of(turn + 1));
        commit_copies();
      } else {
        if (turn > 0) loader.next(current);
        commit_copies();
        wait_copies<0>();
        stages.producer_commit_and_wait();
      }
      G_ready.wait();
      const int column = part.column + row;
      store_handed<16 * kTiles>(exchange.G(), row, args.padded_v - column, kK, lane,
                                args.G + (slot * args.padded_v + column) * kK, kK);
      Y_ready.wait();
      store_handed<16 * kTiles>(exchange.Y(), row, args.padded_v - column, kChunkRows, lane,
                                args.Y + (slot * args.padded_v + column) * kChunkRows, kChunkRows);
      if (args.dv.present()) {
        store_values<kType, kTiles>(args.dv, args.vector_dv, p.head_dim_v, exchange.dv(), row, lane,
                                    row_offset(args.dv, walk.span.batch, walk.span.begin + c * C, part.head),
                                    static_cast<int>(min(walk.span.length - c * C, C)), part.column);
      }
      if (two_stages && more) {
        wait_copies<0>();
        stages.producer_commit();
      }
      if (args.progress.present()) {
        chunk_stored.wait();
        if (thread == 0) {
          publish(args.progress.ready_at(chunk * p.num_value_heads + part.head) + part.column / kColumns);
        }
      }
    }
  }
};

// A block per part; a smaller grid goes round.
template <DType kType, int kK, bool kPerChannel, int kTiles, int kPairs>
__global__ void __launch_bounds__(2 * kPairs * kWarpSize, 1)
    scan_back_kernel(const __grid_constant__ GradientArgs args, bool two_stages, int64_t parts) {
  using Part = BackScan<kType, kK, kPerChannel, kTiles, kPairs>;
  wait_for_previous_kernels();
  if (args.progress.present()) let_next_kernel_start();
  auto& exchange = dynamic_shared<BackExchange<kK, Part::kColumns>>();
  auto* stage = reinterpret_cast<typename Part::OneStage*>(&exchange + 1);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int64_t at = blockIdx.x; at < parts; at += gridDim.x) {
    BlockWork& work = exchange.work;
    begin_work(args.chunk, at, args.padded_v, Part::kColumns, work);
    const int row = warp % kPairs * 16 * kTiles;
    const Part scan{args, work.part, work.walk, exchange, stage, two_stages, row, lane};
    if (!work.walk.exists) {
    } else if (warp < kPairs) {
      scan.retreat_states();
    } else {
      scan.copy(static_cast<int>(threadIdx.x) - kPairs * kWarpSize);
    }
    __syncthreads();  // before the next part's first copies
  }
}

template <DType kType, int kK, bool kPerChannel, int kTiles, int kPairs>
void launch_scan_back(const GradientArgs& args, const ScanConfig& config, const Context& context) {
  constexpr int kColumns = kColumnsOfBlock<kTiles, kPairs>;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const int64_t parts = p.sequences.count * p.num_value_heads * ((args.padded_v + kColumns - 1) / kColumns);
  launch<scan_back_kernel<kType, kK, kPerChannel, kTiles, kPairs>>(
      "delta_rule chunk_16bit scan back", context,
      {static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)), 2 * kPairs * kWarpSize,
       scan_back_bytes<kK, kPerChannel, kColumns>(config.stages), true},
      args, config.stages == 2, parts);
}

}  // namespace

template <DType kType>
void launch_scan_back(const GradientArgs& args, const ScanConfig& config, const Context& context) {
  with_scan_instance(config, [&]<int kK, bool kPerChannel, int kTiles, int kPairs>() {
    launch_scan_back<kType, kK, kPerChannel, kTiles, kPairs>(args, config, context);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
