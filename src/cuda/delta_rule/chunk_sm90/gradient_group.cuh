// A warpgroup of the gradients with one decay per head or none (gradients.cuh).
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_pairs.cuh"
#include "cuda/delta_rule/chunk_sm90/gradient_rows.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// Among the threads of a warpgroup, and among both; finish_head has barriers 1 and 2.
__device__ __forceinline__ void half_barrier(int group) {
  group == 0 ? named_barrier<3>(kGroupThreads) : named_barrier<4>(kGroupThreads);
}
enum { kWritesReady = 5, kPairsReady, kKeysReady };

// kGrouped: dq and dk are sums over the items of a key head, in registers. They leave no room for products beside those
// that come before, which they then follow; nor does one warpgroup alone, whose sums of step 2 are twice as wide.
template <DType kType, class Block, bool kGrouped>
struct GradientGroup {
  static constexpr int kWidth = Block::kWidth, kWorkers = Block::kWorkers, kChannels = Block::kChannels;
  static constexpr int kValueSteps = Block::kColumns / 16;
  static constexpr bool kFollows = kGrouped || Block::kWorkGroups == 1;
  using OwnPairs = GradientPairs<kType, Block, kFollows>;
  using PairFactors = typename OwnPairs::PairFactors;
  static constexpr int kPairBlocks = OwnPairs::kPairBlocks;
  using Channels = OwnChannels<Block>;
  using ChannelRows = OwnRows<Block, !kGrouped>;
  using Keys = typename Block::Keys;
  using StatesTile = typename Block::StatesTile;
  using WrittenTile = typename Block::WrittenTile;
  using Pairs = typename Block::Pairs;
  using Rows = typename Block::Rows;
  const GradientArgs& args;
  const GradientMaps& maps;
  typename Block::Shared& s;
  int group, warp, lane;  // the warp within the warpgroup
  int thread;             // of both

  // After which nothing is known of the thread's numbers: what is computed from them is computed where it is needed, not
  // before the loop and kept. Registers are short.
  __device__ __forceinline__ void forget() {
    lane = opaque_below<kWarpSize>(lane);
    thread = opaque_below<kWorkers>(thread);
    const int at = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
    group = at / 4;
    warp = at % 4;
  }

  __device__ __forceinline__ OwnPairs own_pairs() const { return {args, s, group, warp, lane}; }

  __device__ __forceinline__ void release(TransactionBarrier& free) const {
    __syncwarp();
    if (lane == 0) free.arrive();
  }

  // Y . v over the warpgroup's value columns, of the warp's tokens.
  __device__ __forceinline__ void dot_values(float* yv) const {
    const ValueTile v(s.v + group * ValueTile::kBytes);
    const WrittenTile Y(s.Y);
    float dot[2] = {0, 0};
#pragma unroll 1  // else ptxas has the products before it wait for what it loads
    for (int m = 0; m < kGroupColumns / 16; ++m) {
      uint32_t x[4], y[4];
      v.load_a(16 * warp, m, lane, x);
      Y.load_c_transposed(kGroupColumns * group + 16 * m, warp, lane, y);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 left = unpack<kType>(x[e]), right = unpack<kType>(y[e]);
        dot[e % 2] = fmaf(left.y, right.y, fmaf(left.x, right.x, dot[e % 2]));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_over_lanes<4>(dot[half]);
      if (lane % 4 == 0) yv[16 * warp + lane / 4 + 8 * half] = sum;
    }
  }

  // What does not need R, and runs beside step 1 unless kFollows.
  struct Early {
    PairFactors factors;
    Pairs kk;
    Rows dk;
  };

  __device__ __forceinline__ void multiply_keys(const Keys& k, Pairs& kk) const {
#pragma unroll
    for (int m = 0; m < kKeySteps<kWidth>; ++m) {
      wgmma<kType, Block::kPairColumns>(kk, k.along_rows(0, m), k.along_rows(group * Block::kPairColumns, m), m > 0);
    }
  }

  // Y S^T.
  __device__ __forceinline__ void multiply_writes(Rows& dk) const {
    WrittenTile Y(s.Y);
    // Else its descriptors are kept for dA, and as uniform registers are short, ptxas has all addresses in others.
    Y.start = static_cast<uint32_t>(opaque(static_cast<int>(Y.start)));
    const StatesTile S(s.S);
#pragma unroll
    for (int m = 0; m < kValueSteps; ++m) {
      wgmma<kType, kChannels>(dk, Y.along_columns(0, m), S.along_columns(group * kChannels, m), m > 0);
    }
  }

  // Step 1.
  __device__ __forceinline__ void writes(const Keys& k, const GradientNumbers& numbers, float* yv, Early& early) const {
    const StatesTile S(s.S);
    const LowerTile J(s.J);
    const WrittenTile R(s.R);
    TokenSums X;
    wgmma_fence(X);
#pragma unroll
    for (int m = 0; m < kKeySteps<kWidth>; ++m) {
      wgmma<kType, kChunkRows>(X, S.along_rows(kGroupColumns * group, m), k.along_rows(0, m), m > 0);
    }
    wgmma_commit();
    dot_values(yv);
    Values values;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      values.load(m, ValueTile(s.v + group * ValueTile::kBytes), numbers.token, warp, lane);
    }
    if constexpr (kFollows) {
      wgmma_wait<0>(X);
    } else {
      wgmma_fence(early.kk);
      multiply_keys(k, early.kk);
      wgmma_commit();
      wgmma_wait<1>(X);
    }
    Fragments<kTokenSteps> bD;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) values.template correct<kType>(m, X, bD[m]);
    wgmma_fence(X, bD);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, bD[m], J.along_rows(0, m), m > 0);
    wgmma_commit();
    own_pairs().load_row_factors(numbers, early.factors);
    if constexpr (kFollows) {
      wgmma_wait<0>(X);
    } else {
#pragma unroll
      for (int block = 0; block < kPairBlocks; ++block) own_pairs().make_pair_factors(numbers, block, early.factors);
      wgmma_fence(early.dk);
      multiply_writes(early.dk);
      wgmma_commit();
      wgmma_wait<1>(X, early.kk);
    }
    release(s.first_free);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      uint32_t a[4];
      pack_a<kType>(X[2 * m], X[2 * m + 1], a);
      R.store_a(kGroupColumns * group + 16 * warp, m, lane, a);
    }
  }

  // <S, G>: a row of a panel, or half of one, for each thread.
  __device__ __forceinline__ void dot_states() const {
    constexpr int kBytes = StatesTile::kBytes / kWorkers;
    float sum = 0;
#pragma unroll 4  // not more: the code of an item is long
    for (int at = 0; at < kBytes; at += 16) {
      const uint32_t offset = swizzled(Swizzle::k128, static_cast<uint32_t>(thread * kBytes + at));
      const uint4 x = *reinterpret_cast<const uint4*>(s.S + offset), y = *reinterpret_cast<const uint4*>(s.G + offset);
      const uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack<kType>(left[i]), b = unpack<kType>(right[i]);
        sum = fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
      }
    }
    sum = sum_over_lanes<kWarpSize>(sum);
    if (lane == 0) s.sums.state_dot[thread / kWarpSize] = sum;
  }

  // What the norm of q or k takes from its gradient. `along` is x . dx of the lane's two rows.
  __device__ __forceinline__ void take_along(const Channels& own, const ChannelRows& rows, const float* rstd,
                                             float2 along, Rows& sums) const {
    const int i = 16 * warp + lane / 4;
    const float factor[2] = {rstd[i] * rstd[i] * along.x, rstd[i + 8] * rstd[i + 8] * along.y};
#pragma unroll
    for (int m = 0; m < kChannels / 16; ++m) {
      uint32_t x[4];
      rows.get(own, m, warp, lane, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float* sum = &sums[2 * m + e / 2][e % 2 * 2];
        const float2 y = unpack<kType>(x[e]);
        sum[0] = fmaf(-factor[e % 2], y.x, sum[0]);
        sum[1] = fmaf(-factor[e % 2], y.y, sum[1]);
      }
    }
  }

  // dq or dk to its channels, in the place of q or k.
  __device__ __forceinline__ void leave(const Channels& own, const Rows& sums) const {
#pragma unroll
    for (int m = 0; m < kChannels / 16; ++m) {
      uint32_t x[4];
      pack_a<kType>(sums[2 * m], sums[2 * m + 1], x);
      own.store(m, warp, lane, x);
    }
  }

  __device__ __forceinline__ void store_keys(const Item& item, const GradientNumbers& numbers, const uint32_t& keys,
                                             const ChannelRows& q_rows, const ChannelRows& k_rows, const Along& along,
                                             Rows& dq, Rows& dk) const {
    const Channels q(s.q[keys % 2], group), k(s.k[keys % 2], group);
    if (args.chunk.problem.qk_l2norm) {
      take_along(q, q_rows, numbers.row + chunk_16bit::kRstdOfQ * kChunkRows, along.q, dq);
      take_along(k, k_rows, numbers.row + chunk_16bit::kRstdOfK * kChunkRows, along.k, dk);
    }
    half_barrier(group);  // all warps have waited for the products that read the channels
    leave(q, dq);
    leave(k, dk);
    fence_async_proxy();
    if constexpr (Block::kSharesPanel) {
      named_barrier<kKeysReady>(kWorkers);
      if (thread != 0) return;
    } else {
      half_barrier(group);
      if (thread % kGroupThreads != 0) return;
    }
    const RowsPlace at = rows_of(item, item.key_head);
    const int column = Block::kSharesPanel ? 0 : group * PanelOfTokens::kPanelColumns;
    if (args.dq.present()) store_box(maps.dq, {column, at.head, at.missing, at.end, at.batch}, q.tile.panel(0));
    if (args.dk.present()) store_box(maps.dk, {column, at.head, at.missing, at.end, at.batch}, k.tile.panel(0));
    commit_stores();
  }

  // By the thread that had dq and dk of the key head before stored: k and q of the one after this may take their place.
  // It does not wait when it has started the copies, which take longer than step 1: its warpgroup would wait for it.
  __device__ __forceinline__ void end_storing(const Item& item, const uint32_t& keys) const {
    if (!item.first || keys == 0 || thread % (Block::kSharesPanel ? kWorkers : kGroupThreads) != 0) return;
    wait_stores_read<0>();
    s.keys_free[(keys - 1) % 2].arrive();
  }

  struct GroupSums {
    Rows q, k;
  };
  __device__ __forceinline__ static void add(bool first, const Rows& x, Rows& sum) {
#pragma unroll
    for (int n = 0; n < kChannels / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = first ? x[n][e] : sum[n][e] + x[n][e];
    }
  }

  // Steps 2 and 3.
  __device__ __forceinline__ void gradients(const Item& item, const GradientNumbers& numbers, const uint32_t& keys,
                                            uint32_t turn, Early& early, Along& along, GroupSums& sums) {
    const Keys k(s.k[keys % 2]), q(s.q[keys % 2]);
    const typename Block::ValuesTile d_o(s.d_o);
    const Channels my_k(s.k[keys % 2], group), my_q(s.q[keys % 2], group);
    const StatesTile S(s.S), G(s.G);
    const WrittenTile Y(s.Y), R(s.R);
    const LowerTile P(s.P), A(s.A);
    const int channel = group * kChannels, column = group * Block::kPairColumns;
    PairFactors& factors = early.factors;
    Pairs dP, dA, &kk = early.kk;
    Rows dq, &dk = early.dk, x;
    if constexpr (!kFollows) {
#pragma unroll
      for (int block = 0; block < kPairBlocks; ++block) {
        P.load_a(16 * warp, kPairBlocks * group + block, lane, factors.sP[block]);
      }
    }
    wgmma_fence(dP, dA);
#pragma unroll
    for (int m = 0; m < kValueSteps; ++m) {
      wgmma<kType, Block::kPairColumns>(dP, d_o.along_rows(0, m), R.along_columns(column, m), m > 0);
    }
#pragma unroll
    for (int m = 0; m < kValueSteps; ++m) {
      wgmma<kType, Block::kPairColumns>(dA, Y.along_columns(0, m), R.along_columns(column, m), m > 0);
    }
    if constexpr (kFollows) {
      wgmma_fence(kk);
      multiply_keys(k, kk);
    }
    wgmma_commit();
    const auto read_states = [&] {
      wgmma_fence(dq, x);
#pragma unroll
      for (int m = 0; m < kValueSteps; ++m) {
        wgmma<kType, kChannels>(dq, d_o.along_rows(0, m), S.along_columns(channel, m), m > 0);
      }
      if constexpr (kFollows) {
        wgmma_fence(dk);
        multiply_writes(dk);
      }
#pragma unroll
      for (int m = 0; m < kValueSteps; ++m) {
        wgmma<kType, kChannels>(x, R.along_columns(0, m), G.along_columns(channel, m), m > 0);
      }
      wgmma_commit();
    };
    // Until then they are read, and the next ones cannot come.
    const auto end_reading = [&] {
      if (args.chunk.problem.gate != Gate::kNone) dot_states();
      wgmma_wait<0>(dq, dk, x);
      release(s.states_free);
    };
    typename OwnPairs::PairSums of_pairs;
    if constexpr (kFollows) {
      wgmma_wait<0>(dP, dA, kk);
      own_pairs().template make_pairs<0, kPairBlocks>(numbers, factors, dP, dA, kk, of_pairs);
      s.sums_free.wait(turn % 2 ^ 1);
      own_pairs().leave_sums(of_pairs);
      read_states();
      end_reading();
    } else {
      read_states();
      wgmma_wait<1>(dP, dA, dk);
      own_pairs().template make_pairs<0, 1>(numbers, factors, dP, dA, kk, of_pairs);
      s.sums_free.wait(turn % 2 ^ 1);
      end_reading();
      own_pairs().template make_pairs<1, kPairBlocks>(numbers, factors, dP, dA, kk, of_pairs);
      own_pairs().leave_sums(of_pairs);
    }
    forget();
    ChannelRows q_rows, k_rows;
    const auto scale = [&](const Channels& own, const ChannelRows& rows, TokenFactor factor, float sign, Rows& of,
                           float* dots) {
      scale_and_dot<kType>(own, rows, numbers.token + factor * kChunkRows, sign, warp, lane, of, dots);
    };
    q_rows.load(my_q, warp, lane);
    k_rows.load(my_k, warp, lane);
    scale(my_q, q_rows, kOnQueryRead, 1.0f, dq, s.sums.a_q.of[group]);
    scale(my_k, k_rows, kOnKeyRead, -1.0f, dk, s.sums.a_k.of[group]);
    scale(my_k, k_rows, kOnWrite, 1.0f, x, s.sums.b.of[group]);
    const float* beta = numbers.token + kOnValue * kChunkRows + 16 * warp + lane / 4;
    const float beta_of[2] = {beta[0], beta[8]};
#pragma unroll
    for (int n = 0; n < kChannels / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] = fmaf(beta_of[e / 2], dk[n][e], x[n][e]);
    }
    release(s.sums_filled);
    fence_async_proxy();
    named_barrier<kPairsReady>(kWorkers);
    forget();
    wgmma_fence(dq, dk);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChannels>(dq, P.along_rows(0, m), k.along_columns(channel, m));
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChannels>(dk, A.along_rows(0, m), k.along_columns(channel, m));
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m)
      wgmma<kType, kChannels>(dk, P.along_columns(0, m), q.along_columns(channel, m));
    wgmma_commit();
    if (args.chunk.problem.qk_l2norm) along.add(s.sums, numbers, 16 * warp + lane / 4, item.first);
    wgmma_wait<0>(dq, dk);
    release(s.pairs_free);
    if constexpr (kGrouped) {
      const bool first = item.first;
      add(first, dq, sums.q);
      add(first, dk, sums.k);
    }
    if (item.last) {
      forget();
      store_keys(item, numbers, keys, q_rows, k_rows, along, kGrouped ? sums.q : dq, kGrouped ? sums.k : dk);
    }
  }

  __device__ __forceinline__ void run() {
    Along along;
    GroupSums sums = {};
    for (uint32_t turn = 0;; ++turn) {
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      const uint32_t& keys = s.keys[turn % 2];
      const GradientNumbers& numbers = s.numbers[turn % 2];
      if (item.span.sequence < 0) {
        wait_stores_read<0>();
        return;
      }
      if (item.first) s.keys_filled[keys % 2].wait(keys / 2 % 2);
      s.first_filled.wait(turn % 2);
      forget();
      Early early;
      writes(Keys(s.k[keys % 2]), numbers, s.sums.yv[turn % 2].of[group], early);
      fence_async_proxy();
      named_barrier<kWritesReady>(kWorkers);
      forget();
      end_storing(item, keys);
      s.second_filled.wait(turn % 2);
      s.third_filled.wait(turn % 2);
      gradients(item, numbers, keys, turn, early, along, sums);
      release(s.numbers_free[turn % 2]);
    }
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
