// The map of a segment in the chunk form: the scans of chunk_fwd.cc and chunk_bwd.cc without what tokens get out of
// them, over the columns of two matrices at once. Notation as there.
//
//     forward    R = (I + A)^-1 beta (v - e k S)       S <- exp(gamma_n) S + (w k)^T R
//     backward   Y = (I + A)^-T (P^T do + w (k G))     G <- exp(gamma_n) G + (e q)^T do - (beta e k)^T Y
//
// h is S from the initial state, M is S from the identity with v = 0; e is G from the gradient of the final state, M^T
// is G from the identity with do = 0. Columns do not touch each other: an item owns a range of panels of [h, M], and
// what belongs to the block is made once for both. h has the bits of the forward's final state, e those of the
// backward's gradient of the initial state.

#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/partition.h"
#include "cpu/parallel.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta_rule/chunk_map.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/delta_rule/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

// The two matrices that a walk advances, [K, V] and [K, K], of which either may be absent, and the state that the first
// begins with.
struct MapViews {
  const TensorView &state, &square, &start;

  int64_t state_panels(int64_t V) const { return state.present() ? round_up(V, kPanel) / kPanel : 0; }
  int64_t square_panels(int64_t K) const { return square.present() ? round_up(K, kPanel) / kPanel : 0; }
};
MapViews views_of(const DeltaRuleMapForward& args) { return {args.h, args.m, args.in.initial_state}; }
MapViews views_of(const DeltaRuleMapBackward& args) { return {args.e, args.mt, args.d_final_state}; }

// An item's panels: those of the state come first, then those of the square matrix from column `first_square` on.
struct MapPanels {
  int64_t first_state, states;
  int64_t first_square, squares;

  MapPanels(const Item& item, int64_t state_panels)
      : first_state(item.first_panel),
        states(std::clamp<int64_t>(state_panels - item.first_panel, 0, item.panels)),
        first_square(item.first_panel + states - state_panels),
        squares(item.panels - states) {}
};

// Panels [first, first + panels) of the identity.
void load_identity(int64_t first, int64_t panels, int64_t K, int64_t ld, float* S) {
  std::memset(S, 0, static_cast<size_t>(panels * ld * kPanel) * sizeof(float));
  for (int64_t d = first * kPanel; d < std::min((first + panels) * kPanel, K); ++d) {
    S[(d / kPanel - first) * ld * kPanel + d * kPanel + d % kPanel] = 1;
  }
}

template <class Problem>
void load_start(const Problem& problem, const Sequence& sequence, const Item& item, const MapPanels& panels, int64_t ld,
                float* S) {
  const MapViews views = views_of(problem.args);
  const int64_t K = problem.sizes.head_dim_k, V = problem.sizes.head_dim_v;
  if (views.start.present()) {
    load_state(state_of(views.start, problem.args.options.state_v_first, K, V, sequence.index, item.value_head),
               panels.first_state, panels.states, ld, S);
  } else {
    std::memset(S, 0, static_cast<size_t>(panels.states * ld * kPanel) * sizeof(float));
  }
  load_identity(panels.first_square, panels.squares, K, ld, S + panels.states * ld * kPanel);
}

template <class Problem>
void store_result(const Problem& problem, const Sequence& sequence, const Item& item, const MapPanels& panels,
                  int64_t ld, const float* S) {
  const MapViews views = views_of(problem.args);
  const int64_t K = problem.sizes.head_dim_k, V = problem.sizes.head_dim_v;
  if (panels.states > 0) {
    store_state(S, state_of(views.state, problem.args.options.state_v_first, K, V, sequence.index, item.value_head),
                panels.first_state, panels.states, ld);
  }
  if (panels.squares > 0) {
    store_state(S + panels.states * ld * kPanel, state_of(views.square, false, K, K, sequence.index, item.value_head),
                panels.first_square, panels.squares, ld);
  }
}

// The item's columns of v or do of one block, with zeros for those of the square matrix.
void load_columns(const TensorView& x, const Head& head, int64_t token, int64_t n, const ItemColumns& columns,
                  float* rows) {
  if (x.present() && columns.width > 0) {
    load_rows(x, head.batch, token, head.value_head, n, columns.first, columns.width, rows, columns.stride, kBlock);
  } else {
    std::memset(rows, 0, static_cast<size_t>(kBlock * columns.stride) * sizeof(float));
  }
}

void forward_item(const DeltaRuleMapForwardProblem& problem, const Sequence& sequence, const Item& item,
                  const MapPanels& panels, ForwardScratch& scratch) {
  const Head head = make_head(problem, sequence, item.value_head, scratch.bias);
  const ItemColumns columns(item, problem.args.h.present() ? head.V : 0);
  Block& block = scratch.block;
  load_start(problem, sequence, item, panels, block.ld, scratch.S);
  for (int64_t t = 0; t < sequence.length; t += kBlock) {
    const int64_t token = sequence.begin + t, n = std::min(kBlock, sequence.length - t);
    load_block(head, token, n, block);
    load_columns(head.in->v, head, token, n, columns, scratch.v);
    scratch.prefetcher.clear();
    prefetch_block(head, token + kBlock, scratch.prefetcher);
    prefetch_rows(head.in->v, head, head.value_head, token + kBlock, columns.first, columns.width, scratch.prefetcher);
    if (n < kCrossoverTokens) {  // as the forward
      run_block_by_tokens(head, token, 1, {scratch.S, kPanel, block.ld * kPanel}, item.panels, columns, scratch);
      continue;
    }
    prepare_block(head.K, block);
    for (int64_t p = 0; p < item.panels; ++p) {
      float* S = scratch.S + p * block.ld * kPanel;
      const float* v = scratch.v + p * kPanel;
      read_panel(block, 0, kBlock, S, scratch.X, scratch.prefetcher);
      correct_panel(block, scratch.X, v, columns.stride, scratch.R);
      write_panel(block, S, scratch.R, v, columns.stride, S, scratch.prefetcher);
    }
  }
  store_result(problem, sequence, item, panels, block.ld, scratch.S);
}

// The rows that a block's update of G adds: -beta e Y, then e do.
HWY_INLINE void make_gradient_writes(const Block& block, const float* Y, const float* d_o, int64_t d_o_stride,
                                     float* writes) {
  for (int64_t i = 0; i < kBlock; ++i) {
    const Vec beta = broadcast(block.beta[i]);
    const Vec reader_scale = broadcast(block.reader_scale[i]), scale = broadcast(block.read_scale[i]);
    for (int64_t c = 0; c < kPanel; c += kLanes) {
      const Vec scaled_y = hn::Neg(hn::Mul(reader_scale, load(Y + i * kPanel + c)));
      store(hn::Mul(beta, scaled_y), writes + i * kPanel + c);
      store(hn::Mul(scale, load(d_o + i * d_o_stride + c)), writes + (kBlock + i) * kPanel + c);
    }
  }
}

void backward_item(const DeltaRuleMapBackwardProblem& problem, const Sequence& sequence, const Item& item,
                   const MapPanels& panels, ForwardScratch& scratch) {
  const DeltaRuleMapBackward& args = problem.args;
  const Head head = make_head(problem, sequence, item.value_head, scratch.bias);
  const ItemColumns columns(item, args.e.present() ? head.V : 0);
  Block& block = scratch.block;
  const bool per_channel = block.form.per_channel();
  const Vec scale = broadcast(static_cast<float>(problem.scale));
  float* d_o = scratch.v;
  float* KG = scratch.R;
  alignas(64) float Y[kBlock * kPanel];
  load_start(problem, sequence, item, panels, block.ld, scratch.S);
  for (int64_t t = round_up(sequence.length, kBlock) - kBlock; t >= 0; t -= kBlock) {
    const int64_t token = sequence.begin + t, n = std::min(kBlock, sequence.length - t);
    load_block(head, token, n, block);
    load_columns(args.d_o, head, token, n, columns, d_o);
    for (int64_t i = 0; i < n * columns.stride; i += kLanes) store(hn::Mul(scale, load(d_o + i)), d_o + i);
    scratch.prefetcher.clear();
    prefetch_block(head, token - kBlock, scratch.prefetcher);
    prefetch_rows(args.d_o, head, head.value_head, token - kBlock, columns.first, columns.width, scratch.prefetcher);
    prepare_block(head.K, block);
    // Without per-channel factors a write is a key without its scale.
    float* write_columns = per_channel ? scratch.decayed : block.key_columns;
    const int64_t write_stride = per_channel ? kBlock : block.key_stride;
    if (per_channel) transpose(block.write, block.ld, kBlock, block.ld, write_columns, kBlock);
    for (int64_t p = 0; p < item.panels; ++p) {
      float* G = scratch.S + p * block.ld * kPanel;
      product<Columns, Start::kZero>({.rows = kBlock,
                                      .columns = kPanel,
                                      .depth = block.ld,
                                      .a = write_columns,
                                      .a_stride = write_stride,
                                      .b = G,
                                      .b_stride = kPanel,
                                      .c_in = KG,
                                      .c_out = KG,
                                      .c_stride = kPanel,
                                      .prefetcher = &scratch.prefetcher});
      adjoint_solve_panel(block, KG, d_o + p * kPanel, columns.stride, Y);
      make_gradient_writes(block, Y, d_o + p * kPanel, columns.stride, scratch.X);
      product<Columns, Start::kDecay>({.rows = block.ld,
                                       .columns = kPanel,
                                       .depth = p < panels.states ? 2 * kBlock : kBlock,
                                       .a = block.read,
                                       .a_stride = block.ld,
                                       .b = scratch.X,
                                       .b_stride = kPanel,
                                       .c_in = G,
                                       .c_out = G,
                                       .c_stride = kPanel,
                                       .decay = block.total,
                                       .decay_stride = block.total_stride,
                                       .prefetcher = &scratch.prefetcher});
    }
  }
  store_result(problem, sequence, item, panels, block.ld, scratch.S);
}

// run_item(problem, sequence, item, panels, scratch) for every item.
template <class Problem, class RunItem>
HWY_INLINE void run_map(const Problem& problem, const Context& context, RunItem run_item) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const MapViews views = views_of(problem.args);
  const Form form = form_of(problem);
  const int64_t ld = round_up(sizes.head_dim_k, kRowMultiple);
  const int64_t state_panels = views.state_panels(sizes.head_dim_v);
  const int64_t panels = state_panels + views.square_panels(sizes.head_dim_k);
  const int most_threads = num_threads(context);
  const std::vector<Item> items = column_items(problem.sequences, sizes.num_value_heads, panels, most_threads);
  const int threads =
      useful_threads(most_threads, static_cast<int64_t>(items.size()),
                     2 * sizes.batch * sizes.tokens * sizes.num_value_heads * sizes.head_dim_k * panels * kPanel);
  ScratchLayout measure;
  ForwardScratch().lay_out(measure, form, ld, panels);
  const Workspace workspace(context, measure.bytes() * static_cast<size_t>(threads));
  const FlushDenormals flush;
  parallel_for(static_cast<int64_t>(items.size()), threads, [&](int64_t i, int thread) HWY_ATTR {
    ScratchLayout layout(static_cast<char*>(workspace.data()) + measure.bytes() * static_cast<size_t>(thread));
    ForwardScratch scratch;
    scratch.lay_out(layout, form, ld, panels);
    const Item& item = items[static_cast<size_t>(i)];
    run_item(problem, problem.sequences[static_cast<size_t>(item.sequence)], item, MapPanels(item, state_panels),
             scratch);
  });
}

void map_forward(const DeltaRuleMapForwardProblem& problem, const Context& context) {
  run_map(problem, context, forward_item);
}
void map_backward(const DeltaRuleMapBackwardProblem& problem, const Context& context) {
  run_map(problem, context, backward_item);
}

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(map_forward);
HWY_EXPORT(map_backward);

void chunk_map_forward(const DeltaRuleMapForwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(map_forward)(problem, context);
}
void chunk_map_backward(const DeltaRuleMapBackwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(map_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
