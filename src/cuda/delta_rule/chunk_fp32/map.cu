// The map of a segment with the accuracy of fp32: the scans of the forward and of the backward without what tokens get
// out of them, once from the given state and once, with V = K, from the identity (core/delta_rule_map_problem.h). The
// factors of the tiles know nothing of values and serve both.
#include <algorithm>
#include <string>

#include "core/delta_rule_map_problem.h"
#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_fp32/bwd.cuh"
#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/map.h"

namespace fastweight::cuda::chunk_fp32 {
namespace {

struct Scratch {
  int64_t* first_tile;
  TileFactors factors;
  float* zero;      // [1], a value of any type
  float* identity;  // [K, K]
};

template <class Problem>
Scratch take_scratch(ScratchLayout& layout, const Problem& problem, int64_t num_tiles) {
  const DeltaRuleSizes& sizes = problem.sizes;
  Scratch scratch;
  scratch.first_tile = layout.take<int64_t>(problem.args.in.cu_seqlens.present() ? sizes.num_sequences + 1 : 0);
  scratch.factors = take_factors(layout, num_tiles * sizes.num_value_heads, padded_k(sizes.head_dim_k),
                                 problem.args.options.gate == Gate::kPerChannel, false);
  scratch.zero = layout.take<float>(1);
  scratch.identity = layout.take<float>(sizes.head_dim_k * sizes.head_dim_k);
  return scratch;
}

// The sequences and factors of the problem's tiles.
template <class Inner>
TileArgs tiles_of_problem(const DeltaRuleProblem<Inner>& problem, const Scratch& scratch) {
  TileArgs args;
  args.problem = device_problem(problem);
  args.tiles.sequences = args.chunked.sequences = args.problem.sequences;
  args.tiles.chunk_size = kTileRows;
  if (problem.args.in.cu_seqlens.present()) args.tiles.first_chunk = scratch.first_tile;
  args.num_tiles = max_chunks(args.problem.sequences, kTileRows);
  args.factors = scratch.factors;
  return args;
}

template <class Problem>
ScanConfig config_of(const Problem& problem) {
  const DeltaRuleSizes& sizes = problem.sizes;
  return scan_config(sizes.num_sequences * sizes.num_value_heads, static_cast<int>(sizes.head_dim_k),
                     static_cast<int>(sizes.head_dim_v), problem.args.options.gate == Gate::kPerChannel,
                     device_attribute(cudaDevAttrMultiProcessorCount, problem.args.in.q.device.index));
}

// What the scans of both matrices share is made, and run(scratch) launches them.
template <class Problem, class Run>
void with_factors(const Problem& problem, const Context& context, const Run& run) {
  const Sequences sequences = device_problem(problem).sequences;
  const int64_t num_tiles = max_chunks(sequences, kTileRows);
  ScratchLayout measure;
  take_scratch(measure, problem, num_tiles);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, num_tiles);
  if (problem.args.in.cu_seqlens.present()) build_first_chunks(sequences, kTileRows, scratch.first_tile, context);
  const int64_t K = problem.sizes.head_dim_k;
  check_cuda(cudaMemsetAsync(scratch.zero, 0, sizeof(float), stream_of(context)), "cudaMemsetAsync");
  fill_identity(scratch.identity, K, context);
  if (num_tiles > 0) launch_factors(tiles_of_problem(problem, scratch), padded_k(K), context);
  run(scratch);
}

void scan(const DeltaRuleForwardProblem& inner, const Scratch& scratch, const Context& context) {
  const bool v_first = inner.args.options.state_v_first;
  TileArgs args = tiles_of_problem(inner, scratch);
  args.initial_state = device_states(inner.args.in.initial_state, v_first);
  args.final_state = device_states(inner.args.final_state, v_first);
  launch_scan(args, config_of(inner), context);
}

void scan_back(const DeltaRuleBackwardProblem& inner, const Scratch& scratch, const Context& context) {
  const bool v_first = inner.args.options.state_v_first;
  TileBackwardArgs args;
  args.tile = tiles_of_problem(inner, scratch);
  args.d_o = device_tensor(inner.args.d_o);
  args.d_final_state = device_states(inner.args.d_final_state, v_first);
  args.d_initial_state = device_states(inner.args.d_initial_state, v_first);
  launch_gradient_scan(args, config_of(inner), context);
}

template <class Problem>
std::string declines(const Problem& problem) {
  const std::string reason = beyond_all_kernels(problem);
  if (!reason.empty()) return reason;
  const int width = padded_k(problem.sizes.head_dim_k);
  const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
  return lacks_shared_memory(std::max(factors_bytes(width, per_channel), scan_bytes(width, per_channel)),
                             problem.args.in.q.device.index);
}

}  // namespace

std::string declines_map_forward(const DeltaRuleMapForwardProblem& problem) { return declines(problem); }
std::string declines_map_backward(const DeltaRuleMapBackwardProblem& problem) { return declines(problem); }

void map_forward(const DeltaRuleMapForwardProblem& problem, const Context& context) {
  with_factors(problem, context, [&](const Scratch& scratch) {
    if (problem.args.h.present()) {
      DeltaRuleForwardProblem inner = recurrence_of<DeltaRuleForward>(problem);
      inner.args.final_state = problem.args.h;
      scan(inner, scratch, context);
    }
    if (problem.args.m.present()) {
      DeltaRuleForwardProblem inner = square_recurrence_of<DeltaRuleForward>(problem, scratch.zero);
      inner.args.in.initial_state = broadcast_square(problem.sizes, scratch.identity, DType::kF32, context.device);
      inner.args.final_state = problem.args.m;
      scan(inner, scratch, context);
    }
  });
}

void map_backward(const DeltaRuleMapBackwardProblem& problem, const Context& context) {
  with_factors(problem, context, [&](const Scratch& scratch) {
    if (problem.args.e.present()) {
      DeltaRuleBackwardProblem inner = recurrence_of<DeltaRuleBackward>(problem);
      inner.args.d_o = problem.args.d_o;
      inner.args.d_final_state = problem.args.d_final_state;
      inner.args.d_initial_state = problem.args.e;
      scan_back(inner, scratch, context);
    }
    if (problem.args.mt.present()) {
      DeltaRuleBackwardProblem inner = square_recurrence_of<DeltaRuleBackward>(problem, scratch.zero);
      inner.args.d_final_state = broadcast_square(problem.sizes, scratch.identity, DType::kF32, context.device);
      inner.args.d_initial_state = problem.args.mt;
      scan_back(inner, scratch, context);
    }
  });
}

}  // namespace fastweight::cuda::chunk_fp32
