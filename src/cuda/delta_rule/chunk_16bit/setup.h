// What the forward and the backward of chunk_16bit do alike on the host: scratch memory, the arguments of the kernels and
// the launches of the factors and of the scan over the states.
#pragma once

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/chunk.cuh"

namespace fastweight::cuda::chunk_16bit {

template <class Problem>
bool has_decay_per_channel(const Problem& problem) {
  return problem.args.options.gate == Gate::kPerChannel;
}

template <class Problem>
ScanSizes scan_sizes(const Problem& problem) {
  const DeltaRuleSizes& sizes = problem.sizes;
  return {sizes.num_sequences * sizes.num_value_heads, static_cast<int>(sizes.head_dim_k),
          static_cast<int>(sizes.head_dim_v), has_decay_per_channel(problem)};
}

inline size_t shared_memory_of(int device) {
  return static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

// The choice of the forward scan for a problem on its device.
template <class Problem>
ScanConfig config_of(const Problem& problem) {
  const int device = problem.args.in.q.device.index;
  return scan_config(scan_sizes(problem), device_attribute(cudaDevAttrMultiProcessorCount, device),
                     shared_memory_of(device));
}

// Rows along K in pieces of 16 bytes, of the type of the operands: their width, else 0.
template <class Problem>
int state_row_width(const Problem& problem, const TensorView& states) {
  if (!states.present() || states.dtype != problem.args.in.k.dtype) return 0;
  const int k_axis = states.rank - (problem.args.options.state_v_first ? 1 : 2);
  return has_groups(states, k_axis, 8) ? static_cast<int>(problem.sizes.head_dim_k) : 0;
}

// The arguments of the kernels but for the factors, the tensors that the problem writes and its states.
template <class Problem>
ChunkArgs chunk_args(const Problem& problem) {
  const auto& call = problem.args;
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vector_keys = has_vectors(call.in.q) && has_vectors(call.in.k);
  args.vector_values = has_vectors(call.in.v);
  args.initial_state = device_states(call.in.initial_state, call.options.state_v_first);
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = call.options.chunk_size;
  args.num_chunks = max_chunks(args.problem.sequences, call.options.chunk_size);
  args.state_chunks = problem.sizes.num_chunks;
  return args;
}

struct FactorScratch {
  int64_t* first_chunk;
  ChunkFactors factors;
};

// Of `num_chunks` chunks; with the row numbers of a backward or without.
template <class Problem>
FactorScratch take_factors(ScratchLayout& layout, const Problem& problem, int64_t num_chunks, bool row_numbers) {
  const bool per_channel = has_decay_per_channel(problem);
  const int64_t items = num_chunks * problem.sizes.num_value_heads;
  const int width = padded_k(problem.sizes.head_dim_k);
  FactorScratch scratch;
  scratch.first_chunk =
      layout.take<int64_t>(problem.args.in.cu_seqlens.present() ? problem.sizes.num_sequences + 1 : 0);
  ChunkFactors& factors = scratch.factors;
  factors.total_width = per_channel ? width : 4;
  factors.J = layout.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.sP = layout.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.token = layout.take<float>(items * (per_channel ? kTokenFactors<true> : kTokenFactors<false>)*kChunkRows);
  factors.total = layout.take<float>(items * factors.total_width);
  factors.keys = layout.take<uint16_t>(per_channel ? items * kKeyCopies * kChunkRows * width : 0);
  factors.row = row_numbers ? layout.take<float>(items * kRowNumbers * kChunkRows) : nullptr;
  return scratch;
}

// Numbers the chunks and computes their factors.
template <class Problem>
void compute_factors(const Problem& problem, const FactorScratch& scratch, ChunkArgs& args, const Context& context) {
  args.factors = scratch.factors;
  if (problem.args.in.cu_seqlens.present()) {
    build_first_chunks(args.problem.sequences, args.chunked.chunk_size, scratch.first_chunk, context);
    args.chunked.first_chunk = scratch.first_chunk;
  }
  if (args.num_chunks == 0) return;
  const int width = padded_k(problem.sizes.head_dim_k);
  has_decay_per_channel(problem) ? launch_factors_per_channel(args, width, context)
                                 : launch_factors(args, width, context);
}

// The scan from the first chunk to the last.
inline void scan_forward(const ChunkArgs& args, const ScanConfig& config, const Context& context) {
  if (args.problem.k.dtype == DType::kBF16) {
    launch_scan<DType::kBF16>(args, config, context);
  } else {
    launch_scan<DType::kF16>(args, config, context);
  }
}

// What a block of the forward's kernels, and of the scan back, needs at least.
size_t least_forward_bytes(int padded_k, bool per_channel);
size_t least_scan_back_bytes(int padded_k, bool per_channel);

}  // namespace fastweight::cuda::chunk_16bit
