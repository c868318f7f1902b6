// What the forward and the backward of chunk_16bit do alike on the host: scratch memory, the arguments of the kernels and
// the launches of the factors and of the scan over the states.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/delta_rule/chunk_sm90/segments.h"
#include "cuda/delta_rule/kernels.h"

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
  args.vector_values = call.in.v.present() && has_vectors(call.in.v);
  args.initial_state = device_states(call.in.initial_state, call.options.state_v_first);
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = call.options.chunk_size;
  args.num_chunks = max_chunks(args.problem.sequences, call.options.chunk_size);
  args.window = whole_window(args.chunked);
  args.state_chunks = problem.sizes.num_chunks;
  return args;
}

// The arrays of the factors of so many pairs of a chunk and a value head, `copies` of them those per channel; with the row
// numbers of a backward or without.
inline ChunkFactors take_factors(ScratchLayout& layout, bool per_channel, int width, int64_t items, int64_t copies,
                                 bool row_numbers) {
  ChunkFactors factors;
  factors.total_width = per_channel ? width : 4;
  factors.lower = layout.take<uint16_t>(items * kLowerMatrices * kLowerElements);
  factors.token = layout.take<float>(items * (per_channel ? kTokenFactors<true> : kTokenFactors<false>)*kChunkRows);
  factors.total = layout.take<float>((per_channel ? copies : items) * factors.total_width);
  factors.keys = layout.take<uint16_t>(per_channel ? copies * kKeyCopies * kChunkRows * width : 0);
  factors.row = row_numbers ? layout.take<float>(items * kRowNumbers * kChunkRows) : nullptr;
  return factors;
}

// What a forward keeps for its backward of the factors of all chunks, in the caller's memory: nothing, all with the row
// numbers, or all but those per channel.
struct Kept {
  bool factors = false, copies = false;
};
template <class Problem>
Kept kept_of(const Problem& problem) {
  const TensorView& kept = problem.args.kept;
  if (!kept.present()) return {};
  const DType dtype = problem.args.in.q.dtype;
  const int64_t all =
      kept_words(problem.args.in.q.device, problem.args.options.gate, dtype, problem.sizes.head_dim_k, true);
  return {true, kept.shape[3] == all};
}

// Scratch memory for what is not kept, of so many chunks.
template <class Problem>
ChunkFactors take_factors(ScratchLayout& layout, const Problem& problem, int64_t chunks, bool row_numbers) {
  const Kept kept = kept_of(problem);
  const int64_t items = chunks * problem.sizes.num_value_heads;
  return take_factors(layout, has_decay_per_channel(problem), padded_k(problem.sizes.head_dim_k),
                      kept.factors ? 0 : items, kept.copies ? 0 : items, row_numbers);
}

// The factors of a call: what is kept there, the rest in scratch memory.
template <class Problem>
ChunkFactors all_factors(const Problem& problem, const ChunkArgs& args, const ChunkFactors& scratch) {
  const Kept kept = kept_of(problem);
  if (!kept.factors) return scratch;
  const int64_t items = args.num_chunks * problem.sizes.num_value_heads;
  ScratchLayout layout(problem.args.kept.data);
  ChunkFactors factors = take_factors(layout, has_decay_per_channel(problem), padded_k(problem.sizes.head_dim_k), items,
                                      kept.copies ? items : 0, true);
  if (!kept.copies) {
    factors.total = scratch.total;
    factors.keys = scratch.keys;
  }
  return factors;
}

// The numbers of chunks before the sequences; none where these have one length.
template <class Problem>
int64_t* take_first_chunks(ScratchLayout& layout, const Problem& problem) {
  return layout.take<int64_t>(problem.args.in.cu_seqlens.present() ? problem.sizes.num_sequences + 1 : 0);
}

template <class Problem>
void number_chunks(const Problem& problem, int64_t* first_chunk, ChunkArgs& args, const Context& context) {
  if (!problem.args.in.cu_seqlens.present()) return;
  build_first_chunks(args.problem.sequences, args.chunked.chunk_size, first_chunk, context);
  args.chunked.first_chunk = first_chunk;
}

// How a call is cut where its scratch memory would grow with the length: into `count` windows of all rows, one launch of
// each kernel after the other, with the states between them. No bit depends on it.
struct Windows {
  ChunkWindow whole;
  int64_t count = 1;

  int64_t width() const { return (whole.row + count - 1) / count; }
  ChunkWindow at(int64_t n) const {
    return {std::min(n * width(), whole.row), std::min((n + 1) * width(), whole.row), whole.row};
  }
};

// At most `wanted` windows, none of them so short that the states between them matter.
inline Windows windows_of(const ChunkArgs& args, int64_t wanted) {
  constexpr int64_t kLeastWidth = 4;
  Windows windows{whole_window(args.chunked)};
  windows.count = std::max<int64_t>(std::min(wanted, windows.whole.row / kLeastWidth), 1);
  if (windows.count > 1) windows.count = (windows.whole.row + windows.width() - 1) / windows.width();
  return windows;
}

// The most chunks that one of them has, of all rows.
inline int64_t chunks_of_window(const ChunkArgs& args, const Windows& windows) {
  return windows.count == 1 ? args.num_chunks : args.num_chunks / windows.whole.row * windows.width();
}

// `bytes` of scratch memory for a chunk, `most` in all unless the context says otherwise: into how many windows.
inline int64_t count_for(const ChunkArgs& args, size_t bytes, size_t most, const Context& context) {
  if (context.scratch_bytes > 0) most = context.scratch_bytes;
  return static_cast<int64_t>((static_cast<size_t>(args.num_chunks) * bytes + most - 1) / most);
}

// The states between the windows, twice: each window takes those of one array and gives those of the other. Blocks of
// 128 columns are the widest, and have registers for all of them.
template <class Problem>
int64_t carried_floats(const Problem& problem) {
  const DeltaRuleSizes& sizes = problem.sizes;
  return sizes.batch * sizes.num_value_heads * padded_k(sizes.head_dim_k) * ((sizes.head_dim_v + 127) / 128 * 128);
}

template <class Problem>
float* take_carried(ScratchLayout& layout, const Problem& problem, const Windows& windows) {
  return layout.take<float>(windows.count > 1 ? 2 * carried_floats(problem) : 0);
}

// Of the n-th window that is worked on.
template <class Problem>
WindowStates carried_states(const Problem& problem, float* data, int64_t n) {
  const int64_t floats = carried_floats(problem);
  return {data + n % 2 * floats, data + (n + 1) % 2 * floats};
}

// The arrays that segments need, where sequences are cut: their maps, as many as a window may meet, and what windows hand
// over of them and of the state.
struct SegmentScratch {
  float *maps = nullptr, *carried = nullptr, *composed = nullptr;
  int64_t* before = nullptr;
  int parts = 0;
};

// Of all rows and heads, a matrix of a segment.
inline int64_t segment_floats(const ChunkArgs& args) {
  return chunk_sm90::count_rows(args.problem.sequences) * args.problem.num_value_heads * chunk_sm90::kMapFloats;
}

inline chunk_sm90::SegmentRange segments_of_window(const chunk_sm90::ScanArgs& args, const ChunkWindow& window) {
  return chunk_sm90::segments_in(args.problem.sequences, args.chunked.chunk_size, args.segments.chunks, window);
}

// `parts` of MapPart.
inline SegmentScratch take_segments(ScratchLayout& layout, const chunk_sm90::ScanArgs& args, const Windows& windows,
                                    int parts) {
  if (args.segments.chunks == 0) return {};
  int64_t slots = 1;
  for (int64_t n = 0; n < windows.count; ++n) {
    slots = std::max(slots, segments_of_window(args, windows.at(n)).count);
  }
  const int64_t floats = segment_floats(args), handed = windows.count > 1 ? 2 * floats : 0;
  const Sequences& sequences = args.problem.sequences;
  return {layout.take<float>(parts * slots * floats), layout.take<float>(2 * handed), layout.take<float>(handed),
          layout.take<int64_t>(sequences.offsets != nullptr ? sequences.count + 1 : 0), parts};
}

// What of the maps a chunk of all heads has.
inline void take_share_of_maps(ScratchLayout& layout, const chunk_sm90::ScanArgs& args, int parts) {
  if (args.segments.chunks == 0) return;
  layout.take<float>(int64_t{parts} * args.problem.num_value_heads * chunk_sm90::kMapFloats / args.segments.chunks);
}

inline void number_segments(const SegmentScratch& scratch, chunk_sm90::ScanArgs& args, const Context& context) {
  if (args.segments.chunks == 0 || args.problem.sequences.offsets == nullptr) return;
  build_first_stretches(args.problem.sequences, args.segments.chunks * args.chunked.chunk_size,
                        chunk_sm90::kSegmentGroup, scratch.before, context);
  args.segments.before = scratch.before;
}

// Those of the n-th window, which args are about.
inline void use_segments(const SegmentScratch& scratch, int64_t n, chunk_sm90::ScanArgs& args) {
  chunk_sm90::Segments& segments = args.segments;
  if (segments.chunks == 0) return;
  const chunk_sm90::SegmentRange range = segments_of_window(args, args.window);
  segments.first = range.first;
  segments.count = range.count;
  segments.maps = scratch.maps;
  segments.parts = scratch.parts;
  const int64_t floats = segment_floats(args), even = n % 2, odd = 1 - even;
  segments.carried = {scratch.carried + even * 2 * floats, scratch.carried + odd * 2 * floats};
  segments.composed = {scratch.composed + even * floats, scratch.composed + odd * floats};
}

// Into segments of `chunks` chunks each, if any sequence can be so long.
inline chunk_sm90::ForwardArgs with_segments(const ChunkArgs& args, int chunks) {
  const int64_t tokens = chunks * args.chunked.chunk_size;
  const Sequences& sequences = args.problem.sequences;
  const bool any = tokens > 0 && sequences.count > 0 && chunk_sm90::segments_of(sequences.tokens, tokens) > 0;
  chunk_sm90::ForwardArgs cut{{args, {}}, nullptr, nullptr};
  cut.segments.chunks = any ? chunks : 0;
  return cut;
}

// Of the window's chunks.
template <class Problem>
void compute_factors(const Problem& problem, const ChunkArgs& args, const Context& context) {
  if (args.num_chunks == 0) return;
#ifdef FASTWEIGHT_SM90
  if (has_decay_per_channel(problem) && chunk_sm90::takes_channel_factors(problem.args.in, problem.sizes)) {
    constexpr bool kForward = std::is_same_v<Problem, DeltaRuleForwardProblem>;
    chunk_sm90::launch_channel_factors(problem.args.in, args, kForward, context);
    return;
  }
  if (!has_decay_per_channel(problem) && chunk_sm90::takes_head_factors(problem.args.in, problem.sizes)) {
    chunk_sm90::launch_head_factors(problem.args.in, args, context);
    return;
  }
#endif
  const int width = padded_k(problem.sizes.head_dim_k);
  has_decay_per_channel(problem) ? launch_factors_per_channel(args, width, context)
                                 : launch_factors(args, width, context);
}

// A forward that keeps nothing stays below half a gigabyte of scratch memory, however long its input is.
inline constexpr size_t kMostFactorBytes = size_t{480} << 20;

struct ForwardScratch {
  int64_t* first_chunk;
  ChunkFactors factors;
  uint32_t* flags;
  float* carried;
  SegmentScratch segments;
};

template <class Problem>
ForwardScratch take_forward_scratch(ScratchLayout& layout, const Problem& problem, const chunk_sm90::ForwardArgs& args,
                                    const Windows& windows, bool row_numbers) {
  ForwardScratch scratch;
  scratch.first_chunk = take_first_chunks(layout, problem);
  scratch.factors = take_factors(layout, problem, chunks_of_window(args, windows), row_numbers);
  scratch.flags = layout.take<uint32_t>(chunks_of_window(args, windows) * problem.sizes.num_value_heads);
  scratch.carried = take_carried(layout, problem, windows);
  scratch.segments = take_segments(layout, args, windows, chunk_sm90::kForwardMapParts);
  return scratch;
}

// A forward: advance(args) makes the factors of a window, with row numbers or without, and goes over its chunks;
// then the next window. Long sequences are cut into segments of `segment_chunks`, unless that is 0.
template <class Problem, class Advance>
void forward_in_windows(const Problem& problem, const Context& context, bool row_numbers, int segment_chunks,
                        const Advance& advance) {
  const auto& call = problem.args;
  chunk_sm90::ForwardArgs args = with_segments(chunk_args(problem), segment_chunks);
  args.vector_outputs = call.o.present() && has_vectors(call.o);
  args.o = device_tensor(call.o);
  args.final_state = device_states(call.final_state, call.options.state_v_first);
  args.chunk_states = device_states(call.chunk_states, call.options.state_v_first);
  args.state_width = state_row_width(problem, call.chunk_states);

  const Kept kept = kept_of(problem);
  ScratchLayout one;
  take_factors(one, problem, 1, row_numbers);
  take_share_of_maps(one, args, chunk_sm90::kForwardMapParts);
  const bool saves = kept.factors || call.chunk_states.present();  // then no window makes much of a difference
  const size_t most = saves ? 4 * kMostFactorBytes : kMostFactorBytes;
  const Windows windows = windows_of(args, kept.copies ? 1 : count_for(args, one.bytes(), most, context));
  ScratchLayout measure;
  take_forward_scratch(measure, problem, args, windows, row_numbers);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const ForwardScratch scratch = take_forward_scratch(layout, problem, args, windows, row_numbers);
  number_chunks(problem, scratch.first_chunk, args, context);
  number_segments(scratch.segments, args, context);
  args.factors = all_factors(problem, args, scratch.factors);
  args.factors_of_window = !kept.factors;
  args.copies_of_window = !kept.copies;
  args.flags = scratch.flags;
  for (int64_t n = 0; n < windows.count; ++n) {
    args.window = windows.at(n);
    if (windows.count > 1) args.carried = carried_states(problem, scratch.carried, n);
    use_segments(scratch.segments, n, args);
    advance(args);
  }
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
