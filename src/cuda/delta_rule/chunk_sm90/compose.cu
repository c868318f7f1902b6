// The states after the segments of a sequence, from their maps (segment_plan.h): S_{j+1} = M_j S_j + h_j in fp32, one segment
// after the other, each state in the place of its h.
//
// A block has 16 value columns of one (sequence, value head). M comes through shared memory, the next one while a product
// runs. A warp has 32 channels of the result and one half of the sums over S_j, a thread 4 channels of 4 columns:
//
//     warp        channels 32 (warp % 4) + ..,  sums over channels of S_j from 64 (warp / 4) on
//     thread      4 (lane / 4) + ..,            columns 4 (lane % 4) + ..
//
// so that 16 FMAs need one float4 of M^T and one of S, and a warp reads each of them once from shared memory.
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/delta_rule/chunk_sm90/segments.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

constexpr int kColumns = 16, kThreads = 256, kHalf = kMapWidth / 2;
constexpr int kPitch = kColumns + 4;  // of the rows of S

struct alignas(1024) Shared {
  float M[2][kMapFloats];  // M^T, [channel of S_j][channel of the result]
  float S[kMapWidth][kPitch];
  float sums[kMapWidth][kPitch];  // of the second half
  TransactionBarrier filled[2];
};

// What is to be done of a sequence in the window.
struct Composition {
  SequenceSpan span;   // of all of it
  int64_t begin, end;  // the segments that end in the window
  bool goes_on;        // the sequence, in the next one
};

// Whose segments a block composes, -1: nobody's. With offsets there is a block for every group of segments, and the one of
// the first group of a sequence works.
__device__ __forceinline__ int64_t cut_sequence_at(const ForwardArgs& args, int64_t i) {
  if (args.problem.sequences.offsets == nullptr) return i;
  const SegmentPlace place = segment_in_order(args, i * kSegmentGroup);
  return place.exists && place.index == 0 ? place.sequence : -1;
}
int64_t most_cut_sequences(const ForwardArgs& args) {
  const Sequences& sequences = args.problem.sequences;
  if (sequences.offsets == nullptr) return sequences.count;
  return sequences.tokens / (kSegmentGroup * args.segments.chunks * args.chunked.chunk_size);
}

__device__ __forceinline__ Composition composition_of(const ForwardArgs& args, int64_t sequence) {
  const ChunkWindow& window = args.window;
  const SequenceSpan span = sequence_at(args.problem.sequences, sequence);
  const int64_t n = args.segments.chunks, place = first_chunk_of(args.chunked, sequence);
  const int64_t all = segments_of(span.length, segment_tokens(args));
  if (window.is_all()) return {span, 0, all, false};
  const int64_t begin = max(window.begin - place, int64_t{0}) / n, end = max(window.end - place, int64_t{0}) / n;
  const bool goes_on = place < window.end && window.end < place + chunks_of(span.length, args.chunked.chunk_size);
  return {span, min(begin, all), min(end, all), goes_on};
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

// One element of the state that a sequence begins with; zeros beyond its channels and columns.
__device__ __forceinline__ float initial_element(const ForwardArgs& args, int64_t sequence, int head, int channel,
                                                 int column) {
  const DeviceStates& states = args.initial_state;
  if (!states.present() || channel >= args.problem.head_dim_k || column >= args.problem.head_dim_v) return 0;
  return load_float(states.data, states.dtype,
                    sequence * states.outer_strides[0] + head * states.outer_strides[1] + channel * states.k_stride +
                        column * states.v_stride);
}

// A block per (sequence, value head, 16 value columns), the last fastest.
__global__ void __launch_bounds__(kThreads, 1) compose_kernel(const __grid_constant__ ForwardArgs args) {
  auto& s = aligned_shared<Shared>();
  const int thread = static_cast<int>(threadIdx.x), warp = uniform_warp(), lane = thread % kWarpSize;
  if (thread == 0) {
    for (TransactionBarrier& filled : s.filled) filled.init(1);
    fence_barrier_init();
  }
  wait_for_previous_kernels();
  __syncthreads();
  const int ranges = (args.problem.head_dim_v + kColumns - 1) / kColumns;
  const int64_t row = blockIdx.x / ranges, number = row / args.problem.num_value_heads;
  const int64_t sequence = cut_sequence_at(args, number);
  if (sequence < 0) return;
  const int head = static_cast<int>(row - number * args.problem.num_value_heads);
  const int first_column = static_cast<int>(blockIdx.x - row * ranges) * kColumns;
  const Composition work = composition_of(args, sequence);
  if (work.end == 0 || (work.begin == work.end && !work.goes_on)) return;
  const int64_t tokens = segment_tokens(args);
  const auto map_of = [&](int64_t segment, MapPart part) {
    return segment_map(args, work.span.batch, work.span.begin + segment * tokens, head, part);
  };
  const auto bring = [&](int64_t segment) {
    if (thread != 0 || segment >= work.end) return;
    TransactionBarrier& filled = s.filled[(segment - work.begin) % 2];
    filled.arrive_expecting(sizeof(s.M[0]));
    load_bytes(shared_address(s.M[(segment - work.begin) % 2]), map_of(segment, kOnState), sizeof(s.M[0]), filled);
  };
  bring(work.begin);

  const int64_t state = (work.span.batch * args.problem.num_value_heads + head) * kMapFloats + first_column * kMapWidth;
  for (int i = thread; i < kMapWidth * kColumns; i += kThreads) {
    const int channel = i % kMapWidth, column = i / kMapWidth;
    s.S[channel][column] = work.begin > 0 ? args.segments.after.taken[state + i]
                                          : initial_element(args, sequence, head, channel, first_column + column);
  }
  const int half = warp / 4, channel = 32 * (warp % 4) + 4 * (lane / 4), column = 4 * (lane % 4);
  for (int64_t segment = work.begin; segment < work.end; ++segment) {
    const int turn = static_cast<int>((segment - work.begin) % 2);
    const uint32_t parity = static_cast<uint32_t>((segment - work.begin) / 2 % 2);
    __syncthreads();  // S is there, and nobody reads the M of two segments before
    bring(segment + 1);
    Tile h, sums;
    float* after = map_of(segment, kAfter) + (first_column + column) * kMapWidth + channel;
    if (half == 0) load_transposed(after, h);
    s.filled[turn].wait(parity);
    sums.clear();
    const float* M = s.M[turn] + half * kHalf * kMapWidth + channel;
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
      sums.add(h.row[i], i);
      four(&s.S[channel + i][column]) = sums.row[i];
    }
    store_transposed(sums, after);
  }
  if (!work.goes_on) return;
  __syncthreads();
  for (int i = thread; i < kMapWidth * kColumns; i += kThreads) {
    args.segments.after.given[state + i] = s.S[i % kMapWidth][i / kMapWidth];
  }
}

}  // namespace

void launch_compose(const ForwardArgs& args, const Context& context) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t blocks = most_cut_sequences(args) * p.num_value_heads * ((p.head_dim_v + kColumns - 1) / kColumns);
  launch<compose_kernel>("delta_rule chunk_sm90 compose", context,
                         {static_cast<unsigned>(blocks), kThreads, sizeof(Shared), true}, args);
}

}  // namespace fastweight::cuda::chunk_sm90
