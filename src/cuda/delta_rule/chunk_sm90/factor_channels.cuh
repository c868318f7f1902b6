// Of the factors with a decay per channel (factors_per_channel.cu): the pair of a chunk and a value head that a team of threads
// has, its shared memory, and what of it belongs to a thread, four channels of eight rows.
#pragma once

#include "cuda/delta_rule/chunk_sm90/factor_steps.cuh"
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkFactors;

constexpr int kRows = 16;  // of a tile
constexpr int kTiles = kChunkRows / kRows;
constexpr int kOwnRows = 8, kOwnChannels = 4;  // of a thread
constexpr int kBoxColumns = KeyTile<kMostK>::kPanelColumns;

// For a padded K.
template <int kK>
inline constexpr int kThreads = kChunkRows / kOwnRows* kK / kOwnChannels;
template <int kK>
inline constexpr int kWarps = kThreads<kK> / kWarpSize;
template <int kK>
inline constexpr int kTeamsOnOne = channel_factor_teams(kK);  // multiprocessor
// A warp has so many of the eight tiles on the diagonals of k and q, or of A and sP.
template <int kK>
inline constexpr int kTurns = 2 * kTiles / kWarps<kK>;

template <int kK>
using KeyMemory = unsigned char[KeyTile<kK>::kBytes];

// The threads that work on a pair: all of a block, or one of kTeams in it.
template <int kK, int kTeams>
struct TeamOf {
  static constexpr bool kAlone = kTeams == 1;

  static __device__ __forceinline__ int number() { return kAlone ? 0 : uniform_warp() / kWarps<kK>; }
  static __device__ __forceinline__ int warp() { return kAlone ? uniform_warp() : uniform_warp() % kWarps<kK>; }
  static __device__ __forceinline__ int thread() {
    return static_cast<int>(kAlone ? threadIdx.x : threadIdx.x % kThreads<kK>);
  }
  static __device__ __forceinline__ void barrier() {
    kAlone ? __syncthreads() : barrier_among(kThreads<kK>, 1 + number());
  }
  // One thread, which is not among those that make J if there are others.
  static __device__ __forceinline__ bool leads() { return thread() == (kAlone ? 0 : kThreads<kK> - kWarpSize); }
  // Of its first warpgroup.
  static __device__ __forceinline__ void group_barrier() { warpgroup_barrier(kAlone ? 0 : kTeams + number()); }
};

// The pair of a chunk and a value head that a team has. One thread finds it, and all others wait: for a fixed length
// without divisions of 64 bits, and without most of the others where there is one sequence.
struct Item {
  uint32_t number;  // in the window: heads go first, then rows of the batch, then chunks of a row
  ChunkSpan span;   // of no sequence: there is no such chunk
  int head, tokens;
  int64_t factors, copies;

  __device__ __forceinline__ bool exists() const { return span.sequence >= 0; }
};

__device__ __forceinline__ Item item_of(const ChunkArgs& args, uint32_t number) {
  const uint32_t HV = static_cast<uint32_t>(args.problem.num_value_heads), turn = number / HV;
  const bool fixed = args.chunked.sequences.offsets == nullptr;
  const uint32_t width = static_cast<uint32_t>(args.window.width());
  Item item;
  item.number = number;
  item.head = static_cast<int>(number - turn * HV);
  if (fixed) {
    const uint32_t rows = static_cast<uint32_t>(args.chunked.sequences.count), at = rows == 1 ? turn : turn / rows;
    const uint32_t row = turn - at * rows;
    const int64_t C = args.chunked.chunk_size, position = args.window.begin + at;
    const int64_t begin = position * C;
    item.span = {row, row, begin, min(args.chunked.sequences.tokens - begin, C), position};
    const int64_t slot = int64_t{row} * width + at, chunk = row * args.window.row + position;
    item.factors = (args.factors_of_window ? slot : chunk) * HV + item.head;
    item.copies = (args.copies_of_window ? slot : chunk) * HV + item.head;
  } else {
    const int64_t chunk = args.window.chunk_in(turn);
    item.span = chunk_at(args.chunked, chunk);
    item.factors = args.factors_at(chunk) + item.head;
    item.copies = args.copies_at(chunk) + item.head;
  }
  item.tokens = static_cast<int>(item.span.length);
  return item;
}

// Powers of two of the channels, as pairs of bf16. A lane's words of two steps of a product lie together: those of
// channels 2t, 2t + 1 and 2t + 8, 2t + 9 of either.
template <int kK>
struct alignas(16) ChannelPowers {
  uint32_t words[kK / 2];

  // Of a multiple of four channels, and the two after it.
  __device__ __forceinline__ void store(uint32_t channel, uint2 powers) {
    uint32_t* to = words + channel / 32 * 16 + channel % 8 * 2 + channel / 8 % 4;
    to[0] = powers.x;
    to[4] = powers.y;
  }
  // Of steps 2 n and 2 n + 1.
  __device__ __forceinline__ uint4 load(int n, int lane) const {
    return *reinterpret_cast<const uint4*>(words + 16 * n + 4 * (lane % 4));
  }
};

template <int kK>
struct alignas(1024) Shared {
  KeyMemory<kK> k;  // then rising
  KeyMemory<kK> q;  // then rising
  union {
    struct {
      KeyMemory<kK> falling;  // the gates, before
      InverseScratch inverse;
    };
    alignas(16) float half_sums[kChunkRows * kK];  // before, for strong tiles (factor_strong.cuh)
  };
  alignas(16) float total[kTiles * kK];  // c of the tiles
  ChannelPowers<kK> between[kTiles];     // for falling rows: of tiles 1, 2, and of both
  union {
    ChannelPowers<kK> inverse_decay[kTiles];  // on the diagonal
    alignas(16) float bias[kK];               // before: of raw gates
  };
  float2 on_rows[kChunkRows];  // the factors of k and q: of the norms, and scale
  float rstd_q[kChunkRows];
  float beta[kChunkRows];
  float rate;           // of raw gates
  bool apart;           // a tile is not mild
  bool strong[kTiles];  // a tile is strong
  Item item, next;
  uint32_t parity;  // of the barriers, in this turn
  TransactionBarrier gates_filled, keys_filled, rows_read;
};

// A multiprocessor has 228 KB, of which each block takes one more.
static_assert(kTeamsOnOne<64> * (sizeof(Shared<64>) + 1024) <= 228 * 1024);
static_assert(kTeamsOnOne<128> * (sizeof(Shared<128>) + 1024) <= 228 * 1024);

// Where J and sP of an item go.
template <DType kType>
__device__ __forceinline__ GlobalResults<kType> results_of(const ChunkArgs& args, int64_t item, int lane) {
  return {args.factors.J(item), lane};
}

// The most that c may fall, in log2, of a tile that is not strong: bf16 has the exponents of fp32, enough for 16 tokens with
// g = -5; fp16 has few. And of a mild one: four of them together no more than that.
template <DType kType>
inline constexpr float kStrong = kType == DType::kBF16 ? -117.0f : -4.0f;
template <DType kType>
inline constexpr float kMild = kStrong<kType> / kTiles;

// The number of this lane, of which nothing is kept for later: registers are short.
__device__ __forceinline__ int lane_anew() {
  return opaque_below<kWarpSize>(static_cast<int>(threadIdx.x) % kWarpSize);
}

// What a thread has: four channels of rows [top, top + 8), the upper or lower half of a tile. A warp of a team has a panel of
// a tile.
template <int kK>
struct Place {
  uint32_t tile, half, channel, top;

  __device__ __forceinline__ explicit Place(int warp_of_team) {
    constexpr uint32_t kPanels = KeyTile<kK>::kPanels, kLanes = KeyTile<kK>::kPanelColumns / kOwnChannels;
    const auto warp = static_cast<uint32_t>(warp_of_team), lane = static_cast<uint32_t>(lane_anew());
    tile = warp / kPanels;
    half = lane / kLanes;
    channel = warp % kPanels * KeyTile<kK>::kPanelColumns + lane % kLanes * kOwnChannels;
    top = kRows * tile + kOwnRows * half;
  }
};

// Where KeyTile has a channel of a row.
template <int kK>
__device__ __forceinline__ uint32_t key_offset(uint32_t row, uint32_t channel) {
  constexpr uint32_t kColumns = KeyTile<kK>::kPanelColumns;
  return channel / kColumns * KeyTile<kK>::kPanelBytes + row * KeyTile<kK>::kRowBytes +
         ((channel % kColumns / 8 ^ row % 8) * 16) + channel % 8 * 2;
}
// Of row `top + i` of a thread: i is below the power of two that divides top.
template <int kK>
__device__ __forceinline__ uint32_t key_offset(const Place<kK>& own, uint32_t i) {
  return (key_offset<kK>(own.top, own.channel) ^ i * 16) + i * KeyTile<kK>::kRowBytes;
}
__device__ __forceinline__ uint2& four_at(unsigned char* rows, uint32_t offset) {
  return *reinterpret_cast<uint2*>(rows + offset);
}
__device__ __forceinline__ float4& four_at(float* numbers) { return *reinterpret_cast<float4*>(numbers); }

// Of four channels.
__device__ __forceinline__ float4 all_four(float x) { return make_float4(x, x, x, x); }
__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 operator*(float a, float4 b) { return all_four(a) * b; }
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator-(float4 a) { return make_float4(-a.x, -a.y, -a.z, -a.w); }
__device__ __forceinline__ float4 operator-(float4 a, float4 b) { return a + -b; }
__device__ __forceinline__ float4 fmaf(float a, float4 b, float4 c) {
  return make_float4(::fmaf(a, b.x, c.x), ::fmaf(a, b.y, c.y), ::fmaf(a, b.z, c.z), ::fmaf(a, b.w, c.w));
}
__device__ __forceinline__ float4 exp2_approx(float4 x) {
  using fastweight::cuda::exp2_approx;
  return make_float4(exp2_approx(x.x), exp2_approx(x.y), exp2_approx(x.z), exp2_approx(x.w));
}
__device__ __forceinline__ float4 nearest_integer(float4 x) {
  return make_float4(rintf(x.x), rintf(x.y), rintf(x.z), rintf(x.w));
}
// Of the other half of the tile.
__device__ __forceinline__ float4 other_half(float4 x) {
  constexpr int kHalf = kWarpSize / 2;
  return make_float4(__shfl_xor_sync(kAllLanes, x.x, kHalf), __shfl_xor_sync(kAllLanes, x.y, kHalf),
                     __shfl_xor_sync(kAllLanes, x.z, kHalf), __shfl_xor_sync(kAllLanes, x.w, kHalf));
}
__device__ __forceinline__ float least(float4 x) { return fminf(fminf(x.x, x.y), fminf(x.z, x.w)); }
template <DType kType>
__device__ __forceinline__ uint2 pack(float4 x) {
  using fastweight::cuda::pack;
  return make_uint2(pack<kType>(x.x, x.y), pack<kType>(x.z, x.w));
}
template <DType kType>
__device__ __forceinline__ float4 unpack(uint2 words) {
  using fastweight::cuda::unpack;
  const float2 low = unpack<kType>(words.x), high = unpack<kType>(words.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

// A pair times powers of two, a pair of bf16: exact, but for what is too small for the type to have all digits of.
template <DType kType>
__device__ __forceinline__ uint32_t times_powers(uint32_t pair, uint32_t powers) {
  if constexpr (kType == DType::kBF16) return multiply_bf16(pair, powers);
  const float2 x = fastweight::cuda::unpack<kType>(pair), y = fastweight::cuda::unpack<DType::kBF16>(powers);
  return fastweight::cuda::pack<kType>(x.x * y.x, x.y * y.y);
}
template <DType kType>
__device__ __forceinline__ uint2 times_powers(uint2 x, uint2 powers) {
  return make_uint2(times_powers<kType>(x.x, powers.x), times_powers<kType>(x.y, powers.y));
}

// Running sums over a thread's rows; log2 of the decays is `unit` times them.
struct Sums {
  float4 c[kOwnRows];
  float unit = 1;

  __device__ __forceinline__ float4 total() const { return unit * c[kOwnRows - 1]; }
  // c of the tile where the thread's rows begin.
  __device__ __forceinline__ float4 first(uint32_t half) const {
    const float4 other = other_half(total());
    return half == 0 ? all_four(0) : other;
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
