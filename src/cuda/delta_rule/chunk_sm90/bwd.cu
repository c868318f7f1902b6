// The entry chunk_sm90, backward in the chunk form on Hopper: what it takes, its tensor maps and its launches. One decay per
// head: factors as in chunk_16bit, then scan.cuh, scan_back.cuh, gradients.cuh. One per channel: factors_per_channel.cu,
// scan_per_channel.cuh, scan_back_per_channel.cuh, then the gradients of chunk_16bit.
#include <algorithm>
#include <limits>
#include <string>

#include "cuda/delta_rule/chunk_16bit/backward.h"
#include "cuda/delta_rule/chunk_16bit/setup.h"
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/gradients.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/delta_rule/chunk_sm90/scan_back.h"
#include "cuda/delta_rule/chunk_sm90/scan_back_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/scan_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/segments.h"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkArgs;
using chunk_16bit::GradientArgs;
using chunk_16bit::kChunkRows;

constexpr int kChannelGradientsOnOne = 2;  // blocks of the gradients on a multiprocessor

int columns_of(const DeltaRuleBackwardProblem& problem) {
  return scan_columns(problem.sizes.num_sequences * problem.sizes.num_value_heads, problem.args.in.q.device.index);
}

TensorMap rows_of(const TensorView& x) {
  return x.present() ? token_map(x, kChunkRows, 64, Swizzle::k128) : TensorMap{};
}

// Pairs of a chunk and a value head that there is memory for: of factors, and of G and Y of a window.
struct Items {
  int64_t factors, slots;
};
Items items_of(const ChunkArgs& args) {
  const int64_t HV = args.problem.num_value_heads, slots = chunk_16bit::chunks_in_window(args) * HV;
  return {args.factors_of_window ? slots : args.num_chunks * HV, slots};
}

// What both kernels read of a window.
struct WindowMaps {
  TensorMap k, q, d_o, J, sP, G, Y;
};
WindowMaps window_maps(const DeltaRuleBackward& call, const GradientArgs& args) {
  const DType dtype = call.in.k.dtype;
  const ChunkArgs& chunk = args.chunk;
  const Items items = items_of(chunk);
  return {rows_of(call.in.k),
          rows_of(call.in.q),
          rows_of(call.d_o),
          lower_map(chunk.factors.J, dtype, items.factors),
          lower_map(chunk.factors.sP, dtype, items.factors),
          rows_map(args.G, dtype, kWidth, items.slots),
          rows_map(args.Y, dtype, kChunkRows, items.slots)};
}

void scan_states(const DeltaRuleBackwardProblem& problem, const ForwardArgs& args, const Context& context) {
  const int columns = forward_columns(args, context.device.index);
  const ScanMaps maps = scan_maps(problem.args.in, {}, args);
  problem.args.in.k.dtype == DType::kBF16 ? launch_scan<DType::kBF16>(args, maps, columns, {}, context)
                                          : launch_scan<DType::kF16>(args, maps, columns, {}, context);
}

void scan_back(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, const Context& context) {
  const int columns = columns_of(problem);
  ScanBackMaps maps{};
  if (args.chunk.num_chunks > 0) {
    const WindowMaps of = window_maps(problem.args, args);
    maps = {of.k, of.q, of.d_o, rows_of(problem.args.dv), of.J, of.sP, of.G, of.Y};
  }
  problem.args.in.k.dtype == DType::kBF16 ? launch_scan_back<DType::kBF16>(args, maps, columns, context)
                                          : launch_scan_back<DType::kF16>(args, maps, columns, context);
}

void gradients(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, int64_t blocks,
               const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  const WindowMaps of = window_maps(call, args);
  const GradientMaps maps{of.k,
                          of.q,
                          rows_of(call.in.v),
                          of.d_o,
                          rows_of(call.dq),
                          rows_of(call.dk),
                          of.J,
                          of.sP,
                          states_map(args, problem.sizes.batch),
                          of.G,
                          of.Y};
  call.in.k.dtype == DType::kBF16 ? launch_gradients<DType::kBF16>(args, maps, blocks, context)
                                  : launch_gradients<DType::kF16>(args, maps, blocks, context);
}

void scan_channel_states(const DeltaRuleBackwardProblem& problem, const ForwardArgs& args, const Context& context) {
  const int columns = forward_columns(args, context.device.index);
  const ChannelScanMaps maps = channel_scan_maps(problem.args.in, {}, args);
  problem.args.in.k.dtype == DType::kBF16 ? launch_channel_scan<DType::kBF16>(args, maps, columns, context)
                                          : launch_channel_scan<DType::kF16>(args, maps, columns, context);
}

void scan_channels_back(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, const Context& context) {
  const int columns = columns_of(problem);
  ChannelScanBackMaps maps{};
  if (args.chunk.num_chunks > 0) {
    const DType dtype = problem.args.in.k.dtype;
    const Items items = items_of(args.chunk);
    maps = {copies_map(args.chunk.factors.keys, dtype, items.factors),
            rows_of(problem.args.d_o),
            rows_of(problem.args.dv),
            lower_map(args.chunk.factors.J, dtype, items.factors),
            lower_map(args.chunk.factors.sP, dtype, items.factors),
            rows_map(args.G, dtype, kWidth, items.slots),
            rows_map(args.Y, dtype, kChunkRows, items.slots)};
  }
  problem.args.in.k.dtype == DType::kBF16 ? launch_channel_scan_back<DType::kBF16>(args, maps, columns, context)
                                          : launch_channel_scan_back<DType::kF16>(args, maps, columns, context);
}

void channel_gradients(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, int64_t blocks,
                       const Context& context) {
  problem.args.in.k.dtype == DType::kBF16
      ? chunk_16bit::launch_gradients_per_channel<DType::kBF16>(args, kWidth, blocks, context)
      : chunk_16bit::launch_gradients_per_channel<DType::kF16>(args, kWidth, blocks, context);
}

// Whether a gradient can leave by TMA, if anybody wants it.
bool leaves_by_map(const TensorView& x, DType dtype) { return !x.present() || (x.dtype == dtype && has_token_map(x)); }

// Whether the caller's states lie in an order that a map can have.
bool have_map(const TensorView& states) {
  for (size_t axis = 0; axis < static_cast<size_t>(states.rank); ++axis) {
    if (states.shape[axis] > 1 && states.strides[axis] <= 0) return false;
  }
  return true;
}

}  // namespace

TensorMap rows_map(const uint16_t* matrices, DType dtype, int columns, int64_t items) {
  TensorMapSpec spec{.data = matrices,
                     .dtype = dtype,
                     .rank = 3,
                     .sizes = {columns, kWidth, items},
                     .strides = {1, columns, int64_t{columns} * kWidth},
                     .box = {64, 64, 1},
                     .swizzle = Swizzle::k128};
  return tensor_map(spec);
}

TensorMap states_map(const GradientArgs& args, int64_t batch) {
  const DeviceStates& S = args.S;
  const ChunkArgs& chunk = args.chunk;
  const int64_t sizes[5] = {args.S_width, chunk.problem.head_dim_v, chunk.problem.num_value_heads, chunk.state_chunks,
                            batch};
  const int64_t strides[5] = {1, S.v_stride, S.outer_strides[2], S.outer_strides[1], S.outer_strides[0]};
  TensorMapSpec spec{.data = S.data, .dtype = S.dtype, .rank = 5, .box = {64, kWidth, 1, 1, 1}};
  for (int i = 0; i < 5; ++i) {
    spec.sizes[i] = sizes[i];
    // The stride along a dimension of one element may be anything; the map gets one that it can have.
    spec.strides[i] = i == 0 || sizes[i] > 1 ? strides[i] : spec.strides[i - 1] * 8;
  }
  return tensor_map(spec);
}

std::string declines_backward(const DeltaRuleBackwardProblem& problem) {
  const DeltaRuleBackward& call = problem.args;
  const DeltaRuleInputs& in = call.in;
  const DeltaRuleSizes& sizes = problem.sizes;
  if (const std::string reason = chunk_16bit::declines_backward(problem); !reason.empty()) return reason;
  if (const std::string reason = declines_widths(sizes, in.q.device.index); !reason.empty()) return reason;
  if (!call.d_o.present()) return "d_o must be there";
  const DType dtype = in.k.dtype;
  if (!has_token_map(in.q) || !has_token_map(in.k) || !has_token_map(in.v) || !has_token_map(call.d_o) ||
      !leaves_by_map(call.dq, dtype) || !leaves_by_map(call.dk, dtype) || !leaves_by_map(call.dv, dtype)) {
    return "q, k, v, d_o, dq, dk and dv must have one type, and rows that lie together, at multiples of 16 bytes";
  }
  if (!have_map(call.chunk_states)) return "strides of chunk_states must be positive";
  const auto sequences = device_sequences(in.cu_seqlens, sizes.num_sequences, sizes.tokens);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kChunkRows;  // places are 32-bit numbers
  if (sizes.tokens > kMost || max_chunks(sequences, call.options.chunk_size) * sizes.num_value_heads > kMost)
    return "too many tokens";
  const bool per_channel = chunk_16bit::has_decay_per_channel(problem);
  return lacks_shared_memory(per_channel ? std::max(channel_scan_bytes(), channel_scan_back_bytes())
                                         : std::max({scan_bytes(), scan_back_bytes(), gradients_bytes()}),
                             in.q.device.index);
}

std::string config_text(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const bool again = !problem.args.chunk_states.present();  // the states are made
  const ForwardArgs forward =
      chunk_16bit::with_segments(chunk_16bit::chunk_args(problem), again ? segment_chunks_of(problem, context) : 0);
  return "K " + std::to_string(kWidth) + ", columns " + std::to_string(columns_of(problem)) +
         segments_text(forward.segments.chunks);
}

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const int segments = segment_chunks_of(problem, context);
  if (chunk_16bit::has_decay_per_channel(problem)) {
    chunk_16bit::backward_in_windows(
        problem,
        {.ready_columns = 0,
         .gradients_on_one = kChannelGradientsOnOne,
         .sums_keys = problem.sizes.group > 1,
         .segment_chunks = segments,
         .scan_states = [&](const ForwardArgs& args) { scan_channel_states(problem, args, context); },
         .scan_back = [&](const GradientArgs& args) { scan_channels_back(problem, args, context); },
         .gradients = [&](const GradientArgs& args,
                          int64_t blocks) { channel_gradients(problem, args, blocks, context); }},
        context);
    return;
  }
  chunk_16bit::backward_in_windows(
      problem,
      {.ready_columns = 0,
       .gradients_on_one = 1,
       .sums_keys = false,
       .segment_chunks = segments,
       .scan_states = [&](const ForwardArgs& args) { scan_states(problem, args, context); },
       .scan_back = [&](const GradientArgs& args) { scan_back(problem, args, context); },
       .gradients = [&](const GradientArgs& args, int64_t blocks) { gradients(problem, args, blocks, context); }},
      context);
}

}  // namespace fastweight::cuda::chunk_sm90
