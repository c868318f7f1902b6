// Host tensors in device memory: copies for a call, which are checked and copied back, and single tensors.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/tensor.h"
#include "support/device.h"
#include "support/tensor.h"

namespace fastweight::support {

// A tensor of a call.
struct NamedView {
  const char* name;
  TensorView* view;
  bool written;
};

// Copies of host views in device memory, each with its shape, strides, the bytes between its elements and its alignment
// up to 256 bytes, and with guard zones around it. The views are redirected to the copies.
class Placement {
 public:
  Placement(std::vector<NamedView> views, Device device);

  // Waits for the stream and copies what was written back to the host. Throws std::runtime_error if a guard zone or an
  // input has changed.
  void finish(void* stream);

 private:
  struct Block {
    void* host;
    size_t bytes, at;
    bool written;
  };
  std::vector<Block> blocks_;
  std::vector<char> staged_;  // the buffer as it was uploaded
  std::unique_ptr<DeviceBuffer> buffer_;
};

// A dense tensor in device memory; absent if made from an absent one.
class DeviceCopy {
 public:
  DeviceCopy(const Tensor& tensor, Device device);
  DeviceCopy(const TensorView& dense_host, Device device);

  TensorView view() const { return view_; }
  void set(const Tensor& tensor);  // of the same type and shape
  Tensor get() const;              // waits for the device

 private:
  size_t bytes() const;
  TensorView view_;
  std::unique_ptr<DeviceBuffer> buffer_;
};

}  // namespace fastweight::support
