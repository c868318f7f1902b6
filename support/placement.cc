#include "support/placement.h"

#include <cstring>
#include <stdexcept>

namespace fastweight::support {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kGuard = 512;
constexpr char kSentinel = 0x5a;

// From the first to the end of the last element; 0 for an absent or empty view.
size_t byte_extent(const TensorView& view) {
  if (!view.present() || view.data == nullptr) return 0;
  int64_t last = 0;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    if (view.shape[axis] == 0) return 0;
    last += (view.shape[axis] - 1) * view.strides[axis];
  }
  return static_cast<size_t>((last + 1) * element_size(view.dtype));
}

}  // namespace

Placement::Placement(std::vector<NamedView> views, Device device) {
  size_t end = 0;
  for (const NamedView& placed : views) {
    TensorView& view = *placed.view;
    if (!view.present()) continue;
    view.device = device;
    const size_t bytes = byte_extent(view);
    if (bytes == 0) continue;
    const size_t phase = reinterpret_cast<uintptr_t>(view.data) % kAlignment;
    const size_t at = (end + kGuard + kAlignment - 1) / kAlignment * kAlignment + phase;
    blocks_.push_back({view.data, bytes, at, placed.written});
    end = at + bytes;
  }
  staged_.assign(end + kGuard, kSentinel);
  for (const Block& block : blocks_) std::memcpy(staged_.data() + block.at, block.host, block.bytes);
  buffer_ = std::make_unique<DeviceBuffer>(staged_.size());
  buffer_->upload(staged_.data(), staged_.size());
  size_t next = 0;
  for (const NamedView& placed : views) {
    if (byte_extent(*placed.view) > 0) placed.view->data = buffer_->data() + blocks_[next++].at;
  }
}

void Placement::finish(void* stream) {
  wait_for_stream(stream);
  std::vector<char> now(staged_.size());
  buffer_->download(now.data(), now.size());
  for (const Block& block : blocks_) {
    if (!block.written) continue;
    std::memcpy(block.host, now.data() + block.at, block.bytes);
    std::memcpy(now.data() + block.at, staged_.data() + block.at, block.bytes);
  }
  if (now != staged_) throw std::runtime_error("device memory outside of the outputs was written");
}

DeviceCopy::DeviceCopy(const Tensor& tensor, Device device) : DeviceCopy(tensor.view(), device) {}

DeviceCopy::DeviceCopy(const TensorView& dense_host, Device device) : view_(dense_host) {
  if (!view_.present()) return;
  view_.device = device;
  buffer_ = std::make_unique<DeviceBuffer>(bytes());
  buffer_->upload(dense_host.data, bytes());
  view_.data = buffer_->data();
}

size_t DeviceCopy::bytes() const { return byte_extent(view_); }

void DeviceCopy::set(const Tensor& tensor) {
  const TensorView host = tensor.view();
  if (host.dtype != view_.dtype || host.rank != view_.rank || host.shape != view_.shape) {
    throw std::invalid_argument("DeviceCopy: expected a tensor of the same type and shape");
  }
  buffer_->upload(host.data, bytes());
}

Tensor DeviceCopy::get() const {
  if (!view_.present()) return {};
  Tensor tensor(view_.dtype, std::vector<int64_t>(view_.shape.begin(), view_.shape.begin() + view_.rank));
  buffer_->download(tensor.data(), bytes());
  return tensor;
}

}  // namespace fastweight::support
