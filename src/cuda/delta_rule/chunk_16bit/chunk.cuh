// The chunk form on tensor cores with 16-bit operands: what its kernels share. ../chunk.cuh has the equations.
//
// A chunk has options.chunk_size tokens and stands in tiles of 64 rows. The rounding to 16 bits is that of the operands
// of products: q, k, v, J, sP, R, beta D and S. Decays, A, its inversion and all sums are fp32.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/common/tile_rows.cuh"
#include "cuda/common/unit_lower.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/chunk.cuh"
#include "cuda/delta_rule/chunk_16bit/config.h"
#include "cuda/delta_rule/chunk_16bit/gate.cuh"
#include "cuda/delta_rule/chunk_16bit/lower.h"

namespace fastweight::cuda::chunk_16bit {

inline constexpr int kChunkRows = 64;

// What the scans need of every (chunk, value head), in scratch memory. One decay per head: the norms of q and k and the
// decays are numbers per token. One per channel: they are inside three copies of the keys, and beta is the only number.
struct ChunkFactors {
  uint16_t* lower = nullptr;  // [chunks][HV][2][kLowerElements]: J and sP, by LowerMatrix
  float* token = nullptr;     // [chunks][HV][token_factors][64]: per head by TokenFactor; per channel kOnValue alone
  float* total = nullptr;     // [chunks][HV][total_width]: e_n, per channel or once
  uint16_t* keys = nullptr;   // per channel [chunks][HV][3][64][padded K], by KeyCopy
  float* row = nullptr;       // [chunks][HV][3][64], by RowNumber, for a backward or a scan that makes sP; else absent
  int total_width = 4;        // padded K per channel, else 4 of which the first counts

  __device__ __forceinline__ uint16_t* J(int64_t item) const {
    return lower + (item * kLowerMatrices + kLowerJ) * kLowerElements;
  }
  __device__ __forceinline__ uint16_t* sP(int64_t item) const {
    return lower + (item * kLowerMatrices + kLowerP) * kLowerElements;
  }
};

// How many numbers a token has, and which of them is beta.
template <bool kPerChannel>
inline constexpr int kTokenFactors = kPerChannel ? 1 : 4;
template <bool kPerChannel>
inline constexpr int kBetaFactor = kPerChannel ? 0 : kOnValue;

// What the gradients need of a token beside its factors: gamma in log2 (per head only) and the factors of the norms.
enum RowNumber { kGamma, kRstdOfQ, kRstdOfK };
inline constexpr int kRowNumbers = 3;

// What a window hands to the next one, of every row: the state where they meet, in fp32; or, on the way back, its
// gradient. [B, HV, ranges of columns], each as the registers of the block's threads. Two of them, because the row of a
// call with offsets may have one sequence that takes and another that gives.
struct WindowStates {
  const float* taken = nullptr;
  float* given = nullptr;
};

struct ChunkArgs {
  DeltaRuleDeviceProblem problem;
  ChunkedSequences chunked;
  int64_t num_chunks = 0;       // at most, over all sequences
  ChunkWindow window;           // those that the launch works on
  bool vector_keys = false;     // rows of q and k can be copied in 16-byte pieces
  bool vector_values = false;   // rows of v can
  bool vector_outputs = false;  // rows of o can be written so
  ChunkFactors factors;
  bool factors_of_window = false;  // by the slots of the window; else by the numbers of the chunks
  bool copies_of_window = false;   // of what is per channel, keys and with them total
  bool copies_alone = false;       // the other factors are there: none but copies are made
  DeviceTensor o;                  // absent: only states are wanted
  DeviceStates initial_state, final_state, chunk_states;
  WindowStates carried;
  int64_t state_chunks = 0;  // of chunk_states
  // How many elements chunk_states have along K where they have the type of the operands and rows along K in pieces of
  // 16 bytes, which are then written so; else 0.
  int state_width = 0;

  // Value columns of all blocks of a scan, at least.
  FW_HOST_DEVICE int padded_v() const { return (problem.head_dim_v + 63) / 64 * 64; }
  // Where the factors of a chunk, of all value heads, begin, and its copies of the keys.
  __device__ __forceinline__ int64_t factors_at(int64_t chunk) const { return place_of(chunk, factors_of_window); }
  __device__ __forceinline__ int64_t copies_at(int64_t chunk) const { return place_of(chunk, copies_of_window); }
  __device__ __forceinline__ int64_t place_of(int64_t chunk, bool of_window) const {
    return (of_window ? window.slot_of(chunk) : chunk) * problem.num_value_heads;
  }
};

// Of eight columns of a tile that J or sP is copied to: blocks of 16 above the diagonal are neither written nor read.
__device__ __forceinline__ bool above_diagonal(int row, int segment) { return segment / 2 > row / 16; }

// Copies by thread `thread` of kThreads; the caller commits them.
template <int kThreads>
__device__ __forceinline__ void copy_lower(const SharedTile<kChunkRows>& tile, const uint16_t* source, int thread) {
  constexpr int kSegments = SharedTile<kChunkRows>::kSegments, kStep = kThreads / kSegments;
  const int segment = thread % kSegments, top = thread / kSegments;
  static_assert(kStep <= 16);
#pragma unroll
  for (int i = 0; i < kChunkRows; i += kStep) {
    if (above_diagonal(top + i, segment)) continue;
    const int row = opaque(top) + i % 16;  // its place is computed here, not kept: registers are short
    copy_async(tile.address(top + i, segment), source + lower_offset(i / 16, row, segment * 8), true);
  }
}

// A tile that lies densely in scratch memory.
template <int kThreads, int kColumns>
__device__ __forceinline__ void copy_tile(const SharedTile<kColumns>& tile, const uint16_t* source, int thread) {
  constexpr int kSegments = SharedTile<kColumns>::kSegments, kStep = kThreads / kSegments;
  const int segment = thread % kSegments, top = thread / kSegments;
  source += top * kColumns + segment * 8;
#pragma unroll
  for (int i = 0; i < kChunkRows; i += kStep) {
    copy_async(tile.address(top + i, segment), source + i * kColumns, true);
  }
}

// log2 of a decay. Below 2^-149 there is no positive float; the bound keeps sums of the logarithms small. NaN stays NaN.
__device__ __forceinline__ float log2_decay(const DeltaRuleDeviceProblem& problem, float x, float rate, float bias) {
  return max_or_nan(log_decay(problem, x, rate, bias) * kLog2E, -150.0f);
}

// The chunks of the window, of all rows.
FW_HOST_DEVICE inline int64_t chunks_in_window(const ChunkArgs& args) {
  return args.window.is_all() ? args.num_chunks : args.num_chunks / args.window.row * args.window.width();
}

// body(chunk, span, head) for the block's share of all pairs of a chunk of the window and a value head. All threads leave a
// pair before the next one begins.
template <class Body>
__device__ __forceinline__ void for_each_item(const ChunkArgs& args, const Body& body) {
  const int HV = args.problem.num_value_heads;
  const int64_t items = chunks_in_window(args) * HV;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t slot = item / HV, chunk = args.window.chunk_in(slot);
    const int head = static_cast<int>(item - slot * HV);
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    body(chunk, span, head);
    __syncthreads();
  }
}

// One block for each item; a smaller grid goes round.
inline unsigned blocks_for_items(const ChunkArgs& args) {
  const int64_t items = chunks_in_window(args) * args.problem.num_value_heads;
  return static_cast<unsigned>(items < int64_t{1} << 30 ? items : int64_t{1} << 30);
}

// The rows of q or k of a chunk; the caller commits the copies.
template <int kThreads, int kK>
__device__ __forceinline__ void load_keys(const ChunkArgs& args, const DeviceTensor& x, const ChunkSpan& span, int head,
                                          const SharedTile<kK>& tile) {
  const auto* start = static_cast<const uint16_t*>(x.data) + row_offset(x, span.batch, span.begin, head);
  load_rows<kChunkRows, kThreads>(tile, x, start, static_cast<int>(span.length), 0, args.problem.head_dim_k,
                                  args.vector_keys, static_cast<int>(threadIdx.x));
}

// 1 / sqrt(sum x^2 + eps) of the tile's rows, each by kLanes neighbouring lanes; all 1 unless the option asks.
template <DType kType, int kLanes, int kColumns>
__device__ __forceinline__ void row_norms(const SharedTile<kColumns>& tile, bool wanted, float* rstd) {
  const int row = threadIdx.x / kLanes, part = threadIdx.x % kLanes;
  if (row >= kChunkRows) return;
  float sum = 0;
  if (wanted) {
    for (int s = part; s < SharedTile<kColumns>::kSegments; s += kLanes) {
      const uint4 words = *reinterpret_cast<const uint4*>(tile.segment(row, s));
      for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
        const float2 x = unpack<kType>(word);
        sum = fmaf(x.y, x.y, fmaf(x.x, x.x, sum));
      }
    }
    sum = sum_over_lanes<kLanes>(sum);
  }
  if (part == 0) rstd[row] = wanted ? 1.0f / sqrtf(sum + kL2NormEps) : 1.0f;
}

inline constexpr int kPitchOfA = kPitchOfA64, kPitchOfJ = kPitchOfJ64;

// J to global memory.
template <DType kType, int kThreads>
__device__ __forceinline__ void store_lower(const float* J, uint16_t* destination) {
  const int segment = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kChunkRows; i += kThreads / 8) {
    const int row = i + static_cast<int>(threadIdx.x) / 8;
    if (above_diagonal(row, segment)) continue;
    const float* x = J + row * kPitchOfJ + segment * 8;
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) words[e] = pack<kType>(x[2 * e], x[2 * e + 1]);
    *reinterpret_cast<uint4*>(destination + lower_offset(row, segment * 8)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// One launch each over all (chunk, value head) pairs, and the shared memory that a block takes.
void launch_factors(const ChunkArgs& args, int padded_k, const Context& context);
void launch_factors_per_channel(const ChunkArgs& args, int padded_k, const Context& context);
size_t factors_bytes(int padded_k);
size_t factors_per_channel_bytes(int padded_k);

// The scan, in one launch. For bf16 and fp16, a file each.
template <DType kType>
void launch_scan(const ChunkArgs& args, const ScanConfig& config, const Context& context);

// Calls body.template operator()<kType, kK>() for the element type and padded K of a problem.
template <class Body>
void with_tile(DType dtype, int padded_k, const Body& body) {
  with_padded_k(padded_k, [&]<int kK>() {
    if (dtype == DType::kBF16) {
      body.template operator()<DType::kBF16, kK>();
    } else {
      body.template operator()<DType::kF16, kK>();
    }
  });
}

}  // namespace fastweight::cuda::chunk_16bit
