// The entry chunk_sm90, backward in the chunk form on Hopper: what it takes, its tensor maps and its launches. One decay per
// head: factors as in chunk_16bit, then scan.cuh, scan_back.cuh, gradients.cuh. One per channel: factors_per_channel.cu,
// scan_per_channel.cuh, scan_back_per_channel.cuh, gradients_per_channel.cuh. The gradients of chunk_16bit follow for what
// the last one leaves, and take the place of either for what it does not take: K above 128, raw gates in fp16.
#include <algorithm>
#include <functional>
#include <limits>
#include <string>

#include "cuda/delta_rule/chunk_16bit/backward.h"
#include "cuda/delta_rule/chunk_16bit/setup.h"
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/gradients.h"
#include "cuda/delta_rule/chunk_sm90/gradients_per_channel.h"
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

ScanArgs cut_args(const DeltaRuleBackwardProblem& problem, const Context& context) {
  return chunk_16bit::with_segments(chunk_16bit::chunk_args(problem), segment_chunks_of(problem, context));
}

int64_t multiprocessors_of(const Context& context) {
  return device_attribute(cudaDevAttrMultiProcessorCount, context.device.index);
}

// Of the scan back over sequences.
int64_t count_back_blocks(const DeltaRuleBackwardProblem& problem, const ScanArgs& args, const Context& context) {
  return count_blocks(problem.sizes, scan_columns(problem.sizes, args, context.device.index));
}

// Whether the gradients begin when the scan back has left their chunk: where it leaves enough of the device to them. With one
// decay per head or none both are as fast as memory, and blocks that take the chunks as they come lose more than they win
// unless half of it is idle; with decays per channel a quarter is enough. Forward and backward on an H200, in ms:
//
//     64 blocks     GDN, B=2, T=16384, H=16    1.35 instead of 1.41
//     96 blocks     GDN, B=1, T=8192, H=96     1.67 instead of 1.65
//     96 blocks     KDA, B=1, T=8192, H=96     2.99 instead of 3.05
//
// Where every pair of a chunk and a key head has a multiprocessor, what clears the flags would take longer than it spares.
bool runs_beside(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const ScanArgs args = cut_args(problem, context);
  const int64_t all = multiprocessors_of(context), idle = all - count_back_blocks(problem, args, context);
  if (args.segments.chunks > 0 || args.num_chunks * problem.sizes.num_heads <= all) return false;
  return (chunk_16bit::has_decay_per_channel(problem) ? 4 : 2) * idle >= all;
}

// Whether the scan back has blocks for most of the device. Fewer get places far from each other if the device is free when they
// come, two to a pair of multiprocessors if they come one by one, and take longer (measured on an H200: 64 blocks).
bool fills_device(const DeltaRuleBackwardProblem& problem, const Context& context) {
  return 3 * count_back_blocks(problem, cut_args(problem, context), context) >= 2 * multiprocessors_of(context);
}

int columns_of_gradients(const DeltaRuleSizes& sizes) {
  return gradient_columns(padded_k(sizes.head_dim_k), sizes.head_dim_v);
}

TensorMap rows_of(const TensorView& x) {
  return x.present() ? token_map(x, kChunkRows, 64, Swizzle::k128) : TensorMap{};
}

// Pairs of a chunk and a value head that there is memory for, of G and Y of a window.
int64_t count_slots(const ChunkArgs& args) {
  return chunk_16bit::chunks_in_window(args) * args.problem.num_value_heads;
}

// What both kernels read of a window.
struct WindowMaps {
  TensorMap k, q, d_o, G, Y;
  LowerMaps lower;
};
WindowMaps window_maps(const DeltaRuleBackward& call, const GradientArgs& args) {
  const DType dtype = call.in.k.dtype;
  const ChunkArgs& chunk = args.chunk;
  const int64_t slots = count_slots(chunk);
  return {rows_of(call.in.k),
          rows_of(call.in.q),
          rows_of(call.d_o),
          rows_map(args.G, dtype, args.padded_v, padded_k(chunk.problem.head_dim_k), slots),
          rows_map(args.Y, dtype, args.padded_v, kChunkRows, slots),
          lower_maps(chunk.factors.lower, dtype, count_items(chunk))};
}

void scan_states(const DeltaRuleBackwardProblem& problem, const ForwardArgs& args, const Context& context) {
  const int columns = scan_columns(problem.sizes, args, context.device.index);
  const ScanMaps maps = scan_maps(problem.args.in, {}, args);
  problem.args.in.k.dtype == DType::kBF16 ? launch_scan<DType::kBF16>(args, maps, columns, true, context)
                                          : launch_scan<DType::kF16>(args, maps, columns, true, context);
}

void scan_back(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, const Context& context) {
  const int columns = scan_columns(problem.sizes, args.chunk, context.device.index);
  ScanBackMaps maps{};
  if (args.chunk.num_chunks > 0) {
    const WindowMaps of = window_maps(problem.args, args);
    maps = {of.k, of.q, of.d_o, rows_of(problem.args.dv), of.lower, of.G, of.Y};
  }
  problem.args.in.k.dtype == DType::kBF16 ? launch_scan_back<DType::kBF16>(args, maps, columns, context)
                                          : launch_scan_back<DType::kF16>(args, maps, columns, context);
}

void gradients(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, int64_t blocks,
               const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  const WindowMaps of = window_maps(call, args);
  const int columns = columns_of_gradients(problem.sizes);
  const GradientMaps maps{of.k,
                          of.q,
                          rows_of(call.in.v),
                          of.d_o,
                          rows_of(call.dq),
                          rows_of(call.dk),
                          of.lower,
                          states_map(args.S, args.S_width, args.chunk, columns),
                          of.G,
                          of.Y};
  call.in.k.dtype == DType::kBF16 ? launch_gradients<DType::kBF16>(args, maps, blocks, context)
                                  : launch_gradients<DType::kF16>(args, maps, blocks, context);
}

void scan_channel_states(const DeltaRuleBackwardProblem& problem, const ForwardArgs& args, const Context& context) {
  const int columns = scan_columns(problem.sizes, args, context.device.index);
  const ChannelScanMaps maps = channel_scan_maps(problem.args.in, {}, args);
  problem.args.in.k.dtype == DType::kBF16 ? launch_channel_scan<DType::kBF16>(args, maps, columns, context)
                                          : launch_channel_scan<DType::kF16>(args, maps, columns, context);
}

void scan_channels_back(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, const Context& context) {
  const int columns = scan_columns(problem.sizes, args.chunk, context.device.index);
  ChannelScanBackMaps maps{};
  if (args.chunk.num_chunks > 0) {
    const DType dtype = problem.args.in.k.dtype;
    const int64_t slots = count_slots(args.chunk);
    const int K = padded_k(problem.sizes.head_dim_k);
    maps = {copies_map(args.chunk.factors.keys, dtype, K, count_copies(args.chunk)),
            rows_of(problem.args.d_o),
            rows_of(problem.args.dv),
            lower_maps(args.chunk.factors.lower, dtype, count_items(args.chunk)),
            rows_map(args.G, dtype, args.padded_v, K, slots),
            rows_map(args.Y, dtype, args.padded_v, kChunkRows, slots)};
  }
  problem.args.in.k.dtype == DType::kBF16 ? launch_channel_scan_back<DType::kBF16>(args, maps, columns, context)
                                          : launch_channel_scan_back<DType::kF16>(args, maps, columns, context);
}

// Whether the gradients of Hopper are asked first. fp16 has few exponents: raw gates, which decay by more than 2^-4 in 16
// tokens, would all be strong.
bool takes_channel_gradients(const DeltaRuleBackwardProblem& problem) {
  const DeltaRuleInputs& in = problem.args.in;
  const int K = padded_k(problem.sizes.head_dim_k);
  return (in.k.dtype == DType::kBF16 || !problem.args.options.gate_in_kernel) &&
         lacks_shared_memory(channel_gradients_bytes(K), in.q.device.index).empty();
}

// Whether the gates come, and dg leaves, by TMA.
bool have_gate_maps(const TensorView& g, const TensorView& dg) {
  const auto bytes = element_size(g.dtype);
  return has_token_map(g, bytes) && (!dg.present() || (dg.dtype == g.dtype && has_token_map(dg, bytes)));
}

// Whether the gradients of Hopper run, per channel for all but strong decays.
bool takes_gradients(const DeltaRuleBackwardProblem& problem) {
  if (problem.sizes.head_dim_k > kMostK) return false;
  return !chunk_16bit::has_decay_per_channel(problem) || takes_channel_gradients(problem);
}

// Those of Hopper, and the kernel of chunk_16bit for the pairs that they leave.
void channel_gradients(const DeltaRuleBackwardProblem& problem, const GradientArgs& args, int64_t blocks,
                       const std::function<void(const GradientArgs&, int64_t)>& others, const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  const DType dtype = call.in.k.dtype;
  const WindowMaps of = window_maps(call, args);
  const int K = padded_k(problem.sizes.head_dim_k);
  ChannelGradientMaps maps{of.k,
                           of.q,
                           rows_of(call.in.v),
                           of.d_o,
                           rows_of(call.dq),
                           rows_of(call.dk),
                           copies_map(args.chunk.factors.keys, dtype, K, count_copies(args.chunk)),
                           of.lower,
                           states_map(args.S, args.S_width, args.chunk, channel_gradient_columns(K)),
                           of.G,
                           of.Y};
  if (have_gate_maps(call.in.g, call.dg)) {
    const int columns = 128 / static_cast<int>(element_size(call.in.g.dtype));
    maps.has_gates = true;
    maps.g = token_map(call.in.g, kChunkRows, columns, Swizzle::k128);
    if (call.dg.present()) maps.dg = token_map(call.dg, kChunkRows, columns, Swizzle::k128);
  }
  const int64_t own = std::min(blocks, channel_gradients_on_one(K) * multiprocessors_of(context));
  dtype == DType::kBF16 ? launch_channel_gradients<DType::kBF16>(args, maps, own, context)
                        : launch_channel_gradients<DType::kF16>(args, maps, own, context);
  others(args, blocks);
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

TensorMap rows_map(const uint16_t* matrices, DType dtype, int rows, int columns, int64_t items) {
  TensorMapSpec spec{.data = matrices,
                     .dtype = dtype,
                     .rank = 3,
                     .sizes = {columns, rows, items},
                     .strides = {1, columns, int64_t{columns} * rows},
                     .box = {64, 64, 1},
                     .swizzle = Swizzle::k128};
  return tensor_map(spec);
}

std::string declines_backward(const DeltaRuleBackwardProblem& problem) {
  const DeltaRuleBackward& call = problem.args;
  const DeltaRuleInputs& in = call.in;
  const DeltaRuleSizes& sizes = problem.sizes;
  if (const std::string reason = chunk_16bit::declines_backward(problem); !reason.empty()) return reason;
  if (const std::string reason = declines_device(in.q.device.index); !reason.empty()) return reason;
  if (!call.d_o.present()) return "d_o must be there";
  const DType dtype = in.k.dtype;
  if (!has_token_map(in.q) || !has_token_map(in.k) || !has_token_map(in.v) || !has_token_map(call.d_o) ||
      !leaves_by_map(call.dq, dtype) || !leaves_by_map(call.dk, dtype) || !leaves_by_map(call.dv, dtype)) {
    return "q, k, v, d_o, dq, dk and dv must have one type, and rows that lie together, at multiples of 16 bytes";
  }
  if (!have_map(call.chunk_states)) return "strides of chunk_states must be positive";
  const auto sequences = device_sequences(in.cu_seqlens, sizes.num_sequences, sizes.tokens);
  // Of boxes, tokens and chunks, places are 32-bit numbers, and so are the parts of the scan for states, of 64 columns or more.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kChunkRows;
  const int64_t items = max_chunks(sequences, call.options.chunk_size) * sizes.num_value_heads;
  const int64_t parts = sizes.num_sequences * sizes.num_value_heads * ((sizes.head_dim_v + 63) / 64);
  if (sizes.tokens > kMost || items > kMost || parts > kMost) return "too many tokens";
  const int K = padded_k(sizes.head_dim_k);
  if (chunk_16bit::has_decay_per_channel(problem)) {
    return lacks_shared_memory(std::max(channel_scan_bytes(K), channel_scan_back_bytes(K)), in.q.device.index);
  }
  const size_t of_gradients = K <= kMostK ? gradients_bytes(K, columns_of_gradients(sizes)) : 0;
  return lacks_shared_memory(std::max({scan_bytes(K), scan_back_bytes(K), of_gradients}), in.q.device.index);
}

std::string config_text(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const ScanArgs args = cut_args(problem, context);
  return "K " + std::to_string(padded_k(problem.sizes.head_dim_k)) + ", columns " +
         std::to_string(scan_columns(problem.sizes, args, context.device.index)) + segments_text(args.segments.chunks) +
         (takes_gradients(problem) ? "" : ", gradients of chunk_16bit");
}

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  chunk_16bit::BackKernels kernels = chunk_16bit::back_kernels(problem, context);
  kernels.ready_columns = takes_gradients(problem) && runs_beside(problem, context) ? kGroupColumns : 0;
  kernels.segment_chunks = segment_chunks_of(problem, context);
  if (chunk_16bit::has_decay_per_channel(problem)) {
    kernels.scan_states = [&](const ForwardArgs& args) { scan_channel_states(problem, args, context); };
    kernels.scan_back = [&](const GradientArgs& args) { scan_channels_back(problem, args, context); };
    if (takes_gradients(problem)) {
      kernels.leaves_pairs = true;
      const int columns = channel_gradient_columns(padded_k(problem.sizes.head_dim_k));
      if (problem.sizes.head_dim_v > columns) kernels.key_sums = kRangeSums;
      kernels.gradients = [&, others = kernels.gradients](const GradientArgs& args, int64_t blocks) {
        channel_gradients(problem, args, blocks, others, context);
      };
    }
  } else {
    kernels.scan_states = [&](const ForwardArgs& args) { scan_states(problem, args, context); };
    kernels.scan_back = [&](const GradientArgs& args) { scan_back(problem, args, context); };
    if (takes_gradients(problem)) {
      kernels.gradients_on_one = gradients_on_one(columns_of_gradients(problem.sizes));
      kernels.key_sums = 0;
      kernels.follow = fills_device(problem, context);
      kernels.gradients = [&](const GradientArgs& args, int64_t blocks) { gradients(problem, args, blocks, context); };
    }
  }
  chunk_16bit::backward_in_windows(problem, kernels, context);
}

}  // namespace fastweight::cuda::chunk_sm90
