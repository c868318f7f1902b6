// Forward and decoding token by token, in the order of the definition.

#include <cstdint>
#include <vector>

#include "cpu/delta_rule/implementations.h"
#include "cpu/delta_rule/work.h"
#include "cpu/parallel.h"
#include "cpu/simd/targets.h"
#include "ops/workspace.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta_rule/recurrent_fwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/delta_rule/block-inl.h"
#include "cpu/delta_rule/recurrent-inl.h"
#include "cpu/delta_rule/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

struct Scratch {
  Block block;
  float* bias;        // [max(ld, 16)]
  float* S;           // [panels][ld][kPanel]
  float* v;           // [16][panels * kPanel]
  float* beta;        // [16][panels * kPanel], for one beta per value channel
  float* o;           // [16][panels * kPanel]
  float* decayed;     // [16][ld]
  float* prediction;  // [panels * kPanel]

  void carve(Carver& carver, Gate gate, int64_t ld, int64_t panels) {
    block.carve(carver, gate, ld);
    bias = carver.take<float>(std::max(ld, kBlock));
    S = carver.take<float>(panels * ld * kPanel);
    v = carver.take<float>(kBlock * panels * kPanel);
    beta = carver.take<float>(kBlock * panels * kPanel);
    o = carver.take<float>(kBlock * panels * kPanel);
    decayed = carver.take<float>(kBlock * ld);
    prediction = carver.take<float>(panels * kPanel);
  }
};

// Advances S over the item's tokens and writes o. `before_block(t)` is called with S up to date before every block.
template <class BeforeBlock>
HWY_INLINE void run_tokens(const DeltaRuleInputs& in, const DeltaRuleOptions& options, const DeltaRuleSizes& sizes,
                           double scale, const TensorView& o, const Sequence& sequence, const Item& item,
                           const StatePanels& S, Scratch& scratch, BeforeBlock before_block) {
  const Head head = make_head(in, options, sizes, sequence, item.value_head, scratch.bias);
  const int64_t stride = item.panels * kPanel;
  const int64_t column = item.first_panel * kPanel;
  const int64_t width = std::min(stride, head.V - column);
  for (int64_t t = 0; t < sequence.length; t += kBlock) {
    before_block(t);
    const int64_t token = sequence.begin + t;
    const int64_t n = std::min(kBlock, sequence.length - t);
    load_block(head, token, n, scratch.block);
    load_rows(in.v, sequence.batch, token, item.value_head, n, column, width, scratch.v, stride);
    prefetch_block(head, token + kBlock);
    prefetch_rows(in.v, head, item.value_head, token + kBlock, column, width);
    prefetch_rows(o, head, item.value_head, token, column, width);
    const bool beta_per_value = load_beta_rows(head, token, n, column, width, scratch.beta, stride);
    make_decayed_keys(options.gate, scratch.block, scratch.decayed);
    recurrent_tokens(options.gate, scratch.block, scratch.decayed, head.K, static_cast<float>(scale), S, item.panels,
                     {scratch.v, beta_per_value ? scratch.beta : nullptr, scratch.o, stride}, scratch.prediction);
    store_rows(scratch.o, stride, o, sequence.batch, token, item.value_head, n, column, width);
  }
}

void run_forward_item(const DeltaRuleForwardProblem& problem, const Sequence& sequence, const Item& item,
                      Scratch& scratch) {
  const DeltaRuleForward& args = problem.args;
  const bool v_first = args.options.state_v_first;
  const int64_t K = problem.sizes.head_dim_k, V = problem.sizes.head_dim_v;
  const int64_t ld = scratch.block.ld;
  if (args.in.initial_state.present()) {
    load_state(state_of(args.in.initial_state, v_first, K, V, sequence.index, item.value_head), item.first_panel,
               item.panels, ld, scratch.S);
  } else {
    std::memset(scratch.S, 0, static_cast<size_t>(item.panels * ld * kPanel) * sizeof(float));
  }
  const auto save_chunk_state = [&](int64_t t) HWY_ATTR {
    if (!args.chunk_states.present() || t % args.options.chunk_size != 0) return;
    const int64_t chunk = sequence.first_chunk + t / args.options.chunk_size;
    store_state(scratch.S, chunk_state_of(args.chunk_states, v_first, K, V, sequence.batch, chunk, item.value_head),
                item.first_panel, item.panels, ld);
  };
  run_tokens(args.in, args.options, problem.sizes, problem.scale, args.o, sequence, item,
             {scratch.S, kPanel, ld * kPanel}, scratch, save_chunk_state);
  if (args.final_state.present()) {
    store_state(scratch.S, state_of(args.final_state, v_first, K, V, sequence.index, item.value_head),
                item.first_panel, item.panels, ld);
  }
}

// A state that lies in memory as rows of whole panels is advanced where it is; others go through scratch.
void run_step_item(const DeltaRuleStepProblem& problem, const Sequence& sequence, const Item& item,
                   Scratch& scratch) {
  const DeltaRuleStep& args = problem.args;
  const int64_t K = problem.sizes.head_dim_k, V = problem.sizes.head_dim_v;
  const int64_t ld = scratch.block.ld;
  int64_t slot = sequence.index;
  if (args.state_indices.present()) {
    slot = load_integer(args.state_indices.data, args.state_indices.dtype, slot * args.state_indices.strides[0]);
  }
  if (slot < 0) {
    const int64_t column = item.first_panel * kPanel;
    const int64_t width = std::min(item.panels * kPanel, V - column);
    std::memset(scratch.o, 0, static_cast<size_t>(kBlock * item.panels * kPanel) * sizeof(float));
    for (int64_t t = 0; t < sequence.length; t += kBlock) {
      store_rows(scratch.o, item.panels * kPanel, args.o, sequence.batch, sequence.begin + t, item.value_head,
                 std::min(kBlock, sequence.length - t), column, width);
    }
    return;
  }
  const StateRef state = state_of(args.state, args.options.state_v_first, K, V, slot, item.value_head);
  const bool in_place = state.dtype == DType::kF32 && state.v_stride == 1 && V % kPanel == 0;
  StatePanels S{scratch.S, kPanel, ld * kPanel};
  if (in_place) {
    S = {reinterpret_cast<float*>(state.data) + item.first_panel * kPanel, state.k_stride, kPanel};
  } else {
    load_state(state, item.first_panel, item.panels, ld, scratch.S);
  }
  run_tokens(args.in, args.options, problem.sizes, problem.scale, args.o, sequence, item, S, scratch, [](int64_t) {});
  if (!in_place) store_state(scratch.S, state, item.first_panel, item.panels, ld);
}

template <class Problem, class RunItem>
HWY_INLINE void run(const Problem& problem, const Context& context, RunItem run_item) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const Gate gate = problem.args.options.gate;
  const int64_t ld = round_up(sizes.head_dim_k, kRowMultiple);
  const int64_t panels = round_up(sizes.head_dim_v, kPanel) / kPanel;
  const std::vector<Sequence> sequences =
      sequence_table(sizes.batch, sizes.tokens, problem.args.in.cu_seqlens, problem.args.options.chunk_size);
  const int threads_wanted = num_threads(context);
  const std::vector<Item> items = column_items(sequences, sizes.num_value_heads, panels, threads_wanted);
  const int threads =
      useful_threads(threads_wanted, static_cast<int64_t>(items.size()),
                     3 * sizes.batch * sizes.tokens * sizes.num_value_heads * sizes.head_dim_k * sizes.head_dim_v);
  Carver measure;
  Scratch().carve(measure, gate, ld, panels);
  const Workspace workspace(context, measure.bytes() * static_cast<size_t>(threads));
  parallel_for(static_cast<int64_t>(items.size()), threads, [&](int64_t i, int thread) HWY_ATTR {
    Carver carver(static_cast<char*>(workspace.data()) + measure.bytes() * static_cast<size_t>(thread));
    Scratch scratch;
    scratch.carve(carver, gate, ld, panels);
    const Item& item = items[static_cast<size_t>(i)];
    run_item(problem, sequences[static_cast<size_t>(item.sequence)], item, scratch);
  });
}

void forward(const DeltaRuleForwardProblem& problem, const Context& context) { run(problem, context, run_forward_item); }
void step(const DeltaRuleStepProblem& problem, const Context& context) { run(problem, context, run_step_item); }

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(forward);
HWY_EXPORT(step);

void recurrent_forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

void recurrent_step(const DeltaRuleStepProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(step)(problem, context);
}

}  // namespace fastweight::cpu
#endif
