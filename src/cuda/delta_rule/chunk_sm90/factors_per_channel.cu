// The factors of the chunk form with one decay per key channel, for K <= 128: what chunk_16bit/factors_per_channel.cu
// makes, with fewer instructions. See ../chunk.cuh for the equations.
//
// A team of eight warps has a pair of a chunk and a value head, three of them on a multiprocessor, or of four warps and four of
// them where K <= 64: what binds are instructions, and the time until TMA has brought the gates, where it can, and the rows of k
// and q behind them. A team is a block, or, where the factors are made beside a scan (beside.h), a third or a quarter of one that
// has a multiprocessor for itself. A thread has four channels of half a tile of 16 rows. With c_i, the running sums of log2 of
// the decays in a tile, and c of the whole tile,
//
//     A  = beta rising_k falling^T,     sP = scale rising_q falling^T     (k and q with the factors of their norms)
//
// where rising and falling rows hold their decays from, and to, an anchor between them:
//
//     all tiles mild    the start of the chunk:    rising_i = k_i 2^(before + c_i)    falling_j = k_j 2^-(before + c_j)
//     otherwise         two for a tile:            rising_i = k_i 2^(before + c_i - n)
//                                                  falling_j = k_j 2^(n' - before - c_j)
//
// With one anchor the rising rows are the scan's copies of k and q, and products are wgmma's: of two warpgroups one
// makes A, and J of it, the other sP. With two anchors they are made tile by tile, A and sP by one warp, so that
// falling rows are read and made ready once for both. n and n' are the sums before and behind the tile, rounded to
// integers, so that anchors differ by powers of two: pairs of bf16 take them without unpacking, and without another
// rounding. The scan's copies of rising rows are 2^n of them; tiles below the diagonal have 2^n of the anchors between
// them as a factor per channel, those on it 2^(n - n'), which falling rows take in registers. On the diagonal of a
// strong tile, one that 2^-c is too large for, the factors are computed in fp32: k_j runs down the rows, multiplied by
// one decay after the other. So nothing overflows for g <= 0.
//
// Sums of logarithms are short of digits only where their power is short of anything: log2 of a decay is at least -150,
// so c - c_j has an error below 2^-12, a sixteenth of the rounding of what it multiplies; so has the sum of the tiles
// before one, unless these decay by more than 2^-8192.
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"

#include <algorithm>
#include <limits>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/factor_gates.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// By one thread. k and q beyond the tokens and channels are zeros.
template <int kK>
__device__ __forceinline__ void start_loads(const ChunkArgs& args, const FactorMaps& maps, const Item& item,
                                            Shared<kK>& s) {
  using Rows = KeyTile<kK>;
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
      uint32_t a[4], b[4];  // the same numbers in another order: loading them again takes less than moving them
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

// c of a tile.
template <int kK>
__device__ __forceinline__ float4 total_at(const Shared<kK>& s, int tile, const Place<kK>& own) {
  return *reinterpret_cast<const float4*>(s.total + tile * kK + own.channel);
}

// c of the whole tiles before, or after, a thread's.
template <int kK>
__device__ __forceinline__ float4 total_before(const Shared<kK>& s, const Place<kK>& own) {
  float4 sum = all_four(0);
#pragma unroll
  for (uint32_t t = 0; t < kTiles - 1; ++t) {
    if (t < own.tile) sum = sum + total_at(s, t, own);
  }
  return sum;
}
template <int kK>
__device__ __forceinline__ float4 total_after(const Shared<kK>& s, const Place<kK>& own) {
  float4 sum = all_four(0);
#pragma unroll
  for (uint32_t t = 1; t < kTiles; ++t) {
    if (t > own.tile) sum = sum + total_at(s, t, own);
  }
  return sum;
}

// A thread's rows while they are scaled: where they lie, and c from the anchor on, less `start`. Every kPart rows the
// warp meets: ptxas moves no access across that place, or more numbers were on their way than there are registers.
template <DType kType, int kK>
struct OwnRows {
  Place<kK> own;
  uint16_t* copies;
  float4 start;

  __device__ __forceinline__ OwnRows(const ChunkArgs& args, int64_t item, const Place<kK>& place, float4 first)
      : own(place),
        copies(args.factors.keys + (item * kKeyCopies * kChunkRows + own.top) * kK + own.channel),
        start(first) {}
  __device__ __forceinline__ void store(KeyCopy copy, int i, uint2 x) const {
    *reinterpret_cast<uint2*>(copies + (copy * kChunkRows + i) * kK) = x;
  }

  // body(i, sum) for row own.top + i.
  template <int kPart, class Body>
  __device__ __forceinline__ void for_each(const Sums& sums, const Body& body) const {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (i % kPart == 0) __syncwarp();
      body(i, fmaf(sums.unit, sums.c[i], start));
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
  const float4 before = total_before(s, own);
  const float4 e = exp2_approx(before + total_at(s, own.tile, own) + total_after(s, own));
  const OwnRows<kType, kK> rows(args, item, own, before + sums.first(own.half));
  rows.template for_each<4>(sums, [&](int i, float4 sum) {
    const uint32_t at = key_offset(rows.own, i);
    const float2 on = s.on_rows[rows.own.top + i];
    const float4 key = on.x * unpack<kType>(four_at(s.k, at)), query = on.y * unpack<kType>(four_at(s.q, at));
    const float4 up = exp2_approx(sum), written = exp2_approx(-sum) * key;
    four_at(s.k, at) = pack<kType>(up * key);
    four_at(s.q, at) = pack<kType>(up * query);
    four_at(s.falling, at) = pack<kType>(written);
    rows.store(kWriter, i, pack<kType>(e * written));
  });
  store_total(args, item, own, e);
}

// With two anchors: the rows of both sides, all copies, and the powers of falling rows. `first` and `last` are n and
// n'.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows_apart(Shared<kK>& s, const ChunkArgs& args, int64_t item,
                                                 const Place<kK>& own, const Sums& sums) {
  const float4 before = total_before(s, own), through = before + total_at(s, own.tile, own);
  const float4 first = nearest_integer(before), last = nearest_integer(through), between = last - first;
  // Of tiles 1 and 2 themselves, and in the place of tile 3 of both.
  const float4 both = own.tile < 3 ? between : first - nearest_integer(total_at(s, 0, own));
  const uint2 powers = pack<DType::kBF16>(exp2_approx(own.half == 0 ? -between : both));
  (own.half == 0 ? s.inverse_decay : s.between)[own.tile].store(own.channel, powers);
  const uint2 on_reads = pack<DType::kBF16>(exp2_approx(first));
  const float4 on_write = exp2_approx((through - last) + total_after(s, own));
  if (own.tile == kTiles - 1) store_total(args, item, own, exp2_approx(through));
  const OwnRows<kType, kK> rows(args, item, own, (before - first) + sums.first(own.half));
  rows.template for_each<2>(sums, [&](int i, float4 sum) {
    const uint32_t at = key_offset(rows.own, i);
    const float2 on = s.on_rows[rows.own.top + i];
    const float4 key = on.x * unpack<kType>(four_at(s.k, at)), query = on.y * unpack<kType>(four_at(s.q, at));
    const float4 up = exp2_approx(sum);
    const uint2 on_k = pack<kType>(up * key), on_q = pack<kType>(up * query);
    four_at(s.k, at) = on_k;
    rows.store(kReader, i, times_powers<kType>(on_k, on_reads));
    four_at(s.q, at) = on_q;
    rows.store(kQuery, i, times_powers<kType>(on_q, on_reads));
    const float4 written = exp2_approx(between - sum) * key;
    four_at(s.falling, at) = pack<kType>(written);
    rows.store(kWriter, i, pack<kType>(on_write * written));
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
  uint16_t* sP = args.factors.sP(s.item.factors);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float x = s.on_rows[top + j].x * (sums[i] + __shfl_xor_sync(kAllLanes, sums[i], kRows));
    const float2 on = s.on_rows[top + i];
    if (lane >= kRows) continue;
    if (at < kTiles) {
      A.at(i, j) = s.beta[top + i] * on.x * x;
    } else {
      sP[lower_offset(tile, i, top + j)] = static_cast<uint16_t>(fastweight::cuda::pack<kType>(on.y * x, 0.0f));
    }
  }
}

// All strong tiles, before k and q are scaled: of eight warps four for A, four for sP. The sums have no registers meanwhile.
template <DType kType, class Team, int kK>
__device__ __forceinline__ void make_strong(Shared<kK>& s, const ChunkArgs& args, int warp, int lane, Sums& own_sums) {
  const Place<kK> own(warp);
  float4(&c)[kOwnRows] = own_sums.c;
  const auto log2_decay = [&](int i) -> float4& { return four_at(s.log2_decay + (own.top + i) * kK + own.channel); };
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) log2_decay(i) = own_sums.unit * (i == 0 ? c[0] : c[i] - c[i - 1]);
  Team::barrier();
  float sums[kTurns<kK>][kRows] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns<kK>; ++turn) {
    const int at = warp + turn * kWarps<kK>, tile = at % kTiles;
    if (s.strong[tile]) sum_strong<kType>(s, at < kTiles ? s.k : s.q, tile, lane, sums[turn]);
  }
  own_sums.unit = 1;
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) c[i] = i == 0 ? log2_decay(0) : c[i - 1] + log2_decay(i);
  Team::barrier();  // A lies where the decays were
#pragma unroll
  for (int turn = 0; turn < kTurns<kK>; ++turn) {
    store_strong<kType>(s, args, warp + turn * kWarps<kK>, lane, sums[turn]);
  }
}

// Tile (row, column) of rows falling^T for the rows of k and of q, by one warp. The powers belong to the falling rows.
template <DType kType, bool kWithPowers, int kK>
__device__ __forceinline__ void multiply_rows(const Shared<kK>& s, int row, int column, const ChannelPowers<kK>& powers,
                                              int lane, GramBlock& of_k, GramBlock& of_q) {
  const KeyTile<kK> k(s.k), q(s.q), falling(s.falling);
#pragma unroll
  for (int m = 0; m < kK / 16; m += 2) {
    uint4 d;
    if constexpr (kWithPowers) d = powers.load(m / 2, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4], b[4];
      falling.load_b(kRows * column, m + half, lane, b);
      if constexpr (kWithPowers) {
        const uint32_t on_channels[2] = {half == 0 ? d.x : d.z, half == 0 ? d.y : d.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) b[w] = times_powers<kType>(b[w], on_channels[w % 2]);
      }
      k.load_a(kRows * row, m + half, lane, a);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kType>(of_k[n], a, b[2 * n], b[2 * n + 1]);
      q.load_a(kRows * row, m + half, lane, a);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kType>(of_q[n], a, b[2 * n], b[2 * n + 1]);
    }
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

// A block of A to shared memory, or of sP.
template <bool kOnDiagonal, int kK>
__device__ __forceinline__ void store_A(const Shared<kK>& s, const InverseSteps& steps, int i, int j,
                                        GramBlock& block) {
  const int row = kRows * i + steps.lane / 4;
  const float beta[2] = {s.beta[row], s.beta[row + 8]};
#pragma unroll
  for (int e = 0; e < 8; ++e) block[e / 4][e % 4] *= beta[e / 2 % 2];
  steps.template store_A<kOnDiagonal>(i, j, block);
}
template <bool kOnDiagonal, DType kType>
__device__ __forceinline__ void store_sP(const GlobalResults<kType>& results, int i, int j, GramBlock& block) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if constexpr (kOnDiagonal) clear_above(n, results.lane, block[n]);
  }
  results.sP(i, j, block);
}

// With one anchor: all of A to shared memory, or sP, by a warpgroup.
template <DType kType, int kK>
__device__ __forceinline__ void make_lower(Shared<kK>& s, bool of_A, const InverseSteps& steps,
                                           const GlobalResults<kType>& results) {
  Gram sums;
  start_gram<kType, kK>(of_A ? s.k : s.q, s.falling, sums);
  wgmma_commit();
  wgmma_wait<0>(sums);
  const auto store = [&](auto on_diagonal, int j, auto& blocks) {
    constexpr bool kOnDiagonal = decltype(on_diagonal)::value;
    if (of_A) {
      store_A<kOnDiagonal>(s, steps, steps.warp, j, blocks[0]);
    } else {
      store_sP<kOnDiagonal>(results, steps.warp, j, blocks[0]);
    }
  };
  for_each_block(steps.warp, store, sums);
}

// The blocks of a warp on and below the diagonal, five bits each: 16 + 4 i + j. Next to the diagonal there are no
// powers: these are with others where a warp has more.
template <int kK>
__device__ __forceinline__ uint32_t blocks_of_warp(int warp) {
  constexpr auto block = [](uint64_t i, uint64_t j) { return 16 + 4 * i + j; };
  if constexpr (kWarps<kK> == kGroupWarps) {
    constexpr uint64_t kBlocks = (block(3, 0) | block(3, 2) << 5 | block(2, 1) << 10) |
                                 (block(2, 0) | block(3, 1) << 5 | block(1, 0) << 10) << 16 |
                                 (block(0, 0) | block(1, 1) << 5) << 32 | (block(2, 2) | block(3, 3) << 5) << 48;
    return static_cast<uint32_t>(kBlocks >> (16 * warp)) & 0xffff;
  } else {
    constexpr uint64_t kFirst = block(1, 0) | block(3, 2) << 5 | block(1, 1) << 10 | block(2, 2) << 15 |
                                block(3, 3) << 20 | block(2, 0) << 25 | block(3, 1) << 30 | block(3, 0) << 35;
    constexpr uint32_t kSecond = block(2, 1) | block(0, 0) << 5;
    return (static_cast<uint32_t>(kFirst >> (5 * warp)) & 31) | (warp < 2 ? (kSecond >> (5 * warp) & 31) << 5 : 0);
  }
}

// With two anchors: all of A to shared memory, and sP, by all warps. What is on the diagonal of strong tiles is there.
template <DType kType, int kK>
__device__ __forceinline__ void make_lower_apart(Shared<kK>& s, int warp, const InverseSteps& steps,
                                                 const GlobalResults<kType>& results) {
#pragma unroll 1
  for (uint32_t blocks = blocks_of_warp<kK>(warp); blocks != 0; blocks >>= 5) {
    const int i = blocks / 4 % 4, j = blocks % 4;
    if (i == j && s.strong[i]) continue;
    GramBlock of_k = {}, of_q = {};
    if (i == j + 1) {
      multiply_rows<kType, false>(s, i, j, s.between[0], steps.lane, of_k, of_q);
    } else {
      const ChannelPowers<kK>& powers = i == j ? s.inverse_decay[i] : s.between[i == j + 3 ? 3 : j + 1];
      multiply_rows<kType, true>(s, i, j, powers, steps.lane, of_k, of_q);
    }
    const auto store = [&]<bool kOnDiagonal>() {
      store_A<kOnDiagonal>(s, steps, i, j, of_k);
      store_sP<kOnDiagonal>(results, i, j, of_q);
    };
    i == j ? store.template operator()<true>() : store.template operator()<false>();
  }
}

// J from A, by the team's first warpgroup.
template <DType kType, class Team, int kK>
__device__ __forceinline__ void invert_A(Shared<kK>& s, const ChunkArgs& args) {
  const GlobalResults<kType> results = results_of<kType>(args, s.item.factors, lane_anew());
  const InverseSteps steps{s.inverse, Team::warp(), results.lane};
  Team::group_barrier();
  steps.invert_diagonal();
  Team::group_barrier();
  if (steps.warp % 2 == 1) {
    steps.merge_16(results);
  } else {
    steps.store_diagonal(results);
    store_token_factors(s, args.factors, steps.lane + steps.warp / 2 * kWarpSize);
  }
  Team::group_barrier();
  steps.multiply_Z();
  Team::group_barrier();
  steps.merge_32(results);
}

// By one thread, before the pair that begins.
template <int kK>
__device__ __forceinline__ void clear_marks(Shared<kK>& s) {
  s.apart = s.strong[0] = s.strong[1] = s.strong[2] = s.strong[3] = false;
}
template <int kK>
__device__ __forceinline__ void begin_team(Shared<kK>& s) {
  clear_marks(s);
  s.gates_filled.init(2);  // the thread that starts the loads, and the warp that knows the gate numbers
  s.keys_filled.init(1);
  s.rows_read.init(kWarps<kK>);
  fence_barrier_init();
}

// The factors of the item, whose rows are on their way, by a team, whose leader stores the copies. read(apart) follows each
// thread's last access to k, q and falling, but for what the leader stores.
template <DType kType, class Team, int kK, class Read>
__device__ __forceinline__ void make_factors(const ChunkArgs& args, const FactorMaps& maps, Shared<kK>& s,
                                             const Read& read) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const Item& item = s.item;
  const int thread = Team::thread();
  const Place<kK> own(Team::warp());
  if (Team::warp() == kWarps<kK> - 1) {
    store_gate_numbers(s, p, lane_anew());
    __syncwarp();
    if (elect_one()) s.gates_filled.arrive();
  }
  if (thread < kChunkRows) s.beta[thread] = chunk_beta(p, item.span, item.head, thread);
  Sums sums;
  const auto wait_for_gates = [&] { s.gates_filled.wait(Team::kAlone ? 0 : s.parity); };
  if (maps.has_g) {
    wait_for_gates();
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) sums.c[i] = unpack<kType>(four_at(s.falling, key_offset(own, i)));
  } else {
    load_gates(p.g, item.span, item.head, p.head_dim_k, own, sums.c);
    wait_for_gates();
  }
  const bool rises = sum_gates(p, GateNumbers(s, p, own), tokens_from(own, item.tokens, p.head_dim_k), sums);
  const float4 total = sums.total() + other_half(sums.total());
  if (own.half == 0) four_at(s.total + own.tile * kK + own.channel) = total;
  if (rises || !(least(total) >= kMild<kType>)) s.apart = true;
  if (least(total) < kStrong<kType>) s.strong[own.tile] = true;
  s.keys_filled.wait(Team::kAlone ? 0 : s.parity);
  norms<kType>(s, p, Team::warp(), lane_anew());
  Team::barrier();
  const bool apart = s.apart;
  if (!apart) {
    scale_rows<kType>(s, args, item.factors, Place<kK>(Team::warp()), sums);
    fence_async_proxy();
    Team::barrier();
    if (Team::leads()) store_copies(s, maps, static_cast<int>(item.factors));
  } else {
    if (s.strong[0] || s.strong[1] || s.strong[2] || s.strong[3]) {
      make_strong<kType, Team>(s, args, Team::warp(), lane_anew(), sums);
    }
    scale_rows_apart<kType>(s, args, item.factors, Place<kK>(Team::warp()), sums);
    Team::barrier();
  }
  const int warp = Team::warp(), lane = lane_anew();
  const GlobalResults<kType> results = results_of<kType>(args, item.factors, lane);
  const InverseSteps steps{s.inverse, warp % kGroupWarps, lane};
  const bool of_A = warp < kGroupWarps;
  if (apart) {
    make_lower_apart<kType>(s, warp, steps, results);
    Team::barrier();
  } else {
    if constexpr (kWarps<kK> == kGroupWarps) make_lower<kType>(s, false, steps, results);
    make_lower<kType>(s, of_A, steps, results);
  }
  read(apart);
  if (Team::warp() < kGroupWarps) invert_A<kType, Team>(s, args);
}

// A block has one pair. From the end, the scan finds in the second-level cache what was made last, and begins with that.
template <DType kType, int kK>
__global__ void __launch_bounds__(kThreads<kK>, kTeamsOnOne<kK>)
    channel_factors_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ FactorMaps maps) {
  using Team = TeamOf<kK, 1>;
  auto& s = aligned_shared<Shared<kK>>();
  wait_for_previous_kernels();
  let_next_kernel_start();
  if (Team::leads()) {
    begin_team(s);
    s.item = item_of(args, maps.from_the_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (s.item.exists()) start_loads(args, maps, s.item, s);
  }
  Team::barrier();
  if (!s.item.exists()) return;
  make_factors<kType, Team>(args, maps, s, [](bool) {});
  if (Team::leads()) wait_stores_read<0>();
}

// Pairs [begin, end) beside a scan, and the flags of all.
struct PairsBeside {
  uint32_t begin, end;
  uint32_t* flags;
};

// By a team: 0 for the pairs that it is to make, which no other one touches; by all teams 1 for those before them, which the
// kernel before this one has made.
template <int kK>
__device__ __forceinline__ void begin_flags(const PairsBeside& pairs, uint32_t first, uint32_t step) {
  const auto thread = static_cast<uint32_t>(TeamOf<kK, kTeamsOnOne<kK>>::thread());
  for (uint32_t n = first + thread * step; n < pairs.end; n += kThreads<kK> * step) pairs.flags[n] = 0;
  for (uint32_t n = blockIdx.x * blockDim.x + threadIdx.x; n < pairs.begin; n += gridDim.x * blockDim.x) {
    pairs.flags[n] = 1;
  }
  fence_all_blocks();
}

// Beside a scan: teams take one pair after the other. What the next one begins with is on its way while J is made of this one.
// Where a team is stands in shared memory: registers are short.
template <DType kType, int kK>
__global__ void __launch_bounds__(kTeamsOnOne<kK>* kThreads<kK>, 1)
    channel_factors_beside_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ FactorMaps maps,
                                  PairsBeside pairs) {
  using Team = TeamOf<kK, kTeamsOnOne<kK>>;
  auto& s = (&aligned_shared<Shared<kK>>())[Team::number()];
  const auto find_and_load = [&](uint32_t number, Item& item) {
    item = number < pairs.end ? item_of(args, number) : Item();
    if (item.exists()) start_loads(args, maps, item, s);
  };
  wait_for_previous_kernels();
  const uint32_t first = pairs.begin + Team::number() * gridDim.x + blockIdx.x;
  begin_flags<kK>(pairs, first, kTeamsOnOne<kK> * gridDim.x);
  if (Team::leads()) {
    begin_team(s);
    s.parity = 0;
    find_and_load(first, s.item);
  }
  __syncthreads();
  let_next_kernel_start();
#pragma unroll 1
  while (s.item.exists()) {
    make_factors<kType, Team>(args, maps, s, [&](bool apart) {
      if (apart) fence_async_proxy();  // otherwise only products and stores have read them since the last one
      __syncwarp();
      if (lane_anew() == 0) s.rows_read.arrive();
      if (Team::leads()) {
        s.rows_read.wait(s.parity);
        wait_stores_read<0>();
        clear_marks(s);
        find_and_load(s.item.number + kTeamsOnOne<kK> * gridDim.x, s.next);
      }
    });
    if (Team::leads()) wait_stores<0>();
    Team::barrier();
    if (Team::leads()) {
      publish(pairs.flags + s.item.number);
      s.item = s.next;
      s.parity ^= 1;
    }
    Team::barrier();
  }
}

template <int kK>
inline constexpr size_t kBytesBeside = kTeamsOnOne<kK> * sizeof(Shared<kK>);

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

bool makes_channel_factors_beside(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes) {
  constexpr size_t kMostBytes = std::max(kBytesBeside<64>, kBytesBeside<128>);
  return takes_channel_factors(in, sizes) && lacks_shared_memory(kMostBytes, in.q.device.index).empty();
}

namespace {

FactorMaps factor_maps(const DeltaRuleInputs& in, const ChunkArgs& args) {
  FactorMaps maps;
  maps.k = rows_map(in.k);
  maps.q = rows_map(in.q);
  maps.has_g = in.g.dtype == in.k.dtype && has_token_map(in.g);
  if (maps.has_g) maps.g = rows_map(in.g);
  maps.copies = copies_map(args.factors.keys, in.k.dtype, padded_k(args.problem.head_dim_k), count_items(args));
  return maps;
}

// The type of the keys, and the padded K.
template <class Body>
void with_kernel(const ChunkArgs& args, const Body& body) {
  const auto of_type = [&]<DType kType>() {
    padded_k(args.problem.head_dim_k) == 64 ? body.template operator()<kType, 64>()
                                            : body.template operator()<kType, 128>();
  };
  args.problem.k.dtype == DType::kBF16 ? of_type.template operator()<DType::kBF16>()
                                       : of_type.template operator()<DType::kF16>();
}

void launch_pairs(const ChunkArgs& args, const FactorMaps& maps, int64_t pairs, const Context& context) {
  with_kernel(args, [&]<DType kType, int kK>() {
    const LaunchShape shape{static_cast<unsigned>(pairs), kThreads<kK>, sizeof(Shared<kK>), true};
    launch<channel_factors_kernel<kType, kK>>("delta_rule chunk_sm90 factors per channel", context, shape, args, maps);
  });
}

}  // namespace

void launch_channel_factors(const DeltaRuleInputs& in, const ChunkArgs& args, bool from_the_end,
                            const Context& context) {
  FactorMaps maps = factor_maps(in, args);
  maps.from_the_end = from_the_end;
  launch_pairs(args, maps, chunk_16bit::chunks_in_window(args) * args.problem.num_value_heads, context);
}

void launch_channel_factors_beside(const DeltaRuleInputs& in, const ChunkArgs& args, const BesidePlan& plan,
                                   uint32_t* flags, const Context& context) {
  FactorMaps maps = factor_maps(in, args);
  maps.from_the_end = true;
  launch_pairs(args, maps, plan.before, context);
  const int64_t pairs = chunk_16bit::chunks_in_window(args) * args.problem.num_value_heads;
  const PairsBeside beside{static_cast<uint32_t>(plan.before), static_cast<uint32_t>(pairs), flags};
  with_kernel(args, [&]<DType kType, int kK>() {
    const LaunchShape shape{static_cast<unsigned>(plan.beside), kTeamsOnOne<kK> * kThreads<kK>, kBytesBeside<kK>, true};
    launch<channel_factors_beside_kernel<kType, kK>>("delta_rule chunk_sm90 factors per channel beside the scan",
                                                     context, shape, args, maps, beside);
  });
}

}  // namespace fastweight::cuda::chunk_sm90
