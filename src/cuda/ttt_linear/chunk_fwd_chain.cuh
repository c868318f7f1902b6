// Mini-batches of 16 tokens. The chain from state to state is all that takes time, so half of the warps do nothing
// else. Each has a partner with the same columns that does the rest:
//
//     chain m:      h_m in 16 bits to the partner, z_m, statistics   | A |   x, y, sums of the inner gradient   | B |
//                   n_m, also to the partner, h_{m+1}, c_{m+1}
//     partner m:    copies of mini-batch m + kStages - 2 begin, w (b - v + k) of m for the chain,
//                   y_{m-2} = scale q h + c - eta (P n) and its statistics, q h + c and P of m - 1   | C |
//                   o_{m-2}, mini-batch m + 1 has arrived   | A |
//
// At A the chain and the partners wait for each other; B is the chain's barrier, C the partners'. Between A of m - 1
// and A of m, the chain writes n_{m-1} and h_m, c_m and reads k_{m-1}, k_m, eta_{m-1} and the residuals of m - 1; the
// partners write the residuals of m and read n_{m-2}, h_{m-1}, c_{m-1} and all of mini-batches m - 1 and m: two buffers
// for what one side hands to the other, and the stage of m - 2 is free.
#pragma once

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

// Of the chain and of the partners; and at A, where those of one kind arrive at the barrier at which the others wait.
// Before a warp waits, the other kind can arrive for the next A: there are two of each, for even and odd turns.
enum { kB = 1, kC, kChainIsHere, kPartnersAreHere = kChainIsHere + 2 };

template <int kOwn, int kOther>
__device__ __forceinline__ void meet(int turn, int threads) {
  if (turn % 2 == 0) {
    arrive_at_named_barrier<kOwn>(2 * threads);
    named_barrier<kOther>(2 * threads);
  } else {
    arrive_at_named_barrier<kOwn + 1>(2 * threads);
    named_barrier<kOther + 1>(2 * threads);
  }
}
__device__ __forceinline__ void wait_for_partners(int turn, int threads) {
  meet<kChainIsHere, kPartnersAreHere>(turn, threads);
}
__device__ __forceinline__ void wait_for_chain(int turn, int threads) {
  meet<kPartnersAreHere, kChainIsHere>(turn, threads);
}

template <class T>
__device__ __forceinline__ void swap(T& a, T& b) {
  const T kept = a;
  a = b;
  b = kept;
}

template <DType kType, int kD, bool kFull>
__device__ __forceinline__ void run_chain(const ChunkArgs& args, const SequenceSpan& span, int64_t sequence, int head,
                                          const Lane& at, int threads, ChainShared<kD>& shared) {
  constexpr int kSteps = kD / 16;
  constexpr bool kEarly = kD == 64;  // registers for the operands long before their use
  const DeviceProblem& p = args.problem;
  const Columns<kFull> columns(p, head, at);
  State<kD> state;
  state.load(args, sequence, head, at);
  int s = 0;
  WarpExchange<kD>*partner = &shared.exchange[0][at.warp], *next_partner = &shared.exchange[1][at.warp];
  uint32_t k_rows[kSteps][4], k_columns[kSteps][4];  // left operands of k h, right ones of n^T k

  uint32_t k = 0;  // where the fragments of stage s are
  const auto load_rows = [&] {
    k = first_fragment(shared.stages[s].k(), 0, at.lane);
    if constexpr (kEarly) {
#pragma unroll
      for (int m = 0; m < kSteps; ++m) ldmatrix(fragment(k, m), k_rows[m]);
    }
  };

  // k h in two chains of products for half the time, and the state to the partner.
  Rows<kTileRows> kh[2];
  const auto read_state = [&] {
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
  };

  int turn = 0;
  wait_for_partners(turn++, threads);  // mini-batch 0 has arrived
  load_rows();
  read_state();
  // The loop begins where everything waits for k h: what is stored and loaded before does not get in the way after.
  for (int64_t left = span.length; left > 0; left -= kTileRows) {
    Rows<kTileRows> z;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = element<kTileRows>(kh[0], 0, half, e) + element<kTileRows>(kh[1], 0, half, e);
        element<kTileRows>(z, 0, half, e) = sum + state.c[e];
      }
    }
    put_statistics<kD, kTileRows>(z, columns, at, shared.sums.inner);
    const int rows = static_cast<int>(min(left, int64_t{kTileRows}));
    const float eta = shared.stages[s].eta[rows - 1];
    wait_for_partners(turn++, threads);  // A

    float x[2][4], y[2][4], r[2];
    float2 own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 norm = get_norm<kFull>(shared.sums.inner[at.row(0, half)], p);
      const float4 four = partner->residuals[half][at.lane];
      const float residual[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[half][e] = element<kTileRows>(z, 0, half, e);
      own[half] = inner_sums(norm, columns, residual, x[half], y[half]);
      r[half] = norm.y;
    }
    put_sums<kD, kTileRows>(own, 0, at, shared.sums.gradient, [](int, float2 sum) { return sum; });
    named_barrier<kB>(threads);

    float2 means[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) means[half] = get_means(shared.sums.gradient[at.row(0, half)], p);
    if constexpr (kEarly) {
#pragma unroll
      for (int m = 0; m < kSteps; ++m) ldmatrix_transposed(fragment(k, m), k_columns[m]);
    }
    Rows<kTileRows> n;
    float total[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = inner_gradient(r[half], means[half], x[half][e], y[half][e]);
        element<kTileRows>(n, 0, half, e) = value;
        total[e] = half == 0 ? value : total[e] + value;
      }
    }
    uint32_t n_operand[4];
    transpose_gradients<kType>(n[0], 0, rows, columns, at, n_operand);
    const uint32_t k_before = k;
    s = next_stage<kD>(s);
    load_rows();
    partner->n[at.lane] = make_uint4(n_operand[0], n_operand[1], n_operand[2], n_operand[3]);
    swap(partner, next_partner);
    state.move_bias(eta, columns, total);
    // Products are summed apart from the state: tensor cores cut off what an addition does not keep.
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      float moves[2][4] = {};
      if constexpr (!kEarly) ldmatrix_transposed(fragment(k_before, m), k_columns[m]);
      mma<kType>(moves[0], n_operand, k_columns[m][0], k_columns[m][1]);
      mma<kType>(moves[1], n_operand, k_columns[m][2], k_columns[m][3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          state.h[2 * m + half][i] = fmaf(-eta * kGradientUnit<kType>, moves[half][i], state.h[2 * m + half][i]);
        }
      }
    }
    read_state();  // after the last mini-batch, of what the stage holds
  }
  wait_for_partners(turn++, threads);  // A, for the outputs of the last two mini-batches
  wait_for_partners(turn, threads);
  state.store(args, sequence, head, at);
}

template <DType kType, int kD, bool kFull>
__device__ __forceinline__ void run_partner(const ChunkArgs& args, const SequenceSpan& span, int head, const Lane& at,
                                            int threads, ChainShared<kD>& shared) {
  constexpr int kStages = ChainShared<kD>::kStages;
  const DeviceProblem& p = args.problem;
  ChunkLoader<kD, kTileRows, kFull ? 2 * kD : 0> loader(args, span, head, static_cast<int>(threadIdx.x) - threads,
                                                        threads);
#pragma unroll 1
  for (int i = 0; i < kStages - 2; ++i) {
    loader.next(span.length - i * kTileRows, shared.stages[i]);
    commit_copies();
  }
  const Columns<kFull> columns(p, head, at);
  char* o = first_output(args.o, span, head, at);
  const int64_t o_step = byte_offset(args.o.dtype, kTileRows * args.o.strides[1]);
  wait_copies<kStages - 3>();
  int turn = 0;
  wait_for_chain(turn++, threads);  // mini-batch 0 has arrived

  // Of the mini-batch before: scale q h + c, P and the step sizes.
  Rows<kTileRows> base = {};
  uint32_t P[4] = {};
  float eta[2] = {};
  int s = 0, before = kStages - 1, free = kStages - 2;
  WarpExchange<kD>*chain = &shared.exchange[0][at.warp], *chain_before = &shared.exchange[1][at.warp];
  for (int64_t left = span.length; left > -2 * kTileRows; left -= kTileRows) {
    loader.next(left - (kStages - 2) * kTileRows, shared.stages[free]);
    commit_copies();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float residual[4];
      residual_of<kType>(shared.stages[s], columns, at.row(0, half), at, residual);
      chain->residuals[half][at.lane] = make_float4(residual[0], residual[1], residual[2], residual[3]);
    }

    Rows<kTileRows> y = {};
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
    put_statistics<kD, kTileRows>(y, columns, at, shared.sums.outer);

    Stage<kD, kTileRows>& stage = shared.stages[before];
    const uint32_t q = first_fragment(stage.q(), 0, at.lane);
    Rows<kTileRows> sums[2] = {};
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
      eta[half] = stage.eta[at.row(0, half)] * kGradientUnit<kType>;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = element<kTileRows>(sums[0], 0, half, e) + element<kTileRows>(sums[1], 0, half, e);
        element<kTileRows>(base, 0, half, e) = fmaf(p.scale, sum, c[e]);
      }
    }
    block_of_p<kType>(stage, 0, 0, p.scale, at, P);
    named_barrier<kC>(threads);

    if (left + 2 * kTileRows <= span.length) {
      float2 norms[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) norms[half] = get_norm<kFull>(shared.sums.outer[at.row(0, half)], p);
      const int count = static_cast<int>(min(left + 2 * kTileRows, int64_t{kTileRows}));
      store_outputs<kType, kTileRows>(args.o, o, count, norms, columns, at, y);
      o += o_step;
    }
    free = before;
    before = s;
    s = next_stage<kD>(s);
    swap(chain, chain_before);
    wait_copies<kStages - 3>();
    wait_for_chain(turn++, threads);  // A
  }
}

// The grid runs over (sequence, head), the last fastest; a smaller grid goes round.
template <DType kType, int kD, bool kFull>
__global__ void __launch_bounds__(4 * kD, kBlocks<kD>)
    chain_kernel(const __grid_constant__ ChunkArgs args, int64_t parts) {
  auto& shared = dynamic_shared<ChainShared<kD>>();
  shared.sums.clear();
  const int threads = kFull ? 2 * kD : static_cast<int>(blockDim.x) / 2,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const bool partner = warp >= threads / kWarpSize;
  const Lane at(args.problem.head_dim, partner ? warp - threads / kWarpSize : warp);
  for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    const int64_t sequence = part / args.problem.num_heads;
    const int head = static_cast<int>(part - sequence * args.problem.num_heads);
    const SequenceSpan span = sequence_at(args.problem.sequences, sequence);
    __syncthreads();  // the part before has been read
    if (partner) {
      run_partner<kType, kD, kFull>(args, span, head, at, threads, shared);
    } else {
      run_chain<kType, kD, kFull>(args, span, sequence, head, at, threads, shared);
    }
  }
}

}  // namespace
}  // namespace fastweight::cuda::ttt
