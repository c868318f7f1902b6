// Steps of the factors with a decay per channel (factors_per_channel.cu): rows of k and q come, get their norms and decays, and
// leave as the scan's copies.
#pragma once

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

  __device__ __forceinline__ OwnRows(const ChunkArgs& args, int64_t copy, const Place<kK>& place, float4 first)
      : own(place),
        copies(args.factors.keys + (copy * kKeyCopies * kChunkRows + own.top) * kK + own.channel),
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
__device__ __forceinline__ void store_total(const ChunkArgs& args, int64_t copy, const Place<kK>& own, float4 e) {
  if (own.top == kChunkRows - kOwnRows) four_at(args.factors.total + copy * kK + own.channel) = e;
}

// With one anchor: the rows of both sides of the products, of which the rising ones are two of the scan's copies of the
// keys, and the third copy. kAlone: there are no products, here and below.
template <DType kType, bool kAlone, int kK>
__device__ __forceinline__ void scale_rows(Shared<kK>& s, const ChunkArgs& args, int64_t copy, const Place<kK>& own,
                                           const Sums& sums) {
  const float4 before = total_before(s, own);
  const float4 e = exp2_approx(before + total_at(s, own.tile, own) + total_after(s, own));
  const OwnRows<kType, kK> rows(args, copy, own, before + sums.first(own.half));
  rows.template for_each<4>(sums, [&](int i, float4 sum) {
    const uint32_t at = key_offset(rows.own, i);
    const float2 on = s.on_rows[rows.own.top + i];
    const float4 key = on.x * unpack<kType>(four_at(s.k, at)), query = on.y * unpack<kType>(four_at(s.q, at));
    const float4 up = exp2_approx(sum), written = exp2_approx(-sum) * key;
    four_at(s.k, at) = pack<kType>(up * key);
    four_at(s.q, at) = pack<kType>(up * query);
    if constexpr (!kAlone) four_at(s.falling, at) = pack<kType>(written);
    rows.store(kWriter, i, pack<kType>(e * written));
  });
  store_total(args, copy, own, e);
}

// With two anchors: the rows of both sides, all copies, and the powers of falling rows. `first` and `last` are n and
// n'.
template <DType kType, bool kAlone, int kK>
__device__ __forceinline__ void scale_rows_apart(Shared<kK>& s, const ChunkArgs& args, int64_t copy,
                                                 const Place<kK>& own, const Sums& sums) {
  const float4 before = total_before(s, own), through = before + total_at(s, own.tile, own);
  const float4 first = nearest_integer(before), last = nearest_integer(through), between = last - first;
  if constexpr (!kAlone) {
    // Of tiles 1 and 2 themselves, and in the place of tile 3 of both.
    const float4 both = own.tile < 3 ? between : first - nearest_integer(total_at(s, 0, own));
    const uint2 powers = pack<DType::kBF16>(exp2_approx(own.half == 0 ? -between : both));
    (own.half == 0 ? s.inverse_decay : s.between)[own.tile].store(own.channel, powers);
  }
  const uint2 on_reads = pack<DType::kBF16>(exp2_approx(first));
  const float4 on_write = exp2_approx((through - last) + total_after(s, own));
  if (own.tile == kTiles - 1) store_total(args, copy, own, exp2_approx(through));
  const OwnRows<kType, kK> rows(args, copy, own, (before - first) + sums.first(own.half));
  rows.template for_each<kAlone ? 1 : 2>(sums, [&](int i, float4 sum) {
    const uint32_t at = key_offset(rows.own, i);
    const float2 on = s.on_rows[rows.own.top + i];
    const float4 key = on.x * unpack<kType>(four_at(s.k, at)), query = on.y * unpack<kType>(four_at(s.q, at));
    const float4 up = exp2_approx(sum);
    const uint2 on_k = pack<kType>(up * key), on_q = pack<kType>(up * query);
    if constexpr (!kAlone) four_at(s.k, at) = on_k;
    rows.store(kReader, i, times_powers<kType>(on_k, on_reads));
    if constexpr (!kAlone) four_at(s.q, at) = on_q;
    rows.store(kQuery, i, times_powers<kType>(on_q, on_reads));
    const float4 written = exp2_approx(between - sum) * key;
    if constexpr (!kAlone) four_at(s.falling, at) = pack<kType>(written);
    rows.store(kWriter, i, pack<kType>(on_write * written));
  });
}

// By one thread: the rising rows of one anchor to memory.
template <int kK>
__device__ __forceinline__ void store_copies(Shared<kK>& s, const FactorMaps& maps, int at) {
  const auto store = [&](const KeyMemory<kK>& memory, KeyCopy copy) {
    const KeyTile<kK> rows(memory);
#pragma unroll
    for (int p = 0; p < rows.kPanels; ++p) {
      store_box(maps.copies, {p * rows.kPanelColumns, 0, copy, at}, rows.panel(p));
    }
  };
  store(s.k, kReader);
  store(s.q, kQuery);
  commit_stores();
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
