// first_chunk[n] = sum over m < n of ceil(length_m / C): an exclusive prefix sum by one block, 1024 sequences at a
// time.
#include "cuda/common/first_chunks.h"

#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;

// Inclusive over the lanes of a warp.
__device__ int64_t warp_prefix_sum(int64_t value, int lane) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// Chunks of a sequence; with a group, stretches in whole groups.
__device__ int64_t count_in(int64_t length, int64_t tokens, int64_t group) {
  return group == 0 ? chunks_of(length, tokens) : length / (group * tokens) * group;
}

__global__ void __launch_bounds__(kThreads)
    first_chunks_kernel(const Sequences sequences, int64_t chunk_size, int64_t group, int64_t* first_chunk) {
  __shared__ int64_t warp_sums[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int64_t before = 0;  // chunks of the earlier tiles
  for (int64_t tile = 0; tile < sequences.count; tile += kThreads) {
    const int64_t n = tile + threadIdx.x;
    const int64_t own = n < sequences.count ? count_in(sequence_at(sequences, n).length, chunk_size, group) : 0;
    const int64_t in_warp = warp_prefix_sum(own, lane);
    if (lane == kWarpSize - 1) warp_sums[warp] = in_warp;
    __syncthreads();
    if (warp == 0) warp_sums[lane] = warp_prefix_sum(warp_sums[lane], lane);
    __syncthreads();
    const int64_t earlier_warps = warp == 0 ? 0 : warp_sums[warp - 1];
    if (n < sequences.count) first_chunk[n] = before + earlier_warps + in_warp - own;
    before += warp_sums[kWarps - 1];
    __syncthreads();  // before the next tile overwrites warp_sums
  }
  if (threadIdx.x == 0) first_chunk[sequences.count] = before;
}

}  // namespace

void build_first_chunks(const Sequences& sequences, int64_t chunk_size, int64_t* first_chunk, const Context& context) {
  launch<first_chunks_kernel>("first_chunks", context, {1, kThreads}, sequences, chunk_size, int64_t{0}, first_chunk);
}

void build_first_stretches(const Sequences& sequences, int64_t tokens, int64_t group, int64_t* first,
                           const Context& context) {
  launch<first_chunks_kernel>("first_stretches", context, {1, kThreads}, sequences, tokens, group, first);
}

NumberedChunks::NumberedChunks(const Sequences& sequences, int64_t chunk_size, const Context& context)
    : workspace_(context,
                 sequences.offsets == nullptr ? 0 : static_cast<size_t>(sequences.count + 1) * sizeof(int64_t)),
      chunked_{sequences, nullptr, chunk_size} {
  if (sequences.offsets == nullptr) return;
  auto* const first_chunk = static_cast<int64_t*>(workspace_.data());
  build_first_chunks(sequences, chunk_size, first_chunk, context);
  chunked_.first_chunk = first_chunk;
}

}  // namespace fastweight::cuda
