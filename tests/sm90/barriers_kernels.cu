#include "tests/sm90/barriers_kernels.h"

#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kStages = 3, kThreads = kRingReaders + 128;
constexpr uint32_t kTileBytes = kRingFloats * sizeof(float);

struct alignas(1024) Ring {
  TransactionBarrier filled[kStages], free[kStages];
  alignas(128) float tile[kStages][kRingFloats];
};

__global__ void __launch_bounds__(kThreads, 1) reverse_kernel(const float* in, int tiles, float* out) {
  auto& s = aligned_shared<Ring>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      s.filled[i].init(1);
      s.free[i].init(kRingReaders);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kRingReaders) {
    give_registers<40>();
    if (uniform_warp() != kRingReaders / kWarpSize || !elect_one()) return;
    for (int t = 0; t < tiles; ++t) {
      const int stage = t % kStages;
      s.free[stage].wait(static_cast<uint32_t>(t / kStages % 2 ^ 1));
      s.filled[stage].arrive_expecting(kTileBytes);
      load_bytes(shared_address(s.tile[stage]), in + t * kRingFloats, kTileBytes, s.filled[stage]);
    }
  } else {
    take_registers<232>();
    const int i = static_cast<int>(threadIdx.x);
    for (int t = 0; t < tiles; ++t) {
      const int stage = t % kStages;
      s.filled[stage].wait(static_cast<uint32_t>(t / kStages % 2));
      const float value = s.tile[stage][kRingFloats - 1 - i];
      s.free[stage].arrive();
      out[t * kRingFloats + i] = value + static_cast<float>(t);
    }
  }
}

__global__ void elect_kernel(uint32_t* counts, uint32_t* same) {
  const bool first = elect_one(), second = elect_one();
  const uint32_t lanes = __ballot_sync(kAllLanes, first), again = __ballot_sync(kAllLanes, second);
  if (threadIdx.x % kWarpSize != 0) return;
  counts[threadIdx.x / kWarpSize] = static_cast<uint32_t>((lanes != 0) + ((lanes & (lanes - 1)) != 0));
  same[threadIdx.x / kWarpSize] = lanes == again;
}

struct alignas(1024) Numbers {
  int of_group[kRotatingGroups][128];
};

__global__ void rotate_kernel(int turns, int* out) {
  const int group = uniform_warp() / 4, own = static_cast<int>(threadIdx.x) % 128;
  int(&numbers)[128] = aligned_shared<Numbers>().of_group[group];
  int number = own;
  for (int turn = 0; turn < turns * (group + 1); ++turn) {
    numbers[own] = number;
    warpgroup_barrier(group);
    number = numbers[(own + kRotation) % 128] + 1;
    warpgroup_barrier(group);
  }
  out[threadIdx.x] = number;
}

struct alignas(1024) Phases {
  TransactionBarrier written, read;
  int values[4];
};

__global__ void phases_kernel(int phases, int* seen) {
  auto& s = aligned_shared<Phases>();
  if (threadIdx.x == 0) {
    s.written.init(5);
    s.read.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int phase = 0; phase < phases; ++phase) {
    const auto parity = static_cast<uint32_t>(phase % 2);
    s.read.wait(parity ^ 1);
    if (lane == 0) {
      s.values[warp] = (warp + 1) * (phase + 1);
      s.written.arrive();
    }
    if (threadIdx.x == 1) s.written.arrive_expecting(0);
    if (warp == 3 && lane == 31) {
      s.written.wait(parity);
      seen[phase] = s.values[0] + s.values[1] + s.values[2] + s.values[3];
      s.read.arrive();
    }
    __syncwarp();
  }
}

}  // namespace

void reverse_tiles(const float* in, int tiles, float* out) {
  launch<reverse_kernel>("reverse", {}, {1, kThreads, sizeof(Ring)}, in, tiles, out);
}

void elect(uint32_t* counts, uint32_t* same) { launch<elect_kernel>("elect", {}, {1, 256}, counts, same); }

void rotate_in_groups(int turns, int* out) {
  launch<rotate_kernel>("rotate", {}, {1, 128 * kRotatingGroups, sizeof(Numbers)}, turns, out);
}

void count_phases(int phases, int* seen) {
  launch<phases_kernel>("phases", {}, {1, 128, sizeof(Phases)}, phases, seen);
}

}  // namespace fastweight::cuda
