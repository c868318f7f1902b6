// Of the kernel in gradients_per_channel.cuh: step 6, mild and strong tiles: dg, and what makes dq, dk and dbeta.
#pragma once

#include "cuda/delta_rule/chunk_16bit/gradients_per_channel_sums.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

// One channel of a tile of 16 tokens.
struct TileChannel {
  int tile, channel;
  int count;         // tokens that exist; 0 of a channel that does not
  float rate, bias;  // of the gate
};

template <int kK>
__device__ __forceinline__ TileChannel tile_channel(const DeltaRuleDeviceProblem& p, const Item& item, int at) {
  TileChannel own{at / kK, at % kK, 0, 0.0f, 0.0f};
  if (own.channel < p.head_dim_k) own.count = static_cast<int>(item.span.length) - kRows * own.tile;
  if (p.gate_in_kernel) {
    own.rate = gate_rate(p, item.head);
    if (own.channel < p.head_dim_k) own.bias = gate_bias(p, item.head, own.channel);
  }
  return own;
}

// The offset of the channel's element of the first token.
__device__ __forceinline__ int64_t start_of(const DeviceTensor& x, const Item& item, int head, const TileChannel& own) {
  return row_offset(x, item.span.batch, item.span.begin + kRows * own.tile, head) + own.channel * x.strides[3];
}

// What the gate tensor holds; 0 where there is nothing.
__device__ __forceinline__ void load_gates(const DeltaRuleDeviceProblem& p, const Item& item, const TileChannel& own,
                                           float (&x)[kRows]) {
  with_type(p.g.dtype, [&](auto type) {
    constexpr DType kGate = decltype(type)::value;
    const char* g = element_at(p.g.data, kGate, start_of(p.g, item, item.head, own));
    const int64_t step = byte_offset(kGate, p.g.strides[1]);
#pragma unroll
    for (int i = 0; i < kRows; ++i, g += step) x[i] = i < own.count ? load_float(g, kGate, 0) : 0.0f;
  });
}

// q or k, normalised.
template <DType kType>
__device__ __forceinline__ void load_keys(const DeviceTensor& x, const Item& item, const TileChannel& own,
                                          const float* rstd, float (&values)[kRows]) {
  const auto* from = static_cast<const uint16_t*>(x.data) + start_of(x, item, item.key_head, own);
  const int64_t step = x.strides[1];
#pragma unroll
  for (int i = 0; i < kRows; ++i, from += step) {
    const uint32_t bits = i < own.count ? *from : 0;
    values[i] = rstd[kRows * own.tile + i] * decode(bits, kType);
  }
}

// The walk over the pairs of a tile: dg, and in the tiles of sums dq, dk and the terms of -dbeta.
template <DType kType, int kK>
__device__ __forceinline__ void walk_pairs(Shared<kK>& s, const TileChannel& own, const float (&q)[kRows],
                                           const float (&k)[kRows], const float (&decay)[kRows], float (&dg)[kRows]) {
  const SumTile<kK> query{s.query}, reader{s.reader}, writer{s.writer};
  const PairBlocks &P = s.pairs.blocks[kPairsOfP], &A = s.pairs.blocks[kPairsOfA];
  const int top = kRows * own.tile, channel = own.channel;
  float factor[kRows], dk[kRows];  // exp(gamma_i - gamma_j)
  float rise = 1;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float beta_k = -s.beta[top + i] * k[i];
    rise *= decay[i];
    float dq = rise * query.at(top + i, channel), read = rise * reader.at(top + i, channel);
    float crossing = fmaf(beta_k, read, q[i] * dq);  // the sum of M_ij' over j' < j, those before the tile among them
    float P_i[kRows], A_i[kRows];
    P.template load_row<kType>(own.tile, i, i, P_i);
    A.template load_row<kType>(own.tile, i, i, A_i);
#pragma unroll
    for (int j = 0; j < i; ++j) {
      dg[j] += crossing;
      factor[j] *= decay[i];
      const float key = factor[j] * k[j], x = fmaf(A_i[j], beta_k, P_i[j] * q[i]);
      dq = fmaf(P_i[j], key, dq);
      read = fmaf(A_i[j], key, read);
      dk[j] = fmaf(factor[j], x, dk[j]);
      crossing = fmaf(key, x, crossing);
    }
    dg[i] = crossing;
    factor[i] = 1;
    const float P_ii = s.pairs.diagonal[top + i];
    dk[i] = fmaf(P_ii, q[i], -s.beta[top + i] * read);
    query.at(top + i, channel) = fmaf(P_ii, k[i], dq);
    reader.at(top + i, channel) = k[i] * read;
  }
  float crossing = s.over[own.tile][channel];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    float& sum = writer.at(top + j, channel);
    const float write = factor[j] * sum;
    dg[j] += crossing;
    crossing = fmaf(k[j], write, crossing);
    sum = dk[j] + write;
  }
}

// From dg to the gradient of what the gate tensor holds, and the tile's share of the gate's parameters.
template <int kK>
__device__ __forceinline__ void store_gates(const GradientArgs& args, const Item& item, Shared<kK>& s,
                                            const TileChannel& own, float (&dg)[kRows]) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const DeviceTensor& out = args.dg;
  const int64_t start = start_of(out, item, item.head, own);
  float bias_sum = 0, a_log_sum = 0;
  with_gate_kind(p, [&](auto kind) {
    constexpr GateKind kKind = decltype(kind)::value;
    float x[kRows] = {};
    if (kKind != GateKind::kGiven) load_gates(p, item, own, x);  // again: kept, they would cost registers
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const GateTerms gate = gate_of<kKind>(p, x[i], own.rate, own.bias);
      a_log_sum += i < own.count ? gate.a_log * dg[i] : 0.0f;
      dg[i] *= gate.dx;
      bias_sum += i < own.count ? dg[i] : 0.0f;
    }
  });
  if (out.present()) {
    with_type(out.dtype, [&](auto type) {
      char* to = element_at(out.data, type.value, start);
      const int64_t step = byte_offset(type.value, out.strides[1]);
#pragma unroll
      for (int i = 0; i < kRows; ++i, to += step) {
        if (i < own.count) store_float(to, type.value, 0, dg[i]);
      }
    });
  }
  if (args.parameter_parts == nullptr) return;
  s.bias[own.tile][own.channel] = bias_sum;
  a_log_sum = sum_over_lanes<kWarpSize>(a_log_sum);
  if (own.channel % kWarpSize == 0) s.a_log[(own.tile * kK + own.channel) / kWarpSize] = a_log_sum;
}

// dg over the ranges of columns of a head: of all but the last, kept for the next.
template <int kK>
__device__ __forceinline__ void carry_gates(const GradientArgs& args, const Item& item, const TileChannel& own,
                                            float (&dg)[kRows]) {
  if (item.opens && item.closes) return;
  const int64_t sums = blockIdx.x * int64_t{kKeySumsPerChannel} + 2;
  float* slot = args.key_sums + (sums * kChunkRows + kRows * own.tile) * kK + own.channel;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (!item.opens) dg[i] += slot[i * kK];
    if (!item.closes) slot[i * kK] = dg[i];
  }
}

template <DType kType, int kK>
__device__ __forceinline__ void walk_tile(const GradientArgs& args, const Item& item, Shared<kK>& s, int at) {
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const TileChannel own = tile_channel<kK>(p, item, at);
  float q[kRows], k[kRows], decay[kRows], dg[kRows];
  load_gates(p, item, own, decay);
  load_keys<kType>(p.q, item, own, s.rstd_q, q);
  load_keys<kType>(p.k, item, own, s.rstd_k, k);
  with_gate_kind(p, [&](auto kind) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float value = gate_of<decltype(kind)::value>(p, decay[i], own.rate, own.bias).decay;
      decay[i] = i < own.count ? value : 1.0f;
    }
  });
  walk_pairs<kType>(s, own, q, k, decay, dg);
  carry_gates<kK>(args, item, own, dg);
  if (item.closes) store_gates(args, item, s, own, dg);
}

// Two channels of a mild tile, token after token: in the tiles of sums dq, dk and the terms of -dbeta; dg.
template <DType kType, int kK>
struct MildTile {
  // Tokens at a time: with four, a backward of raw gates took 10 % longer, waiting for instructions.
  static constexpr int kStep = 2;

  const GradientArgs& args;
  const Item& item;
  Shared<kK>& s;
  const ChannelPair& own;
  PairRows g_rows, q_rows, k_rows, dg_rows;
  uint2 next_g[kStep], next_q[kStep], next_k[kStep];  // on their way while the tokens at hand are computed with
  float2 total, inverse;                              // of the tile's decays
  float2 since = make_float2(1, 1);                   // the start of the tile
  float2 crossing;                                    // the sum of M_ij over i >= m > j
  float2 bias_sum = make_float2(0, 0);
  float a_log_sum = 0;

  __device__ __forceinline__ MildTile(const GradientArgs& gradients, const Item& one, Shared<kK>& shared,
                                      const ChannelPair& pair)
      : args(gradients),
        item(one),
        s(shared),
        own(pair),
        g_rows(args.chunk.problem.g, args.chunk.problem.g.dtype, item, item.head, own),
        q_rows(args.chunk.problem.q, kType, item, item.key_head, own),
        k_rows(args.chunk.problem.k, kType, item, item.key_head, own),
        dg_rows(args.dg, args.dg.dtype, item, item.head, own) {}

  // Gates, q and k of the tokens from `first` on.
  __device__ __forceinline__ void load(int first) {
    const int rows = first < kRows ? own.rows - first : 0;
    g_rows.load(rows, own.columns, next_g);
    q_rows.load(rows, own.columns, next_q);
    k_rows.load(rows, own.columns, next_k);
  }

  __device__ __forceinline__ float2& sum_at(float* sums, int row) const {
    return *reinterpret_cast<float2*>(&SumTile<kK>{sums}.at(row, own.channel));
  }

  // One token. The terms of dg are made of the operands as they were rounded: those of a row and those of
  // a column are then the same numbers, and a pair that is past leaves nothing in the sum.
  __device__ __forceinline__ float2 next(int row, const TokenKeys& keys, float beta, float P_ii, float2 decay) {
    since = since * decay;
    const MildDecays decays(since, total);
    float2 &query = sum_at(s.query, row), &reader = sum_at(s.reader, row), &writer = sum_at(s.writer, row);
    const float2 X = query, X_reader = reader, F = writer, dg = crossing;
    const auto rounded = [&](float2 x) { return inverse * unpack<kType>(round_pair<kType>(x)); };
    const float2 q = rounded(since * keys.q), k = rounded(since * keys.reader), fall = rounded(decays.fall * keys.k);
    crossing.x += fmaf(fall.x, F.x, -fmaf(q.x, X.x, k.x * X_reader.x));
    crossing.y += fmaf(fall.y, F.y, -fmaf(q.y, X.y, k.y * X_reader.y));
    const float2 up = inverse * since, read = up * X_reader, dq = up * X, dk = decays.inverse_rise * F;
    query = make_float2(fmaf(P_ii, keys.k.x, dq.x), fmaf(P_ii, keys.k.y, dq.y));
    writer =
        make_float2(fmaf(P_ii, keys.q.x, fmaf(-beta, read.x, dk.x)), fmaf(P_ii, keys.q.y, fmaf(-beta, read.y, dk.y)));
    reader = keys.k * read;
    return dg;
  }

  // dg over the ranges of columns of a head, as carry_gates.
  __device__ __forceinline__ void carry(int first, float2 (&dg)[kStep]) const {
    if (item.opens && item.closes) return;
    const int64_t sums = blockIdx.x * int64_t{kKeySumsPerChannel} + 2;
    float* slot = args.key_sums + (sums * kChunkRows + kRows * own.tile + first) * kK + own.channel;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      auto& kept = *reinterpret_cast<float2*>(slot + i * kK);
      if (!item.opens) add_to(dg[i], kept);
      if (!item.closes) kept = dg[i];
    }
  }

  // From dg to the gradient of what the gate tensor holds.
  __device__ __forceinline__ void finish_gates(int first, const GateTerms (&gate)[kStep][2], float2 (&dg)[kStep]) {
    if (own.rows - first < kStep || own.columns <= 1) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (first + i >= own.rows || own.columns <= 0) dg[i].x = 0;
        if (first + i >= own.rows || own.columns <= 1) dg[i].y = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      a_log_sum = fmaf(gate[i][0].a_log, dg[i].x, fmaf(gate[i][1].a_log, dg[i].y, a_log_sum));
      dg[i] = make_float2(gate[i][0].dx * dg[i].x, gate[i][1].dx * dg[i].y);
      add_to(bias_sum, dg[i]);
    }
    if (args.dg.present()) dg_rows.store(own.rows - first, own.columns, dg);
  }

  __device__ __forceinline__ void gates_of(GateTerms (&gate)[kStep][2]) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    float2 x[kStep];
    decode_pairs(p.g.dtype, next_g, x);
    with_gate_kind(p, [&](auto kind) {
      constexpr GateKind kKind = decltype(kind)::value;
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        gate[i][0] = gate_of<kKind>(p, x[i].x, own.rate, own.bias.x);
        gate[i][1] = gate_of<kKind>(p, x[i].y, own.rate, own.bias.y);
      }
    });
    if (own.columns > 1) return;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {  // tokens that do not exist come last, and what is made of them goes nowhere
      if (own.columns <= 0) gate[i][0].decay = 1;
      gate[i][1].decay = 1;
    }
  }

  __device__ __forceinline__ void run() {
    load(0);
    total = *reinterpret_cast<const float2*>(&s.total[own.tile][own.channel]);
    crossing = *reinterpret_cast<const float2*>(&s.over[own.tile][own.channel]);
    inverse = make_float2(reciprocal_approx(total.x), reciprocal_approx(total.y));
#pragma unroll 1
    for (int first = 0; first < kRows; first += kStep) {
      const int row = kRows * own.tile + first;
      using Numbers = TokenNumbers<kStep>;
      const Numbers rstd_q(s.rstd_q + row), rstd_k(s.rstd_k + row), beta(s.beta + row), P(s.pairs.diagonal + row);
      TokenKeys keys[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const float2 raw_q = unpack<kType>(next_q[i].x), raw_k = unpack<kType>(next_k[i].x);
        keys[i] = TokenKeys(raw_q, raw_k, rstd_q.x[i], rstd_k.x[i], beta.x[i]);
      }
      GateTerms gate[kStep][2];
      gates_of(gate);
      load(first + kStep);
      float2 dg[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        dg[i] = next(row + i, keys[i], beta.x[i], P.x[i], make_float2(gate[i][0].decay, gate[i][1].decay));
      }
      carry(first, dg);
      if (item.closes) finish_gates(first, gate, dg);
    }
    if (!item.closes || args.parameter_parts == nullptr) return;
    *reinterpret_cast<float2*>(&s.bias[own.tile][own.channel]) = bias_sum;
    a_log_sum = sum_over_lanes<kWarpSize>(a_log_sum);
    const int channels = own.tile * kK + own.channel;  // a warp has 64, of which store_gates would make two sums
    if (channels % (2 * kWarpSize) != 0) return;
    s.a_log[channels / kWarpSize] = a_log_sum;
    s.a_log[channels / kWarpSize + 1] = 0;
  }
};

// Step 6 of all tiles.
template <DType kType, int kK>
__device__ __forceinline__ void finish_tiles(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  const ChannelPair own = channel_pair<kK>(args.chunk.problem, item, thread);
  if (!s.is_strong(own.tile)) MildTile<kType, kK>(args, item, s, own).run();
#pragma unroll 1
  for (int at = thread; at < kTiles * kK; at += Shape<kK>::kThreads) {
    if (s.is_strong(at / kK)) walk_tile<kType>(args, item, s, at);
  }
}

// The chunk's share of dA_log and ddt_bias.
template <int kK>
__device__ __forceinline__ void store_parameters(const GradientArgs& args, const Item& item, const Shared<kK>& s,
                                                 int thread) {
  const int K = args.chunk.problem.head_dim_k, channel = thread;
  double* parts = args.parameter_parts + item.at * (1 + K);
  if (channel < K) {
    double sum = 0;
    for (int t = 0; t < kTiles; ++t) sum += s.bias[t][channel];
    parts[1 + channel] = sum;
  }
  if (thread == Shape<kK>::kThreads - 1) {
    double sum = 0;
    for (const float part : s.a_log) sum += part;
    parts[0] = sum;
  }
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
