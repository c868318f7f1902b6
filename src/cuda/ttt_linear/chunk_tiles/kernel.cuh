// Mini-batches of several tiles of 16 tokens. Two barriers per mini-batch m:
//
//     z_m, P_m, statistics of z_m and of y_{m-1}   | A |   o_{m-1}, sums of the inner gradient   | B |   n, q h, y_m, h
//
// q, k, v and eta of the next mini-batches are on their way meanwhile. Who may overwrite what:
//   - row sums before A are read right after A, those before B right after B: one buffer each;
//   - P_m is written before A and read after B, so P_{m+1} has another buffer;
//   - the stage of mini-batch m - 1 is last read after B of m - 1; the copies into it start after A of m.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk_loader.cuh"
#include "cuda/ttt_linear/chunk_rows.cuh"
#include "cuda/ttt_linear/chunk_tiles/tiles.cuh"

namespace fastweight::cuda::ttt {
namespace {

// x = kC rows times h.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void read_state(const SharedTile<kD>& rows, int first, const State<kD>& state,
                                           const Lane& at, LaneRows<kC>& x) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[tile][i / 4][i % 4] = 0.0f;
  }
#pragma unroll
  for (int m = 0; m < kD / 16; ++m) {
    uint32_t b[4];
    state.template operand<kType>(m, b);
#pragma unroll
    for (int tile = 0; tile < kC / kTileRows; ++tile) {
      uint32_t a[4];
      rows.load_a(first + kTileRows * tile, m, at.lane, a);
      mma<kType>(x[tile][0], a, b[0], b[1]);
      mma<kType>(x[tile][1], a, b[2], b[3]);
    }
  }
}

// The blocks of P on and below the diagonal, dealt to the warps.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void make_p(Stage<kD, kC>& stage, float scale, const Lane& at, const SharedTile<64>& P) {
  constexpr int kBlocks = kC / kTileRows * (kC / kTileRows + 1) / 2;
  for (int n = at.warp; n < kBlocks; n += static_cast<int>(blockDim.x) / kWarpSize) {
    const int i = n < 1 ? 0 : n < 3 ? 1 : n < 6 ? 2 : 3, j = n - i * (i + 1) / 2;
    uint32_t a[4];
    block_of_p<kType>(stage, i, j, scale, at, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      *reinterpret_cast<uint32_t*>(&P.at(at.row(i, r % 2), kTileRows * j + r / 2 * 8 + 2 * at.t)) = a[r];
    }
  }
}

// make(row) for all rows of the lane. The four lanes that have the same rows share the work.
template <int kC, class Make>
__device__ __forceinline__ void for_rows(const Lane& at, const Make& make, float2 (&result)[kC / 8]) {
#pragma unroll
  for (int r = 0; r < kC / 8; r += 4) {
    const float2 own = make(8 * (r + at.t) + at.g);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      result[r + t].x = __shfl_sync(kAllLanes, own.x, at.lane - at.t + t);
      result[r + t].y = __shfl_sync(kAllLanes, own.y, at.lane - at.t + t);
    }
  }
}

template <int kD, int kC>
__device__ __forceinline__ void get_norms(const RowSums<kD, kC>& sums, const DeviceProblem& p, const Lane& at,
                                          float2 (&norms)[kC / 8]) {
  for_rows<kC>(
      at, [&](int row) { return get_norm<false>(sums[row], p); }, norms);
}

template <int kC>
__device__ __forceinline__ void add_bias(const float (&c)[4], LaneRows<kC>& z) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) element<kC>(z, tile, half, e) += c[e];
    }
  }
}

// z becomes x; the warp's share of the sums of y and x y. There are no registers for y: it is made again from x where
// it is needed.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void put_inner_sums(Stage<kD, kC>& stage, const float2 (&norms)[kC / 8],
                                               const Columns<false>& columns, const Lane& at, LaneRows<kC>& z,
                                               RowSums<kD, kC>& sums) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
    float2 own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float residual[4], x[4], y[4];
      residual_of<kType>(stage, columns, at.row(tile, half), at, residual);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = element<kC>(z, tile, half, e);
      own[half] = inner_sums(norms[2 * tile + half], columns, residual, x, y);
#pragma unroll
      for (int e = 0; e < 4; ++e) element<kC>(z, tile, half, e) = x[e];
    }
    put_sums<kD, kC>(own, tile, at, sums, [](int, float2 sum) { return sum; });
  }
}

// n in place of x; `total` is its sum over the rows of the lane.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void inner_gradients(Stage<kD, kC>& stage, const RowSums<kD, kC>& sums,
                                                const float2 (&norms)[kC / 8], const DeviceProblem& p,
                                                const Columns<false>& columns, const Lane& at, LaneRows<kC>& x,
                                                float (&total)[4]) {
  float2 means[kC / 8];  // of y and x y
  for_rows<kC>(
      at, [&](int row) { return get_means(sums[row], p); }, means);
#pragma unroll
  for (int e = 0; e < 4; ++e) total[e] = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float residual[4];
      residual_of<kType>(stage, columns, at.row(tile, half), at, residual);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& n = element<kC>(x, tile, half, e);
        const float y = fmaf(columns.ww[e], n, residual[e]);
        n = inner_gradient(norms[2 * tile + half].y, means[2 * tile + half], n, y);
        total[e] += n;
      }
    }
  }
}

// h^T = h^T - eta n^T k
template <DType kType, int kD, int kC>
__device__ __forceinline__ void move_state(Stage<kD, kC>& stage, const uint32_t (&n)[kC / kTileRows][4], float eta,
                                           const Lane& at, State<kD>& state) {
  const SharedTile<kD> k = stage.k();
#pragma unroll
  for (int m = 0; m < kD / 16; ++m) {
    float sums[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < kC / kTileRows; ++tile) {
      uint32_t b[4];
      k.load_b_transposed(kTileRows * tile, m, at.lane, b);
      mma<kType>(sums[0], n[tile], b[0], b[1]);
      mma<kType>(sums[1], n[tile], b[2], b[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.h[2 * m + half][i] = fmaf(-eta, sums[half][i], state.h[2 * m + half][i]);
    }
  }
}

// y = scale q h + c - eta (P n)
template <DType kType, int kD, int kC>
__device__ __forceinline__ void read_outputs(Stage<kD, kC>& stage, const SharedTile<64>& P,
                                             const uint32_t (&n)[kC / kTileRows][4], const State<kD>& state,
                                             float scale, const Lane& at, LaneRows<kC>& y) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
    LaneRows<kTileRows> qh, sums = {};
    read_state<kType, kD, kTileRows>(stage.q(), kTileRows * tile, state, at, qh);
#pragma unroll
    for (int m = 0; m <= tile; ++m) {
      uint32_t a[4];
      P.load_a(kTileRows * tile, m, at.lane, a);
      mma<kType>(sums[0][0], a, n[m][0], n[m][2]);
      mma<kType>(sums[0][1], a, n[m][1], n[m][3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float eta = stage.eta[at.row(tile, half)] * kGradientUnit<kType>;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        element<kC>(y, tile, half, e) = fmaf(-eta, element<kTileRows>(sums, 0, half, e),
                                             fmaf(scale, element<kTileRows>(qh, 0, half, e), state.c[e]));
      }
    }
  }
}

__device__ __forceinline__ void wait_for_next(int stages) {
  if (stages >= 4) {
    wait_copies<2>();
  } else if (stages == 3) {
    wait_copies<1>();
  } else {
    wait_copies<0>();
  }
}

template <DType kType, int kD, int kC>
__device__ __forceinline__ void run_head(const ChunkArgs& args, int64_t sequence, int head, int stages,
                                         TilesShared<kD, kC>& shared, Stage<kD, kC>* stage) {
  const DeviceProblem& p = args.problem;
  const Lane at(p.head_dim, threadIdx.x / kWarpSize);
  const SequenceSpan span = sequence_at(p.sequences, sequence);
  ChunkLoader<kD, kC> loader(args, span, head, threadIdx.x, blockDim.x);
  for (int s = 0; s < stages - 1; ++s) {
    loader.next(span.length - s * kC, stage[s]);
    commit_copies();
  }
  const Columns<false> columns(p, head, at);
  State<kD> state;
  state.load(args, sequence, head, at);

  wait_for_next(stages);
  __syncthreads();
  LaneRows<kC> y = {};  // of the mini-batch before
  char* o = first_output(args.o, span, head, at);
  const int64_t o_step = byte_offset(args.o.dtype, kC * args.o.strides[1]);
  int slot = 0, parity = 0;
  int64_t left = span.length;
  for (bool first = true; left > 0; first = false, left -= kC) {
    Stage<kD, kC>& current = stage[slot];
    Stage<kD, kC>& last = stage[slot == 0 ? stages - 1 : slot - 1];
    slot = slot + 1 == stages ? 0 : slot + 1;
    const SharedTile<64> P{shared.P[parity]};
    parity ^= 1;
    const int rows = static_cast<int>(min(left, int64_t{kC}));

    LaneRows<kC> z;
    read_state<kType, kD, kC>(current.k(), 0, state, at, z);
    add_bias<kC>(state.c, z);
    put_statistics<kD, kC>(z, columns, at, shared.sums.inner);
    make_p<kType>(current, p.scale, at, P);
    put_statistics<kD, kC>(y, columns, at, shared.sums.outer);
    __syncthreads();  // A

    loader.next(left - (stages - 1) * kC, last);
    commit_copies();
    float2 norms[kC / 8], outer[kC / 8];
    get_norms<kD, kC>(shared.sums.outer, p, at, outer);
    if (!first) {
      store_outputs<kType, kC>(args.o, o, kC, outer, columns, at, y);
      o += o_step;
    }
    get_norms<kD, kC>(shared.sums.inner, p, at, norms);
    put_inner_sums<kType>(current, norms, columns, at, z, shared.sums.gradient);
    wait_for_next(stages);
    __syncthreads();  // B

    float total[4];
    inner_gradients<kType>(current, shared.sums.gradient, norms, p, columns, at, z, total);
    uint32_t n[kC / kTileRows][4];
#pragma unroll
    for (int tile = 0; tile < kC / kTileRows; ++tile)
      transpose_gradients<kType>(z[tile], tile, rows, columns, at, n[tile]);
    const float eta = current.eta[rows - 1];
    read_outputs<kType, kD, kC>(current, P, n, state, p.scale, at, y);
    move_state<kType, kD, kC>(current, n, eta * kGradientUnit<kType>, at, state);
    state.move_bias(eta, columns, total);
  }
  if (span.length > 0) {
    put_statistics<kD, kC>(y, columns, at, shared.sums.outer);
    __syncthreads();
    float2 outer[kC / 8];
    get_norms<kD, kC>(shared.sums.outer, p, at, outer);
    store_outputs<kType, kC>(args.o, o, static_cast<int>(left + kC), outer, columns, at, y);
  }
  state.store(args, sequence, head, at);
}

// The grid runs over the `heads` of all sequences, those of a sequence together; a smaller grid goes round.
template <DType kType, int kD, int kC>
__global__ void __launch_bounds__(2 * kD)
    tiles_kernel(const __grid_constant__ ChunkArgs args, int stages, int64_t heads) {
  auto& shared = dynamic_shared<TilesShared<kD, kC>>();
  auto* stage = reinterpret_cast<Stage<kD, kC>*>(&shared + 1);
  shared.sums.clear();
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / args.problem.num_heads;
    __syncthreads();  // the head before has been read
    run_head<kType, kD, kC>(args, sequence, static_cast<int>(item - sequence * args.problem.num_heads), stages, shared,
                            stage);
  }
}

}  // namespace

template <DType kType>
void launch_tiles(const TilesConfig& config, const ChunkArgs& args, const Context& context) {
  const int64_t heads = args.problem.sequences.count * args.problem.num_heads;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(heads, 1 << 30)),
                          static_cast<unsigned>(config.threads), config.shared_bytes};
  with_tile_shape(config.padded_dim, config.mini_batch, [&]<int kD, int kC>() {
    launch<tiles_kernel<kType, kD, kC>>("ttt_linear chunk_tiles", context, shape, args, config.stages, heads);
  });
}

}  // namespace fastweight::cuda::ttt
