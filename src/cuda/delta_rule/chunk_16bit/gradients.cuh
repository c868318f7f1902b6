// The gradients of every chunk with no decay or one per head. See gradient.cuh for the equations.
//
// A block per (chunk, key head); it takes the value heads of the group, and of each a range of value columns at a time,
// whose contributions add up. One such range:
//
//     1   R^T = bD^T J^T, transposed as in the scans: a warp has 16 value columns
//     2   dP and dA, in blocks of 16 x 16 dealt to the warps; with all decays and norms they become operands, P' and A'
//     3   a warp has 16 tokens and a half of the channels (of 64 channels all):
//             dq = scale e (d_o S^T) + P' k,     dk = -beta e (Y S^T) + w (R G^T) + (A' + A'^T) k + P'^T q
//
// q and k stay as they are. With the factors of the norms, rows of P' and A' have both rstd_i and rstd_j, so that dq and
// dk come out as rstd dy of y = rstd x; then dx = rstd dy - rstd^2 x (x . rstd dy). These inner products, dbeta and dg
// are sums of what step 3 gives before the products of step 2 are added, and of rows and columns of M:
//
//     q . dq = a^q + row sums of M^P,     k . dk = beta (a^k + row sums of M^A) + b + column sums of M^P + beta M^A
//     dbeta  = Y . v + a^k + row sums of M^A                               M^A without beta
//
// The buffers of S, v and J are used again for G, d_o, q and P': two blocks of K = V = 128 fit a multiprocessor of Hopper,
// one of which computes while the other waits.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_tokens.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// Two blocks of K = 128 on a multiprocessor of 228 KB, each with 1 KB of the system's.
static_assert(sizeof(Shared<128>) <= (228 / 2 - 1) * 1024);

template <DType kType, int kK>
struct Gradients {
  using X = Shape<kK>;

  const GradientArgs& args;
  Shared<kK>& s;
  int warp, lane, thread;
  TokenNumbers numbers = {};  // of the item that is on its way; of the first 64 threads

  // A barrier after which nothing is known of a thread's number: what is computed from it is computed where it is
  // needed, not in an earlier step and kept. Registers are short.
  __device__ __forceinline__ void step() {
    __syncthreads();
    lane = opaque_below<kWarpSize>(lane);
    thread = opaque_below<X::kThreads>(thread);
  }
  __device__ __forceinline__ int block() const { return warp % kBlocks; }                   // of 16 tokens
  __device__ __forceinline__ int group() const { return warp / kBlocks; }                   // of channels
  __device__ __forceinline__ int channel() const { return group() * (X::kChannels / 16); }  // the first, in 16s
  __device__ __forceinline__ int token() const { return thread; }                           // of the numbers
  __device__ __forceinline__ bool has_token() const { return thread < kChunkRows; }

  // The lane's two rows with a factor for each.
  template <class Factor>
  __device__ __forceinline__ RowPair rows(const Factor& factor) const {
    const int i = 16 * block() + lane / 4;
    return {i, make_float2(factor(i), factor(i + 8))};
  }

  // Steps 1 and 2: afterwards d_o is where v was, and P' where J was.
  __device__ __forceinline__ void pair_gradients(const Item& item, TokenSums& sums) {
    uint32_t bD[kBlocks][4];
    const bool has_columns = warp < X::kColumns / 16;
    if (has_columns) residuals<kType>(s, warp, lane, bD);
#pragma unroll
    for (int at = 0; at < 2 * kBlocks; at += X::kWarps) {
      dot_values<kType>(s, (warp + at) % kBlocks, (warp + at) / kBlocks, lane);
    }
    step();
    load_value_rows<X::kThreads>(s.value_rows(), args.d_o, args.vector_d_o, item, args.chunk.problem.head_dim_v,
                                 thread);
    commit_copies();
    if (has_token()) sums.yv = s.yv[0][token()] + s.yv[1][token()];
    if (has_columns) writes<kType>(s, warp, lane, bD);
    wait_copies<0>();
    step();
#pragma unroll 1
    for (int at = warp; at < 2 * kTaskLists; at += X::kWarps) {
      const uint64_t tasks = at < kTaskLists ? kFirstTasks : kSecondTasks;
      const PairTask task = PairTask::of(static_cast<uint32_t>(tasks >> 8 * (at % kTaskLists)));
      if (task.kind == kPairsOfP) pairs_of_P<kType>(args, item, s, task, lane);
      if (task.kind == kPairsOfA) pairs_of_A<kType>(s, task, lane);
    }
  }

  // Products with the pairs of tokens: rows of A' k and columns of A'^T k.
  __device__ __forceinline__ void add_pairs_of_A(Rows<kK>& dk) const {
    const LowerBlocks A = s.A;
#pragma unroll 1
    for (int m = 0; m < kBlocks; ++m) {
      uint32_t a[4];
      if (m <= block()) {
        A.load_a(16 * block(), m, lane, a);
        add_rows<kType, kK>(a, s.keys(), m, channel(), lane, dk);
      }
      if (m >= block()) {
        A.load_c_transposed(16 * m, block(), lane, a);
        add_rows<kType, kK>(a, s.keys(), m, channel(), lane, dk);
      }
    }
  }

  // P' k and P'^T q.
  __device__ __forceinline__ void add_pairs_of_P(Rows<kK>& dq, Rows<kK>& dk) const {
    const LowerBlocks P = s.P;
#pragma unroll 1
    for (int m = 0; m < kBlocks; ++m) {
      uint32_t a[4];
      if (m <= block()) {
        P.load_a(16 * block(), m, lane, a);
        add_rows<kType, kK>(a, s.keys(), m, channel(), lane, dq);
      }
      if (m >= block()) {
        P.load_c_transposed(16 * m, block(), lane, a);
        add_rows<kType, kK>(a, s.queries(), m, channel(), lane, dk);
      }
    }
  }

  // Adds what the item has, and stores the sum after the last one. For the norm, along_of(i) is the item's share of x . dx
  // of row i; where there are several items, the first 64 threads have the sum of the shares and publish it in `along`.
  template <class AlongOf>
  __device__ __forceinline__ void finish_rows(const DeviceTensor& out, bool vectors, const Item& item, int which,
                                              const SharedTile<kK>& tile, const float* rstd, float* along, float sum,
                                              const AlongOf& along_of, Rows<kK>& x) {
    const bool norm = args.chunk.problem.qk_l2norm, only = item.first && item.last;
    if (norm && !only) {
      if (has_token()) along[token()] = sum;
      step();
    }
    carry<kK>(args, item, which, thread, x);
    if (!item.last || !out.present()) return;
    const int i = 16 * block() + lane / 4;
    if (norm) {
      const RowPair own = rows([&](int j) { return rstd[j] * rstd[j] * (only ? along_of(j) : along[j]); });
      subtract_along<kType, kK>(tile, own, channel(), lane, x);
    }
    store_key_rows<kType, kK>(out, vectors, item, args.chunk.problem.head_dim_k, i, channel(), lane, x);
  }

  // The item's share of q . dq and k . dk of a row, and of dbeta but for Y . v.
  __device__ __forceinline__ float along_q(int i) const { return s.row_of_P[i] + s.a_q[0][i] + s.a_q[1][i]; }
  __device__ __forceinline__ float reading(int i) const {
    return s.a_k[0][i] + s.a_k[1][i] + s.row_of_A[0][i] + s.row_of_A[1][i];
  }
  __device__ __forceinline__ float along_k(int i) const {
    float writing = s.b[0][i] + s.b[1][i];
    for (int row = i / 16; row < kBlocks; ++row) {
      writing += s.columns[kPairsOfP][row][i] + s.columns[kPairsOfA][row][i];
    }
    return s.beta[i] * reading(i) + writing;
  }

  // Step 3.
  __device__ __forceinline__ void key_gradients(const Item& item, TokenSums& sums) {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    Rows<kK> dq = {}, dk = {};
    read_state<kType, kK>(s, block(), channel(), lane, dq, dk);
    step();
    load_key_rows<X::kThreads, kK>(args.chunk, p.q, item, s.queries(), thread);
    commit_copies();
    copy_rows<X::kColumns, X::kThreads>(s.state_rows(), args.G + (item.slot * args.padded_v + item.column) * kK, kK,
                                        args.padded_v - item.column, kK, thread);
    commit_copies();
    scale_and_dot<kType, kK>(s.keys(), rows([&](int i) { return -s.on_read[i]; }), channel(), lane, dk, s.a_k[group()]);
    const RowPair beta = rows([&](int i) { return s.beta[i]; });
#pragma unroll
    for (int n = 0; n < X::kChannels / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] *= e < 2 ? beta.factor.x : beta.factor.y;
    }
    add_pairs_of_A(dk);
    wait_copies<1>();
    step();
    scale_and_dot<kType, kK>(s.queries(), rows([&](int i) { return p.scale * exp2_approx(s.gamma[i]) * s.rstd_q[i]; }),
                             channel(), lane, dq, s.a_q[group()]);
    add_pairs_of_P(dq, dk);
    wait_copies<0>();
    step();
    if (has_token()) sums.along_q += along_q(token());
    finish_rows(
        args.dq, args.vector_dq, item, 0, s.queries(), s.rstd_q, s.row_of_P, sums.along_q,
        [&](int i) { return along_q(i); }, dq);
    add_writing(item, dk);
    if (thread == 0) s.items[&item == s.items].ready = is_ready(args, other(item));
    step();
    if (other(item).ready) load_operands(other(item));
    if (has_token()) {
      sums.dbeta += sums.yv + reading(token());
      sums.along_k += along_k(token());
    }
    finish_rows(
        args.dk, args.vector_dk, item, 1, s.keys(), s.rstd_k, s.row_of_A[0], sums.along_k,
        [&](int i) { return along_k(i); }, dk);
  }

  // dk += w (R G^T)
  __device__ __forceinline__ void add_writing(const Item& item, Rows<kK>& dk) const {
    Rows<kK> x = {};
#pragma unroll 2
    for (int m = 0; m < X::kColumns / 16; ++m) {
      uint32_t R[4];
      s.R_rows().load_c_transposed(16 * m, block(), lane, R);
      add_rows<kType, kK>(R, s.state_rows(), m, channel(), lane, x);
    }
    const float last = s.gamma[kChunkRows - 1];
    scale_and_dot<kType, kK>(s.keys(), rows([&](int j) { return exp2_approx(last - s.gamma[j]) * s.rstd_k[j]; }),
                             channel(), lane, x, s.b[group()]);
#pragma unroll
    for (int n = 0; n < X::kChannels / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] += x[n][e];
    }
    if (args.chunk.problem.gate != Gate::kNone) dot_states<kType>(args, item, s, warp, lane);
  }

  __device__ __forceinline__ const Item& other(const Item& item) const { return s.items[&item == s.items]; }

  // The item is on its way. Starts the copies of the next one.
  __device__ __forceinline__ void run(const Item& item, TokenSums& sums) {
    if (has_token()) store_numbers(numbers, s, thread);
    wait_copies<0>();
    step();
    const BackProgress& progress = args.progress;
    uint32_t claimed = 0;
    if (thread == 0 && item.last && progress.present()) claimed = claim(progress.counter);
    if (item.first) sums.along_q = sums.along_k = 0;
    if (item.opens) sums.dg = sums.dbeta = 0;
    pair_gradients(item, sums);
    if (thread == 0) {
      const int64_t pair = progress.present() ? pair_from_the_end(args.chunk, claimed) : item.pair + gridDim.x;
      find_next<X::kColumns>(args.chunk, item, pair, s.items[&item == s.items]);
    }
    key_gradients(item, sums);
    if (has_token()) {
      if (args.chunk.problem.gate != Gate::kNone) {
        float states = 0;
        for (int w = 0; w < X::kWarps; ++w) states += s.state_dot[w];
        sums.dg += gate_gradient(s, token(), lane) + exp2_approx(s.gamma[kChunkRows - 1]) * states;
      }
      // Both warps have read `within`, and no other does.
      auto* halves = reinterpret_cast<double*>(s.within);
      if (item.closes) finish_head(args, item, s.beta[token()], halves, token(), lane, sums);
    }
    step();
    const Item& next = other(item);
    if (next.span.sequence < 0) return;
    if (next.first) load_keys_of(next);
    if (!next.ready) {
      wait_until_ready(next);
      load_operands(next);
    }
  }

  __device__ __forceinline__ void wait_until_ready(const Item& item) {
    if (thread == 0) {
      while (!is_ready(args, item)) {
      }
    }
    step();
  }

  // Of an item that is ready.
  __device__ __forceinline__ void load_operands(const Item& item) {
    load_first(args, item, s, thread);
    commit_copies();
    if (has_token()) numbers = load_numbers(args.chunk.factors, item.factors, thread);
  }

  // The keys stay for all items of a key head.
  __device__ __forceinline__ void load_keys_of(const Item& item) const {
    load_key_rows<X::kThreads, kK>(args.chunk, args.chunk.problem.k, item, s.keys(), thread);
    commit_copies();
  }

  __device__ __forceinline__ void run_all() {
    if (!args.progress.present()) wait_for_previous_kernels();
    if (thread == 0) first_item<X::kColumns>(args.chunk, first_pair(args), s.items[0]);
    step();
    if (s.items[0].span.sequence < 0) return;
    load_keys_of(s.items[0]);
    wait_until_ready(s.items[0]);
    load_operands(s.items[0]);
    TokenSums sums;
    for (int turn = 0; s.items[turn].span.sequence >= 0; turn ^= 1) run(s.items[turn], sums);
  }
};

template <DType kType, int kK>
__global__ void __launch_bounds__(Shape<kK>::kThreads, kK == 256   ? 1
                                                       : kK == 128 ? 2
                                                                   : 4)
    gradients_kernel(const __grid_constant__ GradientArgs args) {
  // With BackProgress the scan back lets this kernel start when it has waited for all kernels before itself, and what it
  // leaves is taken as it comes; that it ends before this kernel does is for those after.
  Gradients<kType, kK>{args, dynamic_shared<Shared<kK>>(), uniform_warp(), static_cast<int>(threadIdx.x) % kWarpSize,
                       static_cast<int>(threadIdx.x)}
      .run_all();
  wait_for_previous_kernels();
}

}  // namespace

template <DType kType>
void launch_gradients_of(const GradientArgs& args, int padded_k, int64_t blocks, const Context& context) {
  with_padded_k(padded_k, [&]<int kK>() {
    launch<gradients_kernel<kType, kK>>("delta_rule chunk_16bit gradients", context,
                                        {static_cast<unsigned>(blocks), Shape<kK>::kThreads, sizeof(Shared<kK>), true},
                                        args);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
