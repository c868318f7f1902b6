// One mini-batch of C tokens of one head: the pieces that forward, backward and decoding share. Re-included once per
// instruction set. Notation as in include/fastweight/ttt_linear.h; rows beyond the last token are the extension rows.
#if defined(FW_CPU_TTT_LINEAR_MINI_BATCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_TTT_LINEAR_MINI_BATCH_INL_H_
#undef FW_CPU_TTT_LINEAR_MINI_BATCH_INL_H_
#else
#define FW_CPU_TTT_LINEAR_MINI_BATCH_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/sequences.h"
#include "core/ttt_linear_problem.h"
#include "core/workspace.h"
#include "cpu/simd/matmul-inl.h"
#include "cpu/simd/triangle-inl.h"
#include "cpu/state-inl.h"
#include "cpu/token_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace ttt {

// D padded: rows of tokens, and rows and columns of the state, whose panels are [ld / kPanel][ld][kPanel].
HWY_INLINE int64_t padded_width(int64_t D) { return round_up(D, std::max(kPanel, kRowMultiple)); }

// One head of one sequence.
struct Head {
  const TttLinearInputs* in;
  int64_t batch, begin, length;
  int64_t head;
  int64_t D, ld;
  int64_t C;
  float scale, eps;
  float* w;     // [ld], 0 beyond D
  float* b;     // [ld], 0 beyond D
  float* mask;  // [ld], 1 up to D, then 0

  void lay_out(ScratchLayout& layout, int64_t width) {
    w = layout.take<float>(width);
    b = layout.take<float>(width);
    mask = layout.take<float>(width);
  }

  template <class Problem>
  void open(const Problem& problem, const Sequence& sequence, int64_t h) {
    in = &problem.args.in;
    batch = sequence.batch;
    begin = sequence.begin;
    length = sequence.length;
    head = h;
    D = problem.sizes.head_dim;
    ld = padded_width(D);
    C = problem.args.options.mini_batch;
    scale = static_cast<float>(problem.scale);
    eps = static_cast<float>(problem.args.options.eps);
    load_parameter(in->w, w);
    load_parameter(in->b, b);
    for (int64_t d = 0; d < ld; ++d) mask[d] = d < D ? 1.0f : 0.0f;
  }
  void load_parameter(const TensorView& x, float* row) const {
    load_row(static_cast<const char*>(x.data) + head * x.strides[0] * element_size(x.dtype), x.dtype, x.strides[1], D,
             row, ld);
  }
  // Rows of k, q and v of the mini-batch at `token`, or of one more tensor.
  void prefetch(int64_t token, RowPrefetcher& prefetcher) const {
    for (const TensorView* x : {&in->k, &in->q, &in->v}) prefetch(*x, token, prefetcher);
  }
  void prefetch(const TensorView& x, int64_t token, RowPrefetcher& prefetcher) const {
    prefetch_rows(x, batch, std::max(token, begin), std::min(token + C, begin + length), head, 0, D, prefetcher);
  }
};

// Row [n, head] of a state bias.
HWY_INLINE char* bias_row(const TensorView& x, int64_t n, int64_t head) {
  return static_cast<char*>(x.data) + (n * x.strides[0] + head * x.strides[1]) * element_size(x.dtype);
}
HWY_NOINLINE inline void load_bias(const TensorView& x, int64_t n, const Head& head, float* c) {
  if (x.present()) {
    load_row(bias_row(x, n, head.head), x.dtype, x.strides[2], head.D, c, head.ld);
  } else {
    std::memset(c, 0, static_cast<size_t>(head.ld) * sizeof(float));
  }
}
HWY_NOINLINE inline void store_bias(const float* c, const TensorView& x, int64_t n, const Head& head) {
  if (x.present()) store_row(c, bias_row(x, n, head.head), x.dtype, x.strides[2], head.D);
}
HWY_NOINLINE inline void load_matrix(const TensorView& x, int64_t n, const Head& head, float* h) {
  if (x.present()) {
    load_state(state_of(x, false, head.D, head.D, n, head.head), 0, head.ld / kPanel, head.ld, h);
  } else {
    std::memset(h, 0, static_cast<size_t>(head.ld * head.ld) * sizeof(float));
  }
}
HWY_NOINLINE inline void store_matrix(const float* h, const TensorView& x, int64_t n, const Head& head) {
  if (x.present()) store_state(h, state_of(x, false, head.D, head.D, n, head.head), 0, head.ld / kPanel, head.ld);
}

struct MiniBatch {
  RowPrefetcher prefetcher;
  int64_t rows;    // C; 4 in decoding, where one of them is a token
  int64_t tokens;  // rows that are tokens
  int64_t ld;
  float* k;        // [2 rows][ld]: k, then q
  float* v;        // [rows][ld]
  float* columns;  // [ld][2 rows]: k and q transposed
  float* eta;      // [rows]
  float* z;        // [2 rows][ld]: k h, then q h; becomes LN(z), then the output before its norm
  float* y;        // [rows][ld]: w (w LN(z) + b - v + k)
  float* n;        // [rows][ld]: the inner gradients
  float* r;        // [rows]: 1 / sqrt(variance + eps) of z
  float* moves;    // [rows][rows]: -eta_i (scale q_i . k_j + 1) at [j][i] for j <= i, else 0

  const float* q() const { return k + rows * ld; }
  float* out() const { return z + rows * ld; }
  float last_eta() const { return eta[tokens - 1]; }

  void lay_out(ScratchLayout& layout, int64_t row_count, int64_t width) {
    rows = row_count;
    ld = width;
    k = layout.take<float>(2 * rows * ld);
    v = layout.take<float>(rows * ld);
    columns = layout.take<float>(2 * rows * ld);
    eta = layout.take<float>(round_up(rows, kLanes));
    z = layout.take<float>(2 * rows * ld);
    y = layout.take<float>(rows * ld);
    n = layout.take<float>(rows * ld);
    r = layout.take<float>(rows);
    moves = layout.take<float>(rows * rows);
  }
};

HWY_NOINLINE inline void load_mini_batch(const Head& head, int64_t token, int64_t tokens, MiniBatch& mb) {
  const TttLinearInputs& in = *head.in;
  mb.tokens = tokens;
  load_rows(in.k, head.batch, token, head.head, tokens, 0, head.D, mb.k, mb.ld, mb.rows);
  load_rows(in.q, head.batch, token, head.head, tokens, 0, head.D, mb.k + mb.rows * mb.ld, mb.ld, mb.rows);
  load_rows(in.v, head.batch, token, head.head, tokens, 0, head.D, mb.v, mb.ld, mb.rows);
  load_row(row_of(in.eta, head.batch, token, head.head), in.eta.dtype, in.eta.strides[1], tokens, mb.eta,
           round_up(mb.rows, kLanes));
  transpose(mb.k, mb.ld, 2 * mb.rows, mb.ld, mb.columns, 2 * mb.rows);
}

// x [rows][ld] = the first `rows` rows of (k; q) times the matrix h.
HWY_NOINLINE inline void read_matrix(const MiniBatch& mb, int64_t rows, const float* h, float* x) {
  for (int64_t p = 0; p < mb.ld; p += kPanel) {
    product<Columns, Start::kZero>({.rows = rows,
                                    .columns = kPanel,
                                    .depth = mb.ld,
                                    .a = mb.columns,
                                    .a_stride = 2 * mb.rows,
                                    .b = h + p * mb.ld,
                                    .b_stride = kPanel,
                                    .c_in = x + p,
                                    .c_out = x + p,
                                    .c_stride = mb.ld});
  }
}

// x = LN(x) in place; returns 1 / sqrt(variance + eps). Padding is 0 before and after.
HWY_INLINE float normalise(const Head& head, float* x) {
  Vec sum = zero();
  for (int64_t d = 0; d < head.ld; d += kLanes) sum = hn::Add(sum, load(x + d));
  const float inverse = 1.0f / static_cast<float>(head.D);
  const Vec mean = broadcast(sum_of_lanes(sum) * inverse);
  Vec squares = zero();
  for (int64_t d = 0; d < head.ld; d += kLanes) {
    const Vec centred = hn::Mul(hn::Sub(load(x + d), mean), load(head.mask + d));
    squares = fma(centred, centred, squares);
    store(centred, x + d);
  }
  const float r = 1.0f / std::sqrt(sum_of_lanes(squares) * inverse + head.eps);
  for (int64_t d = 0; d < head.ld; d += kLanes) store(hn::Mul(broadcast(r), load(x + d)), x + d);
  return r;
}

// r (a - mean(a) - x mean(x a)), the adjoint of x = LN(z) and the shape of n itself: `mean` and `mean_x` are given.
HWY_INLINE Vec norm_adjoint(Vec r, Vec a, Vec x, Vec mean, Vec mean_x, Vec mask) {
  return hn::Mul(hn::Mul(r, mask), fnma(x, mean_x, hn::Sub(a, mean)));
}

// From k h in z, for rows [0, rows): z + c becomes x = LN(z), and y = w (w x + b - v + k), n = r (y - m(y) - x m(x y)).
HWY_NOINLINE inline void inner_gradients(const Head& head, const float* c, int64_t rows, MiniBatch& mb) {
  const float inverse = 1.0f / static_cast<float>(head.D);
  for (int64_t i = 0; i < rows; ++i) {
    mb.prefetcher.issue_share(rows - i);
    float* x = mb.z + i * mb.ld;
    float* y = mb.y + i * mb.ld;
    for (int64_t d = 0; d < mb.ld; d += kLanes) store(hn::Add(load(x + d), load(c + d)), x + d);
    mb.r[i] = normalise(head, x);
    Vec sum = zero(), sum_x = zero();
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const int64_t at = i * mb.ld + d;
      const Vec w = load(head.w + d);
      const Vec target = hn::Sub(load(mb.v + at), load(mb.k + at));
      const Vec residual = hn::Sub(fma(w, load(x + d), load(head.b + d)), target);
      const Vec value = hn::Mul(w, residual);
      sum = hn::Add(sum, value);
      sum_x = fma(load(x + d), value, sum_x);
      store(value, y + d);
    }
    const Vec mean = broadcast(sum_of_lanes(sum) * inverse), mean_x = broadcast(sum_of_lanes(sum_x) * inverse);
    const Vec r = broadcast(mb.r[i]);
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      store(norm_adjoint(r, load(y + d), load(x + d), mean, mean_x, load(head.mask + d)), mb.n + i * mb.ld + d);
    }
  }
}

// Matrices between the tokens of a mini-batch, [rows][rows], stored by rows or by columns.
struct RowMatrix {
  const float* values;
  int64_t rows;
  int64_t size() const { return rows; }
  HWY_INLINE float operator()(int64_t i, int64_t j) const { return values[i * rows + j]; }
};
struct ColumnMatrix {
  const float* values;
  int64_t rows;
  int64_t size() const { return rows; }
  HWY_INLINE float operator()(int64_t i, int64_t j) const { return values[j * rows + i]; }
};

// A row of 64 ones followed by 64 zeros: entry j of a mask "j <= i" begins at ones + 63 - i.
struct Steps {
  alignas(64) float values[128] = {};
  constexpr Steps() {
    for (int i = 0; i < 64; ++i) values[i] = 1;
  }
  // "i >= j" for i from `i` on.
  HWY_INLINE Vec from(int64_t j, int64_t i) const { return hn::Sub(broadcast(1.0f), load(values + 64 - j + i)); }
};
inline constexpr Steps kSteps;

HWY_NOINLINE inline void make_moves(const Head& head, MiniBatch& mb) {
  product<Columns, Start::kZero>({.rows = mb.rows,
                                  .columns = mb.rows,
                                  .depth = mb.ld,
                                  .a = mb.columns,
                                  .a_stride = 2 * mb.rows,
                                  .b = mb.columns + mb.rows,
                                  .b_stride = 2 * mb.rows,
                                  .c_in = mb.moves,
                                  .c_out = mb.moves,
                                  .c_stride = mb.rows});
  const Vec scale = broadcast(head.scale);
  for (int64_t j = 0; j < mb.rows; ++j) {
    for (int64_t i = 0; i < mb.rows; i += kLanes) {
      float* x = mb.moves + j * mb.rows + i;
      const Vec move = hn::Mul(load(mb.eta + i), fma(scale, load(x), broadcast(1.0f)));
      store(hn::Neg(hn::Mul(move, kSteps.from(j, i))), x);
    }
  }
}

// From q h in out(): scale q h + c - M n, the outputs before their norm.
HWY_NOINLINE inline void read_outputs(const Head& head, const float* c, MiniBatch& mb) {
  const Vec scale = broadcast(head.scale);
  for (int64_t i = 0; i < mb.rows; ++i) {
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      float* x = mb.out() + i * mb.ld + d;
      store(fma(scale, load(x), load(c + d)), x);
    }
  }
  add_triangular<Triangle::kLower>(ColumnMatrix{mb.moves, mb.rows}, mb.n, mb.ld, mb.out(), mb.ld, mb.ld);
}

// The state at the start of the next mini-batch: h - eta_L k^T n, c - eta_L sum n. The sums are complete before the
// step is taken, as in decoding, where they grow token by token.
HWY_NOINLINE inline void advance_state(const MiniBatch& mb, const float* h_in, const float* c_in, float* h_out,
                                       float* c_out) {
  const float eta = mb.last_eta();
  for (int64_t p = 0; p < mb.ld; p += kPanel) {
    product<Columns, Start::kStep>({.rows = mb.ld,
                                    .columns = kPanel,
                                    .depth = mb.rows,
                                    .a = mb.k,
                                    .a_stride = mb.ld,
                                    .b = mb.n + p,
                                    .b_stride = mb.ld,
                                    .c_in = h_in + p * mb.ld,
                                    .c_out = h_out + p * mb.ld,
                                    .c_stride = kPanel,
                                    .decay = &eta});
  }
  for (int64_t d = 0; d < mb.ld; d += kLanes) {
    Vec sum = zero();
    for (int64_t i = 0; i < mb.rows; ++i) sum = hn::Add(sum, load(mb.n + i * mb.ld + d));
    store(fnma(broadcast(eta), sum, load(c_in + d)), c_out + d);
  }
}

// o = y + w LN(y) + b for one row, in place.
HWY_NOINLINE inline void outer_norm(const Head& head, float* y, float* scratch) {
  std::memcpy(scratch, y, static_cast<size_t>(head.ld) * sizeof(float));
  normalise(head, scratch);
  for (int64_t d = 0; d < head.ld; d += kLanes) {
    store(hn::Add(load(y + d), fma(load(head.w + d), load(scratch + d), load(head.b + d))), y + d);
  }
}

}  // namespace ttt
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
