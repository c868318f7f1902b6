// Forward by mini-batches, and decoding.
//
//     X  = [k; q] h                                   one product
//     n  = inner gradients of X_k + c                 all at the mini-batch start state
//     o  = norm(scale X_q + c - M n),                 M_ij = eta_i (scale q_i . k_j + 1), j <= i
//     h' = h - eta_C k^T n,   c' = c - eta_C sum n
//
// The norms couple all columns, so an item is a whole head of a sequence.

#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/denormals.h"
#include "cpu/parallel.h"
#include "cpu/partition.h"
#include "cpu/simd/targets.h"
#include "cpu/ttt_linear/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/ttt_linear/chunk_fwd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/ttt_linear/mini_batch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace ttt {
namespace {

struct ForwardScratch {
  Head head;
  MiniBatch mb;
  float* h;    // [ld / kPanel][ld][kPanel]
  float* c;    // [ld]
  float* row;  // [ld]

  void lay_out(ScratchLayout& layout, const TttLinearForwardProblem& problem) {
    const int64_t ld = padded_width(problem.sizes.head_dim);
    head.lay_out(layout, ld);
    mb.lay_out(layout, problem.args.options.mini_batch, ld);
    h = layout.take<float>(ld * ld);
    c = layout.take<float>(ld);
    row = layout.take<float>(ld);
  }
};

void run_sequence(const TttLinearForwardProblem& problem, const Sequence& sequence, int64_t h,
                  ForwardScratch& scratch) {
  const TttLinearForward& args = problem.args;
  Head& head = scratch.head;
  MiniBatch& mb = scratch.mb;
  head.open(problem, sequence, h);
  load_matrix(args.in.initial_state, sequence.index, head, scratch.h);
  load_bias(args.in.initial_state_bias, sequence.index, head, scratch.c);
  for (int64_t t = 0; t < sequence.length; t += head.C) {
    const int64_t token = sequence.begin + t;
    load_mini_batch(head, token, std::min(head.C, sequence.length - t), mb);
    mb.prefetcher.clear();
    head.prefetch(args.o, token, mb.prefetcher);
    head.prefetch(token + head.C, mb.prefetcher);
    read_matrix(mb, 2 * mb.rows, scratch.h, mb.z);
    inner_gradients(head, scratch.c, mb.rows, mb);
    make_moves(head, mb);
    read_outputs(head, scratch.c, mb);
    for (int64_t i = 0; i < mb.tokens; ++i) outer_norm(head, mb.out() + i * mb.ld, scratch.row);
    store_rows(mb.out(), mb.ld, args.o, sequence.batch, token, h, mb.tokens, 0, head.D);
    advance_state(mb, scratch.h, scratch.c, scratch.h, scratch.c);
  }
  store_matrix(scratch.h, args.final_state, sequence.index, head);
  store_bias(scratch.c, args.final_state_bias, sequence.index, head);
}

struct StepScratch {
  static constexpr int64_t kRows = 4;  // of the products; one is the token

  Head head;
  MiniBatch mb;
  float* h;      // [ld / kPanel][ld][kPanel]
  float* sum;    // like h: sum of k_j^T n_j
  float* c;      // [ld]
  float* sum_n;  // [ld]
  float* q_sum;  // [8][ld]: k and q times sum
  float* row;    // [ld]

  void lay_out(ScratchLayout& layout, const TttLinearStepProblem& problem) {
    const int64_t ld = padded_width(problem.sizes.head_dim);
    head.lay_out(layout, ld);
    mb.lay_out(layout, kRows, ld);
    h = layout.take<float>(ld * ld);
    sum = layout.take<float>(ld * ld);
    c = layout.take<float>(ld);
    sum_n = layout.take<float>(ld);
    q_sum = layout.take<float>(2 * kRows * ld);
    row = layout.take<float>(ld);
  }
};

// sum += k^T n and sum_n += n, in the order and with the rounding of advance_state.
HWY_INLINE void add_token(StepScratch& s) {
  const MiniBatch& mb = s.mb;
  for (int64_t p = 0; p < mb.ld; p += kPanel) {
    const Vec n0 = load(mb.n + p), n1 = load(mb.n + p + kLanes);
    float* row = s.sum + p * mb.ld;
    for (int64_t d = 0; d < mb.ld; ++d, row += kPanel) {
      const Vec k = broadcast(mb.k[d]);
      store(fma(k, n0, load(row)), row);
      store(fma(k, n1, load(row + kLanes)), row + kLanes);
    }
  }
  for (int64_t d = 0; d < mb.ld; d += kLanes) store(hn::Add(load(s.sum_n + d), load(mb.n + d)), s.sum_n + d);
}

// h -= eta sum, c -= eta sum_n, and the sums begin anew.
HWY_INLINE void close_mini_batch(StepScratch& s) {
  const Vec eta = broadcast(s.mb.last_eta());
  const int64_t size = s.mb.ld * s.mb.ld;
  for (int64_t i = 0; i < size; i += kLanes) store(fnma(eta, load(s.sum + i), load(s.h + i)), s.h + i);
  for (int64_t d = 0; d < s.mb.ld; d += kLanes) store(fnma(eta, load(s.sum_n + d), load(s.c + d)), s.c + d);
  std::memset(s.sum, 0, static_cast<size_t>(size) * sizeof(float));
  std::memset(s.sum_n, 0, static_cast<size_t>(s.mb.ld) * sizeof(float));
}

void run_steps(const TttLinearStepProblem& problem, const Sequence& sequence, int64_t h, StepScratch& s) {
  const TttLinearStep& args = problem.args;
  Head& head = s.head;
  MiniBatch& mb = s.mb;
  head.open(problem, sequence, h);
  int64_t slot = sequence.index;
  if (args.state_indices.present()) {
    slot = load_integer(args.state_indices.data, args.state_indices.dtype, slot * args.state_indices.strides[0]);
  }
  if (slot < 0) {
    std::memset(s.row, 0, static_cast<size_t>(mb.ld) * sizeof(float));
    for (int64_t t = 0; t < sequence.length; ++t) {
      store_rows(s.row, mb.ld, args.o, sequence.batch, sequence.begin + t, h, 1, 0, head.D);
    }
    return;
  }
  int64_t position = load_integer(args.position.data, args.position.dtype, slot * args.position.strides[0]);
  load_matrix(args.state, slot, head, s.h);
  load_matrix(args.gradient, slot, head, s.sum);
  load_bias(args.state_bias, slot, head, s.c);
  load_bias(args.gradient_bias, slot, head, s.sum_n);
  for (int64_t t = 0; t < sequence.length; ++t) {
    const int64_t token = sequence.begin + t;
    load_mini_batch(head, token, 1, mb);
    read_matrix(mb, 2 * mb.rows, s.h, mb.z);
    inner_gradients(head, s.c, 1, mb);
    add_token(s);
    read_matrix(mb, 2 * mb.rows, s.sum, s.q_sum);
    const Vec scale = broadcast(head.scale), eta = broadcast(mb.eta[0]);
    float* y = mb.out();
    for (int64_t d = 0; d < mb.ld; d += kLanes) {
      const Vec moved = fnma(eta, load(s.q_sum + mb.rows * mb.ld + d), load(y + d));
      store(fma(scale, moved, fnma(eta, load(s.sum_n + d), load(s.c + d))), y + d);
    }
    outer_norm(head, y, s.row);
    store_rows(y, mb.ld, args.o, sequence.batch, token, h, 1, 0, head.D);
    if (++position == head.C) {
      close_mini_batch(s);
      position = 0;
    }
  }
  store_matrix(s.h, args.state, slot, head);
  store_matrix(s.sum, args.gradient, slot, head);
  store_bias(s.c, args.state_bias, slot, head);
  store_bias(s.sum_n, args.gradient_bias, slot, head);
}

// The heads of a sequence share one count, so it is written when all of them are done.
void advance_positions(const TttLinearStepProblem& problem) {
  const TttLinearStep& args = problem.args;
  for (const Sequence& sequence : problem.sequences) {
    int64_t slot = sequence.index;
    if (args.state_indices.present()) {
      slot = load_integer(args.state_indices.data, args.state_indices.dtype, slot * args.state_indices.strides[0]);
    }
    if (slot < 0) continue;
    const int64_t offset = slot * args.position.strides[0];
    const int64_t position = load_integer(args.position.data, args.position.dtype, offset) + sequence.length;
    store_double(args.position.data, args.position.dtype, offset,
                 static_cast<double>(position % args.options.mini_batch));
  }
}

// run(problem, sequence, head, scratch) for every head of every sequence, longest sequences first.
template <class Scratch, class Problem, class Run>
HWY_INLINE void run_heads(const Problem& problem, const Context& context, Run run) {
  const TttLinearSizes& sizes = problem.sizes;
  const std::vector<int64_t> order = longest_first(problem.sequences);
  const int64_t items = static_cast<int64_t>(order.size()) * sizes.num_heads;
  const int threads = useful_threads(
      num_threads(context), items, 3 * sizes.batch * sizes.tokens * sizes.num_heads * sizes.head_dim * sizes.head_dim);
  ScratchLayout measure;
  Scratch().lay_out(measure, problem);
  const Workspace workspace(context, measure.bytes() * static_cast<size_t>(threads));
  const FlushDenormals flush;
  parallel_for(items, threads, [&](int64_t i, int thread) HWY_ATTR {
    ScratchLayout layout(static_cast<char*>(workspace.data()) + measure.bytes() * static_cast<size_t>(thread));
    Scratch scratch;
    scratch.lay_out(layout, problem);
    const int64_t sequence = order[static_cast<size_t>(i / sizes.num_heads)];
    run(problem, problem.sequences[static_cast<size_t>(sequence)], i % sizes.num_heads, scratch);
  });
}

void forward(const TttLinearForwardProblem& problem, const Context& context) {
  run_heads<ForwardScratch>(problem, context, run_sequence);
}

void step(const TttLinearStepProblem& problem, const Context& context) {
  run_heads<StepScratch>(problem, context, run_steps);
  advance_positions(problem);
}

}  // namespace
}  // namespace ttt

void ttt_forward(const TttLinearForwardProblem& problem, const Context& context) { ttt::forward(problem, context); }
void ttt_step(const TttLinearStepProblem& problem, const Context& context) { ttt::step(problem, context); }

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(ttt_forward);
HWY_EXPORT(ttt_step);

}  // namespace

void ttt::chunk_forward(const TttLinearForwardProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(ttt_forward)(problem, context);
}

void ttt::chunk_step(const TttLinearStepProblem& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(ttt_step)(problem, context);
}

}  // namespace fastweight::cpu
#endif
