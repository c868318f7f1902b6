#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace emulator {
namespace {

constexpr int kMultiprocessors = 4;

// Of a block: as on Hopper, unless the environment has another number of bytes.
int shared_limit() {
  const char* value = std::getenv("FASTWEIGHT_EMULATED_SHARED_MEMORY");
  return value == nullptr ? 227 * 1024 : std::atoi(value);
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t remember(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

// Allocations
// -----------------------------------------------------------------------------------------------------------

// The end of an allocation, rounded up to 256 bytes, is the end of its pages, and the page after it cannot be touched.
struct Allocation {
  void* pages;
  size_t bytes_of_pages;
  size_t bytes;
};

std::mutex memory_mutex;
std::map<const char*, Allocation> allocations;

cudaError_t allocate(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t rounded = (bytes + 255) / 256 * 256, whole = (rounded + page - 1) / page * page;
  void* pages = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return remember(cudaErrorMemoryAllocation);
  char* const end = static_cast<char*>(pages) + whole;
  mprotect(end, page, PROT_NONE);
  char* const data = end - rounded;
  std::memset(data, 0xff, rounded);
  const std::lock_guard lock(memory_mutex);
  allocations[data] = {pages, whole + page, bytes};
  *pointer = data;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  finish();
  const std::lock_guard lock(memory_mutex);
  const auto found = allocations.find(static_cast<const char*>(pointer));
  if (found == allocations.end()) return remember(cudaErrorInvalidValue);
  munmap(found->second.pages, found->second.bytes_of_pages);
  allocations.erase(found);
  return cudaSuccess;
}

bool is_device_memory(const void* pointer) {
  const std::lock_guard lock(memory_mutex);
  const auto* p = static_cast<const char*>(pointer);
  auto after = allocations.upper_bound(p);
  if (after == allocations.begin()) return false;
  --after;
  return p < after->first + after->second.bytes;
}

// Kernels -----------------------------------------------------------------------------------------------------------

std::mutex kernel_mutex;
std::map<const void*, size_t> allowed;  // dynamic shared memory, of kernels that asked for more than is free to all

size_t allowed_shared_memory(const void* kernel) {
  const std::lock_guard lock(kernel_mutex);
  const auto found = allowed.find(kernel);
  return found == allowed.end() ? 48 * 1024 : found->second;
}

// Streams and graphs ------------------------------------------------------------------------------------------------

using Work = std::function<void()>;

struct Stream {
  std::vector<Work>* captured = nullptr;  // where work goes while the stream is being captured
};

Stream* of(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }
bool capturing(cudaStream_t stream) { return stream != nullptr && of(stream)->captured != nullptr; }

void enqueue_work(cudaStream_t stream, Work work) {
  if (capturing(stream)) {
    of(stream)->captured->push_back(std::move(work));
  } else {
    work();
  }
}
// Of what is no kernel: the kernels before it have completed.
void enqueue_other_work(cudaStream_t stream, Work work) {
  enqueue_work(stream, [work = std::move(work)] {
    finish();
    work();
  });
}

using Graph = std::vector<Work>;
using Clock = std::chrono::steady_clock;

}  // namespace

cudaError_t enqueue(cudaStream_t stream, const void* kernel, const Grid& grid, std::function<void()> body) {
  const auto& b = grid.blocks;
  if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 0x7fffffffu || b.y > 65535 || b.z > 65535) {
    return remember(cudaErrorInvalidConfiguration);
  }
  if (grid.shared_bytes > static_cast<size_t>(shared_limit()) || grid.shared_bytes > allowed_shared_memory(kernel)) {
    return remember(cudaErrorInvalidValue);
  }
  enqueue_work(stream, [stream, grid, body = std::move(body)] { run(stream, grid, body); });
  return cudaSuccess;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t status) { return status == cudaSuccess ? "cudaSuccess" : "an emulated error"; }
const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    default:
      return "invalid argument";
  }
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : remember(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceSynchronize() {
  finish();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulator");
  properties->major = 9;
  properties->multiProcessorCount = kMultiprocessors;
  properties->totalGlobalMem = size_t{1} << 30;
  properties->l2CacheSize = 1 << 20;
  properties->sharedMemPerBlockOptin = static_cast<size_t>(shared_limit());
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_limit();
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    default:
      return remember(cudaErrorInvalidValue);
  }
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  *attributes = {};
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(allowed_shared_memory(kernel));
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > shared_limit()) {
    return remember(cudaErrorInvalidValue);
  }
  const std::lock_guard lock(kernel_mutex);
  allowed[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return allocate(pointer, bytes); }
// What was allocated during a capture belongs to the graph, which may run again.
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return capturing(stream) ? cudaSuccess : release(pointer);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type = is_device_memory(pointer) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  finish();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  enqueue_other_work(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  enqueue_other_work(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  finish();
  delete of(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  finish();
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  of(stream)->captured = new Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(of(stream)->captured, nullptr));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  finish();
  for (const Work& work : *reinterpret_cast<Graph*>(executable)) work();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new Clock::time_point);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Clock::time_point*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<Clock::time_point*>(event) = Clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  finish();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const auto time = [](cudaEvent_t event) { return *reinterpret_cast<Clock::time_point*>(event); };
  *ms = std::chrono::duration<float, std::milli>(time(end) - time(begin)).count();
  return cudaSuccess;
}
}
