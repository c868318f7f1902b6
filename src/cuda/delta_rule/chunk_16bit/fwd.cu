// Forward in the chunk form with 16-bit operands: what it takes, its scratch memory and its launches. The kernels:
// chunk_factors.cu, chunk_factors_channels.cu, chunk_fwd.cuh.
#include <algorithm>
#include <string>

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_16bit/stage.cuh"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda {
namespace {

// What a block of either kernel needs at least.
size_t shared_bytes(const DeltaRuleForwardProblem& problem) {
  const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
  const int width = padded_k(problem.sizes.head_dim_k);
  size_t bytes = per_channel ? chunk_factors_channels_bytes(width) : chunk_factors_bytes(width);
  with_padded_k<64, 128, 256>(width, [&]<int kK>() {
    bytes = std::max(bytes, per_channel ? scan_bytes<kK, true, 64>(1) : scan_bytes<kK, false, 64>(1));
  });
  return bytes;
}

struct Scratch {
  int64_t* first_chunk;
  ChunkFactors factors;
};

// The layout of the scratch memory of a call.
Scratch take_scratch(ScratchLayout& layout, const DeltaRuleForwardProblem& problem, int64_t num_chunks) {
  const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
  const int64_t items = num_chunks * problem.sizes.num_value_heads;
  const int width = padded_k(problem.sizes.head_dim_k);
  Scratch scratch;
  scratch.first_chunk =
      layout.take<int64_t>(problem.args.in.cu_seqlens.present() ? problem.sizes.num_sequences + 1 : 0);
  ChunkFactors& factors = scratch.factors;
  factors.total_width = per_channel ? width : 4;
  factors.T = layout.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.P = layout.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.token = layout.take<float>(per_channel ? 0 : items * kTokenFactors * kChunkRows);
  factors.total = layout.take<float>(items * factors.total_width);
  factors.keys = layout.take<uint16_t>(per_channel ? items * 3 * kChunkRows * width : 0);
  return scratch;
}

}  // namespace

std::string declines_chunk_forward_16(const DeltaRuleForwardProblem& problem) {
  const DeltaRuleInputs& in = problem.args.in;
  const DType dtype = in.q.dtype;
  if ((dtype != DType::kBF16 && dtype != DType::kF16) || problem.args.o.dtype != dtype) {
    return "q, k, v and o must have one 16-bit type";
  }
  if (in.beta.rank == 4) return "beta must be a number per token";
  return lacks_shared_memory(shared_bytes(problem), problem.args.in.q.device.index);
}

void chunk_forward_16(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleForward& forward = problem.args;
  const bool v_first = forward.options.state_v_first;
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vector_keys = has_vectors(forward.in.q) && has_vectors(forward.in.k);
  args.vector_values = has_vectors(forward.in.v);
  args.vector_outputs = has_vectors(forward.o);
  args.o = device_tensor(forward.o);
  args.initial_state = device_states(forward.in.initial_state, v_first);
  args.final_state = device_states(forward.final_state, v_first);
  args.chunk_states = device_states(forward.chunk_states, v_first);
  args.state_chunks = problem.sizes.num_chunks;
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = forward.options.chunk_size;
  args.num_chunks = max_chunks(args.problem.sequences, forward.options.chunk_size);

  ScratchLayout measure;
  take_scratch(measure, problem, args.num_chunks);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, args.num_chunks);
  args.factors = scratch.factors;
  if (forward.in.cu_seqlens.present()) {
    build_first_chunks(args.problem.sequences, forward.options.chunk_size, scratch.first_chunk, context);
    args.chunked.first_chunk = scratch.first_chunk;
  }

  const int width = padded_k(problem.sizes.head_dim_k);
  const bool per_channel = forward.options.gate == Gate::kPerChannel;
  if (args.num_chunks > 0) {
    per_channel ? launch_chunk_factors_channels(args, width, context) : launch_chunk_factors(args, width, context);
  }
  if (forward.in.k.dtype == DType::kBF16) {
    launch_scan<DType::kBF16>(args, width, per_channel, context);
  } else {
    launch_scan<DType::kF16>(args, width, per_channel, context);
  }
}

}  // namespace fastweight::cuda
