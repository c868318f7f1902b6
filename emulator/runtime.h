// The part of CUDA's runtime that launches kernels; the rest is in CUDA's own header, and runtime.cc defines it on host
// memory. Work is done at once, except while its stream is being captured.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "grid.h"

namespace emulator {

cudaError_t enqueue(cudaStream_t stream, const Grid& grid, std::function<void()> body);

}  // namespace emulator
