// Backward: one walk over the tokens with a window of inputs and a window of deltas.
//
//     delta_t = dy_t act'(z_t)                                   0 before the start and past the end
//     dw_i   += delta_t x_{t-W+1+i},   dbias += delta_t
//     dx_p    = sum_{k=0..W-1} w_k delta_{p+W-1-k}               begun with the final state's gradient of position p
//
// When delta_t is known, so is dx of position p = t - W + 1; positions -W .. -1 are the slots of the initial state. The
// sum for dx runs from the latest token to the earliest, so that a gradient that arrives through a state in fp32 meets
// the same sum.
//
// An item is a range of kRange tokens and a block of channels; it computes the W - 1 deltas that follow it once more.
// The slots of an initial state are an item of their own. The sums of a range for dw and dbias go to scratch memory; a
// second kernel adds the ranges, in fp64. How a sequence is cut depends on its length alone.
//
// The filter meets the inputs right-aligned and the deltas left-aligned. For W = 4 these are the same registers and a
// thread has four channels; any other width has both, and one channel.
#include <algorithm>

#include "cuda/common/activations.cuh"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/short_conv/kernels.h"
#include "cuda/short_conv/window.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRange = 64;  // tokens
constexpr int kTile = 4;    // tokens whose loads are on their way together
static_assert(kRange >= kMostTaps);

struct Args {
  ShortConvDeviceProblem problem;
  DeviceTensor dy;             // [B, T, D]; absent: 0
  DeviceTensor d_final_state;  // [N, D, W]; absent: 0
  DeviceTensor dx;             // [B, T, D]; optional, like the next
  DeviceTensor d_initial_state;
  ChunkedSequences ranges;
  int64_t num_ranges = 0;  // at most
  int64_t channel_blocks = 0;
  float* sums = nullptr;  // [ranges][W + 1][D]: the taps, then the bias
};

struct Walk : Place {
  int64_t first = 0;  // the token at which it begins
  int64_t end = 0;    // of the range
  bool state = false;
};

// s (1 + z (1 - s)), s = 1 / (1 + exp(-z))
__device__ __forceinline__ float silu_derivative(float z) {
  const float s = reciprocal_approx(1.0f + exp_approx(-z));
  return s * fmaf(z, 1.0f - s, 1.0f);
}

template <int kTaps, int kChannels>
struct Filter {
  static constexpr bool kExact = kTaps == 4;  // W = kTaps
  float w[kTaps][kChannels], bias[kChannels];
  float left[kExact ? 1 : kTaps][kChannels];  // row k is tap k

  __device__ __forceinline__ float tap(int k, int c) const {
    if constexpr (kExact) {
      return w[k][c];
    } else {
      return left[k][c];
    }
  }
};

template <int kTaps, int kChannels>
__device__ __forceinline__ void load_filter(const ShortConvDeviceProblem& p, const Place& place,
                                            Filter<kTaps, kChannels>& filter) {
  const int64_t offset = place.channel * p.w.strides[0];
  load_columns(p.w, 0, offset, p.width, place.count, filter.w);
  load_bias(p, place, filter.bias);
  if constexpr (!filter.kExact) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const bool there = k < p.width && c < place.count;
        const int64_t at = offset + c * p.w.strides[0] + k * p.w.strides[1];
        filter.left[k][c] = there ? load_float(p.w.data, p.w.dtype, at) : 0.0f;
      }
    }
  }
}

template <int kTaps, int kChannels>
struct Sums {
  float w[kTaps][kChannels], bias[kChannels];
};

// What the final state's gradient gives position p.
template <int kChannels>
__device__ __forceinline__ void begin_gradient(const Args& args, const Place& place, int64_t p,
                                               float (&gradient)[kChannels]) {
  const DeviceTensor& x = args.d_final_state;
  const int64_t slot = p - (place.length - args.problem.width);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    gradient[c] = 0;
    if (!x.present() || slot < 0 || c >= place.count) continue;
    const int64_t at = place.slot * x.strides[0] + (place.channel + c) * x.strides[1] + slot * x.strides[2];
    gradient[c] = load_float(x.data, x.dtype, at);
  }
}

template <DType kType, int kChannels>
__device__ __forceinline__ void store_gradient(const Args& args, const Place& place, int64_t p,
                                               const float (&gradient)[kChannels]) {
  if (p >= 0) {
    if (args.dx.present()) store_token<kType>(args.dx, token_offset(args.dx, place, p), place.count, gradient);
    return;
  }
  const DeviceTensor& out = args.d_initial_state;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if (c >= place.count) continue;
    const int64_t at = place.slot * out.strides[0] + (place.channel + c) * out.strides[1];
    store_float(out.data, out.dtype, at + (p + args.problem.width) * out.strides[2], gradient[c]);
  }
}

// Positions from `lowest` on, up to the one that ends with token `last` - 1; sums of tokens before walk.end.
template <DType kType, int kTaps, int kChannels>
__device__ __forceinline__ void run_walk(const Args& args, const Walk& walk, int64_t last, int64_t lowest,
                                         Sums<kTaps, kChannels>& sums) {
  const ShortConvDeviceProblem& p = args.problem;
  Filter<kTaps, kChannels> filter;
  load_filter(p, walk, filter);
  float x[kTaps][kChannels], delta[kTaps][kChannels] = {};  // delta: row k is that of k tokens ago
  open_window<kType>(p, walk, walk.first, x);
  const bool has_dy = args.dy.present();
#pragma unroll 1
  for (int64_t t = walk.first; t < last; t += kTile) {
    RawVec4 raw_x[kTile];
    float dy[kTile][kChannels];
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const bool there = has_dy && t + i < walk.length && t + i < last;
      raw_x[i] = there ? load_token<kType, kChannels>(p.x, token_offset(p.x, walk, t + i), walk.count) : RawVec4{};
    }
    with_type(args.dy.dtype, [&](auto type) {
      RawVec4 raw[kTile];
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        const bool there = has_dy && t + i < walk.length && t + i < last;
        raw[i] = {};
        if (there) raw[i] = load_token<type.value, kChannels>(args.dy, token_offset(args.dy, walk, t + i), walk.count);
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) decode_token<type.value>(raw[i], dy[i]);
    });
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      decode_token<kType>(raw_x[i], x[kTaps - 1]);
#pragma unroll
      for (int k = kTaps - 1; k > 0; --k) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) delta[k][c] = delta[k - 1][c];
      }
      float z[kChannels];
      convolve(p.width, filter.w, filter.bias, x, z);
      const bool inside = t + i < walk.length;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        delta[0][c] = inside ? (p.silu ? dy[i][c] * silu_derivative(z[c]) : dy[i][c]) : 0.0f;
      }
      if (t + i < walk.end) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          sums.bias[c] += delta[0][c];
#pragma unroll
          for (int tap = 0; tap < kTaps; ++tap) {
            if (tap >= kTaps - p.width) sums.w[tap][c] = fmaf(delta[0][c], x[tap][c], sums.w[tap][c]);
          }
        }
      }
      const int64_t position = t + i - p.width + 1;
      if (position >= lowest && t + i < last) {
        float gradient[kChannels];
        begin_gradient(args, walk, position, gradient);
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (k >= p.width) continue;
#pragma unroll
          for (int c = 0; c < kChannels; ++c) gradient[c] = fmaf(filter.tap(k, c), delta[k][c], gradient[c]);
        }
        store_gradient<kType>(args, walk, position, gradient);
      }
      advance_window(x);
    }
  }
}

template <int kTaps, int kChannels>
__device__ __forceinline__ void store_sums(const Args& args, int64_t range, const Place& place,
                                           const Sums<kTaps, kChannels>& sums) {
  const ShortConvDeviceProblem& p = args.problem;
  float* const out = args.sums + range * (p.width + 1) * p.channels + place.channel;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if (c >= place.count) continue;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const int i = tap - (kTaps - p.width);
      if (i >= 0) out[i * p.channels + c] = sums.w[tap][c];
    }
    out[p.width * p.channels + c] = sums.bias[c];
  }
}

template <DType kType, int kTaps, int kChannels>
__global__ void __launch_bounds__(kThreads, 3) backward_kernel(const __grid_constant__ Args args) {
  const ShortConvDeviceProblem& p = args.problem;
  const int64_t states = args.d_initial_state.present() ? p.sequences.count : 0;
  const int64_t items = (args.num_ranges + states) * args.channel_blocks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t row = item / args.channel_blocks, block = item - row * args.channel_blocks;
    Walk walk;
    walk.channel = (block * kThreads + threadIdx.x) * kChannels;
    walk.count = channels_from<kChannels>(p, walk.channel);
    if (walk.count <= 0) continue;
    Sums<kTaps, kChannels> sums{};
    if (row >= args.num_ranges) {
      set_sequence(p, row - args.num_ranges, walk);
      float oldest[kChannels];  // slot 0, which reaches no output
      begin_gradient(args, walk, -p.width, oldest);
      store_gradient<kType>(args, walk, -p.width, oldest);
      run_walk<kType>(args, walk, p.width - 1, -p.width, sums);
      continue;
    }
    const ChunkSpan span = chunk_at(args.ranges, row);
    if (span.sequence >= 0) {
      set_sequence(p, span.sequence, walk);
      walk.first = span.position * kRange;
      walk.end = walk.first + span.length;
      run_walk<kType>(args, walk, walk.end + p.width - 1, walk.first, sums);
    }
    store_sums(args, row, walk, sums);
  }
}

struct FinishArgs {
  const float* sums = nullptr;
  int64_t num_ranges = 0, channels = 0;
  int32_t width = 0;
  DeviceTensor dw, dbias;
};

constexpr int kSumsPerBlock = 32, kLanesPerSum = 8;

// The sums of the ranges to the caller. A block makes 32 neighbouring sums at a time, each by 8 threads that add every
// eighth range; what they have is added in their order.
__global__ void __launch_bounds__(kSumsPerBlock* kLanesPerSum)
    conv_sums_kernel(const __grid_constant__ FinishArgs args) {
  __shared__ double partial_sums[kSumsPerBlock * kLanesPerSum];
  const int column = threadIdx.x % kSumsPerBlock, lane = threadIdx.x / kSumsPerBlock;
  const int64_t numbers = (args.width + 1) * args.channels;
  for (int64_t base = int64_t{blockIdx.x} * kSumsPerBlock; base < numbers; base += int64_t{gridDim.x} * kSumsPerBlock) {
    const int64_t number = base + column;
    double sum = 0;
    for (int64_t range = lane; number < numbers && range < args.num_ranges; range += kLanesPerSum) {
      sum += static_cast<double>(args.sums[range * numbers + number]);
    }
    partial_sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && number < numbers) {
      for (int other = 1; other < kLanesPerSum; ++other) sum += partial_sums[other * kSumsPerBlock + column];
      const int64_t tap = number / args.channels, channel = number - tap * args.channels;
      const DeviceTensor& out = tap < args.width ? args.dw : args.dbias;
      const int64_t at = channel * out.strides[0] + (tap < args.width ? tap * out.strides[1] : int64_t{0});
      if (out.present()) store_float(out.data, out.dtype, at, static_cast<float>(sum));
    }
    __syncthreads();  // before the next numbers overwrite the partial sums
  }
}

unsigned blocks_for(int64_t items) { return static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)); }

}  // namespace

void short_conv::direct_backward(const ShortConvBackwardProblem& problem, const Context& context) {
  const ShortConvBackward& backward = problem.args;
  Args args;
  args.problem = device_problem(problem);
  args.dy = device_tensor(backward.dy);
  args.d_final_state = device_tensor(backward.d_final_state);
  args.dx = device_tensor(backward.dx);
  args.d_initial_state = device_tensor(backward.d_initial_state);
  const ShortConvDeviceProblem& p = args.problem;
  const NumberedChunks ranges(p.sequences, kRange, context);
  args.ranges = ranges.chunked();
  args.num_ranges = ranges.count();
  const int64_t numbers = (p.width + 1) * p.channels;
  const DeviceWorkspace workspace(context, static_cast<size_t>(args.num_ranges * numbers) * sizeof(float));
  args.sums = static_cast<float*>(workspace.data());

  const int channels = p.width == 4 ? 4 : 1;
  args.channel_blocks = (p.channels + channels * kThreads - 1) / (channels * kThreads);
  const int64_t rows = args.num_ranges + (args.d_initial_state.present() ? p.sequences.count : 0);
  if (rows > 0) {
    const LaunchShape shape{blocks_for(rows * args.channel_blocks), kThreads};
    with_element_type(p.x.dtype, [&]<DType kType>() {
      if (channels == 4) {
        launch<backward_kernel<kType, 4, 4>>("short_conv backward", context, shape, args);
      } else {
        launch<backward_kernel<kType, kMostTaps, 1>>("short_conv backward", context, shape, args);
      }
    });
  }
  FinishArgs finish;
  finish.sums = args.sums;
  finish.num_ranges = args.num_ranges;
  finish.channels = p.channels;
  finish.width = p.width;
  finish.dw = device_tensor(backward.dw);
  finish.dbias = device_tensor(backward.dbias);
  if (!finish.dw.present() && !finish.dbias.present()) return;
  launch<conv_sums_kernel>("short_conv sums", context,
                           {blocks_for((numbers + kSumsPerBlock - 1) / kSumsPerBlock), kSumsPerBlock * kLanesPerSum},
                           finish);
}

}  // namespace fastweight::cuda
