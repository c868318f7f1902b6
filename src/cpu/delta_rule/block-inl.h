// Blocks of 16 tokens of one head, read from the caller's tensors and made ready for the kernels. Re-included once per
// instruction set.
//
// Decays are never taken as differences of cumulative log gates: inside a block every factor exp(gamma_i - gamma_j) is
// a product of the factors exp(g_m), j < m <= i, none of which exceeds 1 for g <= 0. Nothing overflows for any gate, a
// gate of -1000 is a factor 0, and the relative error is a few roundings instead of |gamma| * 2^-24.
//
// The families of the recurrence differ in what a block reads and writes (core/delta_rule_problem.h). In these terms
// the delta rule's equations hold for all:
//
//     X  = e [reader; q] S,   R = (I + A)^-1 beta (v - X_r),   o = scale (X_q + P R),   S' = exp(gamma_n) S + (w k)^T R
//
//     kKey       reader = k, read after the decay: e_i = exp(gamma_i), A_ij = beta_i (k_i . k_j) exp(gamma_i - gamma_j)
//     kFeedback  reader = p, read before it: e_i = exp(gamma_{i-1}),
//                A_ij = beta_i (p_i . k_j) exp(gamma_{i-1} - gamma_j)
//     kNone      no reader, R = v
//     kLowRank   reader = a as in kFeedback, b in place of k, beta = -1, and in place of v what the block's own writes
//                of v with k make a read, A2 v, where A2 is A of (a, k). The second write (k, v) adds P2 v to o and
//                (w k)^T v to S', where P2 is P of (q, k).
#if defined(FW_CPU_DELTA_RULE_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_DELTA_RULE_BLOCK_INL_H_
#undef FW_CPU_DELTA_RULE_BLOCK_INL_H_
#else
#define FW_CPU_DELTA_RULE_BLOCK_INL_H_
#endif

#include <cmath>
#include <cstring>

#include "core/delta_rule_problem.h"
#include "core/sequences.h"
#include "core/workspace.h"
#include "cpu/element.h"
#include "cpu/gate-inl.h"
#include "cpu/l2norm-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/matmul-inl.h"
#include "cpu/simd/triangle-inl.h"
#include "cpu/token_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

inline constexpr int64_t kBlock = 16;
inline constexpr int64_t kTokenVecs = kBlock / kLanes;

// Row i of the identity at kIdentity + 16 i.
struct Identity {
  alignas(64) float rows[kBlock * kBlock] = {};
  constexpr Identity() {
    for (int64_t i = 0; i < kBlock; ++i) rows[i * kBlock + i] = 1;
  }
};
inline constexpr Identity kIdentity;

// One value head of one sequence.
struct Head {
  const DeltaRuleInputs* in;
  const DeltaRuleOptions* options;
  const Transition* transition;
  int64_t batch, begin, length;  // the sequence's tokens
  int64_t key_head, value_head;
  int64_t K, V;
  float a = 1;            // exp(A_log)
  float* bias = nullptr;  // dt_bias, one per channel or 16 copies of the head's; null: 0

  int64_t padded_k() const { return round_up(K, kRowMultiple); }
};

// The gate parameters of a head; `bias_buffer` holds max(padded_k, 16) floats.
template <class Problem>
HWY_NOINLINE Head make_head(const Problem& problem, const Sequence& sequence, int64_t value_head, float* bias_buffer) {
  const DeltaRuleInputs& in = problem.args.in;
  const DeltaRuleOptions& options = problem.args.options;
  const DeltaRuleSizes& sizes = problem.sizes;
  Head head{&in,
            &options,
            &problem.transition,
            sequence.batch,
            sequence.begin,
            sequence.length,
            value_head / sizes.group,
            value_head,
            sizes.head_dim_k,
            sizes.head_dim_v};
  if (options.gate_in_kernel && in.a_log.present()) {
    head.a = std::exp(static_cast<float>(load_element(in.a_log, value_head)));
  }
  if (options.gate_in_kernel && in.dt_bias.present()) {
    head.bias = bias_buffer;
    const bool per_channel = options.gate == Gate::kPerChannel;
    const int64_t count = per_channel ? head.padded_k() : kBlock;
    for (int64_t d = 0; d < count; ++d) {
      const bool padding = per_channel && d >= head.K;
      const int64_t index = per_channel ? value_head * head.K + d : value_head;
      bias_buffer[d] = padding ? 0.0f : static_cast<float>(load_element(in.dt_bias, index));
    }
  }
  return head;
}

// Raw gate values to log decays, 0 <= i < count (a multiple of kLanes).
HWY_NOINLINE inline void gate_activation(const Head& head, float* x, int64_t count) {
  const Vec a = broadcast(head.a);
  const bool bounded = std::isfinite(head.options->lower_bound);
  const Vec bound = broadcast(bounded ? static_cast<float>(head.options->lower_bound) : 0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec z = head.bias == nullptr ? load(x + i) : hn::Add(load(x + i), load(head.bias + i));
    store(log_decay(z, a, bounded, bound), x + i);
  }
}

// Which of the recurrences a block belongs to. Kernels ask for what sets them apart, not for their names.
struct Form {
  Gate gate;
  Correction correction;

  constexpr bool per_channel() const { return gate == Gate::kPerChannel; }
  // Reads the state before it writes.
  constexpr bool corrects() const { return correction != Correction::kNone; }
  // Reads with rows that are not the keys.
  constexpr bool own_reader() const {
    return correction == Correction::kFeedback || correction == Correction::kLowRank;
  }
  // Reads the state before its token's decay, not after it.
  constexpr bool reads_early() const {
    return correction == Correction::kFeedback || correction == Correction::kLowRank;
  }
  // Writes v with k beside R.
  constexpr bool writes_twice() const { return correction == Correction::kLowRank; }
};

// run<kForm>() with the form of a block that has one decay per channel, for inner loops that depend on it.
template <class Run>
HWY_INLINE void with_channel_form(Form form, Run run) {
  switch (form.correction) {
    case Correction::kNone:
      return run.template operator()<Form{Gate::kPerChannel, Correction::kNone}>();
    case Correction::kLowRank:
      return run.template operator()<Form{Gate::kPerChannel, Correction::kLowRank}>();
    case Correction::kKey:
    case Correction::kFeedback:  // has one decay per head
      return run.template operator()<Form{Gate::kPerChannel, Correction::kKey}>();
  }
}

template <class Problem>
HWY_INLINE Form form_of(const Problem& problem) {
  return {problem.args.options.gate, problem.transition.correction};
}

// n <= 16 tokens of one head. Rows n .. 15 are neutral: q = k = v = beta = 0 and decay 1.
struct Block {
  Form form;
  int64_t n;
  int64_t ld;     // padded K, the row length of every [.., K] array
  float* reader;  // [32][ld]: 16 rows that the correction reads with, then 16 of q (normalised if the option is set)
  float* k;       // [16][ld]: the rows that R is written with; in the delta rule the same as the reader's
  float* k2;      // [16][ld]: the rows of the second write, or null
  float* decay;   // exp(g): [16][ld] per channel, else [16]
  float beta[kBlock];
  float rstd_reader[kBlock], rstd_k[kBlock], rstd_q[kBlock];  // of the l2 norms

  // Chunk form. The factors that turn tokens into reads and writes of the block's start and end state: per channel they
  // are in the rows, else in the scales.
  float* read;                 // [32][ld]: reader_i e_i, then q_i exp(gamma_i)
  float* write;                // [16][ld]: k_i exp(gamma_n - gamma_i)
  float* write2;               // [16][ld]: the same of k2, or null
  float reader_scale[kBlock];  // e_i, or 1 per channel
  float read_scale[kBlock];    // exp(gamma_i), or 1 per channel
  float write_scale[kBlock];   // exp(gamma_n - gamma_i), or 1 per channel
  float* total;                // exp(gamma_n): [ld] per channel, else [1]
  int64_t total_stride;        // 1 per channel, else 0
  float* pairs;                // [32][16]: A (strictly lower), then P (lower)
  float* pairs2;               // [32][16]: A2, then P2, or null
  float* lambda;               // [16][16] exp(gamma_i - gamma_j), i >= j; not per channel
  float* strict;        // [16][16] the factors of A: lambda below the diagonal, or its row i - 1; not per channel
  float* read_columns;  // [ld][32], read transposed
  float* key_columns;   // [ld] rows of k transposed, key_stride apart; not per channel
  float* key_columns2;  // [ld][16], k2 transposed; not per channel
  int64_t key_stride;
  float* running_keys;  // per channel, scratch [ld][16]
  float* read_factor;   // per channel [16][ld]: exp(gamma_i)
  float* write_factor;  // per channel [16][ld]: exp(gamma_n - gamma_i)

  void lay_out(ScratchLayout& layout, Form block_form, int64_t padded_k) {
    form = block_form;
    ld = padded_k;
    const bool per_channel = form.per_channel(), own_keys = !form.corrects() || form.own_reader();
    const auto take_if = [&](bool wanted, int64_t count) { return wanted ? layout.take<float>(count) : nullptr; };
    reader = layout.take<float>(2 * kBlock * ld);
    k = own_keys ? layout.take<float>(kBlock * ld) : reader;
    k2 = take_if(form.writes_twice(), kBlock * ld);
    decay = layout.take<float>(per_channel ? kBlock * ld : kBlock);
    read = per_channel ? layout.take<float>(2 * kBlock * ld) : reader;
    write = per_channel ? layout.take<float>(kBlock * ld) : k;
    write2 = per_channel ? take_if(form.writes_twice(), kBlock * ld) : k2;
    total = layout.take<float>(per_channel ? ld : 1);
    total_stride = per_channel ? 1 : 0;
    pairs = layout.take<float>(2 * kBlock * kBlock);
    pairs2 = take_if(form.writes_twice(), 2 * kBlock * kBlock);
    lambda = take_if(!per_channel, kBlock * kBlock);
    strict = take_if(!per_channel, kBlock * kBlock);
    read_columns = layout.take<float>(2 * kBlock * ld);
    key_columns = own_keys ? take_if(!per_channel, kBlock * ld) : read_columns;
    key_columns2 = take_if(!per_channel && form.writes_twice(), kBlock * ld);
    key_stride = own_keys ? kBlock : 2 * kBlock;
    running_keys = take_if(per_channel, ld * kBlock);
    read_factor = take_if(per_channel, kBlock * ld);
    write_factor = take_if(per_channel, kBlock * ld);
  }
  const float* q() const { return reader + kBlock * ld; }
  const float* A() const { return pairs; }
  const float* P() const { return pairs + kBlock * kBlock; }

  // The first of the 32 rows that read: without a correction only q does.
  int64_t first_read() const { return form.corrects() ? 0 : kBlock; }
};

// The rows of tokens [token, token + 16) that belong to the head's sequence.
HWY_INLINE void prefetch_rows(const TensorView& x, const Head& head, int64_t x_head, int64_t token, int64_t first,
                              int64_t width, RowPrefetcher& prefetcher) {
  prefetch_rows(x, head.batch, std::max(token, head.begin), std::min(token + kBlock, head.begin + head.length), x_head,
                first, width, prefetcher);
}

// What load_block will read at `token`.
HWY_NOINLINE inline void prefetch_block(const Head& head, int64_t token, RowPrefetcher& prefetcher) {
  prefetch_rows(head.in->k, head, head.key_head, token, 0, head.K, prefetcher);
  prefetch_rows(head.in->q, head, head.key_head, token, 0, head.K, prefetcher);
  prefetch_rows(head.transition->reader, head, head.key_head, token, 0, head.K, prefetcher);
  prefetch_rows(head.transition->writer, head, head.key_head, token, 0, head.K, prefetcher);
  if (head.options->gate == Gate::kPerChannel) {
    prefetch_rows(head.in->g, head, head.value_head, token, 0, head.K, prefetcher);
  }
}

// Logits to beta where the option asks for it, 0 <= i < count (a multiple of kLanes).
HWY_NOINLINE inline void beta_activation(const DeltaRuleOptions& options, float* x, int64_t count) {
  if (!options.beta_sigmoid) return;
  const Vec c = broadcast(options.allow_neg_eigval ? 2.0f : 1.0f);
  for (int64_t i = 0; i < count; i += kLanes) store(hn::Mul(c, sigmoid(load(x + i))), x + i);
}

// beta_i of n tokens; 1 when there is none or one per value channel (load_beta_rows), -1 for a transition of low rank.
HWY_NOINLINE inline void load_beta(const Head& head, int64_t token, int64_t n, float* beta) {
  const TensorView& x = head.in->beta;
  alignas(64) float row[kBlock];
  if (x.rank == 3) {
    load_row(row_of(x, head.batch, token, head.value_head), x.dtype, x.strides[1], n, row, kBlock);
    beta_activation(*head.options, row, kBlock);
  } else {
    for (float& b : row) b = head.transition->correction == Correction::kLowRank ? -1 : 1;
  }
  for (int64_t i = 0; i < kBlock; ++i) beta[i] = i < n ? row[i] : 0.0f;
}

// One beta per value channel, [16][padded]; false when the problem has none such.
HWY_NOINLINE inline bool load_beta_rows(const Head& head, int64_t token, int64_t n, int64_t first, int64_t width,
                                        float* beta, int64_t padded) {
  if (head.in->beta.rank != 4) return false;
  load_rows(head.in->beta, head.batch, token, head.value_head, n, first, width, beta, padded, kBlock);
  beta_activation(*head.options, beta, n * padded);
  return true;
}

// The factors exp(g_i) of n tokens.
HWY_NOINLINE inline void load_decay(const Head& head, int64_t token, int64_t n, Block& block) {
  const TensorView& g = head.in->g;
  const bool per_channel = head.options->gate == Gate::kPerChannel;
  const int64_t rows = per_channel ? n : 1;
  const int64_t width = per_channel ? block.ld : kBlock;
  for (int64_t i = 0; i < rows && head.options->gate != Gate::kNone; ++i) {
    float* row = block.decay + i * width;
    load_row(row_of(g, head.batch, token + i, head.value_head), g.dtype, per_channel ? g.strides[3] : g.strides[1],
             per_channel ? head.K : n, row, width);
    if (head.options->gate_in_kernel) gate_activation(head, row, width);
    for (int64_t d = 0; d < width; d += kLanes) store(exp(load(row + d)), row + d);
  }
  if (per_channel) {
    for (int64_t i = n * block.ld; i < kBlock * block.ld; ++i) block.decay[i] = 1;
  } else {
    const int64_t first_neutral = head.options->gate == Gate::kNone ? 0 : n;
    for (int64_t i = first_neutral; i < kBlock; ++i) block.decay[i] = 1;
  }
}

// Tokens [token, token + n) of the head's batch row: q, the keys, beta and the decays.
HWY_NOINLINE inline void load_block(const Head& head, int64_t token, int64_t n, Block& block) {
  block.n = n;
  const Transition& transition = *head.transition;
  const bool normalised = head.options->qk_l2norm;
  const auto load_keys = [&](const TensorView& x, float* rows, float* rstd) HWY_ATTR {
    load_rows(x, head.batch, token, head.key_head, n, 0, head.K, rows, block.ld, kBlock);
    if (normalised) normalise_rows(rows, block.ld, n, rstd);
  };
  const bool twice = block.form.writes_twice();
  load_keys(twice ? transition.writer : head.in->k, block.k, block.rstd_k);
  load_keys(head.in->q, block.reader + kBlock * block.ld, block.rstd_q);
  if (block.form.own_reader()) load_keys(transition.reader, block.reader, block.rstd_reader);
  if (twice) load_rows(head.in->k, head.batch, token, head.key_head, n, 0, head.K, block.k2, block.ld, kBlock);
  load_beta(head, token, n, block.beta);
  load_decay(head, token, n, block);
}

// The chunk form's reads and writes: running products of the decays from the left (exp(gamma_i), token i's own decay
// included; e_i of an early reader: not) and from the right (exp(gamma_n - gamma_i), its own not). One decay per head:
// also the factors between tokens, Lambda_ij = exp(gamma_i - gamma_j), row by row exp(g_i) Lambda_{i-1} + unit row i.
HWY_NOINLINE inline void make_factors_per_head(Block& block) {
  const bool early = block.form.reads_early();
  float left = 1, right = 1;
  for (int64_t i = 0; i < kBlock; ++i) {
    const float before = left;
    left *= block.decay[i];
    block.read_scale[i] = left;
    block.reader_scale[i] = early ? before : left;
  }
  for (int64_t i = kBlock - 1; i >= 0; --i) {
    block.write_scale[i] = right;
    right *= block.decay[i];
  }
  block.total[0] = left;
  for (int64_t v = 0; v < kBlock; v += kLanes) {
    Vec row = zero();
    for (int64_t i = 0; i < kBlock; ++i) {
      const Vec unit = load(kIdentity.rows + i * kBlock + v);
      const Vec before = row;
      row = fma(row, broadcast(block.decay[i]), unit);
      store(row, block.lambda + i * kBlock + v);
      store(early ? before : hn::Sub(row, unit), block.strict + i * kBlock + v);
    }
  }
}

// By rows, not down the columns: the rows of [16][ld] arrays lie at the same few places of the cache.
HWY_NOINLINE inline void make_factors_per_channel(Block& block) {
  const int64_t ld = block.ld;
  const bool early = block.form.reads_early(), corrects = block.form.corrects();
  const Vec one = broadcast(1.0f);
  for (int64_t i = 0; i < kBlock; ++i) {
    const float* decay = block.decay + i * ld;
    const float* reader = block.reader + i * ld;
    const float* q = block.q() + i * ld;
    float* factor = block.read_factor + i * ld;
    float* read = block.read + i * ld;
    for (int64_t d = 0; d < ld; d += kLanes) {
      const Vec before = i == 0 ? one : load(factor - ld + d);
      const Vec left = hn::Mul(before, load(decay + d));
      store(left, factor + d);
      if (corrects) store(hn::Mul(load(reader + d), early ? before : left), read + d);
      store(hn::Mul(load(q + d), left), read + kBlock * ld + d);
    }
  }
  std::memcpy(block.total, block.read_factor + (kBlock - 1) * ld, static_cast<size_t>(ld) * sizeof(float));
  for (int64_t i = kBlock - 1; i >= 0; --i) {
    const float* decay = block.decay + i * ld;
    const float* k = block.k + i * ld;
    float* factor = block.write_factor + i * ld;
    float* write = block.write + i * ld;
    for (int64_t d = 0; d < ld; d += kLanes) {
      const Vec right = i == kBlock - 1 ? one : hn::Mul(load(factor + ld + d), load(decay + ld + d));
      store(right, factor + d);
      store(hn::Mul(load(k + d), right), write + d);
      if (block.k2 != nullptr) store(hn::Mul(load(block.k2 + i * ld + d), right), block.write2 + i * ld + d);
    }
  }
  for (int64_t i = 0; i < kBlock; ++i) block.reader_scale[i] = block.read_scale[i] = block.write_scale[i] = 1;
}

// One decay per head:  A_ij = beta_i (reader_i . k_j) Lambda'_ij (i > j),  P_ij = (q_i . k_j) Lambda_ij (i >= j), for
// the keys that are given transposed. Without a correction A is 0.
HWY_NOINLINE inline void make_pairs_per_head(const Block& block, const float* key_columns, int64_t key_stride,
                                             float* pairs) {
  const int64_t first = block.first_read();
  product<Columns, Start::kZero>({.rows = 2 * kBlock - first,
                                  .columns = kBlock,
                                  .depth = block.ld,
                                  .a = block.read_columns + first,
                                  .a_stride = 2 * kBlock,
                                  .b = key_columns,
                                  .b_stride = key_stride,
                                  .c_in = pairs,
                                  .c_out = pairs + first * kBlock,
                                  .c_stride = kBlock});
  std::memset(pairs, 0, static_cast<size_t>(first * kBlock) * sizeof(float));
  for (int64_t i = 0; i < kBlock; ++i) {
    for (int64_t v = 0; v < kBlock; v += kLanes) {
      float* a = pairs + i * kBlock + v;
      float* p = a + kBlock * kBlock;
      store(hn::Mul(hn::Mul(broadcast(block.beta[i]), load(a)), load(block.strict + i * kBlock + v)), a);
      store(hn::Mul(load(p), load(block.lambda + i * kBlock + v)), p);
    }
  }
}

// One decay per channel, rows i and i + 1 (i even). Column j of row d of the running keys is
// k_jd exp(gamma_{i-1,d} - gamma_jd) for j < i and 0 beyond. For each row they are multiplied by exp(g_i), joined by
// token i's own key, and then dotted with q_i; with reader_i after or, early, before that. Only the first kVecs vectors
// of tokens are not 0 yet.
template <int kVecs, Form kForm>
HWY_INLINE void make_pairs_per_channel_rows(const Block& block, int64_t i, int64_t K, const float* keys, float* pairs) {
  constexpr bool kCorrects = kForm.corrects(), kOwnReader = kForm.own_reader(), kEarly = kForm.reads_early();
  Vec a0[kVecs], a1[kVecs], p0[kVecs], p1[kVecs];
  FW_UNROLL
  for (int n = 0; n < kVecs; ++n) a0[n] = a1[n] = p0[n] = p1[n] = zero();
  // Tokens i and i + 1 are in the last of the vectors where a block has no more than two.
  constexpr int kFirstOwn = kTokenVecs > 2 ? 0 : kVecs - 1;
  Vec unit0[kVecs], unit1[kVecs];
  FW_UNROLL
  for (int n = kFirstOwn; n < kVecs; ++n) {
    unit0[n] = load(kIdentity.rows + i * kBlock + n * kLanes);
    unit1[n] = load(kIdentity.rows + (i + 1) * kBlock + n * kLanes);
  }
  const float* k = keys + i * block.ld;
  const float* reader = block.reader + i * block.ld;
  const float* q = block.q() + i * block.ld;
  const float* decay = block.decay + i * block.ld;
  for (int64_t d = 0; d < K; ++d) {
    const Vec k0 = broadcast(k[d]), k1 = broadcast(k[block.ld + d]);
    const Vec q0 = broadcast(q[d]), q1 = broadcast(q[block.ld + d]);
    const Vec decay0 = broadcast(decay[d]), decay1 = broadcast(decay[block.ld + d]);
    // The same registers where the reader is the key.
    const Vec reader0 = kOwnReader ? broadcast(reader[d]) : k0;
    const Vec reader1 = kOwnReader ? broadcast(reader[block.ld + d]) : k1;
    float* running = block.running_keys + d * kBlock;
    FW_UNROLL
    for (int n = 0; n < kVecs; ++n) {
      Vec aged = load(running + n * kLanes);
      if (kCorrects && kEarly) a0[n] = fma(reader0, aged, a0[n]);
      aged = hn::Mul(aged, decay0);
      if (n >= kFirstOwn) aged = fma(k0, unit0[n], aged);
      if (kCorrects && !kEarly) a0[n] = fma(reader0, aged, a0[n]);
      p0[n] = fma(q0, aged, p0[n]);
      if (kCorrects && kEarly) a1[n] = fma(reader1, aged, a1[n]);
      aged = hn::Mul(aged, decay1);
      if (n >= kFirstOwn) aged = fma(k1, unit1[n], aged);
      if (kCorrects && !kEarly) a1[n] = fma(reader1, aged, a1[n]);
      p1[n] = fma(q1, aged, p1[n]);
      store(aged, running + n * kLanes);
    }
  }
  const Vec beta0 = broadcast(block.beta[i]), beta1 = broadcast(block.beta[i + 1]);
  float* a = pairs + i * kBlock;
  float* p = a + kBlock * kBlock;
  FW_UNROLL
  for (int n = 0; n < kVecs; ++n) {
    const int64_t at = n * kLanes;
    const Vec below0 = hn::Sub(broadcast(1.0f), load(kIdentity.rows + i * kBlock + at));
    const Vec below1 = hn::Sub(broadcast(1.0f), load(kIdentity.rows + (i + 1) * kBlock + at));
    store(hn::Mul(hn::Mul(beta0, a0[n]), below0), a + at);
    store(hn::Mul(hn::Mul(beta1, a1[n]), below1), a + kBlock + at);
    store(p0[n], p + at);
    store(p1[n], p + kBlock + at);
  }
  for (int64_t at = kVecs * kLanes; at < kBlock; at += kLanes) {
    for (float* row : {a, a + kBlock, p, p + kBlock}) store(zero(), row + at);
  }
}

template <Form kForm>
HWY_NOINLINE void make_pairs_per_channel(const Block& block, int64_t K, const float* keys, float* pairs) {
  std::memset(block.running_keys, 0, static_cast<size_t>(block.ld * kBlock) * sizeof(float));
  for (int64_t i = 0; i < kBlock; i += 2) {
    if (2 * (i + 2) <= kBlock && kTokenVecs >= 2) {
      make_pairs_per_channel_rows<(kTokenVecs + 1) / 2, kForm>(block, i, K, keys, pairs);
    } else {
      make_pairs_per_channel_rows<kTokenVecs, kForm>(block, i, K, keys, pairs);
    }
  }
}

HWY_NOINLINE inline void make_pairs_per_channel(const Block& block, int64_t K) {
  with_channel_form(block.form, [&]<Form kForm>() HWY_ATTR {
    make_pairs_per_channel<kForm>(block, K, block.k, block.pairs);
    if constexpr (kForm.writes_twice()) make_pairs_per_channel<kForm>(block, K, block.k2, block.pairs2);
  });
}

// What the chunk form needs of a loaded block: factors, reads and writes, and unless they are there already, A and P.
HWY_NOINLINE inline void prepare_block(int64_t K, Block& block, bool has_pairs = false) {
  const int64_t ld = block.ld, first = block.first_read();
  const bool per_channel = block.form.per_channel();
  if (per_channel) {
    make_factors_per_channel(block);
  } else {
    make_factors_per_head(block);
  }
  transpose(block.read + first * ld, ld, 2 * kBlock - first, ld, block.read_columns + first, 2 * kBlock);
  if (!per_channel && block.key_columns != block.read_columns) {
    transpose(block.k, ld, kBlock, ld, block.key_columns, kBlock);
    if (block.k2 != nullptr) transpose(block.k2, ld, kBlock, ld, block.key_columns2, kBlock);
  }
  if (has_pairs) return;
  if (per_channel) {
    make_pairs_per_channel(block, K);
  } else {
    make_pairs_per_head(block, block.key_columns, block.key_stride, block.pairs);
    if (block.k2 != nullptr) make_pairs_per_head(block, block.key_columns2, kBlock, block.pairs2);
  }
}

// A matrix between the tokens of a block, [16][16].
struct BlockMatrix {
  const float* values;
  static constexpr int64_t size() { return kBlock; }
  HWY_INLINE float operator()(int64_t i, int64_t j) const { return values[i * kBlock + j]; }
};

// Panel products of the chunk form; a panel is kPanel value columns of all K rows, [ld][kPanel].

// X = reads of the panel by rows [first, first + rows) of the 32; X is [32][kPanel].
HWY_INLINE void read_panel(const Block& block, int64_t first, int64_t rows, const float* S, float* X,
                           RowPrefetcher& prefetcher) {
  product<Columns, Start::kZero>({.rows = rows,
                                  .columns = kPanel,
                                  .depth = block.ld,
                                  .a = block.read_columns + first,
                                  .a_stride = 2 * kBlock,
                                  .b = S,
                                  .b_stride = kPanel,
                                  .c_in = X,
                                  .c_out = X + first * kPanel,
                                  .c_stride = kPanel,
                                  .prefetcher = &prefetcher});
}

// R = (I + A)^-1 beta (v - X) by forward substitution, four rows at a time; R is [16][kPanel].
HWY_INLINE void solve_panel(const Block& block, const float* X, const float* v, int64_t v_stride, float* R) {
  const float* A = block.A();
  FW_UNROLL
  for (int64_t top = 0; top < kBlock; top += 4) {
    Vec r[4][2];
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      const int64_t i = top + m;
      const Vec beta = broadcast(block.beta[i]);
      const Vec scale = broadcast(block.reader_scale[i]);
      FW_UNROLL
      for (int c = 0; c < 2; ++c) {
        const Vec x = load(X + i * kPanel + c * kLanes);
        r[m][c] = hn::Mul(beta, fnma(scale, x, load(v + i * v_stride + c * kLanes)));
      }
    }
    for (int64_t j = 0; j < top; ++j) {
      const Vec r0 = load(R + j * kPanel), r1 = load(R + j * kPanel + kLanes);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) {
        const Vec a = broadcast(A[(top + m) * kBlock + j]);
        r[m][0] = fnma(a, r0, r[m][0]);
        r[m][1] = fnma(a, r1, r[m][1]);
      }
    }
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      FW_UNROLL
      for (int j = 0; j < m; ++j) {
        const Vec a = broadcast(A[(top + m) * kBlock + top + j]);
        r[m][0] = fnma(a, r[j][0], r[m][0]);
        r[m][1] = fnma(a, r[j][1], r[m][1]);
      }
      store(r[m][0], R + (top + m) * kPanel);
      store(r[m][1], R + (top + m) * kPanel + kLanes);
    }
  }
}

// R of one panel from the reads of its correction, or from nothing but v.
HWY_INLINE void correct_panel(const Block& block, const float* X, const float* v, int64_t v_stride, float* R) {
  if (!block.form.corrects()) {
    for (int64_t i = 0; i < kBlock; ++i) {
      store(load(v + i * v_stride), R + i * kPanel);
      store(load(v + i * v_stride + kLanes), R + i * kPanel + kLanes);
    }
  } else if (block.form.writes_twice()) {
    alignas(64) float read[kBlock * kPanel];  // A2 v
    FW_UNROLL
    for (int64_t top = 0; top < kBlock; top += 4) {
      Vec acc[4][2] = {{zero(), zero()}, {zero(), zero()}, {zero(), zero()}, {zero(), zero()}};
      add_lower_rows(BlockMatrix{block.pairs2}, v, v_stride, top, acc);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) {
        store(acc[m][0], read + (top + m) * kPanel);
        store(acc[m][1], read + (top + m) * kPanel + kLanes);
      }
    }
    solve_panel(block, X, read, kPanel, R);
  } else {
    solve_panel(block, X, v, v_stride, R);
  }
}

// Y = (I + A)^-T (P^T do + w KG) for one panel, four rows at a time from the last.
HWY_INLINE void adjoint_solve_panel(const Block& block, const float* KG, const float* d_o, int64_t d_o_stride,
                                    float* Y) {
  const float* A = block.A();
  FW_UNROLL
  for (int64_t top = kBlock - 4; top >= 0; top -= 4) {
    Vec y[4][2];
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      const Vec w = broadcast(block.write_scale[top + m]);
      y[m][0] = hn::Mul(w, load(KG + (top + m) * kPanel));
      y[m][1] = hn::Mul(w, load(KG + (top + m) * kPanel + kLanes));
    }
    add_upper_rows(BlockMatrix{block.P()}, d_o, d_o_stride, top, y);
    for (int64_t i = top + 4; i < kBlock; ++i) {
      const Vec y0 = load(Y + i * kPanel), y1 = load(Y + i * kPanel + kLanes);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) {
        const Vec a = broadcast(A[i * kBlock + top + m]);
        y[m][0] = fnma(a, y0, y[m][0]);
        y[m][1] = fnma(a, y1, y[m][1]);
      }
    }
    FW_UNROLL
    for (int m = 3; m >= 0; --m) {
      FW_UNROLL
      for (int i = m + 1; i < 4; ++i) {
        const Vec a = broadcast(A[(top + i) * kBlock + top + m]);
        y[m][0] = fnma(a, y[i][0], y[m][0]);
        y[m][1] = fnma(a, y[i][1], y[m][1]);
      }
      store(y[m][0], Y + (top + m) * kPanel);
      store(y[m][1], Y + (top + m) * kPanel + kLanes);
    }
  }
}

// S_out = diag(total) S_in + write^T R (+ write2^T v); the per-head write scales go into R's rows first.
HWY_INLINE void write_panel(const Block& block, const float* S_in, const float* R, const float* v, int64_t v_stride,
                            float* S_out, RowPrefetcher& prefetcher) {
  alignas(64) float scaled[kBlock * kPanel];
  if (block.form.gate == Gate::kPerHead) {
    for (int64_t i = 0; i < kBlock; ++i) {
      const Vec w = broadcast(block.write_scale[i]);
      store(hn::Mul(w, load(R + i * kPanel)), scaled + i * kPanel);
      store(hn::Mul(w, load(R + i * kPanel + kLanes)), scaled + i * kPanel + kLanes);
    }
    R = scaled;
  }
  product<Columns, Start::kDecay>({.rows = block.ld,
                                   .columns = kPanel,
                                   .depth = kBlock,
                                   .a = block.write,
                                   .a_stride = block.ld,
                                   .b = R,
                                   .b_stride = kPanel,
                                   .c_in = S_in,
                                   .c_out = S_out,
                                   .c_stride = kPanel,
                                   .decay = block.total,
                                   .decay_stride = block.total_stride,
                                   .prefetcher = &prefetcher});
  if (block.k2 == nullptr) return;
  product<Columns, Start::kAdd>({.rows = block.ld,
                                 .columns = kPanel,
                                 .depth = kBlock,
                                 .a = block.write2,
                                 .a_stride = block.ld,
                                 .b = v,
                                 .b_stride = v_stride,
                                 .c_in = S_out,
                                 .c_out = S_out,
                                 .c_stride = kPanel});
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
