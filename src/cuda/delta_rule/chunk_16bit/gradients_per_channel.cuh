// The gradients of every chunk with one decay per key channel. See gradient.cuh for the equations.
//
// A pair of tokens i >= j has the factor exp(gamma_i - gamma_j) in every channel, a product of the decays of single
// tokens as in factors_per_channel.cu. A chunk is four tiles of 16 tokens; rise_i is the product of the decays from the
// start of i's tile through i, fall_j of those after j to the end of j's tile, total_t of all of a tile. The products
// between tiles are made on tensor cores, and scaled by channels in their fp32 sums:
//
//     X_i = (..((d_o S^T)_i total_0 + P_i0 (fall k)_0) total_1 + ..)     what q_i reads from outside its tile, over
//                                                                       rise_i; the reader likewise, with Y S^T and A
//     F_j = (..((R G^T)_j total_3 + P_3j^T (rise q)_3 + A_3j^T (rise k)_3) total_2 + ..)
//                                                                       what k_j writes to outside, over fall_j
//
// with P = scale dP, A = -dA and -beta rise k for the reader's rise k. Of dg, what passes over all tokens of a tile is
//
//     over_t = sum of M_ij over the tiles I > t > J, with the state before as a J and the state after as an I:
//
// X after the factor total_t, times rise x.
//
// A tile is mild if no decay of a token is below 2^-7.5 and no total_t below 2^-117 (fp16: 2^-4), in any channel. Its
// own pairs i > j are then one more step of the sums, on tensor cores, and fall_j is total_t / rise_j:
//
//     X'_i = X_i total_t + P_tt (fall k)_t            dq_i = rise_i / total_t X'_i + P_ii k_i
//     F'_j = F_j total_t + P_tt^T (rise q)_t + ..     dk_j = F'_j / rise_j + P_jj q_j - beta_j (rise / total X')_j
//
// and dg of the tile follows from its sums,
//
//     dg_m+1 = dg_m + fall_m k_m F'_m / total_t - rise_m x_m X'_m / total_t
//
// where dg of the first token is over_t and all that the tile reads from before it. Both terms are made of the rounded
// operands, fall k and rise x, so that the term M_ij of a pair goes as it came but for the rounding of fp32 sums: dg_m
// has an error of some 2^-22 of the terms that pass the tile. Those that exp(g_m) multiplies are not smaller than
// 2^-7.5 of such terms, unless the keys make them so: the error stays below that of the operands.
//
// The other tiles are strong, those with a NaN among them. Their pairs are walked in fp32 by a thread per channel, down
// the rows i, with exp(gamma_i - gamma_j) of all j < i in registers:
//
//     dq_i = rise_i X_i + pairs,     dk_j = fall_j F_j + pairs - beta_j (rise_j X_j + pairs)
//
// The same walk sums dg of its own terms: rise_i X_i belongs to pairs of i and something before the tile, fall_j F_j to
// pairs of something after it and j. Every term of dg_m is one that exp(g_m) multiplies, and no quotient of decays is
// formed: any gate is safe, at the precision of the operands.
//
// A block has K / 16 warps. In steps 1 to 5 channels, or value columns, are the rows of the products and tokens their
// columns.
//
//     1   a warp has 16 value columns: R^T = bD^T J^T
//     2   blocks of 16 x 16 of P and A, dealt to the warps: rounded to operands, the diagonal of P in fp32
//     3   a warp has 16 channels: S d_o^T and S Y^T in registers, <S, G>, and G R^T
//     4   a thread has two channels of a tile: the rising and falling rows
//     5   a warp has 16 channels: X, F and over
//     6   a thread has two channels of a mild tile, or a channel of a strong one: dg, and what makes dq, dk and dbeta
//     7   some threads have a token: the adjoints of the norms, dq, dk, dbeta
//
// Three tiles of [64 x K] numbers, fp32 in the end, hold all operands one after the other: two blocks of K = 128 fit a
// multiprocessor of Hopper, one of which computes while the other waits.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_per_channel_tokens.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

template <DType kType, int kK>
struct Gradients {
  using X = Shape<kK>;

  const GradientArgs& args;
  Shared<kK>& s;

  // Asked for by every step: what is computed from it is not kept from one to the next.
  __device__ __forceinline__ static int thread_index() {
    return opaque_below<X::kThreads>(static_cast<int>(threadIdx.x));
  }

  // Steps 1 and 2: afterwards d_o is where the reader was, and the pairs are where J was.
  __device__ __forceinline__ void pair_gradients(const Item& item) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (uniform_warp() < X::kColumns / 16) make_writes<kType>(s, uniform_warp(), thread_index() % kWarpSize);
    __syncthreads();
    const int thread = thread_index();
    load_value_rows<X::kThreads>(SharedTile<X::kColumns>(s.d_o), args.d_o, args.vector_d_o, item, p.head_dim_v, thread);
    commit_copies();
    if (thread < kChunkRows) {
      float sum = 0;
      for (const auto& yv : s.value_side.yv) sum += yv[thread];
      s.dbeta[thread] += sum;
    }
    wait_copies<0>();
    __syncthreads();
    make_all_pairs<kType>(s, p.scale, static_cast<int>(item.span.length), uniform_warp(), thread_index() % kWarpSize);
  }

  // Step 3. Returns e_n <S, G> of the lane's channels.
  __device__ __forceinline__ float2 state_products(const Item& item, TileSums& query, TileSums& reader) const {
    const int warp = uniform_warp();
    read_state<kType>(s, warp, thread_index() % kWarpSize, query, reader);
    __syncthreads();
    const int thread = thread_index();
    copy_rows<X::kColumns, X::kThreads>(SharedTile<kK>(s.G), args.G + (item.slot * args.padded_v + item.column) * kK,
                                        kK, args.padded_v - item.column, kK, thread);
    commit_copies();
    const float* total =
        args.chunk.factors.total + copies_of(args.chunk, item) * kK + 16 * warp + thread % kWarpSize / 4;
    const float2 e_n = make_float2(total[0], total[8]);
    wait_copies<0>();
    __syncthreads();
    const float2 states = dot_states<kType>(s, warp, thread_index() % kWarpSize);
    __syncthreads();
    read_gradient<kType>(s, warp, thread_index() % kWarpSize);
    return e_n * states;
  }

  // Steps 4 and 5, X in registers on return.
  __device__ __forceinline__ void tile_products(const Item& item, float2 states, TileSums& query,
                                                TileSums& reader) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const int thread = thread_index();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) scale_tile(make_float2(p.scale, p.scale), query[t]);
    exchange_first<true>(s, thread / kWarpSize, thread % kWarpSize, query[0], reader[0]);
    load_key_rows<X::kThreads, kK>(args.chunk, p.q, item, s.rising.q, thread);
    load_key_rows<X::kThreads, kK>(args.chunk, p.k, item, s.rising.k, thread);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    scale_rows<kType>(p, item, s, thread_index());
    __syncthreads();
    add_tiles<kType>(s, states, uniform_warp(), thread_index() % kWarpSize, query, reader);
  }

  // Steps 1 to 5.
  __device__ __forceinline__ void make_sums(const Item& item) const {
    pair_gradients(item);
    TileSums query = {}, reader = {};
    const float2 states = state_products(item, query, reader);
    __syncthreads();
    tile_products(item, states, query, reader);
    __syncthreads();
    const int warp = uniform_warp(), lane = thread_index() % kWarpSize;
    const OwnSums<kK> own_query(s.query, warp, lane), own_reader(s.reader, warp, lane);
#pragma unroll
    for (int n = 0; n < kChunkRows / 8; ++n) {
      own_query.store(n, query[n / 2][n % 2]);
      own_reader.store(n, reader[n / 2][n % 2]);
    }
    __syncthreads();
  }

  // Step 7. What is finished makes room for the operands of the next item.
  __device__ __forceinline__ void finish(const Item& item, const Item& next) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const bool more = next.span.sequence >= 0;
    const int thread = thread_index();
    const TokenLanes<kK> own(thread);
    const KeyRows<kType, kK> rows{args, item, own};
#pragma unroll 1
    for (int which = 1; which >= 0; --which) {  // dk, then dq
      const bool keys = which == 1;
      const DeviceTensor x = keys ? p.k : p.q, out = keys ? args.dk : args.dq;
      rows.finish(keys ? s.writer : s.query, which, x, keys ? s.rstd_k : s.rstd_q, out,
                  keys ? args.vector_dk : args.vector_dq);
      __syncthreads();
      if (!more) continue;
      if (keys) {
        load_state(args, next, s, thread);
      } else {
        load_values(args, next, s, thread);
      }
    }
    finish_beta(args, item, s, own);
    if (args.parameter_parts != nullptr && item.closes) store_parameters(args, item, s, thread);
    __syncthreads();
    if (more) {
      load_columns(args, next, s, thread);
      prefetch_operands<kK>(args, next, thread);
    }
    commit_copies();
  }

  __device__ __forceinline__ void run(const Item& item, Item& next) const {
    wait_copies<0>();
    __syncthreads();
    if (threadIdx.x == 0) find_next<X::kColumns>(args.chunk, item, pair_after(item), next);
    make_sums(item);
    finish_tiles<kType>(args, item, s, thread_index());
    __syncthreads();
    finish(item, next);
  }

  // The first of every gridDim.x-th pair, from one on, that another kernel left.
  __device__ __forceinline__ int64_t pair_left_from(int64_t pair) const {
    const int64_t end = chunks_in_window(args.chunk) * (args.chunk.problem.num_value_heads / args.chunk.problem.group);
    while (pair < end) {
      constexpr int kAtOnce = 8;  // none may be left: then nothing is done but wait for these
      uint32_t left[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = pair + i * int64_t{gridDim.x};
        left[i] = at < end ? args.left[at] : 1;
      }
      for (int i = 0; i < kAtOnce; ++i, pair += gridDim.x) {
        if (left[i] != 0) return pair;
      }
    }
    return pair;
  }

  // What a block takes, and then after an item.
  __device__ __forceinline__ int64_t pair_before_all() const {
    return args.left != nullptr ? pair_left_from(blockIdx.x) : blockIdx.x;
  }
  __device__ __forceinline__ int64_t pair_after(const Item& item) const {
    if (args.left == nullptr || !item.last) return item.pair + gridDim.x;
    return pair_left_from(item.pair + gridDim.x);
  }

  __device__ __forceinline__ void run_all() const {
    if (threadIdx.x == 0) first_item<X::kColumns>(args.chunk, pair_before_all(), s.items[0]);
    __syncthreads();
    if (s.items[0].span.sequence < 0) return;
    const int thread = thread_index();
    load_state(args, s.items[0], s, thread);
    load_values(args, s.items[0], s, thread);
    load_columns(args, s.items[0], s, thread);
    commit_copies();
    for (int turn = 0; s.items[turn].span.sequence >= 0; turn ^= 1) run(s.items[turn], s.items[turn ^ 1]);
  }
};

// Two blocks of K = 128 on a multiprocessor of 228 KB, each with 1 KB of the system's.
static_assert(sizeof(Shared<128>) <= (228 / 2 - 1) * 1024);

template <DType kType, int kK>
__global__ void __launch_bounds__(Shape<kK>::kThreads, Shape<kK>::kBlocksOfSM)
    channel_gradients_kernel(const __grid_constant__ GradientArgs args) {
  wait_for_previous_kernels();
  Gradients<kType, kK>{args, dynamic_shared<Shared<kK>>()}.run_all();
}

}  // namespace

template <DType kType>
void launch_gradients_per_channel(const GradientArgs& args, int padded_k, int64_t blocks, const Context& context) {
  with_padded_k(padded_k, [&]<int kK>() {
    launch<channel_gradients_kernel<kType, kK>>(
        "delta_rule chunk_16bit gradients per channel", context,
        {static_cast<unsigned>(blocks), Shape<kK>::kThreads, sizeof(Shared<kK>), true}, args);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
