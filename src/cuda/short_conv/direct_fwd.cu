// Forward and decoding: a thread filters four neighbouring channels over a range of tokens.
//
//     z_t = bias + sum_i w_i x_{t-W+1+i},   y_t = act(z_t) + residual_t           the sum from the oldest tap on
//
// An item of a forward is a range of tokens and a block of channels. A range opens its window with the tokens before it
// or with the state, so ranges are independent and how a sequence is cut into them does not show in the results. An
// item of a step is a whole sequence. Tokens go in tiles, whose loads are all on their way before the first is used: 64
// bytes in each of 640 threads are 40 KB of a multiprocessor, where the memory of an H200 asks for about 30 KB.
#include <algorithm>

#include "cuda/common/activations.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/short_conv/kernels.h"
#include "cuda/short_conv/window.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kChannels = 4;  // of a thread
template <DType kType>
constexpr int kTile = kType == DType::kF32 ? 4 : 8;  // tokens: 64 bytes
constexpr int kMostThreads = 128;

struct Args {
  ShortConvDeviceProblem problem;
  ChunkedSequences ranges;  // a forward's, as chunks of the sequences
  int64_t num_ranges = 0;   // at most, over all sequences
  int64_t channel_blocks = 0;
  uint32_t threads = 0;  // of a block
  bool step = false;
  DeviceTensor state_indices;  // [N]; absent: the sequence's own number
  int64_t slots = 0;
};

// What a block does at a time.
struct WorkItem : Place {
  int64_t first = 0, end = 0;  // tokens to filter
  bool state = false;          // write the state after the sequence
};

// A forward's ranges, then its states; a step's sequences.
FW_HOST_DEVICE inline int64_t num_items(const Args& args) {
  const ShortConvDeviceProblem& p = args.problem;
  const int64_t sequences = args.step || p.state_after.present() ? p.sequences.count : 0;
  return (args.num_ranges + sequences) * args.channel_blocks;
}

__device__ __forceinline__ WorkItem work_item(const Args& args, int64_t number) {
  const ShortConvDeviceProblem& p = args.problem;
  const int64_t row = number / args.channel_blocks, block = number - row * args.channel_blocks;
  WorkItem item;
  item.channel = (block * blockDim.x + threadIdx.x) * kChannels;
  item.count = channels_from<kChannels>(p, item.channel);
  int64_t sequence = row;
  if (!args.step && row < args.num_ranges) {
    const ChunkSpan span = chunk_at(args.ranges, row);
    if (span.sequence < 0) {
      item.count = 0;
      return item;
    }
    sequence = span.sequence;
    item.first = span.position * args.ranges.chunk_size;
    item.end = item.first + span.length;
  } else if (!args.step) {
    sequence -= args.num_ranges;
    item.state = true;
  }
  set_sequence(p, sequence, item);
  if (args.step) {
    item.end = item.length;
    const DeviceTensor& indices = args.state_indices;
    if (indices.present()) item.slot = load_integer(indices.data, indices.dtype, sequence * indices.strides[0]);
    if (item.slot >= args.slots) item.slot = -1;
    item.state = item.slot >= 0 && item.length > 0;
  }
  return item;
}

// Tokens [t, t + tokens) of the item; zeros beyond.
template <DType kType>
__device__ __forceinline__ void load_tile(const DeviceTensor& x, const WorkItem& item, int64_t t, int tokens,
                                          RawVec4 (&raw)[kTile<kType>]) {
  const int64_t offset = token_offset(x, item, t), step = x.strides[1];
  // Apart, so that the loads stand one after the other.
  if (x.aligned_vec4) {
#pragma unroll
    for (int i = 0; i < kTile<kType>; ++i) {
      raw[i] = i < tokens ? load_vec4<kType>(element_at(x.data, kType, offset + i * step)) : RawVec4{};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTile<kType>; ++i) {
      raw[i] = i < tokens ? gather_vec4(x.data, kType, offset + i * step, x.strides[2], item.count) : RawVec4{};
    }
  }
}

__device__ __forceinline__ void add_residual(const DeviceTensor& residual, int64_t offset, int count,
                                             float (&z)[kChannels]) {
  with_type(residual.dtype, [&](auto type) {
    float values[kChannels];
    decode_vec4<type.value>(load_token<type.value, kChannels>(residual, offset, count), values);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) z[c] += values[c];
  });
}

// At most kTile tokens.
template <DType kType, int kTaps>
__device__ __forceinline__ void filter_tile(const ShortConvDeviceProblem& p, const WorkItem& item, int64_t t,
                                            int tokens, const float (&w)[kTaps][kChannels],
                                            const float (&bias)[kChannels], float (&window)[kTaps][kChannels]) {
  RawVec4 raw[kTile<kType>];
  load_tile<kType>(p.x, item, t, tokens, raw);
  const int64_t y = token_offset(p.y, item, t);
#pragma unroll
  for (int i = 0; i < kTile<kType>; ++i) {
    decode_token<kType>(raw[i], window[kTaps - 1]);
    float z[kChannels];
    convolve(p.width, w, bias, window, z);
    if (p.silu) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) z[c] = silu_approx(z[c]);
    }
    if (i < tokens) {
      if (p.residual.present()) add_residual(p.residual, token_offset(p.residual, item, t + i), item.count, z);
      store_token<kType>(p.y, y + i * p.y.strides[1], item.count, z);
    }
    advance_window(window);
  }
}

template <DType kType, int kTaps>
__device__ __forceinline__ void filter(const ShortConvDeviceProblem& p, const WorkItem& item) {
  float w[kTaps][kChannels], bias[kChannels], window[kTaps][kChannels];
  load_columns(p.w, 0, item.channel * p.w.strides[0], p.width, item.count, w);
  load_bias(p, item, bias);
  open_window<kType>(p, item, item.first, window);
#pragma unroll 1
  for (int64_t t = item.first; t < item.end; t += kTile<kType>) {
    const int64_t left = item.end - t;
    filter_tile<kType>(p, item, t, left < kTile<kType> ? static_cast<int>(left) : kTile<kType>, w, bias, window);
  }
}

// The last W inputs: tokens, and slots of the state before where there are fewer. Everything is read before anything is
// written, for in a step both states are the same memory.
template <DType kType, int kTaps>
__device__ __forceinline__ void store_state(const ShortConvDeviceProblem& p, const WorkItem& item) {
  const DeviceTensor &before = p.state_before, &after = p.state_after;
  float rows[kTaps][kChannels];
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int column = i - (kTaps - p.width);
    const int64_t t = item.length - p.width + column;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      rows[i][c] = 0;
      if (column < 0 || c >= item.count) continue;
      if (t >= 0) {
        rows[i][c] = load_float(p.x.data, kType, token_offset(p.x, item, t) + c * p.x.strides[2]);
      } else if (before.present()) {
        const int64_t offset = item.slot * before.strides[0] + (item.channel + c) * before.strides[1];
        rows[i][c] = load_float(before.data, before.dtype, offset + (t + p.width) * before.strides[2]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if (c >= item.count) continue;
    const int64_t offset = item.slot * after.strides[0] + (item.channel + c) * after.strides[1];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const int column = i - (kTaps - p.width);
      if (column >= 0) store_float(after.data, after.dtype, offset + column * after.strides[2], rows[i][c]);
    }
  }
}

// y of a sequence that has no slot.
template <DType kType>
__device__ __forceinline__ void clear_tokens(const ShortConvDeviceProblem& p, const WorkItem& item) {
  const float zeros[kChannels] = {};
  for (int64_t t = 0; t < item.length; ++t) {
    store_token<kType>(p.y, token_offset(p.y, item, t), item.count, zeros);
  }
}

template <DType kType, int kTaps>
__global__ void __launch_bounds__(kMostThreads, kTaps == 4 ? 5 : 2) direct_kernel(const __grid_constant__ Args args) {
  const ShortConvDeviceProblem& p = args.problem;
  const int64_t items = num_items(args);
  for (int64_t number = blockIdx.x; number < items; number += gridDim.x) {
    const WorkItem item = work_item(args, number);
    if (item.count <= 0) continue;
    if (item.slot < 0) {
      clear_tokens<kType>(p, item);
      continue;
    }
    if (item.first < item.end) filter<kType, kTaps>(p, item);
    if (item.state) store_state<kType, kTaps>(p, item);
  }
}

// Long ranges read fewer tokens twice, short ones make more blocks: enough of them to fill a large device. A window can
// be opened from 16 tokens.
int64_t range_tokens(const Sequences& sequences, int64_t channel_blocks) {
  constexpr int64_t kEnoughBlocks = 2048, kLeast = 16;
  static_assert(kLeast >= kMostTaps);
  int64_t tokens = 128;
  while (tokens > kLeast && max_chunks(sequences, tokens) * channel_blocks < kEnoughBlocks) tokens /= 2;
  return tokens;
}

void run(Args args, const Context& context) {
  const ShortConvDeviceProblem& p = args.problem;
  const int64_t items = num_items(args);
  if (items == 0) return;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)), args.threads};
  with_element_type(p.x.dtype, [&]<DType kType>() {
    if (p.width <= 4) {
      launch<direct_kernel<kType, 4>>("short_conv direct", context, shape, args);
    } else {
      launch<direct_kernel<kType, kMostTaps>>("short_conv direct", context, shape, args);
    }
  });
}

template <class Problem>
Args args_of(const Problem& problem) {
  Args args;
  args.problem = device_problem(problem);
  const int64_t groups = (args.problem.channels + kChannels - 1) / kChannels;
  args.threads = static_cast<uint32_t>(32 * std::min<int64_t>((groups + 31) / 32, kMostThreads / 32));
  args.channel_blocks = (groups + args.threads - 1) / args.threads;
  return args;
}

}  // namespace

void short_conv::direct_forward(const ShortConvForwardProblem& problem, const Context& context) {
  Args args = args_of(problem);
  const Sequences& sequences = args.problem.sequences;
  const NumberedChunks ranges(sequences, range_tokens(sequences, args.channel_blocks), context);
  args.ranges = ranges.chunked();
  args.num_ranges = ranges.count();
  run(args, context);
}

void short_conv::direct_step(const ShortConvStepProblem& problem, const Context& context) {
  Args args = args_of(problem);
  args.step = true;
  args.state_indices = device_tensor(problem.args.state_indices);
  args.slots = problem.args.state.shape[0];
  run(args, context);
}

}  // namespace fastweight::cuda
