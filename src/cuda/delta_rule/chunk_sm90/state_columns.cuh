// What the scans of chunk_sm90 share: the parts of a block, and a warpgroup's columns of the state on
// their way from and to memory.
#pragma once

#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/chunk_sm90/copies.cuh"
#include "cuda/delta_rule/chunk_sm90/segments.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// Buffers that operands go through in turn, kDepth of them. `filled`: they are there. `free`: all warps of the state need
// them no more.
template <int kDepth>
struct RingBarriers {
  TransactionBarrier filled[kDepth], free[kDepth];

  __device__ __forceinline__ void init(uint32_t readers) {
    for (int i = 0; i < kDepth; ++i) {
      filled[i].init(1);
      free[i].init(readers);
    }
  }
};

// Where a block is in a ring: turns go on from part to part.
template <int kDepth>
struct RingTurn {
  int at = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++at < kDepth) return;
    at = 0;
    parity ^= 1;
  }
};

// The tokens of chunk c of a walk.
__device__ __forceinline__ RowsPlace rows_of(const ChunkArgs& args, const Walk& walk, int c, int head) {
  const int64_t C = args.chunked.chunk_size, first = c * C, tokens = min(walk.span.length - first, C);
  return {head, kChunkRows - static_cast<int>(tokens), static_cast<int>(walk.span.begin + first + tokens),
          static_cast<int>(walk.span.batch)};
}

// The flags of a walk's chunks, where their factors are still being made (beside.h): heads go first, then rows of the batch, then
// chunks of a row. That of the next chunk, for a thread that brings factors.
struct WalkFlags {
  const uint32_t* next;
  int64_t step;

  // Until the factors of the next chunk are there.
  __device__ __forceinline__ void wait() {
    while (!is_published(next)) continue;
    next += step;
    fence_async_proxy_global();
  }
};
// Of the pairs with head `head` of `heads`.
__device__ __forceinline__ WalkFlags flags_of(const ForwardArgs& args, const ScanPart& part, const Walk& walk,
                                              int64_t heads, int head) {
  const Sequences& sequences = args.problem.sequences;
  const bool one_row = sequences.offsets != nullptr;
  const int64_t row = one_row ? 0 : part.sequence, rows = one_row ? 1 : sequences.count;
  const int64_t place = walk.first_chunk - row * args.window.row - args.window.begin;
  return {args.published + (place * rows + row) * heads + head, rows * heads};
}

// The columns that v has: none where it is absent and all values are 0.
__device__ __forceinline__ int value_columns(const ChunkArgs& args) {
  return args.problem.v.present() ? args.problem.head_dim_v : 0;
}

// [64 value columns x 64 tokens] and [64 value columns x K], as C tiles of a warp's 16 columns.
using TokenSums = float[kTokenTiles][4];
template <int kK>
using StateSums = float[kKeyTiles<kK>][4];
template <int kSteps>
using Fragments = uint32_t[kSteps][4];

// Sums of the threads of a warpgroup in shared memory, where those of another that have the same tiles add or take them.
using HandedSums = float4[kTokenTiles][kGroupThreads];
__device__ __forceinline__ void put_sums(const TokenSums& sums, int thread, HandedSums& to) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) to[n][thread] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
}
__device__ __forceinline__ void add_sums(const HandedSums& from, int thread, TokenSums& sums) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float4 x = from[n][thread];
    sums[n][0] += x.x, sums[n][1] += x.y, sums[n][2] += x.z, sums[n][3] += x.w;
  }
}
__device__ __forceinline__ void take_sums(const HandedSums& from, int thread, TokenSums& sums) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float4 x = from[n][thread];
    sums[n][0] = x.x, sums[n][1] = x.y, sums[n][2] = x.z, sums[n][3] = x.w;
  }
}

// Where two warpgroups have half of the channels each: X of both to both, the same bits, for a + b is b + a.
__device__ __forceinline__ void exchange_halves(HandedSums (&halves)[2], int half, int thread, TokenSums& X) {
  put_sums(X, thread, halves[half]);
  named_barrier<1>(2 * kGroupThreads);
  add_sums(halves[1 - half], thread, X);
}
// O of the second half to the first, through the place that the first half's X had: this thread has read it. The barrier
// also tells the second that the first has read its X.
__device__ __forceinline__ void hand_half(HandedSums (&halves)[2], int half, int thread, TokenSums& O) {
  if (half == 1) put_sums(O, thread, halves[0]);
  named_barrier<2>(2 * kGroupThreads);
  if (half == 0) add_sums(halves[0], thread, O);
}

// The two numbers, one after the other, that belong to the columns of C tile n of a lane.
__device__ __forceinline__ float2 column_pair(const float* numbers, int n, int lane) {
  return *reinterpret_cast<const float2*>(numbers + 8 * n + 2 * (lane % 4));
}

__device__ __forceinline__ void scale_tile(const float2& by, const float (&c)[4], float (&scaled)[4]) {
  scaled[0] = by.x * c[0];
  scaled[1] = by.y * c[1];
  scaled[2] = by.x * c[2];
  scaled[3] = by.y * c[3];
}

template <DType kType, int kSteps>
__device__ __forceinline__ void round_sums(const float (&c)[2 * kSteps][4], Fragments<kSteps>& a) {
#pragma unroll
  for (int m = 0; m < kSteps; ++m) pack_a<kType>(c[2 * m], c[2 * m + 1], a[m]);
}

// What that rounding took, in place of the sums. A product of the rounded sums with J, whose diagonal is 1, that is added
// to it has them in fp32 where they meet the diagonal.
template <DType kType, int kSteps>
__device__ __forceinline__ void subtract_rounded(const Fragments<kSteps>& a, float (&c)[2 * kSteps][4]) {
#pragma unroll
  for (int m = 0; m < kSteps; ++m) subtract_a<kType>(a[m], c[2 * m], c[2 * m + 1]);
}

// The rows of the identity from `row` on.
template <int kK>
__device__ __forceinline__ void set_identity(int row, int lane, StateSums<kK>& S) {
#pragma unroll
  for (int n = 0; n < kKeyTiles<kK>; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      S[n][e] = row + lane / 4 + e / 2 * 8 == 8 * n + 2 * (lane % 4) + e % 2 ? 1.0f : 0.0f;
    }
  }
}

// A matrix of a segment as a state.
__device__ __forceinline__ DeviceStates dense_map(float* map) {
  DeviceStates dense;
  dense.data = map;
  dense.k_stride = 1;
  dense.v_stride = kMapWidth;
  return dense;
}

// Of a segment that is cut by windows, a thread's share of a map.
template <class Float>
__device__ __forceinline__ Float* carried_map_at(const ScanArgs& args, Float* maps, const Walk& walk, int head,
                                                 bool on_state) {
  const int64_t row = walk.span.batch * args.problem.num_value_heads + head;
  return maps + (2 * row + (on_state ? kOnState : kAlone)) * kMapFloats + 4 * threadIdx.x;
}

// By a lane for all of its warp, whose lanes have all read the buffer.
__device__ __forceinline__ void release(TransactionBarrier& free, int lane) {
  __syncwarp();
  if (lane == 0) free.arrive();
}

// The columns of a warpgroup, one of kGroups that share the columns of a block; kK channels, of which kParts warpgroups have
// others each.
template <int kK, int kGroups, int kParts = 1>
struct StateColumns {
  const ForwardArgs& args;
  const ScanPart& part;
  const Walk& walk;
  const bool& is_tail;    // see ScanWork
  int group, warp, lane;  // the warp within the warpgroup
  int first_channel = 0;

  __device__ __forceinline__ int first_column() const { return part.column + group * kGroupColumns; }
  __device__ __forceinline__ int column() const { return first_column() + 16 * warp; }
  // Channels from the first on that there are, and where a state has it.
  __device__ __forceinline__ int channels() const { return args.problem.head_dim_k - first_channel; }
  __device__ __forceinline__ int64_t offset_in(const DeviceStates& states) const {
    return first_channel * states.k_stride;
  }

  // The thread's share of the states between windows.
  static constexpr int kStateThreads = kGroups * kParts * kGroupThreads;
  template <class Float>
  __device__ __forceinline__ Float* carried(Float* states) const {
    constexpr int kColumns = kGroups * kGroupColumns;
    return chunk_16bit::carried_at(args, states, part, walk, kColumns, kColumns * kK * kParts,
                                   static_cast<int>(threadIdx.x));
  }

  __device__ __forceinline__ void load_first_state(StateSums<kK>& S) const {
    if (!walk.opens) {
      chunk_16bit::take_tiles<kStateThreads>(carried(args.carried.taken), S);
      return;
    }
    if constexpr (kK == kMapWidth && kParts == 1) {
      if (walk.position > 0) {
        load_state<kMapWidth>(dense_map(state_before()), 0, column(), kMapWidth, kMapWidth, lane, S);
        return;
      }
    }
    if (args.initial_state.present()) {
      load_state<kK>(args.initial_state, state_offset(args.initial_state, part) + offset_in(args.initial_state),
                     column(), channels(), args.problem.head_dim_v, lane, S);
    }
  }

  // The state before chunk c of the walk, or after the last one.
  __device__ __forceinline__ void save_state(int c, bool last, StateSums<kK>& S) const {
    if (last && !walk.closes) return chunk_16bit::give_tiles<kStateThreads>(carried(args.carried.given), S);
    if (last && !is_tail) return;  // the state after a segment is the composed one
    const StateAddress place =
        last ? final_state_address(args, part) : chunk_state_address(args, part, walk.span.batch, walk.position + c);
    if (!place.exists) return;
    store_state<kK>(place.states, place.offset + offset_in(place.states), column(), channels(), args.problem.head_dim_v,
                    lane, S);
  }

  // Of a scan of maps: the columns of h are 0 at first, those of M, which follow them, the identity.
  __device__ __forceinline__ bool is_on_state() const { return part.column >= kMapWidth; }
  __device__ __forceinline__ void begin_map(StateSums<kK>& S) const {
    if (!walk.opens) return chunk_16bit::take_tiles<kStateThreads>(carried_map(args.segments.carried.taken), S);
    if (is_on_state()) set_identity<kK>(column() - kMapWidth, lane, S);
  }
  __device__ __forceinline__ void end_map(StateSums<kK>& S) const {
    if (!walk.closes) return chunk_16bit::give_tiles<kStateThreads>(carried_map(args.segments.carried.given), S);
    const int64_t begin = walk.span.begin + walk.span.length - segment_tokens(args);
    float* map = segment_map(args, walk.span.batch, begin, part.head, is_on_state() ? kOnState : kAlone);
    store_state<kMapWidth>(dense_map(map), 0, column() - (is_on_state() ? kMapWidth : 0), kMapWidth, kMapWidth, lane,
                           S);
  }

  // Where a segment or a tail begins: the state after the segment before it, which may have ended with the last window.
  __device__ __forceinline__ float* state_before() const {
    if (first_chunk_of(args.chunked, part.sequence) + walk.position == args.window.begin) {
      return const_cast<float*>(args.segments.composed.taken) + composed_at(args, walk.span.batch, part.head);
    }
    return segment_map(args, walk.span.batch, walk.span.begin - segment_tokens(args), part.head, kAlone);
  }

  template <class Float>
  __device__ __forceinline__ Float* carried_map(Float* maps) const {
    static_assert(kGroups == 2);
    return carried_map_at(args, maps, walk, part.head, is_on_state());
  }

  // The same before chunk c from the rounded state, where states have its type and rows along K. Neighbouring lanes
  // exchange pairs: of 16 channels a lane has four that lie together, and four lanes have 32 bytes of a row.
  __device__ __forceinline__ void save_rounded_state(int c, const Fragments<kKeySteps<kK>>& rS) const {
    const StateAddress place = chunk_state_address(args, part, walk.span.batch, walk.position + c);
    if (!place.exists) return;
    const bool odd = lane % 2 == 1;
    const int row = column() + lane / 4, first = 2 * (lane % 4) + (odd ? 6 : 0);
    uint16_t* to =
        static_cast<uint16_t*>(place.states.data) + place.offset + row * place.states.v_stride + first_channel + first;
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t low = rS[m][h], high = rS[m][2 + h];
        const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
        if (row + 8 * h >= args.problem.head_dim_v || first_channel + 16 * m + first >= args.state_width) continue;
        *reinterpret_cast<uint2*>(to + 16 * m + 8 * h * place.states.v_stride) =
            odd ? make_uint2(other, high) : make_uint2(low, other);
      }
    }
  }

  // Where the states before chunks are wanted: from the sums, or from what was rounded of them.
  __device__ __forceinline__ void save_chunk_state(int c, const Fragments<kKeySteps<kK>>& rS, StateSums<kK>& S) const {
    if (args.state_width > 0) {
      save_rounded_state(c, rS);
    } else if (args.chunk_states.present()) {
      save_state(c, false, S);
    }
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
