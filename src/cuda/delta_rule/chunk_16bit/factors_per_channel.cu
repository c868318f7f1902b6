// The factors of the chunk form with one decay per key channel. See ../chunk.cuh for the equations; here
//
//     A_ij = beta_i sum_d k_id k_jd exp(gamma_id - gamma_jd),     sP_ij likewise with scale q_i.
//
// No exponential of a sum is formed: every factor is a product of the decays of single tokens, none above 1 for g <= 0,
// so nothing overflows and a gate of -1000 costs no digits. In tiles of 16 rows, of which `rising` rows are k_i and q_i
// times the decays from the start of their tile, `falling` rows k_j times the decays after j to the end of its tile:
//
//     below the diagonal   rising falling^T, times the whole tiles between
//     on the diagonal      rising falling^T divided by the tile's own decay, unless that is too small in any channel;
//                          then in fp32: k_j runs down the rows, multiplied by one decay after the other
//
// The factor per channel goes to the falling rows, in registers. One block of eight warps per (chunk, value head).
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/chunk.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 16;  // of a tile
constexpr int kTiles = kChunkRows / kRows;

template <int kK>
struct Shared {
  using Tile = uint16_t[kChunkRows * kK];
  alignas(128) Tile k;  // then rising
  alignas(128) Tile q;  // then rising
  alignas(128) Tile falling;
  union {
    alignas(16) float decay[kChunkRows * kK];
    alignas(16) float J[kChunkRows * kPitchOfJ];  // once A is complete
  };
  alignas(16) float total[kTiles * kK];    // the decays of whole tiles
  alignas(16) float inverse[kTiles * kK];  // 1 / total
  alignas(16) float middle[kK];            // tiles 1 and 2 together
  alignas(16) float A[kChunkRows * kPitchOfA];
  float beta[kChunkRows];
  float rstd_k[kChunkRows], rstd_q[kChunkRows];
  bool strong[kTiles];  // a decay of the tile too small to be divided by

  // One tile serves both roles of the keys; `falling` is the writer's from the start.
  __device__ __forceinline__ SharedTile<kK> reader() { return {k}; }
  __device__ __forceinline__ SharedTile<kK> writer() { return {k}; }
  __device__ __forceinline__ float rstd_reader(int row) const { return rstd_k[row]; }
  __device__ __forceinline__ float rstd_writer(int row) const { return rstd_k[row]; }
};

// Whether k_j divided by a tile's decay, and k_j times it, keep their digits: bf16 has the exponents of fp32, enough
// for 16 tokens with g = -5; fp16 has few.
template <DType kType>
inline constexpr float kLeastDecay = kType == DType::kBF16 ? 0x1p-117f : 0x1p-4f;

// exp(g) of all tokens and channels; 1 where there is none. A thread stays with four channels.
template <int kK>
__device__ __forceinline__ void load_decays(const DeltaRuleDeviceProblem& p, const ChunkSpan& span, int head,
                                            float* decay) {
  constexpr int kVec4s = kK / 4, kStep = kThreads / kVec4s, kOwn = kChunkRows / kStep;
  const int channel = threadIdx.x % kVec4s * 4, first = threadIdx.x / kVec4s;
  const int count = min(max(p.head_dim_k - channel, 0), 4);
  const int64_t base = row_offset(p.g, span.batch, span.begin, head) + channel * p.g.strides[3];
  float rate = 0, bias[4] = {};
  if (p.gate_in_kernel) {
    rate = gate_rate(p, head);
    for (int e = 0; e < count; ++e) bias[e] = gate_bias(p, head, channel + e);
  }
  const auto place = [&](int row) { return reinterpret_cast<float4*>(decay + row * kK + channel); };
  const auto decays_of = [&]<GateKind kKind>(int row, float(&x)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value = gate_of<kKind>(p, x[e], rate, bias[e]).decay;
      x[e] = row < span.length && e < count ? value : 1.0f;
    }
  };
  with_type(p.g.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    RawVec4 raw[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first + i * kStep;
      raw[i] = {};
      if (row >= span.length || count == 0) continue;
      const int64_t offset = base + row * p.g.strides[1];
      raw[i] = p.g.aligned_vec4 ? load_vec4<kType>(element_at(p.g.data, kType, offset))
                                : gather_vec4(p.g.data, kType, offset, p.g.strides[3], count);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first + i * kStep;
      float x[4];
      decode_vec4<kType>(raw[i], x);
      if (!p.gate_in_kernel) decays_of.template operator()<GateKind::kGiven>(row, x);
      *place(row) = make_float4(x[0], x[1], x[2], x[3]);
    }
  });
  if (!p.gate_in_kernel) return;
  with_gate_kind(p, [&](auto kind) {  // once in the code, not for every type of the gate
#pragma unroll 2
    for (int row = first; row < kChunkRows; row += kStep) {
      const float4 from = *place(row);
      float x[4] = {from.x, from.y, from.z, from.w};
      decays_of.template operator()<decltype(kind)::value>(row, x);
      *place(row) = make_float4(x[0], x[1], x[2], x[3]);
    }
  });
}

template <DType kType>
__device__ __forceinline__ uint16_t to_element(float value) {
  return static_cast<uint16_t>(pack<kType>(value, 0.0f));
}

// A strong tile on the diagonal by one warp: lane l has column l % 16 and half of the channels.
template <DType kType, int kK>
__device__ __forceinline__ void diagonal(Shared<kK>& s, float scale, int tile, int lane, uint16_t* sP) {
  constexpr int kSegments = SharedTile<kK>::kSegments, kParts = kWarpSize / kRows;
  const int j = lane % kRows, part = lane / kRows, top = kRows * tile;
  const SharedTile<kK> k{s.k}, q{s.q};  // k in both roles: unpacked twice it would cost registers
  float a_sum[kRows] = {}, p_sum[kRows] = {};
#pragma unroll 1
  for (int segment = part; segment < kSegments; segment += kParts) {
    float running[8] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint4 k_words = *reinterpret_cast<const uint4*>(k.segment(top + i, segment));
      const uint4 q_words = *reinterpret_cast<const uint4*>(q.segment(top + i, segment));
      const uint32_t k_pairs[4] = {k_words.x, k_words.y, k_words.z, k_words.w};
      const uint32_t q_pairs[4] = {q_words.x, q_words.y, q_words.z, q_words.w};
      const float4* decays = reinterpret_cast<const float4*>(s.decay + (top + i) * kK + 8 * segment);
      const float4 d0 = decays[0], d1 = decays[1];
      const float decay[8] = {d0.x, d0.y, d0.z, d0.w, d1.x, d1.y, d1.z, d1.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 k_i = unpack<kType>(k_pairs[e]), q_i = unpack<kType>(q_pairs[e]);
        float& low = running[2 * e];
        float& high = running[2 * e + 1];
        low = i == j ? k_i.x : low * decay[2 * e];
        high = i == j ? k_i.y : high * decay[2 * e + 1];
        a_sum[i] = fmaf(k_i.y, high, fmaf(k_i.x, low, a_sum[i]));
        p_sum[i] = fmaf(q_i.y, high, fmaf(q_i.x, low, p_sum[i]));
      }
    }
  }
  const float rstd_j = s.rstd_writer(top + j);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float a = a_sum[r], p = p_sum[r];
#pragma unroll
    for (int distance = kRows; distance < kWarpSize; distance *= 2) {
      a += __shfl_xor_sync(kAllLanes, a, distance);
      p += __shfl_xor_sync(kAllLanes, p, distance);
    }
    const int i = top + r;
    if (part == 0) {
      s.A[(top + j) * kPitchOfA + i] = s.beta[i] * s.rstd_reader(i) * rstd_j * a;
    } else {
      sP[lower_offset(tile, r, top + j)] = to_element<kType>(scale * s.rstd_q[i] * rstd_j * p);
    }
  }
}

// The decays of whole tiles, and which are strong. `strong` is false before.
template <DType kType, int kK>
__device__ __forceinline__ void multiply_tiles(Shared<kK>& s) {
  for (int at = threadIdx.x; at < kTiles * kK; at += kThreads) {
    const int tile = at / kK;
    const float* decay = s.decay + tile * kRows * kK + at % kK;
    float product = decay[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) product *= decay[i * kK];
    s.total[at] = product;
    s.inverse[at] = 1.0f / product;
    if (product < kLeastDecay<kType>) s.strong[tile] = true;
  }
}

__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator*(float a, float2 b) { return make_float2(a * b.x, a * b.y); }

// Everything that is one multiplication per element, by threads that own two channels of a tile of rows: the scan's
// three copies of the keys, and in place of k and q the rising and falling rows.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows(const ChunkArgs& args, int64_t copies, Shared<kK>& s) {
  const float scale = args.problem.scale;
  const SharedTile<kK> reader = s.reader(), writer = s.writer(), q{s.q}, falling{s.falling};
  const auto pair_at = [](const SharedTile<kK>& tile, int row, int channel) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(&tile.at(row, channel));
  };
  for (int at = threadIdx.x; at < kTiles * kK / 2; at += kThreads) {
    const int tile = at / (kK / 2), channel = at % (kK / 2) * 2, top = kRows * tile;
    float2 before = make_float2(1, 1), after = make_float2(1, 1);  // the whole tiles on either side
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 total = *reinterpret_cast<const float2*>(s.total + t * kK + channel);
      if (t < tile) before = before * total;
      if (t > tile) after = after * total;
      if (tile == 0 && t == kTiles - 2) *reinterpret_cast<float2*>(s.middle + channel) = after;
    }
    const auto decay_of = [&](int row) { return *reinterpret_cast<const float2*>(s.decay + row * kK + channel); };
    uint16_t* to = args.factors.keys + (copies * kKeyCopies * kChunkRows + top) * kK + channel;
    const auto store = [&](KeyCopy copy, int i, float2 x) {
      *reinterpret_cast<uint32_t*>(to + (copy * kChunkRows + i) * kK) = pack<kType>(x.x, x.y);
    };
    float2 until = make_float2(1, 1);
#pragma unroll
    for (int i = kRows - 1; i >= 0; --i) {
      const int row = top + i;
      const float2 x = until * unpack<kType>(pair_at(writer, row, channel));
      pair_at(falling, row, channel) = pack<kType>(x.x, x.y);
      store(kWriter, i, s.rstd_writer(row) * (after * x));
      until = until * decay_of(row);
    }
    float2 since = make_float2(1, 1);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = top + i;
      since = since * decay_of(row);
      const float2 rising_k = since * unpack<kType>(pair_at(reader, row, channel));
      const float2 rising_q = since * unpack<kType>(pair_at(q, row, channel));
      pair_at(reader, row, channel) = pack<kType>(rising_k.x, rising_k.y);
      pair_at(q, row, channel) = pack<kType>(rising_q.x, rising_q.y);
      store(kReader, i, s.rstd_reader(row) * (before * rising_k));
      store(kQuery, i, (scale * s.rstd_q[row]) * (before * rising_q));
    }
    if (tile == kTiles - 1) {
      float* total = args.factors.total + copies * args.factors.total_width + channel;
      *reinterpret_cast<float2*>(total) = before * since;
    }
  }
}

// Tile (row, column) of A and sP, by one warp. `factor`, one per channel, belongs to the falling rows; null: 1.
template <DType kType, int kK>
__device__ __forceinline__ void make_tile(Shared<kK>& s, float scale, int row, int column, const float* factor,
                                          int lane, uint16_t* sP) {
  const SharedTile<kK> rising_k = s.reader(), rising_q{s.q}, falling{s.falling};
  float a_sum[2][4] = {}, p_sum[2][4] = {};
#pragma unroll 4
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t k_rows[4], q_rows[4], b[4];
    rising_k.load_a(kRows * row, m, lane, k_rows);
    rising_q.load_a(kRows * row, m, lane, q_rows);
    falling.load_b(kRows * column, m, lane, b);
    if (factor != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // channels 2t, 2t + 1 and 2t + 8, 2t + 9 of both halves of the columns
        const float2 d = *reinterpret_cast<const float2*>(factor + 16 * m + 8 * h + 2 * (lane % 4));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 x = d * unpack<kType>(b[2 * n + h]);
          b[2 * n + h] = pack<kType>(x.x, x.y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma<kType>(a_sum[n], k_rows, b[2 * n], b[2 * n + 1]);
      mma<kType>(p_sum[n], q_rows, b[2 * n], b[2 * n + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = kRows * row + lane / 4 + half * 8, j = kRows * column + 8 * n + 2 * (lane % 4);
      const float on_a = s.beta[i] * s.rstd_reader(i), on_p = scale * s.rstd_q[i];
      s.A[j * kPitchOfA + i] = on_a * s.rstd_writer(j) * a_sum[n][2 * half];
      s.A[(j + 1) * kPitchOfA + i] = on_a * s.rstd_writer(j + 1) * a_sum[n][2 * half + 1];
      const float p0 = i < j ? 0.0f : on_p * s.rstd_writer(j) * p_sum[n][2 * half];
      const float p1 = i < j + 1 ? 0.0f : on_p * s.rstd_writer(j + 1) * p_sum[n][2 * half + 1];
      *reinterpret_cast<uint32_t*>(sP + lower_offset(row, lane / 4 + half * 8, j)) = pack<kType>(p0, p1);
    }
  }
}

// The ten tiles on and below the diagonal, by eight warps with as much to do: four on the diagonal, three with tiles
// between, and those with none.
template <DType kType, int kK>
__device__ __forceinline__ void make_tiles(Shared<kK>& s, float scale, int warp, int lane, uint16_t* sP) {
  if (warp < 4) {
    if (!s.strong[warp]) make_tile<kType>(s, scale, warp, warp, s.inverse + warp * kK, lane, sP);
  } else if (warp < 7) {
    const int row = warp == 4 ? 2 : 3, column = warp == 6 ? 1 : 0;
    make_tile<kType>(s, scale, row, column, warp == 5 ? s.middle : s.total + (column + 1) * kK, lane, sP);
  } else {
#pragma unroll 1
    for (int row = 1; row < kTiles; ++row) make_tile<kType>(s, scale, row, row - 1, nullptr, lane, sP);
  }
}

template <int kK>
__device__ __forceinline__ void store_token_factors(const Shared<kK>& s, int64_t item, const ChunkFactors& factors) {
  const int i = threadIdx.x;
  if (i >= kChunkRows) return;
  factors.token[item * kChunkRows + i] = s.beta[i];
  if (factors.row == nullptr) return;
  float* row = factors.row + item * kRowNumbers * kChunkRows;
  row[kRstdOfQ * kChunkRows + i] = s.rstd_q[i];
  row[kRstdOfK * kChunkRows + i] = s.rstd_k[i];
}

template <DType kType, int kK>
__global__ void __launch_bounds__(kThreads, kK > 128 ? 1 : 2)
    channel_factors_kernel(const __grid_constant__ ChunkArgs args) {
  wait_for_previous_kernels();
  auto& s = dynamic_shared<Shared<kK>>();
  const DeltaRuleDeviceProblem& p = args.problem;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for_each_item(args, [&](int64_t chunk, const ChunkSpan& span, int head) {
    const int64_t item = args.factors_at(chunk) + head, copies = args.copies_at(chunk) + head;
    const int key_head = head / p.group;
    load_keys<kThreads, kK>(args, p.k, span, key_head, {s.k});
    load_keys<kThreads, kK>(args, p.q, span, key_head, {s.q});
    commit_copies();
    load_decays<kK>(p, span, head, s.decay);
    if (threadIdx.x < kTiles) s.strong[threadIdx.x] = false;
    if (threadIdx.x < kChunkRows) s.beta[threadIdx.x] = chunk_beta(p, span, head, threadIdx.x);
    wait_copies<0>();
    __syncthreads();
    row_norms<kType, 4, kK>({s.k}, p.qk_l2norm, s.rstd_k);
    row_norms<kType, 4, kK>({s.q}, p.qk_l2norm, s.rstd_q);
    __syncthreads();
    uint16_t* sP = args.factors.sP(item);
    multiply_tiles<kType>(s);
    __syncthreads();
    if (!args.copies_alone && warp < kTiles && s.strong[warp]) diagonal<kType>(s, p.scale, warp, lane, sP);
    __syncthreads();
    scale_rows<kType>(args, copies, s);
    if (args.copies_alone) return;
    __syncthreads();
    make_tiles<kType>(s, p.scale, warp, lane, sP);
    __syncthreads();
    invert_unit_lower(s.A, s.J, warp, lane);
    __syncthreads();
    store_lower<kType, kThreads>(s.J, args.factors.J(item));
    store_token_factors(s, item, args.factors);
  });
}

}  // namespace

size_t factors_per_channel_bytes(int padded_k) {
  size_t bytes = 0;
  with_tile(DType::kBF16, padded_k, [&]<DType, int kK>() { bytes = sizeof(Shared<kK>); });
  return bytes;
}

void launch_factors_per_channel(const ChunkArgs& args, int padded_k, const Context& context) {
  with_tile(args.problem.k.dtype, padded_k, [&]<DType kType, int kK>() {
    launch<channel_factors_kernel<kType, kK>>("delta_rule chunk_16bit factors per channel", context,
                                              {blocks_for_items(args), kThreads, sizeof(Shared<kK>), true}, args);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
