// The factors of the chunk form with one decay per key channel. See chunk.cuh for the equations; here
//
//     A_ij = beta_i sum_d k_id k_jd E(gamma_id - gamma_jd),     P_ij likewise with q_i.
//
// No exponential of a sum is formed: every factor is a product of the decays of single tokens, none above 1 for g <= 0,
// so nothing overflows and a gate of -1000 costs no digits. In blocks of 8 rows:
//
//     below the diagonal   E(gamma_i - gamma_j) = (decays from the start of i's block to i) (whole blocks between)
//                          (decays after j to the end of its block); products on tensor cores of `rising` rows, k_i and
//                          q_i times the first, and `falling` rows, k_j times the last
//     on the diagonal      the same divided by the block's own decay, unless that is too small in any channel; then in
//                          fp32: k_j runs down the rows, multiplied by one decay after the other
//
// One block of eight warps per (chunk, value head).
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;  // of a block
constexpr int kBlocks = kChunkRows / kRows;

template <int kK>
struct Shared {
  using Tile = uint16_t[kChunkRows * kK];
  alignas(128) Tile k;  // then rising
  alignas(128) Tile q;  // then rising
  alignas(128) Tile falling;
  union {
    alignas(16) float decay[kChunkRows * kK];
    alignas(16) float T[kChunkRows * kPitchOfT];  // once A is complete
  };
  alignas(16) float block_decay[kBlocks * kK];
  alignas(16) float A[kChunkRows * kPitchOfA];
  float beta[kChunkRows];
  float rstd_k[kChunkRows], rstd_q[kChunkRows];
  bool strong[kBlocks];  // a decay of the block too small to be divided by
};

// Whether k_j divided by a block's decay, and k_j times it, keep their digits: bf16 has the exponents of fp32, fp16 has
// few.
template <DType kType>
inline constexpr float kLeastDecay = kType == DType::kBF16 ? 0x1p-60f : 0x1p-4f;

// exp(g) of all tokens and channels; 1 where there is none. A thread stays with four channels.
template <int kK>
__device__ __forceinline__ void load_decays(const DeltaRuleDeviceProblem& p, const ChunkSpan& span, int head,
                                            float* decay) {
  constexpr int kQuads = kK / 4, kStep = kThreads / kQuads, kOwn = kChunkRows / kStep;
  const int channel = threadIdx.x % kQuads * 4, first = threadIdx.x / kQuads;
  const int count = min(max(p.head_dim_k - channel, 0), 4);
  const int64_t base = row_offset(p.g, span.batch, span.begin, head) + channel * p.g.strides[3];
  float rate = 0, bias[4] = {};
  if (p.gate_in_kernel) {
    rate = gate_rate(p, head);
    for (int e = 0; e < count; ++e) bias[e] = gate_bias(p, head, channel + e);
  }
  with_type(p.g.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    RawQuad raw[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first + i * kStep;
      raw[i] = {};
      if (row >= span.length || count == 0) continue;
      const int64_t offset = base + row * p.g.strides[1];
      raw[i] = p.g.quads ? load_quad<kType>(element_at(p.g.data, kType, offset))
                         : gather_quad(p.g.data, kType, offset, p.g.strides[3], count);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first + i * kStep;
      float x[4];
      decode_quad<kType>(raw[i], x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool exists = row < span.length && e < count;
        x[e] = exists ? exp2_approx(log2_decay(p, x[e], rate, bias[e])) : 1.0f;
      }
      *reinterpret_cast<float4*>(decay + row * kK + channel) = make_float4(x[0], x[1], x[2], x[3]);
    }
  });
}

template <DType kType>
__device__ __forceinline__ float element(uint16_t bits) {
  return unpack<kType>(bits).x;
}
template <DType kType>
__device__ __forceinline__ uint16_t to_element(float value) {
  return static_cast<uint16_t>(pack<kType>(value, 0.0f));
}

// A strong diagonal block by one warp: lane l has column l % 8 and a quarter of the channels.
template <DType kType, int kK>
__device__ __forceinline__ void diagonal(Shared<kK>& s, float scale, int block, int lane, uint16_t* P) {
  constexpr int kSegments = SharedTile<kK>::kSegments, kQuarters = kWarpSize / kRows;
  const int j = lane % kRows, quarter = lane / kRows, top = kRows * block;
  const SharedTile<kK> k{s.k}, q{s.q};
  float a_sum[kRows] = {}, p_sum[kRows] = {};
#pragma unroll 1
  for (int segment = quarter; segment < kSegments; segment += kQuarters) {
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
  const float rstd_j = s.rstd_k[top + j];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float a = a_sum[r], p = p_sum[r];
#pragma unroll
    for (int distance = kRows; distance < kWarpSize; distance *= 2) {
      a += __shfl_xor_sync(kAllLanes, a, distance);
      p += __shfl_xor_sync(kAllLanes, p, distance);
    }
    const int i = top + r;
    if (quarter == 0) {
      s.A[(top + j) * kPitchOfA + i] = s.beta[i] * s.rstd_k[i] * rstd_j * a;
    } else if (quarter == 1) {
      P[i * kChunkRows + top + j] = to_element<kType>(scale * s.rstd_q[i] * rstd_j * p);
    }
  }
}

// The decays of whole blocks, and which are strong. `strong` is false before.
template <DType kType, int kK>
__device__ __forceinline__ void multiply_blocks(Shared<kK>& s) {
  for (int at = threadIdx.x; at < kBlocks * kK; at += kThreads) {
    const float* decay = s.decay + at / kK * kRows * kK + at % kK;
    float product = decay[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) product *= decay[i * kK];
    s.block_decay[at] = product;
    if (product < kLeastDecay<kType>) s.strong[at / kK] = true;
  }
}

__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator*(float a, float2 b) { return make_float2(a * b.x, a * b.y); }
__device__ __forceinline__ float2 inverse(float2 a) { return make_float2(1.0f / a.x, 1.0f / a.y); }

// Everything that is one multiplication per element, by threads that own two channels of a block of rows: the scan's
// three copies of the keys, and in place of k and q the rising and falling rows.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows(const ChunkArgs& args, int64_t item, Shared<kK>& s) {
  const float scale = args.problem.scale;
  const SharedTile<kK> k{s.k}, q{s.q}, falling{s.falling};
  const auto pair_at = [](const SharedTile<kK>& tile, int row, int channel) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(&tile.at(row, channel));
  };
  for (int at = threadIdx.x; at < kBlocks * kK / 2; at += kThreads) {
    const int block = at / (kK / 2), channel = at % (kK / 2) * 2;
    float2 before = make_float2(1, 1), after = make_float2(1, 1);  // the whole blocks on either side
    for (int b = 0; b < kBlocks; ++b) {
      const float2 decay = *reinterpret_cast<const float2*>(s.block_decay + b * kK + channel);
      if (b < block) before = before * decay;
      if (b > block) after = after * decay;
    }
    float2 decays[kRows], keys[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      decays[i] = *reinterpret_cast<const float2*>(s.decay + (kRows * block + i) * kK + channel);
      keys[i] = unpack<kType>(pair_at(k, kRows * block + i, channel));
    }
    uint16_t* to = args.factors.keys + (item * 3 * kChunkRows + kRows * block) * kK + channel;
    const auto store = [&](int copy, int i, float2 x) {
      *reinterpret_cast<uint32_t*>(to + (copy * kChunkRows + i) * kK) = pack<kType>(x.x, x.y);
    };
    float2 until = make_float2(1, 1);
#pragma unroll
    for (int i = kRows - 1; i >= 0; --i) {
      const int row = kRows * block + i;
      const float2 x = until * keys[i];
      pair_at(falling, row, channel) = pack<kType>(x.x, x.y);
      store(2, i, s.rstd_k[row] * (after * x));
      until = until * decays[i];
    }
    float2 since = make_float2(1, 1);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = kRows * block + i;
      since = since * decays[i];
      const float2 rising_k = since * keys[i], rising_q = since * unpack<kType>(pair_at(q, row, channel));
      pair_at(k, row, channel) = pack<kType>(rising_k.x, rising_k.y);
      pair_at(q, row, channel) = pack<kType>(rising_q.x, rising_q.y);
      store(0, i, s.rstd_k[row] * (before * rising_k));
      store(1, i, (scale * s.rstd_q[row]) * (before * rising_q));
    }
    if (block == kBlocks - 1) {
      float* total = args.factors.total + item * args.factors.total_width + channel;
      *reinterpret_cast<float2*>(total) = before * since;
    }
  }
}

// Rows [16 tile, +16) of A and P, by one warp: the blocks in columns `last` down to `last - 3`, as far as they are on
// or below the diagonal and not strong diagonal blocks. These are two blocks of rows; against a column block before
// both, the second has decayed by the first's total on top.
template <DType kType, int kK>
__device__ __forceinline__ void make_rows(Shared<kK>& s, float scale, int tile, int last, int lane, uint16_t* P) {
  constexpr int kColumns = 4;
  const SharedTile<kK> rising_k{s.k}, rising_q{s.q}, falling{s.falling};
  const int first = 2 * tile;  // the first block of rows
  float a_sum[kColumns][4] = {}, p_sum[kColumns][4] = {};
#pragma unroll 1
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t k_rows[4], q_rows[4];
    rising_k.load_a(16 * tile, m, lane, k_rows);
    rising_q.load_a(16 * tile, m, lane, q_rows);
    const float* decay = s.block_decay + 16 * m + 2 * (lane % 4);  // columns 2t, 2t + 1, 2t + 8, 2t + 9 of a row
    const auto decays_of = [&](int block, float2(&d)[2]) {
      d[0] = *reinterpret_cast<const float2*>(decay + block * kK);
      d[1] = *reinterpret_cast<const float2*>(decay + block * kK + 8);
    };
    const auto scaled = [](uint32_t pair, const float2& d) {
      const float2 x = unpack<kType>(pair);
      return pack<kType>(x.x * d.x, x.y * d.y);
    };
    float2 own[2];
    decays_of(first, own);
    float2 between[2] = {make_float2(1, 1), make_float2(1, 1)};  // whole blocks between the tile and the column
    for (int column = first - 1; column > last; --column) {      // none unless the columns begin further left
      float2 d[2];
      decays_of(column, d);
      between[0] = between[0] * d[0];
      between[1] = between[1] * d[1];
    }
    const uint32_t k_own[4] = {k_rows[0], k_rows[1], k_rows[2], k_rows[3]};
    const uint32_t q_own[4] = {q_rows[0], q_rows[1], q_rows[2], q_rows[3]};
    // One of the two blocks of rows, the other set to 0.
    const auto multiply_half = [&](bool second, float(&a)[4], float(&p)[4], uint32_t b0, uint32_t b1) {
      const uint32_t k_half[4] = {second ? 0 : k_own[0], second ? k_own[1] : 0, second ? 0 : k_own[2],
                                  second ? k_own[3] : 0};
      const uint32_t q_half[4] = {second ? 0 : q_own[0], second ? q_own[1] : 0, second ? 0 : q_own[2],
                                  second ? q_own[3] : 0};
      mma<kType>(a, k_half, b0, b1);
      mma<kType>(p, q_half, b0, b1);
    };
    k_rows[1] = scaled(k_rows[1], own[0]);
    k_rows[3] = scaled(k_rows[3], own[1]);
    q_rows[1] = scaled(q_rows[1], own[0]);
    q_rows[3] = scaled(q_rows[3], own[1]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = last - c;
      if (column < 0) continue;
      uint32_t b[4];
      falling.load_b(16 * (column / 2), m, lane, b);
      const uint32_t b0 = column % 2 == 0 ? b[0] : b[2], b1 = column % 2 == 0 ? b[1] : b[3];
      if (column >= first) {  // one of the tile's two blocks of rows is on the diagonal
        float2 d[2];
        decays_of(column, d);
        if (s.strong[column]) d[0] = d[1] = make_float2(1, 1);  // the result is not used, but 0 * inf would spread
        const uint32_t i0 = scaled(b0, inverse(d[0])), i1 = scaled(b1, inverse(d[1]));
        multiply_half(column > first, a_sum[c], p_sum[c], i0, i1);
        if (column == first) multiply_half(true, a_sum[c], p_sum[c], b0, b1);
        continue;
      }
      const uint32_t s0 = scaled(b0, between[0]), s1 = scaled(b1, between[1]);
      mma<kType>(a_sum[c], k_rows, s0, s1);
      mma<kType>(p_sum[c], q_rows, s0, s1);
      float2 d[2];
      decays_of(column, d);
      between[0] = between[0] * d[0];
      between[1] = between[1] * d[1];
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = last - c;
    if (column < 0) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = first + half;
      if (block < column || (block == column && s.strong[block])) continue;
      const int i = 16 * tile + lane / 4 + half * 8, j = 8 * column + 2 * (lane % 4);
      const float on_a = s.beta[i] * s.rstd_k[i], on_p = scale * s.rstd_q[i];
      s.A[j * kPitchOfA + i] = on_a * s.rstd_k[j] * a_sum[c][2 * half];
      s.A[(j + 1) * kPitchOfA + i] = on_a * s.rstd_k[j + 1] * a_sum[c][2 * half + 1];
      const float p0 = i < j ? 0.0f : on_p * s.rstd_k[j] * p_sum[c][2 * half];
      const float p1 = i < j + 1 ? 0.0f : on_p * s.rstd_k[j + 1] * p_sum[c][2 * half + 1];
      *reinterpret_cast<uint32_t*>(P + i * kChunkRows + j) = pack<kType>(p0, p1);
    }
  }
}

// The blocks of 8 of P above the diagonal that the scan reads, and what the scan multiplies tokens by: beta alone, the
// rest is in the keys.
__device__ __forceinline__ void store_rest(const float* beta, int thread, uint16_t* P, float* token) {
  constexpr int kStoring = 2 * kWarpSize;
  for (int at = thread; at < kChunkRows * kBlocks; at += kStoring) {
    const int row = at / kBlocks, block = at % kBlocks;
    if (block > row / kRows && !above_diagonal(row, block)) reinterpret_cast<uint4*>(P)[at] = make_uint4(0, 0, 0, 0);
  }
  for (int i = thread; i < kChunkRows; i += kStoring) {
    token[kOnValue * kChunkRows + i] = token[kOnKeyRead * kChunkRows + i] = beta[i];
    token[kOnQueryRead * kChunkRows + i] = token[kOnWrite * kChunkRows + i] = 1.0f;
  }
}

template <DType kType, int kK>
__global__ void __launch_bounds__(kThreads, kK > 128 ? 1 : 2)
    channel_factors_kernel(const __grid_constant__ ChunkArgs args) {
  auto& s = dynamic_shared<Shared<kK>>();
  const DeltaRuleDeviceProblem& p = args.problem;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t items = args.num_chunks * p.num_value_heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / p.num_value_heads;
    const int head = static_cast<int>(item - chunk * p.num_value_heads);
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    const int rows = static_cast<int>(span.length), key_head = head / p.group;
    load_tile<kChunkRows, kK>({s.k}, p.k, row_offset(p.k, span.batch, span.begin, key_head), rows, 0, p.head_dim_k,
                              args.vector_keys);
    load_tile<kChunkRows, kK>({s.q}, p.q, row_offset(p.q, span.batch, span.begin, key_head), rows, 0, p.head_dim_k,
                              args.vector_keys);
    commit_copies();
    load_decays<kK>(p, span, head, s.decay);
    if (threadIdx.x < kBlocks) s.strong[threadIdx.x] = false;
    if (threadIdx.x < kChunkRows) s.beta[threadIdx.x] = chunk_beta(p, span, head, threadIdx.x);
    wait_copies<0>();
    __syncthreads();
    row_norms<kType, 4, kK>({s.k}, p.qk_l2norm, s.rstd_k);
    row_norms<kType, 4, kK>({s.q}, p.qk_l2norm, s.rstd_q);
    __syncthreads();
    uint16_t* P = args.factors.P + item * kChunkRows * kChunkRows;
    multiply_blocks<kType>(s);
    __syncthreads();
    if (s.strong[warp]) diagonal<kType>(s, p.scale, warp, lane, P);
    __syncthreads();
    scale_rows<kType>(args, item, s);
    __syncthreads();
    if (warp < 6) {  // columns 7 .. 4 and 3 .. 0 of tile 3, 5 .. 2 and 1 .. 0 of tile 2, all of tiles 1 and 0
      const int tile = warp < 2 ? 3 : warp < 4 ? 2 : 5 - warp;
      make_rows<kType>(s, p.scale, tile, 2 * tile + 1 - (warp == 1 || warp == 3 ? 4 : 0), lane, P);
    } else {
      store_rest(s.beta, threadIdx.x - 6 * kWarpSize, P, args.factors.token + item * 4 * kChunkRows);
    }
    __syncthreads();
    invert_unit_lower(s.A, s.T, warp, lane);
    __syncthreads();
    store_lower<kType>(s.T, args.factors.T + item * kChunkRows * kChunkRows);
    __syncthreads();  // before the next item overwrites the tiles
  }
}

}  // namespace

size_t chunk_factors_channels_bytes(int padded_k) {
  size_t bytes = 0;
  with_tile<64, 128, 256>(DType::kBF16, padded_k, [&]<DType, int kK>() { bytes = sizeof(Shared<kK>); });
  return bytes;
}

void launch_chunk_factors_channels(const ChunkArgs& args, int padded_k, const Context& context) {
  const int64_t items = args.num_chunks * args.problem.num_value_heads;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, 1 << 30));
  with_tile<64, 128, 256>(args.problem.k.dtype, padded_k, [&]<DType kType, int kK>() {
    launch<channel_factors_kernel<kType, kK>>("delta_rule chunk factors per channel", context,
                                              {blocks, kThreads, sizeof(Shared<kK>)}, args);
  });
}

}  // namespace fastweight::cuda
