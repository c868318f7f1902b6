#include "cpu/short_conv/registry.h"

#include <string>

#include "cpu/decline_reasons.h"
#include "cpu/short_conv/kernels.h"

namespace fastweight::cpu {
namespace {

constexpr Implementation<ShortConvForwardProblem> kForward[] = {
    {"direct", no_fp64, always, short_conv::direct_forward},
    {"reference", takes_all, always, short_conv::reference_forward},
};
constexpr Implementation<ShortConvBackwardProblem> kBackward[] = {
    {"direct", no_fp64, always, short_conv::direct_backward},
    {"reference", takes_all, always, short_conv::reference_backward},
};
constexpr Implementation<ShortConvStepProblem> kStep[] = {
    {"direct", no_fp64, always, short_conv::direct_step},
    {"reference", takes_all, always, short_conv::reference_step},
};

}  // namespace

std::span<const Implementation<ShortConvForwardProblem>> short_conv_forward_list() { return kForward; }
std::span<const Implementation<ShortConvBackwardProblem>> short_conv_backward_list() { return kBackward; }
std::span<const Implementation<ShortConvStepProblem>> short_conv_step_list() { return kStep; }

}  // namespace fastweight::cpu
