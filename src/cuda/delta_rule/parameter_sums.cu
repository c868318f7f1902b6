// dA_log and ddt_bias: sums over all chunks of what parameter_sums.h describes.
//
// A block has up to 32 neighbouring numbers of one value head. Of the threads that have one of them, thread `lane` adds
// chunks lane, lane + lanes, ..; what they have is added in their order. All in fp64.
#include "cuda/delta_rule/parameter_sums.h"

#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostColumns = 32;

__device__ __forceinline__ int64_t existing_chunks(const ParameterSums& args, int64_t most) {
  const ChunkedSequences& chunked = args.chunked;
  // Offsets out of order may claim more chunks than there is scratch memory for.
  return chunked.first_chunk == nullptr ? most : min(chunked.first_chunk[chunked.sequences.count], most);
}

__device__ __forceinline__ void store_sum(const ParameterSums& args, int64_t head, int64_t at, double sum) {
  const DeviceTensor& out = at == 0 ? args.da_log : args.ddt_bias;
  if (!out.present()) return;
  const int64_t channel = at == 0 || args.bias_width == 1 ? 0 : (at - 1) * out.strides[1];
  store_float(out.data, out.dtype, head * out.strides[0] + channel, static_cast<float>(sum));
}

__global__ void __launch_bounds__(kThreads)
    parameter_sums_kernel(const __grid_constant__ ParameterSums args, int columns, int64_t most) {
  __shared__ double lane_sums[kThreads];
  const int lanes = kThreads / columns, column = threadIdx.x % columns, lane = threadIdx.x / columns;
  const int64_t chunks = existing_chunks(args, most), width = args.width(), step = args.num_value_heads * width;
  const int64_t groups = (width + columns - 1) / columns, items = args.num_value_heads * groups;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t head = item / groups, at = (item - head * groups) * columns + column;
    double sum = 0;
    if (at < width) {
      const double* parts = args.parts + head * width + at;
#pragma unroll 4
      for (int64_t chunk = lane; chunk < chunks; chunk += lanes) sum += parts[chunk * step];
    }
    lane_sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && at < width) {
      for (int other = 1; other < lanes; ++other) sum += lane_sums[other * columns + column];
      store_sum(args, head, at, sum);
    }
    __syncthreads();  // before the next item overwrites the sums
  }
}

}  // namespace

void add_parameter_sums(const ParameterSums& sums, const Context& context) {
  if (!sums.wanted()) return;
  int columns = 2;
  while (columns < sums.width() && columns < kMostColumns) columns *= 2;
  const int64_t items = sums.num_value_heads * ((sums.width() + columns - 1) / columns);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, 1 << 30));
  const int64_t most = max_chunks(sums.chunked.sequences, sums.chunked.chunk_size);
  launch<parameter_sums_kernel>("delta_rule parameter sums", context, {blocks, kThreads}, sums, columns, most);
}

}  // namespace fastweight::cuda
