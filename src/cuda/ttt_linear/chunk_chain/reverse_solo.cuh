// The partners of the reverse kernel that have a mini-batch each, see reverse.cuh. All of a row is in four lanes of a warp:
// its sums need no other warp, and what all columns have in common (fragments of q and k, P, Dm) is made once.
#pragma once

#include "cuda/common/tile_rows.cuh"
#include "cuda/ttt_linear/chunk_chain/reverse_rows.cuh"
#include "cuda/ttt_linear/chunk_chain/solo_rows.cuh"
#include "cuda/ttt_linear/kept_states.h"

namespace fastweight::cuda::ttt {
namespace {

// What the chain and a partner tell each other of its mini-batches, one after the other: a partner prepares the next when
// this one is done.
struct SoloSignals {
  static constexpr int kChain = 2 * kSoloDim, kBoth = kChain + kWarpSize;  // threads

  TurnSignal<kPrepared> prepared{kBoth};
  TurnSignal<kDone> done{kBoth};
  WarpSignal<kRowSums> row_sums{kChain};  // B
};

// Brings the rows and the states of a partner's mini-batches, one after the other. Where the layout allows it a lane has
// pieces of 16 bytes, of every fourth row, and pointers to the first.
class SoloLoader {
 public:
  __device__ __forceinline__ SoloLoader(const ReverseArgs& args, const ReverseOrder& order, int64_t first, int head,
                                        int partner, int lane)
      : args_(args), order_(order), head_(head), lane_(lane) {
    number_ = (first + order.number(partner)) * args.chain.problem.num_heads + head;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const DeviceTensor& x = tensor(i);
      pieces_[i] = static_cast<const uint16_t*>(x.data) +
                   row_offset(x, order.batch, order.token(partner) + lane / kSegments, head) + 8 * (lane % kSegments);
    }
  }

  // Starts the copies of mini-batch t; those of its step sizes end in registers.
  __device__ __forceinline__ void start(int64_t t, ReverseStage<kSoloDim>& stage) {
    if (t >= order_.count) return;
    lane_ = opaque_below<kWarpSize>(lane_);  // where its pieces come to lie is computed here, not kept
    const DeviceProblem& p = args_.chain.problem;
    const int count = order_.tokens(t);
    if (args_.vectors) {
      copy_pieces(count, stage);
    } else {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const DeviceTensor& x = tensor(i);
        gather_tile<kTileRows, kSoloDim>({stage.rows[i]}, x, row_offset(x, order_.batch, order_.token(t), head_),
                                         x.present() ? count : 0, 0, kSoloDim, lane_, kWarpSize);
      }
    }
    copy_state(stage);
    number_ -= int64_t{kSolos} * p.num_heads;
    if (lane_ < count) {
      const int64_t offset = row_offset(p.eta, order_.batch, order_.token(t) + lane_, head_);
      eta_bits_ = load_bits(element_at(p.eta.data, p.eta.dtype, offset), p.eta.dtype);
    }
  }

  // The step sizes of mini-batch t, which have arrived by now.
  __device__ __forceinline__ void store_etas(int64_t t, ReverseStage<kSoloDim>& stage) const {
    if (t >= order_.count || lane_ >= kTileRows) return;
    stage.eta[lane_] = lane_ < order_.tokens(t) ? decode(eta_bits_, args_.chain.problem.eta.dtype) : 0.0f;
  }

 private:
  static constexpr int kSegments = SharedTile<kSoloDim>::kSegments, kStep = kWarpSize / kSegments;

  __device__ __forceinline__ const DeviceTensor& tensor(int i) const {
    const DeviceProblem& p = args_.chain.problem;
    return i == 0 ? p.q : i == 1 ? p.k : i == 2 ? p.v : args_.d_o;
  }

  __device__ __forceinline__ void copy_pieces(int count, ReverseStage<kSoloDim>& stage) {
    const int top = lane_ / kSegments, segment = lane_ % kSegments;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const DeviceTensor& x = tensor(i);
      const uint16_t* from = pieces_[i];
#pragma unroll
      for (int row = 0; row < kTileRows; row += kStep, from += kStep * x.strides[1]) {
        copy_async(SharedTile<kSoloDim>{stage.rows[i]}.address(top + row, segment), from,
                   top + row < count && x.present());
      }
      pieces_[i] -= kSolos * kTileRows * x.strides[1];
    }
  }

  __device__ __forceinline__ void copy_state(ReverseStage<kSoloDim>& stage) const {
    const char* h = reinterpret_cast<const char*>(args_.kept.h(number_)) + 16 * lane_;
    const uint32_t to = shared_address(stage.h) + 16 * static_cast<uint32_t>(lane_);
    constexpr int kPieces = 16 * kWarpSize;  // bytes
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(stage.h)) / kPieces; ++i) {
      copy_async(to + kPieces * i, h + kPieces * i, true);
    }
    const char* c = reinterpret_cast<const char*>(args_.kept.c(number_)) + 16 * lane_;
    if (lane_ < kSoloDim / 4) copy_async(shared_address(stage.c) + 16 * lane_, c, true);
  }

  const ReverseArgs& args_;
  const ReverseOrder& order_;
  int head_, lane_;
  int64_t number_;  // of the mini-batch, see ../kept_states.h
  const uint16_t* pieces_[4];
  uint32_t eta_bits_ = 0;
};

// Where the results of a partner's mini-batch begin.
struct SoloOffsets {
  int64_t dq, dk, dv, deta;

  __device__ __forceinline__ SoloOffsets(const ReverseArgs& args, const ReverseOrder& order, int64_t t, int head)
      : dq(row_offset(args.dq, order.batch, order.token(t), head)),
        dk(row_offset(args.dk, order.batch, order.token(t), head)),
        dv(row_offset(args.dv, order.batch, order.token(t), head)),
        deta(row_offset(args.deta, order.batch, order.token(t), head)) {}

  // To the next one of the partner.
  __device__ __forceinline__ void go_on(const ReverseArgs& args) {
    constexpr int kTokens = kSolos * kTileRows;
    dq -= kTokens * args.dq.strides[1];
    dk -= kTokens * args.dk.strides[1];
    dv -= kTokens * args.dv.strides[1];
    deta -= kTokens * args.deta.strides[1];
  }
};

// Rows of a result to memory; values[m] has the 16 keys of tile m as in store_keys.
template <DType kType>
__device__ __forceinline__ void store_rows(const DeviceTensor& x, int64_t offset, int count, const Lane& at,
                                           const float (&values)[kSoloTiles][2][4]) {
  if (x.aligned_vec4 && x.dtype == kType) {
    auto* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(x.data) + offset + at.g * x.strides[1] + 2 * at.t);
#pragma unroll
    for (int half = 0; half < 2; ++half, to += 4 * x.strides[1]) {
      if (at.row(0, half) >= count) continue;
#pragma unroll
      for (int i = 0; i < 2 * kSoloTiles; ++i) {
        const float* pair = &values[i / 2][i % 2][2 * half];
        to[4 * i] = pack<kType>(pair[0], pair[1]);
      }
    }
    return;
  }
#pragma unroll 1
  for (int m = 0; m < kSoloTiles; ++m) {
    float tile[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = m == 0 ? values[0][i / 4][i % 4] : values[1][i / 4][i % 4];
      const float high = m == 2 ? values[2][i / 4][i % 4] : values[3][i / 4][i % 4];
      tile[i / 4][i % 4] = m < 2 ? low : high;
    }
    Lane keys = at;
    keys.warp = m;
    store_keys<kType>(x, offset, count, kSoloDim, keys, tile);
  }
}

// The stages of a partner. What it keeps from one to the next are local variables of `step`.
template <DType kType>
struct SoloPartner {
  const ReverseArgs& args;
  const DeviceProblem& p;
  Lane at;
  const float *w, *b;  // the norm's, in shared memory

  using Stage = ReverseStage<kSoloDim>;
  static constexpr float kMean = 1.0f / kSoloDim;

  __device__ __forceinline__ void four_at(const SharedTile<kSoloDim>& rows, int tile, int half,
                                          float (&values)[4]) const {
    load_four<kType>(rows, at.row(0, half), kWarpColumns * tile + 4 * at.t, values);
  }

  // z = k h + c, y = scale q h + c and P = lower(scale q k^T + 1).
  __device__ __forceinline__ void read_state(Stage& stage, SoloRows& z, SoloRows& y, float (&P)[2][4]) const {
    const uint32_t q = first_fragment(stage.q(), 0, at.lane), k = first_fragment(stage.k(), 0, at.lane);
    const uint32_t k_columns = first_transposed_fragment(stage.k(), 0, at.lane);
    uint32_t q_rows[kSoloTiles][4], k_rows[kSoloTiles][4];
#pragma unroll
    for (int m = 0; m < kSoloTiles; ++m) {
      uint32_t columns[4];
      ldmatrix(fragment(k, m), k_rows[m]);
      ldmatrix(fragment(q, m), q_rows[m]);
      ldmatrix(fragment(k_columns, m), columns);
      mma<kType>(P[0], q_rows[m], columns[0], columns[1]);
      mma<kType>(P[1], q_rows[m], columns[2], columns[3]);
    }
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
#pragma unroll
      for (int m = 0; m < kSoloTiles; ++m) {
        uint32_t h[4];
        ldmatrix(stage.state().address(tile, m, at.lane), h);
        mma<kType>(z[tile][0], k_rows[m], h[0], h[1]);
        mma<kType>(z[tile][1], k_rows[m], h[2], h[3]);
        mma<kType>(y[tile][0], q_rows[m], h[0], h[1]);
        mma<kType>(y[tile][1], q_rows[m], h[2], h[3]);
      }
      float c[4];
      four_of_tile(stage.c, tile, at, c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        element(z, tile, i / 4, i % 4) += c[i % 4];
        element(y, tile, i / 4, i % 4) = fmaf(p.scale, element(y, tile, i / 4, i % 4), c[i % 4]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) P[i / 4][i % 4] = lower(at, i, fmaf(p.scale, P[i / 4][i % 4], 1.0f));
  }

  // z becomes x = LN(z); r of both rows.
  __device__ __forceinline__ void normalize(SoloRows& z, float (&r)[2]) const {
    float means[2];
    center(at, p.eps, z, means, r);
#pragma unroll
    for (int i = 0; i < 8 * kSoloTiles; ++i) element(z, i / 8, i / 4 % 2, i % 4) *= r[i / 4 % 2];
  }

  // y = w u; for the chain x, u, r and the means of y, x y, w^2 x and w^2 x^2.
  __device__ __forceinline__ void put_rows(SoloRows& x, const float (&r)[2], Stage& stage, SoloExchange& exchange,
                                           SoloRows& y, float (&means)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float weight[4], bias[4];
      four_of_tile(w, tile, at, weight);
      four_of_tile(b, tile, at, bias);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float k[4], v[4], x_row[4], u_row[4];
        four_at(stage.k(), tile, half, k);
        four_at(stage.v(), tile, half, v);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x_row[e] = element(x, tile, half, e);
          u_row[e] = fmaf(weight[e], x_row[e], bias[e] - v[e] + k[e]);
          const float y_of_e = weight[e] * u_row[e], ww_x = weight[e] * weight[e] * x_row[e];
          element(y, tile, half, e) = y_of_e;
          means[half][0] += y_of_e;
          means[half][1] = fmaf(x_row[e], y_of_e, means[half][1]);
          means[half][2] += ww_x;
          means[half][3] = fmaf(x_row[e], ww_x, means[half][3]);
        }
        exchange.x(tile, half, at.lane) = four_of(x_row);
        exchange.u(tile, half, at.lane) = four_of(u_row);
      }
    }
    sum_over_columns(at, means);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) means[half][i] *= kMean;
      if (at.t == 0) {
        exchange.rows[at.row(0, half)] = {r[half], means[half][0], means[half][1], means[half][2], means[half][3]};
      }
    }
  }

  // n of x and y, and the outputs less their part of it, eta (P n).
  __device__ __forceinline__ void make_outputs(SoloRows& x, SoloRows& y, const float (&r)[2],
                                               const float (&means)[2][4], const float (&P)[2][4],
                                               const float (&eta)[2], int count, uint4 (&n)[kSoloTiles],
                                               SoloRows& outputs) const {
    const uint32_t real[2] = {at.row(0, 0) < count ? 0xffffffffu : 0, at.row(0, 1) < count ? 0xffffffffu : 0};
    const float factors[2] = {-eta[0] * kGradientUnit<kType>, -eta[1] * kGradientUnit<kType>};
    uint32_t P_operand[4];
    pack_a<kType>(P[0], P[1], P_operand);
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float rows[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i / 4, e = i % 4;
        rows[half][e] = inner_gradient(r[half], make_float2(means[half][0], means[half][1]), element(x, tile, half, e),
                                       element(y, tile, half, e));
      }
      n[tile] = pack_rows<kType>(rows, 1.0f / kGradientUnit<kType>);
      n[tile].x &= real[0];
      n[tile].y &= real[1];
      n[tile].z &= real[0];
      n[tile].w &= real[1];
      uint32_t transposed[4];
      transpose_rows(n[tile], transposed);
      float moves[2][4] = {};
      mma<kType>(moves[0], P_operand, transposed[0], transposed[2]);
      mma<kType>(moves[1], P_operand, transposed[1], transposed[3]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& value = outputs[tile][i / 4][i % 4];
        value = fmaf(factors[i / 2 % 2], moves[i / 4][i % 4], value);
      }
    }
  }

  // dyo, also for the chain, and dw and db of the outer norm.
  __device__ __forceinline__ void make_output_gradients(SoloRows& y, Stage& stage, SoloExchange& exchange,
                                                        uint4 (&dyo)[kSoloTiles], float (&dw)[kSoloTiles][4],
                                                        float (&db)[kSoloTiles][4]) const {
    SoloRows g;
    float sums[2][2] = {},
          products[2][2] = {};  // of y and w do; of the distances of y from the mean, squared and times w do
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float weight[4];
      four_of_tile(w, tile, at, weight);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row[4];
        four_at(stage.d_o(), tile, half, row);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          element(g, tile, half, e) = row[e];
          sums[half][0] += element(y, tile, half, e);
          sums[half][1] = fmaf(weight[e], row[e], sums[half][1]);
        }
      }
    }
    sum_over_columns(at, sums);
    subtract_means({sums[0][0], sums[1][0]}, y);
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float weight[4];
      four_of_tile(w, tile, at, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i / 4, e = i % 4;
        const float d = element(y, tile, half, e);
        products[half][0] = fmaf(d, d, products[half][0]);
        products[half][1] = fmaf(d, weight[e] * element(g, tile, half, e), products[half][1]);
      }
    }
    sum_over_columns(at, products);
    float r[2];
    float2 means[2];  // of w do and xo w do
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      r[half] = rsqrt_approx(fmaf(products[half][0], kMean, p.eps));
      means[half] = make_float2(kMean * sums[half][1], kMean * r[half] * products[half][1]);
    }
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      float weight[4], rows[2][4];
      four_of_tile(w, tile, at, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i / 4, e = i % 4;
        const float xo = r[half] * element(y, tile, half, e), d_o = element(g, tile, half, e);
        rows[half][e] = fmaf(r[half], fmaf(-xo, means[half].y, fmaf(weight[e], d_o, -means[half].x)), d_o);
        dw[tile][e] = fmaf(d_o, xo, dw[tile][e]);
        db[tile][e] += d_o;
      }
      dyo[tile] = pack_rows<kType>(rows, 1.0f);
      exchange.dyo(tile, at.lane) = dyo[tile];
    }
  }

  // base = -P^T (eta dyo), the step sizes in units.
  __device__ __forceinline__ void put_base(const float (&P)[2][4], const float (&eta)[2],
                                           const uint4 (&dyo)[kSoloTiles], SoloExchange& exchange) const {
    uint32_t M[4];
    const float unit = transpose_weighted<kType>(P, eta, M);
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      uint32_t transposed[4];
      transpose_rows(dyo[tile], transposed);
      float moves[2][4] = {};
      mma<kType>(moves[0], M, transposed[0], transposed[2]);
      mma<kType>(moves[1], M, transposed[1], transposed[3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float4*>(&exchange.base[at.row(0, half) * exchange.kRow + kWarpColumns * tile + 4 * at.t]) =
            make_float4(-unit * moves[0][2 * half], -unit * moves[0][2 * half + 1], -unit * moves[1][2 * half],
                        -unit * moves[1][2 * half + 1]);
      }
    }
  }

  // Dm = lower(dyo n^T), and deta of both rows without <n, F>.
  __device__ __forceinline__ void make_moves(const uint4 (&dyo)[kSoloTiles], const uint4 (&n)[kSoloTiles],
                                             const float (&P)[2][4], float (&Dm)[2][4], float (&deta)[2]) const {
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) {
      const uint32_t a[4] = {dyo[tile].x, dyo[tile].y, dyo[tile].z, dyo[tile].w};
      mma<kType>(Dm[0], a, n[tile].x, n[tile].z);
      mma<kType>(Dm[1], a, n[tile].y, n[tile].w);
    }
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Dm[i / 4][i % 4] = lower(at, i, kGradientUnit<kType> * Dm[i / 4][i % 4]);
      sums[i / 2 % 2] = fmaf(Dm[i / 4][i % 4], P[i / 4][i % 4], sums[i / 2 % 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) deta[half] = -sum_over_lanes<4>(sums[half]);
  }

  // dq = scale (dyo h^T - eta (Dm k))
  __device__ __forceinline__ void store_dq(const float (&Dm)[2][4], const float (&eta)[2],
                                           const uint4 (&dyo)[kSoloTiles], int64_t offset, int count,
                                           Stage& stage) const {
    float all[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) all[i] = Dm[i / 4][i % 4];
    const float unit = unit_of<kType>(all), inverse = 1.0f / unit;
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &Dm[i / 2][i % 2 * 2];
      a[i] = pack<kType>(inverse * pair[0], inverse * pair[1]);
    }
    const uint32_t k = first_fragment(stage.k(), 0, at.lane);
    float dq[kSoloTiles][2][4] = {};
#pragma unroll
    for (int m = 0; m < kSoloTiles; ++m) {
      float moves[2][4] = {};
      uint32_t columns[4];
      ldmatrix_transposed(fragment(k, m), columns);
      mma<kType>(moves[0], a, columns[0], columns[1]);
      mma<kType>(moves[1], a, columns[2], columns[3]);
#pragma unroll
      for (int tile = 0; tile < kSoloTiles; ++tile) {
        multiply_transposed<kType>(dq[m], dyo[tile], stage.state(), tile, m, at.lane);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& value = dq[m][i / 4][i % 4];
        value = p.scale * fmaf(-unit * eta[i / 2 % 2], moves[i / 4][i % 4], value);
      }
    }
    store_rows<kType>(args.dq, offset, count, at, dq);
  }

  // dv = -w dy; and w dy, the first part of dk.
  __device__ __forceinline__ void store_dv(int64_t offset, int count, const SoloExchange& exchange,
                                           float (&dk)[kSoloTiles][2][4]) const {
    float dv[kSoloTiles][2][4];
#pragma unroll
    for (int m = 0; m < kSoloTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int row = at.row(0, i / 2 % 2), key = kWarpColumns * m + 8 * (i / 4) + 2 * at.t;
        const float2 dy = *reinterpret_cast<const float2*>(&exchange.base[row * exchange.kRow + key]);
        const float2 weight = *reinterpret_cast<const float2*>(&w[key]);
        dk[m][i / 4][i % 4] = weight.x * dy.x;
        dk[m][i / 4][i % 4 + 1] = weight.y * dy.y;
        dv[m][i / 4][i % 4] = -dk[m][i / 4][i % 4];
        dv[m][i / 4][i % 4 + 1] = -dk[m][i / 4][i % 4 + 1];
      }
    }
    if (args.dv.present()) store_rows<kType>(args.dv, offset, count, at, dv);
  }

  // dk = dk + dz h^T - scale Dm^T (eta q) - eta_L n dh^T
  __device__ __forceinline__ void store_dk(const uint32_t (&eta_Dm)[4], float eta_Dm_unit, const uint4 (&n)[kSoloTiles],
                                           int64_t offset, int count, Stage& stage, SoloExchange& exchange,
                                           float (&dk)[kSoloTiles][2][4]) const {
    const float move_factor = -p.scale * eta_Dm_unit, write_factor = -stage.eta[count - 1] * kGradientUnit<kType>;
    const uint32_t q = first_fragment(stage.q(), 0, at.lane);
    uint4 dz[kSoloTiles];
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) dz[tile] = exchange.dz(tile, at.lane);
#pragma unroll
    for (int m = 0; m < kSoloTiles; ++m) {
      float reads[2][4] = {}, writes[2][4] = {}, moves[2][4] = {};
      uint32_t columns[4];
      ldmatrix_transposed(fragment(q, m), columns);
      mma<kType>(moves[0], eta_Dm, columns[0], columns[1]);
      mma<kType>(moves[1], eta_Dm, columns[2], columns[3]);
#pragma unroll
      for (int tile = 0; tile < kSoloTiles; ++tile) {
        multiply_transposed<kType>(writes, n[tile], exchange.gradient(), tile, m, at.lane);
        if constexpr (kType == DType::kBF16) {  // whose units are all 1
          multiply_transposed<kType>(reads, dz[tile], stage.state(), tile, m, at.lane);
        } else {
          float part[2][4] = {};
          multiply_transposed<kType>(part, dz[tile], stage.state(), tile, m, at.lane);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            reads[i / 4][i % 4] = fmaf(exchange.dz_unit[tile], part[i / 4][i % 4], reads[i / 4][i % 4]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& value = dk[m][i / 4][i % 4];
        value = fmaf(move_factor, moves[i / 4][i % 4], value + reads[i / 4][i % 4]);
        value = fmaf(write_factor, writes[i / 4][i % 4], value);
      }
    }
    store_rows<kType>(args.dk, offset, count, at, dk);
  }

  __device__ __forceinline__ void store_deta(const float (&deta)[2], int64_t offset, int count,
                                             const SoloExchange& exchange) const {
    float nF = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kSoloTiles; ++tile) nF += exchange.nF[tile][at.lane];
    nF = sum_over_lanes<kWarpSize>(nF);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row(0, half);
      if (at.t != 0 || row >= count) continue;
      store_float(args.deta.data, args.deta.dtype, offset + row * args.deta.strides[1],
                  deta[half] - (row == count - 1 ? nF : 0.0f));
    }
  }

  // A mini-batch: everything that comes before the chain, dq, which nothing else waits for, and the rest when the chain is
  // done.
  __device__ __forceinline__ void step(const SoloSignals& signals, const SoloOffsets& offsets, int count, int turn,
                                       Stage& stage, SoloExchange& exchange, float (&dw)[kSoloTiles][4],
                                       float (&db)[kSoloTiles][4]) const {
    const float eta[2] = {stage.eta[at.row(0, 0)], stage.eta[at.row(0, 1)]};
    uint4 n[kSoloTiles], dyo[kSoloTiles];
    float P[2][4] = {}, Dm[2][4] = {}, deta[2];
    {
      SoloRows y = {};
      {
        SoloRows x = {}, inner;
        float r[2], means[2][4] = {};
        read_state(stage, x, y, P);
        normalize(x, r);
        put_rows(x, r, stage, exchange, inner, means);
        make_outputs(x, inner, r, means, P, eta, count, n, y);
      }
      make_output_gradients(y, stage, exchange, dyo, dw, db);
    }
    put_base(P, eta, dyo, exchange);
    signals.prepared.arrive(turn);
    make_moves(dyo, n, P, Dm, deta);
    if (args.dq.present()) store_dq(Dm, eta, dyo, offsets.dq, count, stage);
    uint32_t eta_Dm[4];  // Dm^T eta, in units
    const float unit = transpose_weighted<kType>(Dm, eta, eta_Dm);
    signals.done.wait(turn);
    float dk[kSoloTiles][2][4];
    store_dv(offsets.dv, count, exchange, dk);
    if (args.dk.present()) store_dk(eta_Dm, unit, n, offsets.dk, count, stage, exchange, dk);
    if (args.deta.present()) store_deta(deta, offsets.deta, count, exchange);
  }
};

template <DType kType>
__device__ __forceinline__ void run_solo_partner(const ReverseArgs& args, const SequenceSpan& span, int64_t sequence,
                                                 int head, const Lane& at, int number, SoloShared& shared) {
  const DeviceProblem& p = args.chain.problem;
  const SoloSignals signals;
  const ReverseOrder order(span);
  SoloLoader loader(args, order, first_mini_batch(p.sequences, span, sequence, kTileRows), head, number, at.lane);
  auto& stages = shared.stages[number];
  SoloOffsets offsets(args, order, number, head);
  SoloPartner<kType> partner{args, p, at, shared.w, shared.b};
  float dw[kSoloTiles][4] = {}, db[kSoloTiles][4] = {};
  loader.start(number, stages[0]);
  commit_copies();
  loader.store_etas(number, stages[0]);
  int stage = 0;
#pragma unroll 1
  for (int64_t t = number; t < order.count; t += kSolos) {
    partner.at.forget();
    wait_copies<0>();
    __syncwarp();  // all rows are here, and what the next ones take the place of has been read
    loader.start(t + kSolos, stages[1 - stage]);
    commit_copies();
    partner.step(signals, offsets, order.tokens(t), number, stages[stage], shared.exchange[number][0], dw, db);
    offsets.go_on(args);
    loader.store_etas(t + kSolos, stages[1 - stage]);
    stage = 1 - stage;
  }
#pragma unroll
  for (int tile = 0; tile < kSoloTiles; ++tile) {
    Lane columns = at;
    columns.column += kWarpColumns * tile;
    put_parameters(dw[tile], db[tile], columns, shared.parameters[1 + number][0], shared.parameters[1 + number][1]);
  }
}

}  // namespace
}  // namespace fastweight::cuda::ttt
