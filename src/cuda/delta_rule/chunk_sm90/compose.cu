// The states after the segments of a sequence, from their maps (segment_plan.h): S_{j+1} = M_j S_j + h_j in fp32, one segment
// after the other, each state in the place of its h. On the way back the gradients of these states, from the last segment to
// the first: G_j = M_j^T G_{j+1} + e_j, each behind the segment before, and that of the initial state.
//
// A block has 16 value columns of one (sequence, value head). M^T or M comes through shared memory, the next one while a
// product runs. A warp has 32 channels of the result and one half of the sums over S_j, a thread 4 channels of 4 columns:
//
//     warp        channels 32 (warp % 4) + ..,  sums over channels of S_j from 64 (warp / 4) on
//     thread      4 (lane / 4) + ..,            columns 4 (lane % 4) + ..
//
// so that 16 FMAs need one float4 of M^T and one of S, and a warp reads each of them once from shared memory. Below S is the
// state or its gradient.
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/delta_rule/chunk_sm90/segments.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

constexpr int kColumns = 16, kThreads = 256, kHalf = kMapWidth / 2;
constexpr int kPitch = kColumns + 4;  // of the rows of S

struct alignas(1024) Shared {
  float M[2][kMapFloats];  // [channel of S_j][channel of the result]
  float S[kMapWidth][kPitch];
  float sums[kMapWidth][kPitch];  // of the second half
  TransactionBarrier filled[2];
};

// Where the composition of a window begins: with the state that the caller gives, with that which the window before it
// hands over, or, on the way back, with what the tail left behind the last segment.
enum class From { kCaller, kWindow, kTail };

// What is to be done of a sequence in the window.
struct Composition {
  SequenceSpan span;   // of all of it
  int64_t begin, end;  // the segments that end in the window; on the way back, that begin in it
  From from;
  bool hands_over;  // to the next window
  bool cuts;        // on the way back: the segment before `begin` ends in the window

  __device__ __forceinline__ int64_t count() const { return end - begin; }
};

// Whose segments a block composes, -1: nobody's. With offsets there is a block for every group of segments, and the one of
// the first group of a sequence works.
__device__ __forceinline__ int64_t cut_sequence_at(const ScanArgs& args, int64_t i) {
  if (args.problem.sequences.offsets == nullptr) return i;
  const SegmentPlace place = segment_in_order(args, i * kSegmentGroup);
  return place.exists && place.index == 0 ? place.sequence : -1;
}
int64_t most_cut_sequences(const ScanArgs& args) {
  const Sequences& sequences = args.problem.sequences;
  if (sequences.offsets == nullptr) return sequences.count;
  return sequences.tokens / (kSegmentGroup * args.segments.chunks * args.chunked.chunk_size);
}

__device__ __forceinline__ Composition forward_composition(const ScanArgs& args, int64_t sequence) {
  const ChunkWindow& window = args.window;
  const SequenceSpan span = sequence_at(args.problem.sequences, sequence);
  const int64_t n = args.segments.chunks, place = first_chunk_of(args.chunked, sequence);
  const int64_t all = segments_of(span.length, segment_tokens(args));
  if (window.is_all()) return {span, 0, all, From::kCaller, false, false};
  const int64_t begin = min(max(window.begin - place, int64_t{0}) / n, all);
  const int64_t end = min(max(window.end - place, int64_t{0}) / n, all);
  const bool goes_on = place < window.end && window.end < place + chunks_of(span.length, args.chunked.chunk_size);
  return {span, begin, end, begin > 0 ? From::kWindow : From::kCaller, goes_on && end > 0, false};
}

__device__ __forceinline__ Composition back_composition(const ScanArgs& args, int64_t sequence) {
  const ChunkWindow& window = args.window;
  const SequenceSpan span = sequence_at(args.problem.sequences, sequence);
  const int64_t n = args.segments.chunks, place = first_chunk_of(args.chunked, sequence);
  const int64_t all = segments_of(span.length, segment_tokens(args));
  const int64_t tail = place + all * n, last = place + chunks_of(span.length, args.chunked.chunk_size);
  const From of_end = tail == last ? From::kCaller : From::kTail;
  if (window.is_all()) return {span, 0, all, of_end, false, false};
  const auto first_from = [&](int64_t at) { return min((max(at - place, int64_t{0}) + n - 1) / n, all); };
  const int64_t begin = first_from(window.begin), end = first_from(window.end), opens = place + begin * n;
  // The tail lies in the window, or nothing is behind the segments, whose last one ends there.
  const bool has_end = end == all && (tail < window.end || (tail == window.end && tail == last));
  // A tail that the window begins with hands over by itself (GradientColumns).
  const bool hands_over = begin > 0 && (begin < end || opens > window.begin);
  return {span, begin, end, has_end ? of_end : From::kWindow, hands_over, begin > 0 && opens > window.begin};
}

// float4s of a thread: rows of channels, columns of value columns.
struct Tile {
  float4 row[4];

  __device__ __forceinline__ void clear() {
    for (float4& x : row) x = make_float4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void add_product(const float4& m, const float4& s) {
    const float of_rows[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      row[i].x = fmaf(of_rows[i], s.x, row[i].x);
      row[i].y = fmaf(of_rows[i], s.y, row[i].y);
      row[i].z = fmaf(of_rows[i], s.z, row[i].z);
      row[i].w = fmaf(of_rows[i], s.w, row[i].w);
    }
  }
  __device__ __forceinline__ void add(const float4& x, int i) {
    row[i].x += x.x;
    row[i].y += x.y;
    row[i].z += x.z;
    row[i].w += x.w;
  }
};

__device__ __forceinline__ float4& four(float* x) { return *reinterpret_cast<float4*>(x); }

// Of a matrix [value columns][channels] in memory: the tile whose first element is `from`, transposed.
__device__ __forceinline__ void load_transposed(const float* from, Tile& tile) {
  float4 columns[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) columns[c] = *reinterpret_cast<const float4*>(from + c * kMapWidth);
  tile.row[0] = make_float4(columns[0].x, columns[1].x, columns[2].x, columns[3].x);
  tile.row[1] = make_float4(columns[0].y, columns[1].y, columns[2].y, columns[3].y);
  tile.row[2] = make_float4(columns[0].z, columns[1].z, columns[2].z, columns[3].z);
  tile.row[3] = make_float4(columns[0].w, columns[1].w, columns[2].w, columns[3].w);
}
__device__ __forceinline__ void store_transposed(const Tile& tile, float* to) {
  four(to) = make_float4(tile.row[0].x, tile.row[1].x, tile.row[2].x, tile.row[3].x);
  four(to + kMapWidth) = make_float4(tile.row[0].y, tile.row[1].y, tile.row[2].y, tile.row[3].y);
  four(to + 2 * kMapWidth) = make_float4(tile.row[0].z, tile.row[1].z, tile.row[2].z, tile.row[3].z);
  four(to + 3 * kMapWidth) = make_float4(tile.row[0].w, tile.row[1].w, tile.row[2].w, tile.row[3].w);
}

// An element of a sequence's state, if there is one.
struct StateElement {
  const DeviceStates& states;
  int64_t offset;
  bool exists;

  __device__ __forceinline__ StateElement(const ScanArgs& args, const DeviceStates& of, int64_t sequence, int head,
                                          int channel, int column)
      : states(of),
        offset(sequence * of.outer_strides[0] + head * of.outer_strides[1] + channel * of.k_stride +
               column * of.v_stride),
        exists(of.present() && channel < args.problem.head_dim_k && column < args.problem.head_dim_v) {}

  __device__ __forceinline__ float load() const { return exists ? load_float(states.data, states.dtype, offset) : 0; }
  __device__ __forceinline__ void store(float x) const {
    if (exists) store_float(states.data, states.dtype, offset, x);
  }
};

// A block per (sequence, value head, 16 value columns), the last fastest. `first`: the states that the sequences begin with, or
// on the way back the gradients that they end with; `last`: on the way back, those of the initial states.
template <bool kBack>
__global__ void __launch_bounds__(kThreads, 1)
    compose_kernel(const __grid_constant__ ScanArgs args, const __grid_constant__ DeviceStates first,
                   const __grid_constant__ DeviceStates last) {
  auto& s = aligned_shared<Shared>();
  const int thread = static_cast<int>(threadIdx.x), warp = uniform_warp(), lane = thread % kWarpSize;
  if (thread == 0) {
    for (TransactionBarrier& filled : s.filled) filled.init(1);
    fence_barrier_init();
  }
  wait_for_previous_kernels();
  let_next_kernel_start();
  __syncthreads();
  const int ranges = (args.problem.head_dim_v + kColumns - 1) / kColumns;
  const int64_t row = blockIdx.x / ranges, number = row / args.problem.num_value_heads;
  const int64_t sequence = cut_sequence_at(args, number);
  if (sequence < 0) return;
  const int head = static_cast<int>(row - number * args.problem.num_value_heads);
  const int first_column = static_cast<int>(blockIdx.x - row * ranges) * kColumns;
  const Composition work = kBack ? back_composition(args, sequence) : forward_composition(args, sequence);
  const int count = static_cast<int>(work.count());
  if (count == 0 && !work.hands_over) return;
  const int64_t tokens = segment_tokens(args);
  const auto map_of = [&](int64_t segment, MapPart part) {
    return segment_map(args, work.span.batch, work.span.begin + segment * tokens, head, part);
  };
  const auto segment_of = [&](int turn) { return kBack ? work.end - 1 - turn : work.begin + turn; };
  const auto bring = [&](int turn) {
    if (thread != 0 || turn >= count) return;
    TransactionBarrier& filled = s.filled[turn % 2];
    filled.arrive_expecting(sizeof(s.M[0]));
    load_bytes(shared_address(s.M[turn % 2]), map_of(segment_of(turn), kOnState), sizeof(s.M[0]), filled);
  };
  bring(0);

  // body(k, v, i): of the thread's elements of S, channel k of column v, which lie at i in a matrix of the columns.
  const auto for_each_element = [&](const auto& body) {
    for (int i = thread; i < kMapWidth * kColumns; i += kThreads) body(i % kMapWidth, i / kMapWidth, i);
  };
  const int64_t columns = int64_t{first_column} * kMapWidth;
  const int64_t handed = composed_at(args, work.span.batch, head) + columns;
  for_each_element([&](int k, int v, int i) {
    float& x = s.S[k][v];
    if (work.from == From::kCaller) {
      x = StateElement(args, first, sequence, head, k, first_column + v).load();
    } else {
      const float* matrix =
          work.from == From::kWindow ? args.segments.composed.taken + handed : map_of(work.end - 1, kBehind) + columns;
      x = matrix[i];
    }
  });
  const int half = warp / 4, channel = 32 * (warp % 4) + 4 * (lane / 4), column = 4 * (lane % 4);
  for (int turn = 0; turn < count; ++turn) {
    const int64_t segment = segment_of(turn), at = columns + column * kMapWidth + channel;
    __syncthreads();  // S is there, and nobody reads the M of two segments before
    bring(turn + 1);
    Tile alone, sums;
    if (half == 0) load_transposed(map_of(segment, kAlone) + at, alone);
    s.filled[turn % 2].wait(static_cast<uint32_t>(turn / 2 % 2));
    sums.clear();
    const float* M = s.M[turn % 2] + half * kHalf * kMapWidth + channel;
#pragma unroll 8
    for (int j = 0; j < kHalf; ++j) {
      sums.add_product(*reinterpret_cast<const float4*>(M + j * kMapWidth), four(&s.S[half * kHalf + j][column]));
    }
    if (half == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) four(&s.sums[channel + i][column]) = sums.row[i];
    }
    __syncthreads();
    if (half == 1) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums.add(four(&s.sums[channel + i][column]), i);
      sums.add(alone.row[i], i);
      four(&s.S[channel + i][column]) = sums.row[i];
    }
    if constexpr (!kBack) {
      store_transposed(sums, map_of(segment, kAlone) + at);
    } else if (segment > work.begin || work.cuts) {
      store_transposed(sums, map_of(segment - 1, kBehind) + at);
    }
  }
  __syncthreads();
  if (work.hands_over) {
    for_each_element([&](int k, int v, int i) { args.segments.composed.given[handed + i] = s.S[k][v]; });
  } else if (kBack && work.begin == 0) {
    for_each_element(
        [&](int k, int v, int) { StateElement(args, last, sequence, head, k, first_column + v).store(s.S[k][v]); });
  }
}

template <bool kBack>
void launch_composition(const ScanArgs& args, const DeviceStates& first, const DeviceStates& last,
                        const Context& context) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t blocks = most_cut_sequences(args) * p.num_value_heads * ((p.head_dim_v + kColumns - 1) / kColumns);
  launch<compose_kernel<kBack>>("delta_rule chunk_sm90 compose", context,
                                {static_cast<unsigned>(blocks), kThreads, sizeof(Shared), true}, args, first, last);
}

}  // namespace

void launch_compose(const ForwardArgs& args, const Context& context) {
  launch_composition<false>(args, args.initial_state, {}, context);
}

void launch_compose_back(const ScanArgs& args, const DeviceStates& d_final_state, const DeviceStates& d_initial_state,
                         const Context& context) {
  launch_composition<true>(args, d_final_state, d_initial_state, context);
}

}  // namespace fastweight::cuda::chunk_sm90
