// TTT-linear in double precision: the definition as loops. It takes every valid problem and is what all other
// implementations are measured against.
//
// The forward goes token by token, with the sums over the open mini-batch beside the state, so that a step does the
// same arithmetic in the same order as a forward. The backward takes mini-batches as a whole. The C - L rows that
// extend a partial mini-batch are equal: there is one of them, and its contributions count C - L times.
//
// An item is one sequence and head. All scratch memory is doubles.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/reference.h"
#include "cpu/scalar_types.h"
#include "cpu/ttt_linear/kernels.h"

namespace fastweight::cpu::ttt {
namespace {

// Rows of one layer norm --------------------------------------------------------------------------------------------

double mean(const double* x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum / static_cast<double>(count);
}

// xhat = (z - mean(z)) rho; returns rho = (variance + eps)^-1/2.
double normalise(const double* z, int64_t count, double eps, double* xhat) {
  const double mu = mean(z, count);
  for (int64_t i = 0; i < count; ++i) xhat[i] = z[i] - mu;
  const double rho = 1 / std::sqrt(dot(xhat, xhat, count) / static_cast<double>(count) + eps);
  for (int64_t i = 0; i < count; ++i) xhat[i] *= rho;
  return rho;
}

// The symmetric projection of the layer norm's derivative: result = rho (t - mean(t) - xhat mean(xhat * t)).
void project(const double* t, const double* xhat, double rho, int64_t count, double* result) {
  const double mu = mean(t, count), along = dot(xhat, t, count) / static_cast<double>(count);
  for (int64_t i = 0; i < count; ++i) result[i] = rho * (t[i] - mu - xhat[i] * along);
}

// result = row M, for M [D, D] with contiguous rows.
void row_times(const double* row, const double* M, int64_t D, double* result) {
  fill(result, D, 0);
  for (int64_t d = 0; d < D; ++d) add_scaled(row[d], M + d * D, D, result);
}

// M += a column^T row
void add_outer(double a, const double* column, const double* row, int64_t D, double* M) {
  for (int64_t d = 0; d < D; ++d) add_scaled(a * column[d], row, D, M + d * D);
}

// The operator ------------------------------------------------------------------------------------------------------

struct Operator {
  const TttLinearSizes& sizes;
  const TttLinearInputs& in;
  const TttLinearOptions& options;
  double scale;

  int64_t D() const { return sizes.head_dim; }
  int64_t state_size() const { return D() * D(); }
  int64_t C() const { return options.mini_batch; }

  void load_token_row(const TensorView& x, int64_t b, int64_t t, int64_t h, double* row) const {
    load_row(x, at(x, {b, t, h}), D(), row);
  }
  double load_eta(int64_t b, int64_t t, int64_t h) const { return load(in.eta, at(in.eta, {b, t, h})); }

  void load_state(const TensorView& x, int64_t n, int64_t h, double* S) const {
    for (int64_t d = 0; d < D(); ++d) load_row(x, at(x, {n, h, d}), D(), S + d * D());
  }
  void store_state(const TensorView& x, int64_t n, int64_t h, const double* S) const {
    for (int64_t d = 0; d < D(); ++d) store_row(x, at(x, {n, h, d}), D(), S + d * D());
  }
  void load_bias(const TensorView& x, int64_t n, int64_t h, double* c) const { load_row(x, at(x, {n, h}), D(), c); }
  void store_bias(const TensorView& x, int64_t n, int64_t h, const double* c) const {
    store_row(x, at(x, {n, h}), D(), c);
  }

  // Absent: 0.
  void load_optional(const TensorView& state, const TensorView& bias, int64_t n, int64_t h, double* S,
                     double* c) const {
    fill(S, state_size(), 0);
    fill(c, D(), 0);
    if (state.present()) load_state(state, n, h, S);
    if (bias.present()) load_bias(bias, n, h, c);
  }
  void store_optional(const TensorView& state, const TensorView& bias, int64_t n, int64_t h, const double* S,
                      const double* c) const {
    if (state.present()) store_state(state, n, h, S);
    if (bias.present()) store_bias(bias, n, h, c);
  }
};

template <class Problem>
Operator operator_of(const Problem& problem) {
  return {problem.sizes, problem.args.in, problem.args.options, problem.scale};
}

// The gradient of the inner loss at one row, from z to n, with what the backward needs of the way there.
struct InnerRow {
  double* x;  // [D] xhat of z
  double* y;  // [D] w * (w * x + b - v + k)
  double* n;  // [D]
  double r;   // rho of z
};

void inner_gradient(const Operator& op, const double* w, const double* b, const double* k, const double* v,
                    const double* z, InnerRow& row) {
  row.r = normalise(z, op.D(), op.options.eps, row.x);
  for (int64_t i = 0; i < op.D(); ++i) row.y[i] = w[i] * (w[i] * row.x[i] + b[i] - v[i] + k[i]);
  project(row.y, row.x, row.r, op.D(), row.n);
}

// The forward -------------------------------------------------------------------------------------------------------

// What is kept of a sequence between two tokens.
struct Open {
  double* h;  // [D, D] at the start of the mini-batch
  double* c;  // [D]
  double* G;  // [D, D] sum of k^T n over the tokens of the mini-batch so far
  double* g;  // [D] sum of n
};

struct ForwardScratch {
  Open open;
  InnerRow inner;
  double *w, *b, *q, *k, *v, *z, *row, *o;  // [D]
};

ForwardScratch forward_layout(ScratchLayout& layout, const Operator& op) {
  const auto vector = [&] { return layout.take<double>(op.D()); };
  const auto matrix = [&] { return layout.take<double>(op.state_size()); };
  ForwardScratch s{};
  s.open = {matrix(), vector(), matrix(), vector()};
  s.inner = {vector(), vector(), vector(), 0};
  for (double** x : {&s.w, &s.b, &s.q, &s.k, &s.v, &s.z, &s.row, &s.o}) *x = vector();
  return s;
}

void load_norm(const Operator& op, int64_t h, double* w, double* b) {
  load_row(op.in.w, at(op.in.w, {h}), op.D(), w);
  load_row(op.in.b, at(op.in.b, {h}), op.D(), b);
}

// Adds a token to the sums.
void add_token(const Operator& op, int64_t b, int64_t t, int64_t h, ForwardScratch& s) {
  const int64_t D = op.D();
  op.load_token_row(op.in.k, b, t, h, s.k);
  op.load_token_row(op.in.v, b, t, h, s.v);
  row_times(s.k, s.open.h, D, s.z);
  add_scaled(1, s.open.c, D, s.z);
  inner_gradient(op, s.w, s.b, s.k, s.v, s.z, s.inner);
  add_outer(1, s.k, s.inner.n, D, s.open.G);
  add_scaled(1, s.inner.n, D, s.open.g);
}

// o = y + w * LN(y) + b with y = scale q (h - eta G) + c - eta g.
void read_state(const Operator& op, double eta, int64_t b, int64_t t, int64_t h, ForwardScratch& s) {
  const int64_t D = op.D();
  op.load_token_row(op.in.q, b, t, h, s.q);
  for (int64_t i = 0; i < D; ++i) s.z[i] = s.open.c[i] - eta * s.open.g[i];
  for (int64_t d = 0; d < D; ++d) {
    const double *h_row = s.open.h + d * D, *G_row = s.open.G + d * D;
    for (int64_t i = 0; i < D; ++i) s.z[i] += op.scale * s.q[d] * (h_row[i] - eta * G_row[i]);
  }
  normalise(s.z, D, op.options.eps, s.row);
  for (int64_t i = 0; i < D; ++i) s.o[i] = s.z[i] + s.w[i] * s.row[i] + s.b[i];
}

// The move by the sums, which are 0 again after it.
void close_mini_batch(const Operator& op, double eta, const Open& open) {
  add_scaled(-eta, open.G, op.state_size(), open.h);
  add_scaled(-eta, open.g, op.D(), open.c);
  fill(open.G, op.state_size(), 0);
  fill(open.g, op.D(), 0);
}

// The tokens of one head of a sequence, of which `position` tokens of the open mini-batch came before.
void scan(const Operator& op, const Sequence& sequence, int64_t h, int64_t position, const TensorView& o,
          ForwardScratch& s) {
  load_norm(op, h, s.w, s.b);
  for (int64_t t = sequence.begin; t < sequence.begin + sequence.length; ++t) {
    const double eta = op.load_eta(sequence.batch, t, h);
    add_token(op, sequence.batch, t, h, s);
    read_state(op, eta, sequence.batch, t, h, s);
    store_row(o, at(o, {sequence.batch, t, h}), op.D(), s.o);
    if (++position == op.C()) {
      close_mini_batch(op, eta, s.open);
      position = 0;
    }
  }
}

// Extends a partial last mini-batch of the forward by rows with q = k = v = 0, where z = c, and closes it.
void extend_and_close(const Operator& op, const Sequence& sequence, int64_t h, ForwardScratch& s) {
  const int64_t rows = sequence.length % op.C();
  if (rows == 0) return;
  fill(s.k, op.D(), 0);
  fill(s.v, op.D(), 0);
  inner_gradient(op, s.w, s.b, s.k, s.v, s.open.c, s.inner);
  add_scaled(static_cast<double>(op.C() - rows), s.inner.n, op.D(), s.open.g);
  close_mini_batch(op, op.load_eta(sequence.batch, sequence.begin + sequence.length - 1, h), s.open);
}

// The backward ------------------------------------------------------------------------------------------------------

struct BackwardScratch {
  ForwardScratch forward;
  double* starts_h;  // [mini-batches of the sequence, D, D] the state before each
  double* starts_c;  // [mini-batches of the sequence, D]

  // The rows of a mini-batch; where it is partial, the one after the last token is the extension row.
  double *q, *k, *v;      // [C + 1, D]
  double *x, *y, *n, *r;  // [C + 1, D], r [C + 1]: the inner gradient
  double* eta;            // [C]
  double* M;              // [C, C] eta_i (scale q_i k_j + 1), lower
  double* Dm;             // [C, C] dyo_i n_j, lower
  double* dyo;            // [C, D] gradient of the rows that the outer norm sees
  double *F, *dz, *w_dy;  // [C + 1, D] k dh + dc, gradient of z, w * dy

  double *dh, *dc;                                             // [D, D], [D] gradient of the state
  double *w, *b, *row, *along, *d_o, *dn, *dy, *dx, *dq, *dk;  // [D]
};

BackwardScratch backward_layout(ScratchLayout& layout, const Operator& op, int64_t max_mini_batches) {
  const int64_t D = op.D(), C = op.C();
  BackwardScratch s{};
  s.forward = forward_layout(layout, op);
  s.starts_h = layout.take<double>(max_mini_batches * op.state_size());
  s.starts_c = layout.take<double>(max_mini_batches * D);
  for (double** x : {&s.q, &s.k, &s.v, &s.x, &s.y, &s.n, &s.F, &s.dz, &s.w_dy}) *x = layout.take<double>((C + 1) * D);
  s.r = layout.take<double>(C + 1);
  s.eta = layout.take<double>(C);
  for (double** x : {&s.M, &s.Dm}) *x = layout.take<double>(C * C);
  s.dyo = layout.take<double>(C * D);
  s.dh = layout.take<double>(op.state_size());
  for (double** x : {&s.dc, &s.w, &s.b, &s.row, &s.along, &s.d_o, &s.dn, &s.dy, &s.dx, &s.dq, &s.dk}) {
    *x = layout.take<double>(D);
  }
  return s;
}

// One sequence and head. The sums of the gradients of w and b over this sequence are added to dw and db.
class HeadBackward {
 public:
  HeadBackward(const Operator& op, const TttLinearBackward& args, const Sequence& sequence, int64_t head,
               const BackwardScratch& scratch, double* dw, double* db)
      : op_(op), args_(args), sequence_(sequence), head_(head), s_(scratch), dw_(dw), db_(db) {}

  void run() {
    const int64_t C = op_.C(), count = (sequence_.length + C - 1) / C;
    load_norm(op_, head_, s_.w, s_.b);
    find_starts(count);
    op_.load_optional(args_.d_final_state, args_.d_final_state_bias, sequence_.index, head_, s_.dh, s_.dc);
    for (int64_t m = count - 1; m >= 0; --m) {
      begin_ = sequence_.begin + m * C;
      tokens_ = std::min(C, sequence_.length - m * C);
      rows_ = tokens_ + (tokens_ < C ? 1 : 0);
      h_ = s_.starts_h + m * op_.state_size();
      c_ = s_.starts_c + m * op_.D();
      recompute();
      outer_norm();
      inner_gradients();
      store_token_gradients();
      advance_state_gradient();
    }
    op_.store_optional(args_.d_initial_state, args_.d_initial_state_bias, sequence_.index, head_, s_.dh, s_.dc);
  }

 private:
  // How many rows of the definition row j stands for.
  double weight(int64_t j) const { return j < tokens_ ? 1 : static_cast<double>(op_.C() - tokens_); }
  double last_eta() const { return s_.eta[tokens_ - 1]; }

  void find_starts(int64_t count) {
    const int64_t D = op_.D(), C = op_.C();
    const Open& open = s_.forward.open;
    op_.load_optional(op_.in.initial_state, op_.in.initial_state_bias, sequence_.index, head_, open.h, open.c);
    fill(open.G, op_.state_size(), 0);
    fill(open.g, D, 0);
    load_norm(op_, head_, s_.forward.w, s_.forward.b);
    for (int64_t m = 0; m < count; ++m) {
      copy(open.h, op_.state_size(), s_.starts_h + m * op_.state_size());
      copy(open.c, D, s_.starts_c + m * D);
      if (m + 1 == count) break;
      const int64_t begin = sequence_.begin + m * C;
      for (int64_t t = begin; t < begin + C; ++t) add_token(op_, sequence_.batch, t, head_, s_.forward);
      close_mini_batch(op_, op_.load_eta(sequence_.batch, begin + C - 1, head_), open);
    }
  }

  // The rows, their inner gradients and M.
  void recompute() {
    const int64_t D = op_.D(), C = op_.C();
    for (double* x : {s_.q, s_.k, s_.v}) fill(x, rows_ * D, 0);
    for (int64_t i = 0; i < tokens_; ++i) {
      op_.load_token_row(op_.in.q, sequence_.batch, begin_ + i, head_, s_.q + i * D);
      op_.load_token_row(op_.in.k, sequence_.batch, begin_ + i, head_, s_.k + i * D);
      op_.load_token_row(op_.in.v, sequence_.batch, begin_ + i, head_, s_.v + i * D);
      s_.eta[i] = op_.load_eta(sequence_.batch, begin_ + i, head_);
    }
    for (int64_t j = 0; j < rows_; ++j) {
      row_times(s_.k + j * D, h_, D, s_.row);
      add_scaled(1, c_, D, s_.row);
      InnerRow inner{s_.x + j * D, s_.y + j * D, s_.n + j * D, 0};
      inner_gradient(op_, s_.w, s_.b, s_.k + j * D, s_.v + j * D, s_.row, inner);
      s_.r[j] = inner.r;
    }
    for (int64_t i = 0; i < tokens_; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        s_.M[i * C + j] = s_.eta[i] * (op_.scale * dot(s_.q + i * D, s_.k + j * D, D) + 1);
      }
    }
  }

  // dyo, through o = yo + w * LN(yo) + b with yo = scale q h + c - M n, and its share of dw and db.
  void outer_norm() {
    const int64_t D = op_.D(), C = op_.C();
    double *yo = s_.row, *xo = s_.along, *t = s_.dx;
    for (int64_t i = 0; i < tokens_; ++i) {
      double* dyo = s_.dyo + i * D;
      if (!args_.d_o.present()) {
        fill(dyo, D, 0);
        continue;
      }
      op_.load_token_row(args_.d_o, sequence_.batch, begin_ + i, head_, s_.d_o);
      row_times(s_.q + i * D, h_, D, yo);
      for (int64_t e = 0; e < D; ++e) yo[e] = op_.scale * yo[e] + c_[e];
      for (int64_t j = 0; j <= i; ++j) add_scaled(-s_.M[i * C + j], s_.n + j * D, D, yo);
      const double ro = normalise(yo, D, op_.options.eps, xo);
      for (int64_t e = 0; e < D; ++e) {
        t[e] = s_.w[e] * s_.d_o[e];
        dw_[e] += s_.d_o[e] * xo[e];
        db_[e] += s_.d_o[e];
      }
      project(t, xo, ro, D, dyo);
      add_scaled(1, s_.d_o, D, dyo);
    }
  }

  // From dyo and the gradient of the end state to F, dz and w * dy of every row, and the share of dw and db of the
  // inner norm.
  void inner_gradients() {
    const int64_t D = op_.D(), C = op_.C();
    for (int64_t j = 0; j < rows_; ++j) {
      const double *x = s_.x + j * D, *y = s_.y + j * D, *n = s_.n + j * D, r = s_.r[j];
      double *F = s_.F + j * D, *dz = s_.dz + j * D, *dn = s_.dn;
      row_times(s_.k + j * D, s_.dh, D, F);
      add_scaled(1, s_.dc, D, F);
      for (int64_t e = 0; e < D; ++e) dn[e] = -last_eta() * F[e];
      for (int64_t i = j; i < tokens_; ++i) add_scaled(-s_.M[i * C + j], s_.dyo + i * D, D, dn);

      project(dn, x, r, D, s_.dy);
      const double width = static_cast<double>(D), dr = dot(dn, n, D) / r;
      const double along_y = dot(x, y, D) / width, along_dn = dot(x, dn, D) / width;
      for (int64_t e = 0; e < D; ++e) {
        s_.dx[e] = -r * (dn[e] * along_y + y[e] * along_dn) + s_.w[e] * s_.w[e] * s_.dy[e];
        dw_[e] += weight(j) * (2 * s_.w[e] * x[e] + s_.b[e] - s_.v[j * D + e] + s_.k[j * D + e]) * s_.dy[e];
        s_.w_dy[j * D + e] = s_.w[e] * s_.dy[e];
        db_[e] += weight(j) * s_.w_dy[j * D + e];
      }
      project(s_.dx, x, r, D, dz);
      add_scaled(-r * r * dr / width, x, D, dz);
    }
  }

  void store_token_gradients() {
    const int64_t D = op_.D(), C = op_.C(), b = sequence_.batch;
    for (int64_t i = 0; i < tokens_; ++i) {
      for (int64_t j = 0; j <= i; ++j) s_.Dm[i * C + j] = dot(s_.dyo + i * D, s_.n + j * D, D);
    }
    for (int64_t i = 0; i < tokens_; ++i) {
      const int64_t t = begin_ + i;
      const double *dyo = s_.dyo + i * D, *w_dy = s_.w_dy + i * D, *dz = s_.dz + i * D, *n = s_.n + i * D;
      // dq = s (dyo h^T - eta (Dm k));  dk = w * dy + dz h^T - s Dm^T (eta * q) - eta_L n dh^T;  dv = -w * dy
      for (int64_t d = 0; d < D; ++d) {
        s_.dq[d] = op_.scale * dot(dyo, h_ + d * D, D);
        s_.dk[d] = w_dy[d] + dot(dz, h_ + d * D, D) - last_eta() * dot(n, s_.dh + d * D, D);
        s_.row[d] = -w_dy[d];
      }
      double deta = 0;
      for (int64_t j = 0; j <= i; ++j) {
        const double Dm = s_.Dm[i * C + j];
        add_scaled(-op_.scale * s_.eta[i] * Dm, s_.k + j * D, D, s_.dq);
        deta -= Dm * (op_.scale * dot(s_.q + i * D, s_.k + j * D, D) + 1);
      }
      for (int64_t j = i; j < tokens_; ++j) {
        add_scaled(-op_.scale * s_.eta[j] * s_.Dm[j * C + i], s_.q + j * D, D, s_.dk);
      }
      if (i == tokens_ - 1) {
        for (int64_t j = 0; j < rows_; ++j) deta -= weight(j) * dot(s_.n + j * D, s_.F + j * D, D);
      }
      if (args_.dq.present()) store_row(args_.dq, at(args_.dq, {b, t, head_}), D, s_.dq);
      if (args_.dk.present()) store_row(args_.dk, at(args_.dk, {b, t, head_}), D, s_.dk);
      if (args_.dv.present()) store_row(args_.dv, at(args_.dv, {b, t, head_}), D, s_.row);
      if (args_.deta.present()) store(args_.deta, at(args_.deta, {b, t, head_}), deta);
    }
  }

  // dh += s q^T dyo + k^T dz;  dc += colsum(dyo + dz)
  void advance_state_gradient() {
    const int64_t D = op_.D();
    for (int64_t j = 0; j < rows_; ++j) {
      if (j < tokens_) {
        add_outer(op_.scale, s_.q + j * D, s_.dyo + j * D, D, s_.dh);
        add_outer(1, s_.k + j * D, s_.dz + j * D, D, s_.dh);
        add_scaled(1, s_.dyo + j * D, D, s_.dc);
      }
      add_scaled(weight(j), s_.dz + j * D, D, s_.dc);
    }
  }

  const Operator& op_;
  const TttLinearBackward& args_;
  const Sequence& sequence_;
  const int64_t head_;
  BackwardScratch s_;
  double* const dw_;
  double* const db_;

  // The mini-batch at hand.
  int64_t begin_ = 0, tokens_ = 0, rows_ = 0;
  const double *h_ = nullptr, *c_ = nullptr;
};

}  // namespace

void reference_forward(const TttLinearForwardProblem& problem, const Context& context) {
  const Operator op = operator_of(problem);
  const TttLinearForward& args = problem.args;
  for_each_item(
      op.sizes.num_heads, problem.sequences, context, [&](ScratchLayout& layout) { return forward_layout(layout, op); },
      [&](const Sequence& sequence, int64_t h, ForwardScratch scratch) {
        const Open& open = scratch.open;
        op.load_optional(op.in.initial_state, op.in.initial_state_bias, sequence.index, h, open.h, open.c);
        fill(open.G, op.state_size(), 0);
        fill(open.g, op.D(), 0);
        scan(op, sequence, h, 0, args.o, scratch);
        extend_and_close(op, sequence, h, scratch);
        op.store_optional(args.final_state, args.final_state_bias, sequence.index, h, open.h, open.c);
      });
}

void reference_step(const TttLinearStepProblem& problem, const Context& context) {
  const Operator op = operator_of(problem);
  const TttLinearStep& args = problem.args;
  const std::vector<Sequence>& sequences = problem.sequences;
  const auto slot_of = [&](const Sequence& sequence) {
    return args.state_indices.present() ? load_integer(args.state_indices.data, args.state_indices.dtype,
                                                       at(args.state_indices, {sequence.index}))
                                        : sequence.index;
  };
  const auto position = [&](int64_t slot) -> int32_t& {
    return static_cast<int32_t*>(args.position.data)[at(args.position, {slot})];
  };
  for_each_item(
      op.sizes.num_heads, sequences, context, [&](ScratchLayout& layout) { return forward_layout(layout, op); },
      [&](const Sequence& sequence, int64_t h, ForwardScratch scratch) {
        const int64_t slot = slot_of(sequence);
        if (slot < 0) {
          fill(scratch.o, op.D(), 0);
          for (int64_t t = sequence.begin; t < sequence.begin + sequence.length; ++t) {
            store_row(args.o, at(args.o, {sequence.batch, t, h}), op.D(), scratch.o);
          }
          return;
        }
        const Open& open = scratch.open;
        op.load_state(args.state, slot, h, open.h);
        op.load_bias(args.state_bias, slot, h, open.c);
        op.load_state(args.gradient, slot, h, open.G);
        op.load_bias(args.gradient_bias, slot, h, open.g);
        scan(op, sequence, h, position(slot), args.o, scratch);
        op.store_state(args.state, slot, h, open.h);
        op.store_bias(args.state_bias, slot, h, open.c);
        op.store_state(args.gradient, slot, h, open.G);
        op.store_bias(args.gradient_bias, slot, h, open.g);
      });
  // The heads of a sequence share its position: it moves when all of them have read it.
  for (const Sequence& sequence : sequences) {
    const int64_t slot = slot_of(sequence);
    if (slot >= 0) position(slot) = static_cast<int32_t>((position(slot) + sequence.length) % op.C());
  }
}

void reference_backward(const TttLinearBackwardProblem& problem, const Context& context) {
  const Operator op = operator_of(problem);
  const TttLinearBackward& args = problem.args;
  const std::vector<Sequence>& sequences = problem.sequences;
  const int64_t N = static_cast<int64_t>(sequences.size()), H = op.sizes.num_heads, D = op.D();
  int64_t max_mini_batches = 0;
  for (const Sequence& sequence : sequences) {
    max_mini_batches = std::max(max_mini_batches, (sequence.length + op.C() - 1) / op.C());
  }

  // The gradients of w and b are summed over tokens per sequence, then over the sequences in order: the thread count
  // does not show.
  const int64_t count = N * H * D;
  const Workspace workspace(context, static_cast<size_t>(2 * count) * sizeof(double));
  double* const dw = static_cast<double*>(workspace.data());
  double* const db = dw + count;
  fill(dw, 2 * count, 0);
  for_each_item(
      H, sequences, context, [&](ScratchLayout& layout) { return backward_layout(layout, op, max_mini_batches); },
      [&](const Sequence& sequence, int64_t h, const BackwardScratch& scratch) {
        const int64_t partial = (sequence.index * H + h) * D;
        HeadBackward(op, args, sequence, h, scratch, dw + partial, db + partial).run();
      });

  const auto store_sum = [&](const TensorView& gradient, const double* partials) {
    if (!gradient.present()) return;
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t d = 0; d < D; ++d) {
        double sum = 0;
        for (int64_t n = 0; n < N; ++n) sum += partials[(n * H + h) * D + d];
        store(gradient, at(gradient, {h, d}), sum);
      }
    }
  };
  store_sum(args.dw, dw);
  store_sum(args.db, db);
}

}  // namespace fastweight::cpu::ttt
