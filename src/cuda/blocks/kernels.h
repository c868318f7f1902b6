// The entry points of the CUDA implementations, one for each block and direction. Each enqueues on the context's stream
// and returns; the context's device is current.
#pragma once

#include "core/blocks_problem.h"

namespace fastweight::cuda::blocks {

void direct(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context);  // in gate_activation.cu
void direct(const BlockProblem<ScaledDotKktForward>& problem, const Context& context);
void direct(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context);
void direct(const BlockProblem<SolveTrilForward>& problem, const Context& context);
void direct(const BlockProblem<SolveTrilBackward>& problem, const Context& context);
void direct(const BlockProblem<WyForward>& problem, const Context& context);
void direct(const BlockProblem<WyBackward>& problem, const Context& context);
void direct(const BlockProblem<L2NormForward>& problem, const Context& context);
void direct(const BlockProblem<L2NormBackward>& problem, const Context& context);
void direct(const BlockProblem<GateActivationForward>& problem, const Context& context);
void direct(const BlockProblem<GateActivationBackward>& problem, const Context& context);
void direct(const BlockProblem<RmsNormForward>& problem, const Context& context);
void direct(const BlockProblem<RmsNormBackward>& problem, const Context& context);

}  // namespace fastweight::cuda::blocks
