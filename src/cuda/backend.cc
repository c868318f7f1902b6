#include "cuda/backend.h"

#include <cuda_runtime.h>

#include <sstream>

#include "cuda/common/error.h"

namespace fastweight::cuda {
namespace {

// 0 without a driver or a device. The reason is CUDA's error text.
int device_count(std::string* reason = nullptr) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return count;
  cudaGetLastError();
  if (reason != nullptr) *reason = cudaGetErrorString(status);
  return 0;
}

void check_device(Device device) {
  std::string reason = "none on this machine";
  const int count = device_count(&reason);
  if (device.index < count) return;
  const std::string expected =
      count == 0 ? "a CUDA device (" + reason + ")" : "cuda:0 to cuda:" + std::to_string(count - 1);
  check::invalid("device", expected, check::text(device));
}

// Empty when the pointer can be used on the device.
std::string what_is_wrong(const void* pointer, Device device) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  switch (attributes.type) {
    case cudaMemoryTypeUnregistered:
      return "plain host memory";
    case cudaMemoryTypeDevice:
      return attributes.device == device.index ? "" : "memory of cuda:" + std::to_string(attributes.device);
    case cudaMemoryTypeHost:
      return attributes.devicePointer == pointer ? "" : "host memory at another address on the device";
    default:
      return "";
  }
}

}  // namespace

bool is_built() { return true; }

std::vector<CudaDeviceInfo> devices() {
  std::vector<CudaDeviceInfo> list;
  const int count = device_count();
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    list.push_back({index, properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                    static_cast<int64_t>(properties.totalGlobalMem), static_cast<int64_t>(properties.l2CacheSize)});
  }
  return list;
}

std::vector<std::string> architectures() {
  std::istringstream words(FASTWEIGHT_CUDA_ARCHITECTURES);
  std::vector<std::string> list;
  for (std::string word; std::getline(words, word, ',');) list.push_back(word);
  return list;
}

void check_arguments(const Context& context, std::span<const check::Argument> arguments) {
  if (context.trust_pointers) return;
  const Device device = context.device;
  check_device(device);
  const DeviceScope scope(device);
  for (const check::Argument& argument : arguments) {
    if (check::is_empty(*argument.view)) continue;
    const std::string wrong = what_is_wrong(argument.view->data, device);
    if (!wrong.empty()) check::invalid(argument.name, "a pointer into memory of " + check::text(device), wrong);
  }
}

DeviceScope::DeviceScope(Device device) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  // A thread's first device is device 0, by name alone: functions of the driver, which make tensor maps, find no context
  // before the runtime has been told or has done something with it.
  static thread_local int ready = -1;
  if (current == device.index && current == ready) return;
  check_cuda(cudaSetDevice(device.index), "cudaSetDevice");
  ready = device.index;
  if (current != device.index) previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace fastweight::cuda
