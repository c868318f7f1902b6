// Forward by mini-batches on tensor cores. For one mini-batch with start state h, c (rows are tokens):
//
//     z = k h + c,   n = inner gradients of z                        over all C rows, extension rows among them
//     P = lower(scale q k^T + 1)
//     y = scale q h + c - eta (P n),   o = y + w LN(y) + b           real rows
//     h = h - eta_L k^T n,   c = c - eta_L sum n
//
// A block has one (sequence, head) for all its mini-batches, a warp 16 columns of everything. The state stays in the
// warp's registers, as C tiles of h^T in fp32. Rounded to 16 bits these registers are the right operands of k h and q h
// as they lie; n, transposed 8 x 8 within the warp, is both the left operand of n^T k and the right one of P n. The
// 16-bit operands are q, k, v, P, n and h; everything else is fp32.
//
// The norms couple the columns, so the warps exchange row sums through shared memory. Two barriers per mini-batch m:
//
//     z_m, P_m, statistics of z_m and of y_{m-1}   | A |   o_{m-1}, sums of the inner gradient   | B |   n, h, q h, y_m
//
// A mini-batch of 16 tokens leaves registers to move q h before A and o_{m-1} behind B, off the chain from state to
// state.
//
// q, k, v and eta of the next mini-batches are on their way meanwhile. Who may overwrite what:
//   - row sums before A are read right after A, those before B right after B: one buffer each;
//   - P_m, where it is exchanged, is written before A and read after B, so P_{m+1} has another buffer;
//   - the stage of mini-batch m - 1 is last read after B of m - 1; the copies into it start after A of m.
#pragma once

#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/tile_rows.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/ttt_linear/chunk.cuh"

namespace fastweight::cuda::ttt {
namespace {

constexpr int kTileRows = 16;  // tokens of an A fragment

// Whether work of the mini-batch is done ahead of need, see above.
template <int kC>
constexpr bool kAhead = kC == kTileRows;

// n is rounded to 16 bits as a multiple of this. The inner gradient grows with 1 / sqrt(variance + eps), beyond the
// range of fp16 where a state is nearly constant.
template <DType kType>
constexpr float kGradientUnit = kType == DType::kF16 ? 64.0f : 1.0f;

// What a lane has of C tiles of 16 tokens x 16 columns: of tokens g and g + 8 the columns 4t .. 4t + 3. Column 4t + e
// is column 2t + e % 2 of tile e / 2, so that a lane's columns lie together in memory.
template <int kC>
using Rows = float[kC / kTileRows][2][4];

template <int kC>
__device__ __forceinline__ float& element(Rows<kC>& x, int tile, int half, int e) {
  return x[tile][e / 2][2 * half + e % 2];
}

// The position of a lane.
struct Lane {
  int warp, lane, g, t;
  int column;             // its first
  int columns;            // how many of its four exist
  float inverse_columns;  // of how many of the warp's sixteen

  __device__ explicit Lane(int D)
      : warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        g(lane / 4),
        t(lane % 4),
        column(kWarpColumns * warp + 4 * t),
        columns(min(max(D - column, 0), 4)),
        inverse_columns(1.0f / static_cast<float>(min(D - kWarpColumns * warp, kWarpColumns))) {}

  __device__ int row(int tile, int half) const { return kTileRows * tile + 8 * half + g; }
};

// What a lane knows of its columns: the layer norm's parameters, the state bias, and 1 for each that exists. All are 0
// for those that do not.
struct Columns {
  float w[4], b[4], c[4], exists[4];
};

// The lane's numbers along the last axis; 0 where there are none.
__device__ __forceinline__ void load_columns(const DeviceTensor& x, int64_t offset, int64_t stride, const Lane& at,
                                             float (&values)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) values[e] = 0.0f;
  if (!x.present()) return;
  with_type(x.dtype, [&](auto type) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < at.columns) values[e] = load_float(x.data, type.value, offset + (at.column + e) * stride);
    }
  });
}

// h^T as C tiles [16 columns x 8 keys], in the order of columns that `Rows` asks for. access(offset, element) for those
// that exist.
template <int kD, class Access>
__device__ __forceinline__ void for_each_element(const DeviceStates& states, int64_t sequence, int head, int D,
                                                 const Lane& at, float (&h)[kD / 8][4], const Access& access) {
  const int64_t base = sequence * states.outer_strides[0] + head * states.outer_strides[1];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = kWarpColumns * at.warp + 4 * (at.g / 2) + 2 * half + at.g % 2;
    if (column >= D) continue;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int64_t offset = base + column * states.v_stride + (2 * at.t + e) * states.k_stride;
#pragma unroll
      for (int n = 0; n < kD / 8; ++n, offset += 8 * states.k_stride) {
        if (8 * n + 2 * at.t + e < D) access(offset, h[n][2 * half + e]);
      }
    }
  }
}

// The operands of the mini-batches of a sequence on their way to shared memory, in order. Rows are copied in pieces of
// 16 bytes that never see a register where the layout allows it. Step sizes pass through registers: they are loaded a
// mini-batch before they are stored, and decoded only then.
template <int kD, int kC>
class Feed {
 public:
  __device__ Feed(const ChunkArgs& args, const SequenceSpan& span, int head) : args_(args) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      rows_[i] = static_cast<const uint16_t*>(tensor(i).data) + row_offset(tensor(i), span.batch, span.begin, head);
    }
    const DeviceTensor& eta = args.problem.eta;
    eta_ = element_at(eta.data, eta.dtype, row_offset(eta, span.batch, span.begin + threadIdx.x, head));
    load_eta(span.length);
  }

  // Starts the copies of the next mini-batch, which begins `left` tokens before the end of the sequence; nothing where
  // that is behind the end. The caller commits them and waits.
  __device__ __forceinline__ void next(int64_t left, Stage<kD, kC>& stage) {
    if (left <= 0) return;
    const int rows = static_cast<int>(min(left, int64_t{kC})), D = args_.problem.head_dim;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const DeviceTensor& x = tensor(i);
      if (args_.vectors) {
        copy_rows(rows_[i], x.strides[1], rows, {stage.rows[i]});
      } else {
        load_tile<kC, kD>({stage.rows[i]}, x, rows_[i] - static_cast<const uint16_t*>(x.data), rows, 0, D, false);
      }
      rows_[i] += kC * x.strides[1];
    }
    store_eta(stage.eta);
    eta_ += byte_offset(args_.problem.eta.dtype, kC * args_.problem.eta.strides[1]);
    load_eta(left - kC);
  }

 private:
  static constexpr int kSegments = SharedTile<kD>::kSegments;
  static constexpr int kEtas = kC / kWarpSize > 1 ? kC / kWarpSize : 1;  // of a thread, when a block is one warp

  __device__ __forceinline__ const DeviceTensor& tensor(int i) const {
    return i == 0 ? args_.problem.q : i == 1 ? args_.problem.k : args_.problem.v;
  }

  __device__ __forceinline__ void copy_rows(const uint16_t* first, int64_t stride, int rows,
                                            const SharedTile<kD>& tile) const {
    const int segment = threadIdx.x % kSegments, step = blockDim.x / kSegments;
    for (int row = threadIdx.x / kSegments; row < kC; row += step) {
      const bool valid = row < rows && 8 * segment < args_.problem.head_dim;
      const int64_t offset = row * stride + 8 * segment;
      copy_async(tile.address(row, segment), first + (valid ? offset : 0), valid);
    }
  }

  __device__ __forceinline__ void load_eta(int64_t left) {
    const DeviceTensor& eta = args_.problem.eta;
#pragma unroll
    for (int i = 0; i < kEtas; ++i) {
      const int row = threadIdx.x + i * blockDim.x;
      eta_bits_[i] = 0;
      if (row < kC && row < left) {
        eta_bits_[i] = load_bits(eta_ + byte_offset(eta.dtype, i * blockDim.x * eta.strides[1]), eta.dtype);
      }
    }
  }
  __device__ __forceinline__ void store_eta(float* eta) const {
#pragma unroll
    for (int i = 0; i < kEtas; ++i) {
      const int row = threadIdx.x + i * blockDim.x;
      if (row < kC) eta[row] = decode(eta_bits_[i], args_.problem.eta.dtype);
    }
  }

  const ChunkArgs& args_;
  const uint16_t* rows_[3];  // the next mini-batch's first rows of q, k and v
  const char* eta_;          // the thread's step size in it
  uint32_t eta_bits_[kEtas];
};

// x = kC rows times h.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void read_state(const SharedTile<kD>& rows, int first, const float (&h)[kD / 8][4],
                                           const Lane& at, Rows<kC>& x) {
  // A mini-batch of 16 tokens would be one dependent chain of products: even and odd steps go apart.
  constexpr int kChains = kC == kTileRows ? 2 : 1;
  Rows<kC> sums[kChains] = {};
#pragma unroll
  for (int m = 0; m < kD / 16; ++m) {
    uint32_t b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = h[2 * m + i % 2] + i / 2 * 2;
      b[i] = pack<kType>(pair[0], pair[1]);
    }
#pragma unroll
    for (int tile = 0; tile < kC / kTileRows; ++tile) {
      uint32_t a[4];
      rows.load_a(first + kTileRows * tile, m, at.lane, a);
      mma<kType>(sums[m % kChains][tile][0], a, b[0], b[1]);
      mma<kType>(sums[m % kChains][tile][1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[tile][n][i] = kChains == 2 ? sums[0][tile][n][i] + sums[kChains - 1][tile][n][i] : sums[0][tile][n][i];
      }
    }
  }
}

// P = lower(scale q k^T + 1) in 16 bits, in blocks of 16 x 16 on and below the diagonal. Of 16 tokens every warp makes
// the one block for itself, in registers; more blocks are dealt to the warps and exchanged.
template <DType kType, int kD, int kC>
class Moves {
 public:
  __device__ explicit Moves(uint16_t* exchanged) : exchanged_{exchanged} {}

  __device__ __forceinline__ void make(Stage<kD, kC>& stage, float scale, const Lane& at) {
    if constexpr (kAhead<kC>) {
      block(stage, 0, 0, scale, at, kept_);
    } else {
      constexpr int kBlocks = kC / kTileRows * (kC / kTileRows + 1) / 2;
      for (int n = at.warp; n < kBlocks; n += static_cast<int>(blockDim.x) / kWarpSize) {
        const int i = n < 1 ? 0 : n < 3 ? 1 : n < 6 ? 2 : 3, j = n - i * (i + 1) / 2;
        uint32_t a[4];
        block(stage, i, j, scale, at, a);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          *reinterpret_cast<uint32_t*>(&exchanged_.at(at.row(i, r % 2), kTileRows * j + r / 2 * 8 + 2 * at.t)) = a[r];
        }
      }
    }
  }
  __device__ __forceinline__ void get(int i, int j, const Lane& at, uint32_t (&a)[4]) const {
    if constexpr (kAhead<kC>) {
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = kept_[r];
    } else {
      exchanged_.load_a(kTileRows * i, j, at.lane, a);
    }
  }

 private:
  // Block (i, j) as an A fragment.
  __device__ __forceinline__ static void block(Stage<kD, kC>& stage, int i, int j, float scale, const Lane& at,
                                               uint32_t (&fragment)[4]) {
    const SharedTile<kD> q = stage.q(), k = stage.k();
    float c[2][4] = {};
#pragma unroll
    for (int m = 0; m < kD / 16; ++m) {
      uint32_t a[4], b[4];
      q.load_a(kTileRows * i, m, at.lane, a);
      k.load_b(kTileRows * j, m, at.lane, b);
      mma<kType>(c[0], a, b[0], b[1]);
      mma<kType>(c[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int column = kTileRows * j + 8 * n + 2 * at.t + r % 2;
        const float move = fmaf(scale, c[n][r], 1.0f);
        c[n][r] = column <= at.row(i, r / 2) ? move : 0.0f;
      }
    }
    pack_a<kType>(c[0], c[1], fragment);
  }

  SharedTile<64> exchanged_;
  uint32_t kept_[4];
};

// The warp's share of the statistics of all rows.
template <int kD, int kC>
__device__ __forceinline__ void put_statistics(Rows<kC>& x, const Columns& columns, const Lane& at,
                                               RowSums<kD, kC>& sums) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) sum += element<kC>(x, tile, half, e);
      const float mean = sum_over_lanes<4>(sum) * at.inverse_columns;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float centred = columns.exists[e] * (element<kC>(x, tile, half, e) - mean);
        squares = fmaf(centred, centred, squares);
      }
      squares = sum_over_lanes<4>(squares);
      if (at.t == 0) sums[at.row(tile, half)][at.warp] = make_float2(mean, squares);
    }
  }
}

// make(row) for all rows of the lane. The four lanes that have the same rows share the work where a row is more than
// one each.
template <int kC, class Make>
__device__ __forceinline__ void for_rows(const Lane& at, const Make& make, float2 (&result)[kC / 8]) {
  if constexpr (kC == kTileRows) {
#pragma unroll
    for (int r = 0; r < kC / 8; ++r) result[r] = make(8 * r + at.g);
  } else {
#pragma unroll
    for (int r = 0; r < kC / 8; r += 4) {
      const float2 own = make(8 * (r + at.t) + at.g);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        result[r + t].x = __shfl_sync(kAllLanes, own.x, at.lane - at.t + t);
        result[r + t].y = __shfl_sync(kAllLanes, own.y, at.lane - at.t + t);
      }
    }
  }
}

// Mean and 1 / sqrt(variance + eps) of the rows from all warps' shares: the means of parts, weighted, and the squared
// distances from the common mean.
template <int kD, int kC>
__device__ __forceinline__ void get_norms(const RowSums<kD, kC>& sums, const DeviceProblem& p, const Lane& at,
                                          float2 (&norms)[kC / 8]) {
  constexpr int kWarps = kD / kWarpColumns;
  const auto D = static_cast<float>(p.head_dim);
  const auto columns_of = [&](int w) { return fminf(fmaxf(D - kWarpColumns * w, 0.0f), kWarpColumns); };
  for_rows<kC>(
      at,
      [&](int row) {
        float2 share[kWarps];
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          share[w] = sums[row][w];
          sum = fmaf(columns_of(w), share[w].x, sum);
        }
        const float mean = sum * p.inverse_head_dim;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float distance = share[w].x - mean;
          squares += fmaf(columns_of(w) * distance, distance, share[w].y);
        }
        return make_float2(mean, rsqrtf(fmaf(squares, p.inverse_head_dim, p.eps)));
      },
      norms);
}

// The lane's four elements of a row of a tile.
template <DType kType, int kD>
__device__ __forceinline__ void load_four(const SharedTile<kD>& tile, int row, int column, float (&values)[4]) {
  const uint2 words = *reinterpret_cast<const uint2*>(&tile.at(row, column));
  const float2 low = unpack<kType>(words.x), high = unpack<kType>(words.y);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = high.x;
  values[3] = high.y;
}

template <int kC>
__device__ __forceinline__ void add_bias(const Columns& columns, Rows<kC>& z) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) element<kC>(z, tile, half, e) += columns.c[e];
    }
  }
}

// b + k - v, what is not of the state in the residual of the inner loss. Kept in registers from before A on where there
// are enough of them, else read again where it is needed.
template <DType kType, int kD, int kC>
struct Residuals {
  Rows<kTileRows> kept;

  __device__ __forceinline__ void prepare(Stage<kD, kC>& stage, const Columns& columns, const Lane& at) {
    if constexpr (kAhead<kC>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[4];
        read(stage, columns, at.row(0, half), at, values);
#pragma unroll
        for (int e = 0; e < 4; ++e) element<kTileRows>(kept, 0, half, e) = values[e];
      }
    }
  }
  __device__ __forceinline__ void get(Stage<kD, kC>& stage, const Columns& columns, int tile, int half, const Lane& at,
                                      float (&values)[4]) {
    if constexpr (kAhead<kC>) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = element<kTileRows>(kept, 0, half, e);
    } else {
      read(stage, columns, at.row(tile, half), at, values);
    }
  }

 private:
  __device__ __forceinline__ static void read(Stage<kD, kC>& stage, const Columns& columns, int row, const Lane& at,
                                              float (&values)[4]) {
    float k[4], v[4];
    load_four<kType>(stage.k(), row, at.column, k);
    load_four<kType>(stage.v(), row, at.column, v);
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = columns.b[e] - v[e] + k[e];
  }
};

// z becomes x = LN(z); the warp's share of the sums of y and x y, where y = w (w x + b - v + k). Both are 0 in columns
// that do not exist, as w is.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void inner_sums(Stage<kD, kC>& stage, Residuals<kType, kD, kC>& residuals,
                                           const float2 (&norms)[kC / 8], const Columns& columns, const Lane& at,
                                           Rows<kC>& z, RowSums<kD, kC>& sums) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float residual[4], sum = 0.0f, along = 0.0f;
      residuals.get(stage, columns, tile, half, at, residual);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = element<kC>(z, tile, half, e);
        x = (x - norms[2 * tile + half].x) * norms[2 * tile + half].y;
        const float y = columns.w[e] * fmaf(columns.w[e], x, residual[e]);
        sum += y;
        along = fmaf(x, y, along);
      }
      sum = sum_over_lanes<4>(sum);
      along = sum_over_lanes<4>(along);
      if (at.t == 0) sums[at.row(tile, half)][at.warp] = make_float2(sum, along);
    }
  }
}

// n = r (y - mean(y) - x mean(x y)) in place of x; `total` is its sum over the rows of the lane.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void inner_gradients(Stage<kD, kC>& stage, Residuals<kType, kD, kC>& residuals,
                                                const RowSums<kD, kC>& sums, const float2 (&norms)[kC / 8],
                                                const DeviceProblem& p, const Columns& columns, const Lane& at,
                                                Rows<kC>& x, float (&total)[4]) {
  constexpr int kWarps = kD / kWarpColumns;
  float2 means[kC / 8];  // of y and x y
  for_rows<kC>(
      at,
      [&](int row) {
        float sum = 0.0f, along = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          sum += sums[row][w].x;
          along += sums[row][w].y;
        }
        return make_float2(sum * p.inverse_head_dim, along * p.inverse_head_dim);
      },
      means);
#pragma unroll
  for (int e = 0; e < 4; ++e) total[e] = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float residual[4];
      residuals.get(stage, columns, tile, half, at, residual);
      const auto [mean, along] = means[2 * tile + half];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& n = element<kC>(x, tile, half, e);
        const float y = columns.w[e] * fmaf(columns.w[e], n, residual[e]);
        n = columns.exists[e] * norms[2 * tile + half].y * fmaf(-n, along, y - mean);
        total[e] += n;
      }
    }
  }
}

// n^T in 16 bits: fragments [16 columns x 16 tokens], 0 for the extension rows.
template <DType kType, int kC>
__device__ __forceinline__ void transpose_gradients(Rows<kC>& n, int rows, const Lane& at,
                                                    uint32_t (&fragments)[kC / kTileRows][4]) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float unit = at.row(tile, half) < rows ? 1.0f / kGradientUnit<kType> : 0.0f;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        fragments[tile][2 * half + m] =
            transpose_8x8(pack<kType>(unit * n[tile][m][2 * half], unit * n[tile][m][2 * half + 1]));
      }
    }
  }
}

// h^T = h^T - eta n^T k
template <DType kType, int kD, int kC>
__device__ __forceinline__ void move_state(Stage<kD, kC>& stage, const uint32_t (&n)[kC / kTileRows][4], float eta,
                                           const Lane& at, float (&h)[kD / 8][4]) {
  const SharedTile<kD> k = stage.k();
#pragma unroll
  for (int m = 0; m < kD / 16; ++m) {
    float sums[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < kC / kTileRows; ++tile) {
      uint32_t b[4];
      k.load_b_transposed(kTileRows * tile, m, at.lane, b);
      mma<kType>(sums[0], n[tile], b[0], b[1]);
      mma<kType>(sums[1], n[tile], b[2], b[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) h[2 * m + half][i] = fmaf(-eta, sums[half][i], h[2 * m + half][i]);
    }
  }
}

// y = scale q h + c - eta (P n), with q h from before A or else made here.
template <DType kType, int kD, int kC>
__device__ __forceinline__ void read_outputs(Stage<kD, kC>& stage, const Moves<kType, kD, kC>& moves,
                                             const uint32_t (&n)[kC / kTileRows][4], const float (&h)[kD / 8][4],
                                             float scale, const Columns& columns, const Lane& at, Rows<kTileRows>& qh,
                                             Rows<kC>& y) {
#pragma unroll
  for (int tile = 0; tile < kC / kTileRows; ++tile) {
    if constexpr (!kAhead<kC>) read_state<kType, kD, kTileRows>(stage.q(), kTileRows * tile, h, at, qh);
    Rows<kTileRows> sums = {};
#pragma unroll
    for (int m = 0; m <= tile; ++m) {
      uint32_t a[4];
      moves.get(tile, m, at, a);
      mma<kType>(sums[0][0], a, n[m][0], n[m][2]);
      mma<kType>(sums[0][1], a, n[m][1], n[m][3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float eta = stage.eta[at.row(tile, half)] * kGradientUnit<kType>;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        element<kC>(y, tile, half, e) = fmaf(-eta, element<kTileRows>(sums, 0, half, e),
                                             fmaf(scale, element<kTileRows>(qh, 0, half, e), columns.c[e]));
      }
    }
  }
}

// o = y + w LN(y) + b for the first `count` rows in one type. `o` points to the lane's first column of the first row.
template <DType kType, int kC>
__device__ __forceinline__ void store_outputs_as(const DeviceTensor& x, char* o, int count,
                                                 const float2 (&norms)[kC / 8], const Columns& columns, const Lane& at,
                                                 Rows<kC>& y) {
#pragma unroll
  for (int r = 0; r < kC / 8; ++r) {
    float values[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value = element<kC>(y, r / 2, r % 2, e);
      values[e] = value + fmaf(columns.w[e], (value - norms[r].x) * norms[r].y, columns.b[e]);
    }
    const int row = 8 * r + at.g;
    char* address = o + byte_offset(kType, row * x.strides[1]);
    if (x.quads) {
      if (row < count) store_quad<kType>(address, values);
    } else {
      scatter_quad(address, kType, 0, x.strides[3], row < count ? at.columns : 0, values);
    }
  }
}

// o has the type of q or is fp32.
template <DType kType, int kC>
__device__ __forceinline__ void store_outputs(const DeviceTensor& x, char* o, int count, const float2 (&norms)[kC / 8],
                                              const Columns& columns, const Lane& at, Rows<kC>& y) {
  if (at.columns == 0) return;
  if (x.dtype == kType) {
    store_outputs_as<kType, kC>(x, o, count, norms, columns, at, y);
  } else {
    store_outputs_as<DType::kF32, kC>(x, o, count, norms, columns, at, y);
  }
}

__device__ __forceinline__ void wait_for_next(int stages) {
  if (stages >= 4) {
    wait_copies<2>();
  } else if (stages == 3) {
    wait_copies<1>();
  } else {
    wait_copies<0>();
  }
}

template <DType kType, int kD, int kC>
__device__ __forceinline__ void run_part(const ChunkArgs& args, int64_t sequence, int head, int stages,
                                         Exchange<kD, kC>& exchange, Stage<kD, kC>* stage) {
  const DeviceProblem& p = args.problem;
  const int D = p.head_dim;
  const Lane at(D);
  const SequenceSpan span = sequence_at(p.sequences, sequence);
  Feed<kD, kC> feed(args, span, head);
  for (int s = 0; s < stages - 1; ++s) {
    feed.next(span.length - s * kC, stage[s]);
    commit_copies();
  }

  Columns columns;
  load_columns(p.w, head * p.w.strides[0], p.w.strides[1], at, columns.w);
  load_columns(p.b, head * p.b.strides[0], p.b.strides[1], at, columns.b);
  load_columns(args.initial_state_bias,
               sequence * args.initial_state_bias.strides[0] + head * args.initial_state_bias.strides[1],
               args.initial_state_bias.strides[2], at, columns.c);
#pragma unroll
  for (int e = 0; e < 4; ++e) columns.exists[e] = e < at.columns ? 1.0f : 0.0f;
  float h[kD / 8][4] = {};
  if (args.initial_state.present()) {
    const DeviceStates& states = args.initial_state;
    with_type(states.dtype, [&](auto type) {
      for_each_element<kD>(states, sequence, head, D, at, h,
                           [&](int64_t offset, float& x) { x = load_float(states.data, type.value, offset); });
    });
  }

  wait_for_next(stages);
  __syncthreads();
  Rows<kC> y = {};  // of the mini-batch before
  char* o = element_at(args.o.data, args.o.dtype,
                       row_offset(args.o, span.batch, span.begin, head) + at.column * args.o.strides[3]);
  const int64_t o_step = byte_offset(args.o.dtype, kC * args.o.strides[1]);
  int slot = 0, parity = 0;
  int64_t left = span.length;
  for (bool first = true; left > 0; first = false, left -= kC) {
    Stage<kD, kC>& current = stage[slot];
    Stage<kD, kC>& last = stage[slot == 0 ? stages - 1 : slot - 1];
    slot = slot + 1 == stages ? 0 : slot + 1;
    Moves<kType, kD, kC> moves(exchange.P[parity]);
    parity ^= 1;
    const int rows = static_cast<int>(min(left, int64_t{kC}));

    Rows<kC> z;
    Rows<kTileRows> qh;  // of the first 16 tokens
    Residuals<kType, kD, kC> residuals;
    read_state<kType, kD, kC>(current.k(), 0, h, at, z);
    add_bias<kC>(columns, z);
    put_statistics<kD, kC>(z, columns, at, exchange.inner());
    if constexpr (kAhead<kC>) read_state<kType, kD, kTileRows>(current.q(), 0, h, at, qh);
    residuals.prepare(current, columns, at);
    moves.make(current, p.scale, at);
    put_statistics<kD, kC>(y, columns, at, exchange.outer());
    __syncthreads();  // A

    feed.next(left - (stages - 1) * kC, last);
    commit_copies();
    float2 norms[kC / 8], outer[kC / 8];
    get_norms<kD, kC>(exchange.outer(), p, at, outer);
    const auto store = [&] {
      if (first) return;
      store_outputs<kType, kC>(args.o, o, kC, outer, columns, at, y);
      o += o_step;
    };
    if constexpr (!kAhead<kC>) store();
    get_norms<kD, kC>(exchange.inner(), p, at, norms);
    inner_sums(current, residuals, norms, columns, at, z, exchange.gradient());
    wait_for_next(stages);
    __syncthreads();  // B

    float total[4];
    inner_gradients(current, residuals, exchange.gradient(), norms, p, columns, at, z, total);
    uint32_t n[kC / kTileRows][4];
    transpose_gradients<kType, kC>(z, rows, at, n);
    const float last_eta = current.eta[rows - 1];
    const auto read = [&] { read_outputs<kType, kD, kC>(current, moves, n, h, p.scale, columns, at, qh, y); };
    if constexpr (!kAhead<kC>) read();
    move_state<kType, kD, kC>(current, n, last_eta * kGradientUnit<kType>, at, h);
    if constexpr (kAhead<kC>) {
      store();
      read();
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        total[e] += __shfl_xor_sync(kAllLanes, total[e], distance);
      }
      columns.c[e] = fmaf(-last_eta, total[e], columns.c[e]);
    }
  }
  if (span.length > 0) {
    put_statistics<kD, kC>(y, columns, at, exchange.outer());
    __syncthreads();
    float2 outer[kC / 8];
    get_norms<kD, kC>(exchange.outer(), p, at, outer);
    store_outputs<kType, kC>(args.o, o, static_cast<int>(left + kC), outer, columns, at, y);
  }
  if (args.final_state.present()) {
    auto* states = static_cast<float*>(args.final_state.data);
    for_each_element<kD>(args.final_state, sequence, head, D, at, h,
                         [&](int64_t offset, float& x) { states[offset] = x; });
  }
  if (args.final_state_bias.present() && at.g == 0) {
    const DeviceTensor& bias = args.final_state_bias;
    scatter_quad(bias.data, DType::kF32,
                 sequence * bias.strides[0] + head * bias.strides[1] + at.column * bias.strides[2], bias.strides[2],
                 at.columns, columns.c);
  }
}

// The grid runs over (sequence, head), the last fastest; a smaller grid goes round.
template <DType kType, int kD, int kC>
__global__ void __launch_bounds__(2 * kD, kAhead<kC> ? 1 : 0)
    chunk_kernel(const __grid_constant__ ChunkArgs args, int stages, int64_t parts) {
  auto& exchange = dynamic_shared<Exchange<kD, kC>>();
  auto* stage = reinterpret_cast<Stage<kD, kC>*>(&exchange + 1);
  float2* sums = &exchange.sums[0][0][0];
  for (int i = threadIdx.x; i < 3 * kC * kD / kWarpColumns; i += blockDim.x) sums[i] = make_float2(0.0f, 0.0f);
  __syncthreads();
  for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    const int64_t sequence = part / args.problem.num_heads;
    run_part<kType, kD, kC>(args, sequence, static_cast<int>(part - sequence * args.problem.num_heads), stages,
                            exchange, stage);
    __syncthreads();  // before the next part's first copies
  }
}

}  // namespace

template <DType kType>
void launch_chunk(const ChunkArgs& args, const Context& context) {
  with_shape(args.problem.head_dim, args.problem.mini_batch, [&]<int kD, int kC>() {
    const auto most =
        static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, context.device.index));
    int stages = kMostStages;
    while (stages > kFewestStages && shared_bytes<kD, kC>(stages) > most) --stages;
    const int64_t parts = args.problem.sequences.count * args.problem.num_heads;
    const int warps = (args.problem.head_dim + kWarpColumns - 1) / kWarpColumns;
    launch<chunk_kernel<kType, kD, kC>>("ttt_linear chunk", context,
                                        {static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)),
                                         static_cast<unsigned>(warps * kWarpSize), shared_bytes<kD, kC>(stages)},
                                        args, stages, parts);
  });
}

}  // namespace fastweight::cuda::ttt
