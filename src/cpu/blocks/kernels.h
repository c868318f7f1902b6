// The entry points of the CPU implementations, a pair for each block and direction.
#pragma once

#include "core/blocks_problem.h"

namespace fastweight::cpu::blocks {

void reference(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context);
void reference(const BlockProblem<ScaledDotKktForward>& problem, const Context& context);
void reference(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context);
void reference(const BlockProblem<SolveTrilForward>& problem, const Context& context);
void reference(const BlockProblem<SolveTrilBackward>& problem, const Context& context);
void reference(const BlockProblem<WyForward>& problem, const Context& context);
void reference(const BlockProblem<WyBackward>& problem, const Context& context);
void reference(const BlockProblem<L2NormForward>& problem, const Context& context);
void reference(const BlockProblem<L2NormBackward>& problem, const Context& context);
void reference(const BlockProblem<GateActivationForward>& problem, const Context& context);
void reference(const BlockProblem<GateActivationBackward>& problem, const Context& context);
void reference(const BlockProblem<RmsNormForward>& problem, const Context& context);
void reference(const BlockProblem<RmsNormBackward>& problem, const Context& context);

void simd(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context);
void simd(const BlockProblem<ScaledDotKktForward>& problem, const Context& context);
void simd(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context);
void simd(const BlockProblem<SolveTrilForward>& problem, const Context& context);
void simd(const BlockProblem<SolveTrilBackward>& problem, const Context& context);
void simd(const BlockProblem<WyForward>& problem, const Context& context);
void simd(const BlockProblem<WyBackward>& problem, const Context& context);
void simd(const BlockProblem<L2NormForward>& problem, const Context& context);
void simd(const BlockProblem<L2NormBackward>& problem, const Context& context);
void simd(const BlockProblem<GateActivationForward>& problem, const Context& context);
void simd(const BlockProblem<GateActivationBackward>& problem, const Context& context);
void simd(const BlockProblem<RmsNormForward>& problem, const Context& context);
void simd(const BlockProblem<RmsNormBackward>& problem, const Context& context);

}  // namespace fastweight::cpu::blocks
