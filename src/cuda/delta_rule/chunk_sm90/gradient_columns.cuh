// What the scans back of chunk_sm90 share: a warpgroup's columns of the gradient of the state, and what leaves a block on
// its way to memory.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradient.cuh"
#include "cuda/delta_rule/chunk_sm90/state_columns.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::GradientArgs;

// Of a warpgroup and the warp that stores for it: G, or Y and dv, are in shared memory; they have been read from there.
template <int kGroups>
struct LeavingBarriers {
  TransactionBarrier G_ready[kGroups], G_left[kGroups], Y_ready[kGroups], Y_left[kGroups];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kGroups; ++i) {
      G_ready[i].init(kGroupThreads / kWarpSize);
      G_left[i].init(1);
      Y_ready[i].init(kGroupThreads / kWarpSize);
      Y_left[i].init(1);
    }
  }
};

template <class Body>
__device__ __forceinline__ void for_each_part_in_shared(const ChunkArgs& args, int64_t parts, int columns, int group,
                                                        chunk_16bit::BlockWork& work, const Body& body) {
  for_each_found_part(
      parts, group, work, [&](int64_t at) { return sequence_part_at(args, at, columns); }, body);
}

// The columns of a warpgroup, one of kGroups that share the columns of a block.
template <int kK, int kGroups>
struct GradientColumns {
  const GradientArgs& args;
  const ScanPart& part;
  const Walk& walk;
  int group, warp, lane;  // the warp within the warpgroup

  __device__ __forceinline__ int first_column() const { return part.column + group * kGroupColumns; }
  __device__ __forceinline__ int column() const { return first_column() + 16 * warp; }

  // The thread's share of what the windows hand each other.
  static constexpr int kStateThreads = kGroups * kGroupThreads;
  template <class Float>
  __device__ __forceinline__ Float* carried(Float* states) const {
    constexpr int kColumns = kGroups * kGroupColumns;
    return chunk_16bit::carried_at(args.chunk, states, part, walk, kColumns, kColumns * kK,
                                   static_cast<int>(threadIdx.x));
  }

  __device__ __forceinline__ void load_last_gradient(StateSums<kK>& G) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (!walk.closes) {
      chunk_16bit::take_tiles<kStateThreads>(carried(args.chunk.carried.taken), G);
    } else if (args.d_final_state.present()) {
      load_state<kK>(args.d_final_state, state_offset(args.d_final_state, part), column(), p.head_dim_k, p.head_dim_v,
                     lane, G);
    }
  }

  __device__ __forceinline__ void store_first_gradient(StateSums<kK>& G) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (!walk.opens) {
      chunk_16bit::give_tiles<kStateThreads>(carried(args.chunk.carried.given), G);
    } else if (args.d_initial_state.present()) {
      store_state<kK>(args.d_initial_state, state_offset(args.d_initial_state, part), column(), p.head_dim_k,
                      p.head_dim_v, lane, G);
    }
  }

  // G^T, rounded, to a StateTile.
  __device__ __forceinline__ void write_G(const void* memory, const Fragments<kKeySteps<kK>>& rG) const {
    const StateTile<kK> tile(memory);
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) tile.store_a(16 * warp, m, lane, rG[m]);
  }

  // Y^T = X to a WritesTile, and dv = beta Y to a ValueTile, both rounded.
  template <DType kType>
  __device__ __forceinline__ void write_Y(const void* Y_memory, const void* dv_memory, const float* beta,
                                          const TokenSums& X) const {
    const WritesTile Y(Y_memory);
    const ValueTile dv(dv_memory);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      uint32_t a[4];
      pack_a<kType>(X[2 * m], X[2 * m + 1], a);
      Y.store_a(16 * warp, m, lane, a);
      float scaled[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) scale_tile(column_pair(beta, 2 * m + h, lane), X[2 * m + h], scaled[h]);
      pack_a<kType>(scaled[0], scaled[1], a);
      dv.store_c_transposed(16 * m, warp, lane, a);
    }
  }

  // What the threads of the warp wrote can be stored.
  __device__ __forceinline__ void hand_over(TransactionBarrier& ready) const {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) ready.arrive();
  }
};

// The warps that store, by one lane each: for a warpgroup, which goes on meanwhile. G and Y may take the places of those of the
// window before, which the gradients before the kernel read.
template <int kK, int kGroups, class Maps, class Shared>
struct BackStorer {
  const GradientArgs& args;
  const Maps& maps;
  Shared& s;
  int group;

  __device__ __forceinline__ void run(int64_t parts) const {
    const StateTile<kK> G(s.leaving[group].G);
    const WritesTile Y(s.leaving[group].Y);
    const ValueTile dv(s.leaving[group].dv);
    auto& barriers = s.barriers_of_leaving;
    uint32_t parity = 0;
    if (args.follows_gradients) wait_for_previous_kernels();
    for_each_part(args.chunk, parts, kGroups * kGroupColumns, [&](const ScanPart& part, const Walk& walk) {
      const int column = part.column + group * kGroupColumns;
      for (int c = walk.chunks - 1; c >= 0; --c, parity ^= 1) {
        const int64_t chunk = walk.first_chunk + c;
        const int slot =
            static_cast<int>(args.chunk.window.slot_of(chunk)) * args.chunk.problem.num_value_heads + part.head;
        barriers.G_ready[group].wait(parity);
#pragma unroll
        for (int p = 0; p < G.kPanels; ++p) {
          if (column < args.padded_v) store_box(maps.G, {p * G.kPanelColumns, column, slot}, G.panel(p));
        }
        commit_stores();
        wait_stores_read<0>();
        barriers.G_left[group].arrive();
        barriers.Y_ready[group].wait(parity);
        if (column < args.padded_v) store_box(maps.Y, {0, column, slot}, Y.panel(0));
        if (args.dv.present() && column < args.chunk.problem.head_dim_v) {
          const RowsPlace at = rows_of(args.chunk, walk, c, part.head);
          store_box(maps.dv, {column, at.head, at.missing, at.end, at.batch}, dv.panel(0));
        }
        commit_stores();
        wait_stores_read<0>();
        barriers.Y_left[group].arrive();
      }
    });
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
