// What src/cuda/common/instructions.cuh names, in C++. Found before it where the kernels are compiled for the emulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "fastweight/tensor.h"
#include "products.h"

namespace fastweight::cuda {

template <class T>
T& dynamic_shared() {
  return *reinterpret_cast<T*>(emulator::shared_memory());
}

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

namespace emulated {

using emulator::kLanes;

struct MatrixLoad {
  uint32_t address;
  uint32_t* m;
};

// Element `column` of row `row` of matrix i.
inline uint16_t element(void* const* lanes, int i, int row, int column) {
  const uint32_t address = static_cast<const MatrixLoad*>(lanes[8 * i + row])->address;
  return static_cast<const uint16_t*>(emulator::shared_pointer(address, 16))[column];
}

inline uint32_t pair_of(uint32_t low, uint32_t high) { return low | high << 16; }

template <DType kType>
constexpr emulator::Element element_of() {
  return kType == DType::kBF16 ? emulator::Element::kBF16 : emulator::Element::kFP16;
}

}  // namespace emulated

inline void ldmatrix(uint32_t address, uint32_t (&m)[4]) {
  emulated::MatrixLoad mine{address, m};
  emulator::together(
      "ldmatrix",
      [](void* const* lanes) {
        for (int lane = 0; lane < emulated::kLanes; ++lane) {
          for (int i = 0; i < 4; ++i) {
            static_cast<emulated::MatrixLoad*>(lanes[lane])->m[i] =
                emulated::pair_of(emulated::element(lanes, i, lane / 4, lane % 4 * 2),
                                  emulated::element(lanes, i, lane / 4, lane % 4 * 2 + 1));
          }
        }
      },
      &mine);
}

inline void ldmatrix_transposed(uint32_t address, uint32_t (&m)[4]) {
  emulated::MatrixLoad mine{address, m};
  emulator::together(
      "ldmatrix.trans",
      [](void* const* lanes) {
        for (int lane = 0; lane < emulated::kLanes; ++lane) {
          for (int i = 0; i < 4; ++i) {
            static_cast<emulated::MatrixLoad*>(lanes[lane])->m[i] =
                emulated::pair_of(emulated::element(lanes, i, lane % 4 * 2, lane / 4),
                                  emulated::element(lanes, i, lane % 4 * 2 + 1, lane / 4));
          }
        }
      },
      &mine);
}

namespace emulated {

struct MatrixStore {
  uint32_t address;
  const uint32_t* m;
};

// The two places of a lane's pairs: elements (row, column) and (row, column + 1), or (row + 1, column) of the
// transposed.
template <bool kTransposed>
void store_matrices(void* const* lanes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        const int along = lane % 4 * 2 + half, across = lane / 4;
        const int row = kTransposed ? along : across, column = kTransposed ? across : along;
        const uint32_t address = static_cast<const MatrixStore*>(lanes[8 * i + row])->address;
        static_cast<uint16_t*>(emulator::shared_pointer(address, 16))[column] =
            static_cast<uint16_t>(static_cast<const MatrixStore*>(lanes[lane])->m[i] >> (16 * half));
      }
    }
  }
}

}  // namespace emulated

inline void stmatrix(uint32_t address, const uint32_t (&m)[4]) {
  emulated::MatrixStore mine{address, m};
  emulator::together("stmatrix", emulated::store_matrices<false>, &mine);
}

inline void stmatrix_transposed(uint32_t address, const uint32_t (&m)[4]) {
  emulated::MatrixStore mine{address, m};
  emulator::together("stmatrix.trans", emulated::store_matrices<true>, &mine);
}

inline uint32_t transpose_8x8(uint32_t pair) {
  struct Transpose {
    uint32_t in, out;
  } mine{pair, 0};
  emulator::together(
      "movmatrix",
      [](void* const* lanes) {
        const auto in = [&](int row, int column) {
          return static_cast<const Transpose*>(lanes[4 * row + column / 2])->in >> (column % 2 * 16) & 0xffff;
        };
        for (int lane = 0; lane < emulated::kLanes; ++lane) {
          static_cast<Transpose*>(lanes[lane])->out =
              emulated::pair_of(in(lane % 4 * 2, lane / 4), in(lane % 4 * 2 + 1, lane / 4));
        }
      },
      &mine);
  return mine.out;
}

template <DType kType>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::Product mine{c, a, {b0, b1}};
  emulator::together("mma", emulator::multiply<emulated::element_of<kType>()>, &mine);
}

inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::Product mine{c, a, {b0, b1}};
  emulator::together("mma.tf32", emulator::multiply_tf32, &mine);
}

template <DType kType>
uint32_t pack(float low, float high) {
  if constexpr (kType == DType::kBF16) {
    return emulated::pair_of(__bfloat16_as_ushort(__float2bfloat16_rn(low)),
                             __bfloat16_as_ushort(__float2bfloat16_rn(high)));
  } else {
    return emulated::pair_of(__half_as_ushort(__float2half_rn(low)), __half_as_ushort(__float2half_rn(high)));
  }
}

inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  const auto product = [&](int shift) {
    const auto number = [&](uint32_t pair) { return __uint_as_float(pair >> shift << 16); };
    return number(a) * number(b);
  };
  return pack<DType::kBF16>(product(0), product(16));
}

inline void copy_async(uint32_t shared, const void* global, bool valid) {
  emulator::begin_copy(emulator::shared_pointer(shared, 16), valid ? global : nullptr, 16);
}
inline void commit_copies() { emulator::commit_copies(); }
template <int kPending>
void wait_copies() {
  emulator::wait_copies(kPending);
}

template <class T>
T opaque(T value) {
  return value;
}

template <int kBound>
int opaque_below(int value) {
  return value;
}

inline void fence_all_blocks() {}
inline void publish(uint32_t* flag) { __atomic_store_n(flag, 1u, __ATOMIC_RELEASE); }
inline void set_published(uint32_t* flag) { publish(flag); }
inline bool is_published(const uint32_t* flag) {
  if (__atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0) return true;
  emulator::wait_for_flag();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0;
}
inline uint32_t claim(uint32_t* counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED); }

inline void wait_for_previous_kernels() { emulator::wait_for_previous_kernels(); }
inline void let_next_kernel_start() { emulator::let_next_kernel_start(); }

inline void prefetch(const void*) {}

template <int kId>
void named_barrier(int threads) {
  static_assert(kId >= 1 && kId <= 15);
  emulator::named_barrier(kId, threads);
}
template <int kId>
void arrive_at_named_barrier(int threads) {
  static_assert(kId >= 1 && kId <= 15);
  emulator::arrive_at_named_barrier(kId, threads);
}

inline float max_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}

inline float log2_approx(float x) { return std::log2(std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x); }

inline float rsqrt_approx(float x) {
  constexpr float kLeast = 1.17549435e-38f;
  return 1.0f / std::sqrt(std::fabs(x) < kLeast ? std::copysign(0.0f, x) : x);
}

inline float reciprocal_approx(float x) {
  constexpr float kLeast = 1.17549435e-38f;
  const float y = 1.0f / (std::fabs(x) < kLeast ? std::copysign(0.0f, x) : x);
  return std::fabs(y) < kLeast ? std::copysign(0.0f, y) : y;
}

}  // namespace fastweight::cuda
