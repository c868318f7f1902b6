// How the warps of a block and the asynchronous units of Hopper tell each other what is ready. For sm_90a alone.
// emulator/cuda/sm90/barriers.cuh says the same in C++. Barriers of warps among themselves: common/warp_roles.cuh.
#pragma once

#include <cstdint>

#include "cuda/common/instructions.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "for sm_90a alone: files that include this lie in src/cuda/sm90 or in a folder <path>_sm90"
#endif

namespace fastweight::cuda {

// A block's dynamic shared memory, aligned for every pattern of swizzle.h. T is aligned to 1024 bytes.
template <class T>
__device__ __forceinline__ T& aligned_shared() {
  static_assert(alignof(T) == 1024);
  extern __shared__ __align__(1024) unsigned char tiles[];
  return *reinterpret_cast<T*>(tiles);
}

// An mbarrier, in shared memory. It counts phases, and its parity is that of the phase that has not completed, 0 at
// first. A phase completes when `arrivals` threads have arrived and all bytes that they expect have come; who waits for
// it then sees what those who arrived had written to shared memory, and what the copies wrote.
//
// A ring of n buffers has two barriers for each: `filled`, at which the one thread that starts the copies arrives, and
// `free`, at which the readers arrive. In the turn of buffer i that is number t for it (0, 1, ..):
//
//     producer    free.wait(t % 2 ^ 1)     at once for t = 0
//                 filled.arrive_expecting(bytes), then the copies that name `filled`
//     readers     filled.wait(t % 2)       read       free.arrive()
//
// Nobody waits for a parity that may be two phases old: between two waits of a thread on a barrier at most one phase
// completes, because the next one needs something from that thread.
struct TransactionBarrier {
  uint64_t word;

  // By one thread; others may use it after fence_barrier_init() by that thread and a barrier of the block.
  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
  }
  // Also announces copies to this phase, which therefore does not complete before them.
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
  }
  // Until the phase of this parity has completed. The thread sleeps meanwhile: without the time, in ns, it would ask again and
  // again, and take a quarter of the instructions and accesses to shared memory from the warps that work (measured on an H200, a
  // scan forward).
  __device__ __forceinline__ void wait(uint32_t parity) {
    constexpr uint32_t kMostSleep = 1000000;
    uint32_t completed;
    do {
      asm volatile(
          "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n\tselp.b32 %0, 1, 0, "
          "p;\n\t}"
          : "=r"(completed)
          : "r"(shared_address(&word)), "r"(parity), "n"(kMostSleep)
          : "memory");
    } while (completed == 0);
  }
  // Whether wait() would return at once. The answer takes as long as a product's first steps: who asks before other work,
  // and then waits with the answer, does not wait for it.
  __device__ __forceinline__ bool ask(uint32_t parity) {
    uint32_t completed;
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.b32 %0, 1, 0, p;\n\t}"
        : "=r"(completed)
        : "r"(shared_address(&word)), "r"(parity)
        : "memory");
    return completed != 0;
  }
  __device__ __forceinline__ void wait(uint32_t parity, bool completed) {
    if (!completed) wait(parity);
  }
};

// Barriers that this thread initialized can be used by copies and, after a barrier of the block, by other threads.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread wrote to shared memory with ordinary stores can be read by wgmma and by TMA stores that are issued
// after a barrier with this thread. Also before TMA loads over memory that this thread has read or written so.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What other blocks wrote to global memory, and this thread has seen published, can be read by TMA loads that this thread
// starts.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A barrier among `threads` threads of the block, in whole warps: named barrier `id` (instructions.cuh), a number that need not
// be known when the kernel is compiled.
__device__ __forceinline__ void barrier_among(int threads, int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Among the threads of a warpgroup, one of at most 15 in its block.
__device__ __forceinline__ void warpgroup_barrier(int group) { barrier_among(128, group + 1); }

// True for one lane of the warp, all of whose lanes call it: the same one at every call.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.b32 %0, 1, 0, p;\n\t}" : "=r"(elected));
  return elected != 0;
}

// The registers of a thread from here on, at least or at most as many as before: 24 to 256, a multiple of 8. All warps
// of a warpgroup call it. Who takes more waits until others have given enough of them back. ptxas heeds both in a kernel
// whose __launch_bounds__ name the least number of blocks on a multiprocessor.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  static_assert(kCount >= 24 && kCount <= 256 && kCount % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  static_assert(kCount >= 24 && kCount <= 256 && kCount % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace fastweight::cuda
