// What the implementations of the building blocks receive: validated arguments and the sizes read off them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/sequences.h"
#include "fastweight/blocks.h"
#include "fastweight/delta_rule.h"

namespace fastweight {

// Those that a block does not have stay 0; the norms have none.
struct BlockSizes {
  int64_t batch = 0;            // B
  int64_t tokens = 0;           // T
  int64_t num_heads = 0;        // H
  int64_t num_value_heads = 0;  // HV
  int64_t group = 1;            // HV / H
  int64_t head_dim_k = 0;       // K
  int64_t head_dim_v = 0;       // V
  int64_t chunk_size = 0;       // C
  Gate gate = Gate::kNone;      // of gamma, or of the raw gate
};

// Args is one of the argument structs of blocks.h. Validated: kernels trust it. The tensors of chunk_local_cumsum and
// of gate_activation are rows, [B, T, HV, K]; a value per head is the row of its token, [B, T, 1, HV]. A_log and its
// gradient are [HV], dt_bias and its gradient [HV], or [HV, K] per channel. Where gates are not summed, sequences do not
// matter: they are the rows of the batch.
template <class Args>
struct BlockProblem {
  BlockSizes sizes;
  Args args;
  std::vector<Sequence> sequences;  // of host memory; empty on CUDA, and where there are no tokens
  bool has_fp64 = false;            // any tensor, input or output
};

}  // namespace fastweight
