#include "cuda/blocks/registry.h"

#include "cuda/blocks/kernels.h"
#include "cuda/decline_reasons.h"

namespace fastweight::cuda {
namespace {

template <class Args>
constexpr Implementation<BlockProblem<Args>> kList[] = {
    {"direct", no_fp64, always, blocks::direct},
};

}  // namespace

template <class Args>
std::span<const Implementation<BlockProblem<Args>>> block_list() {
  return kList<Args>;
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

}  // namespace fastweight::cuda
