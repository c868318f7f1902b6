// What the implementations of the TTT-linear family receive: validated arguments and the sizes read off them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/sequences.h"
#include "fastweight/ttt_linear.h"

namespace fastweight {

struct TttLinearSizes {
  int64_t batch = 0;          // B
  int64_t tokens = 0;         // T
  int64_t num_heads = 0;      // H
  int64_t head_dim = 0;       // D
  int64_t num_sequences = 0;  // N
};

// Args is TttLinearForward, TttLinearBackward or TttLinearStep. Validated: kernels trust it. The scale is resolved, eta
// and its gradient are [B, T, H], the biases of states and their gradients are [.., H, D].
template <class Args>
struct TttLinearProblem {
  TttLinearSizes sizes;
  Args args;
  std::vector<Sequence> sequences;  // of host memory; empty on CUDA, and where there is nothing to do
  double scale = 1;
  bool has_fp64 = false;  // any tensor, input or output
};

using TttLinearForwardProblem = TttLinearProblem<TttLinearForward>;
using TttLinearBackwardProblem = TttLinearProblem<TttLinearBackward>;
using TttLinearStepProblem = TttLinearProblem<TttLinearStep>;

}  // namespace fastweight
