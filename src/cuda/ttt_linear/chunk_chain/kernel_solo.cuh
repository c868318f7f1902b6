// The same chain with partners that are single warps, for D = 64. A partner has every fourth mini-batch to itself: all of a
// row is in four of its lanes, and what the columns have in common (fragments of q and k, P) is made once. Counted in
// instructions and their latencies, a mini-batch takes the partners of kernel.cuh longer than the chain.
//
//     chain m:         h_m in 16 bits to the partner, z_m, statistics   | A |   x, y, sums of the inner gradient
//                      | B, and m + 1 is ready |   n_m, also to the partner, h_{m+1}, c_{m+1} -> m is done
//     partner m % 4:   mini-batch m has arrived, w (b - v + k) for the chain -> m is ready, copies of m + 4 begin,
//                      | m is done |   the state to memory if it is to be kept, o_m
//
// A is the chain's barrier. That m + 1 is ready also says that its partner has read what the chain left of m - 3, and that
// m is done that the chain has read the rows of m.
#pragma once

#include <algorithm>

#include "cuda/ttt_linear/chunk_chain/kernel.cuh"
#include "cuda/ttt_linear/chunk_chain/solo_rows.cuh"
#include "cuda/ttt_linear/chunk_chain/turn_signal.cuh"

namespace fastweight::cuda::ttt {
namespace {

struct SoloChainSignals {
  static constexpr int kChain = 2 * kSoloDim, kBoth = kChain + kWarpSize;  // threads
  enum { kStatistics = 1, kReady, kDone = kReady + kTurns };

  WarpSignal<kStatistics> statistics{kChain};  // A
  TurnSignal<kReady> ready{kBoth};
  TurnSignal<kDone> done{kBoth};
};

template <DType kType>
__device__ __forceinline__ void run_solo_chain(const ChunkArgs& args, const SequenceSpan& span, int64_t sequence,
                                               int head, const Lane& at, SoloChainShared& shared) {
  const SoloChainSignals signals;
  const Columns<true> columns(args.problem, head, at);
  const ChainWarp<kType, kSoloDim, true> warp{args.problem, columns, at, shared.sums};
  State<kSoloDim> state;
  state.load(args, sequence, head, at);
  int turn = 0, slot = 0;  // of the mini-batch: its partner, and the stage
  KeyFragments<kSoloDim> k_rows, k_columns;
  LaneRows<kTileRows> kh[2];
  signals.ready.wait(0);
  uint32_t k = warp.load_keys(shared.stages[0][0], k_rows);
  warp.read_state(state, k, k_rows, &shared.exchange[0][at.warp], kh);
  // As in run_chain the loop begins where everything waits for k h.
  for (int64_t left = span.length; left > 0; left -= kTileRows) {
    WarpExchange<kSoloDim>* partner = &shared.exchange[turn][at.warp];
    LaneRows<kTileRows> z;
    warp.predict(kh, state.c, z);
    put_statistics<kSoloDim, kTileRows>(z, columns, at, shared.sums.inner);
    const int rows = static_cast<int>(min(left, int64_t{kTileRows}));
    const float eta = shared.stages[turn][slot].eta[rows - 1];
    signals.statistics.wait();  // A

    float x[2][4], y[2][4], r[2];
    warp.put_gradient_sums(z, partner, x, y, r);
    const int done = turn;
    if (++turn == kSolos) {
      turn = 0;
      slot = 1 - slot;
    }
    signals.ready.wait(turn);  // B

    uint32_t n[4];
    float total[4];
    warp.make_gradients(x, y, r, rows, k, k_columns, n, total);
    const uint32_t k_before = k;
    k = warp.load_keys(shared.stages[turn][slot], k_rows);
    partner->n[at.lane] = make_uint4(n[0], n[1], n[2], n[3]);
    state.move_bias(eta, columns, total);
    warp.move_state(eta, n, k_before, k_columns, state);
    warp.read_state(state, k, k_rows, &shared.exchange[turn][at.warp], kh);  // after the last, of what the stage holds
    signals.done.arrive(done);                                               // here it parts no products
  }
  state.store(args, sequence, head, at);
}

template <DType kType>
struct SoloChainPartner {
  const ChunkArgs& args;
  const DeviceProblem& p;
  Lane at;
  const float *w, *b;  // the norm's, in shared memory

  using Rows = Stage<kSoloDim, kTileRows>;
  using Exchange = WarpExchange<kSoloDim>[kSoloTiles];

  // w (b - v + k) for the chain.
  __device__ __forceinline__ void put_residuals(Rows& stage, Exchange& exchange) const {
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float weight[4], bias[4];
      four_of_tile(w, tile, at, weight);
      four_of_tile(b, tile, at, bias);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = at.row(0, half), column = kWarpColumns * tile + 4 * at.t;
        float k[4], v[4];
        load_four<kType>(stage.k(), row, column, k);
        load_four<kType>(stage.v(), row, column, v);
        exchange[tile].residuals[half][at.lane] =
            make_float4(weight[0] * (bias[0] - v[0] + k[0]), weight[1] * (bias[1] - v[1] + k[1]),
                        weight[2] * (bias[2] - v[2] + k[2]), weight[3] * (bias[3] - v[3] + k[3]));
      }
    }
  }

  // y = scale q h + c - eta (P n); h and c also to memory, if they are to be kept.
  __device__ __forceinline__ void read_state(Rows& stage, Exchange& exchange, int64_t number, SoloRows& y) const {
    const uint32_t q = first_fragment(stage.q(), 0, at.lane);
    const bool keeps = args.kept.present();
    auto* kept = keeps ? reinterpret_cast<uint32_t*>(args.kept.h(number)) + at.lane : nullptr;
#pragma unroll
    for (int m = 0; m < kSoloTiles; ++m) {
      uint32_t a[4];
      ldmatrix(fragment(q, m), a);
#pragma unroll
      for (int tile = 0; tile < kSoloTiles; ++tile) {
        const uint4 h = exchange[tile].h[m][at.lane];
        mma<kType>(y[tile][0], a, h.x, h.y);
        mma<kType>(y[tile][1], a, h.z, h.w);
        if (keeps) {
          uint32_t* to = kept + KeptTiles::offset(kSoloDim, tile, m) / 2;
          to[0] = h.x;
          to[32] = h.y;
          to[64] = h.z;
          to[96] = h.w;
        }
      }
    }
    uint32_t P[4];
    block_of_p<kType>(stage, 0, 0, p.scale, at, P);
    const float eta[2] = {stage.eta[at.row(0, 0)] * kGradientUnit<kType>,
                          stage.eta[at.row(0, 1)] * kGradientUnit<kType>};
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float moves[2][4] = {}, c[4];
      const uint4 n = exchange[tile].n[at.lane];
      mma<kType>(moves[0], P, n.x, n.z);
      mma<kType>(moves[1], P, n.y, n.w);
      load_four(exchange[tile].c[at.t], c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& value = y[tile][i / 4][i % 4];
        value = fmaf(-eta[i / 2 % 2], moves[i / 4][i % 4], fmaf(p.scale, value, c[i / 4 * 2 + i % 2]));
      }
    }
    if (keeps && at.lane < kSoloDim / 4) {
      *reinterpret_cast<float4*>(args.kept.c(number) + 4 * at.lane) = exchange[at.lane / 4].c[at.lane % 4];
    }
  }

  // o = y + w LN(y) + b, of y - m(y). `o` points to the lane's first column of the first row.
  template <class Store>
  __device__ __forceinline__ void store_rows(const float (&means)[2], const float (&r)[2], SoloRows& distances,
                                             const Store& store) const {
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float weight[4], bias[4];
      four_of_tile(w, tile, at, weight);
      four_of_tile(b, tile, at, bias);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float d = element(distances, tile, half, e);
          values[e] = (means[half] + d) + fmaf(weight[e], d * r[half], bias[e]);
        }
        store(tile, half, values);
      }
    }
  }

  __device__ __forceinline__ void make_outputs(Rows& stage, Exchange& exchange, int64_t number, int count,
                                               char* o) const {
    SoloRows y = {};
    float means[2], r[2];
    read_state(stage, exchange, number, y);
    center(at, p.eps, y, means, r);
    const DeviceTensor& to = args.o;
    if (to.dtype == kType && to.aligned_vec4) {
      char* rows[2] = {o + byte_offset(kType, at.row(0, 0) * to.strides[1]),
                       o + byte_offset(kType, at.row(0, 1) * to.strides[1])};
      store_rows(means, r, y, [&](int tile, int i, const float(&values)[4]) {
        const uint2 words = make_uint2(pack<kType>(values[0], values[1]), pack<kType>(values[2], values[3]));
        if (at.row(0, i) < count) *reinterpret_cast<uint2*>(rows[i] + 2 * kWarpColumns * tile) = words;
      });
    } else {
      store_rows(means, r, y, [&](int tile, int i, const float(&values)[4]) {
        const int row = at.row(0, i);
        const int64_t offset = row * to.strides[1] + kWarpColumns * tile * to.strides[3];
        scatter_vec4(o, to.dtype, offset, to.strides[3], row < count ? 4 : 0, values);
      });
    }
  }
};

template <DType kType>
__device__ __forceinline__ void run_solo_chain_partner(const ChunkArgs& args, const SequenceSpan& span,
                                                       int64_t sequence, int head, const Lane& at, int turn,
                                                       SoloChainShared& shared) {
  const DeviceProblem& p = args.problem;
  const SoloChainSignals signals;
  int64_t left = span.length - turn * kTileRows;  // from the partner's mini-batch on
  SequenceSpan own = span;
  own.begin += turn * kTileRows;
  own.length = left;
  ChunkLoader<kSoloDim, kTileRows, kWarpSize, true, kSolos> loader(args, own, head, at.lane, kWarpSize);
  auto& stages = shared.stages[turn];
  auto& exchange = shared.exchange[turn];
  SoloChainPartner<kType> partner{args, p, at, shared.w, shared.b};
  constexpr int kStep = kSolos * kTileRows;
  char* o = first_output(args.o, own, head, at);
  int64_t number = (first_mini_batch(p.sequences, span, sequence, kTileRows) + turn) * p.num_heads + head;
  loader.next(left, stages[0]);
  commit_copies();
  int slot = 0;
#pragma unroll 1
  for (; left > 0; left -= kStep) {
    partner.at.forget();
    wait_copies<0>();
    __syncwarp();  // all rows are here, and those that the next ones take the place of have been read
    partner.put_residuals(stages[slot], exchange);
    signals.ready.arrive(turn);
    loader.next(left - kStep, stages[1 - slot]);
    commit_copies();
    signals.done.wait(turn);
    partner.make_outputs(stages[slot], exchange, number, static_cast<int>(min(left, int64_t{kTileRows})), o);
    number += int64_t{kSolos} * p.num_heads;
    o += byte_offset(args.o.dtype, opaque(kStep) * args.o.strides[1]);  // computed here, not kept
    slot = 1 - slot;
  }
  if (left > -kTileRows) signals.ready.arrive(turn);  // the chain asks for one more than there are
}

template <DType kType>
__global__ void __launch_bounds__(2 * kSoloDim + kSolos * kWarpSize, 2)
    solo_chain_kernel(const __grid_constant__ ChunkArgs args, int64_t heads) {
  auto& shared = dynamic_shared<SoloChainShared>();
  const DeviceProblem& p = args.problem;
  constexpr int kWarps = kSoloDim / kWarpColumns;  // of the chain
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / p.num_heads;
    const int head = static_cast<int>(item - sequence * p.num_heads);
    const SequenceSpan span = sequence_at(p.sequences, sequence);
    __syncthreads();  // the head before has been read
    load_norm(p, head, shared.w, shared.b);
    __syncthreads();
    if (warp < kWarps) {
      run_solo_chain<kType>(args, span, sequence, head, Lane(kSoloDim, warp), shared);
    } else {
      run_solo_chain_partner<kType>(args, span, sequence, head, Lane(kSoloDim, 0), warp - kWarps, shared);
    }
  }
}

}  // namespace

template <DType kType>
void launch_chain(const ChainConfig& config, const ChunkArgs& args, const Context& context) {
  const int64_t heads = args.problem.sequences.count * args.problem.num_heads;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(heads, 1 << 30)),
                          static_cast<unsigned>(config.threads), config.shared_bytes};
  constexpr const char* kName = "ttt_linear chunk_chain";
  if (config.solo) {
    launch<solo_chain_kernel<kType>>(kName, context, shape, args, heads);
    return;
  }
  with_padded_dim(config.padded_dim, [&]<int kD>() {
    if (config.full) {
      launch<chain_kernel<kType, kD, true>>(kName, context, shape, args, heads);
    } else {
      launch<chain_kernel<kType, kD, false>>(kName, context, shape, args, heads);
    }
  });
}

}  // namespace fastweight::cuda::ttt
