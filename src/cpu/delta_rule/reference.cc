// The delta-rule family and those related to it, token by token, in double precision: the definition as loops. It takes
// every valid problem and is what all other implementations are measured against.
//
// A gate per head is a gate per channel with equal channels, and a step size per head is one per value channel with
// equal channels; the gradients of the narrower forms are the sums over the channels. Only the loads and stores know
// the difference.
//
// An item is one sequence and one q/k head with its group of value heads, so that dq and dk are summed over the
// group in a fixed order. All scratch memory is doubles.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/workspace.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/reference.h"
#include "cpu/scalar_types.h"

namespace fastweight::cpu {
namespace {

// The operator: sizes, inputs and options with the meaning of the options -------------------------------------------

// One token of one value head after the options have been applied. All rows have full width.
struct Token {
  double* q;       // [K] normalised if asked for
  double* k;       // [K]
  double* v;       // [V]
  double* beta;    // [V]
  double* decay;   // [K] exp(g)
  double* reader;  // [K] what the state before the token is read with: exp(g) k, 0, p or a
  double* writer;  // [K] what u is written with: k or b
};

struct Operator {
  const DeltaRuleSizes& sizes;
  const DeltaRuleInputs& in;
  const DeltaRuleOptions& options;
  const Transition& transition;
  double scale;

  int64_t K() const { return sizes.head_dim_k; }
  int64_t V() const { return sizes.head_dim_v; }
  int64_t state_size() const { return K() * V(); }

  bool corrects(Correction correction) const { return transition.correction == correction; }

  // How many gate values a token has: 0, 1 or K.
  int64_t gate_width() const {
    if (options.gate == Gate::kNone) return 0;
    return options.gate == Gate::kPerHead ? 1 : K();
  }
  int64_t beta_width() const { return in.beta.rank == 4 ? V() : 1; }

  int64_t gate_offset(const TensorView& x, int64_t b, int64_t t, int64_t h, int64_t channel) const {
    return at(x, {b, t, h}) + (gate_width() == 1 ? 0 : channel * last_stride(x));
  }
  int64_t beta_offset(const TensorView& x, int64_t b, int64_t t, int64_t h, int64_t channel) const {
    return at(x, {b, t, h}) + (beta_width() == 1 ? 0 : channel * last_stride(x));
  }
  int64_t bias_offset(const TensorView& x, int64_t h, int64_t channel) const {
    return gate_width() == 1 ? at(x, {h}) : at(x, {h, channel});
  }

  double beta_factor() const { return options.allow_neg_eigval ? 2 : 1; }
  bool has_lower_bound() const { return options.lower_bound != DeltaRuleOptions::kUnset; }

  // exp(A_log); the lower-bound gate may leave it out.
  double gate_rate(int64_t h) const { return in.a_log.present() ? std::exp(load(in.a_log, at(in.a_log, {h}))) : 1; }

  // x + dt_bias
  double biased_gate(int64_t b, int64_t t, int64_t h, int64_t channel) const {
    const double x = load(in.g, gate_offset(in.g, b, t, h, channel));
    return in.dt_bias.present() ? x + load(in.dt_bias, bias_offset(in.dt_bias, h, channel)) : x;
  }

  // g, the logarithm of the decay.
  double log_decay(int64_t b, int64_t t, int64_t h, int64_t channel) const {
    if (!options.gate_in_kernel) return load(in.g, gate_offset(in.g, b, t, h, channel));
    const double x = biased_gate(b, t, h, channel);
    if (has_lower_bound()) return options.lower_bound * sigmoid(gate_rate(h) * x);
    return -gate_rate(h) * softplus(x);
  }

  // The row of q, k or p of a head. Returns rstd with row = rstd * raw (1 without normalisation).
  double load_qk(const TensorView& x, int64_t b, int64_t t, int64_t head, double* row) const {
    load_row(x, at(x, {b, t, head}), K(), row);
    if (!options.qk_l2norm) return 1;
    const double rstd = 1 / std::sqrt(dot(row, row, K()) + 1e-6);
    for (int64_t d = 0; d < K(); ++d) row[d] *= rstd;
    return rstd;
  }

  void load_token(int64_t b, int64_t t, int64_t h, const Token& token) const {
    load_qk(in.q, b, t, h / sizes.group, token.q);
    load_qk(in.k, b, t, h / sizes.group, token.k);
    load_row(in.v, at(in.v, {b, t, h}), V(), token.v);

    fill(token.beta, V(), 1);
    if (in.beta.present()) {
      for (int64_t i = 0; i < beta_width(); ++i) {
        const double x = load(in.beta, beta_offset(in.beta, b, t, h, i));
        token.beta[i] = options.beta_sigmoid ? beta_factor() * sigmoid(x) : x;
      }
      if (beta_width() == 1) fill(token.beta, V(), token.beta[0]);
    }

    fill(token.decay, K(), 1);
    for (int64_t d = 0; d < gate_width(); ++d) token.decay[d] = std::exp(log_decay(b, t, h, d));
    if (gate_width() == 1) fill(token.decay, K(), token.decay[0]);

    const bool has_reader = transition.reader.present();
    if (has_reader) load_qk(transition.reader, b, t, h / sizes.group, token.reader);
    for (int64_t d = 0; d < K() && !has_reader; ++d) {
      token.reader[d] = corrects(Correction::kKey) ? token.decay[d] * token.k[d] : 0;
    }
    copy(token.k, K(), token.writer);
    if (transition.writer.present()) load_qk(transition.writer, b, t, h / sizes.group, token.writer);
  }

  // A state whose last two axes start at `offset`, in the order that the options give them, to and from [K, V].
  void load_state(const TensorView& x, int64_t offset, double* S) const {
    for (int64_t d = 0; d < K(); ++d) {
      for (int64_t j = 0; j < V(); ++j) S[d * V() + j] = load(x, offset + state_offset(x, d, j));
    }
  }
  void store_state(const TensorView& x, int64_t offset, const double* S) const {
    for (int64_t d = 0; d < K(); ++d) {
      for (int64_t j = 0; j < V(); ++j) store(x, offset + state_offset(x, d, j), S[d * V() + j]);
    }
  }
  // Absent: 0.
  void load_optional_state(const TensorView& x, int64_t n, int64_t h, double* S) const {
    if (x.present()) {
      load_state(x, at(x, {n, h}), S);
    } else {
      fill(S, state_size(), 0);
    }
  }

 private:
  int64_t state_offset(const TensorView& x, int64_t d, int64_t j) const {
    const size_t first = static_cast<size_t>(x.rank - 2);
    return options.state_v_first ? j * x.strides[first] + d * x.strides[first + 1]
                                 : d * x.strides[first] + j * x.strides[first + 1];
  }
};

template <class Problem>
Operator operator_of(const Problem& problem) {
  return {problem.sizes, problem.args.in, problem.args.options, problem.transition, problem.scale};
}

Token take_token(ScratchLayout& layout, const Operator& op) {
  return {layout.take<double>(op.K()), layout.take<double>(op.K()), layout.take<double>(op.V()),
          layout.take<double>(op.V()), layout.take<double>(op.K()), layout.take<double>(op.K()),
          layout.take<double>(op.K())};
}

// The recurrence ----------------------------------------------------------------------------------------------------

// S: S_{t-1} -> S_t, and the rows x_t = reader_t S_{t-1} and u_t.
void advance(const Operator& op, const Token& token, double* S, double* x, double* u) {
  const int64_t K = op.K(), V = op.V();
  const bool low_rank = op.corrects(Correction::kLowRank);
  fill(x, V, 0);
  for (int64_t d = 0; d < K; ++d) add_scaled(token.reader[d], S + d * V, V, x);
  for (int64_t j = 0; j < V; ++j) u[j] = low_rank ? x[j] : token.beta[j] * (token.v[j] - x[j]);
  for (int64_t d = 0; d < K; ++d) {
    double* row = S + d * V;
    for (int64_t j = 0; j < V; ++j) row[j] *= token.decay[d];
    add_scaled(token.writer[d], u, V, row);
    if (low_rank) add_scaled(token.k[d], token.v, V, row);
  }
}

struct ForwardScratch {
  Token token;
  double* S;  // [K, V]
  double* x;  // [V]
  double* u;  // [V]
  double* o;  // [V]
};

ForwardScratch forward_layout(ScratchLayout& layout, const Operator& op) {
  return {take_token(layout, op), layout.take<double>(op.state_size()), layout.take<double>(op.V()),
          layout.take<double>(op.V()), layout.take<double>(op.V())};
}

// All tokens of one value head of a sequence: scratch.S goes from the initial to the final state. o may be absent.
void scan(const Operator& op, const Sequence& sequence, int64_t h, const TensorView& o, const TensorView& chunk_states,
          const ForwardScratch& scratch) {
  const int64_t b = sequence.batch, C = op.options.chunk_size;
  for (int64_t i = 0; i < sequence.length; ++i) {
    if (chunk_states.present() && i % C == 0) {
      op.store_state(chunk_states, at(chunk_states, {b, sequence.first_chunk + i / C, h}), scratch.S);
    }
    const int64_t t = sequence.begin + i;
    op.load_token(b, t, h, scratch.token);
    advance(op, scratch.token, scratch.S, scratch.x, scratch.u);
    if (!o.present()) continue;
    fill(scratch.o, op.V(), 0);
    for (int64_t d = 0; d < op.K(); ++d) {
      add_scaled(op.scale * scratch.token.q[d], scratch.S + d * op.V(), op.V(), scratch.o);
    }
    store_row(o, at(o, {b, t, h}), op.V(), scratch.o);
  }
}

// The backward ------------------------------------------------------------------------------------------------------

struct BackwardScratch {
  Token token;
  double* chunk_starts;  // [chunks of the sequence, K, V] the state before each chunk
  double* states;        // [C + 1, K, V] the state before each token of a chunk, and after the last
  double* x;             // [C, V]
  double* u;             // [C, V]
  double* G;             // [K, V] gradient of the state
  double* d_o;           // [V]
  double* dv;            // [V]
  double* dx;            // [V]
  double* dbeta;         // [V]
  double* dg;            // [K]
  double* dq;            // [length, K] gradients of the normalised rows, summed over the group
  double* dk;            // [length, K]
  double* d_reader;      // [length, K] where the reader is a tensor
  double* d_writer;      // [length, K] where the writer is not k
  double* row;           // [K]
};

BackwardScratch backward_layout(ScratchLayout& layout, const Operator& op, int64_t max_length, int64_t stored_chunks) {
  const int64_t K = op.K(), V = op.V(), KV = op.state_size(), C = op.options.chunk_size;
  return {take_token(layout, op),
          layout.take<double>(stored_chunks * KV),
          layout.take<double>((C + 1) * KV),
          layout.take<double>(C * V),
          layout.take<double>(C * V),
          layout.take<double>(KV),
          layout.take<double>(V),
          layout.take<double>(V),
          layout.take<double>(V),
          layout.take<double>(V),
          layout.take<double>(K),
          layout.take<double>(max_length * K),
          layout.take<double>(max_length * K),
          layout.take<double>(op.transition.reader.present() ? max_length * K : 0),
          layout.take<double>(op.transition.writer.present() ? max_length * K : 0),
          layout.take<double>(K)};
}

// One sequence and value head. The sums of the parameter gradients over this sequence go to da_log[0] and
// ddt_bias[0 .. gate_width).
class HeadBackward {
 public:
  HeadBackward(const Operator& op, const DeltaRuleBackward& args, const Sequence& sequence, int64_t h,
               const BackwardScratch& scratch, double* da_log, double* ddt_bias)
      : op_(op), args_(args), sequence_(sequence), h_(h), scratch_(scratch), da_log_(da_log), ddt_bias_(ddt_bias) {}

  void run() const {
    const int64_t C = op_.options.chunk_size;
    const int64_t chunks = (sequence_.length + C - 1) / C;
    if (!args_.chunk_states.present()) find_chunk_starts(chunks);

    op_.load_optional_state(args_.d_final_state, sequence_.index, h_, scratch_.G);
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t begin = c * C, end = std::min(begin + C, sequence_.length);
      recompute_chunk(c, begin, end);
      for (int64_t i = end - 1; i >= begin; --i) token_backward(i, i - begin);
    }
    if (args_.d_initial_state.present()) {
      op_.store_state(args_.d_initial_state, at(args_.d_initial_state, {sequence_.index, h_}), scratch_.G);
    }
  }

 private:
  void find_chunk_starts(int64_t chunks) const {
    const int64_t C = op_.options.chunk_size, KV = op_.state_size();
    if (chunks == 0) return;
    op_.load_optional_state(op_.in.initial_state, sequence_.index, h_, scratch_.chunk_starts);
    for (int64_t c = 0; c + 1 < chunks; ++c) {
      double* S = scratch_.chunk_starts + (c + 1) * KV;
      copy(S - KV, KV, S);
      for (int64_t i = c * C; i < (c + 1) * C; ++i) {
        op_.load_token(sequence_.batch, sequence_.begin + i, h_, scratch_.token);
        advance(op_, scratch_.token, S, scratch_.x, scratch_.u);
      }
    }
  }

  // All states inside the chunk, and the rows x and u.
  void recompute_chunk(int64_t c, int64_t begin, int64_t end) const {
    const int64_t KV = op_.state_size(), V = op_.V();
    if (args_.chunk_states.present()) {
      const TensorView& saved = args_.chunk_states;
      op_.load_state(saved, at(saved, {sequence_.batch, sequence_.first_chunk + c, h_}), scratch_.states);
    } else {
      copy(scratch_.chunk_starts + c * KV, KV, scratch_.states);
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i - begin;
      double* S = scratch_.states + (row + 1) * KV;
      copy(S - KV, KV, S);
      op_.load_token(sequence_.batch, sequence_.begin + i, h_, scratch_.token);
      advance(op_, scratch_.token, S, scratch_.x + row * V, scratch_.u + row * V);
    }
  }

  // Token i of the sequence, which is row `row` of its chunk. G: gradient of S_t -> gradient of S_{t-1}.
  void token_backward(int64_t i, int64_t row) const {
    const int64_t K = op_.K(), V = op_.V(), b = sequence_.batch, t = sequence_.begin + i;
    const bool low_rank = op_.corrects(Correction::kLowRank), by_key = op_.corrects(Correction::kKey);
    const Token& token = scratch_.token;
    const double* before = scratch_.states + row * K * V;  // S_{t-1}
    const double* after = before + K * V;                  // S_t
    const double* x = scratch_.x + row * V;
    const double* u = scratch_.u + row * V;
    double *G = scratch_.G, *d_o = scratch_.d_o, *dv = scratch_.dv, *dx = scratch_.dx;

    op_.load_token(b, t, h_, token);
    if (args_.d_o.present()) {
      load_row(args_.d_o, at(args_.d_o, {b, t, h_}), V, d_o);
    } else {
      fill(d_o, V, 0);
    }

    // G += scale q^T d_o;  du = writer G.
    // Low rank, u = x:  dx = du, dv = k G.  Else, u = beta (v - x):  dbeta = du * (v - x), dv = beta * du, dx = -dv.
    double* du = dx;
    fill(du, V, 0);
    fill(dv, V, 0);
    for (int64_t d = 0; d < K; ++d) {
      double* G_row = G + d * V;
      add_scaled(op_.scale * token.q[d], d_o, V, G_row);
      add_scaled(token.writer[d], G_row, V, du);
      if (low_rank) add_scaled(token.k[d], G_row, V, dv);
    }
    for (int64_t j = 0; j < V && !low_rank; ++j) {
      scratch_.dbeta[j] = du[j] * (token.v[j] - x[j]);
      dv[j] = token.beta[j] * du[j];
      dx[j] = -dv[j];
    }

    // dq = scale d_o S_t^T;  d_writer = u G^T (low rank: dk = v G^T);  d_reader = dx S_{t-1}^T
    // dg = exp(g) rowsum(S_{t-1} * G);  G = diag(exp(g)) G + reader^T dx
    double* d_writer = (low_rank ? scratch_.d_writer : scratch_.dk) + i * K;
    for (int64_t d = 0; d < K; ++d) {
      double* G_row = G + d * V;
      const double* before_row = before + d * V;
      const double read = dot(dx, before_row, V);
      scratch_.dq[i * K + d] += op_.scale * dot(d_o, after + d * V, V);
      d_writer[d] += dot(u, G_row, V);
      if (low_rank) scratch_.dk[i * K + d] += dot(token.v, G_row, V);
      scratch_.dg[d] = token.decay[d] * dot(before_row, G_row, V);
      if (by_key) {
        scratch_.dk[i * K + d] += token.decay[d] * read;
        scratch_.dg[d] += token.reader[d] * read;
      } else if (op_.transition.reader.present()) {
        scratch_.d_reader[i * K + d] += read;
      }
      for (int64_t j = 0; j < V; ++j) G_row[j] = token.decay[d] * G_row[j] + token.reader[d] * dx[j];
    }

    if (args_.dv.present()) store_row(args_.dv, at(args_.dv, {b, t, h_}), V, dv);
    if (args_.dbeta.present()) store_dbeta(b, t);
    store_dg(b, t);
  }

  void store_dbeta(int64_t b, int64_t t) const {
    double* dbeta = scratch_.dbeta;
    const int64_t width = op_.beta_width();
    if (width == 1) {
      for (int64_t j = 1; j < op_.V(); ++j) dbeta[0] += dbeta[j];
    }
    for (int64_t j = 0; j < width; ++j) {
      double dx = dbeta[j];
      if (op_.options.beta_sigmoid) {
        const double y = sigmoid(load(op_.in.beta, op_.beta_offset(op_.in.beta, b, t, h_, j)));
        dx *= op_.beta_factor() * y * (1 - y);
      }
      store(args_.dbeta, op_.beta_offset(args_.dbeta, b, t, h_, j), dx);
    }
  }

  void store_dg(int64_t b, int64_t t) const {
    double* dg = scratch_.dg;
    const int64_t width = op_.gate_width();
    if (width == 1) {
      for (int64_t d = 1; d < op_.K(); ++d) dg[0] += dg[d];
    }
    for (int64_t d = 0; d < width; ++d) {
      const double dx = op_.options.gate_in_kernel ? gate_backward(b, t, d, dg[d]) : dg[d];
      if (args_.dg.present()) store(args_.dg, op_.gate_offset(args_.dg, b, t, h_, d), dx);
    }
  }

  // From dg to the gradient of the raw gate; adds this token's share of the parameter gradients.
  double gate_backward(int64_t b, int64_t t, int64_t d, double dg) const {
    const double x = op_.biased_gate(b, t, h_, d), rate = op_.gate_rate(h_);
    double dx;
    if (op_.has_lower_bound()) {
      const double y = sigmoid(rate * x);
      dx = op_.options.lower_bound * y * (1 - y) * rate * dg;
      *da_log_ += dx * x;
    } else {
      dx = -rate * sigmoid(x) * dg;
      *da_log_ += dg * -rate * softplus(x);
    }
    ddt_bias_[d] += dx;
    return dx;
  }

  const Operator& op_;
  const DeltaRuleBackward& args_;
  const Sequence& sequence_;
  const int64_t h_;
  const BackwardScratch& scratch_;
  double* const da_log_;
  double* const ddt_bias_;
};

// Through the normalisation of every row of q, k or another key of a head, y = rstd x: dx = rstd (dy - y (y . dy)).
void store_dqk(const Operator& op, const Sequence& sequence, int64_t head, const TensorView& x, const TensorView& dx,
               double* dy, double* y) {
  if (!dx.present()) return;
  const int64_t K = op.K(), b = sequence.batch;
  for (int64_t i = 0; i < sequence.length; ++i, dy += K) {
    const int64_t t = sequence.begin + i;
    if (op.options.qk_l2norm) {
      const double rstd = op.load_qk(x, b, t, head, y);
      const double along = dot(y, dy, K);
      for (int64_t d = 0; d < K; ++d) dy[d] = rstd * (dy[d] - y[d] * along);
    }
    store_row(dx, at(dx, {b, t, head}), K, dy);
  }
}

}  // namespace

void reference_forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const Operator op = operator_of(problem);
  const DeltaRuleForward& args = problem.args;
  for_each_item(
      op.sizes.num_heads, problem.sequences, context, [&](ScratchLayout& layout) { return forward_layout(layout, op); },
      [&](const Sequence& sequence, int64_t head, const ForwardScratch& scratch) {
        for (int64_t h = head * op.sizes.group; h < (head + 1) * op.sizes.group; ++h) {
          op.load_optional_state(op.in.initial_state, sequence.index, h, scratch.S);
          scan(op, sequence, h, args.o, args.chunk_states, scratch);
          if (args.final_state.present()) {
            op.store_state(args.final_state, at(args.final_state, {sequence.index, h}), scratch.S);
          }
        }
      });
}

void reference_step(const DeltaRuleStepProblem& problem, const Context& context) {
  const Operator op = operator_of(problem);
  const DeltaRuleStep& args = problem.args;
  for_each_item(
      op.sizes.num_heads, problem.sequences, context, [&](ScratchLayout& layout) { return forward_layout(layout, op); },
      [&](const Sequence& sequence, int64_t head, const ForwardScratch& scratch) {
        const int64_t slot = args.state_indices.present()
                                 ? load_integer(args.state_indices.data, args.state_indices.dtype,
                                                at(args.state_indices, {sequence.index}))
                                 : sequence.index;
        for (int64_t h = head * op.sizes.group; h < (head + 1) * op.sizes.group; ++h) {
          if (slot < 0) {
            fill(scratch.o, op.V(), 0);
            for (int64_t t = sequence.begin; t < sequence.begin + sequence.length; ++t) {
              store_row(args.o, at(args.o, {sequence.batch, t, h}), op.V(), scratch.o);
            }
            continue;
          }
          op.load_state(args.state, at(args.state, {slot, h}), scratch.S);
          scan(op, sequence, h, args.o, TensorView{}, scratch);
          op.store_state(args.state, at(args.state, {slot, h}), scratch.S);
        }
      });
}

void reference_backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const Operator op = operator_of(problem);
  const DeltaRuleBackward& args = problem.args;
  const std::vector<Sequence>& sequences = problem.sequences;
  const int64_t K = op.K(), HV = op.sizes.num_value_heads, C = op.options.chunk_size;
  const int64_t N = static_cast<int64_t>(sequences.size()), width = op.gate_width();

  int64_t max_length = 0;
  for (const Sequence& sequence : sequences) max_length = std::max(max_length, sequence.length);
  const int64_t stored_chunks = args.chunk_states.present() ? 0 : (max_length + C - 1) / C;

  // The parameter gradients are summed over tokens per sequence, then over the sequences in order: the thread count
  // does not show.
  const auto partials_layout = [&](ScratchLayout& layout) {
    double* da_log = layout.take<double>(N * HV);
    return std::pair(da_log, layout.take<double>(N * HV * width));
  };
  ScratchLayout measure;
  partials_layout(measure);
  const Workspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const auto [da_log, ddt_bias] = partials_layout(layout);
  fill(da_log, N * HV, 0);
  fill(ddt_bias, N * HV * width, 0);

  for_each_item(
      op.sizes.num_heads, sequences, context,
      [&](ScratchLayout& scratch) { return backward_layout(scratch, op, max_length, stored_chunks); },
      [&, da_log = da_log, ddt_bias = ddt_bias](const Sequence& sequence, int64_t head,
                                                const BackwardScratch& scratch) {
        const Transition& transition = op.transition;
        const int64_t keys = sequence.length * K;
        fill(scratch.dq, keys, 0);
        fill(scratch.dk, keys, 0);
        if (transition.reader.present()) fill(scratch.d_reader, keys, 0);
        if (transition.writer.present()) fill(scratch.d_writer, keys, 0);
        for (int64_t h = head * op.sizes.group; h < (head + 1) * op.sizes.group; ++h) {
          const int64_t partial = sequence.index * HV + h;
          HeadBackward(op, args, sequence, h, scratch, da_log + partial, ddt_bias + partial * width).run();
        }
        if (transition.reader_is_key) add_scaled(1, scratch.d_reader, keys, scratch.dk);
        store_dqk(op, sequence, head, op.in.q, args.dq, scratch.dq, scratch.row);
        store_dqk(op, sequence, head, transition.reader, transition.d_reader, scratch.d_reader, scratch.row);
        store_dqk(op, sequence, head, transition.writer, transition.d_writer, scratch.d_writer, scratch.row);
        store_dqk(op, sequence, head, op.in.k, args.dk, scratch.dk, scratch.row);
      });

  for (int64_t h = 0; h < HV; ++h) {
    if (args.da_log.present()) {
      double sum = 0;
      for (int64_t n = 0; n < N; ++n) sum += da_log[n * HV + h];
      store(args.da_log, at(args.da_log, {h}), sum);
    }
    if (args.ddt_bias.present()) {
      for (int64_t d = 0; d < width; ++d) {
        double sum = 0;
        for (int64_t n = 0; n < N; ++n) sum += ddt_bias[(n * HV + h) * width + d];
        store(args.ddt_bias, op.bias_offset(args.ddt_bias, h, d), sum);
      }
    }
  }
}

}  // namespace fastweight::cpu
