// What this build is and what it found on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastweight {

std::string version();

// The instruction set that the CPU kernels run with (for example "AVX2"), and all that the build carries.
std::string cpu_target();
std::vector<std::string> cpu_targets();

// How many threads `num_threads = 0` stands for.
int default_num_threads();

// Whether the CUDA backend was compiled in, what its kernels were compiled for (for example "90a-real"), and the
// devices that the driver shows.
struct CudaDeviceInfo {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
};
bool built_with_cuda();
std::vector<std::string> cuda_architectures();
std::vector<CudaDeviceInfo> cuda_devices();

// One entry of an operator family's list of implementations.
struct ImplementationInfo {
  std::string name;
  std::string mode;    // forward, backward or step
  std::string device;  // cpu or cuda
};

}  // namespace fastweight
