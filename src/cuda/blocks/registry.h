// What the CUDA backend offers to `ops` for the building blocks, most special first. Empty in a build without CUDA.
#pragma once

#include <span>

#include "core/blocks_problem.h"
#include "core/implementation.h"

namespace fastweight::cuda {

// Args is one of the argument structs of blocks.h.
template <class Args>
std::span<const Implementation<BlockProblem<Args>>> block_list();

}  // namespace fastweight::cuda
