// The entry chunk_fp32, backward in the chunk form with the accuracy of fp32: what it takes, its scratch memory and its
// launches. The kernels: factors.cu, bwd_states.cu, bwd_scan.cu, bwd_gradients.cu; bwd.cuh has the equations.
//
// The gradients of a tile need the state before it and the gradient of the state after it. Where those of all tiles
// would take more than kSegmentBytes, the tiles go in segments of a sequence, the last segments of all sequences first:
// a scan keeps the states before the segments, and each segment's states are made again from there. States are fp32 on
// the way, so that the cut into segments does not show in the results.
#include "cuda/delta_rule/chunk_fp32/bwd.cuh"

#include <algorithm>
#include <string>

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/scan_part.cuh"

namespace fastweight::cuda::chunk_fp32 {
namespace {

constexpr int64_t kSegmentBytes = int64_t{1} << 29;
constexpr int64_t kLeastSegment = 64;  // tiles
constexpr int64_t kSegmentStep = 4;    // tiles: the largest chunk

bool has_decay_per_channel(const DeltaRuleBackwardProblem& problem) {
  return problem.args.options.gate == Gate::kPerChannel;
}

ScanConfig config_of(const DeltaRuleBackwardProblem& problem) {
  const DeltaRuleSizes& sizes = problem.sizes;
  return scan_config(sizes.num_sequences * sizes.num_value_heads, static_cast<int>(sizes.head_dim_k),
                     static_cast<int>(sizes.head_dim_v), has_decay_per_channel(problem),
                     device_attribute(cudaDevAttrMultiProcessorCount, problem.args.in.q.device.index));
}

int64_t even_width(int64_t V) { return (V + 1) / 2 * 2; }

// The floats of a state in scratch memory, for all value heads.
int64_t state_size(const DeltaRuleSizes& sizes) {
  return sizes.num_value_heads * sizes.head_dim_k * even_width(sizes.head_dim_v);
}

// [.., HV] K-first matrices; `inner` along the axis before the heads.
DeviceStates scratch_states(float* data, const DeltaRuleSizes& sizes, int64_t inner, bool has_outer) {
  DeviceStates states;
  states.data = data;
  states.v_stride = 1;
  states.k_stride = even_width(sizes.head_dim_v);
  int64_t* strides = states.outer_strides;
  strides[has_outer ? 2 : 1] = sizes.head_dim_k * states.k_stride;
  strides[has_outer ? 1 : 0] = state_size(sizes);
  if (has_outer) strides[0] = inner * state_size(sizes);
  return states;
}

// The segment that is computed last, or all tiles.
Segment first_segment(const DeltaRuleSizes& sizes, int64_t num_tiles) {
  const int64_t bytes = 2 * state_size(sizes) * static_cast<int64_t>(sizeof(float));
  const int64_t sequences = std::max<int64_t>(sizes.num_sequences, 1);
  const int64_t count = std::max(kSegmentBytes / bytes / sequences, kLeastSegment) / kSegmentStep * kSegmentStep;
  Segment segment;
  segment.whole = count * sequences >= num_tiles;
  segment.count = segment.whole ? 0 : count;
  return segment;
}

struct Scratch {
  int64_t *first_tile, *first_run;
  TileFactors factors;
  float *R, *Y, *S, *G;
  float *run_starts, *carry;
  double* sums;
};

// How many runs of tiles there are along the run axis of a batch row.
int64_t num_runs(const DeltaRuleBackwardProblem& problem, int64_t tokens) {
  const DeltaRuleSizes& sizes = problem.sizes;
  if (!problem.args.in.cu_seqlens.present()) return chunks_of(sizes.tokens, tokens);
  return max_chunks(device_sequences(problem.args.in.cu_seqlens, sizes.num_sequences, sizes.tokens), tokens);
}

// The layout of the scratch memory of a call.
Scratch take_scratch(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem, const TileBackwardArgs& args) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const bool packed = problem.args.in.cu_seqlens.present(), given = problem.args.chunk_states.present();
  const Segment& segment = args.segment;
  const int64_t starts = packed ? sizes.num_sequences + 1 : 0;
  const int64_t rows = sizes.batch * sizes.tokens * sizes.num_value_heads * sizes.head_dim_v;
  const int64_t slots = segment.whole ? args.tile.num_tiles : sizes.num_sequences * segment.count;
  const int64_t runs = segment.whole || given ? 0 : sizes.batch * args.tile.state_chunks;
  Scratch scratch;
  scratch.first_tile = layout.take<int64_t>(starts);
  scratch.first_run = layout.take<int64_t>(args.tile.chunked.chunk_size > 0 ? starts : 0);
  scratch.factors = take_factors(layout, args.tile.num_tiles * sizes.num_value_heads, padded_k(sizes.head_dim_k),
                                 has_decay_per_channel(problem), problem.args.options.gate == Gate::kPerHead);
  scratch.R = layout.take<float>(rows);
  scratch.Y = layout.take<float>(rows);
  scratch.S = layout.take<float>(slots * state_size(sizes));
  scratch.G = layout.take<float>(slots * state_size(sizes));
  scratch.run_starts = layout.take<float>(runs * state_size(sizes));
  scratch.carry = layout.take<float>(segment.whole ? 0 : sizes.num_sequences * state_size(sizes));
  scratch.sums = layout.take<double>(args.sums.count());
  return scratch;
}

// All but what is in scratch memory.
TileBackwardArgs args_of(const DeltaRuleBackwardProblem& problem) {
  const DeltaRuleBackward& call = problem.args;
  const bool v_first = call.options.state_v_first;
  TileBackwardArgs args;
  TileArgs& tile = args.tile;
  tile.problem = device_problem(problem);
  tile.initial_state = device_states(call.in.initial_state, v_first);
  tile.chunk_states = device_states(call.chunk_states, v_first);
  tile.tiles.sequences = tile.chunked.sequences = tile.problem.sequences;
  tile.tiles.chunk_size = kTileRows;
  tile.num_tiles = max_chunks(tile.problem.sequences, kTileRows);
  args.segment = first_segment(problem.sizes, tile.num_tiles);
  tile.chunked.chunk_size = call.chunk_states.present() ? call.options.chunk_size : args.segment.count * kTileRows;
  tile.state_chunks = call.chunk_states.present() ? problem.sizes.num_chunks
                      : args.segment.whole        ? 0
                                                  : num_runs(problem, tile.chunked.chunk_size);
  args.d_o = device_tensor(call.d_o);
  args.dq = device_tensor(call.dq);
  args.dk = device_tensor(call.dk);
  args.dv = device_tensor(call.dv);
  args.dg = device_tensor(call.dg);
  args.dbeta = device_tensor(call.dbeta);
  args.sums.chunked = tile.tiles;
  args.sums.num_value_heads = problem.sizes.num_value_heads;
  args.sums.bias_width = has_decay_per_channel(problem) ? problem.sizes.head_dim_k : 1;
  args.sums.da_log = device_tensor(call.da_log);
  args.sums.ddt_bias = device_tensor(call.ddt_bias);
  return args;
}

// [B, T, HV, V] fp32
DeviceTensor scratch_values(float* data, const DeltaRuleSizes& sizes) {
  TensorView view = TensorView::dense(data, {sizes.batch, sizes.tokens, sizes.num_value_heads, sizes.head_dim_v});
  return device_tensor(view);
}

void place(const DeltaRuleBackwardProblem& problem, const Scratch& scratch, TileBackwardArgs& args) {
  const DeltaRuleSizes& sizes = problem.sizes;
  TileArgs& tile = args.tile;
  tile.factors = scratch.factors;
  args.R = scratch_values(scratch.R, sizes);
  args.Y = scratch_values(scratch.Y, sizes);
  args.S = scratch_states(scratch.S, sizes, 0, false);
  args.G = scratch_states(scratch.G, sizes, 0, false);
  args.sums.parts = scratch.sums;
  if (!args.segment.whole && !tile.chunk_states.present()) {
    tile.chunk_states = scratch_states(scratch.run_starts, sizes, tile.state_chunks, true);
  }
}

// From the last segment to the first, with the gradient of the state between them in scratch memory.
void run_segments(const DeltaRuleBackwardProblem& problem, float* carry, TileBackwardArgs& args,
                  const ScanConfig& config, const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  const DeviceStates between = scratch_states(carry, problem.sizes, 0, false);
  const DeviceStates d_final_state = device_states(call.d_final_state, call.options.state_v_first);
  const DeviceStates d_initial_state = device_states(call.d_initial_state, call.options.state_v_first);
  const int64_t tiles = chunks_of(problem.sizes.tokens, kTileRows);
  const int64_t segments = args.segment.whole ? 1 : chunks_of(tiles, args.segment.count);
  for (int64_t i = segments - 1; i >= 0; --i) {
    args.segment.first = i * args.segment.count;
    args.end_gradient = i == segments - 1 ? d_final_state : between;
    args.start_gradient = i == 0 ? d_initial_state : between;
    launch_states(args, config, context);
    launch_gradient_scan(args, config, context);
    launch_gradients(args, config.padded_k, context);
  }
}

}  // namespace

std::string declines_backward(const DeltaRuleBackwardProblem& problem) {
  const std::string reason = beyond_all_kernels(problem);
  if (!reason.empty()) return reason;
  if (problem.args.in.beta.rank == 4) return "beta must be a number per token";
  const int width = padded_k(problem.sizes.head_dim_k);
  const bool per_channel = has_decay_per_channel(problem);
  const size_t bytes = std::max(
      {factors_bytes(width, per_channel), scan_bytes(width, per_channel), gradients_bytes(width, per_channel)});
  return lacks_shared_memory(bytes, problem.args.in.q.device.index);
}

std::string config_text(const DeltaRuleBackwardProblem& problem) { return config_of(problem).text(); }

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  TileBackwardArgs args = args_of(problem);
  ScratchLayout measure;
  take_scratch(measure, problem, args);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, args);
  const bool given = args.tile.chunk_states.present();
  place(problem, scratch, args);
  TileArgs& tile = args.tile;
  if (problem.args.in.cu_seqlens.present()) {
    build_first_chunks(tile.problem.sequences, kTileRows, scratch.first_tile, context);
    tile.tiles.first_chunk = args.sums.chunked.first_chunk = scratch.first_tile;
    if (tile.chunk_states.present()) {
      build_first_chunks(tile.problem.sequences, tile.chunked.chunk_size, scratch.first_run, context);
      tile.chunked.first_chunk = scratch.first_run;
    }
  }

  const ScanConfig config = config_of(problem);
  if (tile.num_tiles > 0) launch_factors(tile, config.padded_k, context);
  if (!args.segment.whole && !given) launch_run_starts(args, config, context);
  run_segments(problem, scratch.carry, args, config, context);
  add_parameter_sums(args.sums, context);
}

}  // namespace fastweight::cuda::chunk_fp32
