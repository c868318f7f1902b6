// What src/cuda/sm90/barriers.cuh names, in C++. Not found here: a missing fence between ordinary and asynchronous
// accesses, a wait for a parity that is two phases old.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/instructions.cuh"

namespace fastweight::cuda {

namespace emulated {

inline emulator::TransactionBarrier& barrier_at(uint32_t address) {
  return *static_cast<emulator::TransactionBarrier*>(
      emulator::shared_pointer(address, sizeof(emulator::TransactionBarrier)));
}

}  // namespace emulated

template <class T>
T& aligned_shared() {
  static_assert(alignof(T) == 1024);
  return dynamic_shared<T>();
}

struct TransactionBarrier {
  uint64_t word;

  void init(uint32_t arrivals) { barrier().init(arrivals); }
  void arrive() { barrier().arrive(); }
  void arrive_expecting(uint32_t bytes) {
    barrier().expect(bytes);
    barrier().arrive();
  }
  void wait(uint32_t parity) { emulator::wait_for_phase(shared_address(&word), parity % 2 != 0); }
  bool ask(uint32_t) { return false; }
  void wait(uint32_t parity, bool completed) {
    if (!completed) wait(parity);
  }

 private:
  emulator::TransactionBarrier& barrier() { return emulated::barrier_at(shared_address(&word)); }
};

inline void fence_barrier_init() {}
inline void fence_async_proxy() {}
inline void fence_async_proxy_global() {}

inline void barrier_among(int threads, int id) { emulator::named_barrier(id, threads); }
inline void warpgroup_barrier(int group) { barrier_among(128, group + 1); }

inline bool elect_one() {
  emulator::together(
      "elect", [](void* const*) {}, nullptr);
  return emulator::lane() == emulator::elected_lane();
}

template <int kCount>
void set_registers() {
  static_assert(kCount >= 24 && kCount <= 256 && kCount % 8 == 0);
  emulator::warpgroup_together(
      "setmaxnreg", [](void* const*) {}, nullptr);
  emulator::set_registers(kCount);
}
template <int kCount>
void take_registers() {
  set_registers<kCount>();
}
template <int kCount>
void give_registers() {
  set_registers<kCount>();
}

}  // namespace fastweight::cuda
