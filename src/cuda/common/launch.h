// Launching a kernel on the context's stream.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "cuda/common/error.h"
#include "cuda/common/workspace.h"
#include "fastweight/context.h"

namespace fastweight::cuda {

inline int device_attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

// Why a kernel whose blocks take so much shared memory cannot run; empty when it can.
inline std::string lacks_shared_memory(size_t bytes, int device) {
  const auto most = static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (bytes <= most) return "";
  return "needs " + std::to_string(bytes) + " bytes of shared memory in a block, the device has " +
         std::to_string(most);
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t dynamic_shared_bytes = 0;
  // The kernel may be started before the kernels before it on the stream have completed, where code and device know how
  // (sm_90): its threads call wait_for_previous_kernels() of instructions.cuh before anything else in global memory. That they
  // do before they leave is enough for a kernel that knows which ones may still run when it starts: until then it reads
  // what was complete before those, or what they publish (publish()), and writes nothing that they read or write.
  bool overlaps = false;
};

inline constexpr int kRememberedDevices = 64;  // what is known of a kernel on a device beyond these is asked every time

// A kernel may use 48 KB of dynamic shared memory unless it is allowed more, once per device. What it is allowed only
// grows, one thread at a time: nobody's limit is lowered between the question and the launch by a thread that needs
// less.
template <auto kKernel>
void allow_shared_memory(int device, size_t bytes) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (bytes <= kWithoutAsking) return;
  static std::atomic<size_t> allowed[kRememberedDevices];
  static std::mutex one_at_a_time;
  const bool remembered = device < kRememberedDevices;
  if (remembered && allowed[device].load(std::memory_order_acquire) >= bytes) return;
  const std::lock_guard lock(one_at_a_time);
  const auto* kernel = reinterpret_cast<const void*>(kKernel);
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  if (static_cast<size_t>(attributes.maxDynamicSharedSizeBytes) < bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               "cudaFuncSetAttribute");
  }
  if (remembered && allowed[device].load(std::memory_order_relaxed) < bytes) {
    allowed[device].store(bytes, std::memory_order_release);
  }
}

// Whether wait_for_previous_kernels() waits in the code that runs on the device. The version of the code decides, not
// the device: compiled for sm_80 it does not wait on newer devices either.
template <auto kKernel>
bool knows_how_to_wait(int device) {
  enum : char { kUnknown, kNo, kYes };
  static std::atomic<char> known[kRememberedDevices];
  if (device < kRememberedDevices) {
    const char answer = known[device].load(std::memory_order_relaxed);
    if (answer != kUnknown) return answer == kYes;
  }
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)), "cudaFuncGetAttributes");
  const bool yes = attributes.ptxVersion >= 90;
  if (device < kRememberedDevices) known[device].store(yes ? kYes : kNo, std::memory_order_relaxed);
  return yes;
}

// `name` is what an error calls the kernel. Errors of earlier work on the device are not mistaken for this launch's. Where
// there is nothing to do, a grid of no blocks, nothing is launched: CUDA would refuse it.
template <auto kKernel, class... Args>
void launch(const char* name, const Context& context, const LaunchShape& shape, const Args&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  allow_shared_memory<kKernel>(context.device.index, shape.dynamic_shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.dynamic_shared_bytes;
  config.stream = stream_of(context);
  cudaLaunchAttribute overlap{};
  if (shape.overlaps && knows_how_to_wait<kKernel>(context.device.index)) {
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kKernel, args...), name);
}

}  // namespace fastweight::cuda
