// Token by token in fp32: forward and the in-place step, with the same arithmetic. The sums over the open mini-batch
// stand beside the state, h [D, D] and c [D] at its start:
//
//     z = k h + c,   n = inner gradient of z
//     G = G + k^T n,   g = g + n
//     y = scale q (h - eta G) + (c - eta g),   o = y + w LN(y) + b
//
// and the token that fills the mini-batch moves the state: h = h - eta G, c = c - eta g, G = g = 0. A forward extends
// its last mini-batch and moves by it; a step leaves it open.
//
// A block has one (sequence, head), and both matrices in registers for all its tokens: a thread 4 columns of D / 8
// keys. Three products read the matrices before the token, k h, q h and q G; with q k they make q (G + k^T n). Their
// partial sums go through shared memory, after which every warp holds whole rows and does the norms of the inner
// gradient by itself, so there is one barrier per token. One warp, another for every token, goes on to the output.
#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/ttt_linear/device_problem.h"
#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda::ttt {
namespace {

constexpr int kColumns = 4;   // of a thread
constexpr int kKeyRows = 8;   // threads along the keys
constexpr int kProducts = 3;  // k h, q h, q G

template <int kD>
constexpr int kKeys = kD / kKeyRows;  // of a thread
template <int kD>
constexpr int kColumnLanes = kD / kColumns;
template <int kD>
constexpr int kThreads = kKeyRows* kColumnLanes<kD>;

struct RecurrentArgs {
  DeviceProblem problem;
  DeviceTensor o;
  DeviceStates state_in, state_out;            // [slots, H, D, D]; out: fp32
  DeviceTensor state_bias_in, state_bias_out;  // [slots, H, D]

  // A step: one tensor each, in place.
  bool in_place = false;
  DeviceStates gradient;       // [slots, H, D, D] fp32
  DeviceTensor gradient_bias;  // [slots, H, D] fp32
  DeviceTensor position;       // [slots]
  DeviceTensor state_indices;  // [N]; absent: the sequence's number
  int64_t slots = 0;
};

// Slots outside the tensor are skipped like -1: the host cannot refuse them.
__device__ __forceinline__ int64_t slot_of(const RecurrentArgs& args, int64_t sequence) {
  if (!args.state_indices.present()) return sequence;
  const int64_t slot =
      load_integer(args.state_indices.data, args.state_indices.dtype, sequence * args.state_indices.strides[0]);
  return slot < args.slots ? slot : -1;
}

__device__ __forceinline__ int64_t position_of(const RecurrentArgs& args, int64_t slot) {
  const int64_t position = load_integer(args.position.data, args.position.dtype, slot * args.position.strides[0]);
  return clamped(position, 0, args.problem.mini_batch - 1);
}

// The rows of a token in fp32, 0 beyond D, and its step size.
template <int kD>
struct alignas(16) Token {
  float k[kD], q[kD], v[kD];
  float eta;
};

template <int kD>
struct Shared {
  // The token at hand, the one before, whose rows slow warps may still read, and the next.
  Token<kD> tokens[3];
  alignas(16) float products[2][kThreads<kD> / kWarpSize][kProducts][kD];  // by every warp; this token's and the next's
};

// A thread's share of the rows of a token on its way: 3 D + 1 numbers by 2 D threads.
template <int kD>
struct TokenInFlight {
  uint32_t bits[2];

  __device__ __forceinline__ void load(const DeviceProblem& p, int64_t batch, int64_t token, int head) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = threadIdx.x + i * kThreads<kD>, row = at / kD, column = at % kD;
      bits[i] = 0;
      if (row < 3 && column < p.head_dim) {
        const DeviceTensor& x = row == 0 ? p.k : row == 1 ? p.q : p.v;
        bits[i] =
            load_bits(element_at(x.data, x.dtype, row_offset(x, batch, token, head) + column * x.strides[3]), x.dtype);
      } else if (at == 3 * kD) {
        bits[i] = load_bits(element_at(p.eta.data, p.eta.dtype, row_offset(p.eta, batch, token, head)), p.eta.dtype);
      }
    }
  }
  __device__ __forceinline__ void store(const DeviceProblem& p, Token<kD>& token) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = threadIdx.x + i * kThreads<kD>;
      if (at < 3 * kD) {
        token.k[at] = decode(bits[i], p.q.dtype);
      } else if (at == 3 * kD) {
        token.eta = decode(bits[i], p.eta.dtype);
      }
    }
  }
};

// The place of a thread, and what it knows of its columns.
template <int kD>
struct Thread {
  int warp, lane, column, key;
  int columns;  // how many of its four exist
  float w[kColumns], b[kColumns];

  __device__ explicit Thread(int D)
      : warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        column(kColumns * (threadIdx.x % kColumnLanes<kD>)),
        key(kKeys<kD> * (threadIdx.x / kColumnLanes<kD>)),
        columns(min(max(D - column, 0), kColumns)) {}

  // The sum of the row of which the thread has x.
  __device__ __forceinline__ float row_sum(const float (&x)[kColumns]) const {
    return sum_over_lanes<kColumnLanes<kD>>((x[0] + x[1]) + (x[2] + x[3]));
  }
};

// The thread's columns of a row; 0 where there are none.
template <int kD>
__device__ __forceinline__ void load_row(const DeviceTensor& x, int64_t offset, int64_t stride, const Thread<kD>& at,
                                         float (&values)[kColumns]) {
#pragma unroll
  for (int e = 0; e < kColumns; ++e) values[e] = 0.0f;
  if (!x.present()) return;
  with_type(x.dtype, [&](auto type) {
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      if (e < at.columns) values[e] = load_float(x.data, type.value, offset + (at.column + e) * stride);
    }
  });
}

template <int kD>
using Matrix = float[kKeys<kD>][kColumns];

template <int kD>
__device__ __forceinline__ int64_t matrix_offset(const DeviceStates& x, int64_t n, int head, const Thread<kD>& at) {
  return n * x.outer_strides[0] + head * x.outer_strides[1] + at.key * x.k_stride + at.column * x.v_stride;
}

template <int kD>
__device__ __forceinline__ void load_matrix(const DeviceStates& x, int64_t n, int head, int D, const Thread<kD>& at,
                                            Matrix<kD>& m) {
#pragma unroll
  for (int i = 0; i < kKeys<kD>; ++i) {
#pragma unroll
    for (int e = 0; e < kColumns; ++e) m[i][e] = 0.0f;
  }
  if (!x.present()) return;
  const int64_t offset = matrix_offset(x, n, head, at);
  with_type(x.dtype, [&](auto type) {
#pragma unroll
    for (int i = 0; i < kKeys<kD>; ++i) {
      if (at.key + i >= D) continue;
      if (x.v_aligned_vec4) {
        if (at.columns > 0) {
          decode_vec4<type.value>(load_vec4<type.value>(element_at(x.data, type.value, offset + i * x.k_stride)), m[i]);
        }
      } else {
#pragma unroll
        for (int e = 0; e < kColumns; ++e) {
          if (e < at.columns) m[i][e] = load_float(x.data, type.value, offset + i * x.k_stride + e * x.v_stride);
        }
      }
    }
  });
}

template <int kD>
__device__ __forceinline__ void store_matrix(const DeviceStates& x, int64_t n, int head, int D, const Thread<kD>& at,
                                             const Matrix<kD>& m) {
  if (!x.present()) return;
  const int64_t offset = matrix_offset(x, n, head, at);
#pragma unroll
  for (int i = 0; i < kKeys<kD>; ++i) {
    if (at.key + i >= D) continue;
    char* row = element_at(x.data, DType::kF32, offset + i * x.k_stride);
    if (x.v_aligned_vec4) {
      if (at.columns > 0) store_vec4<DType::kF32>(row, m[i]);
    } else {
      scatter_vec4(row, DType::kF32, 0, x.v_stride, at.columns, m[i]);
    }
  }
}

// Rows are the same in all warps: the first threads store them.
template <int kD>
__device__ __forceinline__ void store_bias(const DeviceTensor& x, int64_t n, int head, const Thread<kD>& at,
                                           const float (&c)[kColumns]) {
  if (!x.present() || threadIdx.x >= kColumnLanes<kD>) return;
  scatter_vec4(x.data, DType::kF32, n * x.strides[0] + head * x.strides[1] + at.column * x.strides[2], x.strides[2],
               at.columns, c);
}

// x = (z - mean) rstd; returns rstd = 1 / sqrt(variance + eps).
template <int kD>
__device__ __forceinline__ float normalise(const DeviceProblem& p, const Thread<kD>& at, const float (&z)[kColumns],
                                           float (&x)[kColumns]) {
  const float mean = at.row_sum(z) * p.inverse_head_dim;
  float squares[kColumns];
#pragma unroll
  for (int e = 0; e < kColumns; ++e) {
    x[e] = e < at.columns ? z[e] - mean : 0.0f;
    squares[e] = x[e] * x[e];
  }
  const float rstd = 1.0f / sqrtf(fmaf(at.row_sum(squares), p.inverse_head_dim, p.eps));
#pragma unroll
  for (int e = 0; e < kColumns; ++e) x[e] *= rstd;
  return rstd;
}

// n = r (y - mean(y) - x mean(x y)) with x = LN(z), y = w (w x + b - v + k)
template <int kD>
__device__ __forceinline__ void inner_gradient(const DeviceProblem& p, const Thread<kD>& at, const float (&k)[kColumns],
                                               const float (&v)[kColumns], const float (&z)[kColumns],
                                               float (&n)[kColumns]) {
  float x[kColumns], y[kColumns], xy[kColumns];
  const float r = normalise(p, at, z, x);
#pragma unroll
  for (int e = 0; e < kColumns; ++e) {
    y[e] = at.w[e] * (fmaf(at.w[e], x[e], at.b[e]) - (v[e] - k[e]));
    xy[e] = x[e] * y[e];
  }
  const float mean = at.row_sum(y) * p.inverse_head_dim, mean_xy = at.row_sum(xy) * p.inverse_head_dim;
#pragma unroll
  for (int e = 0; e < kColumns; ++e) n[e] = e < at.columns ? r * fmaf(-x[e], mean_xy, y[e] - mean) : 0.0f;
}

__device__ __forceinline__ void load_four(const float* from, float (&values)[kColumns]) {
  const float4 vec4 = *reinterpret_cast<const float4*>(from);
  values[0] = vec4.x;
  values[1] = vec4.y;
  values[2] = vec4.z;
  values[3] = vec4.w;
}

// What is kept of a sequence between two tokens, of which the thread has its part.
template <int kD>
struct OpenMiniBatch {
  Matrix<kD> h, G;
  float c[kColumns], g[kColumns];
};

// The warp's share of k h, q h and q G.
template <int kD>
__device__ __forceinline__ void put_products(const Token<kD>& token, const OpenMiniBatch<kD>& open,
                                             const Thread<kD>& at, float (&products)[kProducts][kD]) {
  float sums[kProducts][kColumns] = {};
#pragma unroll
  for (int i = 0; i < kKeys<kD>; i += 4) {
    float k[4], q[4];
    load_four(token.k + at.key + i, k);
    load_four(token.q + at.key + i, q);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        sums[0][e] = fmaf(k[j], open.h[i + j][e], sums[0][e]);
        sums[1][e] = fmaf(q[j], open.h[i + j][e], sums[1][e]);
        sums[2][e] = fmaf(q[j], open.G[i + j][e], sums[2][e]);
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kProducts; ++s) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= kColumnLanes<kD>; distance /= 2) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) sums[s][e] += __shfl_xor_sync(kAllLanes, sums[s][e], distance);
    }
    if (at.lane < kColumnLanes<kD>) {
      *reinterpret_cast<float4*>(products[s] + at.column) = make_float4(sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
    }
  }
}

template <int kD>
__device__ __forceinline__ void get_products(const float (&products)[kThreads<kD> / kWarpSize][kProducts][kD],
                                             const Thread<kD>& at, float (&sums)[kProducts][kColumns]) {
#pragma unroll
  for (int s = 0; s < kProducts; ++s) {
    load_four(products[0][s] + at.column, sums[s]);
#pragma unroll
    for (int w = 1; w < kThreads<kD> / kWarpSize; ++w) {
      float share[kColumns];
      load_four(products[w][s] + at.column, share);
#pragma unroll
      for (int e = 0; e < kColumns; ++e) sums[s][e] += share[e];
    }
  }
}

template <int kD>
__device__ __forceinline__ void add_token(const Token<kD>& token, const float (&n)[kColumns], const Thread<kD>& at,
                                          OpenMiniBatch<kD>& open) {
#pragma unroll
  for (int i = 0; i < kKeys<kD>; i += 4) {
    float k[4];
    load_four(token.k + at.key + i, k);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) open.G[i + j][e] = fmaf(k[j], n[e], open.G[i + j][e]);
    }
  }
#pragma unroll
  for (int e = 0; e < kColumns; ++e) open.g[e] += n[e];
}

template <int kD>
__device__ __forceinline__ void close_mini_batch(float eta, OpenMiniBatch<kD>& open) {
#pragma unroll
  for (int e = 0; e < kColumns; ++e) {
#pragma unroll
    for (int i = 0; i < kKeys<kD>; ++i) {
      open.h[i][e] = fmaf(-eta, open.G[i][e], open.h[i][e]);
      open.G[i][e] = 0.0f;
    }
    open.c[e] = fmaf(-eta, open.g[e], open.c[e]);
    open.g[e] = 0.0f;
  }
}

// Columns [at.column, ..) of a row of o, by one warp.
template <int kD>
__device__ __forceinline__ void store_output(const DeviceTensor& o, int64_t row, const Thread<kD>& at,
                                             const float (&values)[kColumns]) {
  if (at.lane >= kColumnLanes<kD> || at.columns == 0) return;
  if (o.aligned_vec4) {
    with_type(o.dtype,
              [&](auto type) { store_vec4<type.value>(element_at(o.data, type.value, row + at.column), values); });
  } else {
    scatter_vec4(o.data, o.dtype, row + at.column * o.strides[3], o.strides[3], at.columns, values);
  }
}

// y = 0 of a sequence without a slot; its state is left alone.
template <int kD>
__device__ __forceinline__ void clear_outputs(const RecurrentArgs& args, const SequenceSpan& span, int head,
                                              const Thread<kD>& at) {
  constexpr int kWarps = kThreads<kD> / kWarpSize;
  const float zeros[kColumns] = {};
  for (int64_t t = at.warp; t < span.length; t += kWarps) {
    store_output(args.o, row_offset(args.o, span.batch, span.begin + t, head), at, zeros);
  }
}

// y = scale q (h - eta G) + (c - eta g) with the token's own k^T n in G, where q G is that of before the token; then
// o = y + w LN(y) + b. By one warp.
template <int kD>
__device__ __forceinline__ void make_output(const DeviceProblem& p, const Thread<kD>& at,
                                            const float (&products)[kProducts][kColumns], const float (&qk)[kColumns],
                                            const float (&n)[kColumns], float eta, const OpenMiniBatch<kD>& open,
                                            float (&y)[kColumns]) {
  const float q_k = at.row_sum(qk);
  float x[kColumns];
#pragma unroll
  for (int e = 0; e < kColumns; ++e) {
    const float moved_read = fmaf(-eta, fmaf(q_k, n[e], products[2][e]), products[1][e]);
    y[e] = fmaf(p.scale, moved_read, fmaf(-eta, open.g[e], open.c[e]));
  }
  normalise(p, at, y, x);
#pragma unroll
  for (int e = 0; e < kColumns; ++e) y[e] += fmaf(at.w[e], x[e], at.b[e]);
}

// The rows that extend a mini-batch of `position` tokens: q = k = v = 0.
template <int kD>
__device__ __forceinline__ void extend_mini_batch(const DeviceProblem& p, const Thread<kD>& at, int position,
                                                  OpenMiniBatch<kD>& open) {
  const float zeros[kColumns] = {};
  float n[kColumns];
  inner_gradient(p, at, zeros, zeros, open.c, n);
#pragma unroll
  for (int e = 0; e < kColumns; ++e) open.g[e] = fmaf(static_cast<float>(p.mini_batch - position), n[e], open.g[e]);
}

// Of the slot, and the parameters of the thread's columns.
template <int kD>
__device__ __forceinline__ void load_open(const RecurrentArgs& args, int64_t slot, int head, Thread<kD>& at,
                                          OpenMiniBatch<kD>& open) {
  const DeviceProblem& p = args.problem;
  load_matrix(args.state_in, slot, head, p.head_dim, at, open.h);
  load_matrix(args.gradient, slot, head, p.head_dim, at, open.G);
  const auto load_bias = [&](const DeviceTensor& x, float(&values)[kColumns]) {
    load_row(x, slot * x.strides[0] + head * x.strides[1], x.strides[2], at, values);
  };
  load_bias(args.state_bias_in, open.c);
  load_bias(args.gradient_bias, open.g);
  load_row(p.w, head * p.w.strides[0], p.w.strides[1], at, at.w);
  load_row(p.b, head * p.b.strides[0], p.b.strides[1], at, at.b);
}

// A step's state is written only where it has `moved`.
template <int kD>
__device__ __forceinline__ void store_open(const RecurrentArgs& args, int64_t slot, int head, const Thread<kD>& at,
                                           bool moved, const OpenMiniBatch<kD>& open) {
  const int D = args.problem.head_dim;
  if (moved) {
    store_matrix(args.state_out, slot, head, D, at, open.h);
    store_bias(args.state_bias_out, slot, head, at, open.c);
  }
  store_matrix(args.gradient, slot, head, D, at, open.G);
  store_bias(args.gradient_bias, slot, head, at, open.g);
}

template <int kD>
__device__ __forceinline__ void run_head(const RecurrentArgs& args, int64_t sequence, int head, Shared<kD>& shared) {
  constexpr int kWarps = kThreads<kD> / kWarpSize;
  const DeviceProblem& p = args.problem;
  Thread<kD> at(p.head_dim);
  const SequenceSpan span = sequence_at(p.sequences, sequence);
  const int64_t slot = slot_of(args, sequence);
  if (slot < 0) return clear_outputs(args, span, head, at);
  if (args.in_place && span.length == 0) return;

  TokenInFlight<kD> next;
  if (span.length > 0) next.load(p, span.batch, span.begin, head);
  OpenMiniBatch<kD> open;
  load_open(args, slot, head, at, open);
  int position = args.in_place ? static_cast<int>(position_of(args, slot)) : 0;
  bool moved = !args.in_place;
  if (span.length > 0) {
    next.store(p, shared.tokens[0]);
    if (span.length > 1) next.load(p, span.batch, span.begin + 1, head);
  }
  __syncthreads();
  float eta = 0.0f;
  for (int64_t t = 0; t < span.length; ++t) {
    Token<kD>& token = shared.tokens[t % 3];
    auto& shares = shared.products[t % 2];
    put_products(token, open, at, shares[at.warp]);
    if (t + 1 < span.length) next.store(p, shared.tokens[(t + 1) % 3]);
    if (t + 2 < span.length) next.load(p, span.batch, span.begin + t + 2, head);
    __syncthreads();

    float products[kProducts][kColumns], k[kColumns], q[kColumns], v[kColumns], z[kColumns], qk[kColumns], n[kColumns];
    get_products(shares, at, products);
    load_four(token.k + at.column, k);
    load_four(token.q + at.column, q);
    load_four(token.v + at.column, v);
    eta = token.eta;
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      z[e] = products[0][e] + open.c[e];
      qk[e] = q[e] * k[e];
    }
    inner_gradient(p, at, k, v, z, n);
    add_token(token, n, at, open);
    if (t % kWarps == at.warp) {
      float o[kColumns];
      make_output(p, at, products, qk, n, eta, open, o);
      store_output(args.o, row_offset(args.o, span.batch, span.begin + t, head), at, o);
    }
    if (++position == p.mini_batch) {
      close_mini_batch(eta, open);
      position = 0;
      moved = true;
    }
  }
  if (!args.in_place && position > 0) {
    extend_mini_batch(p, at, position, open);
    close_mini_batch(eta, open);
  }
  store_open(args, slot, head, at, moved, open);
}

// The grid runs over the `heads` of all sequences, those of a sequence together; a smaller grid goes round.
template <int kD>
__global__ void __launch_bounds__(kThreads<kD>)
    recurrent_kernel(const __grid_constant__ RecurrentArgs args, int64_t heads) {
  __shared__ Shared<kD> shared;
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / args.problem.num_heads;
    run_head(args, sequence, static_cast<int>(item - sequence * args.problem.num_heads), shared);
    __syncthreads();  // before the next head's first token
  }
}

// The heads of a sequence share one count, so it is written when all of them are done.
__global__ void positions_kernel(const __grid_constant__ RecurrentArgs args) {
  const DeviceProblem& p = args.problem;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < p.sequences.count;
       n += int64_t{gridDim.x} * blockDim.x) {
    const int64_t slot = slot_of(args, n);
    if (slot < 0) continue;
    const int64_t position = position_of(args, slot) + sequence_at(p.sequences, n).length;
    static_cast<int32_t*>(args.position.data)[slot * args.position.strides[0]] =
        static_cast<int32_t>(position % p.mini_batch);
  }
}

// Calls body.template operator()<kD>() for D rounded up to a width of the kernel.
template <class Body>
void with_recurrent_dim(int head_dim, const Body& body) {
  if (head_dim <= 32) {
    body.template operator()<32>();
  } else if (head_dim <= 64) {
    body.template operator()<64>();
  } else {
    body.template operator()<128>();
  }
}

void run(const RecurrentArgs& args, const Context& context) {
  const int64_t heads = args.problem.sequences.count * args.problem.num_heads;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(heads, 1 << 30));
  with_recurrent_dim(args.problem.head_dim, [&]<int kD>() {
    launch<recurrent_kernel<kD>>("ttt_linear recurrent", context, {blocks, kThreads<kD>}, args, heads);
  });
}

}  // namespace

void recurrent_forward(const TttLinearForwardProblem& problem, const Context& context) {
  const TttLinearForward& forward = problem.args;
  RecurrentArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(forward.o);
  args.state_in = device_states(forward.in.initial_state, false);
  args.state_out = device_states(forward.final_state, false);
  args.state_bias_in = device_tensor(forward.in.initial_state_bias);
  args.state_bias_out = device_tensor(forward.final_state_bias);
  run(args, context);
}

void recurrent_step(const TttLinearStepProblem& problem, const Context& context) {
  const TttLinearStep& step = problem.args;
  RecurrentArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(step.o);
  args.in_place = true;
  args.state_in = args.state_out = device_states(step.state, false);
  args.state_bias_in = args.state_bias_out = device_tensor(step.state_bias);
  args.gradient = device_states(step.gradient, false);
  args.gradient_bias = device_tensor(step.gradient_bias);
  args.position = device_tensor(step.position);
  args.state_indices = device_tensor(step.state_indices);
  args.slots = step.state.shape[0];
  run(args, context);

  constexpr int64_t kBlock = 256;
  const int64_t blocks = std::min<int64_t>((problem.sizes.num_sequences + kBlock - 1) / kBlock, 1024);
  launch<positions_kernel>("ttt_linear positions", context, {static_cast<unsigned>(blocks), kBlock}, args);
}

}  // namespace fastweight::cuda::ttt
