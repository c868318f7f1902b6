#include "cpu/ttt_linear/registry.h"

#include <string>

#include "cpu/decline_reasons.h"
#include "cpu/ttt_linear/kernels.h"

namespace fastweight::cpu {
namespace {

constexpr Implementation<TttLinearForwardProblem> kForward[] = {
    {"chunk", no_fp64, always, ttt::chunk_forward},
    {"reference", takes_all, always, ttt::reference_forward},
};
constexpr Implementation<TttLinearBackwardProblem> kBackward[] = {
    {"chunk", no_fp64, always, ttt::chunk_backward},
    {"reference", takes_all, always, ttt::reference_backward},
};
constexpr Implementation<TttLinearStepProblem> kStep[] = {
    {"chunk", no_fp64, always, ttt::chunk_step},
    {"reference", takes_all, always, ttt::reference_step},
};

}  // namespace

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list() { return kForward; }
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list() { return kBackward; }
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list() { return kStep; }

}  // namespace fastweight::cpu
