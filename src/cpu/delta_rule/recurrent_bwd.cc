// Backward token by token, in the order of the definition. With G the gradient of S_t, do = scale * d_o, r_t the
// residual and u_t = beta_t r_t:
//
//     G   += q_t^T do_t                    dq_t = do_t S_t^T
//     du   = k_t G,  dv_t = beta_t du      dbeta_t = du . r_t
//     dk_t = u_t G^T - dv_t Sd_t^T
//     G   -= k_t^T dv_t                    dg_t = <Sd_t, G>  (per channel: by rows)
//     G    = exp(g_t) G
//
// States are recomputed from the chunk starts: once over the sequence, then over each chunk (keeping the states before
// its blocks of 16), then over each block (keeping the states before its tokens).

#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/partition.h"
#include "cpu/parallel.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta_rule/recurrent_bwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/delta_rule/backward-inl.h"
#include "cpu/delta_rule/block-inl.h"
#include "cpu/delta_rule/recurrent-inl.h"
#include "cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

class RecurrentKernel : public UnitKernel {
 public:
  void lay_out(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem, int64_t ld, int64_t panels,
               int64_t longest) {
    lay_out_unit(layout, problem, ld, panels, longest);
    block_.lay_out(layout, form_of(problem), ld);
    token_states_ = layout.take<float>(kBlock * ld * kPanel);
    beta_ = layout.take<float>(kBlock * panels * kPanel);
    dbeta_ = layout.take<float>(kBlock * panels * kPanel);
    decayed_ = layout.take<float>(kBlock * ld);
    prediction_ = layout.take<float>(panels * kPanel);
    row_sums_ = layout.take<float>(3 * kBlock * ld * kLanes);
  }

  void open_sequence(const DeltaRuleBackwardProblem& problem, const Head& head, const Sequence& sequence,
                     const Item& item) {
    open_unit(problem, head, sequence, item);
    if (saved_ || sequence.length == 0) return;
    const int64_t chunk_size = problem.args.options.chunk_size;
    float* S = block_states_;
    load_initial_state(S);
    for (int64_t t = 0; t < sequence.length; t += kBlock) {
      if (t % chunk_size == 0) copy_state(S, states_ + t / chunk_size * state_size_);
      if (t + kBlock < sequence.length) advance(sequence.begin + t, kBlock, S);
    }
  }

  int64_t open_chunk(int64_t chunk) {
    const int64_t count = round_up(chunk_tokens(chunk), kBlock) / kBlock;
    if (saved_) {
      load_saved_state(chunk, block_states_);
    } else {
      copy_state(states_ + chunk * state_size_, block_states_);
    }
    for (int64_t b = 0; b + 1 < count; ++b) {
      float* next = block_states_ + (b + 1) * state_size_;
      copy_state(block_states_ + b * state_size_, next);
      advance(sequence_->begin + chunk_begin(chunk) + b * kBlock, kBlock, next);
    }
    return count;
  }

  const Block& backward_block(int64_t b, int64_t token) {
    const DeltaRuleBackward& args = problem_->args;
    const int64_t n = std::min(kBlock, sequence_->begin + sequence_->length - token);
    load_tokens(token, n);
    load_d_o(token, n);
    prefetch_backward(token);
    prefetcher_.issue_share(1);
    std::memset(row_sums_, 0, static_cast<size_t>(3 * kBlock * ld_ * kLanes) * sizeof(float));
    alignas(64) float dbeta[kBlock * kLanes] = {};
    for (int64_t p = 0; p < item_.panels; ++p) {
      panel_states(p, block_states_ + b * state_size_ + p * ld_ * kPanel);
      for (int64_t t = n - 1; t >= 0; --t) backward_token(p, t, dbeta + t * kLanes);
    }
    for (int64_t t = 0; t < kBlock; ++t) {
      gradients.dbeta[t] = sum_of_lanes(load(dbeta + t * kLanes));
      add_rows(t);
    }
    store_values(dv_, args.dv, token, n);
    if (beta_per_value_) {
      beta_adjoint(args.options, beta_, dbeta_, n * stride_);
      store_values(dbeta_, args.dbeta, token, n);
    }
    return block_;
  }

 private:
  void copy_state(const float* from, float* to) const {
    std::memcpy(to, from, static_cast<size_t>(state_size_) * sizeof(float));
  }

  void load_tokens(int64_t token, int64_t n) {
    load_block(*head_, token, n, block_);
    load_values(token, n);
    beta_per_value_ = load_beta_rows(*head_, token, n, column_, width_, beta_, stride_);
    make_readers(block_, decayed_);
  }

  // The forward, its output thrown away: the same bits as there.
  void advance(int64_t token, int64_t n, float* S) {
    load_tokens(token, n);
    prefetch_forward(token);
    recurrent_tokens<Correction::kKey>(block_, decayed_, head_->K, 1.0f, {S, kPanel, ld_ * kPanel}, item_.panels,
                                       {v_, beta_per_value_ ? beta_ : nullptr, dv_, stride_}, prediction_, prefetcher_);
  }

  Vec decay_of(int64_t t, int64_t d) const {
    const bool per_channel = problem_->args.options.gate == Gate::kPerChannel;
    return broadcast(per_channel ? block_.decay[t * ld_ + d] : block_.decay[t]);
  }
  Vec beta_of(int64_t p, int64_t t, int64_t c) const {
    return beta_per_value_ ? load(beta_ + t * stride_ + p * kPanel + c) : broadcast(block_.beta[t]);
  }

  // The states of one panel before every token of the block; v's rows become the residuals r.
  void panel_states(int64_t p, const float* S_first) {
    for (int64_t t = 0; t < block_.n; ++t) {
      const float* S = t == 0 ? S_first : token_states_ + t * ld_ * kPanel;
      if (t == 0) std::memcpy(token_states_, S_first, static_cast<size_t>(ld_ * kPanel) * sizeof(float));
      float* v = v_ + t * stride_ + p * kPanel;
      Vec r0 = load(v), r1 = load(v + kLanes);
      for (int64_t d = 0; d < head_->K; ++d) {
        const Vec key = broadcast(decayed_[t * ld_ + d]);
        r0 = fnma(key, load(S + d * kPanel), r0);
        r1 = fnma(key, load(S + d * kPanel + kLanes), r1);
      }
      store(r0, v);
      store(r1, v + kLanes);
      if (t + 1 == block_.n) break;
      const Vec u0 = hn::Mul(beta_of(p, t, 0), r0), u1 = hn::Mul(beta_of(p, t, kLanes), r1);
      float* next = token_states_ + (t + 1) * ld_ * kPanel;
      for (int64_t d = 0; d < head_->K; ++d) {
        const Vec decay = decay_of(t, d);
        const Vec key = broadcast(block_.k[t * ld_ + d]);
        store(fma(key, u0, hn::Mul(decay, load(S + d * kPanel))), next + d * kPanel);
        store(fma(key, u1, hn::Mul(decay, load(S + d * kPanel + kLanes))), next + d * kPanel + kLanes);
      }
    }
  }

  // One panel of one token; sums over columns stay in lanes (row_sums_, dbeta) until all panels are in.
  void backward_token(int64_t p, int64_t t, float* dbeta) {
    const int64_t at = t * stride_ + p * kPanel;
    const float* S = token_states_ + t * ld_ * kPanel;
    const float* q = block_.q() + t * ld_;
    const float* k = block_.k + t * ld_;
    float* G_p = G + p * ld_ * kPanel;
    float* dq = row_sums_ + t * ld_ * kLanes;
    float* dk = dq + kBlock * ld_ * kLanes;
    float* dg = dk + kBlock * ld_ * kLanes;
    const Vec o0 = load(d_o_ + at), o1 = load(d_o_ + at + kLanes);
    const Vec r0 = load(v_ + at), r1 = load(v_ + at + kLanes);
    const Vec beta0 = beta_of(p, t, 0), beta1 = beta_of(p, t, kLanes);
    const Vec u0 = hn::Mul(beta0, r0), u1 = hn::Mul(beta1, r1);
    Vec du0 = zero(), du1 = zero();
    for (int64_t d = 0; d < head_->K; ++d) {
      float* G_d = G_p + d * kPanel;
      const Vec decay = decay_of(t, d);
      const Vec kd = broadcast(k[d]), qd = broadcast(q[d]);
      const Vec s0 = fma(kd, u0, hn::Mul(decay, load(S + d * kPanel)));
      const Vec s1 = fma(kd, u1, hn::Mul(decay, load(S + d * kPanel + kLanes)));
      const Vec G0 = fma(qd, o0, load(G_d)), G1 = fma(qd, o1, load(G_d + kLanes));
      store(G0, G_d);
      store(G1, G_d + kLanes);
      du0 = fma(kd, G0, du0);
      du1 = fma(kd, G1, du1);
      store(fma(o1, s1, fma(o0, s0, load(dq + d * kLanes))), dq + d * kLanes);
    }
    const Vec dv0 = hn::Mul(beta0, du0), dv1 = hn::Mul(beta1, du1);
    store(dv0, dv_ + at);
    store(dv1, dv_ + at + kLanes);
    store(fma(du1, r1, fma(du0, r0, load(dbeta))), dbeta);
    store(hn::Mul(du0, r0), dbeta_ + at);
    store(hn::Mul(du1, r1), dbeta_ + at + kLanes);
    for (int64_t d = 0; d < head_->K; ++d) {
      float* G_d = G_p + d * kPanel;
      const Vec decay = decay_of(t, d);
      const Vec kd = broadcast(k[d]);
      const Vec sd0 = hn::Mul(decay, load(S + d * kPanel)), sd1 = hn::Mul(decay, load(S + d * kPanel + kLanes));
      Vec G0 = load(G_d), G1 = load(G_d + kLanes);
      const Vec written = fma(u1, G1, fma(u0, G0, load(dk + d * kLanes)));
      store(fnma(dv1, sd1, fnma(dv0, sd0, written)), dk + d * kLanes);
      G0 = fnma(kd, dv0, G0);
      G1 = fnma(kd, dv1, G1);
      store(fma(sd1, G1, fma(sd0, G0, load(dg + d * kLanes))), dg + d * kLanes);
      store(hn::Mul(decay, G0), G_d);
      store(hn::Mul(decay, G1), G_d + kLanes);
    }
  }

  // Lanes of token t to dq, dk and dg.
  void add_rows(int64_t t) {
    const float* dq = row_sums_ + t * ld_ * kLanes;
    const float* dk = dq + kBlock * ld_ * kLanes;
    const float* dg = dk + kBlock * ld_ * kLanes;
    const bool per_channel = problem_->args.options.gate == Gate::kPerChannel;
    Vec head_sum = zero();
    for (int64_t d = 0; d < ld_; ++d) {
      gradients.dq[t * ld_ + d] = sum_of_lanes(load(dq + d * kLanes));
      gradients.dk[t * ld_ + d] = sum_of_lanes(load(dk + d * kLanes));
      const Vec lanes = load(dg + d * kLanes);
      if (per_channel) {
        gradients.dg[t * ld_ + d] = sum_of_lanes(lanes);
      } else {
        head_sum = hn::Add(head_sum, lanes);
      }
    }
    if (!per_channel) gradients.dg[t] = sum_of_lanes(head_sum);
  }

  bool beta_per_value_ = false;
  Block block_;
  float* token_states_;  // [16][ld][kPanel], of one panel before every token of the block
  float* beta_;          // [16][stride], for one beta per value channel
  float* dbeta_;         // [16][stride], for one beta per value channel
  float* decayed_;       // [16][ld]
  float* prediction_;    // [stride]
  float* row_sums_;      // [3][16][ld][kLanes]: lanes of dq, dk, dg
};

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  run_backward<RecurrentKernel>(problem, context);
}

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(backward);

void recurrent_backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
