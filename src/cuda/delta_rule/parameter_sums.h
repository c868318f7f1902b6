// The gradients of A_log and dt_bias from what each chunk contributes to them.
#pragma once

#include <cstdint>

#include "cuda/common/sequences.h"
#include "cuda/common/tensor.h"
#include "fastweight/context.h"

namespace fastweight::cuda {

// Of chunk c, in the order of all chunks, and value head h: parts[(c HV + h)(1 + bias_width)] is its sum for A_log over
// its tokens and channels; the numbers after it are those for dt_bias, over its tokens. Whoever fills the array does so
// for every chunk that exists (chunk_at), and has room for max_chunks of them.
struct ParameterSums {
  double* parts = nullptr;
  ChunkedSequences chunked;
  int64_t num_value_heads = 0;  // HV
  int64_t bias_width = 1;       // K where the gate is per channel, else 1
  DeviceTensor da_log;          // [HV]; absent: not wanted
  DeviceTensor ddt_bias;        // [HV] or [HV, K]; absent: not wanted

  FW_HOST_DEVICE int64_t width() const { return 1 + bias_width; }
  FW_HOST_DEVICE bool wanted() const { return da_log.present() || ddt_bias.present(); }
  // How many numbers `parts` has.
  int64_t count() const {
    return wanted() ? max_chunks(chunked.sequences, chunked.chunk_size) * num_value_heads * width() : 0;
  }
};

// Enqueues the sums over the chunks, in an order that depends on their number alone. Nothing where none is wanted.
void add_parameter_sums(const ParameterSums& sums, const Context& context);

}  // namespace fastweight::cuda
