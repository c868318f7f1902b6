// The gate activations with their chunk-local sum, and the way back.
//
// An item of the backward is a run of chunks of at least kTokensPerSum tokens. It leaves the sums of its tokens'
// gradients of A_log and dt_bias, one per column and in fp64, in the workspace; a last loop adds these in order. The
// cut depends on the lengths of the sequences alone.
#include <vector>

#include "cpu/blocks/kernels.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/blocks/gate_activation.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/blocks/chunk-inl.h"
#include "cpu/gate-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {
namespace {

inline constexpr int64_t kTokensPerSum = 1024;
inline constexpr int64_t kElementsPerItem = 2048;  // of a token
inline constexpr int64_t kActivationCost = 32;     // multiply-adds that take as long

struct GateScratch {
  int64_t ld, heads;
  float* a = nullptr;     // [heads][ld] exp(A_log) of each column
  float* bias = nullptr;  // [heads][ld] dt_bias
  float* sum = nullptr;   // [heads][ld] of log decays, or of their gradients
  float* x = nullptr;     // [ld]
  float* dx = nullptr;    // [ld]

  void lay_out(ScratchLayout& layout) {
    for (float** rows : {&a, &bias, &sum}) *rows = layout.take<float>(heads * ld);
    for (float** row : {&x, &dx}) *row = layout.take<float>(ld);
  }
};

// The parameters of the columns of heads [first, end) (BlockProblem says what a column is).
HWY_INLINE void load_parameters(const GateActivationInputs& in, Gate gate, int64_t first, int64_t end,
                                const GateScratch& s) {
  const int64_t width = in.x.shape[3];
  for (int64_t h = first; h < end; ++h) {
    float *a = s.a + (h - first) * s.ld, *bias = s.bias + (h - first) * s.ld;
    for (int64_t d = 0; d < s.ld; ++d) {
      a[d] = 1;
      bias[d] = 0;
      if (d >= width) continue;
      if (gate == Gate::kPerChannel && d > 0) {
        a[d] = a[0];
      } else if (in.a_log.present()) {
        a[d] = std::exp(static_cast<float>(load_element(in.a_log, gate == Gate::kPerChannel ? h : d)));
      }
      if (in.dt_bias.present()) bias[d] = static_cast<float>(load_element(in.dt_bias, h * width + d));
    }
  }
}

// Runs of chunks with kTokensPerSum tokens or a few more: where they end in the table.
std::vector<size_t> ends_of_runs(const std::vector<Chunk>& chunks) {
  std::vector<size_t> ends;
  int64_t tokens = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    tokens += chunks[i].length;
    if (tokens < kTokensPerSum && i + 1 < chunks.size()) continue;
    ends.push_back(i + 1);
    tokens = 0;
  }
  return ends;
}

// Heads [first, end) of one chunk, from its last token to its first. The sums begin at the columns of head `first`.
HWY_INLINE void chunk_backward(const GateActivationBackward& args, const Chunk& chunk, int64_t first, int64_t end,
                               const GateScratch& s, double* da_log, double* ddt_bias) {
  const TensorView &x = args.in.x, &dg = args.dg, &dx = args.dx;
  const int64_t width = x.shape[3];
  const bool summed = args.options.chunk_size != 0, bounded = std::isfinite(args.options.lower_bound);
  const Vec bound = broadcast(bounded ? static_cast<float>(args.options.lower_bound) : 0.0f);
  std::memset(s.sum, 0, static_cast<size_t>(s.heads * s.ld) * sizeof(float));
  for (int64_t t = chunk.begin + chunk.length - 1; t >= chunk.begin; --t) {
    for (int64_t h = first; h < end; ++h) {
      const int64_t row = (h - first) * s.ld, column = (h - first) * width;
      load_row(row_of(x, chunk.batch, t, h), x.dtype, x.strides[3], width, s.x, s.ld);
      load_row(row_of(dg, chunk.batch, t, h), dg.dtype, dg.strides[3], width, s.dx, s.ld);
      for (int64_t d = 0; d < s.ld; d += kLanes) {
        Vec dy = load(s.dx + d);
        if (summed) {
          dy = hn::Add(load(s.sum + row + d), dy);
          store(dy, s.sum + row + d);
        }
        const Vec z = hn::Add(load(s.x + d), load(s.bias + row + d));
        const GateGradient gradient = log_decay_adjoint(z, load(s.a + row + d), bounded, bound, dy);
        store(gradient.x, s.dx + d);
        store(gradient.a_log, s.x + d);
      }
      for (int64_t d = 0; d < width; ++d) {
        da_log[column + d] += static_cast<double>(s.x[d]);
        ddt_bias[column + d] += static_cast<double>(s.dx[d]);
      }
      if (dx.present()) store_row(s.dx, row_of(dx, chunk.batch, t, h), dx.dtype, dx.strides[3], width);
    }
  }
}

// The sums of the runs, [runs][2][columns], to the caller.
void store_sums(const BlockProblem<GateActivationBackward>& problem, int64_t runs, int64_t columns,
                const double* sums) {
  const GateActivationBackward& args = problem.args;
  const auto total = [&](int64_t row, int64_t column) {
    double sum = 0;
    for (int64_t run = 0; run < runs; ++run) sum += sums[(2 * run + row) * columns + column];
    return sum;
  };
  const int64_t per_head = columns / problem.sizes.num_value_heads;
  for (int64_t h = 0; h < problem.sizes.num_value_heads && args.da_log.present(); ++h) {
    double sum = 0;
    for (int64_t d = h * per_head; d < (h + 1) * per_head; ++d) sum += total(0, d);
    store_element(args.da_log, h, sum);
  }
  for (int64_t d = 0; d < columns && args.ddt_bias.present(); ++d) store_element(args.ddt_bias, d, total(1, d));
}

}  // namespace

void gate_activation_forward(const BlockProblem<GateActivationForward>& problem, const Context& context) {
  const GateActivationForward& args = problem.args;
  const TensorView &x = args.in.x, &g = args.g;
  const int64_t width = x.shape[3];
  const HeadBlocks heads(x.shape[2], width, kElementsPerItem);
  const bool summed = args.options.chunk_size != 0, bounded = std::isfinite(args.options.lower_bound);
  const float bound = bounded ? static_cast<float>(args.options.lower_bound) : 0.0f;
  const auto chunks = chunks_of(problem);
  const int64_t cost = kActivationCost * problem.sizes.batch * problem.sizes.tokens * heads.heads * width;
  for_each_item(static_cast<int64_t>(chunks.size()) * heads.count(), cost, context, GateScratch{heads.ld, heads.size},
                [&](int64_t item, const GateScratch& s) HWY_ATTR {
                  const Chunk& chunk = chunks[static_cast<size_t>(item / heads.count())];
                  const int64_t block = item % heads.count(), first = heads.first(block), end = heads.end(block);
                  load_parameters(args.in, problem.sizes.gate, first, end, s);
                  std::memset(s.sum, 0, static_cast<size_t>(s.heads * s.ld) * sizeof(float));
                  for (int64_t t = chunk.begin; t < chunk.begin + chunk.length; ++t) {
                    for (int64_t h = first; h < end; ++h) {
                      const int64_t row = (h - first) * s.ld;
                      float* sum = s.sum + row;
                      load_row(row_of(x, chunk.batch, t, h), x.dtype, x.strides[3], width, s.x, s.ld);
                      for (int64_t d = 0; d < s.ld; d += kLanes) {
                        const Vec z = hn::Add(load(s.x + d), load(s.bias + row + d));
                        const Vec y = log_decay(z, load(s.a + row + d), bounded, broadcast(bound));
                        store(summed ? hn::Add(load(sum + d), y) : y, sum + d);
                      }
                      store_row(sum, row_of(g, chunk.batch, t, h), g.dtype, g.strides[3], width);
                    }
                  }
                });
}

void gate_activation_backward(const BlockProblem<GateActivationBackward>& problem, const Context& context) {
  const GateActivationBackward& args = problem.args;
  const int64_t width = args.in.x.shape[3];
  const HeadBlocks heads(args.in.x.shape[2], width, kElementsPerItem);
  const auto chunks = chunks_of(problem);
  const auto ends = ends_of_runs(chunks);
  const int64_t runs = static_cast<int64_t>(ends.size()), columns = heads.heads * width;
  const int64_t cost = 2 * kActivationCost * problem.sizes.batch * problem.sizes.tokens * columns;
  const Workspace workspace(context, static_cast<size_t>(2 * runs * columns) * sizeof(double));
  double* const sums = static_cast<double*>(workspace.data());
  for_each_item(runs * heads.count(), cost, context, GateScratch{heads.ld, heads.size},
                [&](int64_t item, const GateScratch& s) HWY_ATTR {
                  const int64_t run = item / heads.count(), block = item % heads.count();
                  const int64_t first = heads.first(block), end = heads.end(block);
                  double* const da_log = sums + 2 * run * columns + first * width;
                  double* const ddt_bias = da_log + columns;
                  std::fill_n(da_log, (end - first) * width, 0.0);
                  std::fill_n(ddt_bias, (end - first) * width, 0.0);
                  load_parameters(args.in, problem.sizes.gate, first, end, s);
                  const size_t last = ends[static_cast<size_t>(run)];
                  for (size_t i = run == 0 ? 0 : ends[static_cast<size_t>(run - 1)]; i < last; ++i) {
                    chunk_backward(args, chunks[i], first, end, s, da_log, ddt_bias);
                  }
                });
  store_sums(problem, runs, columns, sums);
}

}  // namespace blocks

void block_gate_activation_forward(const BlockProblem<GateActivationForward>& problem, const Context& context) {
  blocks::gate_activation_forward(problem, context);
}
void block_gate_activation_backward(const BlockProblem<GateActivationBackward>& problem, const Context& context) {
  blocks::gate_activation_backward(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(block_gate_activation_forward);
HWY_EXPORT(block_gate_activation_backward);

}  // namespace

void blocks::simd(const BlockProblem<GateActivationForward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_gate_activation_forward)(problem, context);
}
void blocks::simd(const BlockProblem<GateActivationBackward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_gate_activation_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
