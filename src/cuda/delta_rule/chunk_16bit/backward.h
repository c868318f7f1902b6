// The backward of the chunk form as both of its implementations with 16-bit operands run it: windows, scratch memory
// and states are the same, and kernels differ.
#pragma once

#include <functional>

#include "core/delta_rule_problem.h"
#include "cuda/delta_rule/chunk_16bit/gradient.cuh"
#include "cuda/delta_rule/chunk_sm90/segments.h"

namespace fastweight::cuda::chunk_16bit {

struct BackKernels {
  // Value columns that the scan back publishes together, where the gradients of a chunk begin when it has left them; 0: they
  // begin when it has ended.
  int ready_columns;
  int gradients_on_one;       // blocks of the gradients on a multiprocessor
  int key_sums;               // matrices of GradientArgs::key_sums that a block of these has
  bool leaves_pairs = false;  // whether these have GradientArgs::left
  bool follow = false;        // whether a scan back may follow them as GradientArgs::waits_late says
  int segment_chunks = 0;     // as in forward_in_windows, of either scan
  // Over all chunks, as in the forward: the states before them.
  std::function<void(const chunk_sm90::ForwardArgs&)> scan_states;
  std::function<void(const GradientArgs&)> scan_back;                  // over a window
  std::function<void(const GradientArgs&, int64_t blocks)> gradients;  // of its chunks, with sums of so many blocks
};

// Those of chunk_16bit.
BackKernels back_kernels(const DeltaRuleBackwardProblem& problem, const Context& context);

// Where nothing is wanted but what the scan back makes, dv and the gradient of the initial state, nothing else runs.
void backward_in_windows(const DeltaRuleBackwardProblem& problem, BackKernels kernels, const Context& context);

}  // namespace fastweight::cuda::chunk_16bit
