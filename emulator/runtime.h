// The part of CUDA's runtime that launches kernels; the rest is in CUDA's own header, and runtime.cc defines it on host
// memory. Work is done at once, except while its stream is being captured, and by kernels that overlap (grid.h).
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "grid.h"

namespace emulator {

// `kernel` is the function, whose limit of shared memory counts.
cudaError_t enqueue(cudaStream_t stream, const void* kernel, const Grid& grid, std::function<void()> body);

}  // namespace emulator
