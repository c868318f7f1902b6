#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>

#include "support/device.h"

namespace fastweight::support {
namespace {

void require(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

std::string why_no_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return std::string("no CUDA device: ") + cudaGetErrorString(status);
  }
  return count > 0 ? "" : "no CUDA device";
}

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  void* pointer = nullptr;
  if (bytes > 0) require(cudaMalloc(&pointer, bytes), "cudaMalloc");
  data_ = static_cast<char*>(pointer);
}

DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

void DeviceBuffer::upload(const void* from, size_t bytes, size_t at) {
  if (bytes == 0) return;
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  require(cudaMemcpy(data_ + at, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  // A copy from pageable memory returns when it has been staged; streams that wait for no other could overtake it.
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void DeviceBuffer::download(void* to, size_t bytes, size_t at) const {
  if (bytes == 0) return;
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  require(cudaMemcpy(to, data_ + at, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

DeviceStream::DeviceStream() {
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  stream_ = stream;
}

DeviceStream::~DeviceStream() { cudaStreamDestroy(as_stream(stream_)); }

void DeviceStream::wait() const { wait_for_stream(stream_); }

DeviceGraph::DeviceGraph(const DeviceStream& stream, const std::function<void()>& enqueue) {
  require(cudaStreamBeginCapture(as_stream(stream.get()), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(as_stream(stream.get()), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  require(cudaStreamEndCapture(as_stream(stream.get()), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  require(status, "cudaGraphInstantiate");
  graph_ = executable;
}

DeviceGraph::~DeviceGraph() { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_)); }

void DeviceGraph::launch(const DeviceStream& stream) const {
  require(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), as_stream(stream.get())), "cudaGraphLaunch");
}

double device_ms(const DeviceStream& stream, const std::function<void()>& enqueue) {
  cudaEvent_t begin = nullptr, end = nullptr;
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  require(cudaEventRecord(begin, as_stream(stream.get())), "cudaEventRecord");
  enqueue();
  require(cudaEventRecord(end, as_stream(stream.get())), "cudaEventRecord");
  require(cudaEventSynchronize(end), "cudaEventSynchronize");
  float ms = 0;
  require(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return static_cast<double>(ms);
}

double device_copy_gbps() {
  constexpr size_t kBytes = size_t{1} << 30;
  const DeviceBuffer from(kBytes), to(kBytes);
  const DeviceStream stream;
  double best = 0;
  for (int round = 0; round < 6; ++round) {
    const double ms = device_ms(stream, [&] {
      require(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, as_stream(stream.get())),
              "cudaMemcpyAsync");
    });
    best = std::max(best, 2e-6 * static_cast<double>(kBytes) / ms);
  }
  return best;
}

void wait_for_stream(void* stream) { require(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize"); }

}  // namespace fastweight::support
