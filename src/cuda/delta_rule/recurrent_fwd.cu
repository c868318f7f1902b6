// Forward and decoding token by token, in fp32. With r = v - k Sd the state before the update gives both products:
//
//     Sd = diag(exp(g)) S        a = k Sd,   b = q Sd                   (one read of the state)
//     u  = beta (v - a)          S = Sd + k^T u                         (one write)
//     o  = scale (b + (q k^T) u)                                       = scale q S
//
// q and k are used as they lie in memory; their l2 norms enter as factors of the sums.
//
// A block owns all K key channels of 32 value columns of one head of one sequence, from its first to its last token,
// and shares nothing with other blocks: its bits do not depend on them. Its warps divide the channels. Lane (key_lane,
// column_lane) holds 8 key channels, as two quads, of 4 columns; with the place x = 4 * warp + key_lane of kPlaces,
//
//     key channel (i / 4) * 4 * kPlaces + 4 x + i % 4,  i = 0 .. 7
//     column      first + 4 * column_lane + j,          j = 0 .. 3
//
// so that a warp reads a K-first state in rows of 128 bytes, a V-first one in pieces of 64, 16 bytes per lane. Sums
// over key channels are 8 terms in a lane in order of i, then over the key lanes of a warp, then over the warps in
// order. kPlaces is 8, 16 or 32 for K up to 64, 128 or 256: it depends on K alone.
//
// One barrier per token, at which the warps exchange their sums. The rows of the next token are loaded while the
// current one is computed.
#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/device_problem.h"
#include "cuda/delta_rule/implementations.h"
#include "cuda/delta_rule/token.cuh"
#include "ops/workspace.h"

namespace fastweight::cuda {
namespace {

constexpr int kKeys = 8;     // per lane
constexpr int kColumns = 4;  // per lane
constexpr int kColumnLanes = 8, kKeyLanes = kWarpSize / kColumnLanes;
constexpr int kColumnsOfBlock = kColumns * kColumnLanes;

struct RecurrentArgs {
  DeltaRuleDeviceProblem problem;
  DeviceTensor o;              // [B, T, HV, V]
  DeviceStates initial_state;  // [N, HV] matrices; absent: 0
  DeviceStates final_state;    // [N, HV] matrices; absent: not wanted. A step: the same as initial_state
  bool in_place = false;       // a step: a sequence without tokens leaves its state alone

  DeviceTensor state_indices;  // [N], the slot of each sequence; absent: its number
  int64_t slots = 0;

  DeviceStates chunk_states;  // [B, NT, HV] matrices; absent: not wanted
  int64_t num_chunks = 0;     // NT
  ChunkedSequences chunked;
};

// Which part of the problem a block has. `column` is the lane's first.
struct Part {
  int64_t sequence;
  int head;
  int column;
  int place;
};

// The lane's quads of key channels begin here.
template <int kPlaces>
__device__ __forceinline__ int key_of(const Part& part, int quad) {
  return quad * 4 * kPlaces + 4 * part.place;
}

// The lane's share of S.
struct StateTile {
  float s[kKeys][kColumns];
};

// States whose quads lie together along K (kAlongK) or along V.
template <int kPlaces, DType kType, bool kAlongK>
__device__ __forceinline__ void load_state_quads(const DeviceStates& states, int64_t offset, const Part& part, int K,
                                                 int V, StateTile& S) {
  RawQuad raw[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + (kAlongK ? 0 : i % 4);
    const int column = part.column + (kAlongK ? i % 4 : 0);
    raw[i] = {};
    if (key < K && column < V) {
      raw[i] =
          load_quad<kType>(element_at(states.data, kType, offset + key * states.k_stride + column * states.v_stride));
    }
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    float values[4];
    decode_quad<kType>(raw[i], values);
#pragma unroll
    for (int j = 0; j < 4; ++j) (kAlongK ? S.s[i / 4 * 4 + j][i % 4] : S.s[i][j]) = values[j];
  }
}

template <int kPlaces, DType kType, bool kAlongK>
__device__ __forceinline__ void store_state_quads(const DeviceStates& states, int64_t offset, const Part& part, int K,
                                                  int V, const StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + (kAlongK ? 0 : i % 4);
    const int column = part.column + (kAlongK ? i % 4 : 0);
    float values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = kAlongK ? S.s[i / 4 * 4 + j][i % 4] : S.s[i][j];
    if (key < K && column < V) {
      store_quad<kType>(element_at(states.data, kType, offset + key * states.k_stride + column * states.v_stride),
                        values);
    }
  }
}

// quads(type, along_k) for fp32 and bf16 states with quads, each() for all others.
template <class Quads, class Each>
__device__ __forceinline__ void with_layout(const DeviceStates& states, const Quads& quads, const Each& each) {
  if ((!states.k_quads && !states.v_quads) || states.dtype == DType::kF16) {
    each();
  } else if (states.dtype == DType::kF32) {
    constexpr std::integral_constant<DType, DType::kF32> kType;
    states.k_quads ? quads(kType, std::true_type()) : quads(kType, std::false_type());
  } else {
    constexpr std::integral_constant<DType, DType::kBF16> kType;
    states.k_quads ? quads(kType, std::true_type()) : quads(kType, std::false_type());
  }
}

template <int kPlaces>
__device__ __forceinline__ void load_state(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                           StateTile& S) {
  const auto quads = [&](auto type, auto along_k) {
    load_state_quads<kPlaces, type.value, along_k.value>(states, offset, part, K, V, S);
  };
  with_layout(states, quads, [&] {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of<kPlaces>(part, i / 4) + i % 4;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = part.column + j;
        const bool inside = key < K && column < V;
        const int64_t element = offset + key * states.k_stride + column * states.v_stride;
        S.s[i][j] = inside ? load_float(states.data, states.dtype, element) : 0.0f;
      }
    }
  });
}

template <int kPlaces>
__device__ __forceinline__ void store_state(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                            const StateTile& S) {
  const auto quads = [&](auto type, auto along_k) {
    store_state_quads<kPlaces, type.value, along_k.value>(states, offset, part, K, V, S);
  };
  with_layout(states, quads, [&] {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of<kPlaces>(part, i / 4) + i % 4;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = part.column + j;
        const int64_t element = offset + key * states.k_stride + column * states.v_stride;
        if (key < K && column < V) store_float(states.data, states.dtype, element, S.s[i][j]);
      }
    }
  });
}

// The rows of one token of one head. Absent tensors are null.
struct Rows {
  const char *q, *k, *v, *g, *beta;
  char* o;
};

__device__ __forceinline__ const char* row_at(const DeviceTensor& x, int64_t batch, int64_t token, int head) {
  return x.present() ? element_at(x.data, x.dtype, row_offset(x, batch, token, head)) : nullptr;
}

__device__ __forceinline__ Rows rows_at(const RecurrentArgs& args, const Part& part, const SequenceSpan& span) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int qk_head = part.head / p.group;
  Rows rows;
  rows.q = row_at(p.q, span.batch, span.begin, qk_head);
  rows.k = row_at(p.k, span.batch, span.begin, qk_head);
  rows.v = row_at(p.v, span.batch, span.begin, part.head);
  rows.g = row_at(p.g, span.batch, span.begin, part.head);
  rows.beta = row_at(p.beta, span.batch, span.begin, part.head);
  rows.o = const_cast<char*>(row_at(args.o, span.batch, span.begin, part.head));
  return rows;
}

__device__ __forceinline__ void next_inputs(const DeltaRuleDeviceProblem& p, Rows& rows) {
  rows.q += byte_offset(p.q.dtype, p.q.strides[1]);
  rows.k += byte_offset(p.k.dtype, p.k.strides[1]);
  rows.v += byte_offset(p.v.dtype, p.v.strides[1]);
  rows.g += byte_offset(p.g.dtype, p.g.strides[1]);
  rows.beta += byte_offset(p.beta.dtype, p.beta.strides[1]);
}

// A token's rows as they lie in memory: the lane's key channels of q, k and g, its columns of v and beta. A gate per
// head and a beta per head are the first word.
struct RawToken {
  RawQuad q[kKeys / 4], k[kKeys / 4], g[kKeys / 4];
  RawQuad v, beta;
};

template <int kPlaces>
__device__ __forceinline__ void load_token(const DeltaRuleDeviceProblem& p, const Part& part, const Rows& rows,
                                           RawToken& raw) {
  const int K = p.head_dim_k, V = p.head_dim_v;
  if (p.qkv_quads) {
    with_type(p.q.dtype, [&](auto type) {
#pragma unroll
      for (int quad = 0; quad < kKeys / 4; ++quad) {
        const int key = key_of<kPlaces>(part, quad);
        raw.q[quad] = raw.k[quad] = {};
        if (key < K) {
          raw.k[quad] = load_quad<type.value>(rows.k + byte_offset(type.value, key));
          raw.q[quad] = load_quad<type.value>(rows.q + byte_offset(type.value, key));
        }
      }
      raw.v = {};
      if (part.column < V) raw.v = load_quad<type.value>(rows.v + byte_offset(type.value, part.column));
    });
  } else {
#pragma unroll
    for (int quad = 0; quad < kKeys / 4; ++quad) {
      const int key = key_of<kPlaces>(part, quad);
      raw.k[quad] = load_part(p.k, rows.k, key, K);
      raw.q[quad] = load_part(p.q, rows.q, key, K);
    }
    raw.v = load_part(p.v, rows.v, part.column, V);
  }
  if (p.beta_per_value) {
    raw.beta = load_part(p.beta, rows.beta, part.column, V);
  } else if (p.beta.present()) {
    raw.beta.words[0] = load_bits(rows.beta, p.beta.dtype);
  }
  if (p.gate == Gate::kPerHead) {
    raw.g[0].words[0] = load_bits(rows.g, p.g.dtype);
  } else if (p.gate == Gate::kPerChannel) {
#pragma unroll
    for (int quad = 0; quad < kKeys / 4; ++quad) raw.g[quad] = load_part(p.g, rows.g, key_of<kPlaces>(part, quad), K);
  }
}

// The parameters of the gate, read once per sequence.
struct GateParameters {
  float rate;
  float bias[kKeys];  // a gate per head uses the first
};

template <int kPlaces>
__device__ __forceinline__ GateParameters load_gate_parameters(const DeltaRuleDeviceProblem& p, const Part& part) {
  GateParameters parameters{1.0f, {}};
  if (!p.gate_in_kernel) return parameters;
  parameters.rate = gate_rate(p, part.head);
  if (p.gate == Gate::kPerHead) {
    parameters.bias[0] = gate_bias(p, part.head, 0);
    return parameters;
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + i % 4;
    if (key < p.head_dim_k) parameters.bias[i] = gate_bias(p, part.head, key);
  }
  return parameters;
}

// What a token does to the lane's share of the state.
struct Token {
  float q[kKeys], k[kKeys], decay[kKeys];
  float v[kColumns], beta[kColumns];
};

__device__ __forceinline__ void decode_decay(const DeltaRuleDeviceProblem& p, const GateParameters& parameters,
                                             const RawQuad (&raw)[kKeys / 4], float (&decay)[kKeys]) {
  if (p.gate == Gate::kPerChannel) {
    with_type(p.g.dtype, [&](auto type) {
#pragma unroll
      for (int quad = 0; quad < kKeys / 4; ++quad) decode_quad<type.value>(raw[quad], decay + quad * 4);
    });
#pragma unroll
    for (int i = 0; i < kKeys; ++i) decay[i] = expf(log_decay(p, decay[i], parameters.rate, parameters.bias[i]));
    return;
  }
  float w = 1.0f;
  if (p.gate == Gate::kPerHead) {
    w = expf(log_decay(p, decode(raw[0].words[0], p.g.dtype), parameters.rate, parameters.bias[0]));
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) decay[i] = w;
}

__device__ __forceinline__ void decode_beta(const DeltaRuleDeviceProblem& p, const RawQuad& raw,
                                            float (&beta)[kColumns]) {
  if (p.beta_per_value) {
    with_type(p.beta.dtype, [&](auto type) { decode_quad<type.value>(raw, beta); });
#pragma unroll
    for (int j = 0; j < kColumns; ++j) beta[j] = beta_of(p, beta[j]);
    return;
  }
  const float x = p.beta.present() ? beta_of(p, decode(raw.words[0], p.beta.dtype)) : 1.0f;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) beta[j] = x;
}

__device__ __forceinline__ void decode_token(const DeltaRuleDeviceProblem& p, const GateParameters& parameters,
                                             const RawToken& raw, Token& token) {
  with_type(p.q.dtype, [&](auto type) {
#pragma unroll
    for (int quad = 0; quad < kKeys / 4; ++quad) {
      decode_quad<type.value>(raw.k[quad], token.k + quad * 4);
      decode_quad<type.value>(raw.q[quad], token.q + quad * 4);
    }
    decode_quad<type.value>(raw.v, token.v);
  });
  decode_beta(p, raw.beta, token.beta);
  decode_decay(p, parameters, raw.g, token.decay);
}

// What the warps exchange at the barrier of a token. Two of them in turn: nobody is further ahead than one barrier.
template <int kPlaces>
struct Exchange {
  static constexpr int kWarps = kPlaces / kKeyLanes;

  float4 a[kWarps][kColumnLanes], b[kWarps][kColumnLanes];  // of four columns
  float qk[kWarps], qq[kWarps], kk[kWarps];
};

__device__ __forceinline__ float sum_over_key_lanes(float x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance >= kColumnLanes; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

template <int kWarps>
__device__ __forceinline__ float sum_over_warps(const float (&x)[kWarps]) {
  float sum = x[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += x[warp];
  return sum;
}

template <int kWarps>
__device__ __forceinline__ void sum_over_warps(const float4 (&x)[kWarps][kColumnLanes], int column_lane,
                                               float (&sum)[kColumns]) {
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float4 part = x[warp][column_lane];
    sum[0] = warp == 0 ? part.x : sum[0] + part.x;
    sum[1] = warp == 0 ? part.y : sum[1] + part.y;
    sum[2] = warp == 0 ? part.z : sum[2] + part.z;
    sum[3] = warp == 0 ? part.w : sum[3] + part.w;
  }
}

// S becomes the state after the token, `o` the lane's columns of the output.
template <int kPlaces>
__device__ __forceinline__ void advance(const DeltaRuleDeviceProblem& p, const Token& token,
                                        Exchange<kPlaces>& exchange, StateTile& S, float (&o)[kColumns]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, column_lane = lane % kColumnLanes;
  float a[kColumns] = {}, b[kColumns] = {}, qk = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      S.s[i][j] *= token.decay[i];
      a[j] = fmaf(token.k[i], S.s[i][j], a[j]);
      b[j] = fmaf(token.q[i], S.s[i][j], b[j]);
    }
    qk = fmaf(token.q[i], token.k[i], qk);
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    a[j] = sum_over_key_lanes(a[j]);
    b[j] = sum_over_key_lanes(b[j]);
  }
  qk = sum_over_key_lanes(qk);
  if (lane < kColumnLanes) {
    exchange.a[warp][lane] = make_float4(a[0], a[1], a[2], a[3]);
    exchange.b[warp][lane] = make_float4(b[0], b[1], b[2], b[3]);
  }
  if (lane == 0) exchange.qk[warp] = qk;
  if (p.qk_l2norm) {
    float qq = 0.0f, kk = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      qq = fmaf(token.q[i], token.q[i], qq);
      kk = fmaf(token.k[i], token.k[i], kk);
    }
    qq = sum_over_key_lanes(qq);
    kk = sum_over_key_lanes(kk);
    if (lane == 0) {
      exchange.qq[warp] = qq;
      exchange.kk[warp] = kk;
    }
  }
  __syncthreads();
  sum_over_warps(exchange.a, column_lane, a);
  sum_over_warps(exchange.b, column_lane, b);
  qk = sum_over_warps(exchange.qk);
  float q_norm = 1.0f, k_norm = 1.0f;
  if (p.qk_l2norm) {
    q_norm = 1.0f / sqrtf(sum_over_warps(exchange.qq) + kL2NormEps);
    k_norm = 1.0f / sqrtf(sum_over_warps(exchange.kk) + kL2NormEps);
  }

  float u[kColumns];
  const float o_factor = p.scale * q_norm;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    u[j] = k_norm * (token.beta[j] * (token.v[j] - k_norm * a[j]));  // with the factor that k^T lacks
    o[j] = o_factor * fmaf(qk, u[j], b[j]);
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) S.s[i][j] = fmaf(token.k[i], u[j], S.s[i][j]);
  }
}

__device__ __forceinline__ void store_output(const RecurrentArgs& args, const Part& part, char* row,
                                             const float (&o)[kColumns]) {
  const int V = args.problem.head_dim_v;
  if (part.place != 0 || part.column >= V) return;
  if (args.o.quads) {
    with_type(args.o.dtype, [&](auto type) { store_quad<type.value>(row + byte_offset(type.value, part.column), o); });
  } else {
    const int64_t stride = args.o.strides[3];
    scatter_quad(row, args.o.dtype, part.column * stride, stride, V - part.column, o);
  }
}

// Slots outside the tensor are skipped like -1: the host cannot refuse them.
__device__ __forceinline__ int64_t slot_of(const RecurrentArgs& args, int64_t sequence) {
  if (!args.state_indices.present()) return sequence;
  const int64_t slot =
      load_integer(args.state_indices.data, args.state_indices.dtype, sequence * args.state_indices.strides[0]);
  return slot < args.slots ? slot : -1;
}

// Where a state is written to, if anywhere. By value: a pointer to one of two kernel arguments would turn their fields
// into loads from memory.
struct StatePlace {
  DeviceStates states;
  int64_t offset;
  bool exists;
};

__device__ __forceinline__ StatePlace final_place(const RecurrentArgs& args, const Part& part, int64_t slot) {
  const DeviceStates& states = args.final_state;
  return {states, slot * states.outer_strides[0] + part.head * states.outer_strides[1], states.present()};
}

// The state before token t of the sequence.
__device__ __forceinline__ StatePlace chunk_place(const RecurrentArgs& args, const Part& part, int64_t batch,
                                                  int64_t t) {
  const DeviceStates& states = args.chunk_states;
  const int64_t chunk = first_chunk_of(args.chunked, part.sequence) + t / args.chunked.chunk_size;
  const int64_t* strides = states.outer_strides;
  return {states, batch * strides[0] + chunk * strides[1] + part.head * strides[2], chunk < args.num_chunks};
}

// All tokens of one sequence for the block's columns. The state is written in one place of the code, which its compile
// time asks for. With one token per sequence, which the host can see (kOne), nothing is read ahead. `turn` counts
// tokens.
template <int kPlaces, bool kOne>
__device__ __forceinline__ void run_part(const RecurrentArgs& args, const Part& part, Exchange<kPlaces> (&exchange)[2],
                                         int& turn) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int K = p.head_dim_k, V = p.head_dim_v;
  const SequenceSpan span = kOne ? SequenceSpan{part.sequence, 0, 1} : sequence_at(p.sequences, part.sequence);
  const int64_t slot = slot_of(args, part.sequence);
  Rows rows = rows_at(args, part, span);
  const int64_t o_step = byte_offset(args.o.dtype, args.o.strides[1]);
  if (slot < 0) {
    const float zeros[kColumns] = {};
    for (int64_t t = 0; t < span.length; ++t, rows.o += o_step) store_output(args, part, rows.o, zeros);
    return;
  }
  if (args.in_place && span.length == 0) return;

  RawToken raw{};
  if (span.length > 0) load_token<kPlaces>(p, part, rows, raw);
  StateTile S{};
  if (args.initial_state.present()) {
    const int64_t* strides = args.initial_state.outer_strides;
    load_state<kPlaces>(args.initial_state, slot * strides[0] + part.head * strides[1], part, K, V, S);
  }
  const GateParameters parameters = load_gate_parameters<kPlaces>(p, part);

  for (int64_t t = 0;; ++t, rows.o += o_step) {
    const bool last = t == span.length;
    if (last || (!kOne && args.chunk_states.present() && t % args.chunked.chunk_size == 0)) {
      const StatePlace place = last ? final_place(args, part, slot) : chunk_place(args, part, span.batch, t);
      if (place.exists) store_state<kPlaces>(place.states, place.offset, part, K, V, S);
    }
    if (last) return;
    Token token;
    decode_token(p, parameters, raw, token);
    if (!kOne && t + 1 < span.length) {
      next_inputs(p, rows);
      load_token<kPlaces>(p, part, rows, raw);
    }
    float o[kColumns];
    advance<kPlaces>(p, token, exchange[turn++ % 2], S, o);
    store_output(args, part, rows.o, o);
  }
}

template <int kPlaces>
inline constexpr int kThreads = kPlaces* kColumnLanes;

// What is known of one token needs 128 registers, for 16 warps on a multiprocessor; reading ahead needs more.
template <int kPlaces, bool kOne>
inline constexpr int kBlocks = kOne || kPlaces == 32 ? 512 / kThreads<kPlaces> : 384 / kThreads<kPlaces>;

// Blocks (columns, head, sequence): neighbours in time read neighbours in memory. A grid with fewer heads or sequences
// than there are goes round.
template <int kPlaces, bool kOne>
__global__ void __launch_bounds__(kThreads<kPlaces>, kBlocks<kPlaces, kOne>)
    recurrent_kernel(const __grid_constant__ RecurrentArgs args) {
  __shared__ Exchange<kPlaces> exchange[2];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Part part;
  part.column = blockIdx.x * kColumnsOfBlock + lane % kColumnLanes * kColumns;
  part.place = kKeyLanes * warp + lane / kColumnLanes;
  int turn = 0;
  for (part.sequence = blockIdx.z; part.sequence < args.problem.sequences.count; part.sequence += gridDim.z) {
    for (part.head = blockIdx.y; part.head < args.problem.num_value_heads; part.head += gridDim.y) {
      run_part<kPlaces, kOne>(args, part, exchange, turn);
    }
  }
}

template <int kPlaces>
void launch_recurrent(const RecurrentArgs& args, const Context& context) {
  constexpr int64_t kMostBlocks = 65535;  // along y and z
  const DeltaRuleDeviceProblem& p = args.problem;
  const LaunchShape shape{dim3(static_cast<unsigned>((p.head_dim_v + kColumnsOfBlock - 1) / kColumnsOfBlock),
                               static_cast<unsigned>(std::min<int64_t>(p.num_value_heads, kMostBlocks)),
                               static_cast<unsigned>(std::min(p.sequences.count, kMostBlocks))),
                          kThreads<kPlaces>};
  if (p.sequences.offsets == nullptr && p.sequences.tokens == 1 && !args.chunk_states.present()) {
    launch<recurrent_kernel<kPlaces, true>>("delta_rule recurrent", context, shape, args);
  } else {
    launch<recurrent_kernel<kPlaces, false>>("delta_rule recurrent", context, shape, args);
  }
}

void run(const RecurrentArgs& args, const Context& context) {
  const int K = args.problem.head_dim_k;
  if (K <= 64) {
    launch_recurrent<8>(args, context);
  } else if (K <= 128) {
    launch_recurrent<16>(args, context);
  } else {
    launch_recurrent<32>(args, context);
  }
}

}  // namespace

void recurrent_forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleForward& forward = problem.args;
  const bool v_first = forward.options.state_v_first;
  RecurrentArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(forward.o);
  args.initial_state = device_states(forward.in.initial_state, v_first);
  args.final_state = device_states(forward.final_state, v_first);
  args.chunk_states = device_states(forward.chunk_states, v_first);
  args.num_chunks = problem.sizes.num_chunks;
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = forward.options.chunk_size;

  const bool needs_first_chunks = args.chunk_states.present() && forward.in.cu_seqlens.present();
  const auto layout = [&](Carver& carver) {
    return carver.take<int64_t>(needs_first_chunks ? problem.sizes.num_sequences + 1 : 0);
  };
  Carver measure;
  layout(measure);
  const DeviceWorkspace workspace(context, measure.bytes());
  if (needs_first_chunks) {
    Carver carver(workspace.data());
    int64_t* first_chunk = layout(carver);
    build_first_chunks(args.problem.sequences, forward.options.chunk_size, first_chunk, context);
    args.chunked.first_chunk = first_chunk;
  }
  run(args, context);
}

void recurrent_step(const DeltaRuleStepProblem& problem, const Context& context) {
  const DeltaRuleStep& step = problem.args;
  RecurrentArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(step.o);
  args.initial_state = args.final_state = device_states(step.state, step.options.state_v_first);
  args.in_place = true;
  args.state_indices = device_tensor(step.state_indices);
  args.slots = step.state.shape[0];
  run(args, context);
}

}  // namespace fastweight::cuda
