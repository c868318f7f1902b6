// What the CPU backend offers to `ops` for the building blocks, most special first. The last entry, the reference,
// takes every valid problem.
#pragma once

#include <span>

#include "core/blocks_problem.h"
#include "core/implementation.h"

namespace fastweight::cpu {

// Args is one of the argument structs of blocks.h.
template <class Args>
std::span<const Implementation<BlockProblem<Args>>> block_list();

}  // namespace fastweight::cpu
