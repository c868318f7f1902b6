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

// Parts of a scan back. Nothing is done of a tail without tokens behind segments.
template <class Shape>
__device__ __forceinline__ ScanWork back_work_at(const ScanArgs& args, int64_t at) {
  ScanWork work = work_at<Shape::kWidth, Shape::kMakesMaps>(args, at, Shape::kColumns);
  if (work.walk.position > 0 && work.walk.chunks == 0) work.walk.exists = false;
  return work;
}

// body(part, walk, c) for all chunks of the parts of this block, those of a walk from the last to the first.
template <class Shape, class Body>
__device__ __forceinline__ void for_each_chunk_back(const ScanArgs& args, const PartRange& parts, const Body& body) {
  for (int64_t at = parts.begin + blockIdx.x; at < parts.end; at += gridDim.x) {
    const ScanWork work = back_work_at<Shape>(args, at);
    if (!work.walk.exists) continue;
    for (int c = work.walk.chunks - 1; c >= 0; --c) body(work.part, work.walk, c);
  }
}

// By a warpgroup, for the parts of this block of which anything is to be done in the window: body() with the part in `work`, in
// shared memory, where it takes no registers.
template <class Shape, class Body>
__device__ __forceinline__ void for_each_part_back(const ScanArgs& args, const PartRange& parts, int group,
                                                   ScanWork& work, const Body& body) {
  const auto barrier = [&] { group == 0 ? named_barrier<1>(kGroupThreads) : named_barrier<2>(kGroupThreads); };
  for (int64_t at = parts.begin + blockIdx.x; at < parts.end; at += gridDim.x) {
    barrier();
    if (threadIdx.x % kGroupThreads == 0) work = back_work_at<Shape>(args, at);
    barrier();
    if (work.walk.exists) body();
  }
}

// What warpgroup `group` of a block has: a range of 64 columns and all channels, or, of the only range, one of kParts parts of
// the channels, kK each. All parts have the same Y and dv, which are left to one.
template <int kK, int kParts>
struct GroupShare {
  int group;

  __device__ __forceinline__ int range() const { return kParts == 1 ? group : 0; }
  __device__ __forceinline__ int channel() const { return kParts == 1 ? 0 : kK * group; }
  __device__ __forceinline__ bool leaves_Y() const { return kParts == 1 || group == 0; }
};

// The columns of a warpgroup, one of kRanges that share the columns of a block, or one of kParts that share the channels.
template <int kK, int kRanges, int kParts = 1>
struct GradientColumns {
  static_assert(kRanges == 1 || kParts == 1);
  const GradientArgs& args;
  const ScanPart& part;
  const Walk& walk;
  const bool& is_tail;    // see ScanWork
  int group, warp, lane;  // the warp within the warpgroup

  __device__ __forceinline__ GroupShare<kK, kParts> share() const { return {group}; }
  __device__ __forceinline__ int column() const { return part.column + share().range() * kGroupColumns + 16 * warp; }

  // Channels from the first on that there are, and where a state has it.
  __device__ __forceinline__ int channels() const { return args.chunk.problem.head_dim_k - share().channel(); }
  __device__ __forceinline__ int64_t offset_in(const DeviceStates& states) const {
    return state_offset(states, part) + share().channel() * states.k_stride;
  }

  // The thread's share of what the windows hand each other.
  static constexpr int kStateThreads = kRanges * kParts * kGroupThreads;
  template <class Float>
  __device__ __forceinline__ Float* carried(Float* states) const {
    constexpr int kColumns = kRanges * kGroupColumns;
    return chunk_16bit::carried_at(args.chunk, states, part, walk, kColumns, kColumns * kK * kParts,
                                   static_cast<int>(threadIdx.x));
  }

  __device__ __forceinline__ void load_last_gradient(StateSums<kK>& G) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (!walk.closes) {
      chunk_16bit::take_tiles<kStateThreads>(carried(args.chunk.carried.taken), G);
      return;
    }
    if constexpr (kK == kMapWidth && kParts == 1) {
      if (!is_tail && !ends_sequence()) {
        // Nobody writes the columns beyond those of the values.
        load_state<kMapWidth>(dense_map(const_cast<float*>(gradient_behind())), 0, column(), kMapWidth, p.head_dim_v,
                              lane, G);
        return;
      }
    }
    if (args.d_final_state.present()) {
      load_state<kK>(args.d_final_state, offset_in(args.d_final_state), column(), channels(), p.head_dim_v, lane, G);
    }
  }

  __device__ __forceinline__ void store_first_gradient(StateSums<kK>& G) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    if (!walk.opens) return chunk_16bit::give_tiles<kStateThreads>(carried(args.chunk.carried.given), G);
    if (!is_tail) return;  // the gradient before a segment is the composed one
    if constexpr (kK == kMapWidth && kParts == 1) {
      if (walk.position > 0) {
        store_state<kMapWidth>(dense_map(gradient_behind_last()), 0, column(), kMapWidth, kMapWidth, lane, G);
        return;
      }
    }
    if (args.d_initial_state.present()) {
      store_state<kK>(args.d_initial_state, offset_in(args.d_initial_state), column(), channels(), p.head_dim_v, lane,
                      G);
    }
  }

  // Of a scan of maps: from 0 for e, from the identity for M.
  __device__ __forceinline__ bool is_on_state() const { return part.column >= kMapWidth; }
  __device__ __forceinline__ void begin_map(StateSums<kK>& G) const {
    if (!walk.closes) {
      chunk_16bit::take_tiles<kStateThreads>(carried_map(args.chunk.segments.carried.taken), G);
    } else if (is_on_state()) {
      set_identity<kK>(column() - kMapWidth, lane, G);
    }
  }
  __device__ __forceinline__ void end_map(StateSums<kK>& G) const {
    if (!walk.opens) {
      return chunk_16bit::give_tiles<kStateThreads>(carried_map(args.chunk.segments.carried.given), G);
    }
    store_state<kMapWidth>(dense_map(matrix(walk.span.begin, is_on_state() ? kOnState : kAlone)), 0,
                           column() - (is_on_state() ? kMapWidth : 0), kMapWidth, kMapWidth, lane, G);
  }
  template <class Float>
  __device__ __forceinline__ Float* carried_map(Float* maps) const {
    static_assert(kRanges == 2);
    return carried_map_at(args.chunk, maps, walk, part.head, is_on_state());
  }

  // Of the segment that begins at token `begin`.
  __device__ __forceinline__ float* matrix(int64_t begin, MapPart of) const {
    return segment_map(args.chunk, walk.span.batch, begin, part.head, of);
  }
  // Whether the walk closes with the last token of its sequence.
  __device__ __forceinline__ bool ends_sequence() const {
    const SequenceSpan whole = sequence_at(args.chunk.problem.sequences, part.sequence);
    return walk.span.begin + walk.span.length == whole.begin + whole.length;
  }
  // Of the state after the segment that closes with the walk: made in the window before, where something follows there.
  __device__ __forceinline__ const float* gradient_behind() const {
    const ChunkWindow& window = args.chunk.window;
    const int64_t end = first_chunk_of(args.chunk.chunked, part.sequence) + walk.position + walk.chunks;
    if (end == window.end && !window.is_all()) {
      return args.chunk.segments.composed.taken + composed_at(args.chunk, walk.span.batch, part.head);
    }
    return matrix(walk.span.begin + walk.span.length - segment_tokens(args.chunk), kBehind);
  }
  // The same of the last segment, which ends where the walk opens; in the next window, if that does.
  __device__ __forceinline__ float* gradient_behind_last() const {
    if (first_chunk_of(args.chunk.chunked, part.sequence) + walk.position == args.chunk.window.begin) {
      return args.chunk.segments.composed.given + composed_at(args.chunk, walk.span.batch, part.head);
    }
    return matrix(walk.span.begin - segment_tokens(args.chunk), kBehind);
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

// Sums of both parts of the channels to both warpgroups: the first adds what the second brings. Each thread exchanges with one.
template <class Columns>
__device__ __forceinline__ void exchange_sums(const Columns& own, HandedSums& memory, TokenSums& X) {
  const int thread = kWarpSize * own.warp + own.lane;
  if (own.group == 1) put_sums(X, thread, memory);
  named_barrier<3>(2 * kGroupThreads);
  if (own.group == 0) {
    add_sums(memory, thread, X);
    put_sums(X, thread, memory);
  }
  named_barrier<4>(2 * kGroupThreads);
  if (own.group == 1) take_sums(memory, thread, X);
}

// The warps that store, by one lane each: for a warpgroup, which goes on meanwhile. G and Y may take the places of those of the
// window before, which the gradients before the kernel read.
template <class Shape, class Maps>
struct BackStorer {
  static constexpr int kK = Shape::kOwnChannels;
  const GradientArgs& args;
  const Maps& maps;
  typename Shape::Shared& s;
  int group;

  __device__ __forceinline__ GroupShare<kK, Shape::kParts> share() const { return {group}; }

  __device__ __forceinline__ void store_G(int column, int slot) const {
    const StateTile<kK> G(s.leaving[group].G);
#pragma unroll
    for (int p = 0; p < G.kPanels; ++p) {
      if (column < args.padded_v)
        store_box(maps.G, {share().channel() + p * G.kPanelColumns, column, slot}, G.panel(p));
    }
  }
  __device__ __forceinline__ void store_Y(const RowsPlace& at, int column, int slot) const {
    const WritesTile Y(s.leaving[group].Y);
    const ValueTile dv(s.leaving[group].dv);
    if (column < args.padded_v) store_box(maps.Y, {0, column, slot}, Y.panel(0));
    if (args.dv.present() && column < args.chunk.problem.head_dim_v) {
      store_box(maps.dv, {column, at.head, at.missing, at.end, at.batch}, dv.panel(0));
    }
  }
  // Until what was stored has been read from shared memory.
  static __device__ __forceinline__ void finish() {
    commit_stores();
    wait_stores_read<0>();
  }

  // What tells the gradients that the columns have been left.
  __device__ __forceinline__ uint32_t* flag_of(int64_t chunk, int head, int column) const {
    if (!args.progress.present() || column >= args.padded_v) return nullptr;
    return args.progress.ready_at(chunk * args.chunk.problem.num_value_heads + head) + column / kGroupColumns;
  }

  __device__ __forceinline__ void run(const PartRange& parts) const {
    auto& barriers = s.barriers_of_leaving;
    uint32_t parity = 0;
    uint32_t* flag = nullptr;  // of the chunk before: its stores have ended when those of the next one begin, or nearly
    if (args.waits_late) wait_for_previous_kernels();
    for_each_chunk_back<Shape>(args.chunk, parts, [&](const ScanPart& part, const Walk& walk, int c) {
      const int column = part.column + share().range() * kGroupColumns;
      const int64_t chunk = walk.first_chunk + c;
      const int slot =
          static_cast<int>(args.chunk.window.slot_of(chunk)) * args.chunk.problem.num_value_heads + part.head;
      barriers.G_ready[group].wait(parity);
      store_G(column, slot);
      finish();
      barriers.G_left[group].arrive();
      if (flag != nullptr) {
        wait_stores<1>();
        publish(flag);
      }
      flag = flag_of(chunk, part.head, column);
      if (share().leaves_Y()) {
        barriers.Y_ready[group].wait(parity);
        store_Y(rows_of(args.chunk, walk, c, part.head), column, slot);
        finish();
        barriers.Y_left[group].arrive();
      }
      parity ^= 1;
    });
    if (flag != nullptr) {
      wait_stores<0>();
      publish(flag);
    }
  }
};

inline constexpr int64_t kMostBlocks = 1 << 30;  // of a launch

// The launches of a scan back in blocks of `columns` columns: over(args, parts) goes over parts, maps(args, parts, most) makes
// maps by so many blocks at most. Of sequences that are cut the tails come first, and beside them the maps of the segments, which
// need nothing of tails; then the composition, from the tails on, and the segments.
template <class Over, class Maps>
void scan_back_in_parts(const GradientArgs& args, int columns, const Over& over, const Maps& maps,
                        const Context& context) {
  const ScanArgs& chunk = args.chunk;
  const Sequences& sequences = chunk.problem.sequences;
  const int64_t group_tokens = kSegmentGroup * chunk.segments.chunks * chunk.chunked.chunk_size;
  if (chunk.segments.chunks == 0) return over(args, tail_parts(chunk, columns));
  GradientArgs of_maps = args;
  int64_t most = kMostBlocks;
  if (sequences.offsets != nullptr || sequences.tokens % group_tokens != 0) {
    const PartRange tails = tail_parts(chunk, columns);
    over(args, tails);
    of_maps.waits_late = true;
    // A block of maps stays until the tails have ended, and would keep others from their place.
    const int64_t places = device_attribute(cudaDevAttrMultiProcessorCount, context.device.index);
    most = std::max(places - tails.end, places / 2);
  }
  maps(of_maps, map_parts(chunk, 2 * kGroupColumns), most);
  launch_compose_back(chunk, args.d_final_state, args.d_initial_state, context);
  // Of segments there is dv, and what the gradients read beside the states.
  if (args.dv.present() || args.S.present()) over(args, segment_parts(chunk, columns));
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
