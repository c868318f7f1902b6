// What the two backward kernels share: the walk over a sequence, and the way from a block's gradients to the caller's
// tensors. Re-included once per instruction set.
//
// A unit is a fixed range of value columns of one value head of one sequence. One thread takes it from the first token
// to the last (states at chunk starts) and back (gradients). dq and dk are sums over the units of a key head's group,
// dg and dbeta over the units of a value head. Where a sum has one term it is finished on the spot; else the units
// leave their parts in the workspace and a second loop adds them in order. The cut into units depends on the number of
// heads alone, the problem's or that of the larger one it is a part of: results do not depend on threads or on the batch.
#if defined(FW_CPU_DELTA_RULE_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_DELTA_RULE_BACKWARD_INL_H_
#undef FW_CPU_DELTA_RULE_BACKWARD_INL_H_
#else
#define FW_CPU_DELTA_RULE_BACKWARD_INL_H_
#endif

#include <cmath>
#include <vector>

#include "cpu/delta_rule/block-inl.h"
#include "cpu/denormals.h"
#include "cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// Gradients of the rows of a block that have the width of keys; null where a family has no such rows.
struct KeyGradients {
  float* dq = nullptr;
  float* dk = nullptr;        // of Block::k
  float* d_reader = nullptr;  // of Block::reader, where it is not k
  float* dk2 = nullptr;       // of Block::k2

  void lay_out_keys(ScratchLayout& layout, Form form, int64_t count) {
    dq = layout.take<float>(count);
    dk = layout.take<float>(count);
    if (form.own_reader()) d_reader = layout.take<float>(count);
    if (form.writes_twice()) dk2 = layout.take<float>(count);
  }
  static constexpr float* KeyGradients::*kAll[] = {&KeyGradients::dq, &KeyGradients::dk, &KeyGradients::d_reader,
                                                   &KeyGradients::dk2};
};

// A unit's share of the gradients of one block, before the adjoints of norm, gate and beta. Rows beyond n are 0.
struct BlockGradients : KeyGradients {  // each [16][ld]
  float* dg = nullptr;                  // [16][ld] per channel, else [16]
  float dbeta[kBlock];

  void lay_out(ScratchLayout& layout, Form form, int64_t ld) {
    lay_out_keys(layout, form, kBlock * ld);
    dg = layout.take<float>(form.per_channel() ? kBlock * ld : kBlock);
  }
};

// Sums over all tokens of a value head of one sequence.
struct GateSums {
  double* da_log;    // [1]
  double* ddt_bias;  // [K] per channel, else [1]
};

// The gradients of a block's keys, complete sums, to the caller. Overwrites them.
HWY_NOINLINE inline void finish_keys(const DeltaRuleBackward& args, const Head& head, int64_t token, const Block& block,
                                     const KeyGradients& gradients) {
  const Transition& transition = *head.transition;
  const auto finish = [&](const TensorView& output, const float* rows, const float* rstd, float* dy) HWY_ATTR {
    if (args.options.qk_l2norm) l2_adjoint(rows, rstd, block.ld, block.n, dy);
    if (!output.present()) return;
    store_rows(dy, block.ld, output, head.batch, token, head.key_head, block.n, 0, head.K);
  };
  if (transition.reader_is_key) {
    for (int64_t i = 0; i < block.n * block.ld; i += kLanes) {
      store(hn::Add(load(gradients.dk + i), load(gradients.d_reader + i)), gradients.dk + i);
    }
  }
  finish(args.dq, block.q(), block.rstd_q, gradients.dq);
  finish(gradients.dk2 == nullptr ? args.dk : transition.d_writer, block.k, block.rstd_k, gradients.dk);
  if (gradients.d_reader != nullptr) {
    finish(transition.d_reader, block.reader, block.rstd_reader, gradients.d_reader);
  }
  if (gradients.dk2 != nullptr) finish(args.dk, block.k2, block.rstd_k, gradients.dk2);
}

// d logits from dbeta:  c s (1 - s) dbeta = beta (1 - beta / c) dbeta  with  beta = c s,  s = sigmoid(x).
HWY_NOINLINE inline void beta_adjoint(const DeltaRuleOptions& options, const float* beta, float* dbeta, int64_t count) {
  if (!options.beta_sigmoid) return;
  const Vec inverse = broadcast(options.allow_neg_eigval ? 0.5f : 1.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec b = load(beta + i);
    store(hn::Mul(hn::Mul(b, fnma(b, inverse, broadcast(1.0f))), load(dbeta + i)), dbeta + i);
  }
}

// Through the gate activation at raw values x, which dA_log's terms overwrite.
HWY_NOINLINE inline void gate_adjoint(const Head& head, float* x, float* dg, int64_t count) {
  const Vec a = broadcast(head.a);
  const bool bounded = std::isfinite(head.options->lower_bound);
  const Vec bound = broadcast(bounded ? static_cast<float>(head.options->lower_bound) : 0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec z = head.bias == nullptr ? load(x + i) : hn::Add(load(x + i), load(head.bias + i));
    const GateGradient d = log_decay_adjoint(z, a, bounded, bound, load(dg + i));
    store(d.x, dg + i);
    store(d.a_log, x + i);
  }
}

// dg of a block, a complete sum, to the caller and into the sums over tokens. Overwrites it.
HWY_NOINLINE inline void finish_gate(const DeltaRuleBackward& args, const Head& head, int64_t token, const Block& block,
                                     float* dg, float* raw, const GateSums& sums) {
  const Gate gate = args.options.gate;
  if (gate == Gate::kNone) return;
  const bool per_channel = gate == Gate::kPerChannel;
  const TensorView& g = args.in.g;
  const int64_t rows = per_channel ? block.n : 1;
  const int64_t width = per_channel ? block.ld : kBlock;
  const int64_t valid = per_channel ? head.K : block.n;
  for (int64_t i = 0; i < rows; ++i) {
    float* row = dg + i * width;
    if (args.options.gate_in_kernel) {
      load_row(row_of(g, head.batch, token + i, head.value_head), g.dtype, per_channel ? g.strides[3] : g.strides[1],
               valid, raw, width);
      gate_adjoint(head, raw, row, width);
      for (int64_t d = 0; d < valid; ++d) {
        sums.da_log[0] += static_cast<double>(raw[d]);
        sums.ddt_bias[per_channel ? d : 0] += static_cast<double>(row[d]);
      }
    }
    if (args.dg.present()) {
      store_row(row, row_of(args.dg, head.batch, token + i, head.value_head), args.dg.dtype,
                per_channel ? args.dg.strides[3] : args.dg.strides[1], valid);
    }
  }
}

HWY_NOINLINE inline void finish_beta(const DeltaRuleBackward& args, const Head& head, int64_t token, const Block& block,
                                     float* dbeta) {
  if (!args.dbeta.present() || args.in.beta.rank != 3) return;
  beta_adjoint(args.options, block.beta, dbeta, kBlock);
  store_row(dbeta, row_of(args.dbeta, head.batch, token, head.value_head), args.dbeta.dtype, args.dbeta.strides[1],
            block.n);
}

// How a problem is cut, and where the parts of sums lie.
struct BackwardPlan {
  int64_t ld = 0, panels = 0;  // of the whole problem
  int64_t units_per_head = 1;  // of a value head
  bool sum_keys = false;       // dq and dk have several parts
  bool sum_gates = false;      // dg and dbeta have several parts
  int64_t tokens = 0;          // B T
  int64_t gate_width = 1;      // ld per channel, else 1
  int64_t bias_width = 1;      // K per channel, else 1

  // Parts by (value head, unit, token).
  KeyGradients keys;
  float* dg = nullptr;
  float* dbeta = nullptr;
  double* gate_sums = nullptr;  // [N][HV][1 + bias_width]

  explicit BackwardPlan(const DeltaRuleBackwardProblem& problem) {
    const DeltaRuleSizes& sizes = problem.sizes;
    const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
    ld = round_up(sizes.head_dim_k, kRowMultiple);
    panels = round_up(sizes.head_dim_v, kPanel) / kPanel;
    // Few heads are cut into units of no less than 32 columns: each repeats what is done to the keys.
    const int64_t heads = std::max<int64_t>(sizes.num_value_heads, problem.args.options.total_value_heads);
    const int64_t wanted = heads >= 8 ? 1 : heads >= 4 ? 2 : 4;
    units_per_head = std::clamp<int64_t>(sizes.head_dim_v / 32, 1, std::min(wanted, panels));
    sum_keys = sizes.group * units_per_head > 1;
    sum_gates = units_per_head > 1;
    tokens = sizes.batch * sizes.tokens;
    gate_width = per_channel ? ld : 1;
    bias_width = per_channel ? sizes.head_dim_k : 1;
  }

  void lay_out(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem) {
    const int64_t parts = problem.sizes.num_value_heads * units_per_head * tokens;
    if (sum_keys) keys.lay_out_keys(layout, form_of(problem), parts * ld);
    if (sum_gates) {
      dg = layout.take<float>(parts * gate_width);
      dbeta = layout.take<float>(parts);
    }
    if (problem.args.options.gate_in_kernel) {
      gate_sums = layout.take<double>(problem.sizes.num_sequences * problem.sizes.num_value_heads * (1 + bias_width));
    }
  }
  GateSums sums_of(const DeltaRuleSizes& sizes, int64_t sequence, int64_t value_head) const {
    if (gate_sums == nullptr) return {nullptr, nullptr};
    double* sums = gate_sums + (sequence * sizes.num_value_heads + value_head) * (1 + bias_width);
    return {sums, sums + 1};
  }
  int64_t part(int64_t value_head, int64_t unit, const Head& head, const DeltaRuleSizes& sizes, int64_t token) const {
    return (value_head * units_per_head + unit) * tokens + head.batch * sizes.tokens + token;
  }
};

// The part of a kernel that does not depend on the form: where it is, and the rows that both forms read.
class UnitKernel {
 public:
  float* bias;  // [max(ld, 16)]
  float* raw;   // [max(ld, 16)]
  float* G;     // [panels][ld][kPanel]: the gradient of the state at hand
  BlockGradients gradients;

 protected:
  void lay_out_unit(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem, int64_t ld, int64_t panels,
                    int64_t longest) {
    const DeltaRuleOptions& options = problem.args.options;
    ld_ = ld;
    saved_ = problem.args.chunk_states.present();
    bias = layout.take<float>(std::max(ld, kBlock));
    raw = layout.take<float>(std::max(ld, kBlock));
    G = layout.take<float>(panels * ld * kPanel);
    gradients.lay_out(layout, form_of(problem), ld);
    const int64_t chunks = saved_ ? 0 : (longest + options.chunk_size - 1) / options.chunk_size;
    states_ = layout.take<float>(chunks * panels * ld * kPanel);
    block_states_ = layout.take<float>(options.chunk_size / kBlock * panels * ld * kPanel);
    v_ = layout.take<float>(kBlock * panels * kPanel);
    d_o_ = layout.take<float>(kBlock * panels * kPanel);
    dv_ = layout.take<float>(kBlock * panels * kPanel);
  }

  void open_unit(const DeltaRuleBackwardProblem& problem, const Head& head, const Sequence& sequence,
                 const Item& item) {
    problem_ = &problem;
    head_ = &head;
    sequence_ = &sequence;
    item_ = item;
    stride_ = item.panels * kPanel;
    column_ = item.first_panel * kPanel;
    width_ = std::min(stride_, head.V - column_);
    state_size_ = item.panels * ld_ * kPanel;
  }

  void load_initial_state(float* S) const {
    const DeltaRuleBackward& args = problem_->args;
    if (args.in.initial_state.present()) {
      load_state(state_of(args.in.initial_state, args.options.state_v_first, head_->K, head_->V, sequence_->index,
                          item_.value_head),
                 item_.first_panel, item_.panels, ld_, S);
    } else {
      std::memset(S, 0, static_cast<size_t>(state_size_) * sizeof(float));
    }
  }

  void load_saved_state(int64_t chunk, float* S) const {
    const DeltaRuleBackward& args = problem_->args;
    load_state(chunk_state_of(args.chunk_states, args.options.state_v_first, head_->K, head_->V, sequence_->batch,
                              sequence_->first_chunk + chunk, item_.value_head),
               item_.first_panel, item_.panels, ld_, S);
  }

  int64_t chunk_begin(int64_t chunk) const { return chunk * problem_->args.options.chunk_size; }
  int64_t chunk_tokens(int64_t chunk) const {
    return std::min<int64_t>(problem_->args.options.chunk_size, sequence_->length - chunk_begin(chunk));
  }

  void load_values(int64_t token, int64_t n) {
    load_rows(problem_->args.in.v, head_->batch, token, head_->value_head, n, column_, width_, v_, stride_, kBlock);
  }

  // scale * d_o
  void load_d_o(int64_t token, int64_t n) {
    const TensorView& d_o = problem_->args.d_o;
    if (!d_o.present()) {
      std::memset(d_o_, 0, static_cast<size_t>(kBlock * stride_) * sizeof(float));
      return;
    }
    load_rows(d_o, head_->batch, token, head_->value_head, n, column_, width_, d_o_, stride_, kBlock);
    const Vec scale = broadcast(static_cast<float>(problem_->scale));
    for (int64_t i = 0; i < n * stride_; i += kLanes) store(hn::Mul(scale, load(d_o_ + i)), d_o_ + i);
  }

  void store_values(const float* rows, const TensorView& x, int64_t token, int64_t n) const {
    if (!x.present()) return;
    store_rows(rows, stride_, x, head_->batch, token, head_->value_head, n, column_, width_);
  }

  // Rows of the outputs of the block at `token`, and of the blocks that come after it in the walk back.
  void prefetch_backward(int64_t token) {
    const DeltaRuleBackward& args = problem_->args;
    prefetcher_.clear();
    prefetch_rows(args.dv, *head_, head_->value_head, token, column_, width_, prefetcher_);
    prefetch_rows(args.dq, *head_, head_->key_head, token, 0, head_->K, prefetcher_);
    prefetch_rows(args.dk, *head_, head_->key_head, token, 0, head_->K, prefetcher_);
    prefetch_rows(head_->transition->d_reader, *head_, head_->key_head, token, 0, head_->K, prefetcher_);
    prefetch_rows(head_->transition->d_writer, *head_, head_->key_head, token, 0, head_->K, prefetcher_);
    if (args.options.gate == Gate::kPerChannel) {
      prefetch_rows(args.dg, *head_, head_->value_head, token, 0, head_->K, prefetcher_);
    }
    prefetch_rows(args.in.v, *head_, head_->value_head, token - kBlock, column_, width_, prefetcher_);
    prefetch_rows(args.d_o, *head_, head_->value_head, token - kBlock, column_, width_, prefetcher_);
    prefetch_block(*head_, token - args.options.chunk_size, prefetcher_);
  }

  // What the walk forward reads after the block at `token`.
  void prefetch_forward(int64_t token) {
    prefetcher_.clear();
    prefetch_block(*head_, token + kBlock, prefetcher_);
    prefetch_rows(problem_->args.in.v, *head_, head_->value_head, token + kBlock, column_, width_, prefetcher_);
  }

  const DeltaRuleBackwardProblem* problem_ = nullptr;
  const Head* head_ = nullptr;
  const Sequence* sequence_ = nullptr;
  Item item_{};
  int64_t ld_ = 0, stride_ = 0, column_ = 0, width_ = 0, state_size_ = 0;
  bool saved_ = false;
  RowPrefetcher prefetcher_;
  float* states_;        // [chunks][panels][ld][kPanel], before every chunk; empty when the caller saved them
  float* block_states_;  // [blocks][panels][ld][kPanel], before every block of the chunk
  float* v_;             // [16][stride]
  float* d_o_;           // [16][stride], scaled
  float* dv_;            // [16][stride]
};

// The walk of one unit. A kernel is a UnitKernel with, over scratch that it lays out:
//     open_sequence    states at the chunk starts of the sequence, unless the caller saved them
//     open_chunk       what the backward blocks of one chunk need; returns their number
//     backward_block   `gradients` of one block and its dv; G, the gradient of its end state, becomes that of its start
template <class Kernel>
HWY_INLINE void run_unit(const DeltaRuleBackwardProblem& problem, const BackwardPlan& plan, const Sequence& sequence,
                         const Item& item, Kernel& kernel) {
  const DeltaRuleBackward& args = problem.args;
  const DeltaRuleSizes& sizes = problem.sizes;
  const DeltaRuleOptions& options = args.options;
  const int64_t K = sizes.head_dim_k, V = sizes.head_dim_v;
  const Head head = make_head(problem, sequence, item.value_head, kernel.bias);
  const GateSums sums = plan.sums_of(sizes, sequence.index, item.value_head);

  if (args.d_final_state.present()) {
    load_state(state_of(args.d_final_state, options.state_v_first, K, V, sequence.index, item.value_head),
               item.first_panel, item.panels, plan.ld, kernel.G);
  } else {
    std::memset(kernel.G, 0, static_cast<size_t>(item.panels * plan.ld * kPanel) * sizeof(float));
  }

  kernel.open_sequence(problem, head, sequence, item);
  const int64_t chunks = (sequence.length + options.chunk_size - 1) / options.chunk_size;
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t blocks = kernel.open_chunk(chunk);
    for (int64_t b = blocks - 1; b >= 0; --b) {
      const int64_t token = sequence.begin + chunk * options.chunk_size + b * kBlock;
      BlockGradients& gradients = kernel.gradients;
      const Block& block = kernel.backward_block(b, token);
      const int64_t part = plan.part(item.value_head, item.range, head, sizes, token);
      const size_t row_bytes = static_cast<size_t>(block.n * plan.ld) * sizeof(float);
      if (plan.sum_keys) {
        for (const auto one : KeyGradients::kAll) {
          if (gradients.*one != nullptr) std::memcpy(plan.keys.*one + part * plan.ld, gradients.*one, row_bytes);
        }
      } else {
        finish_keys(args, head, token, block, gradients);
      }
      if (plan.sum_gates) {
        std::memcpy(plan.dg + part * plan.gate_width, gradients.dg,
                    static_cast<size_t>(block.n * plan.gate_width) * sizeof(float));
        std::memcpy(plan.dbeta + part, gradients.dbeta, static_cast<size_t>(block.n) * sizeof(float));
      } else {
        finish_gate(args, head, token, block, gradients.dg, kernel.raw, sums);
        finish_beta(args, head, token, block, gradients.dbeta);
      }
    }
  }
  if (args.d_initial_state.present()) {
    store_state(kernel.G, state_of(args.d_initial_state, options.state_v_first, K, V, sequence.index, item.value_head),
                item.first_panel, item.panels, plan.ld);
  }
}

// x[0, count) = sum over `parts` of part[p * stride + i], in order.
HWY_INLINE void add_parts(const float* part, int64_t stride, int64_t parts, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    float sum = part[i];
    for (int64_t p = 1; p < parts; ++p) sum += part[p * stride + i];
    x[i] = sum;
  }
}

struct FinishScratch {
  Block block;
  BlockGradients gradients;
  float* bias;  // [max(ld, 16)]
  float* raw;   // [max(ld, 16)]

  void lay_out(ScratchLayout& layout, Form form, int64_t ld) {
    block.lay_out(layout, form, ld);
    gradients.lay_out(layout, form, ld);
    bias = layout.take<float>(std::max(ld, kBlock));
    raw = layout.take<float>(std::max(ld, kBlock));
  }
};

// Adds the parts of one key head of one sequence, last block first as in the walk of a unit.
HWY_NOINLINE inline void finish_head(const DeltaRuleBackwardProblem& problem, const BackwardPlan& plan,
                                     const Sequence& sequence, int64_t key_head, FinishScratch& scratch) {
  const DeltaRuleBackward& args = problem.args;
  const DeltaRuleSizes& sizes = problem.sizes;
  const int64_t first_head = key_head * sizes.group;
  const int64_t units = plan.units_per_head;
  for (int64_t t = round_up(sequence.length, kBlock) - kBlock; t >= 0; t -= kBlock) {
    const int64_t token = sequence.begin + t;
    const int64_t n = std::min(kBlock, sequence.length - t);
    for (int64_t h = first_head; h < first_head + sizes.group; ++h) {
      const Head head = make_head(problem, sequence, h, scratch.bias);
      if (h == first_head || plan.sum_gates) load_block(head, token, n, scratch.block);
      if (h == first_head) {
        const int64_t part = plan.part(h, 0, head, sizes, token);
        for (const auto one : KeyGradients::kAll) {
          if (scratch.gradients.*one == nullptr) continue;
          add_parts(plan.keys.*one + part * plan.ld, plan.tokens * plan.ld, sizes.group * units, n * plan.ld,
                    scratch.gradients.*one);
        }
        finish_keys(args, head, token, scratch.block, scratch.gradients);
      }
      if (plan.sum_gates) {
        const int64_t part = plan.part(h, 0, head, sizes, token);
        add_parts(plan.dg + part * plan.gate_width, plan.tokens * plan.gate_width, units, n * plan.gate_width,
                  scratch.gradients.dg);
        add_parts(plan.dbeta + part, plan.tokens, units, n, scratch.gradients.dbeta);
        finish_gate(args, head, token, scratch.block, scratch.gradients.dg, scratch.raw,
                    plan.sums_of(sizes, sequence.index, h));
        finish_beta(args, head, token, scratch.block, scratch.gradients.dbeta);
      }
    }
  }
}

// Adds the sums of the sequences in order.
inline void finish_parameters(const DeltaRuleBackwardProblem& problem, const BackwardPlan& plan) {
  if (plan.gate_sums == nullptr) return;
  const DeltaRuleSizes& sizes = problem.sizes;
  for (int64_t h = 0; h < sizes.num_value_heads; ++h) {
    for (int64_t i = 0; i < 1 + plan.bias_width; ++i) {
      double sum = 0;
      for (int64_t n = 0; n < sizes.num_sequences; ++n) sum += plan.sums_of(sizes, n, h).da_log[i];
      const TensorView& output = i == 0 ? problem.args.da_log : problem.args.ddt_bias;
      if (output.present()) store_element(output, i == 0 ? h : h * plan.bias_width + i - 1, sum);
    }
  }
}

template <class Kernel>
HWY_INLINE void run_backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const Form form = form_of(problem);
  const std::vector<Sequence>& sequences = problem.sequences;
  int64_t longest = 0;
  for (const Sequence& s : sequences) longest = std::max(longest, s.length);

  BackwardPlan plan(problem);
  const std::vector<Item> items = unit_items(sequences, sizes.num_value_heads, plan.panels, plan.units_per_head);
  const int threads =
      useful_threads(num_threads(context), static_cast<int64_t>(items.size()),
                     9 * sizes.batch * sizes.tokens * sizes.num_value_heads * sizes.head_dim_k * sizes.head_dim_v);
  int64_t unit_panels = 0;
  for (const Item& item : items) unit_panels = std::max(unit_panels, item.panels);

  // [parts of sums][scratch of thread 0][scratch of thread 1]..; the second loop reuses the scratch.
  ScratchLayout measure_plan, measure_kernel, measure_finish;
  plan.lay_out(measure_plan, problem);
  Kernel().lay_out(measure_kernel, problem, plan.ld, unit_panels, longest);
  FinishScratch().lay_out(measure_finish, form, plan.ld);
  const size_t scratch_bytes = std::max(measure_kernel.bytes(), measure_finish.bytes());
  const Workspace workspace(context, measure_plan.bytes() + scratch_bytes * static_cast<size_t>(threads));
  ScratchLayout layout(workspace.data());
  plan.lay_out(layout, problem);
  for (int64_t n = 0; n < sizes.num_sequences && plan.gate_sums != nullptr; ++n) {
    for (int64_t h = 0; h < sizes.num_value_heads; ++h) {
      std::fill_n(plan.sums_of(sizes, n, h).da_log, 1 + plan.bias_width, 0.0);
    }
  }
  const auto scratch_of = [&](int thread) {
    return ScratchLayout(static_cast<char*>(workspace.data()) + measure_plan.bytes() +
                         scratch_bytes * static_cast<size_t>(thread));
  };

  const FlushDenormals flush;
  parallel_for(static_cast<int64_t>(items.size()), threads, [&](int64_t i, int thread) HWY_ATTR {
    ScratchLayout scratch = scratch_of(thread);
    Kernel kernel;
    kernel.lay_out(scratch, problem, plan.ld, unit_panels, longest);
    const Item& item = items[static_cast<size_t>(i)];
    run_unit(problem, plan, sequences[static_cast<size_t>(item.sequence)], item, kernel);
  });
  if (plan.sum_keys) {
    const int64_t heads = sizes.num_heads;
    parallel_for(static_cast<int64_t>(sequences.size()) * heads, threads, [&](int64_t i, int thread) HWY_ATTR {
      ScratchLayout scratch = scratch_of(thread);
      FinishScratch finish;
      finish.lay_out(scratch, form, plan.ld);
      finish_head(problem, plan, sequences[static_cast<size_t>(i / heads)], i % heads, finish);
    });
  }
  finish_parameters(problem, plan);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
