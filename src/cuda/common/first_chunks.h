// The number of chunks before each sequence, computed on the device.
#pragma once

#include <cstdint>

#include "cuda/common/sequences.h"
#include "fastweight/context.h"

namespace fastweight::cuda {

// Enqueues first_chunk[n] = chunks of the sequences before n, for n = 0 .. count.
void build_first_chunks(const Sequences& sequences, int64_t chunk_size, int64_t* first_chunk, const Context& context);

}  // namespace fastweight::cuda
