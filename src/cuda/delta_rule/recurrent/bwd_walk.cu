// Backward token by token: from the last token of a sequence to the first, with the gradient G of the state in
// registers. With do = scale d_o, r the residual and u = beta r:
//
//     G   += q^T do                 dq = do S^T
//     du   = k G,  dv = beta du     dbeta = du . r
//     dk   = u G^T - dv Sd^T
//     G   -= k^T dv                 dg = <Sd, G>, per channel row by row
//     G    = exp(g) G
//
// A block has 32 value columns of one head of one sequence, as in the forward (recurrent.cuh). A token needs the state
// before it. Within a chunk these come from the state before the chunk: a first walk over its tokens computes the
// residuals, which stay in shared memory and make every later walk, S = Sd + k^T u, a matter of each lane alone. The
// later walks start from states that are kept in shared memory on the way, one for every power of two: where bit z is
// the lowest of position x, the state before token x is in the slot of z as long as x is t without its lower bits.
// Reaching the states before all 64 tokens of a chunk, from the last to the first, takes 2 steps per token. With less
// shared memory there are fewer slots, and more steps; the bits are the same.
//
// One barrier per token. Sums over key channels are made as in the forward; sums over the block's columns by the eight
// lanes that have them, after which lane i has channel i of the lanes' eight.
#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions.cuh"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/adjoints.cuh"
#include "cuda/delta_rule/recurrent/bwd.cuh"
#include "cuda/delta_rule/recurrent/rows.cuh"
#include "cuda/delta_rule/state_address.cuh"

namespace fastweight::cuda::recurrent {
namespace {

constexpr int kMostTokens = 64;  // of a chunk
constexpr int kMostBits = 6;     // of a position in a chunk

template <int kPlaces>
struct Shared {
  static constexpr int kWarps = kPlaces / kKeyLanes;
  using Slot = float4[kKeys][kThreads<kPlaces>];  // every thread has its own

  alignas(16) float sums[2][kWarps][kColumnsOfBlock];
  alignas(16) float r[kMostTokens][kColumnsOfBlock];
  float kk[2][kWarps], qq[2][kWarps];
  float rstd_k[kMostTokens], rstd_q[kMostTokens];
  float dg[kMostTokens][kWarps];  // one decay per head: what the warps have
  Slot slots[1];                  // the state before the chunk; then as many as there is room for
};

// Position x of a chunk is kept in slot 0 for x = 0, else by its lowest bit, which is `lowest` or above.
__device__ __forceinline__ int lowest_bit(int x) {
  int bit = 0;
#pragma unroll
  for (int i = 1; i <= kMostBits; ++i) bit += x % (1 << i) == 0;
  return bit;
}
__device__ __forceinline__ int slot_of(int x, int lowest) { return x == 0 ? 0 : lowest_bit(x) - lowest + 1; }
__device__ __forceinline__ bool is_kept(int x, int target, int lowest) {
  const int bit = lowest_bit(x);
  return bit >= lowest && x < target && x == target >> bit << bit;
}
// The nearest position at or before t that was kept for t + 1, or for a target after it.
__device__ __forceinline__ int kept_before(int t, int lowest) {
  const int bit = max(lowest_bit(t + 1), lowest);
  return t >> bit << bit;
}

template <int kPlaces>
__device__ __forceinline__ void keep(Shared<kPlaces>& s, int slot, const StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    s.slots[slot][i][threadIdx.x] = make_float4(S.s[i][0], S.s[i][1], S.s[i][2], S.s[i][3]);
  }
}

template <int kPlaces>
__device__ __forceinline__ void restore(const Shared<kPlaces>& s, int slot, StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float4 x = s.slots[slot][i][threadIdx.x];
    S.s[i][0] = x.x;
    S.s[i][1] = x.y;
    S.s[i][2] = x.z;
    S.s[i][3] = x.w;
  }
}

// A state between memory and slot 0, a channel at a time: it is there that registers are scarce.
template <int kPlaces>
__device__ __forceinline__ void load_slot(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                          Shared<kPlaces>& s) {
#pragma unroll 1
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + i % 4;
    const int64_t row = offset + key * states.k_stride;
    float x[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = part.column + j;
      x[j] = key < K && column < V ? load_float(states.data, states.dtype, row + column * states.v_stride) : 0.0f;
    }
    s.slots[0][i][threadIdx.x] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <int kPlaces>
__device__ __forceinline__ void store_slot(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                           const Shared<kPlaces>& s) {
#pragma unroll 1
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + i % 4;
    const float4 x = s.slots[0][i][threadIdx.x];
    const float values[kColumns] = {x.x, x.y, x.z, x.w};
    if (key >= K) continue;
    scatter_vec4(states.data, states.dtype, offset + key * states.k_stride + part.column * states.v_stride,
                 states.v_stride, V - part.column, values);
  }
}

// A chunk of the part's sequence.
struct ChunkOfPart {
  Part part;
  int64_t batch, begin;  // its first token
  int tokens;
  int range;  // of the columns, among the parts of the gradients
  GateParameters gate;
};

// A token's rows as they lie in memory: the lane's channels of k and q, its columns of v or d_o.
struct RawRows {
  RawVec4 k[kKeys / 4], q[kKeys / 4], values;
  RawScalars scalars;
};

template <int kPlaces, bool kWithQuery>
__device__ __forceinline__ void load_rows(const DeltaRuleDeviceProblem& p, const ChunkOfPart& chunk, int t,
                                          const DeviceTensor& values, RawRows& raw) {
  const Part& part = chunk.part;
  const int64_t token = chunk.begin + t;
  const char* k = row_at(p.k, chunk.batch, token, part.head / p.group);
  const char* q = row_at(p.q, chunk.batch, token, part.head / p.group);
#pragma unroll
  for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) {
    const int key = opaque(key_of<kPlaces>(part, vec4));  // nothing made of it is kept from token to token
    raw.k[vec4] = load_part(p.k, k, key, p.head_dim_k);
    if (kWithQuery) raw.q[vec4] = load_part(p.q, q, key, p.head_dim_k);
  }
  if (values.present()) {
    const int column = opaque(part.column);
    raw.values = load_part(values, row_at(values, chunk.batch, token, part.head), column, p.head_dim_v);
  }
  raw.scalars = load_scalars<kPlaces>(
      p, part, row_at(p.g, chunk.batch, token, part.head), byte_offset(p.g.dtype, p.g.strides[3]),
      row_at(p.beta, chunk.batch, token, part.head), byte_offset(p.beta.dtype, p.beta.strides[3]));
}

__device__ __forceinline__ void decode_key(const DeltaRuleDeviceProblem& p, const ChunkOfPart& chunk,
                                           const RawRows& raw, Token& token) {
  with_type(p.k.dtype, [&](auto type) {
#pragma unroll
    for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) decode_vec4<type.value>(raw.k[vec4], token.k + vec4 * 4);
  });
  decode_scalars(p, chunk.gate, raw.scalars, token);
}

__device__ __forceinline__ void decode_query(const DeltaRuleDeviceProblem& p, const RawRows& raw, Token& token) {
  with_type(p.q.dtype, [&](auto type) {
#pragma unroll
    for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) decode_vec4<type.value>(raw.q[vec4], token.q + vec4 * 4);
  });
}

__device__ __forceinline__ void scale_by(float factor, float (&x)[kKeys]) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) x[i] *= factor;
}

__device__ __forceinline__ float decay_of_key(const DeltaRuleDeviceProblem& p, const Token& token, int i) {
  return p.gate == Gate::kPerChannel ? __shfl_sync(kAllLanes, token.decay, i, kColumnLanes) : token.decay;
}
__device__ __forceinline__ float beta_of_column(const DeltaRuleDeviceProblem& p, const Token& token, int j) {
  const int column = threadIdx.x % kColumnLanes * kColumns + j;
  return p.beta_per_value ? __shfl_sync(kAllLanes, token.beta, column) : token.beta;
}

__device__ __forceinline__ void multiply_by_decay(const DeltaRuleDeviceProblem& p, const Token& token, StateTile& S) {
  if (p.gate == Gate::kNone) return;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float decay = decay_of_key(p, token, i);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) S.s[i][j] *= decay;
  }
}

// The sums over the key lanes of the warp, of which each key lane keeps and sends one column.
template <int kPlaces>
__device__ __forceinline__ void send_column_sums(Shared<kPlaces>& s, unsigned turn, const float (&x)[kColumns]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool upper = lane & 16, odd = lane & 8;
  float pair[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    pair[j] = (upper ? x[2 + j] : x[j]) + __shfl_xor_sync(kAllLanes, upper ? x[j] : x[2 + j], 16);
  }
  const float own = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(kAllLanes, odd ? pair[0] : pair[1], 8);
  s.sums[turn % 2][warp][lane % kColumnLanes * kColumns + lane / kColumnLanes] = own;
}

template <int kPlaces>
__device__ __forceinline__ void receive_column_sums(const Shared<kPlaces>& s, unsigned turn, float (&sum)[kColumns]) {
#pragma unroll
  for (int warp = 0; warp < Shared<kPlaces>::kWarps; ++warp) {
    const float* part = s.sums[turn % 2][warp] + threadIdx.x % kColumnLanes * kColumns;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum[j] = warp == 0 ? part[j] : sum[j] + part[j];
  }
}

// Over the eight lanes with the same channels; lane i of them gets channel i.
__device__ __forceinline__ float sum_over_columns(const float (&x)[kKeys]) {
  const bool high = threadIdx.x & 4, middle = threadIdx.x & 2, low = threadIdx.x & 1;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    four[i] = (high ? x[4 + i] : x[i]) + __shfl_xor_sync(kAllLanes, high ? x[i] : x[4 + i], 4);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    two[i] = (middle ? four[2 + i] : four[i]) + __shfl_xor_sync(kAllLanes, middle ? four[i] : four[2 + i], 2);
  }
  return (low ? two[1] : two[0]) + __shfl_xor_sync(kAllLanes, low ? two[0] : two[1], 1);
}

// S + k^T u
__device__ __forceinline__ void write(const DeltaRuleDeviceProblem& p, const Token& token, const float (&r)[kColumns],
                                      StateTile& S) {
  float u[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) u[j] = beta_of_column(p, token, j) * r[j];
  update(token, u, S);
}

template <int kPlaces>
__device__ __forceinline__ void load_residuals(const Shared<kPlaces>& s, int t, float (&r)[kColumns]) {
  const float4 x = *reinterpret_cast<const float4*>(s.r[t] + threadIdx.x % kColumnLanes * kColumns);
  r[0] = x.x;
  r[1] = x.y;
  r[2] = x.z;
  r[3] = x.w;
}

template <int kPlaces>
__device__ __forceinline__ void send_squares(Shared<kPlaces>& s, unsigned turn, const Token& token) {
  float kk = 0, qq = 0;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    kk = fmaf(token.k[i], token.k[i], kk);
    qq = fmaf(token.q[i], token.q[i], qq);
  }
  kk = sum_over_key_lanes(kk);
  qq = sum_over_key_lanes(qq);
  if (threadIdx.x % kWarpSize == 0) {
    s.kk[turn % 2][threadIdx.x / kWarpSize] = kk;
    s.qq[turn % 2][threadIdx.x / kWarpSize] = qq;
  }
}

// The first walk over a chunk, from the state before it: the residuals and norms of all tokens. S is then the decayed
// state of the last token.
template <int kPlaces>
__device__ __forceinline__ void walk_forward(const BackwardArgs& args, const ChunkOfPart& chunk, int lowest,
                                             Shared<kPlaces>& s, unsigned& turn, StateTile& S) {
  const DeltaRuleDeviceProblem& p = args.problem;
  RawRows raw{};
  load_rows<kPlaces, true>(p, chunk, 0, p.v, raw);
#pragma unroll 1
  for (int t = 0; t < chunk.tokens; ++t, ++turn) {
    Token token;
    decode_key(p, chunk, raw, token);
    decode_query(p, raw, token);
    with_type(p.v.dtype, [&](auto type) { decode_vec4<type.value>(raw.values, token.v); });
    if (t + 1 < chunk.tokens) load_rows<kPlaces, true>(p, chunk, t + 1, p.v, raw);
    multiply_by_decay(p, token, S);
    float a[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) a[j] = fmaf(token.reader(i), S.s[i][j], a[j]);
    }
    send_column_sums(s, turn, a);
    if (p.qk_l2norm) send_squares(s, turn, token);
    __syncthreads();
    receive_column_sums(s, turn, a);
    const float rstd_k = p.qk_l2norm ? norm_factor(sum_over_warps(s.kk[turn % 2])) : 1.0f;
    const float rstd_q = p.qk_l2norm ? norm_factor(sum_over_warps(s.qq[turn % 2])) : 1.0f;
    float r[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) r[j] = fmaf(-rstd_k, a[j], token.v[j]);
    if (chunk.part.place == 0) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) s.r[t][threadIdx.x * kColumns + j] = r[j];
    }
    if (threadIdx.x == 0) {
      s.rstd_k[t] = rstd_k;
      s.rstd_q[t] = rstd_q;
    }
    if (t + 1 == chunk.tokens) continue;
    scale_by(rstd_k, token.k);
    write(p, token, r, S);
    if (is_kept(t + 1, chunk.tokens - 1, lowest)) keep(s, slot_of(t + 1, lowest), S);
  }
  __syncthreads();  // residuals and norms are there
}

// S, the state before token `from` of the chunk, becomes that before token `to`.
template <int kPlaces>
__device__ __forceinline__ void walk_again(const BackwardArgs& args, const ChunkOfPart& chunk, int from, int to,
                                           int lowest, Shared<kPlaces>& s, StateTile& S) {
  if (from == to) return;
  const DeltaRuleDeviceProblem& p = args.problem;
  const DeviceTensor none;
  RawRows raw{};
  load_rows<kPlaces, false>(p, chunk, from, none, raw);
#pragma unroll 1
  for (int t = from; t < to; ++t) {
    Token token;
    decode_key(p, chunk, raw, token);
    if (t + 1 < to) load_rows<kPlaces, false>(p, chunk, t + 1, none, raw);
    scale_by(s.rstd_k[t], token.k);
    multiply_by_decay(p, token, S);
    float r[kColumns];
    load_residuals(s, t, r);
    write(p, token, r, S);
    if (is_kept(t + 1, to, lowest)) keep(s, slot_of(t + 1, lowest), S);
  }
}

// A sum of the part's range, for one token.
__device__ __forceinline__ void add_to_part(float* part, int64_t at, bool first, float value) {
  if (part != nullptr) part[at] = first ? value : part[at] + value;
}

// dv and dbeta of token t, by one warp: all of them have the same.
__device__ __forceinline__ void store_value_gradients(const BackwardArgs& args, const ChunkOfPart& chunk, int t,
                                                      int64_t item, bool first, const float (&beta)[kColumns],
                                                      const float (&r)[kColumns], const float (&du)[kColumns]) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const Part& part = chunk.part;
  float dv[kColumns], dbeta[kColumns], sum = 0;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    dv[j] = beta[j] * du[j];
    dbeta[j] = beta_adjoint(p, beta[j], du[j] * r[j]);
    sum = fmaf(du[j], r[j], sum);
  }
  const auto row_of = [&](const DeviceTensor& x) {
    return const_cast<char*>(row_at(x, chunk.batch, chunk.begin + t, part.head));
  };
  if (args.dv.present()) store_columns(args.dv, part, p.head_dim_v, row_of(args.dv), dv);
  if (!args.dbeta.present()) return;
  if (p.beta_per_value) {
    store_columns(args.dbeta, part, p.head_dim_v, row_of(args.dbeta), dbeta);
  } else {
    sum = sum_over_lanes<kColumnLanes>(sum);
    if (threadIdx.x == 0) add_to_part(args.parts.dbeta, item, first, sum);
  }
}

// The gradients of token t from its decayed state. G becomes the gradient of the state before it.
template <int kPlaces>
__device__ __forceinline__ void token_gradients(const BackwardArgs& args, const ChunkOfPart& chunk, int t, bool first,
                                                const Token& token, Shared<kPlaces>& s, unsigned turn,
                                                const StateTile& Sd, StateTile& G) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const GradientParts& parts = args.parts;
  const Part& part = chunk.part;
  const int64_t row = chunk.batch * p.sequences.tokens + chunk.begin + t;
  const int64_t item = (chunk.range * parts.rows + row) * p.num_value_heads + part.head;
  const int key = own_key<kPlaces>(part), K = p.head_dim_k;
  float r[kColumns], u[kColumns], beta[kColumns], du[kColumns] = {}, sums[kKeys];
  load_residuals(s, t, r);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    beta[j] = beta_of_column(p, token, j);
    u[j] = beta[j] * r[j];
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    sums[i] = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      G.s[i][j] = fmaf(token.q[i], token.v[j], G.s[i][j]);
      du[j] = fmaf(token.writer(i), G.s[i][j], du[j]);
      sums[i] = fmaf(token.v[j], fmaf(token.writer(i), u[j], Sd.s[i][j]), sums[i]);
    }
  }
  send_column_sums(s, turn, du);
  const float dq = sum_over_columns(sums);
  if (key < K) add_to_part(parts.dq, item * K + key, first, dq);
  __syncthreads();
  receive_column_sums(s, turn, du);

  float dv[kColumns], gates[kKeys];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) dv[j] = beta[j] * du[j];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float decay = decay_of_key(p, token, i);
    sums[i] = gates[i] = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float& g = G.s[i][j];
      sums[i] = fmaf(u[j], g, fmaf(-dv[j], Sd.s[i][j], sums[i]));
      g = fmaf(-token.reader(i), dv[j], g);
      gates[i] = fmaf(Sd.s[i][j], g, gates[i]);
      g *= decay;
    }
  }
  const float dk = sum_over_columns(sums);
  if (key < K) add_to_part(parts.dk, item * K + key, first, dk);
  if (p.gate == Gate::kPerChannel) {
    const float dg = sum_over_columns(gates);
    if (key < K) add_to_part(parts.dg, item * K + key, first, dg);
  } else if (p.gate == Gate::kPerHead) {
    float sum = gates[0];
#pragma unroll
    for (int i = 1; i < kKeys; ++i) sum += gates[i];
    sum = sum_over_lanes<kWarpSize>(sum);
    if (threadIdx.x % kWarpSize == 0) s.dg[t][threadIdx.x / kWarpSize] = sum;
  }

  if (threadIdx.x < kWarpSize) store_value_gradients(args, chunk, t, item, first, beta, r, du);
}

// The tokens of a chunk from the last to the first; the state before the chunk is in slot 0.
template <int kPlaces>
__device__ __forceinline__ void run_chunk(const BackwardArgs& args, const ChunkOfPart& chunk, int lowest, bool first,
                                          Shared<kPlaces>& s, unsigned& turn, StateTile& G) {
  const DeltaRuleDeviceProblem& p = args.problem;
  StateTile S;
  restore(s, 0, S);
  walk_forward(args, chunk, lowest, s, turn, S);
  RawRows raw{};
  load_rows<kPlaces, true>(p, chunk, chunk.tokens - 1, args.d_o, raw);
#pragma unroll 1
  for (int t = chunk.tokens - 1; t >= 0; --t, ++turn) {
    Token token;
    decode_key(p, chunk, raw, token);
    decode_query(p, raw, token);
    with_type(args.d_o.dtype, [&](auto type) { decode_vec4<type.value>(raw.values, token.v); });
#pragma unroll
    for (int j = 0; j < kColumns; ++j) token.v[j] *= p.scale;
    scale_by(s.rstd_k[t], token.k);
    scale_by(s.rstd_q[t], token.q);
    if (t > 0) load_rows<kPlaces, true>(p, chunk, t - 1, args.d_o, raw);
    if (t + 1 < chunk.tokens) {
      const int from = kept_before(t, lowest);
      restore(s, slot_of(from, lowest), S);
      walk_again(args, chunk, from, t, lowest, s, S);
      multiply_by_decay(p, token, S);
    }
    token_gradients(args, chunk, t, first, token, s, turn, S, G);
  }
  if (p.gate != Gate::kPerHead) return;
  __syncthreads();  // the warps' shares of dg are there
  const int t = threadIdx.x;
  if (t >= chunk.tokens) return;
  const int64_t row = chunk.batch * p.sequences.tokens + chunk.begin + t;
  add_to_part(args.parts.dg, (chunk.range * args.parts.rows + row) * p.num_value_heads + chunk.part.head, first,
              sum_over_warps(s.dg[t]));
}

// All chunks of one sequence for the block's columns, from the last to the first.
template <int kPlaces>
__device__ __forceinline__ void run_part(const BackwardArgs& args, const Part& part, int lowest, bool first,
                                         Shared<kPlaces>& s, unsigned& turn) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int K = p.head_dim_k, V = p.head_dim_v;
  const SequenceSpan span = sequence_at(p.sequences, part.sequence);
  const int64_t size = args.chunked.chunk_size;
  StateTile G{};
  if (args.d_final_state.present()) {
    const int64_t* strides = args.d_final_state.outer_strides;
    load_slot(args.d_final_state, part.sequence * strides[0] + part.head * strides[1], part, K, V, s);
    restore(s, 0, G);
  }
  ChunkOfPart chunk;
  chunk.part = part;
  chunk.batch = span.batch;
  chunk.range = blockIdx.x;
  chunk.gate = decode_gate_parameters(p, load_gate_parameters<kPlaces>(p, part));
#pragma unroll 1
  for (int64_t c = chunks_of(span.length, size) - 1; c >= 0; --c) {
    chunk.begin = span.begin + c * size;
    chunk.tokens = static_cast<int>(min(span.length - c * size, size));
    const StateAddress place = chunk_state_address(args, part, span.batch, c);
    load_slot(place.states, place.offset, part, place.exists ? K : 0, V, s);
    run_chunk(args, chunk, lowest, first, s, turn, G);
  }
  if (args.d_initial_state.present()) {
    const int64_t* strides = args.d_initial_state.outer_strides;
    keep(s, 0, G);
    store_slot(args.d_initial_state, part.sequence * strides[0] + part.head * strides[1], part, K, V, s);
  }
}

// Blocks (range of columns, head, sequence). A grid with fewer heads or sequences than there are goes round.
template <int kPlaces>
__global__ void __launch_bounds__(kThreads<kPlaces>, kPlaces == 32 ? 1 : 2)
    recurrent_bwd_kernel(const __grid_constant__ BackwardArgs args, int first_range, int lowest) {
  auto& s = dynamic_shared<Shared<kPlaces>>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int range = first_range + static_cast<int>(blockIdx.x);
  const bool first = first_range == 0;  // later launches add to what they find
  Part part;
  part.column = range * kColumnsOfBlock + lane % kColumnLanes * kColumns;
  part.place = kKeyLanes * warp + lane / kColumnLanes;
  unsigned turn = 0;
  for (part.sequence = blockIdx.z; part.sequence < args.problem.sequences.count; part.sequence += gridDim.z) {
    for (part.head = blockIdx.y; part.head < args.problem.num_value_heads; part.head += gridDim.y) {
      run_part<kPlaces>(args, part, lowest, first, s, turn);
    }
  }
}

// The lowest bit that has a slot: as many slots as fit, up to 128 channels with two blocks on a multiprocessor.
template <int kPlaces>
int lowest_kept(int64_t chunk_size, int device, size_t& bytes) {
  constexpr size_t kSlot = sizeof(typename Shared<kPlaces>::Slot);
  constexpr size_t kReserved = 1024;  // of a block, for the system
  const auto of_block = static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const size_t most = kPlaces == 32 ? of_block : (of_block - kReserved) / 2;
  int lowest = kMostBits;
  while ((int64_t{1} << (lowest - 1)) >= chunk_size) --lowest;  // bits that no position has
  const int bits = lowest;
  while (lowest > 1 && sizeof(Shared<kPlaces>) + static_cast<size_t>(bits - lowest + 1) * kSlot <= most) --lowest;
  bytes = sizeof(Shared<kPlaces>) + static_cast<size_t>(bits - lowest) * kSlot;
  return lowest;
}

}  // namespace

void launch_walk(const BackwardArgs& args, int first_range, int ranges, const Context& context) {
  constexpr int64_t kMostBlocks = 65535;  // along y and z
  const DeltaRuleDeviceProblem& p = args.problem;
  with_places(p.head_dim_k, [&]<int kPlaces>() {
    size_t bytes = 0;
    const int lowest = lowest_kept<kPlaces>(args.chunked.chunk_size, context.device.index, bytes);
    const LaunchShape shape{
        dim3(static_cast<unsigned>(ranges), static_cast<unsigned>(std::min<int64_t>(p.num_value_heads, kMostBlocks)),
             static_cast<unsigned>(std::min(p.sequences.count, kMostBlocks))),
        kThreads<kPlaces>, bytes};
    launch<recurrent_bwd_kernel<kPlaces>>("delta_rule recurrent backward", context, shape, args, first_range, lowest);
  });
}

}  // namespace fastweight::cuda::recurrent
