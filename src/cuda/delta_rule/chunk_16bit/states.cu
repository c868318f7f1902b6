// The states before the chunks that a caller kept in another type or order, as the gradients read them: 16-bit rows along
// K, padded with zeros. A block per (chunk, value head).
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/gradient.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    round_states_kernel(const __grid_constant__ ChunkArgs args, DeviceStates from, DeviceStates to, int width) {
  wait_for_previous_kernels();
  const int K = args.problem.head_dim_k, V = args.problem.head_dim_v;
  for_each_item(args, [&](int64_t, const ChunkSpan& span, int head) {
    const int64_t chunk = first_chunk_of(args.chunked, span.sequence) + span.position;
    const auto offset = [&](const DeviceStates& states) {
      const int64_t* strides = states.outer_strides;
      return span.batch * strides[0] + chunk * strides[1] + head * strides[2];
    };
    // Neighbouring threads read neighbouring elements.
    const bool along_k = from.k_stride < from.v_stride;
    for (int at = threadIdx.x; at < width * V; at += kThreads) {
      const int k = along_k ? at % width : at / V, v = along_k ? at / width : at % V;
      const float x =
          k < K ? load_float(from.data, from.dtype, offset(from) + k * from.k_stride + v * from.v_stride) : 0;
      store_float(to.data, to.dtype, offset(to) + k + v * to.v_stride, x);
    }
  });
}

}  // namespace

void launch_round_states(const ChunkArgs& args, const DeviceStates& from, const DeviceStates& to, int width,
                         const Context& context) {
  launch<round_states_kernel>("delta_rule chunk_16bit round states", context,
                              {blocks_for_items(args), kThreads, 0, true}, args, from, to, width);
}

}  // namespace fastweight::cuda::chunk_16bit
