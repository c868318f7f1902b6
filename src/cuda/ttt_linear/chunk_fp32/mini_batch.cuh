// Mini-batches in fp32, the part that forward and backward have in common. A block has one (sequence, head) for all its
// mini-batches; matrices lie where all its threads see them (matrix.cuh). The equations are those of ../chunk.cuh. For
// the norms a warp has a row, a lane four columns of it.
#pragma once

#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/ttt_linear/chunk_fp32/config.h"
#include "cuda/ttt_linear/chunk_fp32/matrix.cuh"
#include "cuda/ttt_linear/device_problem.h"
#include "cuda/ttt_linear/kept_states.h"
#include "fastweight/context.h"

namespace fastweight::cuda::ttt::chunk_fp32 {

// The states before every mini-batch, numbered as in ../kept_states.h.
struct KeptStates {
  float* h = nullptr;  // [.., D, D rounded up to 4]
  float* c = nullptr;  // [.., D rounded up to 4]

  FW_HOST_DEVICE bool present() const { return h != nullptr; }
};

FW_HOST_DEVICE inline int round_up_to_4(int D) { return (D + 3) / 4 * 4; }

// Cuts the memory of a block into arrays; without a base it measures.
class BlockLayout {
 public:
  FW_HOST_DEVICE explicit BlockLayout(float* base = nullptr) : base_(base) {}

  FW_HOST_DEVICE float* take(int count) {
    float* array = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count + 31) / 32 * 32;
    return array;
  }
  FW_HOST_DEVICE Matrix matrix(int rows, int columns) {
    const int ld = (columns + 31) / 32 * 32;
    return {take(rows * ld), ld, 0};
  }
  FW_HOST_DEVICE size_t bytes() const { return used_ * sizeof(float); }

 private:
  float* base_;
  size_t used_ = 0;
};

struct MiniBatch {
  Matrix k;    // [2 C, D] keys, and below them the queries
  Matrix x;    // [2 C, D] z = k h + c, LN(z) in the backward; below scale q h + c, then y
  Matrix v;    // [C, D], then u = w x + b - v + k
  Matrix n;    // [C, D]
  Matrix P;    // [C, C] lower(scale q k^T + 1)
  Matrix h;    // [D, D]
  float* c;    // [D]
  float* eta;  // [C]

  FW_HOST_DEVICE void lay_out(BlockLayout& layout, int C, int D) {
    k = layout.matrix(2 * C, D);
    x = layout.matrix(2 * C, D);
    v = layout.matrix(C, D);
    n = layout.matrix(C, D);
    P = layout.matrix(C, C);
    h = layout.matrix(round_up_to_4(D), D);
    c = layout.take(round_up_to_4(D));
    eta = layout.take(C);
  }
};

// The tokens of a mini-batch.
struct Tokens {
  int64_t batch, begin;
  int head, count;  // tokens; rows beyond them extend the mini-batch
  int next;         // where the next mini-batch is that has all its tokens, relative to this one; 0: there is none
};

namespace {

// The four columns of a lane of the warp that has a row.
struct RowLane {
  int warp, warps, lane;
  int columns;  // how many of the four exist
  float w[4], b[4];

  __device__ RowLane(const DeviceProblem& p, int head)
      : warp(static_cast<int>(threadIdx.x) / kWarpSize),
        warps(static_cast<int>(blockDim.x) / kWarpSize),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        columns(min(max(p.head_dim - 4 * lane, 0), 4)) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      w[e] = e < columns ? load_float(p.w.data, p.w.dtype, head * p.w.strides[0] + (4 * lane + e) * p.w.strides[1]) : 0;
      b[e] = e < columns ? load_float(p.b.data, p.b.dtype, head * p.b.strides[0] + (4 * lane + e) * p.b.strides[1]) : 0;
    }
  }

  __device__ __forceinline__ void load(const Matrix& x, int row, float (&values)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = 0.0f;
    if (columns > 0) x.load(row, lane, values);
  }
  // 0 in columns that do not exist.
  __device__ __forceinline__ void store(const Matrix& x, int row, const float (&values)[4]) const {
    float kept[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) kept[e] = e < columns ? values[e] : 0.0f;
    if (columns > 0) x.store(row, lane, kept);
  }
  __device__ __forceinline__ float sum(const float (&x)[4]) const {
    return sum_over_lanes<kWarpSize>((x[0] + x[1]) + (x[2] + x[3]));
  }
  __device__ __forceinline__ float dot(const float (&x)[4], const float (&y)[4]) const {
    return sum_over_lanes<kWarpSize>(fmaf(x[0], y[0], x[1] * y[1]) + fmaf(x[2], y[2], x[3] * y[3]));
  }

  // z becomes x = (z - mean) r; returns r = 1 / sqrt(variance + eps).
  __device__ __forceinline__ float normalise(const DeviceProblem& p, float (&z)[4]) const {
    const float mean = sum(z) * p.inverse_head_dim;
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] = e < columns ? z[e] - mean : 0.0f;
    const float r = 1.0f / sqrtf(fmaf(dot(z, z), p.inverse_head_dim, p.eps));
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] *= r;
    return r;
  }
};

// u = w x + b - v + k of x = LN(z), and n = r (y - mean(y) - x mean(x y)) with y = w u; returns mean(x y).
__device__ __forceinline__ float inner_gradient(const DeviceProblem& p, const RowLane& at, const float (&k)[4],
                                                const float (&v)[4], const float (&x)[4], float r, float (&u)[4],
                                                float (&n)[4]) {
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    u[e] = e < at.columns ? fmaf(at.w[e], x[e], at.b[e]) - (v[e] - k[e]) : 0.0f;
    y[e] = at.w[e] * u[e];
  }
  const float mean = at.sum(y) * p.inverse_head_dim, mean_xy = at.dot(x, y) * p.inverse_head_dim;
#pragma unroll
  for (int e = 0; e < 4; ++e) n[e] = e < at.columns ? r * fmaf(-x[e], mean_xy, y[e] - mean) : 0.0f;
  return mean_xy;
}

// ---- Between memory and matrices ------------------------------------------------------------------------------------

// Rows of a [B, T, H, D] tensor, 0 for rows that extend the mini-batch; all 0 of a tensor that is absent. Asks the L2
// cache for those of the mini-batch that comes next.
__device__ __forceinline__ void load_rows(const DeviceTensor& x, const Tokens& tokens, int rows, int D,
                                          const Matrix& to) {
  const int across = round_up_to_4(D) / 4;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * across; i += static_cast<int>(blockDim.x)) {
    const int row = i / across, q = i % across;
    float values[4] = {};
    if (x.present() && row < tokens.count) {
      const char* from = element_at(x.data, x.dtype, row_offset(x, tokens.batch, tokens.begin + row, tokens.head));
      const RawVec4 raw = load_part(x, from, 4 * q, D);
      if (q % 8 == 0 && tokens.next != 0) {
        prefetch(from + byte_offset(x.dtype, tokens.next * x.strides[1] + 4 * q * x.strides[3]));
      }
      with_type(x.dtype, [&](auto type) { decode_vec4<type.value>(raw, values); });
    }
    to.store(row, q, values);
  }
}

// Four columns of a row of a [B, T, H, D] tensor, where the row exists.
__device__ __forceinline__ void store_part(const DeviceTensor& x, const Tokens& tokens, int row, int column, int D,
                                           const float (&values)[4]) {
  if (row >= tokens.count) return;
  const int64_t offset = row_offset(x, tokens.batch, tokens.begin + row, tokens.head);
  if (x.aligned_vec4) {
    with_type(x.dtype,
              [&](auto type) { store_vec4<type.value>(element_at(x.data, type.value, offset + column), values); });
  } else {
    scatter_vec4(x.data, x.dtype, offset + column * x.strides[3], x.strides[3], D - column, values);
  }
}

__device__ __forceinline__ void load_etas(const DeviceProblem& p, const Tokens& tokens, float* eta) {
  for (int i = static_cast<int>(threadIdx.x); i < p.mini_batch; i += static_cast<int>(blockDim.x)) {
    eta[i] = i < tokens.count
                 ? load_float(p.eta.data, p.eta.dtype, row_offset(p.eta, tokens.batch, tokens.begin + i, tokens.head))
                 : 0.0f;
  }
}

// A state, or 0 where there is none.
__device__ __forceinline__ void load_state(const DeviceStates& h, const DeviceTensor& c, int64_t sequence, int head,
                                           int D, const Matrix& to_h, float* to_c) {
  const int width = round_up_to_4(D);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < width * width; i += static_cast<int>(blockDim.x)) {
    const int row = i / width, column = i % width;
    const bool exists = h.present() && row < D && column < D;
    const int64_t offset = sequence * h.outer_strides[0] + head * h.outer_strides[1] + row * h.k_stride;
    to_h.at(row, column) = exists ? load_float(h.data, h.dtype, offset + column * h.v_stride) : 0.0f;
  }
  for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
    const int64_t offset = sequence * c.strides[0] + head * c.strides[1] + i * c.strides[2];
    to_c[i] = c.present() && i < D ? load_float(c.data, c.dtype, offset) : 0.0f;
  }
}

__device__ __forceinline__ void store_state(const DeviceStates& h, const DeviceTensor& c, int64_t sequence, int head,
                                            int D, const Matrix& from_h, const float* from_c) {
  if (h.present()) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < D * D; i += static_cast<int>(blockDim.x)) {
      const int row = i / D, column = i % D;
      const int64_t offset = sequence * h.outer_strides[0] + head * h.outer_strides[1] + row * h.k_stride;
      static_cast<float*>(h.data)[offset + column * h.v_stride] = from_h.at(row, column);
    }
  }
  if (!c.present()) return;
  for (int i = static_cast<int>(threadIdx.x); i < D; i += static_cast<int>(blockDim.x)) {
    static_cast<float*>(c.data)[sequence * c.strides[0] + head * c.strides[1] + i * c.strides[2]] = from_c[i];
  }
}

// Between a kept state and the matrix; `copy` gets a vec4 of each.
template <class Copy>
__device__ __forceinline__ void for_each_kept(const KeptStates& kept, int64_t number, int D, const MiniBatch& mb,
                                              const Copy& copy) {
  const int width = round_up_to_4(D), across = width / 4;
  auto* h = reinterpret_cast<float4*>(kept.h + number * width * width);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < width * across; i += static_cast<int>(blockDim.x)) {
    copy(h[i], mb.h.vec4(i / across, i % across));
  }
  auto* c = reinterpret_cast<float4*>(kept.c + number * width);
  for (int i = static_cast<int>(threadIdx.x); i < across; i += static_cast<int>(blockDim.x)) {
    copy(c[i], reinterpret_cast<float4*>(mb.c)[i]);
  }
}

// ---- Products -------------------------------------------------------------------------------------------------------

// k h + c, and below, if there are queries, scale q h + c.
__device__ __forceinline__ void read_state(const DeviceProblem& p, bool queries, const MiniBatch& mb,
                                           TileDealer& dealer) {
  const int C = p.mini_batch, width = round_up_to_4(p.head_dim);
  dealer.deal(queries ? 2 * C : C, width, [&](Tile& tile) {
    tile.add(mb.k, mb.h, width);
    const float scale = tile.i < C ? 1.0f : p.scale;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = fmaf(scale, tile.x[r][e], mb.c[tile.j + e]);
      mb.x.store(tile.i + r, tile.j / 4, values);
    }
  });
}

__device__ __forceinline__ void make_p(const DeviceProblem& p, const MiniBatch& mb, TileDealer& dealer) {
  const int C = p.mini_batch;
  const Matrix q = mb.k.from_row(C);
  dealer.deal(C, C, [&](Tile& tile) {
    if (tile.j <= tile.i) tile.add_right_transposed(q, mb.k, round_up_to_4(p.head_dim));
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = tile.j + e <= tile.i + r ? fmaf(p.scale, tile.x[r][e], 1.0f) : 0.0f;
      mb.P.store(tile.i + r, tile.j / 4, values);
    }
  });
}

// y = scale q h + c - eta (P n)
__device__ __forceinline__ void make_outputs(const DeviceProblem& p, const MiniBatch& mb, TileDealer& dealer) {
  const int C = p.mini_batch;
  const Matrix y = mb.x.from_row(C);
  dealer.deal(C, round_up_to_4(p.head_dim), [&](Tile& tile) {
    tile.add(mb.P, mb.n, tile.i + 4);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
      y.load(tile.i + r, tile.j / 4, values);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = fmaf(-mb.eta[tile.i + r], tile.x[r][e], values[e]);
      y.store(tile.i + r, tile.j / 4, values);
    }
  });
}

// h = h - eta_L k^T n, c = c - eta_L sum n, the sums being complete before the step is taken.
__device__ __forceinline__ void move_state(const DeviceProblem& p, const Tokens& tokens, const MiniBatch& mb,
                                           TileDealer& dealer) {
  const int width = round_up_to_4(p.head_dim);
  const float eta = mb.eta[tokens.count - 1];
  dealer.deal(width, width, [&](Tile& tile) {
    tile.add_left_transposed(mb.k, mb.n, 0, tokens.count, [](int) { return 1.0f; });
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float values[4];
      mb.h.load(tile.i + r, tile.j / 4, values);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = fmaf(-eta, tile.x[r][e], values[e]);
      mb.h.store(tile.i + r, tile.j / 4, values);
    }
  });
  for (int d = static_cast<int>(threadIdx.x); d < p.head_dim; d += static_cast<int>(blockDim.x)) {
    float total = 0.0f;
    for (int i = 0; i < p.mini_batch; ++i) total += mb.n.at(i, d);
    mb.c[d] = fmaf(-eta, total, mb.c[d]);
  }
}

}  // namespace

// The largest of what the device has, or scratch memory for twice as many blocks as there are multiprocessors.
inline Config config_for(size_t bytes, int64_t heads, int multiprocessors, size_t shared_limit) {
  Config config;
  config.bytes = bytes;
  config.in_shared = bytes <= shared_limit;
  config.blocks = std::min<int64_t>(heads, config.in_shared ? int64_t{1} << 30 : 2 * multiprocessors);
  return config;
}

}  // namespace fastweight::cuda::ttt::chunk_fp32
