// Of the kernel in gradients_per_channel.cuh: step 4, decays, and the rising and falling rows.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_per_channel_products.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator*(float a, float2 b) { return make_float2(a * b.x, a * b.y); }

// Two channels of a tile of 16 tokens.
struct ChannelPair {
  int tile, channel;
  int rows;     // tokens of the tile that exist, or more
  int columns;  // channels that exist, or more; none below 1
  float rate;   // of the gate
  float2 bias;
};

template <int kK>
__device__ __forceinline__ ChannelPair channel_pair(const DeltaRuleDeviceProblem& p, const Item& item, int thread) {
  ChannelPair own{thread / (kK / 2), thread % (kK / 2) * 2, 0, 0, 0.0f, make_float2(0, 0)};
  own.rows = static_cast<int>(item.span.length) - kRows * own.tile;
  own.columns = p.head_dim_k - own.channel;
  if (p.gate_in_kernel) {
    own.rate = gate_rate(p, item.head);
    if (own.columns > 0) own.bias.x = gate_bias(p, item.head, own.channel);
    if (own.columns > 1) own.bias.y = gate_bias(p, item.head, own.channel + 1);
  }
  return own;
}

// The pair's elements of a tensor, from the first token of the tile on.
struct PairRows {
  char* at;
  int64_t step, other;  // bytes to the next token, to the other channel
  DType dtype;
  bool together;

  __device__ __forceinline__ PairRows(const DeviceTensor& x, DType type, const Item& item, int head,
                                      const ChannelPair& own)
      : step(byte_offset(type, x.strides[1])),
        other(byte_offset(type, x.strides[3])),
        dtype(type),
        together(x.aligned_vec4) {
    const int64_t row = row_offset(x, item.span.batch, item.span.begin + kRows * own.tile, head);
    at = opaque(element_at(static_cast<char*>(x.data), type, row + own.channel * x.strides[3]));
  }

  // The elements of the next kCount tokens, as they lie in memory: two words, or one of two elements. 0 where there is
  // nothing: beyond `rows` tokens or `columns` channels.
  template <int kCount>
  __device__ __forceinline__ void load(int rows, int columns, uint2 (&words)[kCount]) {
    const int count = columns > 0 ? rows : 0;
    if (count < kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[i] = make_uint2(0, 0);
    }
    if (together && dtype == DType::kF32) {
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i < count) words[i] = *reinterpret_cast<const uint2*>(at);
      }
    } else if (together) {
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i < count) words[i].x = *reinterpret_cast<const uint32_t*>(at);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i >= count) continue;
        const uint32_t low = load_bits(at, dtype), high = columns > 1 ? load_bits(at + other, dtype) : 0;
        words[i] = dtype == DType::kF32 ? make_uint2(low, high) : make_uint2(low | high << 16, 0);
      }
    }
  }

  // To the next kCount tokens.
  template <int kCount>
  __device__ __forceinline__ void store(int rows, int columns, const float2 (&x)[kCount]) {
    const int count = columns > 0 ? rows : 0;
    with_type(dtype, [&](auto type) {
      constexpr DType kType = decltype(type)::value;
#pragma unroll
      for (int i = 0; i < kCount; ++i, at += step) {
        if (i >= count) continue;
        if (!together) {
          store_float(at, kType, 0, x[i].x);
          if (columns > 1) store_float(at + other, kType, 0, x[i].y);
        } else if constexpr (kType == DType::kF32) {
          *reinterpret_cast<float2*>(at) = x[i];
        } else {
          *reinterpret_cast<uint32_t*>(at) = pack<kType>(x[i].x, x[i].y);
        }
      }
    });
  }
};

template <int kCount>
__device__ __forceinline__ void decode_pairs(DType dtype, const uint2 (&words)[kCount], float2 (&x)[kCount]) {
  if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = make_float2(__uint_as_float(words[i].x), __uint_as_float(words[i].y));
  } else if (dtype == DType::kBF16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = unpack<DType::kBF16>(words[i].x);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = unpack<DType::kF16>(words[i].x);
  }
}

// Loops over the tokens of a tile have bodies of kTogether tokens and no more code than that: what is unrolled further
// makes warps wait for instructions. Numbers of all tokens in registers then have the tokens at hand at their front, and
// after as many turns as there are bodies they are where they were.
constexpr int kTogether = 4;
__device__ __forceinline__ void rotate(float2 (&x)[kRows]) {
  float2 front[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) front[i] = x[i];
#pragma unroll
  for (int i = 0; i < kRows; ++i) x[i] = i < kRows - kTogether ? x[i + kTogether] : front[i - kRows + kTogether];
}

// exp(g) of the tile; 1 where there is none.
__device__ __forceinline__ void load_decays(const DeltaRuleDeviceProblem& p, const Item& item, const ChannelPair& own,
                                            float2 (&decay)[kRows]) {
  uint2 words[kRows];
  PairRows(p.g, p.g.dtype, item, item.head, own).load(own.rows, own.columns, words);
  decode_pairs(p.g.dtype, words, decay);
  with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
#pragma unroll 1
    for (int first = 0; first < kRows; first += kTogether) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        decay[i] = make_float2(gate_of<kKind>(p, decay[i].x, own.rate, own.bias.x).decay,
                               gate_of<kKind>(p, decay[i].y, own.rate, own.bias.y).decay);
      }
      rotate(decay);
    }
  });
  if (own.rows >= kRows && own.columns > 1) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= own.rows || own.columns <= 0) decay[i].x = 1;
    if (i >= own.rows || own.columns <= 1) decay[i].y = 1;
  }
}

// Whether the pairs of a tile can be made of its rising and falling rows, given the least decay of a token and that of
// the whole tile: see above. No NaN is mild.
template <DType kType>
__device__ __forceinline__ bool is_mild(float least, float total) {
  constexpr float kLeastOfToken = 0x1.6a09e6p-8f, kLeastOfTile = kType == DType::kBF16 ? 0x1p-117f : 0x1p-4f;
  return least >= kLeastOfToken && total >= kLeastOfTile;
}

// The decays after a token to the end of a mild tile, of those from its start through the token.
struct MildDecays {
  float2 fall, inverse_rise;

  __device__ __forceinline__ MildDecays(float2 rise, float2 total)
      : inverse_rise(make_float2(reciprocal_approx(rise.x), reciprocal_approx(rise.y))) {
    fall = total * inverse_rise;
  }
};

// One token's q and k, normalised, and -beta k.
struct TokenKeys {
  float2 q, k, reader;

  TokenKeys() = default;
  __device__ __forceinline__ TokenKeys(float2 raw_q, float2 raw_k, float rstd_q, float rstd_k, float beta)
      : q(rstd_q * raw_q), k(rstd_k * raw_k), reader(-beta * k) {}
};

// Numbers of tokens, two or four at a time.
template <int kCount>
struct TokenNumbers {
  float x[kCount];

  __device__ __forceinline__ explicit TokenNumbers(const float* from) {
    if constexpr (kCount == 4) {
      const float4 all = *reinterpret_cast<const float4*>(from);
      x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
      static_assert(kCount == 2);
      const float2 all = *reinterpret_cast<const float2*>(from);
      x[0] = all.x, x[1] = all.y;
    }
  }
};

template <DType kType>
__device__ __forceinline__ uint32_t round_pair(float2 x) {
  return pack<kType>(x.x, x.y);
}

// The falling rows; the rising ones in place of q and k; the decays of whole tiles, and which tiles are strong.
template <DType kType, int kK>
__device__ __forceinline__ void scale_rows(const DeltaRuleDeviceProblem& p, const Item& item, Shared<kK>& s,
                                           int thread) {
  const SharedTile<kK> q(s.rising.q), k(s.rising.k), falling(s.tiles.falling);
  const ChannelPair own = channel_pair<kK>(p, item, thread);
  const int top = kRows * own.tile;
  const auto pair_at = [&](const SharedTile<kK>& rows, int i) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(&rows.at(top + i, own.channel));
  };
  float2 decay[kRows];
  load_decays(p, item, own, decay);
  float2 total = decay[0], least = decay[0];
#pragma unroll
  for (int i = 1; i < kRows; ++i) {
    total = total * decay[i];
    least = make_float2(fminf(least.x, decay[i].x), fminf(least.y, decay[i].y));
  }
  *reinterpret_cast<float2*>(&s.total[own.tile][own.channel]) = total;
  const bool mild = is_mild<kType>(least.x, total.x) && is_mild<kType>(least.y, total.y);
  if (!mild) {
    float2 until = make_float2(1, 1);
#pragma unroll
    for (int i = kRows - 1; i >= 0; --i) {
      pair_at(falling, i) = round_pair<kType>(until * (s.rstd_k[top + i] * unpack<kType>(pair_at(k, i))));
      until = until * decay[i];
    }
  }
  float2 since = make_float2(1, 1);
#pragma unroll 1
  for (int first = 0; first < kRows; first += kTogether) {
    using Numbers = TokenNumbers<kTogether>;
    const Numbers rstd_q(s.rstd_q + top + first), rstd_k(s.rstd_k + top + first), beta(s.beta + top + first);
#pragma unroll
    for (int e = 0; e < kTogether; ++e) {
      const int i = first + e;
      since = since * decay[e];
      const MildDecays decays(since, total);
      const TokenKeys keys(unpack<kType>(pair_at(q, i)), unpack<kType>(pair_at(k, i)), rstd_q.x[e], rstd_k.x[e],
                           beta.x[e]);
      if (mild) pair_at(falling, i) = round_pair<kType>(decays.fall * keys.k);
      pair_at(q, i) = round_pair<kType>(since * keys.q);
      pair_at(k, i) = round_pair<kType>(since * keys.reader);
    }
    rotate(decay);
  }
  const bool any_strong = __any_sync(kAllLanes, !mild);
  if (thread % kWarpSize == 0) s.strong[own.tile][own.channel / 64] = any_strong;
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
