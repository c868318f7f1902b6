// The entry chunk_fp32, forward in the chunk form with the accuracy of fp32: what it takes, how it cuts a problem, its
// scratch memory and its launches. The kernels: factors.cu, scan.cu.
#include <algorithm>
#include <string>

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_fp32/chunk.cuh"
#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/scan_part.cuh"

namespace fastweight::cuda::chunk_fp32 {
namespace {

bool has_decay_per_channel(const DeltaRuleForwardProblem& problem) {
  return problem.args.options.gate == Gate::kPerChannel;
}

ScanConfig config_of(const DeltaRuleForwardProblem& problem) {
  const DeltaRuleSizes& sizes = problem.sizes;
  return scan_config(sizes.num_sequences * sizes.num_value_heads, static_cast<int>(sizes.head_dim_k),
                     static_cast<int>(sizes.head_dim_v), has_decay_per_channel(problem),
                     device_attribute(cudaDevAttrMultiProcessorCount, problem.args.in.q.device.index));
}

struct Scratch {
  int64_t *first_tile, *first_chunk;
  TileFactors factors;
};

// The layout of the scratch memory of a call.
Scratch take_scratch(ScratchLayout& layout, const DeltaRuleForwardProblem& problem, int64_t num_tiles) {
  const bool per_channel = has_decay_per_channel(problem);
  const int64_t items = num_tiles * problem.sizes.num_value_heads;
  const int64_t starts = problem.args.in.cu_seqlens.present() ? problem.sizes.num_sequences + 1 : 0;
  const int width = padded_k(problem.sizes.head_dim_k);
  Scratch scratch;
  scratch.first_tile = layout.take<int64_t>(starts);
  scratch.first_chunk = layout.take<int64_t>(problem.args.chunk_states.present() ? starts : 0);
  scratch.factors = take_factors(layout, items, width, per_channel, false);
  return scratch;
}

}  // namespace

std::string ScanConfig::text() const {
  return "K " + std::to_string(padded_k) + ", columns " + std::to_string(columns()) + ", warps " +
         std::to_string(warps) + ", stages 2";
}

// As many warps as share their operands, or half of them where the busiest multiprocessor then has less.
ScanConfig scan_config(int64_t heads, int head_dim_k, int head_dim_v, bool per_channel, int multiprocessors) {
  const auto warps_of_busiest = [&](int warps) {
    const int64_t columns = warps * kTileColumns, blocks = heads * ((head_dim_v + columns - 1) / columns);
    return (blocks + multiprocessors - 1) / multiprocessors * warps;
  };
  const int warps = warps_of_busiest(kMostWarps / 2) < warps_of_busiest(kMostWarps) ? kMostWarps / 2 : kMostWarps;
  return {padded_k(head_dim_k), per_channel, warps};
}

std::string declines_forward(const DeltaRuleForwardProblem& problem) {
  const std::string reason = beyond_all_kernels(problem);
  if (!reason.empty()) return reason;
  const int width = padded_k(problem.sizes.head_dim_k);
  const bool per_channel = has_decay_per_channel(problem);
  return lacks_shared_memory(std::max(factors_bytes(width, per_channel), scan_bytes(width, per_channel)),
                             problem.args.in.q.device.index);
}

std::string config_text(const DeltaRuleForwardProblem& problem, const Context&) { return config_of(problem).text(); }

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleForward& call = problem.args;
  const bool v_first = call.options.state_v_first;
  TileArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(call.o);
  args.initial_state = device_states(call.in.initial_state, v_first);
  args.final_state = device_states(call.final_state, v_first);
  args.chunk_states = device_states(call.chunk_states, v_first);
  args.state_chunks = problem.sizes.num_chunks;
  args.tiles.sequences = args.chunked.sequences = args.problem.sequences;
  args.tiles.chunk_size = kTileRows;
  args.chunked.chunk_size = call.options.chunk_size;
  args.num_tiles = max_chunks(args.problem.sequences, kTileRows);

  ScratchLayout measure;
  take_scratch(measure, problem, args.num_tiles);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, args.num_tiles);
  args.factors = scratch.factors;
  if (call.in.cu_seqlens.present()) {
    build_first_chunks(args.problem.sequences, kTileRows, scratch.first_tile, context);
    args.tiles.first_chunk = scratch.first_tile;
    if (call.chunk_states.present()) {
      build_first_chunks(args.problem.sequences, args.chunked.chunk_size, scratch.first_chunk, context);
      args.chunked.first_chunk = scratch.first_chunk;
    }
  }

  const ScanConfig config = config_of(problem);
  if (args.num_tiles > 0) launch_factors(args, config.padded_k, context);
  launch_scan(args, config, context);
}

}  // namespace fastweight::cuda::chunk_fp32
