// The forward's chain (kernel.cuh) with partners that make no outputs: they keep the states.
#pragma once

#include <algorithm>

#include "cuda/ttt_linear/chunk_chain/backward.cuh"
#include "cuda/ttt_linear/chunk_chain/kernel.cuh"

namespace fastweight::cuda::ttt {
namespace {

// Mini-batches and buffers go round as in run_partner: the state of mini-batch m - 1 is kept while the chain is at m.
template <DType kType, int kD, bool kFull>
__device__ __forceinline__ void run_keeper(const ChunkArgs& args, const SequenceSpan& span, int64_t sequence, int head,
                                           const Lane& at, int threads, ChainShared<kD>& shared) {
  constexpr int kStages = ChainShared<kD>::kStages;
  const DeviceProblem& p = args.problem;
  const Signals signals{threads};
  ChunkLoader<kD, kTileRows, kFull ? 2 * kD : 0, false> loader(args, span, head,
                                                               static_cast<int>(threadIdx.x) - threads, threads);
#pragma unroll 1
  for (int i = 0; i < kStages - 2; ++i) {
    loader.next(span.length - i * kTileRows, shared.stages[i]);
    commit_copies();
  }
  const Columns<kFull> columns(p, head, at);
  const PartnerWarp<kType, kD, kFull> warp{columns, at};
  int64_t number = first_mini_batch(p.sequences, span, sequence, kTileRows) * p.num_heads + head;
  wait_copies<kStages - 3>();
  int turn = 0;
  signals.wait_for_chain(turn++);  // mini-batch 0 has arrived

  int stage = 0, before = kStages - 1, free = kStages - 2;
  WarpExchange<kD>*chain = &shared.exchange[0][at.warp], *chain_before = &shared.exchange[1][at.warp];
  for (int64_t left = span.length; left > -2 * kTileRows; left -= kTileRows) {
    loader.next(left - (kStages - 2) * kTileRows, shared.stages[free]);
    commit_copies();
    warp.put_residuals(shared.stages[stage], chain);
    if (left < span.length && left > -kTileRows) {
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

template <DType kType, int kD, bool kFull>
__global__ void __launch_bounds__(4 * kD, kBlocks<kD>)
    keep_states_kernel(const __grid_constant__ ChunkArgs args, int64_t heads) {
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
      run_keeper<kType, kD, kFull>(args, span, sequence, head, at, threads, shared);
    } else {
      run_chain<kType, kD, kFull>(args, span, sequence, head, at, threads, shared);
    }
  }
}

}  // namespace

template <DType kType>
void launch_keep_states(const ChainConfig& config, const ChunkArgs& args, const Context& context) {
  const int64_t heads = args.problem.sequences.count * args.problem.num_heads;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(heads, 1 << 30)),
                          static_cast<unsigned>(config.threads), config.shared_bytes};
  constexpr const char* kName = "ttt_linear chunk_chain states";
  if (config.padded_dim > 64 && config.full) {
    launch<keep_states_kernel<kType, 128, true>>(kName, context, shape, args, heads);
  } else if (config.padded_dim > 64) {
    launch<keep_states_kernel<kType, 128, false>>(kName, context, shape, args, heads);
  } else if (config.full) {
    launch<keep_states_kernel<kType, 64, true>>(kName, context, shape, args, heads);
  } else {
    launch<keep_states_kernel<kType, 64, false>>(kName, context, shape, args, heads);
  }
}

}  // namespace fastweight::cuda::ttt
