#include "tests/cuda/warp_roles_kernels.h"

#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/common/warp_roles.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 2 * kRoleThreads;
enum { kFree = 1, kFilled, kMeeting };

struct Numbers {
  int of_thread[kThreads];
};

__global__ void __launch_bounds__(kThreads, 1) hand_over_kernel(int turns, int* out) {
  int(&buffer)[kThreads] = dynamic_shared<Numbers>().of_thread;
  const WarpSignal<kFree> free{kThreads};
  const WarpSignal<kFilled> filled{kThreads};
  const int block = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x) % kRoleThreads;
  if (uniform_warp() < kRoleThreads / kWarpSize) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      free.wait();
      buffer[i] = 1000 * block + turn + i;
      filled.arrive();
    }
  } else {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      free.arrive();
      filled.wait();
      out[(block * turns + turn) * kRoleThreads + i] = buffer[(i + kWarpSize) % kRoleThreads];
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) meet_apart_kernel(int turns, int* out) {
  int(&numbers)[kThreads] = dynamic_shared<Numbers>().of_thread;
  const WarpSignal<kMeeting> meeting{kRoleThreads};
  const int thread = static_cast<int>(threadIdx.x);
  const bool meets = uniform_warp() < kRoleThreads / kWarpSize;
  int number = thread;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    for (int i = 0; meets && i < turn % 3; ++i) meeting.wait();
    numbers[thread] = number;
    __syncthreads();
    number = numbers[(thread + kRoleThreads) % kThreads] + 1;
    __syncthreads();
  }
  out[static_cast<int>(blockIdx.x) * kThreads + thread] = number;
}

}  // namespace

void hand_over(int blocks, int turns, int* out) {
  launch<hand_over_kernel>("hand_over", {}, {static_cast<unsigned>(blocks), kThreads, sizeof(Numbers)}, turns, out);
}

void meet_apart(int blocks, int turns, int* out) {
  launch<meet_apart_kernel>("meet_apart", {}, {static_cast<unsigned>(blocks), kThreads, sizeof(Numbers)}, turns, out);
}

}  // namespace fastweight::cuda
