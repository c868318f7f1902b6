#include "cuda/short_conv/registry.h"

#include "cuda/decline_reasons.h"
#include "cuda/short_conv/kernels.h"

namespace fastweight::cuda {
namespace {

constexpr Implementation<ShortConvForwardProblem> kForward[] = {
    {"direct", no_fp64, always, short_conv::direct_forward},
};
constexpr Implementation<ShortConvBackwardProblem> kBackward[] = {
    {"direct", no_fp64, always, short_conv::direct_backward},
};
constexpr Implementation<ShortConvStepProblem> kStep[] = {
    {"direct", no_fp64, always, short_conv::direct_step},
};

}  // namespace

std::span<const Implementation<ShortConvForwardProblem>> short_conv_forward_list() { return kForward; }
std::span<const Implementation<ShortConvBackwardProblem>> short_conv_backward_list() { return kBackward; }
std::span<const Implementation<ShortConvStepProblem>> short_conv_step_list() { return kStep; }

}  // namespace fastweight::cuda
