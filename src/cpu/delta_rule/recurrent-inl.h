// The recurrence itself on up to 16 tokens. Re-included once per instruction set.
#if defined(FW_CPU_DELTA_RULE_RECURRENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_DELTA_RULE_RECURRENT_INL_H_
#undef FW_CPU_DELTA_RULE_RECURRENT_INL_H_
#else
#define FW_CPU_DELTA_RULE_RECURRENT_INL_H_
#endif

#include "cpu/delta_rule/block-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// An fp32 state in memory: element (d, c) of panel p at data[p * panel_stride + d * row_stride + c].
struct StatePanels {
  float* data;
  int64_t row_stride, panel_stride;
};

// Rows of values, [16][stride]; `beta` replaces the block's beta where there is one per value column, else null.
struct ValueRows {
  const float* v;
  const float* beta;
  float* o;
  int64_t stride;
};

// The rows that the block's tokens read the state before them with: exp(g_i) k_i, for which `decayed` is the memory, or
// the block's own. Null where nothing is read.
HWY_INLINE const float* make_readers(const Block& block, float* decayed) {
  if (!block.form.corrects()) return nullptr;
  if (block.form.own_reader()) return block.reader;
  for (int64_t i = 0; i < block.n; ++i) {
    for (int64_t d = 0; d < block.ld; d += kLanes) {
      const int64_t at = i * block.ld + d;
      const Vec decay = block.form.per_channel() ? load(block.decay + at) : broadcast(block.decay[i]);
      store(hn::Mul(load(block.k + at), decay), decayed + at);
    }
  }
  return decayed;
}

// prediction = key S, walking the rows in memory order: the first touch of a state streams it from memory.
HWY_INLINE void read_state(const float* key, int64_t K, const StatePanels& S, int64_t panels, float* prediction) {
  std::memset(prediction, 0, static_cast<size_t>(panels * kPanel) * sizeof(float));
  for (int64_t d = 0; d < K; d += 4) {
    const int64_t rows = std::min<int64_t>(4, K - d);
    for (int64_t p = 0; p < panels; ++p) {
      const float* s = S.data + p * S.panel_stride + d * S.row_stride;
      Vec y0 = load(prediction + p * kPanel), y1 = load(prediction + p * kPanel + kLanes);
      for (int64_t i = 0; i < rows; ++i) {
        const Vec x = broadcast(key[d + i]);
        y0 = fma(x, load(s + i * S.row_stride), y0);
        y1 = fma(x, load(s + i * S.row_stride + kLanes), y1);
      }
      store(y0, prediction + p * kPanel);
      store(y1, prediction + p * kPanel + kLanes);
    }
  }
}

// Runs the block's n tokens over `panels` panels, a panel at a time so that it stays in the first-level cache. One pass
// over a panel per token: it decays and updates the state, reads the output, and reads x, the prediction of the next
// token.
//
//     u = beta (v - x),   S = exp(g) S + k^T u,   o = scale q S,   x' = reader' S
//
// Without a correction u = v. A second write has u = x, by its beta of -1 without v, and adds k2^T v to S. `prediction`
// is scratch for panels * kPanel floats, `readers` the rows of make_readers.
template <Correction kCorrection>
HWY_NOINLINE void recurrent_tokens(const Block& block, const float* readers, int64_t K, float scale,
                                   const StatePanels& S, int64_t panels, const ValueRows& rows, float* prediction,
                                   RowPrefetcher& prefetcher) {
  constexpr Form kForm{Gate::kNone, kCorrection};
  const bool per_channel = block.form.per_channel();
  const int64_t decay_step = per_channel ? 1 : 0;
  if constexpr (kForm.corrects()) read_state(readers, K, S, panels, prediction);
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t column = p * kPanel;
    Vec x0 = zero(), x1 = zero();
    if constexpr (kForm.corrects()) {
      x0 = load(prediction + column);
      x1 = load(prediction + column + kLanes);
    }
    for (int64_t t = 0; t < block.n; ++t) {
      prefetcher.issue_share((panels - p) * block.n - t);
      const float* v = rows.v + t * rows.stride + column;
      const bool per_value = rows.beta != nullptr;
      const Vec beta0 = per_value ? load(rows.beta + t * rows.stride + column) : broadcast(block.beta[t]);
      const Vec beta1 = per_value ? load(rows.beta + t * rows.stride + column + kLanes) : beta0;
      const Vec v0 = load(v), v1 = load(v + kLanes);
      Vec u0 = v0, u1 = v1;
      if constexpr (kForm.corrects()) {
        u0 = hn::Mul(beta0, hn::Sub(kForm.writes_twice() ? zero() : v0, x0));
        u1 = hn::Mul(beta1, hn::Sub(kForm.writes_twice() ? zero() : v1, x1));
      }
      const float* k = block.k + t * block.ld;
      const float* q = block.q() + t * block.ld;
      const float* decays = block.decay + (per_channel ? t * block.ld : t);
      const float* next = kForm.corrects() ? readers + std::min(t + 1, block.n - 1) * block.ld : nullptr;
      const float* second = kForm.writes_twice() ? block.k2 + t * block.ld : nullptr;
      float* s = S.data + p * S.panel_stride;
      Vec o0 = zero(), o1 = zero();
      x0 = x1 = zero();
      for (int64_t d = 0; d < K; ++d, s += S.row_stride) {
        const Vec decay = broadcast(decays[d * decay_step]);
        const Vec kd = broadcast(k[d]), qd = broadcast(q[d]);
        Vec s0 = fma(kd, u0, hn::Mul(decay, load(s)));
        Vec s1 = fma(kd, u1, hn::Mul(decay, load(s + kLanes)));
        if constexpr (kForm.writes_twice()) {
          s0 = fma(broadcast(second[d]), v0, s0);
          s1 = fma(broadcast(second[d]), v1, s1);
        }
        store(s0, s);
        store(s1, s + kLanes);
        o0 = fma(qd, s0, o0);
        o1 = fma(qd, s1, o1);
        if constexpr (kForm.corrects()) {
          x0 = fma(broadcast(next[d]), s0, x0);
          x1 = fma(broadcast(next[d]), s1, x1);
        }
      }
      const Vec c = broadcast(scale);
      store(hn::Mul(c, o0), rows.o + t * rows.stride + column);
      store(hn::Mul(c, o1), rows.o + t * rows.stride + column + kLanes);
    }
  }
}

// run<kCorrection>() with the correction of a block.
template <class Run>
HWY_INLINE void with_correction(const Block& block, Run run) {
  switch (block.form.correction) {
    case Correction::kKey:
      return run.template operator()<Correction::kKey>();
    case Correction::kNone:
      return run.template operator()<Correction::kNone>();
    case Correction::kFeedback:
      return run.template operator()<Correction::kFeedback>();
    case Correction::kLowRank:
      return run.template operator()<Correction::kLowRank>();
  }
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
