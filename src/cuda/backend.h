// What `ops` and the tool ask of the CUDA backend as a whole. Plain C++: CUDA's own types stay inside src/cuda. A build
// without CUDA has these functions too; there `is_built` says no and `devices` finds none.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/check.h"
#include "fastweight/context.h"
#include "fastweight/info.h"
#include "fastweight/tensor.h"

namespace fastweight::cuda {

bool is_built();

// The devices of this machine; none without a driver.
std::vector<CudaDeviceInfo> devices();

// What the kernels were compiled for, for example "80-real".
std::vector<std::string> architectures();

// Throws Error(kInvalidArgument) unless the device exists, and unless every tensor with elements lies in memory that
// the device can reach by the driver's account: its own, managed, or registered host memory. A pointer into plain host
// memory would otherwise end in an illegal access, after which the process has lost its device. No synchronisation,
// also fine while a stream is being captured. Nothing is asked of the driver where the context trusts the pointers.
void check_arguments(const Context& context, std::span<const check::Argument> arguments);

// Makes a device current for the calling thread, and the one before it again at the end.
class DeviceScope {
 public:
  explicit DeviceScope(Device device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  [[maybe_unused]] int previous_ = -1;  // -1: nothing to undo; a build without CUDA has no use for it
};

}  // namespace fastweight::cuda
