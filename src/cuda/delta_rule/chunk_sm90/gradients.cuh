// The gradients of every chunk on Hopper, for one decay per head or none and K <= 128. See ../chunk_16bit/gradient.cuh for
// the equations, and ../chunk_16bit/gradients.cuh for how norms and sums of M go into them: this kernel computes the same.
//
// A block takes one pair of a chunk and a key head after the other, of each the value heads of the group, and of a head up
// to 128 value columns at a time. Such a range goes through the steps as if it were a head: all that they give are sums
// over value columns, so that dq and dk add up over ranges and heads, and dg and dbeta over the ranges of a head. Two warps
// bring the operands of the next range by TMA while two warpgroups work on one, or with K, V <= 64 one:
//
//     1   a warpgroup has 64 value columns:      X = S^T k^T,   R^T = bD^T J^T,   bD^T = beta (v^T - e X)
//     2   it has 32 columns of pairs, or 64:     dP = d_o R^T,  dA = -Y R^T,  k k^T
//         with all decays and norms they become operands, P' in the place of sP, and A' + A'^T; and sums of M
//     3   it has 64 channels or, of K <= 64, 32: dq = scale e (d_o S^T) + P' k
//                                                dk = -beta e (Y S^T) + w (R G^T) + (A' + A'^T) k + P'^T q
//
// Where registers allow, products run while threads work on what others gave: k k^T and Y S^T, which need no R, beside
// step 1, and the others of step 3 with states beside step 2. When they have ended, half of step 2 is left, for the
// next states to come in. Two more warps make dg and dbeta of the sums that the warpgroups leave. dq and dk leave through
// the tiles of q and k: a warpgroup writes only the channels that it alone reads in step 3.
//
// With K, V <= 64 two blocks are on a multiprocessor: a warpgroup alone has what it waits for filled by the other block's.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/gradient_group.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// The two warps of the tokens: dg and dbeta, by a thread for each.
template <class Block, bool kRanges>
struct TokenGroup {
  const GradientArgs& args;
  typename Block::Shared& s;
  int thread, lane;

  // Adds the item's share to `head`, what the ranges before it have, and ends the head with its last one.
  __device__ __forceinline__ void finish(const Item& item, const GradientNumbers& numbers, uint32_t turn,
                                         chunk_16bit::TokenSums& head) const {
    const auto& sums = s.sums;
    const float* beta = numbers.token + kOnValue * kChunkRows;
    chunk_16bit::TokenSums token;
    token.dbeta = sums.yv[turn % 2].at(thread) + reading(sums, thread);
    if (args.chunk.problem.gate != Gate::kNone) {
      float states = 0;
      for (float one : sums.state_dot) states += one;
      const float last = numbers.row[chunk_16bit::kGamma * kChunkRows + kChunkRows - 1];
      token.dg =
          chunk_16bit::gate_gradient(
              sums.row_below.at(thread), sums.within[thread], [&](int row, int j) { return sums.columns[row][j]; },
              [&](int i) { return sums.a_q.at(i) + beta[i] * sums.a_k.at(i); }, [&](int j) { return sums.b.at(j); },
              thread, lane) +
          exp2_approx(last) * states;
    }
    if constexpr (kRanges) {
      if (!item.opens) token.dbeta += head.dbeta, token.dg += head.dg;
      head = token;
      if (!item.closes) return;
    }
    chunk_16bit::finish_head(args, item, beta[thread], s.halves, thread, lane, token);
  }

  __device__ __forceinline__ void run() const {
    chunk_16bit::TokenSums head;
    for (uint32_t turn = 0;; ++turn) {
      s.numbers_filled[turn % 2].wait(turn / 2 % 2);
      const Item& item = s.items[turn % 2];
      if (item.span.sequence < 0) return;
      s.sums_filled.wait(turn % 2);
      finish(item, s.numbers[turn % 2], turn, head);
      __syncwarp();
      if (lane == 0) {
        s.sums_free.arrive();
        s.numbers_free[turn % 2].arrive();
      }
    }
  }
};

template <DType kType, class Block, bool kGrouped, bool kRanges>
__global__ void __launch_bounds__(Block::kThreads, Block::kBlocksOnOne)
    gradients_kernel(const __grid_constant__ GradientArgs args, const __grid_constant__ GradientMaps maps) {
  auto& s = aligned_shared<typename Block::Shared>();
  constexpr int kWarps = Block::kWorkers / kWarpSize, kTokenWarps = kChunkRows / kWarpSize;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      s.named[i].init(1);
      s.numbers_filled[i].init(1);
      s.numbers_free[i].init(kWarps + kTokenWarps + 1);
      s.keys_filled[i].init(1);
      s.keys_free[i].init(Block::kSharesPanel ? 1 : Block::kWorkGroups);
    }
    s.first_filled.init(1);
    s.second_filled.init(1);
    s.third_filled.init(1);
    s.first_free.init(kWarps);
    s.states_free.init(kWarps);
    s.pairs_free.init(kWarps);
    s.sums_filled.init(kWarps);
    s.sums_free.init(kTokenWarps);
    fence_barrier_init();
  }
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == Block::kWorkers) {
    for (const TensorMap& map : maps.lower.rows) prefetch_map(map);
    for (const TensorMap* map : {&maps.v, &maps.S, &maps.Y, &maps.k, &maps.q, &maps.d_o, &maps.G}) prefetch_map(*map);
  }
  __syncthreads();
  const int warp = uniform_warp(), lane = thread % kWarpSize;
  if (warp >= kWarps) {
    give_registers<Block::kOtherRegisters>();
    const int role = warp - kWarps;
    if (role == kTokenWarps && elect_one()) Bringer<Block, kRanges>{args, maps, s}.name_items();
    if (role == kTokenWarps + 1 && elect_one()) Bringer<Block, kRanges>{args, maps, s}.follow_items();
    if (role < kTokenWarps) TokenGroup<Block, kRanges>{args, s, thread - Block::kWorkers, lane}.run();
  } else {
    take_registers<Block::kWorkRegisters>();
    GradientGroup<kType, Block, kGrouped>{args, maps, s, warp / 4, warp % 4, lane, thread}.run();
  }
  __syncthreads();  // a warp that waits for the kernel before keeps its other lanes from working
  wait_for_previous_kernels();
}

}  // namespace

template <DType kType>
void launch_gradients(const GradientArgs& args, const GradientMaps& maps, int64_t blocks, const Context& context) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const auto of = [&]<class Block>() {
    const LaunchShape shape{static_cast<unsigned>(blocks), Block::kThreads, sizeof(typename Block::Shared), true};
    constexpr const char* kName = "delta_rule chunk_sm90 gradients";
    if constexpr (Block::kColumns == kMostGradientColumns) {
      if (p.head_dim_v > Block::kColumns) {
        return launch<gradients_kernel<kType, Block, true, true>>(kName, context, shape, args, maps);
      }
    }
    p.group > 1 ? launch<gradients_kernel<kType, Block, true, false>>(kName, context, shape, args, maps)
                : launch<gradients_kernel<kType, Block, false, false>>(kName, context, shape, args, maps);
  };
  const int K = padded_k(p.head_dim_k);
  if (K == 128) {
    of.template operator()<GradientBlock<128, 2>>();
  } else {
    gradient_columns(K, p.head_dim_v) == 64 ? of.template operator()<GradientBlock<64, 1>>()
                                            : of.template operator()<GradientBlock<64, 2>>();
  }
}

}  // namespace fastweight::cuda::chunk_sm90
