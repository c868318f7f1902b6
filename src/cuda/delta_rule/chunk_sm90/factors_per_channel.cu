// The factors of the chunk form with one decay per key channel, for K <= 128: what chunk_16bit/factors_per_channel.cu
// makes, with fewer instructions. See ../chunk.cuh for the equations.
//
// One block of eight warps per (chunk, value head), three of them on a multiprocessor, or of four warps and four of them where
// K <= 64: what binds are instructions, and the time until TMA has brought the gates, where it can, and the rows of k and q
// behind them. A thread has four channels of half a tile of 16 rows. With c_i, the running sums of log2 of the decays in a
// tile, and c of the whole tile,
//
//     A  = beta rising_k falling^T,     sP = scale rising_q falling^T     (k and q with the factors of their norms)
//
// where rising and falling rows hold their decays from, and to, an anchor between them:
//
//     all tiles mild    the start of the chunk:    rising_i = k_i 2^(before + c_i)    falling_j = k_j 2^-(before + c_j)
//     otherwise         two for a tile:            rising_i = k_i 2^c_i               falling_j = k_j 2^(c - c_j)
//
// With one anchor the rising rows are the scan's copies of k and q, and products are wgmma's: of two warpgroups one makes A,
// and J of it, the other sP. With two anchors they are made tile by tile: tiles below the diagonal have the decays of the
// whole tiles between as a factor per channel, those on it 2^-c, which falling rows take in registers. On the diagonal of a
// strong tile, one that 2^-c is too large for, the factors are computed in fp32: k_j runs down the rows, multiplied by one
// decay after the other. So nothing overflows for g <= 0.
//
// Sums of logarithms are short of digits only where their power is short of anything: log2 of a decay is at least -150,
// so c - c_j has an error below 2^-12, a sixteenth of the rounding of what it multiplies.
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"

#include <limits>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/factor_steps.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkFactors;
using chunk_16bit::GateKind;
using chunk_16bit::kLog2E;

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
inline constexpr int kBlocksOnOne = kK == 64 ? 4 : 3;  // multiprocessor
// A warp has so many of the eight tiles on the diagonals of k and q, or of A and sP.
template <int kK>
inline constexpr int kTurns = 2 * kTiles / kWarps<kK>;

template <int kK>
using KeyMemory = unsigned char[KeyTile<kK>::kBytes];

// The pair of a chunk and a value head that a block has. One thread finds it, and all others wait: for a fixed length
// without divisions of 64 bits, and without most of the others where there is one sequence.
struct Item {
  ChunkSpan span;  // of no sequence: there is no such chunk
  int head, tokens;
  int64_t factors;
};

__device__ __forceinline__ Item item_of_block(const ChunkArgs& args) {
  const uint32_t HV = static_cast<uint32_t>(args.problem.num_value_heads), slot = blockIdx.x / HV;
  const bool fixed = args.chunked.sequences.offsets == nullptr;
  Item item;
  item.head = static_cast<int>(blockIdx.x - slot * HV);
  if (fixed) {
    const uint32_t width = static_cast<uint32_t>(args.window.width()), row = slot < width ? 0 : slot / width;
    const int64_t C = args.chunked.chunk_size, position = args.window.begin + (slot - row * width);
    const int64_t begin = position * C;
    item.span = {row, row, begin, min(args.chunked.sequences.tokens - begin, C), position};
    item.factors = args.factors_of_window ? blockIdx.x : (row * args.window.row + position) * HV + item.head;
  } else {
    const int64_t chunk = args.window.chunk_in(slot);
    item.span = chunk_at(args.chunked, chunk);
    item.factors = args.factors_at(chunk) + item.head;
  }
  item.tokens = static_cast<int>(item.span.length);
  return item;
}

template <int kK>
struct alignas(1024) Shared {
  KeyMemory<kK> k;  // then rising
  KeyMemory<kK> q;  // then rising
  union {
    struct {
      KeyMemory<kK> falling;  // the gates, before
      InverseScratch inverse;
    };
    alignas(16) float log2_decay[kChunkRows * kK];  // before, for strong tiles
  };
  alignas(16) float total[kTiles * kK];   // c of the tiles
  alignas(16) float between[kTiles][kK];  // factors of falling rows: 2^c of tiles 1, 2, and of both
  union {
    alignas(16) float inverse_decay[kTiles * kK];  // 2^-c
    alignas(16) float bias[kK];                    // before: of raw gates
  };
  float2 on_rows[kChunkRows];  // the factors of k and q: of the norms, and scale
  float rstd_q[kChunkRows];
  float beta[kChunkRows];
  float rate;           // of raw gates
  bool apart;           // a tile is not mild
  bool strong[kTiles];  // a tile is strong
  Item item;
  TransactionBarrier gates_filled, keys_filled;
};

// A multiprocessor has 228 KB, of which each block takes one more.
static_assert(kBlocksOnOne<64> * (sizeof(Shared<64>) + 1024) <= 228 * 1024);
static_assert(kBlocksOnOne<128> * (sizeof(Shared<128>) + 1024) <= 228 * 1024);

// Where J and sP of an item go.
template <DType kType>
__device__ __forceinline__ GlobalResults<kType> results_of(const ChunkArgs& args, int64_t item, int lane) {
  const int64_t at = item * kChunkRows * kChunkRows;
  return {args.factors.J + at, args.factors.sP + at, lane};
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

// What a thread has: four channels of rows [top, top + 8), the upper or lower half of a tile. A warp has a panel of a tile.
template <int kK>
struct Place {
  uint32_t tile, half, channel, top;

  __device__ __forceinline__ Place() {
    constexpr uint32_t kPanels = KeyTile<kK>::kPanels, kLanes = KeyTile<kK>::kPanelColumns / kOwnChannels;
    const auto warp = static_cast<uint32_t>(uniform_warp()), lane = static_cast<uint32_t>(lane_anew());
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

// By one thread. k and q beyond the tokens and channels are zeros.
template <int kK>
__device__ __forceinline__ void start_loads(const ChunkArgs& args, const FactorMaps& maps, Shared<kK>& s) {
  using Rows = KeyTile<kK>;
  const Item& item = s.item;
  const int end = static_cast<int>(item.span.begin) + item.tokens, missing = kChunkRows - item.tokens;
  const auto load = [&](const KeyMemory<kK>& memory, const TensorMap& map, uint32_t head, TransactionBarrier& barrier) {
#pragma unroll
    for (int p = 0; p < Rows::kPanels; ++p) {
      load_box(Rows(memory).panel(p), map,
               {p * Rows::kPanelColumns, static_cast<int>(head), missing, end, static_cast<int>(item.span.batch)},
               barrier);
    }
  };
  const auto head = static_cast<uint32_t>(item.head), group = static_cast<uint32_t>(args.problem.group);
  const uint32_t key_head = group == 1 ? head : head / group;
  s.gates_filled.arrive_expecting(maps.has_g ? Rows::kBytes : 0);
  if (maps.has_g) load(s.falling, maps.g, head, s.gates_filled);
  s.keys_filled.arrive_expecting(2 * Rows::kBytes);
  load(s.k, maps.k, key_head, s.keys_filled);
  load(s.q, maps.q, key_head, s.keys_filled);
}

// The rows' norms are the diagonals of k k^T and q q^T. All are 1 unless the option asks.
template <DType kType, int kK>
__device__ __forceinline__ void norms_of_tile(Shared<kK>& s, const DeltaRuleDeviceProblem& p, int at, int lane) {
  const bool of_k = at < kTiles;
  const KeyTile<kK> rows(of_k ? s.k : s.q);
  float sums[2][4] = {};
  if (p.qk_l2norm) {
#pragma unroll
    for (int m = 0; m < kK / 16; ++m) {
      uint32_t a[4];  // eight rows of it, as they lie, are those columns of B
      rows.load_a(kRows * (at % kTiles), m, lane, a);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kType>(sums[n], a, a[n], a[n + 2]);
    }
  }
  if (lane / 8 != lane % 4) return;  // rows g and columns 2t, 2t + 1
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = kRows * (at % kTiles) + 8 * n + lane / 4;
    const float squares = lane / 4 % 2 == 0 ? sums[n][2 * n] : sums[n][2 * n + 1];
    const float rstd = p.qk_l2norm ? rsqrt_approx(squares + kL2NormEps) : 1.0f;
    if (of_k) {
      s.on_rows[row].x = rstd;
    } else {
      s.on_rows[row].y = p.scale * rstd;
      s.rstd_q[row] = rstd;
    }
  }
}
template <DType kType, int kK>
__device__ __forceinline__ void norms(Shared<kK>& s, const DeltaRuleDeviceProblem& p, int warp, int lane) {
#pragma unroll
  for (int turn = 0; turn < kTurns<kK>; ++turn) norms_of_tile<kType>(s, p, warp + turn * kWarps<kK>, lane);
}

// How many of a thread's rows, or more, are tokens with its channels: K is a multiple of 8.
template <int kK>
__device__ __forceinline__ int tokens_from(const Place<kK>& own, int tokens, int K) {
  return static_cast<int>(own.channel) < K ? tokens - static_cast<int>(own.top) : 0;
}

// What the gate tensor holds, where TMA cannot bring it; zeros beyond the tokens and channels.
template <int kK>
__device__ __forceinline__ void load_gates(const DeviceTensor& g, const ChunkSpan& span, int head, int K,
                                           const Place<kK>& own, float4 (&x)[kOwnRows]) {
  const int64_t offset = row_offset(g, span.batch, span.begin + own.top, head) + own.channel * g.strides[3];
  const int rows = tokens_from(own, static_cast<int>(span.length), K);
  with_type(g.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const char* from = element_at(g.data, kType, offset);
    const int64_t step = byte_offset(kType, g.strides[1]);
    RawVec4 raw[kOwnRows] = {};
    if (g.aligned_vec4) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i, from += step) {
        if (i < rows) raw[i] = load_vec4<kType>(from);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i, from += step) {
        raw[i] = gather_vec4(from, kType, 0, g.strides[3], i < rows ? kOwnChannels : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) decode_vec4<kType>(raw[i], &x[i].x);
  });
}

// What the gates of a value head have in common, where the kernel makes them of raw ones: by one warp.
template <int kK>
__device__ __forceinline__ void store_gate_numbers(Shared<kK>& s, const DeltaRuleDeviceProblem& p, int lane) {
  if (!p.gate_in_kernel) return;
  const int head = s.item.head, channel = lane * kOwnChannels;
  if (lane == 0) s.rate = gate_rate(p, head);
  if (channel >= kK) return;
  float4 numbers = all_four(0);
  const DeviceTensor& bias = p.dt_bias;
  if (bias.present() && channel < p.head_dim_k) {
    const int64_t offset = head * bias.strides[0] + channel * bias.strides[1];
    with_type(bias.dtype, [&](auto type) {
      constexpr DType kType = decltype(type)::value;
      const RawVec4 raw = bias.aligned_vec4 ? load_vec4<kType>(element_at(bias.data, kType, offset))
                                            : gather_vec4(bias.data, kType, offset, bias.strides[1], kOwnChannels);
      decode_vec4<kType>(raw, &numbers.x);
    });
  }
  four_at(s.bias + channel) = numbers;
}

// Of a thread's channels.
struct GateNumbers {
  float rate, bound;
  float4 bias;

  template <int kK>
  __device__ __forceinline__ GateNumbers(Shared<kK>& s, const DeltaRuleDeviceProblem& p, const Place<kK>& own)
      : rate(s.rate), bound(fmaxf(kLog2E * p.lower_bound, -150.0f)), bias(four_at(s.bias + own.channel)) {}
};

// log2 of the decay, of what the gate tensor holds, in units of unit_of.
template <GateKind kKind>
__device__ __forceinline__ float unit_of(const GateNumbers& gate) {
  return kKind == GateKind::kBounded ? gate.bound : 1.0f;
}
template <GateKind kKind>
__device__ __forceinline__ float log2_of(const GateNumbers& gate, float bias, float x) {
  if constexpr (kKind == GateKind::kBounded) {
    const float turned = -kLog2E * gate.rate;
    return chunk_16bit::sigmoid_of_log2(::fmaf(turned, x, turned * bias));
  } else if constexpr (kKind == GateKind::kSoftplus) {
    return max_or_nan((-kLog2E * gate.rate) * chunk_16bit::softplus_approx(x + bias), -150.0f);
  } else {
    return max_or_nan(kLog2E * x, -150.0f);
  }
}

// The running sums in place of the gates. Rows beyond the tokens, and channels beyond K, have no decay. Returns whether a
// decay is above 1, as only gates from outside can be.
__device__ __forceinline__ bool sum_gates(const DeltaRuleDeviceProblem& p, const GateNumbers& gate, int rows,
                                          Sums& sums) {
  bool rises = false;
  chunk_16bit::with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
    sums.unit = unit_of<kKind>(gate);
    float4 sum = all_four(0);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const float4 x = sums.c[i];
      const float4 g = make_float4(log2_of<kKind>(gate, gate.bias.x, x.x), log2_of<kKind>(gate, gate.bias.y, x.y),
                                   log2_of<kKind>(gate, gate.bias.z, x.z), log2_of<kKind>(gate, gate.bias.w, x.w));
      sum = sum + g;
      if (kKind == GateKind::kGiven) rises = rises || g.x > 0 || g.y > 0 || g.z > 0 || g.w > 0;
      sums.c[i] = sum;
    }
  });
  if (rows < kOwnRows) {
    float4 sum = all_four(0);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (i < rows) sum = sums.c[i];
      sums.c[i] = sum;
    }
  }
  return rises;
}

// c of a tile.
template <int kK>
__device__ __forceinline__ float4 total_at(const Shared<kK>& s, int tile, const Place<kK>& own) {
  return *reinterpret_cast<const float4*>(s.total + tile * kK + own.channel);
}

// The whole tiles before and after a thread's, and all of them.
template <int kK>
struct TileSums {
  float4 before, after, all;

  __device__ __forceinline__ TileSums(const Shared<kK>& s, const Place<kK>& own)
      : before(all_four(0)), after(all_four(0)), all(total_at(s, 0, own)) {
#pragma unroll
    for (uint32_t t = 1; t < kTiles; ++t) {
      const float4 total = total_at(s, t, own);
      if (t == own.tile) before = all;
      if (t > own.tile) after = after + total;
      all = all + total;
    }
  }
};

// A part of a thread's rows while they are scaled: where they lie, and c of the tile, or of the chunk, less `start`. Parts
// take turns in a loop that is not unrolled: there is less code to fetch, and fewer numbers are on their way at once.
template <DType kType, int kK>
struct OwnRows {
  Place<kK> own;
  uint16_t* copies;
  float4 start;

  __device__ __forceinline__ OwnRows(const ChunkArgs& args, int64_t item, const Place<kK>& place, float4 first)
      : own(place),
        copies(args.factors.keys + (item * kKeyCopies * kChunkRows + own.top) * kK + own.channel),
        start(first) {}
  __device__ __forceinline__ void store(KeyCopy copy, int i, float4 x) const {
    *reinterpret_cast<uint2*>(copies + (copy * kChunkRows + i) * kK) = pack<kType>(x);
  }

  // body(i, sum) for row own.top + i.
  template <int kPart, class Body>
  __device__ __forceinline__ void for_each(Sums sums, const Body& body) {
#pragma unroll 1
    for (int part = 0; part < kOwnRows / kPart; ++part) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) body(i, fmaf(sums.unit, sums.c[i], start));
#pragma unroll
      for (int i = kPart; i < kOwnRows; ++i) sums.c[i - kPart] = sums.c[i];
      own.top += kPart;
      copies += kPart * kK;
    }
  }
};

// e_n, by the threads of the last half of a tile.
template <int kK>
__device__ __forceinline__ void store_total(const ChunkArgs& args, int64_t item, const Place<kK>& own, float4 e) {
  if (own.top == kChunkRows - kOwnRows) four_at(args.factors.total + item * kK + own.channel) = e;
}

// With one anchor: the rows of both sides of the products, of which the rising ones are two of the scan's copies of the
// keys, and the third copy.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows(Shared<kK>& s, const ChunkArgs& args, int64_t item, const Place<kK>& own,
                                           const Sums& sums) {
  const TileSums<kK> tiles(s, own);
  const float4 e = exp2_approx(tiles.all);
  OwnRows<kType, kK> rows(args, item, own, tiles.before + sums.first(own.half));
  rows.template for_each<4>(sums, [&](int i, float4 sum) {
    const uint32_t at = key_offset(rows.own, i);
    const float2 on = s.on_rows[rows.own.top + i];
    const float4 key = on.x * unpack<kType>(four_at(s.k, at)), query = on.y * unpack<kType>(four_at(s.q, at));
    const float4 up = exp2_approx(sum), written = exp2_approx(-sum) * key;
    four_at(s.k, at) = pack<kType>(up * key);
    four_at(s.q, at) = pack<kType>(up * query);
    four_at(s.falling, at) = pack<kType>(written);
    rows.store(kWriter, i, e * written);
  });
  store_total(args, item, own, e);
}

// With two anchors: the rows of both sides, all copies, and the factors of falling rows.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows_apart(Shared<kK>& s, const ChunkArgs& args, int64_t item,
                                                 const Place<kK>& own, const Sums& sums) {
  const TileSums<kK> tiles(s, own);
  const float4 whole = total_at(s, own.tile, own);
  const float4 on_reads = exp2_approx(tiles.before), on_write = exp2_approx(tiles.after);
  store_total(args, item, own, exp2_approx(tiles.all));
  if (own.half == 0) {
    four_at(s.inverse_decay + own.tile * kK + own.channel) = exp2_approx(-whole);
    // Tiles 1 and 2 themselves, and in the place of tile 3 both.
    const float4 between = own.tile < 3 ? whole : total_at(s, 1, own) + total_at(s, 2, own);
    four_at(s.between[own.tile] + own.channel) = exp2_approx(between);
  }
  OwnRows<kType, kK> rows(args, item, own, sums.first(own.half));
  rows.template for_each<2>(sums, [&](int i, float4 sum) {
    const uint32_t at = key_offset(rows.own, i);
    const float2 on = s.on_rows[rows.own.top + i];
    const float4 key = on.x * unpack<kType>(four_at(s.k, at)), query = on.y * unpack<kType>(four_at(s.q, at));
    const float4 up = exp2_approx(sum), written = exp2_approx(whole - sum) * key;
    const float4 on_k = up * key, on_q = up * query;
    four_at(s.k, at) = pack<kType>(on_k);
    four_at(s.q, at) = pack<kType>(on_q);
    four_at(s.falling, at) = pack<kType>(written);
    rows.store(kReader, i, on_reads * on_k);
    rows.store(kQuery, i, on_reads * on_q);
    rows.store(kWriter, i, on_write * written);
  });
}

// By one thread: the rising rows of one anchor to memory.
template <int kK>
__device__ __forceinline__ void store_copies(Shared<kK>& s, const FactorMaps& maps, int item) {
  const auto store = [&](const KeyMemory<kK>& memory, KeyCopy copy) {
    const KeyTile<kK> rows(memory);
#pragma unroll
    for (int p = 0; p < rows.kPanels; ++p) {
      store_box(maps.copies, {p * rows.kPanelColumns, 0, copy, item}, rows.panel(p));
    }
  };
  store(s.k, kReader);
  store(s.q, kQuery);
  commit_stores();
}

// Of a strong tile on the diagonal of A or sP, by one warp: the products of `rows`, k or q, with k. Lane l has column
// l % 16 and half of the channels.
template <DType kType, int kK>
__device__ __forceinline__ void sum_strong(Shared<kK>& s, unsigned char* rows, int tile, int lane,
                                           float (&sums)[kRows]) {
  const int j = lane % kRows, top = kRows * tile;
#pragma unroll 1
  for (int channel = lane / kRows * 4; channel < kK; channel += kWarpSize / kRows * 4) {
    float4 running = all_four(0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = key_offset<kK>(top + i, channel);
      const uint2 k_words = *reinterpret_cast<const uint2*>(s.k + at),
                  words = *reinterpret_cast<const uint2*>(rows + at);
      const float4 k_i = unpack<kType>(k_words), x_i = unpack<kType>(words);
      const float4 decay = exp2_approx(*reinterpret_cast<const float4*>(s.log2_decay + (top + i) * kK + channel));
      running = i == j ? k_i : running * decay;
      sums[i] = ::fmaf(x_i.y, running.y, ::fmaf(x_i.x, running.x, sums[i]));
      sums[i] = ::fmaf(x_i.w, running.w, ::fmaf(x_i.z, running.z, sums[i]));
    }
  }
}

// Tile `at` of the eight on the diagonals, if it is strong: of A, or to memory of sP.
template <DType kType, int kK>
__device__ __forceinline__ void store_strong(Shared<kK>& s, const ChunkArgs& args, int at, int lane,
                                             const float (&sums)[kRows]) {
  const int tile = at % kTiles, top = kRows * tile, j = lane % kRows;
  if (!s.strong[tile]) return;
  const TransposedBlock A(s.inverse.diagonal, tile);
  uint16_t* sP = results_of<kType>(args, s.item.factors, lane).of_sP;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float x = s.on_rows[top + j].x * (sums[i] + __shfl_xor_sync(kAllLanes, sums[i], kRows));
    const float2 on = s.on_rows[top + i];
    if (lane >= kRows) continue;
    if (at < kTiles) {
      A.at(i, j) = s.beta[top + i] * on.x * x;
    } else {
      sP[(top + i) * kChunkRows + top + j] = static_cast<uint16_t>(fastweight::cuda::pack<kType>(on.y * x, 0.0f));
    }
  }
}

// All strong tiles, before k and q are scaled: of eight warps four for A, four for sP. The sums have no registers meanwhile.
template <DType kType, int kK>
__device__ __forceinline__ void make_strong(Shared<kK>& s, const ChunkArgs& args, int warp, int lane, Sums& own_sums) {
  const Place<kK> own;
  float4(&c)[kOwnRows] = own_sums.c;
  const auto log2_decay = [&](int i) -> float4& { return four_at(s.log2_decay + (own.top + i) * kK + own.channel); };
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) log2_decay(i) = own_sums.unit * (i == 0 ? c[0] : c[i] - c[i - 1]);
  __syncthreads();
  float sums[kTurns<kK>][kRows] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns<kK>; ++turn) {
    const int at = warp + turn * kWarps<kK>, tile = at % kTiles;
    if (s.strong[tile]) sum_strong<kType>(s, at < kTiles ? s.k : s.q, tile, lane, sums[turn]);
  }
  own_sums.unit = 1;
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) c[i] = i == 0 ? log2_decay(0) : c[i - 1] + log2_decay(i);
  __syncthreads();  // A lies where the decays were
#pragma unroll
  for (int turn = 0; turn < kTurns<kK>; ++turn) {
    store_strong<kType>(s, args, warp + turn * kWarps<kK>, lane, sums[turn]);
  }
}

// Tile (row, column) of rows falling^T, by one warp. `factor`, one per channel, belongs to the falling rows.
template <DType kType, bool kFactor, int kK>
__device__ __forceinline__ void multiply_rows(const Shared<kK>& s, const unsigned char* rising_rows, int row,
                                              int column, const float* factor, int lane, float (&sum)[2][4]) {
  const KeyTile<kK> rising(rising_rows), falling(s.falling);
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[4], b[4];
    rising.load_a(kRows * row, m, lane, a);
    falling.load_b(kRows * column, m, lane, b);
    if constexpr (kFactor) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // channels 2t, 2t + 1 and 2t + 8, 2t + 9 of both halves of the columns
        const float2 d = *reinterpret_cast<const float2*>(factor + 16 * m + 8 * h + 2 * (lane % 4));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 x = fastweight::cuda::unpack<kType>(b[2 * n + h]);
          b[2 * n + h] = fastweight::cuda::pack<kType>(d.x * x.x, d.y * x.y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) mma<kType>(sum[n], a, b[2 * n], b[2 * n + 1]);
  }
}

// Of row i.
template <int kK>
__device__ __forceinline__ void store_token_factors(const Shared<kK>& s, const ChunkFactors& factors, int i) {
  const int64_t item = s.item.factors;
  factors.token[item * kChunkRows + i] = s.beta[i];
  if (factors.row == nullptr) return;
  float* row = factors.row + item * chunk_16bit::kRowNumbers * kChunkRows + i;
  row[chunk_16bit::kRstdOfQ * kChunkRows] = s.rstd_q[i];
  row[chunk_16bit::kRstdOfK * kChunkRows] = s.on_rows[i].x;
}

// Calls body(on_diagonal, i, j, block) for the warp's share of the blocks on and below the diagonal of rows falling^T, `rows`
// rising. Those on the diagonal of strong tiles are there.
template <DType kType, int kK, class Body>
__device__ __forceinline__ void multiply_tiles(const Shared<kK>& s, bool apart, const unsigned char* rows, int warp,
                                               int lane, const Body& body) {
  if (!apart) {
    Gram sums;
    start_gram<kType, kK>(rows, s.falling, sums);
    wgmma_commit();
    wgmma_wait<0>(sums);
    for_each_block(
        warp, [&](auto on_diagonal, int j, auto& blocks) { body(on_diagonal, warp, j, blocks[0]); }, sums);
    return;
  }
#pragma unroll 1
  for (int at = warp; at < 10; at += kGroupWarps) {
    const int i = at < 4 ? 3 : at < 7 ? 2 : at < 9 ? 1 : 0, j = at - (at < 4 ? 0 : at < 7 ? 4 : at < 9 ? 7 : 9);
    if (i == j && s.strong[i]) continue;
    GramBlock block = {};
    if (i == j + 1) {
      multiply_rows<kType, false>(s, rows, i, j, nullptr, lane, block);
    } else {
      const float* factor = i == j ? s.inverse_decay + i * kK : s.between[i == j + 3 ? 3 : j + 1];
      multiply_rows<kType, true>(s, rows, i, j, factor, lane, block);
    }
    i == j ? body(std::true_type(), i, j, block) : body(std::false_type(), i, j, block);
  }
}

// A to shared memory, or sP, by a warpgroup.
template <DType kType, int kK>
__device__ __forceinline__ void make_lower(Shared<kK>& s, bool apart, bool of_A, const InverseSteps& steps,
                                           const GlobalResults<kType>& results) {
  const int lane = steps.lane;
  const auto make_block = [&](auto on_diagonal, int i, int j, GramBlock& block) {
    constexpr bool kOnDiagonal = decltype(on_diagonal)::value;
    if (of_A) {
      const float beta[2] = {s.beta[kRows * i + lane / 4], s.beta[kRows * i + lane / 4 + 8]};
#pragma unroll
      for (int e = 0; e < 8; ++e) block[e / 4][e % 4] *= beta[e / 2 % 2];
      steps.template store_A<kOnDiagonal>(i, j, block);
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if constexpr (kOnDiagonal) clear_above(n, lane, block[n]);
      }
      results.sP(i, j, block);
    }
  };
  multiply_tiles<kType>(s, apart, of_A ? s.k : s.q, steps.warp, lane, make_block);
}

// J from A, by the block's first warpgroup.
template <DType kType, int kK>
__device__ __forceinline__ void invert_A(Shared<kK>& s, const ChunkArgs& args, const InverseSteps& steps,
                                         const GlobalResults<kType>& results) {
  const auto barrier = [] { warpgroup_barrier(0); };
  barrier();
  steps.invert_diagonal();
  barrier();
  if (steps.warp % 2 == 1) {
    steps.merge_16(results);
  } else {
    steps.store_diagonal(results);
    store_token_factors(s, args.factors, steps.lane + steps.warp / 2 * kWarpSize);
  }
  barrier();
  steps.multiply_Z();
  barrier();
  steps.merge_32(results);
}

template <DType kType, int kK>
__global__ void __launch_bounds__(kThreads<kK>, kBlocksOnOne<kK>)
    channel_factors_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ FactorMaps maps) {
  auto& s = aligned_shared<Shared<kK>>();
  const DeltaRuleDeviceProblem& p = args.problem;
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_previous_kernels();
  let_next_kernel_start();
  if (thread == 0) {
    s.apart = s.strong[0] = s.strong[1] = s.strong[2] = s.strong[3] = false;
    s.gates_filled.init(2);  // this thread, and the warp that knows the gate numbers
    s.keys_filled.init(1);
    fence_barrier_init();
    s.item = item_of_block(args);
    if (s.item.span.sequence >= 0) start_loads(args, maps, s);
  }
  __syncthreads();
  const Item& item = s.item;
  if (item.span.sequence < 0) return;
  const Place<kK> own;
  if (uniform_warp() == kWarps<kK> - 1) {
    store_gate_numbers(s, p, lane_anew());
    __syncwarp();
    if (elect_one()) s.gates_filled.arrive();
  }
  if (thread < kChunkRows) s.beta[thread] = chunk_beta(p, item.span, item.head, thread);
  Sums sums;
  if (!maps.has_g) load_gates(p.g, item.span, item.head, p.head_dim_k, own, sums.c);
  s.gates_filled.wait(0);
  if (maps.has_g) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) sums.c[i] = unpack<kType>(four_at(s.falling, key_offset(own, i)));
  }
  const bool rises = sum_gates(p, GateNumbers(s, p, own), tokens_from(own, item.tokens, p.head_dim_k), sums);
  const float4 total = sums.total() + other_half(sums.total());
  if (own.half == 0) four_at(s.total + own.tile * kK + own.channel) = total;
  if (rises || !(least(total) >= kMild<kType>)) s.apart = true;
  if (least(total) < kStrong<kType>) s.strong[own.tile] = true;
  s.keys_filled.wait(0);
  norms<kType>(s, p, uniform_warp(), lane_anew());
  __syncthreads();
  const bool apart = s.apart;
  if (!apart) {
    scale_rows<kType>(s, args, item.factors, Place<kK>(), sums);
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) store_copies(s, maps, static_cast<int>(item.factors));
  } else {
    if (s.strong[0] || s.strong[1] || s.strong[2] || s.strong[3]) {
      make_strong<kType>(s, args, uniform_warp(), lane_anew(), sums);
    }
    scale_rows_apart<kType>(s, args, item.factors, Place<kK>(), sums);
    __syncthreads();
  }
  const int warp = uniform_warp(), lane = lane_anew();
  const GlobalResults<kType> results = results_of<kType>(args, item.factors, lane);
  const InverseSteps steps{s.inverse, warp % kGroupWarps, lane};
  if constexpr (kWarps<kK> == kGroupWarps) make_lower<kType>(s, apart, false, steps, results);
  const bool of_A = warp < kGroupWarps;
  make_lower<kType>(s, apart, of_A, steps, results);
  if (of_A) invert_A<kType>(s, args, steps, results);
  if (thread == 0) wait_stores_read<0>();
}

TensorMap rows_map(const TensorView& x) { return token_map(x, kChunkRows, kBoxColumns, Swizzle::k128); }

}  // namespace

TensorMap copies_map(const uint16_t* copies, DType dtype, int padded_k, int64_t items) {
  return tensor_map({.data = copies,
                     .dtype = dtype,
                     .rank = 4,
                     .sizes = {padded_k, kChunkRows, kKeyCopies, items},
                     .strides = {1, padded_k, kChunkRows * padded_k, kKeyCopies * kChunkRows * padded_k},
                     .box = {kBoxColumns, kChunkRows, 1, 1},
                     .swizzle = Swizzle::k128});
}

int64_t count_items(const ChunkArgs& args) {
  const int64_t chunks = args.factors_of_window ? chunk_16bit::chunks_in_window(args) : args.num_chunks;
  return chunks * args.problem.num_value_heads;
}

bool takes_channel_factors(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes) {
  const int device = in.q.device.index;
  // Of boxes, tokens and chunks, places are 32-bit numbers; so are those of blocks.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kChunkRows;
  const int64_t most_chunks = sizes.batch * sizes.tokens + sizes.num_sequences;
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 && sizes.head_dim_k <= kMostK &&
         has_token_map(in.q) && has_token_map(in.k) && sizes.tokens <= kMost &&
         most_chunks * sizes.num_value_heads <= kMost && lacks_shared_memory(sizeof(Shared<kMostK>), device).empty();
}

void launch_channel_factors(const DeltaRuleInputs& in, const ChunkArgs& args, const Context& context) {
  FactorMaps maps;
  maps.k = rows_map(in.k);
  maps.q = rows_map(in.q);
  maps.has_g = in.g.dtype == in.k.dtype && has_token_map(in.g);
  if (maps.has_g) maps.g = rows_map(in.g);
  maps.copies = copies_map(args.factors.keys, in.k.dtype, padded_k(args.problem.head_dim_k), count_items(args));
  const int64_t items = chunk_16bit::chunks_in_window(args) * args.problem.num_value_heads;
  const auto of = [&]<DType kType, int kK>() {
    const LaunchShape shape{static_cast<unsigned>(items), kThreads<kK>, sizeof(Shared<kK>), true};
    launch<channel_factors_kernel<kType, kK>>("delta_rule chunk_sm90 factors per channel", context, shape, args, maps);
  };
  const auto of_type = [&]<DType kType>() {
    padded_k(args.problem.head_dim_k) == 64 ? of.template operator()<kType, 64>()
                                            : of.template operator()<kType, 128>();
  };
  in.k.dtype == DType::kBF16 ? of_type.template operator()<DType::kBF16>() : of_type.template operator()<DType::kF16>();
}

}  // namespace fastweight::cuda::chunk_sm90
