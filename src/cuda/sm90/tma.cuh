// Copies of tiles by the tensor memory accelerator of Hopper, between global and shared memory. For sm_90a alone.
// emulator/cuda/sm90/tma.cuh says the same in C++.
//
// One thread starts a copy for all. Places are in elements, the fastest dimension first. A box begins inside of the tensor
// (on an H200 some that did not ended in an illegal address or instruction) and may reach beyond it: loads give zeros there,
// stores write nothing. Tiles in shared memory begin at multiples of 128 bytes, or of pattern_bytes (swizzle.h). Tensor
// maps are kernel arguments, `const __grid_constant__`.
#pragma once

#include <cstdint>

#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda {

// The box of the map at `place` to the address `to`. The bytes of the whole box come to the barrier, also where they lie
// outside of the tensor; this thread or another has announced them.
template <int kRank>
__device__ __forceinline__ void load_box(uint32_t to, const TensorMap& map, const int (&place)[kRank],
                                         TransactionBarrier& barrier) {
  static_assert(kRank >= 2 && kRank <= 5);
  const auto address = reinterpret_cast<uint64_t>(&map);
  const uint32_t at = shared_address(&barrier.word);
  if constexpr (kRank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(address), "r"(at), "r"(place[0]), "r"(place[1])
        : "memory");
  } else if constexpr (kRank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(address), "r"(at), "r"(place[0]), "r"(place[1]), "r"(place[2])
        : "memory");
  } else if constexpr (kRank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(to),
        "l"(address), "r"(at), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
        "%7}], [%2];" ::"r"(to),
        "l"(address), "r"(at), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(place[4])
        : "memory");
  }
}

// Bytes that lie together, a multiple of 16; both addresses are too.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, TransactionBarrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier.word))
               : "memory");
}

// From shared to global memory, in groups of the thread that starts and waits for them. The writers of the tile have
// called fence_async_proxy() and met this thread at a barrier.
template <int kRank>
__device__ __forceinline__ void store_box(const TensorMap& map, const int (&place)[kRank], uint32_t from) {
  static_assert(kRank >= 2 && kRank <= 5);
  const auto address = reinterpret_cast<uint64_t>(&map);
  if constexpr (kRank == 2) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(address),
                 "r"(from), "r"(place[0]), "r"(place[1])
                 : "memory");
  } else if constexpr (kRank == 3) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(address),
                 "r"(from), "r"(place[0]), "r"(place[1]), "r"(place[2])
                 : "memory");
  } else if constexpr (kRank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(address),
        "r"(from), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(address),
        "r"(from), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(place[4])
        : "memory");
  }
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last kPending groups have read shared memory, which may then be written again. A block leaves only
// after that.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all but the last kPending groups have written global memory, as far as this thread sees it.
template <int kPending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Brings the map near before its first use.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

}  // namespace fastweight::cuda
