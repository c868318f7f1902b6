// What the implementations of the short convolution receive: validated arguments and the sizes read off them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/sequences.h"
#include "fastweight/short_conv.h"

namespace fastweight {

struct ShortConvSizes {
  int64_t batch = 0;          // B
  int64_t tokens = 0;         // T
  int64_t channels = 0;       // D
  int64_t width = 0;          // W
  int64_t num_sequences = 0;  // N
};

// Args is ShortConvForward, ShortConvBackward or ShortConvStep. Validated: kernels trust it.
template <class Args>
struct ShortConvProblem {
  ShortConvSizes sizes;
  Args args;
  std::vector<Sequence> sequences;  // of host memory; empty on CUDA, and where there is nothing to do
  bool has_fp64 = false;            // any tensor, input or output
};

using ShortConvForwardProblem = ShortConvProblem<ShortConvForward>;
using ShortConvBackwardProblem = ShortConvProblem<ShortConvBackward>;
using ShortConvStepProblem = ShortConvProblem<ShortConvStep>;

}  // namespace fastweight
