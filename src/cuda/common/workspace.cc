#include "cuda/common/workspace.h"

#include <string>

#include "cuda/common/error.h"
#include "fastweight/error.h"

namespace fastweight::cuda {

DeviceWorkspace::DeviceWorkspace(const Context& context, size_t bytes)
    : source_(context.workspace), stream_(stream_of(context)), bytes_(bytes) {
  if (bytes_ == 0) return;
  if (source_.allocate == nullptr) {
    check_cuda(cudaMallocAsync(&data_, bytes_, stream_), "cudaMallocAsync");
    return;
  }
  data_ = source_.allocate(source_.user, bytes_);
  if (data_ == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "workspace: expected " + std::to_string(bytes_) + " bytes, got none");
  }
}

DeviceWorkspace::~DeviceWorkspace() {
  if (data_ == nullptr) return;
  if (source_.allocate == nullptr) {
    cudaFreeAsync(data_, stream_);
  } else {
    source_.release(source_.user, data_, bytes_);
  }
}

}  // namespace fastweight::cuda
