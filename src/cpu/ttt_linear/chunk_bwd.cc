// Backward by mini-batches. h, c is the state before the mini-batch, dh, dc the gradient of the state after it, x, r,
// y, n as in the forward, xo, ro the outer norm's, m() a mean over D and all C rows taking part:
//
//     dyo  = do + ro (w do - m(w do) - xo m(xo w do))        0 in extension rows
//     F    = k dh + dc
//     dn   = -M^T dyo - eta_C F
//     dy   = r (dn - m(dn) - x m(x dn))
//     dx   = -r (dn m(x y) + y m(x dn)) + w^2 dy
//     dz   = r (dx - m(dx) - x m(x dx)) - (r <dn, n> / D) x
//     Dm   = lower(dyo n^T)
//     dq   = scale (dyo h^T - eta (Dm k))
//     dk   = w dy + dz h^T - scale Dm^T (eta q) - eta_C n dh^T
//     dv   = -w dy
//     deta = -scale (Dm k) . q - rowsum(Dm),   and -<n, F> for the last token
//     dw  += do xo + (2 w x + b - v + k) dy,   db += do + w dy
//     dh  += scale q^T dyo + k^T dz,           dc += sum(dyo + dz)
//
// An extension row has k = q = v = 0: it feeds dw, db, deta and dc alone. A first pass over the sequence keeps the
// state before every mini-batch.

#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/denormals.h"
#include "cpu/parallel.h"
#include "cpu/partition.h"
#include "cpu/simd/targets.h"
#include "cpu/ttt_linear/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/ttt_linear/chunk_bwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/ttt_linear/mini_batch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace ttt {
namespace {

struct BackwardScratch {
  Head head;
  MiniBatch mb;
  float* states;        // [mini-batches][ld / kPanel][ld][kPanel]
  float* state_biases;  // [mini-batches][ld]
  float* dh;            // like a state
  float* dc;            // [ld]
  float* d_o;           // [rows][ld]
  float* F;             // [rows][ld]: k dh + dc
  float* dn;            // [rows][ld]
  float* dy;            // [rows][ld]
  float* grads;         // [2 rows][ld]: dz, then dyo
  float* grad_columns;  // [ld][2 rows], transposed
  float* n_columns;     // [ld][rows]
  float* moves_rows;    // [rows][rows]: moves transposed, -M_ij at [i][j]
  float* Dm;            // [rows][rows]: dyo n^T at [i][j], lower
  float* Dm_columns;    // [rows][rows], transposed
  float* h_columns;     // [ld][2 rows]: h times grad_columns
  float* dh_columns;    // [ld][rows]: dh times n_columns
  float* h_rows;        // [2 rows][ld]: dz h^T, then dyo h^T
  float* dh_rows;       // [rows][ld]: n dh^T
  float* Dk;            // [rows][ld]: Dm k
  float* eta_q;         // [rows][ld]
  float* Dq;            // [rows][ld]: Dm^T (eta q)
  float* writes;        // [2 rows][ld]: dz, then scale dyo
  float* deta;          // [rows]
  float* dw;            // [ld], of one mini-batch
  float* db;            // [ld], likewise
  float* row;           // [ld]

  void lay_out(ScratchLayout& layout, int64_t C, int64_t ld, int64_t longest) {
    const int64_t count = (longest + C - 1) / C;
    head.lay_out(layout, ld);
    mb.lay_out(layout, C, ld);
    states = layout.take<float>(count * ld * ld);
    state_biases = layout.take<float>(count * ld);
    dh = layout.take<float>(ld * ld);
    for (float** rows : {&d_o, &F, &dn, &dy, &dh_rows, &Dk, &eta_q, &Dq}) *rows = layout.take<float>(C * ld);
    for (float** rows : {&grads, &h_rows, &writes}) *rows = layout.take<float>(2 * C * ld);
    for (float** columns : {&grad_columns, &h_columns}) *columns = layout.take<float>(2 * C * ld);
    for (float** columns : {&n_columns, &dh_columns}) *columns = layout.take<float>(C * ld);
    for (float** pairs : {&moves_rows, &Dm, &Dm_columns}) *pairs = layout.take<float>(C * C);
    for (float** row_of : {&dc, &dw, &db, &row}) *row_of = layout.take<float>(ld);
    deta = layout.take<float>(round_up(C, kLanes));
  }
};

// dw and db of one head of one sequence.
struct ParameterSums {
  double* dw;  // [D]
  double* db;  // [D]
};

// The states before every mini-batch.
void keep_states(const TttLinearBackwardProblem& problem, const Sequence& sequence, BackwardScratch& s) {
  const Head& head = s.head;
  load_matrix(problem.args.in.initial_state, sequence.index, head, s.states);
  load_bias(problem.args.in.initial_state_bias, sequence.index, head, s.state_biases);
  for (int64_t t = 0; t + head.C < sequence.length; t += head.C) {
    float* h = s.states + t / head.C * head.ld * head.ld;
    float* c = s.state_biases + t / head.C * head.ld;
    load_mini_batch(head, sequence.begin + t, head.C, s.mb);
    s.mb.prefetcher.clear();
    head.prefetch(sequence.begin + t + head.C, s.mb.prefetcher);
    read_matrix(s.mb, s.mb.rows, h, s.mb.z);
    inner_gradients(head, c, s.mb.rows, s.mb);
    advance_state(s.mb, h, c, h + head.ld * head.ld, c + head.ld);
  }
}

// dyo into the second half of `grads`, and the outer norm's share of dw and db. Consumes mb.out().
void outer_adjoint(const Head& head, BackwardScratch& s) {
  const MiniBatch& mb = s.mb;
  const float inverse = 1.0f / static_cast<float>(head.D);
  float* dyo = s.grads + mb.rows * mb.ld;
  for (int64_t i = 0; i < mb.tokens; ++i) {
    float* x = mb.out() + i * mb.ld;
    const float* d_o = s.d_o + i * mb.ld;
    const Vec r = broadcast(normalise(head, x));
    Vec sum = zero(), sum_x = zero();
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const Vec t = hn::Mul(load(head.w + d), load(d_o + d));
      sum = hn::Add(sum, t);
      sum_x = fma(load(x + d), t, sum_x);
      store(fma(load(d_o + d), load(x + d), load(s.dw + d)), s.dw + d);
      store(hn::Add(load(s.db + d), load(d_o + d)), s.db + d);
    }
    const Vec mean = broadcast(sum_of_lanes(sum) * inverse), mean_x = broadcast(sum_of_lanes(sum_x) * inverse);
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const Vec t = hn::Mul(load(head.w + d), load(d_o + d));
      const Vec through = norm_adjoint(r, t, load(x + d), mean, mean_x, load(head.mask + d));
      store(hn::Add(load(d_o + d), through), dyo + i * mb.ld + d);
    }
  }
  std::memset(dyo + mb.tokens * mb.ld, 0, static_cast<size_t>((mb.rows - mb.tokens) * mb.ld) * sizeof(float));
}

// F and dn. The last token's step size carries -<n, F> into deta.
void inner_gradient_adjoint(BackwardScratch& s) {
  const MiniBatch& mb = s.mb;
  read_matrix(mb, mb.rows, s.dh, s.F);
  const Vec eta = broadcast(mb.last_eta());
  Vec dot = zero();
  for (int64_t i = 0; i < mb.rows; ++i) {
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const int64_t at = i * mb.ld + d;
      const Vec f = hn::Add(load(s.F + at), load(s.dc + d));
      dot = fma(load(mb.n + at), f, dot);
      store(hn::Neg(hn::Mul(eta, f)), s.dn + at);
    }
  }
  std::memset(s.deta, 0, static_cast<size_t>(mb.rows) * sizeof(float));
  s.deta[mb.tokens - 1] = -sum_of_lanes(dot);
  transpose(mb.moves, mb.rows, mb.rows, mb.rows, s.moves_rows, mb.rows);
  add_triangular<Triangle::kUpper>(RowMatrix{s.moves_rows, mb.rows}, s.grads + mb.rows * mb.ld, mb.ld, s.dn, mb.ld,
                                   mb.ld);
}

// Row by row through n, y and the inner norm: dy, dz (first half of `grads`), and the shares of dw and db.
void inner_norm_adjoint(const Head& head, BackwardScratch& s) {
  const MiniBatch& mb = s.mb;
  const float inverse = 1.0f / static_cast<float>(head.D);
  for (int64_t i = 0; i < mb.rows; ++i) {
    const float* x = mb.z + i * mb.ld;
    const float* y = mb.y + i * mb.ld;
    const float* dn = s.dn + i * mb.ld;
    float* dy = s.dy + i * mb.ld;
    float* dz = s.grads + i * mb.ld;
    Vec sum = zero(), sum_x = zero(), sum_xy = zero(), sum_n = zero();
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const Vec g = load(dn + d), xd = load(x + d);
      sum = fma(g, load(head.mask + d), sum);
      sum_x = fma(xd, g, sum_x);
      sum_xy = fma(xd, load(y + d), sum_xy);
      sum_n = fma(g, load(mb.n + i * mb.ld + d), sum_n);
    }
    const Vec r = broadcast(mb.r[i]);
    const Vec mean = broadcast(sum_of_lanes(sum) * inverse);
    const Vec mean_x = broadcast(sum_of_lanes(sum_x) * inverse);
    const Vec mean_xy = broadcast(sum_of_lanes(sum_xy) * inverse);
    Vec sum_dx = zero(), sum_xdx = zero();
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const Vec w = load(head.w + d), xd = load(x + d);
      const Vec g = norm_adjoint(r, load(dn + d), xd, mean, mean_x, load(head.mask + d));
      const Vec inner = fma(load(dn + d), mean_xy, hn::Mul(load(y + d), mean_x));
      const Vec dx = hn::Mul(fnma(r, inner, hn::Mul(hn::Mul(w, w), g)), load(head.mask + d));
      sum_dx = hn::Add(sum_dx, dx);
      sum_xdx = fma(xd, dx, sum_xdx);
      store(g, dy + d);
      store(dx, dz + d);
      const int64_t at = i * mb.ld + d;
      const Vec target = hn::Sub(load(mb.v + at), load(mb.k + at));
      const Vec factor = fma(hn::Add(w, w), xd, hn::Sub(load(head.b + d), target));
      store(fma(factor, g, load(s.dw + d)), s.dw + d);
      store(fma(w, g, load(s.db + d)), s.db + d);
    }
    const Vec mean_dx = broadcast(sum_of_lanes(sum_dx) * inverse);
    const Vec mean_xdx = broadcast(sum_of_lanes(sum_xdx) * inverse);
    const Vec shrink = broadcast(mb.r[i] * sum_of_lanes(sum_n) * inverse);
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const Vec xd = load(x + d);
      store(fnma(shrink, xd, norm_adjoint(r, load(dz + d), xd, mean_dx, mean_xdx, load(head.mask + d))), dz + d);
    }
  }
}

// Dm = lower(dyo n^T) both ways round; its row sums belong to deta.
HWY_INLINE void move_gradients(BackwardScratch& s) {
  const int64_t rows = s.mb.rows, ld = s.mb.ld;
  const float* dyo_columns = s.grad_columns + rows;
  product<Columns, Start::kZero>({.rows = rows,
                                  .columns = rows,
                                  .depth = ld,
                                  .a = dyo_columns,
                                  .a_stride = 2 * rows,
                                  .b = s.n_columns,
                                  .b_stride = rows,
                                  .c_in = s.Dm,
                                  .c_out = s.Dm,
                                  .c_stride = rows});
  for (int64_t i = 0; i < rows; ++i) {
    Vec sum = zero();
    for (int64_t j = 0; j < rows; j += kLanes) {
      float* x = s.Dm + i * rows + j;
      // j <= i
      const Vec value = hn::Mul(load(x), load(kSteps.values + 63 - i + j));
      sum = hn::Add(sum, value);
      store(value, x);
    }
    s.deta[i] -= sum_of_lanes(sum);
  }
  transpose(s.Dm, rows, rows, rows, s.Dm_columns, rows);
}

// Dk = Dm k and Dq = Dm^T (eta q).
HWY_INLINE void move_products(BackwardScratch& s) {
  const MiniBatch& mb = s.mb;
  const int64_t rows = mb.rows, ld = mb.ld;
  std::memset(s.Dk, 0, static_cast<size_t>(rows * ld) * sizeof(float));
  add_triangular<Triangle::kLower>(ColumnMatrix{s.Dm_columns, rows}, mb.k, ld, s.Dk, ld, ld);
  for (int64_t i = 0; i < rows; ++i) {
    const Vec eta = broadcast(mb.eta[i]);
    for (int64_t d = 0; d < ld; d += kLanes) store(hn::Mul(eta, load(mb.q() + i * ld + d)), s.eta_q + i * ld + d);
  }
  std::memset(s.Dq, 0, static_cast<size_t>(rows * ld) * sizeof(float));
  add_triangular<Triangle::kUpper>(RowMatrix{s.Dm, rows}, s.eta_q, ld, s.Dq, ld, ld);
}

// Sums over state columns: (dz; dyo) h^T and n dh^T.
HWY_INLINE void state_products(const float* h, BackwardScratch& s) {
  const int64_t rows = s.mb.rows, ld = s.mb.ld;
  product<PanelRows, Start::kZero>({.rows = ld,
                                    .columns = 2 * rows,
                                    .depth = kPanel,
                                    .segments = ld / kPanel,
                                    .a = h,
                                    .a_segment = ld * kPanel,
                                    .b = s.grad_columns,
                                    .b_stride = 2 * rows,
                                    .c_in = s.h_columns,
                                    .c_out = s.h_columns,
                                    .c_stride = 2 * rows});
  product<PanelRows, Start::kZero>({.rows = ld,
                                    .columns = rows,
                                    .depth = kPanel,
                                    .segments = ld / kPanel,
                                    .a = s.dh,
                                    .a_segment = ld * kPanel,
                                    .b = s.n_columns,
                                    .b_stride = rows,
                                    .c_in = s.dh_columns,
                                    .c_out = s.dh_columns,
                                    .c_stride = rows});
  transpose(s.h_columns, 2 * rows, ld, 2 * rows, s.h_rows, ld);
  transpose(s.dh_columns, rows, ld, rows, s.dh_rows, ld);
}

// dq, dk, dv and deta of the mini-batch from everything above; `h` is the state before it. dk comes to lie over dz h^T,
// dq over dyo h^T, dv over y.
void token_gradients(const Head& head, const float* h, BackwardScratch& s) {
  const MiniBatch& mb = s.mb;
  const int64_t rows = mb.rows, ld = mb.ld;
  transpose(s.grads, ld, 2 * rows, ld, s.grad_columns, 2 * rows);
  transpose(mb.n, ld, rows, ld, s.n_columns, rows);
  move_gradients(s);
  move_products(s);
  state_products(h, s);
  const Vec scale = broadcast(head.scale), last_eta = broadcast(mb.last_eta());
  for (int64_t i = 0; i < mb.tokens; ++i) {
    const Vec eta = broadcast(mb.eta[i]);
    Vec dot = zero();
    for (int64_t d = 0; d < ld; d += kLanes) {
      const int64_t at = i * ld + d;
      float* dk = s.h_rows + at;
      float* dq = dk + rows * ld;
      const Vec w_dy = hn::Mul(load(head.w + d), load(s.dy + at));
      const Vec through_state = fnma(last_eta, load(s.dh_rows + at), load(dk));
      store(fnma(scale, load(s.Dq + at), hn::Add(w_dy, through_state)), dk);
      store(hn::Mul(scale, fnma(eta, load(s.Dk + at), load(dq))), dq);
      store(hn::Neg(w_dy), mb.y + at);
      dot = fma(load(s.Dk + at), load(mb.q() + at), dot);
    }
    s.deta[i] -= head.scale * sum_of_lanes(dot);
  }
}

// dh, dc from the end of the mini-batch to its start.
void state_adjoint(const Head& head, BackwardScratch& s) {
  const MiniBatch& mb = s.mb;
  const int64_t rows = mb.rows, ld = mb.ld;
  const Vec scale = broadcast(head.scale);
  const float* dyo = s.grads + rows * ld;
  std::memcpy(s.writes, s.grads, static_cast<size_t>(rows * ld) * sizeof(float));
  for (int64_t i = 0; i < rows * ld; i += kLanes) store(hn::Mul(scale, load(dyo + i)), s.writes + rows * ld + i);
  for (int64_t p = 0; p < ld; p += kPanel) {
    product<Columns, Start::kAdd>({.rows = ld,
                                   .columns = kPanel,
                                   .depth = 2 * rows,
                                   .a = mb.k,
                                   .a_stride = ld,
                                   .b = s.writes + p,
                                   .b_stride = ld,
                                   .c_in = s.dh + p * ld,
                                   .c_out = s.dh + p * ld,
                                   .c_stride = kPanel});
  }
  for (int64_t d = 0; d < ld; d += kLanes) {
    Vec sum = load(s.dc + d);
    for (int64_t i = 0; i < 2 * rows; ++i) sum = hn::Add(sum, load(s.grads + i * ld + d));
    store(sum, s.dc + d);
  }
}

void run_sequence(const TttLinearBackwardProblem& problem, const Sequence& sequence, int64_t h, BackwardScratch& s,
                  const ParameterSums& sums) {
  const TttLinearBackward& args = problem.args;
  Head& head = s.head;
  MiniBatch& mb = s.mb;
  head.open(problem, sequence, h);
  load_matrix(args.d_final_state, sequence.index, head, s.dh);
  load_bias(args.d_final_state_bias, sequence.index, head, s.dc);
  if (sequence.length > 0) keep_states(problem, sequence, s);
  for (int64_t t = round_up(sequence.length, head.C) - head.C; t >= 0; t -= head.C) {
    const int64_t token = sequence.begin + t;
    const float* state = s.states + t / head.C * head.ld * head.ld;
    const float* bias = s.state_biases + t / head.C * head.ld;
    load_mini_batch(head, token, std::min(head.C, sequence.length - t), mb);
    mb.prefetcher.clear();
    head.prefetch(token - head.C, mb.prefetcher);
    head.prefetch(args.d_o, token - head.C, mb.prefetcher);
    read_matrix(mb, 2 * mb.rows, state, mb.z);
    inner_gradients(head, bias, mb.rows, mb);
    make_moves(head, mb);
    read_outputs(head, bias, mb);
    if (args.d_o.present()) {
      load_rows(args.d_o, head.batch, token, h, mb.tokens, 0, head.D, s.d_o, mb.ld, mb.rows);
    } else {
      std::memset(s.d_o, 0, static_cast<size_t>(mb.rows * mb.ld) * sizeof(float));
    }
    for (float* row : {s.dw, s.db}) std::memset(row, 0, static_cast<size_t>(mb.ld) * sizeof(float));
    outer_adjoint(head, s);
    inner_gradient_adjoint(s);
    inner_norm_adjoint(head, s);
    token_gradients(head, state, s);
    state_adjoint(head, s);
    for (int64_t d = 0; d < head.D; ++d) {
      sums.dw[d] += static_cast<double>(s.dw[d]);
      sums.db[d] += static_cast<double>(s.db[d]);
    }
    const auto store_tokens = [&](const float* rows, const TensorView& x) HWY_ATTR {
      if (x.present()) store_rows(rows, mb.ld, x, head.batch, token, h, mb.tokens, 0, head.D);
    };
    store_tokens(s.h_rows, args.dk);
    store_tokens(s.h_rows + mb.rows * mb.ld, args.dq);
    store_tokens(mb.y, args.dv);
    if (args.deta.present()) {
      store_row(s.deta, row_of(args.deta, head.batch, token, h), args.deta.dtype, args.deta.strides[1], mb.tokens);
    }
  }
  store_matrix(s.dh, args.d_initial_state, sequence.index, head);
  store_bias(s.dc, args.d_initial_state_bias, sequence.index, head);
}

void backward(const TttLinearBackwardProblem& problem, const Context& context) {
  const TttLinearSizes& sizes = problem.sizes;
  const int64_t C = problem.args.options.mini_batch, D = sizes.head_dim;
  const int64_t ld = padded_width(D);
  const std::vector<Sequence>& sequences = problem.sequences;
  const std::vector<int64_t> order = longest_first(sequences);
  const int64_t longest = order.empty() ? 0 : sequences[static_cast<size_t>(order[0])].length;
  const int64_t items = static_cast<int64_t>(order.size()) * sizes.num_heads;
  const int threads =
      useful_threads(num_threads(context), items, 9 * sizes.batch * sizes.tokens * sizes.num_heads * D * D);

  // [dw and db of every sequence][scratch of thread 0][scratch of thread 1]..
  const int64_t sums_size = 2 * items * D;
  ScratchLayout measure_sums, measure;
  measure_sums.take<double>(sums_size);
  BackwardScratch().lay_out(measure, C, ld, longest);
  const Workspace workspace(context, measure_sums.bytes() + measure.bytes() * static_cast<size_t>(threads));
  ScratchLayout layout(workspace.data());
  double* sums = layout.take<double>(sums_size);
  std::fill_n(sums, sums_size, 0.0);
  const auto sums_of = [&](int64_t sequence, int64_t h) {
    double* at = sums + (sequence * sizes.num_heads + h) * 2 * D;
    return ParameterSums{at, at + D};
  };

  const FlushDenormals flush;
  parallel_for(items, threads, [&](int64_t i, int thread) HWY_ATTR {
    ScratchLayout scratch_layout(static_cast<char*>(workspace.data()) + measure_sums.bytes() +
                                 measure.bytes() * static_cast<size_t>(thread));
    BackwardScratch scratch;
    scratch.lay_out(scratch_layout, C, ld, longest);
    const int64_t n = order[static_cast<size_t>(i / sizes.num_heads)], h = i % sizes.num_heads;
    run_sequence(problem, sequences[static_cast<size_t>(n)], h, scratch, sums_of(n, h));
  });
  for (int64_t h = 0; h < sizes.num_heads; ++h) {
    for (int64_t d = 0; d < D; ++d) {
      double dw = 0, db = 0;
      for (int64_t n = 0; n < static_cast<int64_t>(sequences.size()); ++n) {
        dw += sums_of(n, h).dw[d];
        db += sums_of(n, h).db[d];
      }
      if (problem.args.dw.present()) store_element(problem.args.dw, h * D + d, dw);
      if (problem.args.db.present()) store_element(problem.args.db, h * D + d, db);
    }
  }
}

}  // namespace
}  // namespace ttt

void ttt_backward(const TttLinearBackwardProblem& problem, const Context& context) { ttt::backward(problem, context); }

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(ttt_backward);

}  // namespace

void ttt::chunk_backward(const TttLinearBackwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(ttt_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
