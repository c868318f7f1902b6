// Forward in the chunk form: blocks of 16 tokens against a state that stays in cache.
//
// With S the state before a block, gamma the running sums of the log decays inside it, and the matrices
//
//     A_ij = beta_i (k_i . k_j) exp(gamma_i - gamma_j)  (i > j),     P_ij = (q_i . k_j) exp(gamma_i - gamma_j)  (i >= j),
//
// a block is
//
//     X  = exp(gamma) [k; q] S                        one product for reads and outputs
//     R  = (I + A)^-1 beta (v - X_k)                  forward substitution, no inverse
//     o  = scale (X_q + P R)
//     S' = exp(gamma_n) S + (exp(gamma_n - gamma) k)^T R
//
// (per-channel gates put the exponentials inside the products). A, P and the scaled keys belong to the block; everything
// else is done panel by panel of value columns, whose slice of S (8 KB at K = 128 on AVX2) is read from the second-level
// cache once per block. Columns do not touch each other, so an item may own any range of panels.

#include <cstdint>
#include <vector>

#include "cpu/delta_rule/implementations.h"
#include "cpu/delta_rule/work.h"
#include "cpu/parallel.h"
#include "cpu/simd/targets.h"
#include "ops/workspace.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta_rule/chunk_fwd.cc"
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
  float* o;           // [16][panels * kPanel]
  float* X;           // [32][kPanel]
  float* R;           // [16][kPanel]
  float* decayed;     // [16][ld], for a short last block
  float* prediction;  // [panels * kPanel], likewise

  void carve(Carver& carver, Gate gate, int64_t ld, int64_t panels) {
    block.carve(carver, gate, ld);
    bias = carver.take<float>(std::max(ld, kBlock));
    S = carver.take<float>(panels * ld * kPanel);
    v = carver.take<float>(kBlock * panels * kPanel);
    o = carver.take<float>(kBlock * panels * kPanel);
    X = carver.take<float>(2 * kBlock * kPanel);
    R = carver.take<float>(kBlock * kPanel);
    decayed = carver.take<float>(kBlock * ld);
    prediction = carver.take<float>(panels * kPanel);
  }
};

// o = scale (X_q + P R) for one panel, four rows at a time.
HWY_INLINE void output_panel(const Block& block, float scale, const float* X_q, const float* R, float* o,
                             int64_t o_stride) {
  const float* P = block.P();
  const Vec s = broadcast(scale);
  FW_UNROLL
  for (int64_t top = 0; top < kBlock; top += 4) {
    Vec acc[4][2];
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      const Vec read_scale = broadcast(block.read_scale[top + m]);
      acc[m][0] = hn::Mul(read_scale, load(X_q + (top + m) * kPanel));
      acc[m][1] = hn::Mul(read_scale, load(X_q + (top + m) * kPanel + kLanes));
    }
    for (int64_t j = 0; j < top + 4; ++j) {
      const Vec r0 = load(R + j * kPanel), r1 = load(R + j * kPanel + kLanes);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) {
        const Vec p = broadcast(P[(top + m) * kBlock + j]);
        acc[m][0] = fma(p, r0, acc[m][0]);
        acc[m][1] = fma(p, r1, acc[m][1]);
      }
    }
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      store(hn::Mul(s, acc[m][0]), o + (top + m) * o_stride);
      store(hn::Mul(s, acc[m][1]), o + (top + m) * o_stride + kLanes);
    }
  }
}

void run_item(const DeltaRuleForwardProblem& problem, const Sequence& sequence, const Item& item, Scratch& scratch) {
  const DeltaRuleForward& args = problem.args;
  const DeltaRuleOptions& options = args.options;
  const Gate gate = options.gate;
  const bool v_first = options.state_v_first;
  const int64_t K = problem.sizes.head_dim_k, V = problem.sizes.head_dim_v;
  const float scale = static_cast<float>(problem.scale);
  const Head head = make_head(args.in, options, problem.sizes, sequence, item.value_head, scratch.bias);
  const int64_t ld = head.padded_k();
  const int64_t stride = item.panels * kPanel;
  const int64_t column = item.first_panel * kPanel;
  const int64_t width = std::min(stride, V - column);
  Block& block = scratch.block;

  if (args.in.initial_state.present()) {
    load_state(state_of(args.in.initial_state, v_first, K, V, sequence.index, item.value_head), item.first_panel,
               item.panels, ld, scratch.S);
  } else {
    std::memset(scratch.S, 0, static_cast<size_t>(item.panels * ld * kPanel) * sizeof(float));
  }

  for (int64_t t = 0; t < sequence.length; t += kBlock) {
    if (args.chunk_states.present() && t % options.chunk_size == 0) {
      const int64_t chunk = sequence.first_chunk + t / options.chunk_size;
      store_state(scratch.S,
                  chunk_state_of(args.chunk_states, v_first, K, V, sequence.batch, chunk, item.value_head),
                  item.first_panel, item.panels, ld);
    }
    const int64_t token = sequence.begin + t;
    const int64_t n = std::min(kBlock, sequence.length - t);
    load_block(head, token, n, block);
    load_rows(args.in.v, sequence.batch, token, item.value_head, n, column, width, scratch.v, stride);
    prefetch_block(head, token + kBlock);
    prefetch_rows(args.in.v, head, item.value_head, token + kBlock, column, width);
    prefetch_rows(args.o, head, item.value_head, token, column, width);
    if (n < kCrossoverTokens) {
      make_decayed_keys(gate, block, scratch.decayed);
      recurrent_tokens(gate, block, scratch.decayed, K, scale, {scratch.S, kPanel, ld * kPanel}, item.panels,
                       {scratch.v, nullptr, scratch.o, stride}, scratch.prediction);
    } else {
      prepare_block(gate, K, block);
      for (int64_t p = 0; p < item.panels; ++p) {
        float* S = scratch.S + p * ld * kPanel;
        read_panel(block, 2 * kBlock, S, scratch.X);
        solve_panel(block, scratch.X, scratch.v + p * kPanel, stride, scratch.R);
        output_panel(block, scale, scratch.X + kBlock * kPanel, scratch.R, scratch.o + p * kPanel, stride);
        write_panel(gate, block, S, scratch.R, S);
      }
    }
    store_rows(scratch.o, stride, args.o, sequence.batch, token, item.value_head, n, column, width);
  }

  if (args.final_state.present()) {
    store_state(scratch.S, state_of(args.final_state, v_first, K, V, sequence.index, item.value_head),
                item.first_panel, item.panels, ld);
  }
}

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const int64_t ld = round_up(sizes.head_dim_k, kRowMultiple);
  const int64_t panels = round_up(sizes.head_dim_v, kPanel) / kPanel;
  const std::vector<Sequence> sequences =
      sequence_table(sizes.batch, sizes.tokens, problem.args.in.cu_seqlens, problem.args.options.chunk_size);
  const int threads_wanted = num_threads(context);
  const std::vector<Item> items = column_items(sequences, sizes.num_value_heads, panels, threads_wanted);
  const int threads =
      useful_threads(threads_wanted, static_cast<int64_t>(items.size()),
                     3 * sizes.batch * sizes.tokens * sizes.num_value_heads * sizes.head_dim_k * sizes.head_dim_v);

  const Gate gate = problem.args.options.gate;
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

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {

HWY_EXPORT(forward);

void chunk_forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(forward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
