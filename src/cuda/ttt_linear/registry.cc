#include "cuda/ttt_linear/registry.h"

#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda {
namespace {

constexpr Implementation<TttLinearForwardProblem> kForward[] = {
    {"chunk_chain", ttt::declines_chunk_chain, always, ttt::chunk_chain_forward,
     in_any_context<ttt::chunk_chain_config>},
    {"chunk_tiles", ttt::declines_chunk_tiles, always, ttt::chunk_tiles_forward,
     in_any_context<ttt::chunk_tiles_config>},
    {"chunk_fp32", ttt::keeps_nothing, always, ttt::chunk_fp32_forward, in_any_context<ttt::chunk_fp32_forward_config>},
    {"recurrent", ttt::keeps_nothing, always, ttt::recurrent_forward},
};
constexpr Implementation<TttLinearBackwardProblem> kBackward[] = {
    {"chunk_chain", ttt::declines_chunk_chain_backward, always, ttt::chunk_chain_backward,
     in_any_context<ttt::chunk_chain_backward_config>},
    {"chunk_tiles", ttt::declines_chunk_tiles_backward, always, ttt::chunk_tiles_backward,
     in_any_context<ttt::chunk_tiles_backward_config>},
    {"chunk_fp32", ttt::beyond_all_kernels, always, ttt::chunk_fp32_backward,
     in_any_context<ttt::chunk_fp32_backward_config>},
};
constexpr Implementation<TttLinearStepProblem> kStep[] = {
    {"recurrent", ttt::beyond_all_kernels, always, ttt::recurrent_step},
};

}  // namespace

std::span<const Implementation<TttLinearForwardProblem>> ttt_linear_forward_list() { return kForward; }
std::span<const Implementation<TttLinearBackwardProblem>> ttt_linear_backward_list() { return kBackward; }
std::span<const Implementation<TttLinearStepProblem>> ttt_linear_step_list() { return kStep; }

int64_t ttt_linear_kept_words(Device device, const TttLinearOptions& options, DType dtype, int64_t head_dim) {
  return ttt::kept_words(device, options, dtype, head_dim);
}

}  // namespace fastweight::cuda
