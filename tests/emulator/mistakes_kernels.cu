#include "tests/emulator/mistakes_kernels.h"

#include "cuda/common/launch.h"
#include "cuda/sm90/tma.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kSize = 64, kThreads = 128;
using Tile = PanelTile<kSize, kSize>;

struct alignas(1024) Operand {
  uint16_t b[kSize * kSize];
};

__global__ void product_kernel(Mistake mistake, const uint16_t* a, const uint16_t* b, float* c) {
  auto& s = aligned_shared<Operand>();
  const Tile tile(s.b);
  for (int i = static_cast<int>(threadIdx.x); i < kSize * kSize; i += kThreads) {
    const uint32_t address = tile.address(i / kSize, i % kSize / 8, 0) - tile.start;
    s.b[address / 2 + static_cast<uint32_t>(i % 8)] = b[i];
  }
  fence_async_proxy();
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t rA[4][4];
  for (int m = 0; m < 4; ++m) {
    for (int i = 0; i < 4; ++i) {
      const uint16_t* pair = a + (16 * warp + lane / 4 + i % 2 * 8) * kSize + 16 * m + lane % 4 * 2 + i / 2 * 8;
      rA[m][i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
  }
  if (mistake == Mistake::kThreeWarps && warp == 2) return;
  float sums[8][4];
  if (mistake != Mistake::kNoFence) wgmma_fence(sums, rA);
  const int outside = mistake == Mistake::kOperandOutside ? 64 : 0;
  const int other = mistake == Mistake::kTwoDescriptors && warp == 3 ? 8 : 0;
  for (int m = 0; m < 4; ++m) {
    wgmma<DType::kBF16, kSize>(sums, rA[m], tile.along_columns(outside, m), m > 0);
    if (other > 0) wgmma<DType::kBF16, kSize>(sums, rA[m], tile.along_rows(other, m));
  }
  wgmma_commit();
  if (mistake == Mistake::kSumsWrittenEarly && threadIdx.x == 5) sums[7][3] = 0;
  if (mistake == Mistake::kFragmentWrittenEarly && threadIdx.x == 77) rA[2][1] ^= 1;
  if (mistake == Mistake::kOperandWrittenEarly && threadIdx.x == 9) s.b[100] ^= 1;
  const auto store = [&] {
    for (int n = 0; n < 8; ++n) {
      for (int e = 0; e < 4; ++e) {
        c[(16 * warp + lane / 4 + e / 2 * 8) * kSize + 8 * n + lane % 4 * 2 + e % 2] = sums[n][e];
      }
    }
  };
  if (mistake == Mistake::kSumsReadEarly) store();
  wgmma_wait<0>(sums);
  if (mistake != Mistake::kSumsReadEarly) store();
}

constexpr uint32_t kBoxBytes = 32 * 64 * 2;

struct alignas(1024) Box {
  unsigned char bytes[kBoxBytes];
  TransactionBarrier filled;
};

__global__ void copy_kernel(Mistake mistake, const __grid_constant__ TensorMap from,
                            const __grid_constant__ TensorMap to) {
  auto& s = aligned_shared<Box>();
  if (threadIdx.x != 0) return;
  if (mistake != Mistake::kBarrierNotInitialized) s.filled.init(1);
  fence_barrier_init();
  s.filled.arrive_expecting(mistake == Mistake::kTooFewBytes ? kBoxBytes + 16 : kBoxBytes);
  if (mistake == Mistake::kTooManyArrivals) s.filled.arrive();
  const uint32_t box = shared_address(s.bytes) + (mistake == Mistake::kBoxNotAligned ? 64 : 0);
  load_box(box, from, {0, 0}, s.filled);
  if (mistake == Mistake::kLoadNotWaitedFor) return;
  if (mistake != Mistake::kLoadReadEarly) s.filled.wait(0);
  store_box(to, {0, 0}, box);
  commit_stores();
  if (mistake == Mistake::kSourceWrittenEarly) s.bytes[17] ^= 1;
  if (mistake != Mistake::kStoreNotWaitedFor) wait_stores_read<0>();
  s.filled.wait(0);
}

__global__ void count_kernel(float* to) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  to[threadIdx.x] = static_cast<float>(threadIdx.x);
}
__global__ void pass_on_kernel(Mistake mistake, const float* from, float* to) {
  float x = from[threadIdx.x];
  if (mistake != Mistake::kNoWait) wait_for_previous_kernels();
  if (mistake != Mistake::kReadBeforeWaiting) x = from[threadIdx.x];
  to[threadIdx.x] = x;
}

// Five warpgroups begin with 96 registers each.
__global__ void registers_kernel(Mistake mistake) {
  if (threadIdx.x >= 4 * kThreads) {
    give_registers<24>();
  } else if (mistake == Mistake::kTooManyRegisters) {
    take_registers<120>();
  } else {
    take_registers<112>();
  }
}

}  // namespace

void multiply_with(Mistake mistake, const void* a, const void* b, float* c) {
  launch<product_kernel>("product", {}, {1, kThreads, sizeof(Operand)}, mistake, static_cast<const uint16_t*>(a),
                         static_cast<const uint16_t*>(b), c);
}

void copy_with(Mistake mistake, const TensorMap& from, const TensorMap& to) {
  launch<copy_kernel>("copy", {}, {1, 32, sizeof(Box)}, mistake, from, to);
}

void count_with(Mistake mistake, float* b, float* c) {
  launch<count_kernel>("count", {}, {1, kSize, 0, true}, b);
  launch<pass_on_kernel>("pass on", {}, {1, kSize, 0, true}, mistake, b, c);
}

void share_registers_with(Mistake mistake) { launch<registers_kernel>("registers", {}, {1, 5 * kThreads}, mistake); }

}  // namespace fastweight::cuda
