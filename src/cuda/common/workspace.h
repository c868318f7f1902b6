// Scratch memory on the device, for the length of a call in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "fastweight/context.h"

namespace fastweight::cuda {

// From the context's source, or else from the device's default memory pool on the context's stream. Both may be used
// while the stream is being captured. Arrays are laid out with `ScratchLayout` of core/workspace.h.
class DeviceWorkspace {
 public:
  DeviceWorkspace(const Context& context, size_t bytes);
  ~DeviceWorkspace();
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;

  void* data() const { return data_; }

 private:
  WorkspaceSource source_;
  cudaStream_t stream_;
  void* data_ = nullptr;
  size_t bytes_;
};

inline cudaStream_t stream_of(const Context& context) { return static_cast<cudaStream_t>(context.stream); }

}  // namespace fastweight::cuda
