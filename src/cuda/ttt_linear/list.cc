#include "cuda/ttt_linear/list.h"

#include "cuda/declines.h"
#include "cuda/ttt_linear/implementations.h"

namespace fastweight::cuda {
namespace {

constexpr Implementation<TttLinearForwardProblem> kForward[] = {
    {"chunk", ttt::declines_chunk_forward, always, ttt::chunk_forward},
    {"recurrent", no_fp64, always, ttt::recurrent_forward},
};
constexpr Implementation<TttLinearStepProblem> kStep[] = {
    {"recurrent", no_fp64, always, ttt::recurrent_step},
};

}  // namespace

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list() { return kForward; }
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list() { return {}; }
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list() { return kStep; }

}  // namespace fastweight::cuda
