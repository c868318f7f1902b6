// The CUDA backend of a build without CUDA: no device, no implementation.
#include "cuda/backend.h"
#include "cuda/blocks/registry.h"
#include "cuda/delta_rule/registry.h"
#include "cuda/short_conv/registry.h"
#include "cuda/ttt_linear/registry.h"

namespace fastweight::cuda {

bool is_built() { return false; }
std::vector<CudaDeviceInfo> devices() { return {}; }
std::vector<std::string> architectures() { return {}; }
void check_arguments(const Context&, std::span<const check::Argument>) {}
DeviceScope::DeviceScope(Device) {}
DeviceScope::~DeviceScope() = default;

std::span<const Implementation<DeltaRuleForwardProblem>> delta_rule_forward_list() { return {}; }
std::span<const Implementation<DeltaRuleBackwardProblem>> delta_rule_backward_list() { return {}; }
std::span<const Implementation<DeltaRuleStepProblem>> delta_rule_step_list() { return {}; }
int64_t delta_rule_kept_words(Device, Gate, DType, int64_t, bool) { return 0; }
std::span<const Implementation<DeltaRuleMapForwardProblem>> delta_rule_map_forward_list() { return {}; }
std::span<const Implementation<DeltaRuleMapBackwardProblem>> delta_rule_map_backward_list() { return {}; }

std::span<const Implementation<ShortConvForwardProblem>> short_conv_forward_list() { return {}; }
std::span<const Implementation<ShortConvBackwardProblem>> short_conv_backward_list() { return {}; }
std::span<const Implementation<ShortConvStepProblem>> short_conv_step_list() { return {}; }

template <class Args>
std::span<const Implementation<BlockProblem<Args>>> block_list() {
  return {};
}
template std::span<const Implementation<BlockProblem<ChunkLocalCumsum>>> block_list();
template std::span<const Implementation<BlockProblem<ScaledDotKktForward>>> block_list();
template std::span<const Implementation<BlockProblem<ScaledDotKktBackward>>> block_list();
template std::span<const Implementation<BlockProblem<SolveTrilForward>>> block_list();
template std::span<const Implementation<BlockProblem<SolveTrilBackward>>> block_list();
template std::span<const Implementation<BlockProblem<WyForward>>> block_list();
template std::span<const Implementation<BlockProblem<WyBackward>>> block_list();
template std::span<const Implementation<BlockProblem<L2NormForward>>> block_list();
template std::span<const Implementation<BlockProblem<L2NormBackward>>> block_list();
template std::span<const Implementation<BlockProblem<GateActivationForward>>> block_list();
template std::span<const Implementation<BlockProblem<GateActivationBackward>>> block_list();
template std::span<const Implementation<BlockProblem<RmsNormForward>>> block_list();
template std::span<const Implementation<BlockProblem<RmsNormBackward>>> block_list();

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list() { return {}; }
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list() { return {}; }
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list() { return {}; }
int64_t ttt_linear_kept_words(Device, const TttLinearOptions&, DType, int64_t) { return 0; }

}  // namespace fastweight::cuda
