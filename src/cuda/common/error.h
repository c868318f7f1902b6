// The one place where CUDA's status codes become exceptions.
#pragma once

#include <cuda_runtime_api.h>

namespace fastweight::cuda {

// Throws Error(kDevice), or kOutOfMemory, with the name of the call and CUDA's text, unless the status is a success.
// CUDA's own record of the last error is cleared, so that nobody finds it a second time.
void check_cuda(cudaError_t status, const char* call);

}  // namespace fastweight::cuda
