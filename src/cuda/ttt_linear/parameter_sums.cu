// A warp for one column of dw or db: every lane adds each 32nd sequence in order, then the lanes are added in a tree.
#include "cuda/ttt_linear/parameter_sums.h"

#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"

namespace fastweight::cuda::ttt {
namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(kWarps* kWarpSize)
    parameter_sums_kernel(const double* sums, int64_t sequences, int64_t columns, int head_dim,
                          const __grid_constant__ DeviceTensor dw, const __grid_constant__ DeviceTensor db) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  for (int64_t column = warp; column < columns; column += int64_t{gridDim.x} * kWarps) {
    double sum = 0;
    for (int64_t n = lane; n < sequences; n += kWarpSize) sum += sums[n * columns + column];
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    const int64_t head = column / (2 * head_dim), d = column % head_dim;
    const DeviceTensor& x = column % (2 * head_dim) < head_dim ? dw : db;
    if (lane == 0 && x.present()) {
      store_float(x.data, x.dtype, head * x.strides[0] + d * x.strides[1], static_cast<float>(sum));
    }
  }
}

}  // namespace

void add_parameter_sums(const double* sums, const DeviceProblem& problem, const DeviceTensor& dw,
                        const DeviceTensor& db, const Context& context) {
  if (!dw.present() && !db.present()) return;
  const int64_t columns = int64_t{problem.num_heads} * 2 * problem.head_dim;
  const int64_t blocks = std::min<int64_t>((columns + kWarps - 1) / kWarps, 1 << 20);
  launch<parameter_sums_kernel>("ttt_linear parameter sums", context,
                                {static_cast<unsigned>(blocks), kWarps * kWarpSize}, sums, problem.sequences.count,
                                columns, problem.head_dim, dw, db);
}

}  // namespace fastweight::cuda::ttt
