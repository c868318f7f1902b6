#include "cuda/ttt_linear/registry.h"

#include <string>

#include "cuda/decline_reasons.h"
#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda {
namespace {

template <class Problem>
std::string declines_recurrent(const Problem& problem) {
  const std::string reason = no_fp64(problem);
  return reason.empty() ? too_many_heads(problem.sizes.num_heads) : reason;
}

// An entry of the mini-batch form: what no kernel takes, then what this one does not.
template <std::string (*kDeclines)(const TttLinearForwardProblem&)>
std::string declines_chunk(const TttLinearForwardProblem& problem) {
  const std::string reason = declines_recurrent(problem);
  return reason.empty() ? kDeclines(problem) : reason;
}

constexpr Implementation<TttLinearForwardProblem> kForward[] = {
    {"chunk_chain", declines_chunk<ttt::declines_chunk_chain>, always, ttt::chunk_chain_forward},
    {"chunk_tiles", declines_chunk<ttt::declines_chunk_tiles>, always, ttt::chunk_tiles_forward},
    {"recurrent", declines_recurrent, always, ttt::recurrent_forward},
};
constexpr Implementation<TttLinearStepProblem> kStep[] = {
    {"recurrent", declines_recurrent, always, ttt::recurrent_step},
};

}  // namespace

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list() { return kForward; }
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list() { return {}; }
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list() { return kStep; }

}  // namespace fastweight::cuda
