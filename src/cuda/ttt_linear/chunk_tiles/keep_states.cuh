// The chain of the forward (kernel.cuh) without outputs: it keeps the state before every mini-batch.
#pragma once

#include "cuda/ttt_linear/chunk_tiles/kernel.cuh"

namespace fastweight::cuda::ttt {
namespace {

template <DType kType, int kD>
__device__ __forceinline__ void keep_state(const State<kD>& state, const Lane& at, int64_t number,
                                           const KeptTiles& kept) {
  auto* h = reinterpret_cast<uint32_t*>(kept.h(number) + KeptTiles::offset(kD, at.warp, 0)) + at.lane;
#pragma unroll
  for (int m = 0; m < kD / 16; ++m) {
    uint32_t b[4];
    state.template operand<kType>(m, b);
#pragma unroll
    for (int i = 0; i < 4; ++i) h[128 * m + 32 * i] = b[i];
  }
  if (at.g == 0) {
    *reinterpret_cast<float4*>(kept.c(number) + at.column) =
        make_float4(state.c[0], state.c[1], state.c[2], state.c[3]);
  }
}

template <DType kType, int kD, int kC>
__device__ __forceinline__ void keep_states(const ChunkArgs& args, int64_t sequence, int head, const KeptTiles& kept,
                                            TilesShared<kD, kC>& shared, Stage<kD, kC>& stage) {
  const DeviceProblem& p = args.problem;
  const Lane at(p.head_dim, threadIdx.x / kWarpSize);
  const SequenceSpan span = sequence_at(p.sequences, sequence);
  ChunkLoader<kD, kC, 0, false> loader(args, span, head, threadIdx.x, blockDim.x);
  const Columns<false> columns(p, head, at);
  State<kD> state;
  state.load(args, sequence, head, at);
  int64_t number = first_mini_batch(p.sequences, span, sequence, kC) * p.num_heads + head;
  for (int64_t left = span.length; left > 0; left -= kC, number += p.num_heads) {
    keep_state<kType>(state, at, number, kept);
    loader.next(left, stage);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    const int rows = static_cast<int>(min(left, int64_t{kC}));
    LaneRows<kC> z;
    read_state<kType, kD, kC>(stage.k(), 0, state, at, z);
    add_bias<kC>(state.c, z);
    put_statistics<kD, kC>(z, columns, at, shared.sums.inner);
    __syncthreads();
    float2 norms[kC / 8];
    get_norms<kD, kC>(shared.sums.inner, p, at, norms);
    put_inner_sums<kType>(stage, norms, columns, at, z, shared.sums.gradient);
    __syncthreads();
    float total[4];
    inner_gradients<kType>(stage, shared.sums.gradient, norms, p, columns, at, z, total);
    uint32_t n[kC / kTileRows][4];
#pragma unroll
    for (int tile = 0; tile < kC / kTileRows; ++tile) {
      transpose_gradients<kType>(z[tile], tile, rows, columns, at, n[tile]);
    }
    const float eta = stage.eta[rows - 1];
    move_state<kType, kD, kC>(stage, n, eta * kGradientUnit<kType>, at, state);
    state.move_bias(eta, columns, total);
    __syncthreads();  // before the next rows
  }
}

template <DType kType, int kD, int kC>
__global__ void __launch_bounds__(2 * kD)
    tile_states_kernel(const __grid_constant__ ChunkArgs args, const KeptTiles kept, int64_t heads) {
  auto& shared = dynamic_shared<TilesShared<kD, kC>>();
  auto* stage = reinterpret_cast<Stage<kD, kC>*>(&shared + 1);
  shared.sums.clear();
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / args.problem.num_heads;
    __syncthreads();  // the head before has been read
    keep_states<kType, kD, kC>(args, sequence, static_cast<int>(item - sequence * args.problem.num_heads), kept, shared,
                               *stage);
  }
}

}  // namespace

template <DType kType>
void launch_tile_states(const TilesConfig& config, const ChunkArgs& args, const KeptTiles& kept,
                        const Context& context) {
  const int64_t heads = args.problem.sequences.count * args.problem.num_heads;
  with_tile_shape(config.padded_dim, config.mini_batch, [&]<int kD, int kC>() {
    const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(heads, 1 << 30)),
                            static_cast<unsigned>(config.threads), TilesShared<kD, kC>::bytes(1)};
    launch<tile_states_kernel<kType, kD, kC>>("ttt_linear chunk_tiles states", context, shape, args, kept, heads);
  });
}

}  // namespace fastweight::cuda::ttt
