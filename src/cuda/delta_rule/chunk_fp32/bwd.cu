// The entry chunk_fp32, backward in the chunk form with the accuracy of fp32: what it takes, its scratch memory and its
// launches. The kernels: factors.cu, bwd_states.cu, bwd_scan.cu, bwd_gradients.cu; bwd.cuh has the equations.
//
// The gradients of a tile need the state before it and the gradient of the state after it. Where those of all tiles
// would take more than kSegmentBytes, the tiles go in segments, the last one first: a scan keeps the states before the
// segments, and each segment's states are made again from there. States are fp32 on the way, so that the cut into
// segments does not show in the results.
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

constexpr int64_t kSegmentBytes = int64_t{1} << 30;
constexpr int64_t kLeastSlice = 4;  // tiles, and slices are multiples of it: the largest chunk

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

// [slots, HV] K-first matrices
DeviceStates scratch_states(float* data, const DeltaRuleSizes& sizes) {
  DeviceStates states;
  states.data = data;
  states.v_stride = 1;
  states.k_stride = even_width(sizes.head_dim_v);
  states.outer_strides[1] = sizes.head_dim_k * states.k_stride;
  states.outer_strides[0] = state_size(sizes);
  return states;
}

// The first segment of a problem.
Segment first_segment(const DeltaRuleBackwardProblem& problem, int64_t num_tiles) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const int64_t fitting = kSegmentBytes / (2 * state_size(sizes) * static_cast<int64_t>(sizeof(float)));
  Segment segment;
  if (num_tiles <= fitting) return segment;
  if (problem.args.in.cu_seqlens.present()) {
    segment.kind = Segment::kRange;
    segment.count = std::max<int64_t>(fitting, 1);
    return segment;
  }
  const int64_t tiles = chunks_of(sizes.tokens, kTileRows);
  const int64_t count = std::max(fitting / sizes.num_sequences / kLeastSlice, int64_t{1}) * kLeastSlice;
  if (count >= tiles) return segment;
  segment.kind = Segment::kSlice;
  segment.count = count;
  segment.slices = chunks_of(tiles, count);
  return segment;
}

int64_t num_segments(const TileBackwardArgs& args) {
  const Segment& segment = args.segment;
  return segment.kind == Segment::kRange ? chunks_of(args.tile.num_tiles, segment.count) : segment.slices;
}

struct Scratch {
  int64_t *first_tile, *first_chunk;
  TileFactors factors;
  float *R, *Y, *S, *G;
  float *starts, *carry[2];
  double* sums;
};

// The layout of the scratch memory of a call.
Scratch take_scratch(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem, const TileBackwardArgs& args) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const Segment& segment = args.segment;
  const bool whole = segment.kind == Segment::kWhole, slice = segment.kind == Segment::kSlice;
  const int64_t sequences = problem.args.in.cu_seqlens.present() ? sizes.num_sequences + 1 : 0;
  const int64_t rows = sizes.batch * sizes.tokens * sizes.num_value_heads * sizes.head_dim_v;
  const int64_t slots = whole ? args.tile.num_tiles : slice ? sizes.num_sequences * segment.count : segment.count;
  const int64_t starts = slice ? sizes.num_sequences * segment.slices : num_segments(args);
  const auto take_states = [&](int64_t count) { return layout.take<float>(count * state_size(sizes)); };
  Scratch scratch;
  scratch.first_tile = layout.take<int64_t>(sequences);
  scratch.first_chunk = layout.take<int64_t>(args.tile.chunk_states.present() ? sequences : 0);
  scratch.factors = take_factors(layout, args.tile.num_tiles * sizes.num_value_heads, padded_k(sizes.head_dim_k),
                                 has_decay_per_channel(problem), problem.args.options.gate == Gate::kPerHead);
  scratch.R = layout.take<float>(rows);
  scratch.Y = layout.take<float>(rows);
  scratch.S = take_states(slots);
  scratch.G = take_states(slots);
  scratch.starts = take_states(whole || args.tile.chunk_states.present() ? 0 : starts);
  // In a range the sequence that reads one may be another than the one that writes.
  scratch.carry[0] = take_states(whole ? 0 : slice ? sizes.num_sequences : 1);
  scratch.carry[1] = slice ? scratch.carry[0] : take_states(whole ? 0 : 1);
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
  tile.tiles.sequences = tile.chunked.sequences = tile.problem.sequences;
  tile.tiles.chunk_size = kTileRows;
  tile.num_tiles = max_chunks(tile.problem.sequences, kTileRows);
  args.segment = first_segment(problem, tile.num_tiles);
  tile.chunked.chunk_size = call.options.chunk_size;
  // A range of packed sequences may begin within a chunk.
  if (args.segment.kind != Segment::kRange) tile.chunk_states = device_states(call.chunk_states, v_first);
  tile.state_chunks = problem.sizes.num_chunks;
  args.d_o = device_tensor(call.d_o);
  args.d_final_state = device_states(call.d_final_state, v_first);
  args.d_initial_state = device_states(call.d_initial_state, v_first);
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

void place(const DeltaRuleSizes& sizes, const Scratch& scratch, TileBackwardArgs& args) {
  args.tile.factors = scratch.factors;
  args.R = scratch_values(scratch.R, sizes);
  args.Y = scratch_values(scratch.Y, sizes);
  args.S = scratch_states(scratch.S, sizes);
  args.G = scratch_states(scratch.G, sizes);
  args.starts = scratch_states(scratch.starts, sizes);
  args.sums.parts = scratch.sums;
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

std::string config_text(const DeltaRuleBackwardProblem& problem, const Context&) { return config_of(problem).text(); }

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  TileBackwardArgs args = args_of(problem);
  ScratchLayout measure;
  take_scratch(measure, problem, args);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, args);
  place(problem.sizes, scratch, args);
  TileArgs& tile = args.tile;
  const bool given = tile.chunk_states.present();
  if (problem.args.in.cu_seqlens.present()) {
    build_first_chunks(tile.problem.sequences, kTileRows, scratch.first_tile, context);
    tile.tiles.first_chunk = args.sums.chunked.first_chunk = scratch.first_tile;
    if (given) build_first_chunks(tile.problem.sequences, tile.chunked.chunk_size, scratch.first_chunk, context);
    if (given) tile.chunked.first_chunk = scratch.first_chunk;
  }

  const ScanConfig config = config_of(problem);
  if (tile.num_tiles > 0) launch_factors(tile, config.padded_k, context);
  if (args.segment.kind != Segment::kWhole && !given) launch_starts(args, config, context);
  for (int64_t i = num_segments(args) - 1; i >= 0; --i) {
    args.segment.first = i * args.segment.count;
    args.carry_in = scratch_states(scratch.carry[(i + 1) % 2], problem.sizes);
    args.carry_out = scratch_states(scratch.carry[i % 2], problem.sizes);
    launch_states(args, config, context);
    launch_gradient_scan(args, config, context);
    launch_gradients(args, config.padded_k, context);
  }
  add_parameter_sums(args.sums, context);
}

}  // namespace fastweight::cuda::chunk_fp32
