// What this build is and what it found on this machine.
#pragma once

#include <string>
#include <vector>

namespace fastweight {

std::string version();

// The instruction set that the CPU kernels run with (for example "AVX2"), and all that the build carries.
std::string cpu_target();
std::vector<std::string> cpu_targets();

// How many threads `num_threads = 0` stands for.
int default_num_threads();

// One entry of an operator family's list of implementations.
struct ImplementationInfo {
  std::string name;
  std::string mode;    // forward, backward or step
  std::string device;  // cpu or cuda
};

}  // namespace fastweight
