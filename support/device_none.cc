// A build without CUDA.
#include <stdexcept>

#include "support/device.h"

namespace fastweight::support {
namespace {

[[noreturn]] void fail() { throw std::runtime_error(why_no_device()); }

}  // namespace

std::string why_no_device() { return "built without CUDA"; }

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) { fail(); }
DeviceBuffer::~DeviceBuffer() = default;
void DeviceBuffer::upload(const void*, size_t, size_t) { fail(); }
void DeviceBuffer::download(void*, size_t, size_t) const { fail(); }
DeviceStream::DeviceStream() { fail(); }
DeviceStream::~DeviceStream() = default;
void DeviceStream::wait() const { fail(); }
DeviceGraph::DeviceGraph(const DeviceStream&, const std::function<void()>&) { fail(); }
DeviceGraph::~DeviceGraph() = default;
void DeviceGraph::launch(const DeviceStream&) const { fail(); }
double device_ms(const DeviceStream&, const std::function<void()>&) { fail(); }
double device_copy_gbps() { fail(); }
void wait_for_stream(void*) { fail(); }

}  // namespace fastweight::support
