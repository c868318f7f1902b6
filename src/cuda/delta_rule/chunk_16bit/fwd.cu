// The entry chunk_16bit, forward in the chunk form with 16-bit operands: what it takes, how it cuts a problem, its scratch
// memory and its launches. The kernels: factors.cu, factors_per_channel.cu, scan.cuh.
#include <algorithm>
#include <string>

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_16bit/stage.cuh"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda::chunk_16bit {
namespace {

bool has_decay_per_channel(const DeltaRuleForwardProblem& problem) {
  return problem.args.options.gate == Gate::kPerChannel;
}

// Of a block of the scan.
size_t shared_bytes(const ScanConfig& config) {
  size_t bytes = 0;
  with_padded_k_and_gate(config.padded_k, config.per_channel, [&]<int kK, bool kPerChannel>() {
    bytes = config.columns() == 128  ? scan_bytes<kK, kPerChannel, 128>(config.stages)
            : config.columns() == 64 ? scan_bytes<kK, kPerChannel, 64>(config.stages)
                                     : scan_bytes<kK, kPerChannel, 32>(config.stages);
  });
  return bytes;
}

// What a block of either kernel needs at least.
size_t least_shared_bytes(const DeltaRuleForwardProblem& problem) {
  const bool per_channel = has_decay_per_channel(problem);
  const int width = padded_k(problem.sizes.head_dim_k);
  return std::max(per_channel ? factors_per_channel_bytes(width) : factors_bytes(width),
                  shared_bytes({.padded_k = width, .per_channel = per_channel, .tiles = 1, .pairs = 4, .stages = 1}));
}

ScanConfig config_of(const DeltaRuleForwardProblem& problem) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const int device = problem.args.in.q.device.index;
  return scan_config({sizes.num_sequences * sizes.num_value_heads, static_cast<int>(sizes.head_dim_k),
                      static_cast<int>(sizes.head_dim_v), has_decay_per_channel(problem)},
                     device_attribute(cudaDevAttrMultiProcessorCount, device),
                     static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
}

struct Scratch {
  int64_t* first_chunk;
  ChunkFactors factors;
};

// The layout of the scratch memory of a call.
Scratch take_scratch(ScratchLayout& layout, const DeltaRuleForwardProblem& problem, int64_t num_chunks) {
  const bool per_channel = has_decay_per_channel(problem);
  const int64_t items = num_chunks * problem.sizes.num_value_heads;
  const int width = padded_k(problem.sizes.head_dim_k);
  Scratch scratch;
  scratch.first_chunk =
      layout.take<int64_t>(problem.args.in.cu_seqlens.present() ? problem.sizes.num_sequences + 1 : 0);
  ChunkFactors& factors = scratch.factors;
  factors.total_width = per_channel ? width : 4;
  factors.Jb = layout.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.sP = layout.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.token = layout.take<float>(per_channel ? 0 : items * kTokenFactors * kChunkRows);
  factors.total = layout.take<float>(items * factors.total_width);
  factors.keys = layout.take<uint16_t>(per_channel ? items * kKeyCopies * kChunkRows * width : 0);
  return scratch;
}

}  // namespace

std::string ScanConfig::text() const {
  return "K " + std::to_string(padded_k) + ", columns " + std::to_string(columns()) + ", warps " +
         std::to_string(warps()) + ", stages " + std::to_string(stages);
}

// Wide warps share their operands best, narrow blocks fill the device when there are few heads.
ScanConfig scan_config(const ScanSizes& sizes, int multiprocessors, size_t shared_limit) {
  const auto blocks = [&](int columns) { return sizes.heads * ((sizes.head_dim_v + columns - 1) / columns); };
  ScanConfig config{.padded_k = padded_k(sizes.head_dim_k), .per_channel = sizes.per_channel};
  ScanConfig wide = config;
  wide.tiles = 2;
  if (config.padded_k <= 128 && sizes.head_dim_v > 64 && blocks(64) > multiprocessors &&
      shared_bytes(wide) <= shared_limit) {
    return wide;
  }
  if (sizes.head_dim_v <= 32 || blocks(32) <= multiprocessors) config.pairs = 2;
  if (shared_bytes(config) > shared_limit) config.stages = 1;
  return config;
}

std::string declines_forward(const DeltaRuleForwardProblem& problem) {
  const std::string reason = beyond_all_kernels(problem);
  if (!reason.empty()) return reason;
  const DeltaRuleInputs& in = problem.args.in;
  const DType dtype = in.q.dtype;
  if ((dtype != DType::kBF16 && dtype != DType::kF16) || problem.args.o.dtype != dtype) {
    return "q, k, v and o must have one 16-bit type";
  }
  if (in.beta.rank == 4) return "beta must be a number per token";
  return lacks_shared_memory(least_shared_bytes(problem), in.q.device.index);
}

std::string config_text(const DeltaRuleForwardProblem& problem) { return config_of(problem).text(); }

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleForward& call = problem.args;
  const bool v_first = call.options.state_v_first;
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vector_keys = has_vectors(call.in.q) && has_vectors(call.in.k);
  args.vector_values = has_vectors(call.in.v);
  args.vector_outputs = has_vectors(call.o);
  args.o = device_tensor(call.o);
  args.initial_state = device_states(call.in.initial_state, v_first);
  args.final_state = device_states(call.final_state, v_first);
  args.chunk_states = device_states(call.chunk_states, v_first);
  args.state_chunks = problem.sizes.num_chunks;
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = call.options.chunk_size;
  args.num_chunks = max_chunks(args.problem.sequences, call.options.chunk_size);

  ScratchLayout measure;
  take_scratch(measure, problem, args.num_chunks);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, args.num_chunks);
  args.factors = scratch.factors;
  if (call.in.cu_seqlens.present()) {
    build_first_chunks(args.problem.sequences, call.options.chunk_size, scratch.first_chunk, context);
    args.chunked.first_chunk = scratch.first_chunk;
  }

  const ScanConfig config = config_of(problem);
  if (args.num_chunks > 0) {
    config.per_channel ? launch_factors_per_channel(args, config.padded_k, context)
                       : launch_factors(args, config.padded_k, context);
  }
  if (call.in.k.dtype == DType::kBF16) {
    launch_scan<DType::kBF16>(args, config, context);
  } else {
    launch_scan<DType::kF16>(args, config, context);
  }
}

}  // namespace fastweight::cuda::chunk_16bit
