// What src/cuda/sm90/wgmma.cuh names, in C++. A product is computed when all four warps have issued it; its sums are NaNs
// until they are waited for, and an operand or a sum that is written before ends the program with a message.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/instructions.cuh"
#include "cuda/sm90/panel_tile.cuh"

namespace fastweight::cuda {
template <class T>
void keep_in_place(T&) {}

template <class... Registers>
void wgmma_fence(Registers&...) {
  emulator::async_work().fence();
}
inline void wgmma_commit() { emulator::async_work().commit_products(); }
template <int kPending, class... Registers>
void wgmma_wait(Registers&...) {
  static_assert(kPending >= 0 && kPending <= 7);
  emulator::async_work().wait_products(kPending);
}

namespace emulated {

template <DType kType, int kN, int kFirst, int kTiles>
void wgmma(float (&c)[kTiles][4], const uint32_t* a, emulator::Descriptor a_shared, emulator::Descriptor b,
           bool accumulate) {
  static_assert(kN == 32 || kN == 64 || kN == 128);
  static_assert(8 * kFirst + kN <= 8 * kTiles);
  emulator::GroupProduct mine{element_of<kType>(), kN, c + kFirst, a, a_shared, b, accumulate, &emulator::async_work()};
  emulator::warpgroup_together("wgmma", emulator::multiply_group, &mine);
}

}  // namespace emulated

template <DType kType, int kN, int kFirst = 0, int kTiles, bool kAlongColumns>
void wgmma(float (&c)[kTiles][4], const uint32_t (&a)[4], const WgmmaOperand<kAlongColumns>& b,
           bool accumulate = true) {
  emulated::wgmma<kType, kN, kFirst>(c, a, {}, {b.descriptor, kAlongColumns}, accumulate);
}

template <DType kType, int kN, int kFirst = 0, int kTiles, bool kAAlongColumns, bool kBAlongColumns>
void wgmma(float (&c)[kTiles][4], const WgmmaOperand<kAAlongColumns>& a, const WgmmaOperand<kBAlongColumns>& b,
           bool accumulate = true) {
  emulated::wgmma<kType, kN, kFirst>(c, nullptr, {a.descriptor, kAAlongColumns}, {b.descriptor, kBAlongColumns},
                                     accumulate);
}

}  // namespace fastweight::cuda
