#include "cpu/ttt_linear/list.h"

#include <string>

#include "cpu/ttt_linear/implementations.h"

namespace fastweight::cpu {
namespace {

template <class Problem>
std::string takes_all(const Problem&) {
  return {};
}
template <class Problem>
std::string no_fp64(const Problem& problem) {
  return problem.has_fp64 ? "computes in fp32; fp64 tensors run on the reference" : "";
}

template <class Problem>
bool always(const Problem&) {
  return true;
}

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
