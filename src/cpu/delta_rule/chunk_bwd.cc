// Backward in the chunk form, in blocks of 16 tokens. Notation as in chunk_fwd.cc; dS' = G is the gradient of the state
// after the block, do holds scale * d_o, and e_i = exp(gamma_i), w_i = exp(gamma_n - gamma_i):
//
//     dR    = P^T do + w (k G)                     Y  = (I + A)^-T dR  by back substitution
//     X     = -Y S^T                               dA = -slower(Y R^T),  dP = lower(do R^T)
//     dv    = beta Y
//     dq    = e (do S^T) + rows(dP, k)             rows(D, y)_i = sum_{j <= i} D_ij y_j exp(gamma_i - gamma_j)
//     dk    = beta (e X + rows(dA, k))  [reading]  cols(D, x)_j = sum_{i >= j} D_ij x_i exp(gamma_i - gamma_j)
//           + cols(dP, q) + cols(dA, beta k) + w (R G^T)  [writing]
//     dbeta = Y . v + k . (e X + rows(dA, k))
//     dg_m  = sum_{i >= m > j} M_ij + sum_{i >= m} a_i + sum_{j < m} b_j + exp(gamma_n) <S, G>
//     G    <- exp(gamma_n) G + (e q)^T do - (beta e k)^T Y
//
// where M_ij = dP_ij P_ij + dA_ij A_ij,  a_i = q_i . e_i (do S^T)_i + k_i . beta_i e_i X_i,  b_j = k_j . w_j (R G^T)_j:
// everything that exp(g_m) multiplies, and nothing else. (The shorter sum of q.dq + k.dk over rows leaves the other
// terms in and cancels them: under strong decay only their rounding errors remain.) Per channel the inner products stay
// open.
//
// With another correction read k in the products of readings as the block's reader, with its own factors e and
// exp(gamma_i - gamma_j) (block-inl.h); dk, dg and the rest are made of the same terms:
//
//     own reader    its gradient beta (e X + rows(dA, k)) stands for itself;
//     early reader  is not under its token's decay: its terms of M and a count for i > m alone;
//     second write  dA2 = -slower(Y v^T) and dP2 = lower(do v^T) add to the rows of reader and q as dA and dP do;
//                   dk2 = cols(dP2, q) + cols(dA2, beta reader) + w (v G^T),  dv = A2^T (beta Y) + P2^T do + w (k2 G);
//     no reader     A = 0, Y = dR = dv.
//
// G's last line needs no W: W^T dR = (beta e k)^T Y. The states before the blocks are recomputed: once over the
// sequence, keeping one state per chunk, A, P and R, then within each chunk from its first state and R.

#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/partition.h"
#include "cpu/parallel.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta_rule/chunk_bwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/delta_rule/backward-inl.h"
#include "cpu/delta_rule/block-inl.h"
#include "cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

inline constexpr int64_t kMostBlocks = 4;  // in a chunk of 64

class ChunkKernel : public UnitKernel {
 public:
  void lay_out(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem, int64_t ld, int64_t panels,
               int64_t longest) {
    const DeltaRuleOptions& options = problem.args.options;
    lay_out_unit(layout, problem, ld, panels, longest);
    for (int64_t b = 0; b < options.chunk_size / kBlock; ++b) blocks_[b].lay_out(layout, form_of(problem), ld);
    const int64_t kept = saved_ ? options.chunk_size : round_up(longest, kBlock);
    R_ = layout.take<float>(kept * panels * kPanel);
    pairs_ = layout.take<float>(kept * 2 * kBlock);
    if (form_of(problem).writes_twice()) {
      pairs2_ = layout.take<float>(kept * 2 * kBlock);
      beta_Y_ = layout.take<float>(kBlock * kPanel);
      v_columns_ = layout.take<float>(kBlock * panels * kPanel);
      pair_gradients2_ = layout.take<float>(2 * kBlock * kBlock);
      write_columns2_ = layout.take<float>(kBlock * ld);
      writing2_ = layout.take<float>(kBlock * ld);
    }
    X_ = layout.take<float>(kBlock * kPanel);
    Yd_ = layout.take<float>(2 * kBlock * kPanel);
    scaled_ = layout.take<float>(2 * kBlock * kPanel);
    writes_ = layout.take<float>(2 * kBlock * panels * kPanel);
    scaled_columns_ = layout.take<float>(2 * kBlock * panels * kPanel);
    R_columns_ = layout.take<float>(kBlock * panels * kPanel);
    pair_gradients_ = layout.take<float>(2 * kBlock * kBlock);
    pair_factors_ = layout.take<float>(2 * kBlock * kBlock);
    write_columns_ = layout.take<float>(options.gate == Gate::kPerChannel ? kBlock * ld : 0);
    reading_columns_ = layout.take<float>(2 * kBlock * ld);
    writing_columns_ = layout.take<float>(kBlock * ld);
    reading_ = layout.take<float>(2 * kBlock * ld);
    writing_ = layout.take<float>(kBlock * ld);
    overlap_ = layout.take<float>(options.gate == Gate::kPerChannel ? ld * kLanes : kLanes);
  }

  // The states before every chunk, and R of every block: the forward without its output, with the same arithmetic.
  void open_sequence(const DeltaRuleBackwardProblem& problem, const Head& head, const Sequence& sequence,
                     const Item& item) {
    open_unit(problem, head, sequence, item);
    if (saved_ || sequence.length == 0) return;
    const int64_t chunk_size = problem.args.options.chunk_size;
    load_initial_state(states_);
    float* running = block_states_;
    const float* S_in = states_;
    for (int64_t t = 0; t < sequence.length; t += kBlock) {
      const int64_t token = sequence.begin + t;
      const int64_t next = t + kBlock;
      Block& block = blocks_[0];
      place_pairs(t, block);
      load_block(head, token, std::min(kBlock, sequence.length - t), block);
      prepare_block(head.K, block);
      load_values(token, block.n);
      prefetch_forward(token);
      float* S_out = next % chunk_size == 0 ? states_ + next / chunk_size * state_size_ : running;
      for (int64_t p = 0; p < item.panels; ++p) {
        const int64_t at = p * ld_ * kPanel;
        float* R = R_ + t * stride_ + p * kBlock * kPanel;
        const float* v = v_ + p * kPanel;
        make_R(block, S_in + at, v, R);
        if (next < sequence.length) write_panel(block, S_in + at, R, v, stride_, S_out + at, prefetcher_);
      }
      S_in = S_out;
    }
  }

  // Loads the chunk's blocks and brings the states before each of them into block_states_; the first stays where it is.
  int64_t open_chunk(int64_t chunk) {
    const int64_t first = chunk_begin(chunk);
    const int64_t tokens = chunk_tokens(chunk);
    const int64_t count = round_up(tokens, kBlock) / kBlock;
    chunk_R_ = saved_ ? R_ : R_ + first * stride_;
    first_state_ = saved_ ? block_states_ : states_ + chunk * state_size_;
    if (saved_) load_saved_state(chunk, block_states_);
    for (int64_t b = 0; b < count; ++b) {
      Block& block = blocks_[b];
      const int64_t token = sequence_->begin + first + b * kBlock;
      load_block(*head_, token, std::min(kBlock, tokens - b * kBlock), block);
      place_pairs((saved_ ? 0 : first) + b * kBlock, block);
      prepare_block(head_->K, block, !saved_);
      if (saved_ || block.k2 != nullptr) load_values(token, block.n);
      for (int64_t p = 0; p < item_.panels; ++p) {
        const int64_t at = p * ld_ * kPanel;
        const float* S = state_before(b) + at;
        const float* v = v_ + p * kPanel;
        float* R = block_R(b) + p * kBlock * kPanel;
        if (saved_) make_R(block, S, v, R);
        if (b + 1 < count) {
          write_panel(block, S, R, v, stride_, block_states_ + (b + 1) * state_size_ + at, prefetcher_);
        }
      }
    }
    return count;
  }

  const Block& backward_block(int64_t b, int64_t token) {
    const DeltaRuleBackward& args = problem_->args;
    const Block& block = blocks_[b];
    load_values(token, block.n);
    load_d_o(token, block.n);
    prefetch_backward(token);
    const float* S = state_before(b);
    const float* R = block_R(b);
    value_gradients(block, S, R);
    store_values(dv_, args.dv, token, block.n);
    state_gradients(block, S);
    if (args.options.gate == Gate::kPerChannel) {
      pair_adjoint_per_channel(block);
    } else {
      pair_adjoint_per_head(block);
    }
    key_gradients(block);
    return block;
  }

 private:
  // A and P of the block at `row` of the sequence, or of the chunk, lie where they are kept.
  void place_pairs(int64_t row, Block& block) const {
    block.pairs = pairs_ + row * 2 * kBlock;
    if (block.k2 != nullptr) block.pairs2 = pairs2_ + row * 2 * kBlock;
  }

  void make_R(const Block& block, const float* S, const float* v, float* R) {
    if (block.form.corrects()) read_panel(block, 0, kBlock, S, X_, prefetcher_);
    correct_panel(block, X_, v, stride_, R);
  }

  const float* state_before(int64_t b) const { return b == 0 ? first_state_ : block_states_ + b * state_size_; }
  float* block_R(int64_t b) const { return chunk_R_ + b * kBlock * stride_; }

  // Panel by panel: Y, dv, Y . v, the pair products with R, and the rows that go into states and keys later.
  void value_gradients(const Block& block, const float* S, const float* R) {
    const Gate gate = problem_->args.options.gate;
    const int64_t first = block.first_read();
    alignas(64) float dots[kBlock * kLanes] = {};
    std::memset(pair_gradients_, 0, 2 * kBlock * kBlock * sizeof(float));
    if (block.k2 != nullptr) std::memset(pair_gradients2_, 0, 2 * kBlock * kBlock * sizeof(float));
    if (gate != Gate::kNone) {
      std::memset(overlap_, 0, static_cast<size_t>(gate == Gate::kPerChannel ? ld_ * kLanes : kLanes) * sizeof(float));
    }
    // Without per-channel factors a write is a key without its scale.
    const bool own_writes = gate == Gate::kPerChannel;
    const float* write_columns = own_writes ? write_columns_ : block.key_columns;
    const int64_t write_stride = own_writes ? kBlock : block.key_stride;
    if (own_writes) transpose(block.write, ld_, kBlock, ld_, write_columns_, kBlock);
    if (block.k2 != nullptr) transpose(block.write2, ld_, kBlock, ld_, write_columns2_, kBlock);
    for (int64_t p = 0; p < item_.panels; ++p) {
      const float* G_p = G + p * ld_ * kPanel;
      const float* R_p = R + p * kBlock * kPanel;
      const float* d_o = d_o_ + p * kPanel;
      product<Columns, Start::kZero>({.rows = kBlock,
                                      .columns = kPanel,
                                      .depth = ld_,
                                      .a = write_columns,
                                      .a_stride = write_stride,
                                      .b = G_p,
                                      .b_stride = kPanel,
                                      .c_in = X_,
                                      .c_out = X_,
                                      .c_stride = kPanel,
                                      .prefetcher = &prefetcher_});
      adjoint_solve_panel(block, X_, d_o, stride_, Yd_);
      float* writes = writes_ + p * 2 * kBlock * kPanel;
      for (int64_t i = 0; i < kBlock; ++i) {
        const Vec beta = broadcast(block.beta[i]);
        const Vec reader_scale = broadcast(block.reader_scale[i]);
        const Vec scale = broadcast(block.read_scale[i]);
        Vec dot = load(dots + i * kLanes);
        for (int64_t c = 0; c < kPanel; c += kLanes) {
          const int64_t at = i * kPanel + c;
          const int64_t at_o = (kBlock + i) * kPanel + c;
          const Vec y = load(Yd_ + at);
          const Vec o = load(d_o + i * stride_ + c);
          dot = fma(y, load(v_ + i * stride_ + p * kPanel + c), dot);
          store(hn::Mul(beta, y), dv_ + i * stride_ + p * kPanel + c);
          store(o, Yd_ + at_o);
          const Vec scaled_y = hn::Neg(hn::Mul(reader_scale, y));
          const Vec scaled_o = hn::Mul(scale, o);
          store(scaled_y, scaled_ + at);
          store(scaled_o, scaled_ + at_o);
          store(hn::Mul(beta, scaled_y), writes + at);
          store(scaled_o, writes + at_o);
        }
        store(dot, dots + i * kLanes);
      }
      transpose(scaled_, kPanel, 2 * kBlock, kPanel, scaled_columns_ + p * kPanel * 2 * kBlock, 2 * kBlock);
      transpose(R_p, kPanel, kBlock, kPanel, R_columns_ + p * kPanel * kBlock, kBlock);
      add_pair_gradients(first, R_columns_ + p * kPanel * kBlock, pair_gradients_);
      if (block.k2 != nullptr) second_value_gradients(block, p, G_p);
      if (gate == Gate::kPerHead) add_overlap<0>(S + p * ld_ * kPanel, G_p);
      if (gate == Gate::kPerChannel) add_overlap<kLanes>(S + p * ld_ * kPanel, G_p);
    }
    for (int64_t i = 0; i < kBlock; ++i) gradients.dbeta[i] = sum_of_lanes(load(dots + i * kLanes));
  }

  // [Y; do] R^T of one panel, R transposed; rows [first, 32).
  void add_pair_gradients(int64_t first, const float* R_columns, float* pair_gradients) const {
    product<PanelRows, Start::kAdd>({.rows = 2 * kBlock - first,
                                     .columns = kBlock,
                                     .depth = kPanel,
                                     .a = Yd_ + first * kPanel,
                                     .b = R_columns,
                                     .b_stride = kBlock,
                                     .c_in = pair_gradients + first * kBlock,
                                     .c_out = pair_gradients + first * kBlock,
                                     .c_stride = kBlock});
  }

  // The second write's share of one panel: v's pair products, and dv = A2^T (beta Y) + P2^T do + w (k2 G) where dv_
  // holds beta Y.
  void second_value_gradients(const Block& block, int64_t p, const float* G_p) {
    float* v_columns = v_columns_ + p * kPanel * kBlock;
    transpose(v_ + p * kPanel, stride_, kBlock, kPanel, v_columns, kBlock);
    add_pair_gradients(0, v_columns, pair_gradients2_);
    float* dv = dv_ + p * kPanel;
    for (int64_t i = 0; i < kBlock; ++i) {
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        store(load(dv + i * stride_ + c), beta_Y_ + i * kPanel + c);
      }
    }
    product<Columns, Start::kZero>({.rows = kBlock,
                                    .columns = kPanel,
                                    .depth = ld_,
                                    .a = write_columns2_,
                                    .a_stride = kBlock,
                                    .b = G_p,
                                    .b_stride = kPanel,
                                    .c_in = dv,
                                    .c_out = dv,
                                    .c_stride = stride_});
    const float* d_o = Yd_ + kBlock * kPanel;
    add_triangular<Triangle::kUpper>(BlockMatrix{block.pairs2}, beta_Y_, kPanel, dv, stride_, kPanel);
    add_triangular<Triangle::kUpper>(BlockMatrix{block.pairs2 + kBlock * kBlock}, d_o, kPanel, dv, stride_, kPanel);
  }

  // overlap += S * G by rows (kStep = kLanes) or altogether (kStep = 0).
  template <int64_t kStep>
  void add_overlap(const float* S, const float* G_p) {
    if constexpr (kStep == 0) {
      Vec sum0 = load(overlap_), sum1 = zero();
      for (int64_t i = 0; i < ld_ * kPanel; i += kPanel) {
        sum0 = fma(load(S + i), load(G_p + i), sum0);
        sum1 = fma(load(S + i + kLanes), load(G_p + i + kLanes), sum1);
      }
      store(hn::Add(sum0, sum1), overlap_);
    } else {
      for (int64_t d = 0; d < ld_; ++d) {
        const int64_t at = d * kPanel;
        const Vec sum = fma(load(S + at), load(G_p + at), load(overlap_ + d * kStep));
        store(fma(load(S + at + kLanes), load(G_p + at + kLanes), sum), overlap_ + d * kStep);
      }
    }
  }

  // Sums over value columns: reading_ = -Y S^T and do S^T (with the per-head e), writing_ = R G^T. Then G's update.
  void state_gradients(const Block& block, const float* S) {
    const int64_t first = block.first_read();
    product<PanelRows, Start::kZero>({.rows = ld_,
                                      .columns = 2 * kBlock - first,
                                      .depth = kPanel,
                                      .segments = item_.panels,
                                      .a = S,
                                      .a_segment = ld_ * kPanel,
                                      .b = scaled_columns_ + first,
                                      .b_stride = 2 * kBlock,
                                      .c_in = reading_columns_,
                                      .c_out = reading_columns_ + first,
                                      .c_stride = 2 * kBlock,
                                      .prefetcher = &prefetcher_});
    transpose(reading_columns_ + first, 2 * kBlock, ld_, 2 * kBlock - first, reading_ + first * ld_, ld_);
    state_gradients_of_writes(R_columns_, writing_);
    if (block.k2 != nullptr) state_gradients_of_writes(v_columns_, writing2_);
    for (int64_t p = 0; p < item_.panels; ++p) {
      float* G_p = G + p * ld_ * kPanel;
      product<Columns, Start::kDecay>({.rows = ld_,
                                       .columns = kPanel,
                                       .depth = 2 * kBlock - first,
                                       .a = block.read + first * ld_,
                                       .a_stride = ld_,
                                       .b = writes_ + (2 * kBlock * p + first) * kPanel,
                                       .b_stride = kPanel,
                                       .c_in = G_p,
                                       .c_out = G_p,
                                       .c_stride = kPanel,
                                       .decay = block.total,
                                       .decay_stride = block.total_stride,
                                       .prefetcher = &prefetcher_});
    }
  }

  // writing = R G^T, R transposed.
  void state_gradients_of_writes(const float* R_columns, float* writing) {
    product<PanelRows, Start::kZero>({.rows = ld_,
                                      .columns = kBlock,
                                      .depth = kPanel,
                                      .segments = item_.panels,
                                      .a = G,
                                      .a_segment = ld_ * kPanel,
                                      .b = R_columns,
                                      .b_stride = kBlock,
                                      .c_in = writing_columns_,
                                      .c_out = writing_columns_,
                                      .c_stride = kBlock,
                                      .prefetcher = &prefetcher_});
    transpose(writing_columns_, kBlock, ld_, kBlock, writing, ld_);
  }

  // One decay per head: rows and cols are products with dA * Lambda' and dP * Lambda. On return
  //     reading_ = e X + rows(dA, k), then dq;     writing_ = w (R G^T);
  //     gradients.dk = cols(dP, q) + cols(dA, beta reader)
  // and gradients.dg is done.
  void pair_adjoint_per_head(const Block& block) {
    for (int64_t i = 0; i < kBlock; ++i) {
      const Vec w = broadcast(block.write_scale[i]);
      for (int64_t d = 0; d < ld_; d += kLanes) {
        float* x = writing_ + i * ld_ + d;
        store(hn::Mul(w, load(x)), x);
      }
    }
    if (problem_->args.options.gate == Gate::kPerHead) gate_gradient_per_head(block);
    pair_products_per_head(block, block.k, pair_gradients_, gradients.dk);
    // No operator with a second write has a decay per head: w = 1, and no gate gradient.
    if (block.k2 != nullptr) pair_products_per_head(block, block.k2, pair_gradients2_, gradients.dk2);
  }

  // Adds rows(dA, k) and rows(dP, k) to reading_; dk = cols(dP, q) + cols(dA, beta reader). Overwrites the pairs.
  void pair_products_per_head(const Block& block, const float* k, float* pair_gradients, float* dk) {
    for (int64_t i = 0; i < kBlock; ++i) {
      const Vec beta = broadcast(block.beta[i]);
      for (int64_t c = 0; c < kBlock; c += kLanes) {
        const int64_t a = i * kBlock + c;
        const int64_t p = a + kBlock * kBlock;
        const Vec dA = hn::Neg(hn::Mul(load(pair_gradients + a), load(block.strict + a)));
        const Vec dP = hn::Mul(load(pair_gradients + p), load(block.lambda + a));
        store(dA, pair_gradients + a);
        store(dP, pair_gradients + p);
        store(hn::Mul(beta, dA), pair_factors_ + a);
        store(dP, pair_factors_ + p);
      }
    }
    std::memset(dk, 0, static_cast<size_t>(kBlock * ld_) * sizeof(float));
    for (int64_t half = block.first_read(); half < 2 * kBlock; half += kBlock) {
      add_triangular<Triangle::kLower>(BlockMatrix{pair_gradients + half * kBlock}, k, ld_, reading_ + half * ld_, ld_,
                                       ld_);
      add_triangular<Triangle::kUpper>(BlockMatrix{pair_factors_ + half * kBlock}, block.reader + half * ld_, ld_, dk,
                                       ld_, ld_);
    }
  }

  // From Y R^T and do R^T in pair_gradients_ and the state parts in reading_ and writing_.
  void gate_gradient_per_head(const Block& block) {
    const bool early = block.form.reads_early(), corrects = block.form.corrects();
    alignas(64) float a_reader[kBlock] = {}, a_q[kBlock], b[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      Vec read = zero(), read_q = zero(), write = zero();
      for (int64_t d = 0; d < ld_; d += kLanes) {
        const int64_t at = i * ld_ + d;
        if (corrects) read = fma(load(block.reader + at), load(reading_ + at), read);
        read_q = fma(load(block.q() + at), load(reading_ + kBlock * ld_ + at), read_q);
        write = fma(load(block.k + at), load(writing_ + at), write);
      }
      if (corrects) a_reader[i] = block.beta[i] * sum_of_lanes(read);
      a_q[i] = sum_of_lanes(read_q);
      b[i] = sum_of_lanes(write);
    }
    // Row i of M summed from the left; then, for each m, column m - 1 of these sums over the rows i >= m, of an early
    // reader over the rows i > m.
    alignas(64) float pairs[kBlock] = {};
    for (int64_t i = 1; i < kBlock; ++i) {
      float sum = 0, sum_reader = 0;
      for (int64_t j = 0; j < i; ++j) {
        const int64_t at = i * kBlock + j;
        sum += pair_gradients_[kBlock * kBlock + at] * block.P()[at];
        sum_reader -= pair_gradients_[at] * block.A()[at];
        pairs[j + 1] += early && j + 1 == i ? sum : sum + sum_reader;
      }
    }
    float reads = 0, writes = block.total[0] * sum_of_lanes(load(overlap_));
    for (int64_t m = kBlock - 1; m >= 0; --m) {
      reads += early ? a_q[m] : a_q[m] + a_reader[m];
      gradients.dg[m] = pairs[m] + reads;
      if (early) reads += a_reader[m];
    }
    for (int64_t m = 0; m < kBlock; ++m) {
      gradients.dg[m] += writes;
      writes += b[m];
    }
  }

  // One decay per channel, the same on return. The factors exp(gamma_i - gamma_j) run down each column j of pairs; no
  // quotient of exponentials is formed.
  void pair_adjoint_per_channel(const Block& block) {
    with_channel_form(block.form, [&]<Form kForm>() HWY_ATTR { pair_adjoint_per_channel<kForm>(block); });
  }

  template <Form kForm>
  void pair_adjoint_per_channel(const Block& block) {
    for (int64_t d = 0; d < ld_; d += kLanes) {
      scale_and_start_gate<kForm>(block, d);
      pair_products_per_channel<kForm>(block, d, block.k, pair_gradients_, gradients.dk);
      if constexpr (kForm.writes_twice()) {
        pair_products_per_channel<kForm>(block, d, block.k2, pair_gradients2_, gradients.dk2);
      }
    }
  }

  // As pair_products_per_head for channels d .. d + kLanes - 1; adds the pairs' terms to gradients.dg. Row by row: what
  // belongs to a column stays in lines of its own, because a walk down a column of [16][ld] arrays, whose rows lie at
  // the same few places of the cache, costs three times as much.
  template <Form kForm>
  HWY_INLINE void pair_products_per_channel(const Block& block, int64_t d, const float* k, const float* pair_gradients,
                                            float* dk) {
    constexpr bool kCorrects = kForm.corrects(), kEarly = kForm.reads_early();
    alignas(64) float keys[kBlock * kLanes], factors[kBlock * kLanes];   // k_j, exp(gamma_i - gamma_j)
    alignas(64) float columns[kBlock * kLanes], gates[kBlock * kLanes];  // dk_j, dg_j so far
    for (int64_t i = 0; i < block.n; ++i) {
      const int64_t at = i * ld_ + d;
      const float* row = pair_gradients + i * kBlock;
      const float* row_q = row + kBlock * kBlock;
      const Vec decay = load(block.decay + at);
      const Vec q = load(block.q() + at);
      const Vec beta_reader = kCorrects ? hn::Mul(broadcast(block.beta[i]), load(block.reader + at)) : zero();
      Vec reading = kCorrects ? load(reading_ + at) : zero(), dq = load(reading_ + kBlock * ld_ + at);
      Vec crossing = zero(), crossing_early = zero();  // sums of M_ij' over j' < j
      for (int64_t j = 0; j < i; ++j) {
        const int64_t at_j = j * kLanes;
        store(hn::Add(load(gates + at_j), kEarly ? hn::Add(crossing, crossing_early) : crossing), gates + at_j);
        const Vec k_j = load(keys + at_j);
        const Vec before = load(factors + at_j);
        const Vec factor = hn::Mul(before, decay);
        store(factor, factors + at_j);
        const Vec key = hn::Mul(factor, k_j);
        const Vec dP = broadcast(row_q[j]);
        dq = fma(dP, key, dq);
        Vec x = hn::Mul(dP, q);
        if constexpr (kCorrects) {
          const Vec dA = broadcast(row[j]);
          reading = fnma(dA, kEarly ? hn::Mul(before, k_j) : key, reading);
          if constexpr (!kEarly) x = fnma(dA, beta_reader, x);
        }
        x = hn::Mul(factor, x);
        crossing = fma(k_j, x, crossing);
        if constexpr (kEarly) {
          const Vec early = hn::Mul(before, hn::Mul(broadcast(row[j]), beta_reader));
          crossing_early = fnma(k_j, early, crossing_early);
          x = hn::Sub(x, early);
        }
        store(hn::Add(load(columns + at_j), x), columns + at_j);
      }
      const Vec k_i = load(k + at);
      const Vec diagonal = broadcast(row_q[i]);
      store(k_i, keys + i * kLanes);
      store(broadcast(1.0f), factors + i * kLanes);
      store(hn::Mul(diagonal, q), columns + i * kLanes);
      store(hn::Add(load(gradients.dg + at), crossing), gates + i * kLanes);
      store(fma(diagonal, k_i, dq), reading_ + kBlock * ld_ + at);
      if constexpr (kCorrects) store(reading, reading_ + at);
    }
    for (int64_t j = 0; j < block.n; ++j) {
      store(load(columns + j * kLanes), dk + j * ld_ + d);
      store(load(gates + j * kLanes), gradients.dg + j * ld_ + d);
    }
    for (int64_t j = block.n; j < kBlock; ++j) store(zero(), dk + j * ld_ + d);
  }

  // For channels d .. d + kLanes - 1: the factors e and w into reading_ and writing_, and the state parts of dg.
  template <Form kForm>
  HWY_INLINE void scale_and_start_gate(const Block& block, int64_t d) {
    constexpr bool kCorrects = kForm.corrects(), kEarly = kForm.reads_early();
    Vec reads = zero();
    for (int64_t i = kBlock - 1; i >= 0; --i) {
      const int64_t at = i * ld_ + d;
      const int64_t at_q = at + kBlock * ld_;
      const Vec e = load(block.read_factor + at);
      Vec reader_term = zero();
      if constexpr (kCorrects) {
        const Vec e_reader = !kEarly ? e : i == 0 ? broadcast(1.0f) : load(block.read_factor + at - ld_);
        const Vec read = hn::Mul(e_reader, load(reading_ + at));
        store(read, reading_ + at);
        reader_term = hn::Mul(hn::Mul(broadcast(block.beta[i]), load(block.reader + at)), read);
      }
      const Vec read_q = hn::Mul(e, load(reading_ + at_q));
      store(read_q, reading_ + at_q);
      if (!kEarly) reads = hn::Add(reads, reader_term);
      reads = fma(load(block.q() + at), read_q, reads);
      store(reads, gradients.dg + at);
      if (kEarly) reads = hn::Add(reads, reader_term);
    }
    alignas(64) float overlap[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      overlap[lane] = sum_of_lanes(load(overlap_ + (d + lane) * kLanes));
    }
    Vec writes = hn::Mul(load(block.total + d), load(overlap));
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t at = j * ld_ + d;
      store(hn::Add(load(gradients.dg + at), writes), gradients.dg + at);
      const Vec w = load(block.write_factor + at);
      const Vec write = hn::Mul(w, load(writing_ + at));
      store(write, writing_ + at);
      writes = fma(load(block.k + at), write, writes);
      if constexpr (kForm.writes_twice()) {
        const Vec write2 = hn::Mul(w, load(writing2_ + at));
        store(write2, writing2_ + at);
        writes = fma(load(block.k2 + at), write2, writes);
      }
    }
  }

  // Puts the parts together: dq, dk, the reader's gradient, dbeta.
  void key_gradients(const Block& block) {
    const size_t bytes = static_cast<size_t>(kBlock * ld_) * sizeof(float);
    std::memcpy(gradients.dq, reading_ + kBlock * ld_, bytes);
    add_rows(writing_, gradients.dk);
    if (block.k2 != nullptr) add_rows(writing2_, gradients.dk2);
    if (!block.form.corrects()) return;
    const bool own = gradients.d_reader != nullptr;
    for (int64_t i = 0; i < kBlock; ++i) {
      const Vec beta = broadcast(block.beta[i]);
      Vec dbeta = zero();
      for (int64_t d = 0; d < ld_; d += kLanes) {
        const int64_t at = i * ld_ + d;
        const Vec read = load(reading_ + at);
        dbeta = fma(read, load(block.reader + at), dbeta);
        if (own) {
          store(hn::Mul(beta, read), gradients.d_reader + at);
        } else {
          store(fma(beta, read, load(gradients.dk + at)), gradients.dk + at);
        }
      }
      gradients.dbeta[i] += sum_of_lanes(dbeta);
    }
  }

  void add_rows(const float* x, float* y) const {
    for (int64_t i = 0; i < kBlock * ld_; i += kLanes) store(hn::Add(load(x + i), load(y + i)), y + i);
  }

  Block blocks_[kMostBlocks];
  float* R_;                  // [blocks][panels][16][kPanel] of the sequence, or of one chunk
  float* pairs_;              // [blocks][32][16], the same: A and P
  float* chunk_R_ = nullptr;  // the current chunk's
  const float* first_state_ = nullptr;
  float* X_;                // [16][kPanel]: the reads of make_R, or k G
  float* Yd_;               // [32][kPanel]: Y, then do
  float* scaled_;           // [32][kPanel]: -e Y, then e do
  float* writes_;           // [panels][32][kPanel]: -beta e Y, then e do
  float* scaled_columns_;   // [panels * kPanel][32], scaled_ transposed
  float* R_columns_;        // [panels * kPanel][16], R transposed
  float* pair_gradients_;   // [32][16]: Y R^T, then do R^T; per head then dA and dP times Lambda
  float* pair_factors_;     // [32][16]: per head, beta dA Lambda, then dP Lambda
  float* write_columns_;    // [ld][16], per channel: the block's writes transposed
  float* reading_columns_;  // [ld][32]
  float* writing_columns_;  // [ld][16]
  float* reading_;          // [32][ld]
  float* writing_;          // [16][ld]
  float* overlap_;          // [ld][kLanes] per channel, else [kLanes]: lanes of <S, G>

  // Of the second write.
  float* pairs2_ = nullptr;           // as pairs_: A2 and P2
  float* beta_Y_ = nullptr;           // [16][kPanel]
  float* v_columns_ = nullptr;        // [panels * kPanel][16], v transposed
  float* pair_gradients2_ = nullptr;  // [32][16]: Y v^T, then do v^T
  float* write_columns2_ = nullptr;   // [ld][16]
  float* writing2_ = nullptr;         // [16][ld]
};

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  run_backward<ChunkKernel>(problem, context);
}

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(backward);

void chunk_backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
