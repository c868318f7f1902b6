// Mini-batches of 16 tokens. The chain from state to state is all that takes time, so half of the warps do nothing
// else. Each has a partner with the same columns that does the rest:
//
//     chain m:      h_m in 16 bits to the partner, z_m, statistics   | A |   x, y, sums of the inner gradient   | B |
//                   n_m, also to the partner, h_{m+1}, c_{m+1}
//     partner m:    copies of mini-batch m + kStages - 2 begin, w (b - v + k) of m for the chain,
//                   y_{m-2} = scale q h + c - eta (P n) and its statistics, q h + c and P of m - 1   | C |
//                   o_{m-2}, the state of m - 1 to memory if it is to be kept, mini-batch m + 1 has arrived   | A |
//
// At A the chain and the partners wait for each other; B is the chain's barrier, C the partners'. Between A of m - 1
// and A of m, the chain writes n_{m-1} and h_m, c_m and reads k_{m-1}, k_m, eta_{m-1} and the residuals of m - 1; the
// partners write the residuals of m and read n_{m-2}, h_{m-1}, c_{m-1} and all of mini-batches m - 1 and m: two buffers
// for what one side hands to the other, and the stage of m - 2 is free.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/warp_roles.cuh"
#include "cuda/ttt_linear/chunk_chain/chain.cuh"
#include "cuda/ttt_linear/chunk_loader.cuh"
#include "cuda/ttt_linear/chunk_rows.cuh"

namespace fastweight::cuda::ttt {
namespace {

// On a multiprocessor at a time.
template <int kD>
constexpr int kBlocks = kD == 64 ? 2 : 1;

template <int kD>
__device__ __forceinline__ int next_stage(int s) {
  return s + 1 == ChainShared<kD>::kStages ? 0 : s + 1;
}

template <class T>
__device__ __forceinline__ void swap(T& a, T& b) {
  const T kept = a;
  a = b;
  b = kept;
}

// What the warps tell each other (warp_roles.cuh). At A those of one kind say that they are here and wait for the
// others. Before a warp waits, the other kind can arrive for the next A: the two signals alternate.
enum { kGradientSums = 1, kOutputStatistics, kChainIsHere, kPartnersAreHere = kChainIsHere + 2 };

struct Signals {
  int threads;                                               // of each kind
  WarpSignal<kGradientSums> gradient_sums{threads};          // B: of all warps of the chain
  WarpSignal<kOutputStatistics> output_statistics{threads};  // C: of all partners
  AlternatingSignal<kChainIsHere> chain_is_here{2 * threads};
  AlternatingSignal<kPartnersAreHere> partners_are_here{2 * threads};

  __device__ __forceinline__ void wait_for_partners(int turn) const { meet(chain_is_here, partners_are_here, turn); }
  __device__ __forceinline__ void wait_for_chain(int turn) const { meet(partners_are_here, chain_is_here, turn); }

 private:
  // One branch for both signals.
  template <class Own, class Other>
  __device__ __forceinline__ static void meet(const Own& own, const Other& other, int turn) {
    if (turn % 2 == 0) {
      own.arrive(0);
      other.wait(0);
    } else {
      own.arrive(1);
      other.wait(1);
    }
  }
};

// ---- The chain ------------------------------------------------------------------------------------------------------

// k of a mini-batch as left operands of k h, or as right ones of n^T k.
template <int kD>
using KeyFragments = uint32_t[kD / 16][4];

// The stages of the chain. What a warp keeps from one to the next are local variables of run_chain that are handed to
// them: as members they would stay in memory until loops are unrolled, and cost spills.
template <DType kType, int kD, bool kFull>
struct ChainWarp {
  const DeviceProblem& p;
  const Columns<kFull>& columns;
  const Lane& at;
  Sums<kD, kTileRows>& sums;

  static constexpr int kSteps = kD / 16;
  static constexpr bool kEarly = kD == 64;  // registers for the operands long before their use

  // Where the fragments of k of a stage are.
  __device__ __forceinline__ uint32_t load_keys(Stage<kD, kTileRows>& stage, KeyFragments<kD>& k_rows) const {
    const uint32_t k = first_fragment(stage.k(), 0, at.lane);
    if constexpr (kEarly) {
#pragma unroll
      for (int m = 0; m < kSteps; ++m) ldmatrix(fragment(k, m), k_rows[m]);
    }
    return k;
  }

  // k h in two chains of products for half the time, and the state to the partner.
  __device__ __forceinline__ void read_state(const State<kD>& state, uint32_t k, KeyFragments<kD>& k_rows,
                                             WarpExchange<kD>* partner, LaneRows<kTileRows> (&kh)[2]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) kh[i / 8][0][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t b[4];
      state.template operand<kType>(m, b);
      if constexpr (!kEarly) ldmatrix(fragment(k, m), k_rows[m]);
      mma<kType>(kh[m % 2][0][0], k_rows[m], b[0], b[1]);
      mma<kType>(kh[m % 2][0][1], k_rows[m], b[2], b[3]);
      partner->h[m][at.lane] = make_uint4(b[0], b[1], b[2], b[3]);
    }
    if (at.g == 0) partner->c[at.t] = make_float4(state.c[0], state.c[1], state.c[2], state.c[3]);
  }

  // z = k h + c
  __device__ __forceinline__ void predict(LaneRows<kTileRows> (&kh)[2], const float (&c)[4],
                                          LaneRows<kTileRows>& z) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = element<kTileRows>(kh[0], 0, half, e) + element<kTileRows>(kh[1], 0, half, e);
        element<kTileRows>(z, 0, half, e) = sum + c[e];
      }
    }
  }

  // x = LN(z), y = w^2 x + w (b - v + k) and r of rows g and g + 8, and the warp's share of the sums of y and x y.
  __device__ __forceinline__ void put_gradient_sums(LaneRows<kTileRows>& z, const WarpExchange<kD>* partner,
                                                    float (&x)[2][4], float (&y)[2][4], float (&r)[2]) const {
    float2 own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 norm = get_norm<kFull>(sums.inner[at.row(0, half)], p);
      const float4 four = partner->residuals[half][at.lane];
      const float residual[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[half][e] = element<kTileRows>(z, 0, half, e);
      own[half] = inner_sums(norm, columns, residual, x[half], y[half]);
      r[half] = norm.y;
    }
    put_sums<kD, kTileRows>(own, 0, at, sums.gradient, [](int, float2 sum) { return sum; });
  }

  // n = r (y - mean(y) - x mean(x y)), transposed in 16 bits, and its sum over the rows of the lane. k_columns are
  // loaded while the means are on their way.
  __device__ __forceinline__ void make_gradients(const float (&x)[2][4], const float (&y)[2][4], const float (&r)[2],
                                                 int rows, uint32_t k, KeyFragments<kD>& k_columns,
                                                 uint32_t (&n_operand)[4], float (&total)[4]) const {
    float2 means[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) means[half] = get_means(sums.gradient[at.row(0, half)], p);
    if constexpr (kEarly) {
#pragma unroll
      for (int m = 0; m < kSteps; ++m) ldmatrix_transposed(fragment(k, m), k_columns[m]);
    }
    LaneRows<kTileRows> n;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = inner_gradient(r[half], means[half], x[half][e], y[half][e]);
        element<kTileRows>(n, 0, half, e) = value;
        total[e] = half == 0 ? value : total[e] + value;
      }
    }
    transpose_gradients<kType>(n[0], 0, rows, columns, at, n_operand);
  }

  // h^T = h^T - eta n^T k. Products are summed apart from the state: tensor cores cut off what an addition does not
  // keep.
  __device__ __forceinline__ void move_state(float eta, const uint32_t (&n)[4], uint32_t k, KeyFragments<kD>& k_columns,
                                             State<kD>& state) const {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      float moves[2][4] = {};
      if constexpr (!kEarly) ldmatrix_transposed(fragment(k, m), k_columns[m]);
      mma<kType>(moves[0], n, k_columns[m][0], k_columns[m][1]);
      mma<kType>(moves[1], n, k_columns[m][2], k_columns[m][3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          state.h[2 * m + half][i] = fmaf(-eta * kGradientUnit<kType>, moves[half][i], state.h[2 * m + half][i]);
        }
      }
    }
  }
};

template <DType kType, int kD, bool kFull>
__device__ __forceinline__ void run_chain(const ChunkArgs& args, const SequenceSpan& span, int64_t sequence, int head,
                                          const Lane& at, int threads, ChainShared<kD>& shared) {
  const Signals signals{threads};
  const Columns<kFull> columns(args.problem, head, at);
  const ChainWarp<kType, kD, kFull> warp{args.problem, columns, at, shared.sums};
  State<kD> state;
  state.load(args, sequence, head, at);
  int stage = 0;
  WarpExchange<kD>*partner = &shared.exchange[0][at.warp], *next_partner = &shared.exchange[1][at.warp];
  KeyFragments<kD> k_rows, k_columns;
  uint32_t k = 0;  // where the fragments of the stage are
  const auto load_keys = [&] { k = warp.load_keys(shared.stages[stage], k_rows); };
  LaneRows<kTileRows> kh[2];
  const auto read_state = [&] { warp.read_state(state, k, k_rows, partner, kh); };

  int turn = 0;
  signals.wait_for_partners(turn++);  // mini-batch 0 has arrived
  load_keys();
  read_state();
  // The loop begins where everything waits for k h: what is stored and loaded before does not get in the way after.
  for (int64_t left = span.length; left > 0; left -= kTileRows) {
    LaneRows<kTileRows> z;
    warp.predict(kh, state.c, z);
    put_statistics<kD, kTileRows>(z, columns, at, shared.sums.inner);
    const int rows = static_cast<int>(min(left, int64_t{kTileRows}));
    const float eta = shared.stages[stage].eta[rows - 1];
    signals.wait_for_partners(turn++);  // A

    float x[2][4], y[2][4], r[2];
    warp.put_gradient_sums(z, partner, x, y, r);
    signals.gradient_sums.wait();  // B

    uint32_t n[4];
    float total[4];
    warp.make_gradients(x, y, r, rows, k, k_columns, n, total);
    const uint32_t k_before = k;
    stage = next_stage<kD>(stage);
    load_keys();
    partner->n[at.lane] = make_uint4(n[0], n[1], n[2], n[3]);
    swap(partner, next_partner);
    state.move_bias(eta, columns, total);
    warp.move_state(eta, n, k_before, k_columns, state);
    read_state();  // after the last mini-batch, of what the stage holds
  }
  signals.wait_for_partners(turn++);  // A, for the outputs of the last two mini-batches
  signals.wait_for_partners(turn);
  state.store(args, sequence, head, at);
}

// ---- The partners ---------------------------------------------------------------------------------------------------

// What the chain left of the state before a mini-batch, the part of the warp's columns, to memory.
template <int kD>
__device__ __forceinline__ void keep_state(const WarpExchange<kD>* chain, const Lane& at, int64_t number,
                                           const KeptTiles& kept) {
  auto* h = reinterpret_cast<uint32_t*>(kept.h(number) + KeptTiles::offset(kD, at.warp, 0)) + at.lane;
#pragma unroll
  for (int m = 0; m < kD / 16; ++m) {
    const uint4 b = chain->h[m][at.lane];
    h[128 * m] = b.x;
    h[128 * m + 32] = b.y;
    h[128 * m + 64] = b.z;
    h[128 * m + 96] = b.w;
  }
  if (at.g == 0) *reinterpret_cast<float4*>(kept.c(number) + at.column) = chain->c[at.t];
}

// The stages of a partner, in the same way.
template <DType kType, int kD, bool kFull>
struct PartnerWarp {
  const Columns<kFull>& columns;
  const Lane& at;

  // w (b - v + k) for the chain.
  __device__ __forceinline__ void put_residuals(Stage<kD, kTileRows>& stage, WarpExchange<kD>* chain) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float residual[4];
      residual_of<kType>(stage, columns, at.row(0, half), at, residual);
      chain->residuals[half][at.lane] = make_float4(residual[0], residual[1], residual[2], residual[3]);
    }
  }

  // y = base - eta (P n)
  __device__ __forceinline__ void finish_outputs(LaneRows<kTileRows>& base, const uint32_t (&P)[4],
                                                 const float (&eta)[2], const WarpExchange<kD>* chain,
                                                 LaneRows<kTileRows>& y) const {
    const uint4 n = chain->n[at.lane];
    mma<kType>(y[0][0], P, n.x, n.z);
    mma<kType>(y[0][1], P, n.y, n.w);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& value = element<kTileRows>(y, 0, half, e);
        value = fmaf(-eta[half], value, element<kTileRows>(base, 0, half, e));
      }
    }
  }
};

template <DType kType, int kD, bool kFull>
__device__ __forceinline__ void run_partner(const ChunkArgs& args, const SequenceSpan& span, int64_t sequence, int head,
                                            const Lane& at, int threads, ChainShared<kD>& shared) {
  constexpr int kStages = ChainShared<kD>::kStages;
  const DeviceProblem& p = args.problem;
  const Signals signals{threads};
  ChunkLoader<kD, kTileRows, kFull ? 2 * kD : 0> loader(args, span, head, static_cast<int>(threadIdx.x) - threads,
                                                        threads);
#pragma unroll 1
  for (int i = 0; i < kStages - 2; ++i) {
    loader.next(span.length - i * kTileRows, shared.stages[i]);
    commit_copies();
  }
  const Columns<kFull> columns(p, head, at);
  const PartnerWarp<kType, kD, kFull> warp{columns, at};
  char* o = first_output(args.o, span, head, at);
  const int64_t o_step = byte_offset(args.o.dtype, kTileRows * args.o.strides[1]);
  int64_t number = first_mini_batch(p.sequences, span, sequence, kTileRows) * p.num_heads + head;
  wait_copies<kStages - 3>();
  int turn = 0;
  signals.wait_for_chain(turn++);  // mini-batch 0 has arrived

  // Of the mini-batch before: scale q h + c, P = lower(scale q k^T + 1) and the step sizes.
  LaneRows<kTileRows> base = {};
  uint32_t P[4] = {};
  float eta[2] = {};
  int stage = 0, before = kStages - 1, free = kStages - 2;
  WarpExchange<kD>*chain = &shared.exchange[0][at.warp], *chain_before = &shared.exchange[1][at.warp];
  for (int64_t left = span.length; left > -2 * kTileRows; left -= kTileRows) {
    loader.next(left - (kStages - 2) * kTileRows, shared.stages[free]);
    commit_copies();
    warp.put_residuals(shared.stages[stage], chain);
    LaneRows<kTileRows> y = {};
    warp.finish_outputs(base, P, eta, chain, y);
    put_statistics<kD, kTileRows>(y, columns, at, shared.sums.outer);
    Stage<kD, kTileRows>& stage_before = shared.stages[before];
    const uint32_t q = first_fragment(stage_before.q(), 0, at.lane);
    LaneRows<kTileRows> sums[2] = {};
#pragma unroll
    for (int m = 0; m < kD / 16; ++m) {
      uint32_t a[4];
      ldmatrix(fragment(q, m), a);
      const uint4 b = chain_before->h[m][at.lane];
      mma<kType>(sums[m % 2][0][0], a, b.x, b.y);
      mma<kType>(sums[m % 2][0][1], a, b.z, b.w);
    }
    const float4 four = chain_before->c[at.t];
    const float c[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      eta[half] = stage_before.eta[at.row(0, half)] * kGradientUnit<kType>;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = element<kTileRows>(sums[0], 0, half, e) + element<kTileRows>(sums[1], 0, half, e);
        element<kTileRows>(base, 0, half, e) = fmaf(p.scale, sum, c[e]);
      }
    }
    block_of_p<kType>(stage_before, 0, 0, p.scale, at, P);
    signals.output_statistics.wait();  // C

    if (left + 2 * kTileRows <= span.length) {
      float2 norms[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) norms[half] = get_norm<kFull>(shared.sums.outer[at.row(0, half)], p);
      const int count = static_cast<int>(min(left + 2 * kTileRows, int64_t{kTileRows}));
      store_outputs<kType, kTileRows>(args.o, o, count, norms, columns, at, y);
      o += o_step;
    }
    if (args.kept.present() && left < span.length && left > -kTileRows) {
      keep_state(chain_before, at, number, args.kept);
      number += p.num_heads;
    }
    free = before;
    before = stage;
    stage = next_stage<kD>(stage);
    swap(chain, chain_before);
    wait_copies<kStages - 3>();
    signals.wait_for_chain(turn++);  // A
  }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

// The grid runs over the `heads` of all sequences, those of a sequence together; a smaller grid goes round.
template <DType kType, int kD, bool kFull>
__global__ void __launch_bounds__(4 * kD, kBlocks<kD>)
    chain_kernel(const __grid_constant__ ChunkArgs args, int64_t heads) {
  auto& shared = dynamic_shared<ChainShared<kD>>();
  shared.sums.clear();
  const int threads = kFull ? 2 * kD : static_cast<int>(blockDim.x) / 2,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const bool partner = warp >= threads / kWarpSize;
  const Lane at(args.problem.head_dim, partner ? warp - threads / kWarpSize : warp);
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / args.problem.num_heads;
    const int head = static_cast<int>(item - sequence * args.problem.num_heads);
    const SequenceSpan span = sequence_at(args.problem.sequences, sequence);
    __syncthreads();  // the head before has been read
    if (partner) {
      run_partner<kType, kD, kFull>(args, span, sequence, head, at, threads, shared);
    } else {
      run_chain<kType, kD, kFull>(args, span, sequence, head, at, threads, shared);
    }
  }
}

}  // namespace
}  // namespace fastweight::cuda::ttt
