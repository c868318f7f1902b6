// The warps of the reverse kernel that have the state's gradient, see reverse.cuh.
#pragma once

#include "cuda/ttt_linear/chunk_chain/reverse_rows.cuh"

namespace fastweight::cuda::ttt {
namespace {

// A lane's part of the chain's rows.
struct ChainRows {
  float x[2][4], u[2][4], dn[2][4];
};

template <DType kType, int kD, bool kFull>
struct ReverseChain {
  const DeviceProblem& p;
  const Columns<kFull>& columns;
  Lane at;
  int warps;
  float mean_ww;  // of w^2
  ChainSums<kD>& sums;

  static constexpr int kSteps = kD / 16;

  // F = k dh + dc, and dh in 16 bits for the partners.
  template <class Exchange>
  __device__ __forceinline__ void read_gradient(const State<kD>& dh, ReverseStage<kD>& stage, Exchange& exchange,
                                                LaneRows<kTileRows>& F) const {
    const uint32_t k = first_fragment(stage.k(), 0, at.lane);
    LaneRows<kTileRows> parts[2] = {};
    const StateTile<kD> kept = exchange.gradient();
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t a[4], b[4];
      ldmatrix(fragment(k, m), a);
      dh.template operand<kType>(m, b);
      mma<kType>(parts[m % 2][0][0], a, b[0], b[1]);
      mma<kType>(parts[m % 2][0][1], a, b[2], b[3]);
      stmatrix(kept.address(at.warp, m, at.lane), b);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = element<kTileRows>(parts[0], 0, half, e) + element<kTileRows>(parts[1], 0, half, e);
        element<kTileRows>(F, 0, half, e) = sum + dh.c[e];
      }
    }
  }

  template <class Exchange>
  __device__ __forceinline__ void load_rows(Exchange& exchange, ChainRows& rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_four(exchange.x(at.warp, half, at.lane), rows.x[half]);
      load_four(exchange.u(at.warp, half, at.lane), rows.u[half]);
    }
  }

  // dn, the warp's share of the five sums, and the lane's of <n, F>.
  template <class Exchange>
  __device__ __forceinline__ void put_row_sums(LaneRows<kTileRows>& F, float eta, Exchange& exchange,
                                               ChainRows& rows) const {
    float own[2][5] = {}, nF = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row(0, half);
      const RowTerms terms = exchange.rows[row];
      float base[4];
      load_four(*reinterpret_cast<const float4*>(&exchange.base[row * exchange.kRow + at.column]), base);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float f = element<kTileRows>(F, 0, half, e), x = rows.x[half][e], y = columns.w[e] * rows.u[half][e];
        const float dn = fmaf(-eta, f, base[e]), ww_dn = columns.ww[e] * dn;
        rows.dn[half][e] = dn;
        own[half][0] += dn;
        own[half][1] = fmaf(x, dn, own[half][1]);
        own[half][2] += ww_dn;
        own[half][3] = fmaf(x, ww_dn, own[half][3]);
        own[half][4] = fmaf(y, dn, own[half][4]);
        nF = fmaf(inner_gradient(terms.r, make_float2(terms.y, terms.xy), x, y), f, nF);
      }
    }
    exchange.nF[at.warp][at.lane] = nF;
    float total[5];
    const int half = sum_over_quad(own, at, total);
    sums.four[at.warp][at.row(0, half)] = make_float4(total[0], total[1], total[2], total[3]);
    sums.fifth[at.warp][at.row(0, half)] = total[4];
  }

  // The means over a row of dn, x dn, w^2 dn, w^2 x dn and y dn.
  __device__ __forceinline__ void get_means(int row, float (&means)[5]) const {
#pragma unroll
    for (int i = 0; i < 5; ++i) means[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < kSteps; ++w) {
      if (!kFull && w >= warps) break;
      const float4 four = sums.four[w][row];
      means[0] += four.x;
      means[1] += four.y;
      means[2] += four.z;
      means[3] += four.w;
      means[4] += sums.fifth[w][row];
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) means[i] *= p.inverse_head_dim;
  }

  // dy for the partners, dz, and the lane's sums for dw and db.
  template <class Exchange>
  __device__ __forceinline__ void make_gradients(const ChainRows& rows, Exchange& exchange, float (&dz)[2][4],
                                                 float (&dw)[4], float (&db)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row(0, half);
      const RowTerms terms = exchange.rows[row];
      float means[5], dy[4];
      get_means(row, means);
      const float r = terms.r, mean = means[0], mean_x = means[1];
      const float ww_dy = r * fmaf(-terms.wwx, mean_x, fmaf(-mean_ww, mean, means[2]));
      const float wwx_dy = r * fmaf(-terms.wwxx, mean_x, fmaf(-terms.wwx, mean, means[3]));
      const float mean_dx = fmaf(-r, fmaf(mean, terms.xy, terms.y * mean_x), ww_dy);
      const float mean_xdx = fmaf(-2.0f * r, mean_x * terms.xy, wwx_dy);
      const float dn_n = r * (means[4] - fmaf(terms.y, mean, terms.xy * mean_x));  // <dn, n> / D
      const float x_factor = r * (mean_xdx + dn_n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = rows.x[half][e], dn = rows.dn[half][e], u = rows.u[half][e], w = columns.w[e];
        dy[e] = columns.masked(e, r * fmaf(-x, mean_x, dn - mean));
        const float dx = fmaf(columns.ww[e], dy[e], -r * fmaf(dn, terms.xy, w * u * mean_x));
        dz[half][e] = columns.masked(e, fmaf(-x, x_factor, r * (dx - mean_dx)));
        dw[e] = fmaf(fmaf(w, x, u), dy[e], dw[e]);
        db[e] = fmaf(w, dy[e], db[e]);
      }
      *reinterpret_cast<float4*>(&exchange.base[row * exchange.kRow + at.column]) = four_of(dy);
    }
  }

  // dh^T = dh^T + factor x^T rows, where x^T is an A fragment.
  __device__ __forceinline__ void add_to_gradient(float factor, const uint32_t (&x)[4], const SharedTile<kD>& rows,
                                                  State<kD>& dh) const {
    const uint32_t first = first_fragment(rows, 0, at.lane);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t b[4];
      float moves[2][4] = {};
      ldmatrix_transposed(fragment(first, m), b);
      mma<kType>(moves[0], x, b[0], b[1]);
      mma<kType>(moves[1], x, b[2], b[3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dh.h[2 * m + half][i] = fmaf(factor, moves[half][i], dh.h[2 * m + half][i]);
      }
    }
  }

  // The lane's columns of the sum of dyo + dz over its rows.
  __device__ __forceinline__ void sum_rows(const uint4& dyo, const float (&dz)[2][4], float (&total)[4]) const {
    const uint32_t pairs[4] = {dyo.x, dyo.y, dyo.z, dyo.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] = dz[0][e] + dz[1][e];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<kType>(pairs[i]);
      total[i / 2 * 2] += pair.x;
      total[i / 2 * 2 + 1] += pair.y;
    }
  }

  template <class Signals, class Exchange>
  __device__ __forceinline__ void step(const Signals& signals, float eta, ReverseStage<kD>& stage, Exchange& exchange,
                                       State<kD>& dh, float (&dw)[4], float (&db)[4]) const {
    LaneRows<kTileRows> F;
    ChainRows rows;
    if constexpr (Exchange::kGradientOverRows) {
      load_rows(exchange, rows);
      __syncwarp();  // before dh comes to lie there
    }
    read_gradient(dh, stage, exchange, F);
    if constexpr (!Exchange::kGradientOverRows) load_rows(exchange, rows);
    put_row_sums(F, eta, exchange, rows);
    uint4 dyo = exchange.dyo(at.warp, at.lane);
    uint32_t transposed[4];
    transpose_rows(dyo, transposed);
    add_to_gradient(p.scale, transposed, stage.q(), dh);
    signals.row_sums.wait();  // B

    if constexpr (kD > 64) {  // once more: the state leaves no registers for them
      load_rows(exchange, rows);
      dyo = exchange.dyo(at.warp, at.lane);
    }
    float dz[2][4], total[4];
    make_gradients(rows, exchange, dz, dw, db);
    float all[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) all[i] = dz[i / 4][i % 4];
    const float unit = unit_of<kType>(all);
    const uint4 operand = pack_rows<kType>(dz, 1.0f / unit, columns);
    exchange.dz(at.warp, at.lane) = operand;
    exchange.dz_unit[at.warp] = unit;
    transpose_rows(operand, transposed);
    add_to_gradient(unit, transposed, stage.k(), dh);
    sum_rows(dyo, dz, total);
    dh.move_bias(-1.0f, columns, total);
  }
};

// The mini-batches go round the groups of partners.
template <DType kType, int kD, bool kFull, class Signals, class Shared>
__device__ __forceinline__ void run_reverse_chain(const ReverseArgs& args, const SequenceSpan& span, int64_t sequence,
                                                  int head, const Lane& at, int threads, const Signals& signals,
                                                  Shared& shared) {
  const DeviceProblem& p = args.chain.problem;
  const ReverseOrder order(span);
  const Columns<kFull> columns(p, head, at);
  float ww = 0.0f;
  for (int d = at.lane; d < p.head_dim; d += kWarpSize) {
    const float w = load_float(p.w.data, p.w.dtype, head * p.w.strides[0] + d * p.w.strides[1]);
    ww = fmaf(w, w, ww);
  }
  ww = sum_over_lanes<kWarpSize>(ww) * p.inverse_head_dim;
  ReverseChain<kType, kD, kFull> chain{p, columns, at, threads / kWarpSize, ww, shared.chain_sums};
  State<kD> dh;
  dh.load(args.chain, sequence, head, at);
  float dw[4] = {}, db[4] = {};
  int group = 0, buffer = 0, stage = 0, turn = 0;
  for (int64_t t = 0; t < order.count; ++t) {
    chain.at.forget();
    signals.prepared.wait(turn);
    ReverseStage<kD>& rows = shared.stages[group][stage];
    chain.step(signals, rows.eta[order.tokens(t) - 1], rows, shared.exchange[group][buffer], dh, dw, db);
    signals.done.arrive(turn);
    turn = (turn + 1) % kTurns;
    if (++group == Shared::kGroups) {
      group = 0;
      buffer = buffer + 1 == Shared::kBuffers ? 0 : buffer + 1;
      stage = stage + 1 == Shared::kStages ? 0 : stage + 1;
    }
  }
  dh.store(args.chain, sequence, head, at);
  put_parameters(dw, db, at, shared.parameters[0][0], shared.parameters[0][1]);
}

}  // namespace
}  // namespace fastweight::cuda::ttt
