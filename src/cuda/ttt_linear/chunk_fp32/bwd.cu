// Backward by mini-batches in fp32, for every type and every length of a mini-batch. A first pass, the forward kernel,
// keeps the state before every mini-batch. The second goes over the mini-batches in reverse; h, c is the state before
// one, dh, dc the gradient of the state after it, xo, ro the outer norm's, m() a mean over D, and all C rows take part:
//
//     dyo  = do + ro (w do - m(w do) - xo m(xo w do))        0 in extension rows
//     F    = k dh + dc
//     dn   = -P^T (eta dyo) - eta_L F
//     dy   = r (dn - m(dn) - x m(x dn))
//     dx   = -r (dn m(x y) + y m(x dn)) + w^2 dy
//     dz   = r (dx - m(dx) - x m(x dx)) - (r <dn, n> / D) x
//     Dm   = lower(dyo n^T)
//     dq   = scale (dyo h^T - eta (Dm k))
//     dk   = w dy + dz h^T - scale Dm^T (eta q) - eta_L n dh^T
//     dv   = -w dy
//     deta = -rowsum(Dm P),   and -<n, F> for the last token
//     dw  += do xo + (w x + u) dy,   db += do + w dy         u = w x + b - v + k, y = w u
//     dh  += scale q^T dyo + k^T dz,   dc += sum(dyo + dz)
//
// A block has one (sequence, head). Its sums for dw and db are fp64; a last launch adds those of the sequences in order.
#include <string>

#include "core/workspace.h"
#include "cuda/ttt_linear/chunk_fp32/forward.cuh"
#include "cuda/ttt_linear/kernels.h"
#include "cuda/ttt_linear/parameter_sums.h"

namespace fastweight::cuda::ttt {
namespace chunk_fp32 {
namespace {

struct BackwardArgs {
  DeviceProblem problem;
  DeviceTensor d_o, dq, dk, dv, deta;
  DeviceStates d_final_state, d_initial_state;
  DeviceTensor d_final_state_bias, d_initial_state_bias;
  KeptStates kept;
  KeptTiles tiles;                   // in its place, of a forward with 16-bit operands
  double* parameter_sums = nullptr;  // [N, H, 2, D]
  float* scratch = nullptr;
  int64_t scratch_floats = 0;  // of a block
};

struct Adjoint {
  MiniBatch mb;
  Matrix d_o;      // [C, D]
  Matrix dyo;      // [C, D]
  Matrix dn;       // [C, D] F, then dn, then dz
  Matrix dy;       // [C, D]
  Matrix Dm;       // [C, C]
  Matrix dh;       // [D, D]
  float* dc;       // [D]
  float* w;        // [D]
  float* r;        // [C]
  float* mean_xy;  // [C]
  float* nF;       // [C] n F
  float* deta;     // [C]

  FW_HOST_DEVICE void lay_out(BlockLayout& layout, int C, int D) {
    mb.lay_out(layout, C, D);
    d_o = layout.matrix(C, D);
    dyo = layout.matrix(C, D);
    dn = layout.matrix(C, D);
    dy = layout.matrix(C, D);
    Dm = layout.matrix(C, C);
    dh = layout.matrix(round_up_to_4(D), D);
    dc = layout.take(round_up_to_4(D));
    w = layout.take(round_up_to_4(D));
    r = layout.take(C);
    mean_xy = layout.take(C);
    nF = layout.take(C);
    deta = layout.take(C);
  }
};

// The state that another forward has kept.
__device__ __forceinline__ void load_tile(const KeptTiles& tiles, int64_t number, int D, DType dtype,
                                          const MiniBatch& mb) {
  const int width = round_up_to_4(D);
  const uint16_t* h = tiles.h(number);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < width * width; i += static_cast<int>(blockDim.x)) {
    const int key = i % width, column = i / width;
    mb.h.at(key, column) = key < D && column < D ? load_float(h, dtype, tiles.element(key, column)) : 0.0f;
  }
  for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
    mb.c[i] = i < D ? tiles.c(number)[i] : 0.0f;
  }
}

__device__ __forceinline__ void load_mini_batch(const BackwardArgs& args, const Tokens& tokens, int64_t number,
                                                const Adjoint& s) {
  const DeviceProblem& p = args.problem;
  const int C = p.mini_batch, D = p.head_dim;
  load_rows(p.k, tokens, C, D, s.mb.k);
  load_rows(p.q, tokens, C, D, s.mb.k.from_row(C));
  load_rows(p.v, tokens, C, D, s.mb.v);
  load_rows(args.d_o, tokens, C, D, s.d_o);
  load_etas(p, tokens, s.mb.eta);
  if (!args.tiles.present()) {
    for_each_kept(args.kept, number, D, s.mb, [](const float4& from, float4& to) { to = from; });
  } else {
    load_tile(args.tiles, number, D, p.q.dtype, s.mb);
  }
}

// F = k dh + dc
__device__ __forceinline__ void read_state_gradient(const DeviceProblem& p, const Adjoint& s, TileDealer& dealer) {
  const int width = round_up_to_4(p.head_dim);
  dealer.deal(p.mini_batch, width, [&](Tile& tile) {
    tile.add(s.mb.k, s.dh, width);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = tile.x[r][e] + s.dc[tile.j + e];
      s.dn.store(tile.i + r, tile.j / 4, values);
    }
  });
}

// x, r, u, m(x y), n and n F of every row.
__device__ __forceinline__ void make_gradients(const DeviceProblem& p, const RowLane& at, const Adjoint& s) {
#pragma unroll 1
  for (int row = at.warp; row < p.mini_batch; row += at.warps) {
    float x[4], k[4], v[4], u[4], n[4], F[4];
    at.load(s.mb.x, row, x);
    at.load(s.mb.k, row, k);
    at.load(s.mb.v, row, v);
    at.load(s.dn, row, F);
    const float r = at.normalise(p, x);
    const float mean_xy = inner_gradient(p, at, k, v, x, r, u, n);
    const float nF = at.dot(n, F);
    at.store(s.mb.x, row, x);
    at.store(s.mb.v, row, u);
    at.store(s.mb.n, row, n);
    if (at.lane == 0) {
      s.r[row] = r;
      s.mean_xy[row] = mean_xy;
      s.nF[row] = nF;
    }
  }
}

// r (g - m(g) - x m(x g)) of the two means.
__device__ __forceinline__ float norm_adjoint(float r, float g, float x, float mean, float mean_x) {
  return r * fmaf(-x, mean_x, g - mean);
}

// y becomes xo; dyo.
__device__ __forceinline__ void outer_adjoint(const DeviceProblem& p, const Tokens& tokens, const RowLane& at,
                                              const Adjoint& s) {
  const Matrix rows = s.mb.x.from_row(p.mini_batch);
#pragma unroll 1
  for (int row = at.warp; row < p.mini_batch; row += at.warps) {
    float x[4], d_o[4], t[4], dyo[4] = {};
    if (row < tokens.count) {
      at.load(rows, row, x);
      at.load(s.d_o, row, d_o);
      const float r = at.normalise(p, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) t[e] = at.w[e] * d_o[e];
      const float mean = at.sum(t) * p.inverse_head_dim, mean_x = at.dot(x, t) * p.inverse_head_dim;
#pragma unroll
      for (int e = 0; e < 4; ++e) dyo[e] = d_o[e] + norm_adjoint(r, t[e], x[e], mean, mean_x);
      at.store(rows, row, x);
    }
    at.store(s.dyo, row, dyo);
  }
}

// dn and Dm.
__device__ __forceinline__ void inner_gradient_adjoint(const DeviceProblem& p, const Tokens& tokens, const Adjoint& s) {
  const int C = p.mini_batch, width = round_up_to_4(p.head_dim);
  const float eta = s.mb.eta[tokens.count - 1];
  TileDealer dealer;
  dealer.deal(C, width, [&](Tile& tile) {
    tile.add_left_transposed(s.mb.P, s.dyo, tile.i, C, [&](int i) { return s.mb.eta[i]; });
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
      s.dn.load(tile.i + r, tile.j / 4, values);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = fmaf(-eta, values[e], -tile.x[r][e]);
      s.dn.store(tile.i + r, tile.j / 4, values);
    }
  });
  dealer.deal(C, C, [&](Tile& tile) {
    if (tile.j <= tile.i) tile.add_right_transposed(s.dyo, s.mb.n, width);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = tile.j + e <= tile.i + r ? tile.x[r][e] : 0.0f;
      s.Dm.store(tile.i + r, tile.j / 4, values);
    }
  });
}

// dy, and dz in the place of dn; deta but for what the last token's step size does to the state.
__device__ __forceinline__ void inner_norm_adjoint(const DeviceProblem& p, const RowLane& at, const Adjoint& s) {
  const float inverse = p.inverse_head_dim;
#pragma unroll 1
  for (int row = at.warp; row < p.mini_batch; row += at.warps) {
    float x[4], u[4], n[4], dn[4], dy[4], dx[4];
    at.load(s.mb.x, row, x);
    at.load(s.mb.v, row, u);
    at.load(s.mb.n, row, n);
    at.load(s.dn, row, dn);
    const float r = s.r[row], mean_xy = s.mean_xy[row];
    const float mean = at.sum(dn) * inverse, mean_x = at.dot(x, dn) * inverse;
    const float shrink = r * at.dot(dn, n) * inverse;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dy[e] = e < at.columns ? norm_adjoint(r, dn[e], x[e], mean, mean_x) : 0.0f;
      const float inner = fmaf(dn[e], mean_xy, at.w[e] * u[e] * mean_x);
      dx[e] = e < at.columns ? fmaf(-r, inner, at.w[e] * at.w[e] * dy[e]) : 0.0f;
    }
    at.store(s.dy, row, dy);
    const float mean_dx = at.sum(dx) * inverse, mean_xdx = at.dot(x, dx) * inverse;
#pragma unroll
    for (int e = 0; e < 4; ++e) dx[e] = fmaf(-shrink, x[e], norm_adjoint(r, dx[e], x[e], mean_dx, mean_xdx));
    at.store(s.dn, row, dx);

    float sum = 0.0f;
    for (int j = at.lane; j <= row; j += kWarpSize) sum = fmaf(s.Dm.at(row, j), s.mb.P.at(row, j), sum);
    sum = sum_over_lanes<kWarpSize>(sum);
    if (at.lane == 0) s.deta[row] = -sum;
  }
}

// dq and dk.
__device__ __forceinline__ void store_key_gradients(const BackwardArgs& args, const Tokens& tokens, const Adjoint& s) {
  const DeviceProblem& p = args.problem;
  const int C = p.mini_batch, D = p.head_dim, width = round_up_to_4(D);
  const float eta = s.mb.eta[tokens.count - 1];
  TileDealer dealer;
  if (args.dq.present()) {
    dealer.deal(C, width, [&](Tile& tile) {
      Tile moves(tile.i, tile.j);
      tile.add_right_transposed(s.dyo, s.mb.h, width);
      moves.add(s.Dm, s.mb.k, tile.i + 4);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float values[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          values[e] = p.scale * fmaf(-s.mb.eta[tile.i + r], moves.x[r][e], tile.x[r][e]);
        }
        store_part(args.dq, tokens, tile.i + r, tile.j, D, values);
      }
    });
  }
  if (!args.dk.present()) return;
  dealer.deal(C, width, [&](Tile& tile) {
    Tile writes(tile.i, tile.j);
    tile.add_right_transposed(s.dn, s.mb.h, width);
    tile.add_left_transposed(s.Dm, s.mb.k.from_row(C), tile.i, C, [&](int i) { return -p.scale * s.mb.eta[i]; });
    writes.add_right_transposed(s.mb.n, s.dh, width);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
      s.dy.load(tile.i + r, tile.j / 4, values);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        values[e] = fmaf(s.w[tile.j + e], values[e], fmaf(-eta, writes.x[r][e], tile.x[r][e]));
      }
      store_part(args.dk, tokens, tile.i + r, tile.j, D, values);
    }
  });
}

__device__ __forceinline__ void store_token_gradients(const BackwardArgs& args, const Tokens& tokens,
                                                      const Adjoint& s) {
  const int C = args.problem.mini_batch, D = args.problem.head_dim, across = round_up_to_4(D) / 4;
  if (args.dv.present()) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < tokens.count * across; i += static_cast<int>(blockDim.x)) {
      const int row = i / across, q = i % across;
      float values[4];
      s.dy.load(row, q, values);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] *= -s.w[4 * q + e];
      store_part(args.dv, tokens, row, 4 * q, D, values);
    }
  }
  if (!args.deta.present()) return;
  for (int i = static_cast<int>(threadIdx.x); i < tokens.count; i += static_cast<int>(blockDim.x)) {
    float value = s.deta[i];
    if (i == tokens.count - 1) {
      for (int j = 0; j < C; ++j) value -= s.nF[j];
    }
    store_float(args.deta.data, args.deta.dtype, row_offset(args.deta, tokens.batch, tokens.begin + i, tokens.head),
                value);
  }
}

// The thread's column of dw and db, and of dc.
__device__ __forceinline__ void add_column_sums(const DeviceProblem& p, const Tokens& tokens, const Adjoint& s,
                                                double& dw_sum, double& db_sum) {
  const int d = static_cast<int>(threadIdx.x);
  if (d >= p.head_dim) return;
  const Matrix xo = s.mb.x.from_row(p.mini_batch);
  const float w = s.w[d];
  float dw = 0.0f, db = 0.0f, dc = s.dc[d];
  for (int i = 0; i < p.mini_batch; ++i) {
    const float dy = s.dy.at(i, d);
    dw = fmaf(fmaf(w, s.mb.x.at(i, d), s.mb.v.at(i, d)), dy, dw);
    db = fmaf(w, dy, db);
    dc += s.dn.at(i, d);
    if (i < tokens.count) {
      const float d_o = s.d_o.at(i, d);
      dw = fmaf(d_o, xo.at(i, d), dw);
      db += d_o;
      dc += s.dyo.at(i, d);
    }
  }
  s.dc[d] = dc;
  dw_sum += static_cast<double>(dw);
  db_sum += static_cast<double>(db);
}

// dh = dh + scale q^T dyo + k^T dz
__device__ __forceinline__ void move_state_gradient(const DeviceProblem& p, const Tokens& tokens, const Adjoint& s) {
  const int width = round_up_to_4(p.head_dim);
  const Matrix q = s.mb.k.from_row(p.mini_batch);
  TileDealer dealer;
  dealer.deal(width, width, [&](Tile& tile) {
    tile.add_left_transposed(q, s.dyo, 0, tokens.count, [&](int) { return p.scale; });
    tile.add_left_transposed(s.mb.k, s.dn, 0, tokens.count, [](int) { return 1.0f; });
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
      s.dh.load(tile.i + r, tile.j / 4, values);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] += tile.x[r][e];
      s.dh.store(tile.i + r, tile.j / 4, values);
    }
  });
}

__device__ void run_head(const BackwardArgs& args, int64_t sequence, int head, const Adjoint& s) {
  const DeviceProblem& p = args.problem;
  const int C = p.mini_batch, D = p.head_dim, thread = static_cast<int>(threadIdx.x);
  const SequenceSpan span = sequence_at(p.sequences, sequence);
  const int64_t first = first_mini_batch(p.sequences, span, sequence, C);
  const RowLane at(p, head);
  if (at.warp == 0 && at.columns > 0)
    *reinterpret_cast<float4*>(s.w + 4 * at.lane) = {at.w[0], at.w[1], at.w[2], at.w[3]};
  load_state(args.d_final_state, args.d_final_state_bias, sequence, head, D, s.dh, s.dc);
  double dw = 0, db = 0;
#pragma unroll 1
  for (int64_t m = chunks_of(span.length, C) - 1; m >= 0; --m) {
    const Tokens tokens{span.batch, span.begin + m * C, head, static_cast<int>(min(span.length - m * C, int64_t{C})),
                        m > 0 ? -C : 0};
    TileDealer reads, outputs;
    load_mini_batch(args, tokens, (first + m) * p.num_heads + head, s);
    __syncthreads();
    read_state(p, true, s.mb, reads);
    read_state_gradient(p, s, reads);
    make_p(p, s.mb, reads);
    __syncthreads();
    make_gradients(p, at, s);
    __syncthreads();
    make_outputs(p, s.mb, outputs);
    __syncthreads();
    outer_adjoint(p, tokens, at, s);
    __syncthreads();
    inner_gradient_adjoint(p, tokens, s);
    __syncthreads();
    inner_norm_adjoint(p, at, s);
    __syncthreads();
    store_key_gradients(args, tokens, s);
    store_token_gradients(args, tokens, s);
    add_column_sums(p, tokens, s, dw, db);
    __syncthreads();
    move_state_gradient(p, tokens, s);
    __syncthreads();
  }
  __syncthreads();
  store_state(args.d_initial_state, args.d_initial_state_bias, sequence, head, D, s.dh, s.dc);
  if (thread < D) {
    double* sums = args.parameter_sums + (sequence * p.num_heads + head) * 2 * D;
    sums[thread] = dw;
    sums[D + thread] = db;
  }
}

__global__ void __launch_bounds__(256, 2) backward_kernel(const __grid_constant__ BackwardArgs args, int64_t heads) {
  BlockLayout layout(block_memory(args.scratch, args.scratch_floats));
  Adjoint s;
  s.lay_out(layout, args.problem.mini_batch, args.problem.head_dim);
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / args.problem.num_heads;
    run_head(args, sequence, static_cast<int>(item - sequence * args.problem.num_heads), s);
    __syncthreads();  // before the next head's state
  }
}

Config config_of(const TttLinearBackwardProblem& problem) {
  const TttLinearSizes& sizes = problem.sizes;
  const int device = problem.args.in.q.device.index;
  return backward_config(sizes.head_dim, problem.args.options.mini_batch, sizes.num_sequences * sizes.num_heads,
                         device_attribute(cudaDevAttrMultiProcessorCount, device),
                         static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
}

void take_scratch(ScratchLayout& layout, const Config& config, BackwardArgs& args) {
  const DeviceProblem& p = args.problem;
  const int64_t width = round_up_to_4(p.head_dim),
                mini_batches = most_mini_batches(p.sequences, p.mini_batch) * p.num_heads;
  const int64_t own = args.tiles.present() ? 0 : mini_batches;
  args.kept.h = layout.take<float>(own * width * width);
  args.kept.c = layout.take<float>(own * width);
  args.parameter_sums = layout.take<double>(p.sequences.count * p.num_heads * 2 * p.head_dim);
  args.scratch = config.in_shared ? nullptr : layout.take<float>(config.blocks * args.scratch_floats);
}

ForwardArgs states_pass(const TttLinearBackwardProblem& problem, const BackwardArgs& args) {
  ForwardArgs forward;
  forward.problem = args.problem;
  forward.initial_state = device_states(problem.args.in.initial_state, false);
  forward.initial_state_bias = device_tensor(problem.args.in.initial_state_bias);
  forward.kept = args.kept;
  return forward;
}

}  // namespace

Config backward_config(int64_t head_dim, int32_t mini_batch, int64_t heads, int multiprocessors, size_t shared_limit) {
  BlockLayout layout;
  Adjoint().lay_out(layout, mini_batch, static_cast<int>(head_dim));
  return config_for(layout.bytes(), heads, multiprocessors, shared_limit);
}

}  // namespace chunk_fp32

std::string chunk_fp32_backward_config(const TttLinearBackwardProblem& problem) {
  return chunk_fp32::config_of(problem).text();
}

void backward_in_fp32(const TttLinearBackwardProblem& problem, const KeptTiles& tiles, const Context& context) {
  using namespace chunk_fp32;
  const TttLinearBackward& call = problem.args;
  const TttLinearSizes& sizes = problem.sizes;
  const int64_t heads = sizes.num_sequences * sizes.num_heads;
  const Config config = chunk_fp32::config_of(problem);
  BackwardArgs args;
  args.problem = device_problem(problem);
  args.tiles = tiles;
  args.d_o = device_tensor(call.d_o);
  args.dq = device_tensor(call.dq);
  args.dk = device_tensor(call.dk);
  args.dv = device_tensor(call.dv);
  args.deta = device_tensor(call.deta);
  args.d_final_state = device_states(call.d_final_state, false);
  args.d_initial_state = device_states(call.d_initial_state, false);
  args.d_final_state_bias = device_tensor(call.d_final_state_bias);
  args.d_initial_state_bias = device_tensor(call.d_initial_state_bias);
  args.scratch_floats = static_cast<int64_t>(config.bytes / sizeof(float));
  ScratchLayout measure;
  take_scratch(measure, config, args);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  take_scratch(layout, config, args);

  if (!tiles.present()) {
    const int device = call.in.q.device.index;
    const Config first_pass = forward_config(
        sizes.head_dim, call.options.mini_batch, heads, device_attribute(cudaDevAttrMultiProcessorCount, device),
        static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
    launch_forward(first_pass, states_pass(problem, args), context);
  }
  launch<backward_kernel>(
      "ttt_linear chunk_fp32 backward", context,
      {static_cast<unsigned>(config.blocks), static_cast<unsigned>(config.threads), config.shared_bytes()}, args,
      heads);
  add_parameter_sums(args.parameter_sums, args.problem, device_tensor(call.dw), device_tensor(call.db), context);
}

void chunk_fp32_backward(const TttLinearBackwardProblem& problem, const Context& context) {
  backward_in_fp32(problem, {}, context);
}

}  // namespace fastweight::cuda::ttt
