// The groups of warps of the reverse kernel that do all but the chain, see reverse.cuh.
#pragma once

#include "cuda/common/tile_rows.cuh"
#include "cuda/ttt_linear/chunk_chain/reverse_rows.cuh"
#include "cuda/ttt_linear/kept_states.h"

namespace fastweight::cuda::ttt {
namespace {

// Brings the rows and the states of a group's mini-batches, one after the other, by all threads of the group. Where the
// layout allows it a thread has one piece of 16 bytes of each of q, k, v and d_o, and pointers to them.
template <int kD, int kGroups, bool kFull>
class ReverseLoader {
 public:
  __device__ __forceinline__ ReverseLoader(const ReverseArgs& args, const ReverseOrder& order, int64_t first, int head,
                                           int group, int thread, int threads)
      : args_(args), order_(order), head_(head), thread_(thread), threads_(threads) {
    number_ = (first + order.number(group)) * args.chain.problem.num_heads + head;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const DeviceTensor& x = tensor(i);
      pieces_[i] = static_cast<const uint16_t*>(x.data) +
                   row_offset(x, order.batch, order.token(group) + thread / kSegments, head) + 8 * (thread % kSegments);
    }
  }

  // Starts the copies of mini-batch t; those of its step sizes end in registers.
  __device__ __forceinline__ void start(int64_t t, ReverseStage<kD>& stage) {
    if (t >= order_.count) return;
    thread_ = opaque(thread_);  // where its pieces come to lie is computed here, not kept
    const DeviceProblem& p = args_.chain.problem;
    const int count = order_.tokens(t);
    if (kFull && args_.vectors) {
      copy_pieces(count, stage);
    } else {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) copy_tile(tensor(i), order_.token(t), count, {stage.rows[i]});
    }
    copy_state(stage);
    number_ -= int64_t{kGroups} * p.num_heads;
    if (thread_ < count) {
      const int64_t offset = row_offset(p.eta, order_.batch, order_.token(t) + thread_, head_);
      eta_bits_ = load_bits(element_at(p.eta.data, p.eta.dtype, offset), p.eta.dtype);
    }
  }

  // The step sizes of mini-batch t, which have arrived by now.
  __device__ __forceinline__ void store_etas(int64_t t, ReverseStage<kD>& stage) const {
    if (t >= order_.count || thread_ >= kTileRows) return;
    stage.eta[thread_] = thread_ < order_.tokens(t) ? decode(eta_bits_, args_.chain.problem.eta.dtype) : 0.0f;
  }

 private:
  static constexpr int kSegments = SharedTile<kD>::kSegments;

  __device__ __forceinline__ const DeviceTensor& tensor(int i) const {
    const DeviceProblem& p = args_.chain.problem;
    return i == 0 ? p.q : i == 1 ? p.k : i == 2 ? p.v : args_.d_o;
  }

  __device__ __forceinline__ void copy_pieces(int count, ReverseStage<kD>& stage) {
    const int row = thread_ / kSegments, segment = thread_ % kSegments;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const DeviceTensor& x = tensor(i);
      copy_async(SharedTile<kD>{stage.rows[i]}.address(row, segment), pieces_[i], row < count && x.present());
      pieces_[i] -= kGroups * kTileRows * x.strides[1];
    }
  }

  // In any layout, by any number of threads. Rows of zeros of a tensor that is absent.
  __device__ __forceinline__ void copy_tile(const DeviceTensor& x, int64_t token, int count,
                                            const SharedTile<kD>& tile) const {
    const int64_t offset = row_offset(x, order_.batch, token, head_);
    const int rows = x.present() ? count : 0, D = args_.chain.problem.head_dim;
    if (!args_.vectors) {
      gather_tile<kTileRows, kD>(tile, x, offset, rows, 0, D, thread_, threads_);
      return;
    }
    const auto* data = x.present() ? static_cast<const uint16_t*>(x.data) + offset : args_.kept.h(0);
#pragma unroll 1
    for (int i = thread_; i < kTileRows * kSegments; i += threads_) {
      const int row = i / kSegments, segment = i % kSegments;
      const bool exists = row < rows && 8 * segment < D;
      copy_async(tile.address(row, segment), exists ? data + row * x.strides[1] + 8 * segment : data, exists);
    }
  }

  // h of the columns that exist, and c.
  __device__ __forceinline__ void copy_state(ReverseStage<kD>& stage) const {
    const char* h = reinterpret_cast<const char*>(args_.kept.h(number_)) + 16 * thread_;
    const uint32_t to = shared_address(stage.h) + 16 * static_cast<uint32_t>(thread_);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) copy_async(to + 16 * i * threads_, h + 16 * i * threads_, true);
    const char* c = reinterpret_cast<const char*>(args_.kept.c(number_)) + 16 * thread_;
    if (thread_ < threads_ / 8) copy_async(shared_address(stage.c) + 16 * thread_, c, true);
  }

  const ReverseArgs& args_;
  const ReverseOrder& order_;
  int head_, thread_, threads_;
  int64_t number_;  // of the mini-batch, see ../kept_states.h
  const uint16_t* pieces_[4];
  uint32_t eta_bits_ = 0;
};

// The stages of a group. What a warp keeps from one to the next are local variables of `prepare`.
template <DType kType, int kD, bool kFull>
struct ReversePartner {
  const ReverseArgs& args;
  const DeviceProblem& p;
  const Columns<kFull>& columns;
  Lane at;
  const ReverseSignals& signals;
  int warps, group;
  GroupSums<kD>& sums;

  static constexpr int kSteps = kD / 16;

  __device__ __forceinline__ void meet() const { signals.meet_group(group); }

  // z = k h + c, y = scale q h + c and P = lower(scale q k^T + 1).
  __device__ __forceinline__ void read_state(ReverseStage<kD>& stage, LaneRows<kTileRows>& z, LaneRows<kTileRows>& y,
                                             float (&P)[2][4]) const {
    const uint32_t q = first_fragment(stage.q(), 0, at.lane), k = first_fragment(stage.k(), 0, at.lane);
    const uint32_t k_columns = first_transposed_fragment(stage.k(), 0, at.lane);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t q_rows[4], k_rows[4], h[4], b[4];
      ldmatrix(fragment(k, m), k_rows);
      ldmatrix(stage.state().address(at.warp, m, at.lane), h);
      mma<kType>(z[0][0], k_rows, h[0], h[1]);
      mma<kType>(z[0][1], k_rows, h[2], h[3]);
      ldmatrix(fragment(q, m), q_rows);
      mma<kType>(y[0][0], q_rows, h[0], h[1]);
      mma<kType>(y[0][1], q_rows, h[2], h[3]);
      ldmatrix(fragment(k_columns, m), b);
      mma<kType>(P[0], q_rows, b[0], b[1]);
      mma<kType>(P[1], q_rows, b[2], b[3]);
    }
    float c[4];
    load_four(*reinterpret_cast<const float4*>(&stage.c[at.column]), c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        element<kTileRows>(z, 0, half, e) += c[e];
        element<kTileRows>(y, 0, half, e) = fmaf(p.scale, element<kTileRows>(y, 0, half, e), c[e]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) P[i / 4][i % 4] = lower(at, i, fmaf(p.scale, P[i / 4][i % 4], 1.0f));
  }

  // x, u, and the warp's share of the sums of y, x y, w^2 x and w^2 x^2.
  __device__ __forceinline__ void put_gradient_sums(LaneRows<kTileRows>& z, ReverseStage<kD>& stage,
                                                    ReverseExchange<kD>& exchange, float (&x)[2][4], float (&u)[2][4],
                                                    float (&r)[2]) const {
    float own[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row(0, half);
      const float2 norm = get_norm<kFull>(sums.inner[row], p);
      float k[4], v[4], b[4];
      load_four(*reinterpret_cast<const float4*>(&sums.b[at.column]), b);
      load_four<kType>(stage.k(), row, at.column, k);
      load_four<kType>(stage.v(), row, at.column, v);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[half][e] = columns.masked(e, (element<kTileRows>(z, 0, half, e) - norm.x) * norm.y);
        u[half][e] = fmaf(columns.w[e], x[half][e], b[e] - v[e] + k[e]);
        const float y = columns.w[e] * u[half][e], ww_x = columns.ww[e] * x[half][e];
        own[half][0] += y;
        own[half][1] = fmaf(x[half][e], y, own[half][1]);
        own[half][2] += ww_x;
        own[half][3] = fmaf(x[half][e], ww_x, own[half][3]);
      }
      r[half] = norm.y;
      exchange.x(at.warp, half, at.lane) = four_of(x[half]);
      exchange.u(at.warp, half, at.lane) = four_of(u[half]);
    }
    float total[4];
    const int half = sum_over_quad(own, at, total);
    sums.gradient[at.warp][at.row(0, half)] = four_of(total);
  }

  // n, and y = y - eta (P n).
  __device__ __forceinline__ void make_outputs(const float (&x)[2][4], const float (&u)[2][4], const float (&r)[2],
                                               const float (&P)[2][4], int count, ReverseStage<kD>& stage,
                                               ReverseExchange<kD>& exchange, LaneRows<kTileRows>& y) const {
    float n[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row(0, half);
      float total[4] = {};
#pragma unroll
      for (int w = 0; w < kSteps; ++w) {
        float part[4];
        load_four(sums.gradient[w][row], part);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += part[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] *= p.inverse_head_dim;
      const float2 means = make_float2(total[0], total[1]);
      if (at.warp == 0 && at.t == 0) exchange.rows[row] = {r[half], total[0], total[1], total[2], total[3]};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = inner_gradient(r[half], means, x[half][e], columns.w[e] * u[half][e]);
        n[half][e] = row < count ? value : 0.0f;
      }
    }
    const uint4 operand = pack_rows<kType>(n, 1.0f / kGradientUnit<kType>, columns);
    exchange.n[at.warp][at.lane] = operand;
    uint32_t transposed[4], P_operand[4];
    transpose_rows(operand, transposed);
    pack_a<kType>(P[0], P[1], P_operand);
    float moves[2][4] = {};
    mma<kType>(moves[0], P_operand, transposed[0], transposed[2]);
    mma<kType>(moves[1], P_operand, transposed[1], transposed[3]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float eta = stage.eta[at.row(0, half)] * kGradientUnit<kType>;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          y[0][m][2 * half + e] = fmaf(-eta, moves[m][2 * half + e], y[0][m][2 * half + e]);
        }
      }
    }
  }

  // The warp's share of the statistics of y, mean and variance of its columns as in put_statistics, and of the sums of
  // w do and w do (y - mean), with the mean of the warp.
  __device__ __forceinline__ void put_output_sums(LaneRows<kTileRows>& y, ReverseStage<kD>& stage,
                                                  float (&d_o)[2][4]) const {
    float own[2][4] = {}, first[2], total[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_four<kType>(stage.d_o(), at.row(0, half), at.column, d_o[half]);
      first[half] = __shfl_sync(kAllLanes, element<kTileRows>(y, 0, half, 0), at.lane - at.t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float d = columns.masked(e, element<kTileRows>(y, 0, half, e) - first[half]);
        const float w_do = columns.w[e] * d_o[half][e];
        own[half][0] += d;
        own[half][1] = fmaf(d, d, own[half][1]);
        own[half][2] += w_do;
        own[half][3] = fmaf(d, w_do, own[half][3]);
      }
    }
    const int half = sum_over_quad(own, at, total);
    const float distance = columns.mean(total[0]);
    sums.outer[at.warp][at.row(0, half)] =
        make_float4((half == 0 ? first[0] : first[1]) + distance, fmaf(-distance, distance, columns.mean(total[1])),
                    total[2], fmaf(-distance, total[2], total[3]));
  }

  // The norm of a row of y, and the means of w do and xo w do.
  __device__ __forceinline__ float2 get_output_means(int row, float2& norm) const {
    float means[kSteps], variances[kSteps], w_do = 0.0f, y_w_do = 0.0f;
    float4 parts[kSteps];
#pragma unroll
    for (int w = 0; w < kSteps; ++w) {
      parts[w] = sums.outer[w][row];
      means[w] = parts[w].x;
    }
    const float mean = Columns<kFull>::mean(p, means);
#pragma unroll
    for (int w = 0; w < kSteps; ++w) {
      const float distance = parts[w].x - mean;
      variances[w] = fmaf(distance, distance, parts[w].y);
      w_do += parts[w].z;
      y_w_do += fmaf(distance, parts[w].z, parts[w].w);
    }
    norm = make_float2(mean, rsqrt_approx(Columns<kFull>::mean(p, variances) + p.eps));
    return make_float2(w_do * p.inverse_head_dim, norm.y * y_w_do * p.inverse_head_dim);
  }

  // dyo, and base = -P^T (eta dyo), the step sizes in units; dw and db of the outer norm.
  __device__ __forceinline__ void make_output_gradients(LaneRows<kTileRows>& y, const float (&d_o)[2][4],
                                                        const float (&P)[2][4], const float (&eta)[2],
                                                        ReverseExchange<kD>& exchange, float (&dw)[4],
                                                        float (&db)[4]) const {
    float dyo[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 norm;
      const float2 means = get_output_means(at.row(0, half), norm);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float xo = (element<kTileRows>(y, 0, half, e) - norm.x) * norm.y, g = d_o[half][e];
        dyo[half][e] = g + inner_gradient(norm.y, means, xo, columns.w[e] * g);
        dw[e] = fmaf(g, xo, dw[e]);
        db[e] += g;
      }
    }
    const uint4 operand = pack_rows<kType>(dyo, 1.0f, columns);
    exchange.dyo(at.warp, at.lane) = operand;
    uint32_t transposed[4], M[4];
    transpose_rows(operand, transposed);
    const float unit = transpose_weighted<kType>(P, eta, M);
    float moves[2][4] = {};
    mma<kType>(moves[0], M, transposed[0], transposed[2]);
    mma<kType>(moves[1], M, transposed[1], transposed[3]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* pairs[2] = {&moves[0][2 * half], &moves[1][2 * half]};
      *reinterpret_cast<float4*>(&exchange.base[at.row(0, half) * exchange.kRow + at.column]) =
          make_float4(-unit * pairs[0][0], -unit * pairs[0][1], -unit * pairs[1][0], -unit * pairs[1][1]);
    }
  }

  // Dm = lower(dyo n^T) of all columns, in every warp; Dm^T eta for dk, and deta.
  __device__ __forceinline__ void make_moves(const float (&P)[2][4], const float (&eta)[2],
                                             ReverseExchange<kD>& exchange, float (&Dm)[2][4]) const {
#pragma unroll
    for (int w = 0; w < kSteps; ++w) {
      if (!kFull && w >= warps) break;
      const uint4 rows = exchange.dyo(w, at.lane), n = exchange.n[w][at.lane];
      const uint32_t a[4] = {rows.x, rows.y, rows.z, rows.w};
      mma<kType>(Dm[0], a, n.x, n.z);
      mma<kType>(Dm[1], a, n.y, n.w);
    }
    float sums_of_rows[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Dm[i / 4][i % 4] = lower(at, i, kGradientUnit<kType> * Dm[i / 4][i % 4]);
      sums_of_rows[i / 2 % 2] = fmaf(Dm[i / 4][i % 4], P[i / 4][i % 4], sums_of_rows[i / 2 % 2]);
    }
    if (at.warp != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_over_lanes<4>(sums_of_rows[half]);
      if (at.t == 0) exchange.deta[at.row(0, half)] = -sum;
    }
    uint32_t a[4];
    const float unit = transpose_weighted<kType>(Dm, eta, a);
    exchange.eta_Dm[at.lane] = make_uint4(a[0], a[1], a[2], a[3]);
    exchange.eta_Dm_unit = unit;
  }

  // dq = scale (dyo h^T - eta (Dm k))
  __device__ __forceinline__ void store_dq(const float (&Dm)[2][4], const float (&eta)[2], int64_t offset, int count,
                                           ReverseStage<kD>& stage, ReverseExchange<kD>& exchange) const {
    float reads[2][4] = {}, moves[2][4] = {}, all[8];
#pragma unroll
    for (int w = 0; w < kSteps; ++w) {
      if (!kFull && w >= warps) break;
      multiply_transposed<kType>(reads, exchange.dyo(w, at.lane), stage.state(), w, at.warp, at.lane);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) all[i] = Dm[i / 4][i % 4];
    const float unit = unit_of<kType>(all), inverse = 1.0f / unit;
    uint32_t a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &Dm[i / 2][i % 2 * 2];
      a[i] = pack<kType>(inverse * pair[0], inverse * pair[1]);
    }
    ldmatrix_transposed(fragment(first_fragment(stage.k(), 0, at.lane), at.warp), b);
    mma<kType>(moves[0], a, b[0], b[1]);
    mma<kType>(moves[1], a, b[2], b[3]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& value = reads[i / 4][i % 4];
      value = p.scale * fmaf(-unit * eta[i / 2 % 2], moves[i / 4][i % 4], value);
    }
    store_keys<kType>(args.dq, offset, count, p.head_dim, at, reads);
  }

  // Everything that comes before the chain, and dq, which nothing else waits for.
  __device__ __forceinline__ void prepare(const ReverseOrder& order, int64_t t, int head, int turn,
                                          ReverseStage<kD>& stage, ReverseExchange<kD>& exchange, float (&dw)[4],
                                          float (&db)[4]) const {
    LaneRows<kTileRows> z = {}, y = {};
    float P[2][4] = {}, d_o[2][4];
    read_state(stage, z, y, P);
    put_statistics<kD, kTileRows>(z, columns, at, sums.inner);
    const float eta[2] = {stage.eta[at.row(0, 0)], stage.eta[at.row(0, 1)]};
    meet();
    {
      float x[2][4], u[2][4], r[2];
      put_gradient_sums(z, stage, exchange, x, u, r);
      meet();
      make_outputs(x, u, r, P, order.tokens(t), stage, exchange, y);
    }
    put_output_sums(y, stage, d_o);
    meet();
    make_output_gradients(y, d_o, P, eta, exchange, dw, db);
    signals.prepared.arrive(turn);
    meet();
    float Dm[2][4] = {};
    make_moves(P, eta, exchange, Dm);
    if (!args.dq.present()) return;
    store_dq(Dm, eta, row_offset(args.dq, order.batch, order.token(t), head), order.tokens(t), stage, exchange);
  }

  // dk, dv and deta, when the chain is done.
  __device__ __forceinline__ void finish(const ReverseOrder& order, int64_t t, int head, ReverseStage<kD>& stage,
                                         ReverseExchange<kD>& exchange) const {
    const int count = order.tokens(t), D = p.head_dim;
    const int64_t token = order.token(t), batch = order.batch;
    float dv[2][4], dk[2][4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int row = at.row(0, i / 2 % 2), key = kWarpColumns * at.warp + 8 * (i / 4) + 2 * at.t;
      const float2 dy = *reinterpret_cast<const float2*>(&exchange.base[row * exchange.kRow + key]);
      const float2 w = *reinterpret_cast<const float2*>(&sums.w[key]);
      dk[i / 4][i % 4] = w.x * dy.x;
      dk[i / 4][i % 4 + 1] = w.y * dy.y;
      dv[i / 4][i % 4] = -dk[i / 4][i % 4];
      dv[i / 4][i % 4 + 1] = -dk[i / 4][i % 4 + 1];
    }
    if (args.dv.present()) store_keys<kType>(args.dv, row_offset(args.dv, batch, token, head), count, D, at, dv);
    if (args.dk.present()) {
      add_key_gradients(stage.eta[count - 1], stage, exchange, dk);
      store_keys<kType>(args.dk, row_offset(args.dk, batch, token, head), count, D, at, dk);
    }
    if (args.deta.present() && at.warp == 0) store_deta(row_offset(args.deta, batch, token, head), count, exchange);
  }

  // dk = dk + dz h^T - scale Dm^T (eta q) - eta_L n dh^T
  __device__ __forceinline__ void add_key_gradients(float eta, ReverseStage<kD>& stage, ReverseExchange<kD>& exchange,
                                                    float (&dk)[2][4]) const {
    float writes[2][4] = {}, moves[2][4] = {};
#pragma unroll
    for (int w = 0; w < kSteps; ++w) {
      if (!kFull && w >= warps) break;
      float reads[2][4] = {};
      multiply_transposed<kType>(reads, exchange.dz(w, at.lane), stage.state(), w, at.warp, at.lane);
      multiply_transposed<kType>(writes, exchange.n[w][at.lane], exchange.gradient(), w, at.warp, at.lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) dk[i / 4][i % 4] = fmaf(exchange.dz_unit[w], reads[i / 4][i % 4], dk[i / 4][i % 4]);
    }
    const uint4 rows = exchange.eta_Dm[at.lane];
    const uint32_t a[4] = {rows.x, rows.y, rows.z, rows.w};
    uint32_t b[4];
    ldmatrix_transposed(fragment(first_fragment(stage.q(), 0, at.lane), at.warp), b);
    mma<kType>(moves[0], a, b[0], b[1]);
    mma<kType>(moves[1], a, b[2], b[3]);
    const float move_factor = -p.scale * exchange.eta_Dm_unit, write_factor = -eta * kGradientUnit<kType>;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float with_moves = fmaf(move_factor, moves[i / 4][i % 4], dk[i / 4][i % 4]);
      dk[i / 4][i % 4] = fmaf(write_factor, writes[i / 4][i % 4], with_moves);
    }
  }

  // By one warp.
  __device__ __forceinline__ void store_deta(int64_t offset, int count, const ReverseExchange<kD>& exchange) const {
    float nF = 0.0f;
    for (int w = 0; w < warps; ++w) nF += exchange.nF[w][at.lane];
    nF = sum_over_lanes<kWarpSize>(nF);
    if (at.lane >= count) return;
    const float value = exchange.deta[at.lane] - (at.lane == count - 1 ? nF : 0.0f);
    store_float(args.deta.data, args.deta.dtype, offset + at.lane * args.deta.strides[1], value);
  }
};

template <DType kType, int kD, int kGroups, bool kFull>
__device__ __forceinline__ void run_reverse_group(const ReverseArgs& args, const SequenceSpan& span, int64_t sequence,
                                                  int head, const Lane& at, int group, int threads,
                                                  ReverseShared<kD, kGroups>& shared) {
  const DeviceProblem& p = args.chain.problem;
  const ReverseSignals signals{threads};
  const ReverseOrder order(span);
  const int thread = static_cast<int>(threadIdx.x) - (1 + group) * threads;
  ReverseLoader<kD, kGroups, kFull> loader(args, order, first_mini_batch(p.sequences, span, sequence, kTileRows), head,
                                           group, thread, threads);
  auto& stages = shared.stages[group];
  auto& exchanges = shared.exchange[group];
  const Columns<kFull> columns(p, head, at);
  ReversePartner<kType, kD, kFull> partner{
      args, p, columns, at, signals, threads / kWarpSize, group, shared.sums[group]};
  if (at.g == 0) {
    *reinterpret_cast<float4*>(&partner.sums.w[at.column]) = four_of(columns.w);
    *reinterpret_cast<float4*>(&partner.sums.b[at.column]) = four_of(columns.b);
  }
  float dw[4] = {}, db[4] = {};
  constexpr int kStages = ReverseShared<kD, kGroups>::kStages, kBuffers = ReverseShared<kD, kGroups>::kBuffers;
  // The mini-batch to prepare is t. The first turn of the loop only starts copies, the last one only finishes.
  int stage = kStages - 1, next = 0, before = kStages - 2, buffer = kBuffers - 1,
      turn = (group + kTurns - kGroups) % kTurns;
#pragma unroll 1
  for (int64_t t = group - kGroups; t - kGroups < order.count; t += kGroups) {
    const bool prepares = t >= 0 && t < order.count;
    partner.at.forget();
    const auto finish_before = [&] {
      if (t < kGroups) return;
      signals.done.wait(turn + kTurns - kGroups);
      partner.finish(order, t - kGroups, head, stages[before], exchanges[kBuffers - 1 - buffer]);
    };
    if constexpr (kBuffers == 1) finish_before();
    if (prepares) {
      wait_copies<0>();
      signals.meet_group(group);  // all rows are here, and what the next ones take the place of has been read
    }
    loader.start(t + kGroups, stages[next]);
    commit_copies();
    if (prepares) {
      partner.prepare(order, t, head, turn, stages[stage], exchanges[buffer], dw, db);
    }
    if constexpr (kBuffers > 1) finish_before();
    loader.store_etas(t + kGroups, stages[next]);
    turn = (turn + kGroups) % kTurns;
    buffer = kBuffers - 1 - buffer;
    before = stage;
    stage = next;
    next = next + 1 == kStages ? 0 : next + 1;
  }
  put_parameters(dw, db, at, shared.parameters[1 + group][0], shared.parameters[1 + group][1]);
}

}  // namespace
}  // namespace fastweight::cuda::ttt
