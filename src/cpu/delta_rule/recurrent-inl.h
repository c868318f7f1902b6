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

// exp(g_i) k_i: what token i reads the state before it with.
HWY_INLINE void make_decayed_keys(Gate gate, const Block& block, float* decayed) {
  for (int64_t i = 0; i < block.n; ++i) {
    for (int64_t d = 0; d < block.ld; d += kLanes) {
      const int64_t at = i * block.ld + d;
      const Vec decay = gate == Gate::kPerChannel ? load(block.decay + at) : broadcast(block.decay[i]);
      store(hn::Mul(load(block.k + at), decay), decayed + at);
    }
  }
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
//     u = beta (v - x),   S = exp(g) S + k^T u,   o = scale q S,   x' = (exp(g') k') S
//
// `prediction` is scratch for panels * kPanel floats, `decayed` the rows of make_decayed_keys.
HWY_INLINE void recurrent_tokens(Gate gate, const Block& block, const float* decayed, int64_t K, float scale,
                                 const StatePanels& S, int64_t panels, const ValueRows& rows, float* prediction,
                                 RowPrefetcher& prefetcher) {
  const int64_t decay_step = gate == Gate::kPerChannel ? 1 : 0;
  read_state(decayed, K, S, panels, prediction);
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t column = p * kPanel;
    Vec x0 = load(prediction + column), x1 = load(prediction + column + kLanes);
    for (int64_t t = 0; t < block.n; ++t) {
      prefetcher.issue_share((panels - p) * block.n - t);
      const float* v = rows.v + t * rows.stride + column;
      const bool per_value = rows.beta != nullptr;
      const Vec beta0 = per_value ? load(rows.beta + t * rows.stride + column) : broadcast(block.beta[t]);
      const Vec beta1 = per_value ? load(rows.beta + t * rows.stride + column + kLanes) : beta0;
      const Vec u0 = hn::Mul(beta0, hn::Sub(load(v), x0));
      const Vec u1 = hn::Mul(beta1, hn::Sub(load(v + kLanes), x1));
      const float* k = block.k + t * block.ld;
      const float* q = block.q() + t * block.ld;
      const float* decays = block.decay + (gate == Gate::kPerChannel ? t * block.ld : t);
      const float* next = decayed + std::min(t + 1, block.n - 1) * block.ld;
      float* s = S.data + p * S.panel_stride;
      Vec o0 = zero(), o1 = zero();
      x0 = x1 = zero();
      for (int64_t d = 0; d < K; ++d, s += S.row_stride) {
        const Vec decay = broadcast(decays[d * decay_step]);
        const Vec kd = broadcast(k[d]), qd = broadcast(q[d]), nd = broadcast(next[d]);
        const Vec s0 = fma(kd, u0, hn::Mul(decay, load(s)));
        const Vec s1 = fma(kd, u1, hn::Mul(decay, load(s + kLanes)));
        store(s0, s);
        store(s1, s + kLanes);
        o0 = fma(qd, s0, o0);
        o1 = fma(qd, s1, o1);
        x0 = fma(nd, s0, x0);
        x1 = fma(nd, s1, x1);
      }
      const Vec c = broadcast(scale);
      store(hn::Mul(c, o0), rows.o + t * rows.stride + column);
      store(hn::Mul(c, o1), rows.o + t * rows.stride + column + kLanes);
    }
  }
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
