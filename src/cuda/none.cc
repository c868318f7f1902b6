// The CUDA backend of a build without CUDA: no device, no implementation.
#include "cuda/backend.h"
#include "cuda/delta_rule/list.h"

namespace fastweight::cuda {

bool is_built() { return false; }
std::vector<CudaDeviceInfo> devices() { return {}; }
std::vector<std::string> architectures() { return {}; }
void check_arguments(Device, std::span<const check::Argument>) {}
DeviceScope::DeviceScope(Device) {}
DeviceScope::~DeviceScope() = default;

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list() { return {}; }
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list() { return {}; }
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list() { return {}; }

}  // namespace fastweight::cuda
