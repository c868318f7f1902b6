// Stands before CUDA's header of this name where the kernels are compiled as C++ for the emulator: CUDA's host types
// and functions, and what nvcc would know by itself.
#pragma once

#include_next <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <tuple>

#include "grid.h"
#include "runtime.h"

// A block's static shared memory: one block runs at a time.
#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

#define cudaLaunchKernelEx emulator::launch_kernel

namespace emulator {

template <class... Parameters, class... Args>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Args&... args) {
  Grid grid{config->gridDim, config->blockDim, config->dynamicSmemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization) return cudaErrorInvalidValue;
    grid.overlaps = config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
  }
  std::tuple<std::remove_const_t<Parameters>...> values(args...);
  return enqueue(config->stream, reinterpret_cast<const void*>(kernel), grid, [=] { std::apply(kernel, values); });
}

struct Shuffle {
  uint64_t in, out;
  int source;
};

template <class T>
T shuffle(T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Shuffle mine{0, 0, source};
  std::memcpy(&mine.in, &value, sizeof(T));
  together(
      "a shuffle",
      [](void* const* lanes) {
        for (int i = 0; i < kLanes; ++i) {
          auto& lane = *static_cast<Shuffle*>(lanes[i]);
          lane.out = static_cast<const Shuffle*>(lanes[lane.source])->in;
        }
      },
      &mine);
  std::memcpy(&value, &mine.out, sizeof(T));
  return value;
}

inline int lane() { return static_cast<int>(threadIdx.x % kLanes); }

}  // namespace emulator

inline void __syncthreads() { emulator::block_barrier(); }

inline void __syncwarp(unsigned = 0xffffffffu) {
  emulator::together(
      "__syncwarp", [](void* const*) {}, nullptr);
}

// Groups of `width` lanes; a source outside the group gives the lane its own value.
template <class T>
T __shfl_sync(unsigned, T value, int source, int width = emulator::kLanes) {
  const int lane = emulator::lane();
  return emulator::shuffle(value, lane / width * width + (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance, int width = emulator::kLanes) {
  const int lane = emulator::lane(), from = lane - static_cast<int>(distance);
  return emulator::shuffle(value, from < lane / width * width ? lane : from);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned distance, int width = emulator::kLanes) {
  const int lane = emulator::lane(), from = lane + static_cast<int>(distance);
  return emulator::shuffle(value, from >= lane / width * width + width ? lane : from);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = emulator::kLanes) {
  const int lane = emulator::lane(), from = lane ^ mask;
  return emulator::shuffle(value, from >= lane / width * width + width ? lane : from);
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  struct Vote {
    bool in;
    unsigned out;
  } mine{predicate, 0};
  emulator::together(
      "a vote",
      [](void* const* lanes) {
        unsigned bits = 0;
        for (int i = 0; i < emulator::kLanes; ++i) bits |= unsigned{static_cast<Vote*>(lanes[i])->in} << i;
        for (int i = 0; i < emulator::kLanes; ++i) static_cast<Vote*>(lanes[i])->out = bits;
      },
      &mine);
  return mine.out;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline bool __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::max;
using std::min;
