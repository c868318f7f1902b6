// What the two forward kernels share: scratch memory, the states at both ends, and the parallel loop over items.
// Re-included once per instruction set.
#if defined(FW_CPU_DELTA_RULE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_DELTA_RULE_FORWARD_INL_H_
#undef FW_CPU_DELTA_RULE_FORWARD_INL_H_
#else
#define FW_CPU_DELTA_RULE_FORWARD_INL_H_
#endif

#include <vector>

#include "cpu/delta_rule/block-inl.h"
#include "cpu/delta_rule/recurrent-inl.h"
#include "cpu/denormals.h"
#include "cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// One thread's memory; it does not grow with T.
struct ForwardScratch {
  RowPrefetcher prefetcher;
  Block block;
  float* bias;        // [max(ld, 16)]
  float* S;           // [panels][ld][kPanel]
  float* v;           // [16][panels * kPanel]
  float* beta;        // [16][panels * kPanel], for one beta per value channel
  float* o;           // [16][panels * kPanel]
  float* X;           // [32][kPanel], chunk form
  float* R;           // [16][kPanel], chunk form
  float* decayed;     // [16][ld], token by token
  float* prediction;  // [panels * kPanel], token by token

  void lay_out(ScratchLayout& layout, Form form, int64_t ld, int64_t panels) {
    block.lay_out(layout, form, ld);
    bias = layout.take<float>(std::max(ld, kBlock));
    S = layout.take<float>(panels * ld * kPanel);
    v = layout.take<float>(kBlock * panels * kPanel);
    beta = layout.take<float>(kBlock * panels * kPanel);
    o = layout.take<float>(kBlock * panels * kPanel);
    X = layout.take<float>(2 * kBlock * kPanel);
    R = layout.take<float>(kBlock * kPanel);
    decayed = layout.take<float>(kBlock * ld);
    prediction = layout.take<float>(panels * kPanel);
  }
};

// The item's columns of v and o.
struct ItemColumns {
  int64_t stride;  // of the rows in scratch
  int64_t first, width;

  ItemColumns(const Item& item, int64_t V)
      : stride(item.panels * kPanel),
        first(item.first_panel * kPanel),
        width(std::clamp<int64_t>(V - first, 0, stride)) {}
};

// Rows of v (and q, k, beta, gates) of one block into scratch; the next block's and o's rows are left to the
// prefetcher.
HWY_NOINLINE inline void load_forward_block(const Head& head, const TensorView& o, int64_t token, int64_t n,
                                            const ItemColumns& columns, ForwardScratch& scratch) {
  load_block(head, token, n, scratch.block);
  load_rows(head.in->v, head.batch, token, head.value_head, n, columns.first, columns.width, scratch.v, columns.stride,
            kBlock);
  scratch.prefetcher.clear();
  prefetch_rows(o, head, head.value_head, token, columns.first, columns.width, scratch.prefetcher);
  prefetch_block(head, token + kBlock, scratch.prefetcher);
  prefetch_rows(head.in->v, head, head.value_head, token + kBlock, columns.first, columns.width, scratch.prefetcher);
}

// Runs the loaded block token by token.
HWY_INLINE void run_block_by_tokens(const Head& head, int64_t token, float scale, const StatePanels& S, int64_t panels,
                                    const ItemColumns& columns, ForwardScratch& scratch) {
  const bool beta_per_value =
      load_beta_rows(head, token, scratch.block.n, columns.first, columns.width, scratch.beta, columns.stride);
  const float* readers = make_readers(scratch.block, scratch.decayed);
  const ValueRows rows{scratch.v, beta_per_value ? scratch.beta : nullptr, scratch.o, columns.stride};
  with_correction(scratch.block, [&]<Correction kCorrection>() HWY_ATTR {
    recurrent_tokens<kCorrection>(scratch.block, readers, head.K, scale, S, panels, rows, scratch.prediction,
                                  scratch.prefetcher);
  });
}

// Walks a sequence from its initial to its final state, both in scratch.S. run_block(token, n) advances the state and
// fills scratch.o.
template <class RunBlock>
HWY_INLINE void run_sequence(const DeltaRuleForwardProblem& problem, const Sequence& sequence, const Item& item,
                             const Head& head, ForwardScratch& scratch, RunBlock run_block) {
  const DeltaRuleForward& args = problem.args;
  const bool v_first = args.options.state_v_first;
  const int64_t ld = scratch.block.ld;
  const ItemColumns columns(item, head.V);
  if (args.in.initial_state.present()) {
    load_state(state_of(args.in.initial_state, v_first, head.K, head.V, sequence.index, item.value_head),
               item.first_panel, item.panels, ld, scratch.S);
  } else {
    std::memset(scratch.S, 0, static_cast<size_t>(item.panels * ld * kPanel) * sizeof(float));
  }
  for (int64_t t = 0; t < sequence.length; t += kBlock) {
    if (args.chunk_states.present() && t % args.options.chunk_size == 0) {
      const int64_t chunk = sequence.first_chunk + t / args.options.chunk_size;
      store_state(scratch.S,
                  chunk_state_of(args.chunk_states, v_first, head.K, head.V, sequence.batch, chunk, item.value_head),
                  item.first_panel, item.panels, ld);
    }
    const int64_t token = sequence.begin + t;
    const int64_t n = std::min(kBlock, sequence.length - t);
    load_forward_block(head, args.o, token, n, columns, scratch);
    run_block(token, n);
    store_rows(scratch.o, columns.stride, args.o, sequence.batch, token, item.value_head, n, columns.first,
               columns.width);
  }
  if (args.final_state.present()) {
    store_state(scratch.S, state_of(args.final_state, v_first, head.K, head.V, sequence.index, item.value_head),
                item.first_panel, item.panels, ld);
  }
}

// run_item(problem, sequence, item, scratch) for every item of the problem.
template <class Problem, class RunItem>
HWY_INLINE void run_items(const Problem& problem, const Context& context, RunItem run_item) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const Form form = form_of(problem);
  const int64_t ld = round_up(sizes.head_dim_k, kRowMultiple);
  const int64_t panels = round_up(sizes.head_dim_v, kPanel) / kPanel;
  const int most_threads = num_threads(context);
  const std::vector<Item> items = column_items(problem.sequences, sizes.num_value_heads, panels, most_threads);
  const int threads =
      useful_threads(most_threads, static_cast<int64_t>(items.size()),
                     3 * sizes.batch * sizes.tokens * sizes.num_value_heads * sizes.head_dim_k * sizes.head_dim_v);
  ScratchLayout measure;
  ForwardScratch().lay_out(measure, form, ld, panels);
  const Workspace workspace(context, measure.bytes() * static_cast<size_t>(threads));
  const FlushDenormals flush;
  parallel_for(static_cast<int64_t>(items.size()), threads, [&](int64_t i, int thread) HWY_ATTR {
    ScratchLayout layout(static_cast<char*>(workspace.data()) + measure.bytes() * static_cast<size_t>(thread));
    ForwardScratch scratch;
    scratch.lay_out(layout, form, ld, panels);
    const Item& item = items[static_cast<size_t>(i)];
    run_item(problem, problem.sequences[static_cast<size_t>(item.sequence)], item, scratch);
  });
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
