#include "fastweight/info.h"

#include "cpu/parallel.h"
#include "cpu/simd/targets.h"
#include "cuda/backend.h"
// After the choice of targets.
#include "hwy/targets.h"

namespace fastweight {
namespace {

// Better instruction sets have lower bits.
std::vector<int64_t> bits_of(int64_t targets) {
  std::vector<int64_t> bits;
  for (; targets != 0; targets &= targets - 1) bits.push_back(targets & -targets);
  return bits;
}

}  // namespace

std::string version() { return FASTWEIGHT_VERSION; }

std::string cpu_target() {
  const std::vector<int64_t> usable = bits_of(hwy::SupportedTargets() & HWY_TARGETS);
  return hwy::TargetName(usable.empty() ? HWY_STATIC_TARGET : usable.front());
}

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (int64_t target : bits_of(HWY_TARGETS)) names.push_back(hwy::TargetName(target));
  return names;
}

bool built_with_cuda() { return cuda::is_built(); }
std::vector<std::string> cuda_architectures() { return cuda::architectures(); }
std::vector<CudaDeviceInfo> cuda_devices() { return cuda::devices(); }

int default_num_threads() { return cpu::num_threads(Context{}); }

}  // namespace fastweight
