// The factors of the chunk form with one decay per key channel, for K <= 128: what chunk_16bit/factors_per_channel.cu
// makes, with fewer instructions. See ../chunk.cuh for the equations.
//
// One block of eight warps per (chunk, value head), three of them on a multiprocessor, or of four warps and four of them where
// K <= 64: what binds are instructions, and the time until TMA has brought the rows of k and q, and those of the gates
// where it can. A thread has two channels of a tile
// of 16 rows, of which its registers have the running sums c_i of log2 of the decays, c for the whole tile. Then
//
//     A  = beta rising_k falling^T,     sP = scale rising_q falling^T     (k and q with the factors of their norms)
//
// where rising and falling rows hold their decays from, and to, an anchor between them:
//
//     all tiles mild    the start of the chunk:    rising_i = k_i 2^(before + c_i)    falling_j = k_j 2^-(before + c_j)
//     otherwise         two for a tile:            rising_i = k_i 2^c_i               falling_j = k_j 2^(c - c_j)
//
// With one anchor the rising rows are the scan's copies of k and q, and products of tiles are products. With two, tiles
// below the diagonal have the decays of the whole tiles between as a factor per channel, those on it 2^-c, which falling
// rows take in registers. On the diagonal of a strong tile, one that 2^-c is too large for, the factors are computed in
// fp32: k_j runs down the rows, multiplied by one decay after the other. So nothing overflows for g <= 0.
//
// Sums of logarithms are short of digits only where their power is short of anything: log2 of a decay is at least -150,
// so c - c_j has an error below 2^-12, a sixteenth of the rounding of what it multiplies.
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"

#include <limits>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/panel_tile.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkArgs;
using chunk_16bit::ChunkFactors;
using chunk_16bit::GateKind;
using chunk_16bit::kChunkRows;
using chunk_16bit::kLog2E;
using chunk_16bit::kPitchOfA;
using chunk_16bit::kPitchOfJ;

constexpr int kRows = 16;  // of a tile
constexpr int kTiles = kChunkRows / kRows;
constexpr int kBoxColumns = PanelTile<kChunkRows, kMostK>::kPanelColumns;

// For a padded K.
template <int kK>
inline constexpr int kPairs = kK / 2;  // of channels
template <int kK>
inline constexpr int kThreads = kTiles* kPairs<kK>;
template <int kK>
inline constexpr int kWarps = kThreads<kK> / kWarpSize;
template <int kK>
inline constexpr int kBlocksOnOne = kK == 64 ? 4 : 3;  // multiprocessor
// A warp has so many of the eight tiles on the diagonals of k and q, or of A and sP.
template <int kK>
inline constexpr int kTurns = 2 * kTiles / kWarps<kK>;

template <int kK>
using KeyRows = PanelTile<kChunkRows, kK>;
template <int kK>
using KeyMemory = unsigned char[KeyRows<kK>::kBytes];

// The pair of a chunk and a value head that a block has. One thread finds it, and all others wait: for a fixed length
// without divisions of 64 bits.
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
    const uint32_t width = static_cast<uint32_t>(args.window.width()), row = slot / width;
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
  union {
    KeyMemory<kK> k;                              // then rising
    alignas(16) float J[kChunkRows * kPitchOfJ];  // once A is complete
  };
  alignas(1024) KeyMemory<kK> q;  // then rising
  union {
    struct {
      KeyMemory<kK> falling;  // the gates, before
      alignas(16) float A[kChunkRows * kPitchOfA];
    };
    alignas(16) float log2_decay[kChunkRows * kK];  // before, for strong tiles
  };
  alignas(16) float total[kTiles * kK];    // c of the tiles
  alignas(16) float between[kTiles][kK];   // factors of falling rows: 2^c of tiles 1, 2, and of both
  alignas(16) float inverse[kTiles * kK];  // 2^-c
  float2 on_rows[kChunkRows];              // the factors of k and q: of the norms, and scale
  float rstd_q[kChunkRows];
  float beta[kChunkRows];
  bool apart;           // a tile is not mild
  bool strong[kTiles];  // a tile is strong
  Item item;
  TransactionBarrier filled;
};

// A multiprocessor has 228 KB, of which each block takes one more.
static_assert(kBlocksOnOne<64> * (sizeof(Shared<64>) + 1024) <= 228 * 1024);
static_assert(kBlocksOnOne<128> * (sizeof(Shared<128>) + 1024) <= 228 * 1024);

template <int kK>
__device__ __forceinline__ uint16_t* sP_of(const ChunkArgs& args, const Shared<kK>& s) {
  return args.factors.sP + s.item.factors * kChunkRows * kChunkRows;
}

// The most that c may fall, in log2, of a tile that is not strong: bf16 has the exponents of fp32, enough for 16 tokens with
// g = -5; fp16 has few. And of a mild one: four of them together no more than that.
template <DType kType>
inline constexpr float kStrong = kType == DType::kBF16 ? -117.0f : -4.0f;
template <DType kType>
inline constexpr float kMild = kStrong<kType> / kTiles;

// What a thread has: channels `channel` and `channel + 1` of rows [top, top + 16).
template <int kK>
struct Place {
  int tile, channel, top;

  __device__ __forceinline__ explicit Place(int thread)
      : tile(thread / kPairs<kK>), channel(thread % kPairs<kK> * 2), top(kRows * tile) {}
};

using Pairs = uint32_t[kRows];
using Sums = float2[kRows];

// Where KeyRows has a channel of a row.
template <int kK>
__device__ __forceinline__ int key_offset(int row, int channel) {
  constexpr int kColumns = KeyRows<kK>::kPanelColumns;
  return channel / kColumns * KeyRows<kK>::kPanelBytes + row * KeyRows<kK>::kRowBytes +
         ((channel % kColumns / 8 ^ row % 8) * 16) + channel % 8 * 2;
}
// Of row `top + i` of a thread: top is a multiple of 8.
template <int kK>
__device__ __forceinline__ int key_offset(const Place<kK>& own, int i) {
  return (key_offset<kK>(own.top, own.channel) ^ i % 8 * 16) + i * KeyRows<kK>::kRowBytes;
}
__device__ __forceinline__ uint32_t& pair_at(unsigned char* rows, int offset) {
  return *reinterpret_cast<uint32_t*>(rows + offset);
}

// By one thread. k and q beyond the tokens and channels are zeros.
template <int kK>
__device__ __forceinline__ void start_loads(const ChunkArgs& args, const FactorMaps& maps, Shared<kK>& s) {
  using Rows = KeyRows<kK>;
  const Item& item = s.item;
  const int end = static_cast<int>(item.span.begin) + item.tokens, missing = kChunkRows - item.tokens;
  const auto load = [&](const KeyMemory<kK>& memory, const TensorMap& map, int head) {
#pragma unroll
    for (int p = 0; p < Rows::kPanels; ++p) {
      load_box(Rows(memory).panel(p), map,
               {p * Rows::kPanelColumns, head, missing, end, static_cast<int>(item.span.batch)}, s.filled);
    }
  };
  s.filled.arrive_expecting((maps.has_g ? 3 : 2) * Rows::kBytes);
  if (maps.has_g) load(s.falling, maps.g, item.head);
  load(s.k, maps.k, item.head / args.problem.group);
  load(s.q, maps.q, item.head / args.problem.group);
}

// The rows' norms are the diagonals of k k^T and q q^T. All are 1 unless the option asks.
template <DType kType, int kK>
__device__ __forceinline__ void norms_of_tile(Shared<kK>& s, const DeltaRuleDeviceProblem& p, int at, int lane) {
  const bool of_k = at < kTiles;
  const KeyRows<kK> rows(of_k ? s.k : s.q);
  float sums[2][4] = {};
  if (p.qk_l2norm) {
#pragma unroll
    for (int m = 0; m < kK / 16; ++m) {
      uint32_t a[4], b[4];
      rows.load_a(kRows * (at % kTiles), m, lane, a);
      rows.load_b(kRows * (at % kTiles), m, lane, b);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kType>(sums[n], a, b[2 * n], b[2 * n + 1]);
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

// What the gate tensor holds, where TMA cannot bring it; zeros beyond the tokens and channels.
template <int kK>
__device__ __forceinline__ void load_gates(const DeviceTensor& g, const ChunkSpan& span, int head, int K,
                                           const Place<kK>& own, Sums& x) {
  const int64_t offset = row_offset(g, span.batch, span.begin + own.top, head) + own.channel * g.strides[3];
  const int rows = own.channel < K ? static_cast<int>(span.length) - own.top : 0;
  with_type(g.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const char* from = element_at(g.data, kType, offset);
    const int64_t step = byte_offset(kType, g.strides[1]);
    if (!g.aligned_vec4) {
      const int64_t next = own.channel + 1 < K ? byte_offset(kType, g.strides[3]) : 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i, from += step) {
        x[i] = make_float2(0, 0);
        if (i < rows) x[i] = make_float2(load_float(from, kType, 0), load_float(from + next, kType, 0));
      }
    } else if constexpr (kType == DType::kF32) {
#pragma unroll
      for (int i = 0; i < kRows; ++i, from += step) {
        x[i] = i < rows ? *reinterpret_cast<const float2*>(from) : make_float2(0, 0);
      }
    } else {
      Pairs pairs;
#pragma unroll
      for (int i = 0; i < kRows; ++i, from += step) {
        pairs[i] = i < rows ? *reinterpret_cast<const uint32_t*>(from) : 0;
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i] = unpack<kType>(pairs[i]);
    }
  });
}

// What the gates of a thread's channels have in common.
struct GateNumbers {
  float rate, bound;
  float2 bias;
};

template <int kK>
__device__ __forceinline__ GateNumbers gate_numbers(const DeltaRuleDeviceProblem& p, int head, const Place<kK>& own) {
  GateNumbers numbers{0, 0, make_float2(0, 0)};
  if (!p.gate_in_kernel) return numbers;
  numbers.rate = gate_rate(p, head);
  numbers.bound = fmaxf(kLog2E * p.lower_bound, -150.0f);
  if (own.channel < p.head_dim_k) numbers.bias.x = gate_bias(p, head, own.channel);
  if (own.channel + 1 < p.head_dim_k) numbers.bias.y = gate_bias(p, head, own.channel + 1);
  return numbers;
}

// log2 of the decay, of what the gate tensor holds.
template <GateKind kKind>
__device__ __forceinline__ float log2_of(const GateNumbers& gate, float bias, float x) {
  if constexpr (kKind == GateKind::kBounded) {
    const float turned = -kLog2E * gate.rate;
    return gate.bound * chunk_16bit::sigmoid_of_log2(fmaf(turned, x, turned * bias));
  } else if constexpr (kKind == GateKind::kSoftplus) {
    return max_or_nan((-kLog2E * gate.rate) * chunk_16bit::softplus_approx(x + bias), -150.0f);
  } else {
    return max_or_nan(kLog2E * x, -150.0f);
  }
}

// What the gate tensor holds.
template <DType kType, int kK>
__device__ __forceinline__ void read_gates(Shared<kK>& s, const DeltaRuleDeviceProblem& p, bool in_shared,
                                           const Item& item, const Place<kK>& own, Sums& x) {
  if (!in_shared) {
    load_gates(p.g, item.span, item.head, p.head_dim_k, own, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) x[i] = unpack<kType>(pair_at(s.falling, key_offset(own, i)));
}

// Their running sums in place of the gates. Rows beyond the tokens, and channels beyond K, have no decay. Returns whether
// a decay is above 1, as only gates from outside can be.
template <int kK>
__device__ __forceinline__ bool sum_gates(const DeltaRuleDeviceProblem& p, const GateNumbers& gate, int rows,
                                          const Place<kK>& own, Sums& c) {
  bool rises = false;
  chunk_16bit::with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float x = log2_of<kKind>(gate, gate.bias.x, c[i].x), y = log2_of<kKind>(gate, gate.bias.y, c[i].y);
      sum.x += x;
      sum.y += y;
      if (kKind == GateKind::kGiven) rises = rises || x > 0 || y > 0;
      c[i] = sum;
    }
  });
  const int first = own.channel < p.head_dim_k ? rows : 0, second = own.channel + 1 < p.head_dim_k ? rows : 0;
  if (second < kRows) {
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum = make_float2(i < first ? c[i].x : sum.x, i < second ? c[i].y : sum.y);
      c[i] = sum;
    }
  }
  return rises;
}

__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator*(float a, float2 b) { return make_float2(a * b.x, a * b.y); }
__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 operator-(float2 a, float2 b) { return make_float2(a.x - b.x, a.y - b.y); }
__device__ __forceinline__ float2 exp2_approx(float2 x) {
  return make_float2(fastweight::cuda::exp2_approx(x.x), fastweight::cuda::exp2_approx(x.y));
}
template <DType kType>
__device__ __forceinline__ uint32_t pack(float2 x) {
  return fastweight::cuda::pack<kType>(x.x, x.y);
}

// c of a tile.
template <int kK>
__device__ __forceinline__ float2 total_at(const Shared<kK>& s, int tile, const Place<kK>& own) {
  return *reinterpret_cast<const float2*>(s.total + tile * kK + own.channel);
}

// The rows of both sides of the products, and the scan's three copies of the keys; with one anchor the rising rows are two
// of them.
template <DType kType, bool kOneAnchor, int kK>
__device__ __forceinline__ void scale_rows(Shared<kK>& s, const ChunkArgs& args, int64_t item, const Place<kK>& own,
                                           const Sums& c) {
  float2 before = make_float2(0, 0), after = make_float2(0, 0);  // the whole tiles on either side
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (t < own.tile) before = before + total_at(s, t, own);
    if (t > own.tile) after = after + total_at(s, t, own);
  }
  const float2 whole = total_at(s, own.tile, own), all = before + whole + after;
  const float2 on_reads = exp2_approx(before), on_write = exp2_approx(kOneAnchor ? all : after);
  uint16_t* to = args.factors.keys + (item * kKeyCopies * kChunkRows + own.top) * kK + own.channel;
  const auto store = [&](KeyCopy copy, int i, float2 x) {
    *reinterpret_cast<uint32_t*>(to + (copy * kChunkRows + i) * kK) = pack<kType>(x);
  };
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int at = key_offset(own, i);
    const float2 sum = kOneAnchor ? before + c[i] : c[i], on = s.on_rows[own.top + i];
    const float2 up = exp2_approx(sum), down = exp2_approx(kOneAnchor ? make_float2(-sum.x, -sum.y) : whole - sum);
    const float2 key = on.x * unpack<kType>(pair_at(s.k, at)), query = on.y * unpack<kType>(pair_at(s.q, at));
    const float2 on_k = up * key, on_q = up * query, written = down * key;
    pair_at(s.k, at) = pack<kType>(on_k);
    pair_at(s.q, at) = pack<kType>(on_q);
    pair_at(s.falling, at) = pack<kType>(written);
    store(kWriter, i, on_write * written);
    if constexpr (!kOneAnchor) {
      store(kReader, i, on_reads * on_k);
      store(kQuery, i, on_reads * on_q);
    }
  }
  if (own.tile == kTiles - 1) {
    *reinterpret_cast<float2*>(args.factors.total + item * kK + own.channel) = exp2_approx(all);
  }
  if constexpr (!kOneAnchor) {
    *reinterpret_cast<float2*>(s.inverse + own.tile * kK + own.channel) = exp2_approx(make_float2(0, 0) - whole);
    // Tiles 1 and 2 themselves, and in the place of tile 3 both.
    const float2 between = own.tile < 3 ? whole : total_at(s, 1, own) + total_at(s, 2, own);
    *reinterpret_cast<float2*>(s.between[own.tile] + own.channel) = exp2_approx(between);
  }
}

// By one thread: the rising rows of one anchor to memory.
template <int kK>
__device__ __forceinline__ void store_copies(Shared<kK>& s, const FactorMaps& maps, int item) {
  const auto store = [&](const KeyMemory<kK>& memory, KeyCopy copy) {
    const KeyRows<kK> rows(memory);
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
    float running[4] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = key_offset<kK>(top + i, channel);
      const uint2 k_words = *reinterpret_cast<const uint2*>(s.k + at),
                  words = *reinterpret_cast<const uint2*>(rows + at);
      const float2 k_i[2] = {unpack<kType>(k_words.x), unpack<kType>(k_words.y)};
      const float2 x_i[2] = {unpack<kType>(words.x), unpack<kType>(words.y)};
      const float4 g = *reinterpret_cast<const float4*>(s.log2_decay + (top + i) * kK + channel);
      const float2 decay[2] = {exp2_approx(make_float2(g.x, g.y)), exp2_approx(make_float2(g.z, g.w))};
      running[0] = i == j ? k_i[0].x : running[0] * decay[0].x;
      running[1] = i == j ? k_i[0].y : running[1] * decay[0].y;
      running[2] = i == j ? k_i[1].x : running[2] * decay[1].x;
      running[3] = i == j ? k_i[1].y : running[3] * decay[1].y;
      sums[i] = fmaf(x_i[0].y, running[1], fmaf(x_i[0].x, running[0], sums[i]));
      sums[i] = fmaf(x_i[1].y, running[3], fmaf(x_i[1].x, running[2], sums[i]));
    }
  }
}

// Tile `at` of the eight on the diagonals, if it is strong: of A, or to memory of sP.
template <DType kType, int kK>
__device__ __forceinline__ void store_strong(Shared<kK>& s, const ChunkArgs& args, int at, int lane,
                                             const float (&sums)[kRows]) {
  const int tile = at % kTiles, top = kRows * tile, j = lane % kRows;
  if (!s.strong[tile]) return;
  uint16_t* sP = sP_of(args, s);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float x = s.on_rows[top + j].x * (sums[i] + __shfl_xor_sync(kAllLanes, sums[i], kRows));
    const float2 on = s.on_rows[top + i];
    if (lane >= kRows) continue;
    if (at < kTiles) {
      s.A[(top + j) * kPitchOfA + top + i] = s.beta[top + i] * on.x * x;
    } else {
      sP[(top + i) * kChunkRows + top + j] = static_cast<uint16_t>(fastweight::cuda::pack<kType>(on.y * x, 0.0f));
    }
  }
}

// All strong tiles, before k and q are scaled: of eight warps four for A, four for sP. The sums have no registers meanwhile.
template <DType kType, int kK>
__device__ __forceinline__ void make_strong(Shared<kK>& s, const ChunkArgs& args, int warp, int lane,
                                            const Place<kK>& own, Sums& c) {
  const auto log2_decay = [&](int i) -> float2& {
    return *reinterpret_cast<float2*>(s.log2_decay + (own.top + i) * kK + own.channel);
  };
#pragma unroll
  for (int i = 0; i < kRows; ++i) log2_decay(i) = i == 0 ? c[0] : c[i] - c[i - 1];
  __syncthreads();
  float sums[kTurns<kK>][kRows] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns<kK>; ++turn) {
    const int at = warp + turn * kWarps<kK>, tile = at % kTiles;
    if (s.strong[tile]) sum_strong<kType>(s, at < kTiles ? s.k : s.q, tile, lane, sums[turn]);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) c[i] = i == 0 ? log2_decay(0) : c[i - 1] + log2_decay(i);
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
  const KeyRows<kK> rising(rising_rows), falling(s.falling);
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
        for (int n = 0; n < 2; ++n) b[2 * n + h] = pack<kType>(d * unpack<kType>(b[2 * n + h]));
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) mma<kType>(sum[n], a, b[2 * n], b[2 * n + 1]);
  }
}

// Tile `at` of the ten on and below the diagonal: of A, or to memory of sP. Strong tiles are there.
template <DType kType, bool kOfA, int kK>
__device__ __forceinline__ void make_tile(Shared<kK>& s, const ChunkArgs& args, int at, int lane) {
  const int row = at < 4 ? 3 : at < 7 ? 2 : at < 9 ? 1 : 0, column = at - (at < 4 ? 0 : at < 7 ? 4 : at < 9 ? 7 : 9);
  if (row == column && s.strong[row]) return;
  float sum[2][4] = {};
  const unsigned char* rising = kOfA ? s.k : s.q;
  if (!s.apart || row == column + 1) {
    multiply_rows<kType, false>(s, rising, row, column, nullptr, lane, sum);
  } else {
    const float* factor = row == column ? s.inverse + row * kK : s.between[row == column + 3 ? 3 : column + 1];
    multiply_rows<kType, true>(s, rising, row, column, factor, lane, sum);
  }
  uint16_t* sP = sP_of(args, s);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = kRows * row + lane / 4 + half * 8, j = kRows * column + 8 * n + 2 * (lane % 4);
      const float low = sum[n][2 * half], high = sum[n][2 * half + 1];
      if constexpr (kOfA) {
        s.A[j * kPitchOfA + i] = s.beta[i] * low;
        s.A[(j + 1) * kPitchOfA + i] = s.beta[i] * high;
      } else {
        *reinterpret_cast<uint32_t*>(sP + i * kChunkRows + j) =
            fastweight::cuda::pack<kType>(i < j ? 0.0f : low, i < j + 1 ? 0.0f : high);
      }
    }
  }
}

// The tiles that are a warp's, one of `warps`.
template <DType kType, bool kOfA, int kK>
__device__ __forceinline__ void make_tiles(Shared<kK>& s, const ChunkArgs& args, int warp, int warps, int lane) {
#pragma unroll 1
  for (int at = warp; at < 10; at += warps) make_tile<kType, kOfA>(s, args, at, lane);
}

template <int kK>
__device__ __forceinline__ void store_token_factors(const Shared<kK>& s, int64_t item, const ChunkFactors& factors) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kChunkRows) return;
  factors.token[item * kChunkRows + i] = s.beta[i];
  if (factors.row == nullptr) return;
  float* row = factors.row + item * chunk_16bit::kRowNumbers * kChunkRows;
  row[chunk_16bit::kRstdOfQ * kChunkRows + i] = s.rstd_q[i];
  row[chunk_16bit::kRstdOfK * kChunkRows + i] = s.on_rows[i].x;
}

template <DType kType, int kK>
__global__ void __launch_bounds__(kThreads<kK>, kBlocksOnOne<kK>)
    channel_factors_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ FactorMaps maps) {
  auto& s = aligned_shared<Shared<kK>>();
  const DeltaRuleDeviceProblem& p = args.problem;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = uniform_warp();
  wait_for_previous_kernels();
  let_next_kernel_start();
  if (thread == 0) {
    s.apart = s.strong[0] = s.strong[1] = s.strong[2] = s.strong[3] = false;
    s.filled.init(1);
    fence_barrier_init();
    s.item = item_of_block(args);
    if (s.item.span.sequence >= 0) start_loads(args, maps, s);
  }
  __syncthreads();
  const Item& item = s.item;
  if (item.span.sequence < 0) return;
  const Place<kK> own(thread);
  const GateNumbers gate = gate_numbers(p, item.head, own);
  if (thread < kChunkRows) s.beta[thread] = chunk_beta(p, item.span, item.head, thread);
  s.filled.wait(0);
  Sums c;
  read_gates<kType>(s, p, maps.has_g, item, own, c);
  norms<kType>(s, p, warp, opaque_below<kWarpSize>(lane));  // no address is kept for later: registers are short
  const bool rises = sum_gates(p, gate, item.tokens - own.top, own, c);
  const float2 total = c[kRows - 1];
  *reinterpret_cast<float2*>(s.total + own.tile * kK + own.channel) = total;
  if (rises || !(fminf(total.x, total.y) >= kMild<kType>)) s.apart = true;
  if (total.x < kStrong<kType> || total.y < kStrong<kType>) s.strong[own.tile] = true;
  __syncthreads();
  if (!s.apart) {
    scale_rows<kType, true>(s, args, item.factors, own, c);
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) store_copies(s, maps, static_cast<int>(item.factors));
  } else {
    if (s.strong[0] || s.strong[1] || s.strong[2] || s.strong[3]) make_strong<kType>(s, args, warp, lane, own, c);
    scale_rows<kType, false>(s, args, item.factors, own, c);
    __syncthreads();
  }
  make_tiles<kType, true>(s, args, warp, kWarps<kK>, lane);
  if (thread == 0) wait_stores_read<0>();  // J lies where k was
  __syncthreads();
  // The first step of the inversion is for four warps; others, if there are any, make sP meanwhile.
  if constexpr (kWarps<kK> == kTiles) {
    make_tiles<kType, false>(s, args, warp, kWarps<kK>, lane);
  } else if (warp >= kTiles) {
    make_tiles<kType, false>(s, args, warp - kTiles, kWarps<kK> - kTiles, lane);
  }
  invert_unit_lower(s.A, s.J, warp, lane);
  __syncthreads();
  chunk_16bit::store_lower<kType, kThreads<kK>>(s.J, args.factors.J + item.factors * kChunkRows * kChunkRows);
  store_token_factors(s, item.factors, args.factors);
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
