// CUDA memory, streams and graphs for tests and the bench, without CUDA's types. In a build without CUDA, and on a
// machine without a device, `why_no_device` says so and everything else throws.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace fastweight::support {

// Empty when there is a CUDA device to run on.
std::string why_no_device();

// Memory of the current device.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  char* data() const { return data_; }
  size_t size() const { return bytes_; }

  // Both wait for the device.
  void upload(const void* from, size_t bytes, size_t at = 0);
  void download(void* to, size_t bytes, size_t at = 0) const;

 private:
  char* data_ = nullptr;
  size_t bytes_;
};

// A stream that does not wait for the default one.
class DeviceStream {
 public:
  DeviceStream();
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  void* get() const { return stream_; }
  void wait() const;

 private:
  void* stream_ = nullptr;
};

// What a function enqueues on a stream, to be run again and again. The function runs once, during the capture, in the
// mode in which every call that is unsafe while capturing fails.
class DeviceGraph {
 public:
  DeviceGraph(const DeviceStream& stream, const std::function<void()>& enqueue);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  void launch(const DeviceStream& stream) const;

 private:
  [[maybe_unused]] void* graph_ = nullptr;
};

// Milliseconds that the device takes for what a function enqueues on the stream, by events around it.
double device_ms(const DeviceStream& stream, const std::function<void()>& enqueue);

// Bytes read plus bytes written per second by a copy of a large buffer within the device, in GB/s: the best of a few.
double device_copy_gbps();

// Waits for a stream given as in Context::stream.
void wait_for_stream(void* stream);

}  // namespace fastweight::support
