// What the token-by-token kernels share: who holds what, and what a token does to the state. In fp32; with
// r = v - k Sd the state before the update gives both products:
//
//     Sd = diag(exp(g)) S        a = k Sd,   b = q Sd                   (one read of the state)
//     u  = beta (v - a)          S = Sd + k^T u                         (one write)
//     o  = scale (b + (q k^T) u)                                       = scale q S
//
// q and k are used as they lie in memory; their l2 norms enter as factors of the sums.
//
// A block owns all K key channels of 32 value columns of one head of one sequence, and shares nothing with other
// blocks: its bits do not depend on them. Its warps divide the channels. Lane (key_lane, column_lane) holds 8 key
// channels, as two vec4s, of 4 columns; with the place x = 4 * warp + key_lane of kPlaces,
//
//     key channel (i / 4) * 4 * kPlaces + 4 x + i % 4,  i = 0 .. 7
//     column      first + 4 * column_lane + j,          j = 0 .. 3
//
// so that a warp reads a K-first state in rows of 128 bytes, a V-first one in pieces of 64, 16 bytes per lane. Sums
// over key channels are 8 terms in a lane in order of i, then over the key lanes of a warp, then over the warps in
// order. kPlaces is 8, 16 or 32 for K up to 64, 128 or 256: it depends on K alone.
//
// What is one number per key channel or per column and costs more than a load, the decay and beta, is computed by one
// lane and shuffled: channel i = column_lane of the lane's own eight, column `lane` of the block's 32.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/sequences.h"
#include "cuda/common/warp.cuh"
#include "cuda/delta_rule/device_problem.h"
#include "cuda/delta_rule/token.cuh"
#include "fastweight/context.h"

namespace fastweight::cuda::recurrent {

inline constexpr int kKeys = 8;     // per lane
inline constexpr int kColumns = 4;  // per lane
inline constexpr int kColumnLanes = 8, kKeyLanes = kWarpSize / kColumnLanes;
inline constexpr int kColumnsOfBlock = kColumns * kColumnLanes;

template <int kPlaces>
inline constexpr int kThreads = kPlaces* kColumnLanes;

// body.template operator()<kPlaces>() for K.
template <class Body>
void with_places(int K, const Body& body) {
  if (K <= 64) {
    body.template operator()<8>();
  } else if (K <= 128) {
    body.template operator()<16>();
  } else {
    body.template operator()<32>();
  }
}

// Which part of the problem a lane has. `column` is its first.
struct Part {
  int64_t sequence;
  int head;
  int column;
  int place;
};

__device__ __forceinline__ Part part_of_thread() {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Part part;
  part.column = blockIdx.x * kColumnsOfBlock + lane % kColumnLanes * kColumns;
  part.place = kKeyLanes * warp + lane / kColumnLanes;
  return part;
}

// The lane's vec4s of key channels begin here.
template <int kPlaces>
__device__ __forceinline__ int key_of(const Part& part, int vec4) {
  return vec4 * 4 * kPlaces + 4 * part.place;
}

// The key channel whose decay the lane computes, and the column whose beta.
template <int kPlaces>
__device__ __forceinline__ int own_key(const Part& part) {
  const int i = threadIdx.x % kColumnLanes;
  return key_of<kPlaces>(part, i / 4) + i % 4;
}
__device__ __forceinline__ int own_column(const Part& part) {
  const int lane = threadIdx.x % kWarpSize;
  return part.column - lane % kColumnLanes * kColumns + lane;
}

// The lane's share of S.
struct StateTile {
  float s[kKeys][kColumns];
};

// A lane moves its state in vec4s that lie together along K (kAlongK) or along V: vec4 i holds four channels of column
// i % 4, or the four columns of channel i.
template <bool kAlongK>
__device__ __forceinline__ void vec4_of(const StateTile& S, int i, float (&values)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j] = kAlongK ? S.s[i / 4 * 4 + j][i % 4] : S.s[i][j];
}

template <DType kType, bool kAlongK>
__device__ __forceinline__ void decode_state(const RawVec4 (&raw)[kKeys], StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    float values[4];
    decode_vec4<kType>(raw[i], values);
#pragma unroll
    for (int j = 0; j < 4; ++j) (kAlongK ? S.s[i / 4 * 4 + j][i % 4] : S.s[i][j]) = values[j];
  }
}

// What the lane's decay and beta are made of, as it lies in memory. Zeros where there is nothing.
struct RawScalars {
  uint32_t g, beta;
};

// From the rows of g and beta of the token and head; the strides, in bytes, of g along K and of beta along V.
template <int kPlaces>
__device__ __forceinline__ RawScalars load_scalars(const DeltaRuleDeviceProblem& p, const Part& part, const char* g,
                                                   int64_t g_stride, const char* beta, int64_t beta_stride) {
  RawScalars raw{};
  if (p.gate == Gate::kPerHead) {
    raw.g = load_bits(g, p.g.dtype);
  } else if (p.gate == Gate::kPerChannel) {
    const int key = own_key<kPlaces>(part);
    if (key < p.head_dim_k) raw.g = load_bits(g + key * g_stride, p.g.dtype);
  }
  if (p.beta_per_value) {
    const int column = own_column(part);
    if (column < p.head_dim_v) raw.beta = load_bits(beta + column * beta_stride, p.beta.dtype);
  } else if (p.beta.present()) {
    raw.beta = load_bits(beta, p.beta.dtype);
  }
  return raw;
}

// The parameters of the gate: of the sequence's head and the lane's own channel.
struct RawGateParameters {
  uint32_t a_log, dt_bias;
};

template <int kPlaces>
__device__ __forceinline__ RawGateParameters load_gate_parameters(const DeltaRuleDeviceProblem& p, const Part& part) {
  RawGateParameters raw{};
  if (!p.gate_in_kernel) return raw;
  if (p.a_log.present()) {
    raw.a_log = load_bits(element_at(p.a_log.data, p.a_log.dtype, part.head * p.a_log.strides[0]), p.a_log.dtype);
  }
  const DeviceTensor& bias = p.dt_bias;
  const int key = p.gate == Gate::kPerChannel ? own_key<kPlaces>(part) : 0;
  if (bias.present() && key < p.head_dim_k) {
    const int64_t offset = part.head * bias.strides[0] + key * bias.strides[1];
    raw.dt_bias = load_bits(element_at(bias.data, bias.dtype, offset), bias.dtype);
  }
  return raw;
}

struct GateParameters {
  float rate, bias;
};

__device__ __forceinline__ GateParameters decode_gate_parameters(const DeltaRuleDeviceProblem& p,
                                                                 const RawGateParameters& raw) {
  if (!p.gate_in_kernel) return {1.0f, 0.0f};
  return {expf(decode(raw.a_log, p.a_log.dtype)), decode(raw.dt_bias, p.dt_bias.dtype)};
}

// What a token does to the lane's share of the state. `decay` and `beta` are the lane's own.
struct Token {
  float q[kKeys], k[kKeys], v[kColumns];
  float decay, beta;

  // One row serves both roles of the key.
  __device__ __forceinline__ float reader(int i) const { return k[i]; }
  __device__ __forceinline__ float writer(int i) const { return k[i]; }
};

__device__ __forceinline__ void decode_scalars(const DeltaRuleDeviceProblem& p, const GateParameters& parameters,
                                               const RawScalars& raw, Token& token) {
  token.decay = 1.0f;
  if (p.gate != Gate::kNone) {
    token.decay = expf(log_decay(p, decode(raw.g, p.g.dtype), parameters.rate, parameters.bias));
  }
  token.beta = p.beta.present() ? beta_of(p, decode(raw.beta, p.beta.dtype)) : 1.0f;
}

// What the warps exchange at the barrier of a token.
template <int kPlaces>
struct Exchange {
  static constexpr int kWarps = kPlaces / kKeyLanes;

  float4 sums[2][kWarps][kColumnLanes];  // a and b, of four columns
  alignas(16) float qk[kWarps];
  alignas(16) float qq[kWarps];
  alignas(16) float kk[kWarps];
};

__device__ __forceinline__ float sum_over_key_lanes(float x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance >= kColumnLanes; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

// The same of eight numbers, of which each key lane keeps two: first halves of the warp keep a or b, then neighbours
// columns 0 and 1 or 2 and 3.
__device__ __forceinline__ float2 sum_over_key_lanes(const float (&a)[kColumns], const float (&b)[kColumns]) {
  const bool second = threadIdx.x & 16, right = threadIdx.x & 8;
  float joined[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    joined[j] = (second ? b[j] : a[j]) + __shfl_xor_sync(kAllLanes, second ? a[j] : b[j], 16);
  }
  return make_float2((right ? joined[2] : joined[0]) + __shfl_xor_sync(kAllLanes, right ? joined[0] : joined[2], 8),
                     (right ? joined[3] : joined[1]) + __shfl_xor_sync(kAllLanes, right ? joined[1] : joined[3], 8));
}

template <int kWarps>
__device__ __forceinline__ float sum_over_warps(const float (&x)[kWarps]) {
  float sum = x[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += x[warp];
  return sum;
}

template <int kWarps>
__device__ __forceinline__ void sum_over_warps(const float4 (&x)[kWarps][kColumnLanes], float (&sum)[kColumns]) {
  const int column_lane = threadIdx.x % kColumnLanes;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float4 part = x[warp][column_lane];
    sum[0] = warp == 0 ? part.x : sum[0] + part.x;
    sum[1] = warp == 0 ? part.y : sum[1] + part.y;
    sum[2] = warp == 0 ? part.z : sum[2] + part.z;
    sum[3] = warp == 0 ? part.w : sum[3] + part.w;
  }
}

// The steps of a token: S becomes Sd and the warps' sums of it are sent; a barrier; u from the sums; S becomes the
// state after the token.

template <int kPlaces>
__device__ __forceinline__ void send_sums(const DeltaRuleDeviceProblem& p, const Token& token, StateTile& S,
                                          Exchange<kPlaces>& exchange) {
  if (p.gate == Gate::kPerChannel) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float decay = __shfl_sync(kAllLanes, token.decay, i, kColumnLanes);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) S.s[i][j] *= decay;
    }
  } else if (p.gate == Gate::kPerHead) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) S.s[i][j] *= token.decay;
    }
  }
  float a[kColumns] = {}, b[kColumns] = {}, qk = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      a[j] = fmaf(token.reader(i), S.s[i][j], a[j]);
      b[j] = fmaf(token.q[i], S.s[i][j], b[j]);
    }
    qk = fmaf(token.q[i], token.writer(i), qk);
  }
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  float4& sums = exchange.sums[lane / 16][warp][lane % kColumnLanes];
  reinterpret_cast<float2*>(&sums)[lane / 8 % 2] = sum_over_key_lanes(a, b);
  qk = sum_over_key_lanes(qk);
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
}

__device__ __forceinline__ float norm_factor(float sum_of_squares) { return rsqrtf(sum_of_squares + kL2NormEps); }

// u of the lane's columns, with the factor that k^T lacks.
template <int kPlaces>
__device__ __forceinline__ void receive_u(const DeltaRuleDeviceProblem& p, const Token& token,
                                          const Exchange<kPlaces>& exchange, float (&u)[kColumns]) {
  float a[kColumns];
  sum_over_warps(exchange.sums[0], a);
  const float k_norm = p.qk_l2norm ? norm_factor(sum_over_warps(exchange.kk)) : 1.0f;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) u[j] = token.v[j] - k_norm * a[j];
  if (p.beta_per_value) {
    const int column = threadIdx.x % kColumnLanes * kColumns;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) u[j] = __shfl_sync(kAllLanes, token.beta, column + j) * u[j];
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) u[j] = token.beta * u[j];
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) u[j] = k_norm * u[j];
}

__device__ __forceinline__ void update(const Token& token, const float (&u)[kColumns], StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) S.s[i][j] = fmaf(token.writer(i), u[j], S.s[i][j]);
  }
}

// The output is the business of the first warp, whose first lanes have all columns.
__device__ __forceinline__ bool has_output() { return threadIdx.x < kWarpSize; }

template <int kPlaces>
__device__ __forceinline__ void receive_output(const DeltaRuleDeviceProblem& p, const float (&u)[kColumns],
                                               const Exchange<kPlaces>& exchange, float (&o)[kColumns]) {
  float b[kColumns];
  sum_over_warps(exchange.sums[1], b);
  const float qk = sum_over_warps(exchange.qk);
  const float factor = p.scale * (p.qk_l2norm ? norm_factor(sum_over_warps(exchange.qq)) : 1.0f);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) o[j] = factor * fmaf(qk, u[j], b[j]);
}

// The slots of a step's states; absent: the sequences' numbers.
struct Slots {
  DeviceTensor indices;  // [N]
  int64_t count = 0;
};

// Slots outside the tensor are skipped like -1: the host cannot refuse them.
__device__ __forceinline__ int64_t slot_of(const Slots& slots, int64_t sequence) {
  const DeviceTensor& indices = slots.indices;
  if (!indices.present()) return sequence;
  const int64_t slot = load_integer(indices.data, indices.dtype, sequence * indices.strides[0]);
  return slot < slots.count ? slot : -1;
}

// All tokens of all sequences, in any layout: forward, and those steps that are not one token in vec4s.
struct RecurrentArgs {
  DeltaRuleDeviceProblem problem;
  DeviceTensor o;              // [B, T, HV, V]; absent: states alone are wanted
  DeviceStates initial_state;  // [N, HV] matrices; absent: 0
  DeviceStates final_state;    // [N, HV] matrices; absent: not wanted. A step: the same as initial_state
  bool in_place = false;       // a step: a sequence without tokens leaves its state alone
  Slots slots;                 // of a step

  DeviceStates chunk_states;  // [B, NT, HV] matrices; absent: not wanted
  int64_t state_chunks = 0;   // NT
  ChunkedSequences chunked;
};

void launch_tokens(const RecurrentArgs& args, const Context& context);

}  // namespace fastweight::cuda::recurrent
