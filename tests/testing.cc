#include "tests/testing.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fastweight::test {

bool reduced() {
  const char* value = std::getenv("FASTWEIGHT_TEST_REDUCED");
  return value != nullptr && std::string(value) != "" && std::string(value) != "0";
}

std::string golden_folder(const char* of_the_build) {
  const char* value = std::getenv("FASTWEIGHT_GOLDEN_DIR");
  return value == nullptr ? of_the_build : value;
}

Device& device() {
  static Device value = [] {
    const char* name = std::getenv("FASTWEIGHT_TEST_DEVICE");
    return name != nullptr && std::string(name) == "cuda" ? Device{DeviceType::kCuda, 0} : Device{};
  }();
  return value;
}

bool emulated() { return reduced() && device().type == DeviceType::kCuda; }

const char* device_name() { return device().type == DeviceType::kCuda ? "cuda" : "cpu"; }

Context context_for(const std::string& implementation, int num_threads) {
  Context context;
  context.device = device();
  context.implementation = implementation;
  context.num_threads = num_threads;
  return context;
}

Context reference_context() {
  Context context;
  context.implementation = "reference";
  return context;
}

Tally& Tally::get() {
  static Tally* const tally = static_cast<Tally*>(::testing::AddGlobalTestEnvironment(new Tally));
  return *tally;
}

void Tally::ran(const std::string& name) { ++entries_[name].ran; }

void Tally::declined(const std::string& name, const std::string& reason) {
  ++entries_[name].declined;
  entries_[name].reasons.insert(reason);
}

void Tally::SetUp() {
  const std::string reason = device().type == DeviceType::kCuda ? support::why_no_device() : "";
  if (reason.empty()) return;
  std::printf("skipped: %s\n", reason.c_str());
  std::exit(kSkipped);
}

void Tally::TearDown() {
  for (const auto& [name, entry] : entries_) {
    std::printf("%-20s ran %d, declined %d\n", name.c_str(), entry.ran, entry.declined);
    for (const std::string& reason : entry.reasons) std::printf("    %s\n", reason.c_str());
    if (::testing::GTEST_FLAG(filter) == "*") {
      EXPECT_GT(entry.ran, 0) << name << " declined every case";
    }
  }
}

int64_t environment_number(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoll(value, nullptr, 10);
}

std::vector<std::string> names_of(const std::vector<ImplementationInfo>& infos, Mode mode) {
  std::vector<std::string> names;
  for (const ImplementationInfo& info : infos) {
    if (info.mode == name_of(mode) && info.device == device_name()) names.push_back(info.name);
  }
  return names;
}

Tensor slice(const Tensor& x, size_t axis, int64_t begin, int64_t end) {
  if (!x.present()) return {};
  std::vector<int64_t> shape = x.shape();
  int64_t inner = 1, outer = 1;
  for (size_t i = 0; i < shape.size(); ++i) (i < axis ? outer : inner) *= i == axis ? 1 : shape[i];
  const int64_t extent = shape[axis];
  shape[axis] = end - begin;
  Tensor result(x.dtype(), shape);
  const size_t width = static_cast<size_t>(element_size(x.dtype()) * inner);
  const size_t bytes = width * static_cast<size_t>(end - begin);
  for (int64_t i = 0; i < outer && bytes > 0; ++i) {
    std::memcpy(static_cast<std::byte*>(result.data()) + static_cast<size_t>(i) * bytes,
                static_cast<const std::byte*>(x.data()) + static_cast<size_t>(i * extent + begin) * width, bytes);
  }
  return result;
}

namespace {

constexpr int64_t kGuard = 64;  // elements
constexpr int kSentinel = 0x5a;

size_t byte_size(const Tensor& x) { return static_cast<size_t>(x.size() * element_size(x.dtype())); }

}  // namespace

size_t StridedTensor::buffer_bytes() const { return byte_size(buffer_); }

template <class Visit>
void StridedTensor::for_each_element(const Visit& visit) const {
  int64_t count = 1;
  for (int64_t extent : shape_) count *= extent;
  std::vector<int64_t> index(shape_.size());
  int64_t position = kGuard;
  for (int64_t flat = 0; flat < count; ++flat) {
    visit(flat, position);
    for (size_t axis = shape_.size(); axis-- > 0;) {
      position += view_.strides[axis];
      if (++index[axis] < shape_[axis]) break;
      position -= view_.strides[axis] * shape_[axis];
      index[axis] = 0;
    }
  }
}

StridedTensor::StridedTensor(const Tensor& x, Layout layout) {
  if (!x.present()) return;
  std::vector<size_t> order(x.shape().size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (layout == Layout::kHeadsFirst && order.size() >= 3) std::swap(order[1], order[2]);
  if (layout == Layout::kReversed) std::reverse(order.begin(), order.end());

  view_ = x.view();
  int64_t stride = layout == Layout::kEverySecond ? 2 : 1;
  for (size_t i = order.size(); i-- > 0;) {
    view_.strides[order[i]] = stride;
    stride *= view_.shape[order[i]];
    if (layout != Layout::kDense) stride += layout == Layout::kAlignedRows ? 4 : 3;
  }
  buffer_ = Tensor(x.dtype(), {stride + 2 * kGuard});
  std::memset(buffer_.data(), kSentinel, buffer_bytes());
  view_.data = static_cast<std::byte*>(buffer_.data()) + kGuard * element_size(x.dtype());
  shape_ = x.shape();
  for_each_element([&](int64_t flat, int64_t position) { buffer_.set(position, x[flat]); });
}

Tensor StridedTensor::dense() const {
  if (shape_.empty()) return {};
  Tensor result(buffer_.dtype(), shape_);
  for_each_element([&](int64_t flat, int64_t position) { result.set(flat, buffer_[position]); });
  return result;
}

bool StridedTensor::guards_intact() const {
  if (shape_.empty()) return true;
  const size_t size = static_cast<size_t>(element_size(buffer_.dtype()));
  std::vector<std::byte> bytes(buffer_bytes());
  std::memcpy(bytes.data(), buffer_.data(), bytes.size());
  for_each_element([&](int64_t, int64_t position) {
    std::memset(bytes.data() + static_cast<size_t>(position) * size, kSentinel, size);
  });
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte x) { return x == static_cast<std::byte>(kSentinel); });
}

StridedArguments::StridedArguments(const std::vector<support::NamedView>& dense, Layout layout) {
  for (const support::NamedView& argument : dense) {
    TensorView& view = *argument.view;
    if (!view.present()) continue;
    Tensor values(view.dtype, std::vector<int64_t>(view.shape.begin(), view.shape.begin() + view.rank));
    if (values.size() > 0) std::memcpy(values.data(), view.data, byte_size(values));
    copies_.push_back({view.data, argument.written, StridedTensor(values, layout)});
    view = copies_.back().strided.view();
  }
}

bool StridedArguments::finish() {
  bool intact = true;
  for (const Copy& copy : copies_) {
    intact = intact && copy.strided.guards_intact();
    const Tensor values = copy.strided.dense();
    if (copy.written && values.size() > 0) std::memcpy(copy.dense, values.data(), byte_size(values));
  }
  return intact;
}

}  // namespace fastweight::test
