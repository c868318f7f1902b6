// The entry chunk_16bit, backward: what it takes, its scratch memory and its launches. gradient.cuh has the equations and
// the order of the kernels.
#include <algorithm>
#include <string>

#include "cuda/delta_rule/chunk_16bit/backward.h"
#include "cuda/delta_rule/chunk_16bit/setup.h"
#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/parameter_sums.h"

namespace fastweight::cuda::chunk_16bit {
namespace {

ScanConfig back_config_of(const DeltaRuleBackwardProblem& problem) {
  const int device = problem.args.in.q.device.index;
  return scan_back_config(scan_sizes(problem), device_attribute(cudaDevAttrMultiProcessorCount, device),
                          shared_memory_of(device));
}

// Of a block of any kernel, at least.
size_t least_bytes(const DeltaRuleBackwardProblem& problem) {
  const bool per_channel = has_decay_per_channel(problem);
  const int width = padded_k(problem.sizes.head_dim_k);
  return std::max({least_forward_bytes(width, per_channel), least_scan_back_bytes(width, per_channel),
                   per_channel ? gradients_per_channel_bytes(width) : gradients_bytes(width)});
}

int64_t padded_v(const DeltaRuleBackwardProblem& problem) { return (problem.sizes.head_dim_v + 63) / 64 * 64; }

// Whether the caller's states can be read as they are.
bool has_states(const DeltaRuleBackwardProblem& problem) {
  return state_row_width(problem, problem.args.chunk_states) > 0;
}

// Blocks of the gradients: about as many as run at once, each of which copies the operands of its next item while it
// finishes one.
int64_t gradient_blocks(const DeltaRuleBackwardProblem& problem, const BackKernels& kernels, int64_t num_chunks) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, problem.args.in.q.device.index);
  return std::min<int64_t>(num_chunks * problem.sizes.num_heads, kernels.gradients_on_one * multiprocessors);
}
int gradients_on_one(const DeltaRuleBackwardProblem& problem) {
  const int narrow = has_decay_per_channel(problem) ? 3 : 4;
  return padded_k(problem.sizes.head_dim_k) == 64 ? narrow : 2;
}

// dq and dk are sums over the value heads of a group, and over ranges of value columns.
int key_sums(const DeltaRuleBackwardProblem& problem) {
  const bool per_channel = has_decay_per_channel(problem);
  const int width = padded_k(problem.sizes.head_dim_k);
  const int columns = per_channel ? gradients_per_channel_columns(width) : gradients_columns(width);
  if (problem.sizes.group == 1 && problem.sizes.head_dim_v <= columns) return 0;
  return per_channel ? kKeySumsPerChannel : kKeySums;
}

ParameterSums parameter_sums(const DeltaRuleBackwardProblem& problem, const ChunkArgs& chunk) {
  ParameterSums sums;
  sums.chunked = chunk.chunked;
  sums.num_value_heads = problem.sizes.num_value_heads;
  sums.bias_width = has_decay_per_channel(problem) ? problem.sizes.head_dim_k : 1;
  sums.da_log = device_tensor(problem.args.da_log);
  sums.ddt_bias = device_tensor(problem.args.ddt_bias);
  return sums;
}

// Whether the gradients run beside the scan back: where it leaves a quarter of the device idle. With less to gain, taking
// the chunks as they come costs more than it brings (measured on an H200: 64 heads of 128 columns, 8.5 against 7.9 ms).
bool runs_beside(const DeltaRuleBackwardProblem& problem) {
  if (has_decay_per_channel(problem)) return false;  // it brought nothing there
  const DeltaRuleSizes& sizes = problem.sizes;
  const int columns = back_config_of(problem).columns();
  const int64_t ranges = (padded_v(problem) + columns - 1) / columns;
  const int64_t blocks = sizes.num_sequences * sizes.num_value_heads * ranges;
  return 4 * blocks <= 3 * device_attribute(cudaDevAttrMultiProcessorCount, problem.args.in.q.device.index);
}

// Whether anything is wanted that the scan back does not make, which has dv and the gradient of the initial state.
bool wants_gradients(const DeltaRuleBackwardProblem& problem) {
  const DeltaRuleBackward& call = problem.args;
  return call.dq.present() || call.dk.present() || call.dg.present() || call.dbeta.present() || call.da_log.present() ||
         call.ddt_bias.present();
}

// No scan forward has to be repeated: the states are those of the caller, or at least made of them, or nobody needs any.
bool knows_states(const DeltaRuleBackwardProblem& problem) {
  return problem.args.chunk_states.present() || !wants_gradients(problem);
}

// Whose factors, or copies of the keys, are made window by window: whoever repeats the scan forward needs all of them first.
bool has_factors_of_window(const DeltaRuleBackwardProblem& problem) {
  return knows_states(problem) && !kept_of(problem).factors;
}
bool has_copies_of_window(const DeltaRuleBackwardProblem& problem) {
  return knows_states(problem) && !kept_of(problem).copies;
}

// What G, Y and, unless they were kept, the factors of all chunks take is kept below a bound by windows, and, where it is
// much and a decay belongs to a head, made small beside what a training step keeps anyway: as few windows as leave
// kOfWindow to each, but no more than kMostWindows, because each costs time: on an H200, of 96 heads of 8192 tokens, about
// 0.015 ms of 1.6, and with decays per channel, where none overlaps with the next, more.
Windows back_windows(const DeltaRuleBackwardProblem& problem, const chunk_sm90::ScanArgs& chunk,
                     const Context& context) {
  constexpr size_t kMost = size_t{1} << 30, kMuch = size_t{320} << 20, kOfWindow = size_t{50} << 20;
  constexpr int64_t kMostWindows = 5;
  ScratchLayout one;
  if (has_copies_of_window(problem)) take_factors(one, problem, 1, true);
  const int64_t V = padded_v(problem), K = padded_k(problem.sizes.head_dim_k);
  one.take<uint16_t>(problem.sizes.num_value_heads * V * (K + kChunkRows));
  take_share_of_maps(one, chunk, chunk_sm90::kBackMapParts);
  const auto count = [&](size_t most) { return count_for(chunk, one.bytes(), most, context); };
  int64_t wanted = count(kMost);
  if (!has_decay_per_channel(problem)) {
    if (count(kMuch) > 1) wanted = std::max(wanted, std::min(count(kOfWindow), kMostWindows));
  } else if (kept_of(problem).copies) {
    wanted = std::max(wanted, count(kMuch));
  }
  return windows_of(chunk, wanted);
}

struct Scratch {
  int64_t* first_chunk;
  ChunkFactors factors;
  uint32_t* flags;  // of BackProgress; the counters of all windows follow them
  uint16_t *S, *G, *Y;
  float* carried;
  double* parameter_parts;
  float* key_sums;
  uint32_t* left;
  SegmentScratch segments, back_segments;  // of the scan forward, and of that back
};

// Those of BackProgress, of a chunk and a value head, and in all.
int ready_ranges(const DeltaRuleBackwardProblem& problem, const BackKernels& kernels) {
  return static_cast<int>((padded_v(problem) + kernels.ready_columns - 1) / kernels.ready_columns);
}
int64_t count_flags(const DeltaRuleBackwardProblem& problem, const BackKernels& kernels, const ChunkArgs& chunk) {
  return chunk.num_chunks * problem.sizes.num_value_heads * ready_ranges(problem, kernels);
}

// Of the scan forward over all chunks, where it is repeated, but for its states.
chunk_sm90::ForwardArgs forward_args(const DeltaRuleBackwardProblem& problem, const BackKernels& kernels,
                                     const ChunkArgs& chunk) {
  return with_segments(chunk, knows_states(problem) ? 0 : kernels.segment_chunks);
}

Scratch take_scratch(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem, const BackKernels& kernels,
                     const chunk_sm90::ScanArgs& chunk, const Windows& windows) {
  const int64_t HV = problem.sizes.num_value_heads, V = padded_v(problem), K = padded_k(problem.sizes.head_dim_k);
  const int64_t slots = chunks_of_window(chunk, windows);
  const int64_t with_factors = knows_states(problem) ? slots : chunk.num_chunks;
  Scratch scratch;
  scratch.first_chunk = take_first_chunks(layout, problem);
  scratch.factors = take_factors(layout, problem, with_factors, true);
  scratch.flags =
      layout.take<uint32_t>(kernels.ready_columns > 0 ? count_flags(problem, kernels, chunk) + windows.count : 0);
  const bool makes_states = wants_gradients(problem) && !has_states(problem);
  scratch.S = layout.take<uint16_t>(makes_states ? chunk.num_chunks * HV * V * K : 0);
  scratch.G = layout.take<uint16_t>(slots * HV * V * K);
  scratch.Y = layout.take<uint16_t>(slots * HV * V * kChunkRows);
  scratch.carried = take_carried(layout, problem, windows);
  scratch.parameter_parts = layout.take<double>(parameter_sums(problem, chunk).count());
  scratch.key_sums = layout.take<float>(gradient_blocks(problem, kernels, slots) * kernels.key_sums * kChunkRows * K);
  scratch.left = layout.take<uint32_t>(kernels.leaves_pairs ? slots * problem.sizes.num_heads : 0);
  scratch.segments =
      take_segments(layout, forward_args(problem, kernels, chunk), {chunk.window}, chunk_sm90::kForwardMapParts);
  scratch.back_segments = take_segments(layout, chunk, windows, chunk_sm90::kBackMapParts);
  return scratch;
}

// The states before the chunks in scratch memory, [B, NT, HV, padded V, padded K].
DeviceStates scratch_states(const DeltaRuleBackwardProblem& problem, uint16_t* data) {
  const int64_t V = padded_v(problem), K = padded_k(problem.sizes.head_dim_k), HV = problem.sizes.num_value_heads;
  DeviceStates states;
  states.data = data;
  states.dtype = problem.args.in.k.dtype;
  states.k_stride = 1;
  states.v_stride = K;
  states.outer_strides[2] = V * K;
  states.outer_strides[1] = HV * V * K;
  states.outer_strides[0] = problem.sizes.num_chunks * HV * V * K;
  return states;
}

// The states before the chunks: the caller's, rounded to operands if need be, or again as in the forward.
void provide_states(const DeltaRuleBackwardProblem& problem, const BackKernels& kernels, const Scratch& scratch,
                    GradientArgs& args, const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  if (has_states(problem)) {
    args.S = device_states(call.chunk_states, call.options.state_v_first);
    args.S_width = state_row_width(problem, call.chunk_states);
    return;
  }
  args.S = scratch_states(problem, scratch.S);
  args.S_width = padded_k(problem.sizes.head_dim_k);
  if (knows_states(problem)) {
    launch_round_states(args.chunk, device_states(call.chunk_states, call.options.state_v_first), args.S, args.S_width,
                        context);
    return;
  }
  chunk_sm90::ForwardArgs forward = forward_args(problem, kernels, args.chunk);
  number_segments(scratch.segments, forward, context);
  use_segments(scratch.segments, 0, forward);
  forward.chunk_states = args.S;
  forward.state_width = args.S_width;
  kernels.scan_states(forward);
}

void scan_back(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, const Context& context) {
  const ScanConfig config = back_config_of(problem);
  problem.args.in.k.dtype == DType::kBF16 ? launch_scan_back<DType::kBF16>(args, config, context)
                                          : launch_scan_back<DType::kF16>(args, config, context);
}

void gradients(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, int64_t blocks,
               const Context& context) {
  const bool bf16 = problem.args.in.k.dtype == DType::kBF16;
  const int width = padded_k(problem.sizes.head_dim_k);
  if (has_decay_per_channel(problem)) {
    bf16 ? launch_gradients_per_channel<DType::kBF16>(args, width, blocks, context)
         : launch_gradients_per_channel<DType::kF16>(args, width, blocks, context);
  } else {
    bf16 ? launch_gradients_of<DType::kBF16>(args, width, blocks, context)
         : launch_gradients_of<DType::kF16>(args, width, blocks, context);
  }
}

}  // namespace

std::string declines_backward(const DeltaRuleBackwardProblem& problem) {
  const std::string reason = beyond_all_kernels(problem);
  if (!reason.empty()) return reason;
  const DeltaRuleInputs& in = problem.args.in;
  const DType dtype = in.q.dtype;
  const bool other_d_o = problem.args.d_o.present() && problem.args.d_o.dtype != dtype;
  if ((dtype != DType::kBF16 && dtype != DType::kF16) || other_d_o) return "q, k, v and d_o must have one 16-bit type";
  if (in.beta.rank == 4) return "beta must be a number per token";
  return lacks_shared_memory(least_bytes(problem), in.q.device.index);
}

std::string config_text(const DeltaRuleBackwardProblem& problem, const Context&) {
  return back_config_of(problem).text();
}

BackKernels back_kernels(const DeltaRuleBackwardProblem& problem, const Context& context) {
  return {.ready_columns = runs_beside(problem) ? back_config_of(problem).columns() : 0,
          .gradients_on_one = gradients_on_one(problem),
          .key_sums = key_sums(problem),
          .scan_states = [&](const ChunkArgs& args) { scan_forward(args, config_of(problem), context); },
          .scan_back = [&](const GradientArgs& args) { scan_back(problem, args, context); },
          .gradients = [&](const GradientArgs& args, int64_t blocks) { gradients(problem, args, blocks, context); }};
}

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  backward_in_windows(problem, back_kernels(problem, context), context);
}

void backward_in_windows(const DeltaRuleBackwardProblem& problem, BackKernels kernels, const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  if (!wants_gradients(problem)) {
    kernels.ready_columns = 0;
    kernels.key_sums = 0;
    kernels.leaves_pairs = false;
  }
  const bool v_first = call.options.state_v_first;
  GradientArgs args;
  args.chunk = with_segments(chunk_args(problem), kernels.segment_chunks);
  args.d_o = device_tensor(call.d_o);
  args.dq = device_tensor(call.dq);
  args.dk = device_tensor(call.dk);
  args.dv = device_tensor(call.dv);
  args.dg = device_tensor(call.dg);
  args.dbeta = device_tensor(call.dbeta);
  args.d_final_state = device_states(call.d_final_state, v_first);
  args.d_initial_state = device_states(call.d_initial_state, v_first);
  const auto vectors = [&](const TensorView& x) { return x.present() && x.dtype == call.in.k.dtype && has_vectors(x); };
  args.vector_d_o = vectors(call.d_o);
  args.vector_dq = vectors(call.dq);
  args.vector_dk = vectors(call.dk);
  args.vector_dv = vectors(call.dv);
  args.padded_v = args.chunk.padded_v();

  const Windows windows = back_windows(problem, args.chunk, context);
  ScratchLayout measure;
  take_scratch(measure, problem, kernels, args.chunk, windows);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, kernels, args.chunk, windows);
  number_chunks(problem, scratch.first_chunk, args.chunk, context);
  number_segments(scratch.back_segments, args.chunk, context);
  const Kept kept = kept_of(problem);
  args.chunk.factors = all_factors(problem, args.chunk, scratch.factors);
  args.chunk.factors_of_window = has_factors_of_window(problem);
  args.chunk.copies_of_window = has_copies_of_window(problem);
  args.chunk.copies_alone = kept.factors;
  if (!kept.copies && !args.chunk.copies_of_window) compute_factors(problem, args.chunk, context);
  ParameterSums sums = parameter_sums(problem, args.chunk);
  args.G = scratch.G;
  args.Y = scratch.Y;
  args.parameter_parts = sums.parts = sums.wanted() ? scratch.parameter_parts : nullptr;
  args.key_sums = kernels.key_sums > 0 ? scratch.key_sums : nullptr;
  args.left = kernels.leaves_pairs ? scratch.left : nullptr;
  const bool wanted = args.chunk.num_chunks > 0 && wants_gradients(problem);
  if (wanted) provide_states(problem, kernels, scratch, args, context);
  const bool beside = kernels.ready_columns > 0;
  const int64_t flags = beside ? count_flags(problem, kernels, args.chunk) : 0;
  if (beside) {
    args.progress = {scratch.flags, nullptr, ready_ranges(problem, kernels)};
    const size_t bytes = static_cast<size_t>(flags + windows.count) * sizeof(uint32_t);
    check_cuda(cudaMemsetAsync(scratch.flags, 0, bytes, stream_of(context)), "cudaMemsetAsync");
  }
  for (int64_t n = 0; n < windows.count; ++n) {
    args.chunk.window = windows.at(windows.count - 1 - n);
    if (windows.count > 1) args.chunk.carried = carried_states(problem, scratch.carried, n);
    use_segments(scratch.back_segments, n, args.chunk);
    if (beside) args.progress.counter = scratch.flags + flags + n;
    if (args.chunk.copies_of_window) compute_factors(problem, args.chunk, context);
    const bool follow = kernels.follow && wanted && !args.chunk.factors_of_window && args.chunk.segments.chunks == 0;
    args.waits_late = follow && n > 0;
    args.next_waits_late = follow && n + 1 < windows.count;
    kernels.scan_back(args);
    if (wanted) kernels.gradients(args, gradient_blocks(problem, kernels, chunks_in_window(args.chunk)));
  }
  add_parameter_sums(sums, context);
}

}  // namespace fastweight::cuda::chunk_16bit
