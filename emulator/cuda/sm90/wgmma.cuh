// What src/cuda/sm90/wgmma.cuh names, in C++. A product is computed when all four warps have issued it; its sums are NaNs
// until they are waited for, and an operand or a sum that is written before ends the program with a message.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/common/instructions.cuh"
#include "cuda/sm90/panel_tile.cuh"

namespace fastweight::cuda {
namespace emulated {

using emulator::kWarpgroup;

// The address of element `inner` of row `outer` of m or column `outer` of n, from the bits of a descriptor. In units of
// 16 bytes, with w = 8, 4, 2 or 1 of them in a row of the pattern:
//
//     inner index together     (outer % 8) w + outer / 8 SBO + inner / 8                                    (w > 1)
//                              (outer % 8)   + outer / 8 SBO + inner / 8 LBO                                (w = 1)
//     outer index together     outer / 8 % w + outer / 8w LBO + (inner % 8) w + inner / 8 SBO               (w > 1)
//                              outer / 8 SBO + inner % 8 + inner / 8 LBO                                    (w = 1)
inline uint32_t operand_address(uint64_t descriptor, bool outer_together, uint32_t outer, uint32_t inner) {
  const auto field = [&](int first) { return static_cast<uint32_t>(descriptor >> first & 0x3fff); };
  const uint32_t start = field(0), lbo = field(16), sbo = field(32);
  const auto mode = static_cast<uint32_t>(descriptor >> 62);
  if ((descriptor >> 49 & 7) != 0) emulator::fail("a descriptor of wgmma with a base offset");
  const uint32_t w = mode == 0 ? 1 : mode == 1 ? 8 : mode == 2 ? 4 : 2;
  uint32_t unit = start;
  if (!outer_together) {
    unit += outer % 8 * w + outer / 8 * sbo + inner / 8 * (w == 1 ? lbo : 1);
  } else if (w > 1) {
    unit += outer / 8 % w + outer / (8 * w) * lbo + inner % 8 * w + inner / 8 * sbo;
  } else {
    unit += outer / 8 * sbo + inner % 8 + inner / 8 * lbo;
  }
  const uint32_t swizzled_unit = unit ^ (unit >> 3 & (w - 1));
  return swizzled_unit * 16 + (outer_together ? outer : inner) % 8 * 2;
}

// [outer][16] as bits.
inline std::vector<uint16_t> operand_elements(uint64_t descriptor, bool outer_together, uint32_t outer_size) {
  std::vector<uint16_t> elements;
  elements.reserve(outer_size * 16);
  for (uint32_t outer = 0; outer < outer_size; ++outer) {
    for (uint32_t inner = 0; inner < 16; ++inner) {
      const uint32_t address = operand_address(descriptor, outer_together, outer, inner);
      elements.push_back(*static_cast<const uint16_t*>(emulator::shared_pointer(address, 2)));
    }
  }
  return elements;
}

struct GroupProduct {
  float (*c)[4];
  const uint32_t* a;  // null: from shared memory
  uint64_t a_descriptor, b_descriptor;
  bool accumulate;
  emulator::AsyncWork* work;
};

// Looks at an operand in shared memory again when one lane of each warp waits for the product.
inline void watch_operand(void* const* lanes, uint64_t descriptor, bool outer_together, uint32_t outer_size,
                          const std::vector<uint16_t>& elements) {
  const auto shared = std::make_shared<const std::vector<uint16_t>>(elements);
  for (int warp = 0; warp < kWarpgroup; warp += kLanes) {
    static_cast<const GroupProduct*>(lanes[warp])->work->watch([=] {
      return operand_elements(descriptor, outer_together, outer_size) == *shared;
    });
  }
}

template <DType kType, int kN, bool kAAlongColumns, bool kBAlongColumns>
void multiply_group(void* const* lanes) {
  const auto& first = *static_cast<const GroupProduct*>(lanes[0]);
  for (int lane = 0; lane < kWarpgroup; ++lane) {
    const auto& p = *static_cast<const GroupProduct*>(lanes[lane]);
    if (p.b_descriptor != first.b_descriptor || p.a_descriptor != first.a_descriptor ||
        p.accumulate != first.accumulate || (p.a == nullptr) != (first.a == nullptr)) {
      emulator::fail("threads of a warpgroup disagree about a product");
    }
    p.work->check_fenced();
  }
  const std::vector<uint16_t> b_bits = operand_elements(first.b_descriptor, kBAlongColumns, kN);
  watch_operand(lanes, first.b_descriptor, kBAlongColumns, kN, b_bits);
  double b[16][kN];
  for (int n = 0; n < kN; ++n) {
    for (int k = 0; k < 16; ++k) b[k][n] = decode<kType>(b_bits[static_cast<size_t>(n * 16 + k)]);
  }
  double a[64][16];
  if (first.a == nullptr) {
    const std::vector<uint16_t> a_bits = operand_elements(first.a_descriptor, kAAlongColumns, 64);
    watch_operand(lanes, first.a_descriptor, kAAlongColumns, 64, a_bits);
    for (int m = 0; m < 64; ++m) {
      for (int k = 0; k < 16; ++k) a[m][k] = decode<kType>(a_bits[static_cast<size_t>(m * 16 + k)]);
    }
  } else {
    for (int lane = 0; lane < kWarpgroup; ++lane) {
      const auto& p = *static_cast<const GroupProduct*>(lanes[lane]);
      const int row = lane / kLanes * 16 + lane % kLanes / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          a[row + i % 2 * 8][2 * t + i / 2 * 8 + half] = decode<kType>(p.a[i] >> (16 * half) & 0xffff);
        }
      }
      std::array<uint32_t, 4> fragment;
      std::memcpy(fragment.data(), p.a, sizeof(fragment));
      p.work->watch([fragment, at = p.a] { return std::memcmp(at, fragment.data(), sizeof(fragment)) == 0; });
    }
  }
  for (int lane = 0; lane < kWarpgroup; ++lane) {
    const auto& p = *static_cast<const GroupProduct*>(lanes[lane]);
    const int row = lane / kLanes * 16 + lane % kLanes / 4, t = lane % 4;
    for (int n = 0; n < kN / 8; ++n) {
      const float* before = p.work->tile(p.c[n]);
      float after[4];
      for (int i = 0; i < 4; ++i) {
        const int m = row + i / 2 * 8, column = 8 * n + 2 * t + i % 2;
        double sum = p.accumulate ? before[i] : 0.0;
        for (int k = 0; k < 16; ++k) sum += a[m][k] * b[k][column];
        after[i] = cut(sum);
      }
      p.work->set_tile(p.c[n], after);
    }
  }
}

}  // namespace emulated

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

template <DType kType, int kN, int kFirst = 0, int kTiles, bool kAlongColumns>
void wgmma(float (&c)[kTiles][4], const uint32_t (&a)[4], const WgmmaOperand<kAlongColumns>& b,
           bool accumulate = true) {
  static_assert(kN == 32 || kN == 64 || kN == 128);
  static_assert(8 * kFirst + kN <= 8 * kTiles);
  emulated::GroupProduct mine{c + kFirst, a, 0, b.descriptor, accumulate, &emulator::async_work()};
  emulator::warpgroup_together("wgmma", emulated::multiply_group<kType, kN, false, kAlongColumns>, &mine);
}

template <DType kType, int kN, int kFirst = 0, int kTiles, bool kAAlongColumns, bool kBAlongColumns>
void wgmma(float (&c)[kTiles][4], const WgmmaOperand<kAAlongColumns>& a, const WgmmaOperand<kBAlongColumns>& b,
           bool accumulate = true) {
  static_assert(kN == 32 || kN == 64 || kN == 128);
  static_assert(8 * kFirst + kN <= 8 * kTiles);
  emulated::GroupProduct mine{c + kFirst, nullptr, a.descriptor, b.descriptor, accumulate, &emulator::async_work()};
  emulator::warpgroup_together("wgmma", emulated::multiply_group<kType, kN, kAAlongColumns, kBAlongColumns>, &mine);
}

}  // namespace fastweight::cuda
