// Hostile calls through the C interface, for any operator family. Bytes become a valid small call of one mode, a few of
// whose fields are then spoiled. Every view that could pass validation lies in a heap block of exactly its extent, so
// that a report of the address sanitizer means a fault of the library. A call that is refused must leave its outputs as
// they were.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/fields.h"
#include "fastweight/c_api.h"

namespace fastweight::fuzz {

inline constexpr int64_t kMaxBytes = int64_t{1} << 20;  // of one tensor
inline constexpr int64_t kMaxWork = int64_t{1}
                                    << 21;  // tokens times the elements of a state: wide heads see few tokens

enum Mode { kForward, kBackward, kStep };

inline int64_t element_size(int32_t dtype) {
  if (dtype == FW_BF16 || dtype == FW_F16) return 2;
  return dtype == FW_F64 || dtype == FW_I64 ? 8 : 4;
}

// Bytes from the first to the end of the last element; -1 when the view is malformed or larger than a block.
inline int64_t extent_in_bytes(const fw_tensor& tensor) {
  if (tensor.rank < 0 || tensor.rank > FW_MAX_RANK) return -1;
  int64_t last = 0;
  bool empty = false;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    const int64_t extent = tensor.shape[axis], stride = tensor.strides[axis];
    if (extent < 0 || stride < 0) return -1;
    empty |= extent == 0;
    int64_t step = 0;
    if (extent > 1 && __builtin_mul_overflow(extent - 1, stride, &step)) return -1;
    if (step > kMaxBytes || last > kMaxBytes) return -1;
    last += step;
  }
  if (empty) return 0;
  const int64_t bytes = (last + 1) * element_size(tensor.dtype);
  return bytes > kMaxBytes ? -1 : bytes;
}

// A family draws its sizes, options and tensors in its constructor, then calls spoil_and_allocate.
class HostileCall {
 public:
  virtual ~HostileCall() = default;
  HostileCall(const HostileCall&) = delete;
  HostileCall& operator=(const HostileCall&) = delete;

  void run() {
    const std::vector<std::vector<uint8_t>> before = outputs();
    const char* name = nullptr;
    const fw_status status = call(null_context_ ? nullptr : &context_, null_args_, &name);
    if (status == FW_OK) {
      expect(name != nullptr && name[0] != '\0', "a name");
    } else {
      expect(status == FW_INVALID_ARGUMENT || status == FW_UNSUPPORTED, fw_last_error());
      expect(fw_last_error()[0] != '\0', "a text");
      expect(before == outputs(), "outputs left alone");
    }
  }

 protected:
  explicit HostileCall(FuzzedDataProvider& data) : data_(data) {
    fw_context_init(&context_);
    mode_ = data_.PickValueInArray({kForward, kBackward, kStep});
  }

  virtual fw_status call(const fw_context* context, bool null_args, const char** name) = 0;
  virtual void spoil_options() = 0;
  virtual void drop_inputs() = 0;  // null pointers to the structs
  virtual void drop_options() = 0;

  void spoil_and_allocate() {
    const int spoils = data_.ConsumeIntegralInRange(0, 3);
    for (int i = 0; i < spoils; ++i) spoil();
    for (Slot& slot : slots_) allocate(slot);
    if (data_.ConsumeIntegralInRange(0, 7) == 0) alias();
  }

  bool flag() { return data_.ConsumeBool(); }
  bool rarely() { return data_.ConsumeIntegralInRange(0, 15) == 0; }
  int32_t floating() { return data_.PickValueInArray<int32_t>({FW_F32, FW_BF16, FW_F16, FW_F64}); }
  int32_t or_fp32(int32_t dtype) { return flag() ? dtype : static_cast<int32_t>(FW_F32); }

  // B, N and T, or packed sequences. A token costs state_elements.
  void draw_sequences(int64_t state_elements) {
    N_ = B_ = data_.ConsumeIntegralInRange(0, 3);
    const int64_t max_tokens = kMaxWork / (std::max<int64_t>(B_, 1) * state_elements);
    T_ = data_.ConsumeIntegralInRange<int64_t>(0, std::min<int64_t>(max_tokens, rarely() ? 150 : 40));
    if (flag()) {
      B_ = 1;
      N_ = data_.ConsumeIntegralInRange(0, 4);
      offsets_ = {0};
      for (int64_t n = 0; n < N_; ++n) offsets_.push_back(data_.ConsumeIntegralInRange<int64_t>(offsets_.back(), T_));
      offsets_.back() = N_ == 0 ? 0 : T_;
      if (N_ == 0) T_ = 0;
    }
  }

  // Dense, or with a padded last axis.
  void add(fw_tensor& tensor, bool output, int32_t dtype, std::vector<int64_t> shape) {
    tensor = fw_tensor_dense(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.data());
    if (shape.size() > 1 && rarely()) {
      shape.back() += 3;
      const fw_tensor padded = fw_tensor_dense(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.data());
      std::copy_n(padded.strides, FW_MAX_RANK, tensor.strides);
    }
    slots_.push_back({&tensor, output, {}, nullptr});
  }

  void add_integers(fw_tensor& tensor, bool output, int32_t dtype, const std::vector<int64_t>& values) {
    const int64_t count = static_cast<int64_t>(values.size());
    tensor = fw_tensor_dense(nullptr, dtype, 1, &count);
    slots_.push_back({&tensor, output, values, nullptr});
  }
  void add_integers(fw_tensor& tensor, const std::vector<int64_t>& values) {
    add_integers(tensor, false, flag() ? FW_I32 : FW_I64, values);
  }

  // Most of the time, where the input is there.
  void add_gradient(fw_tensor& gradient, const fw_tensor& input, int32_t dtype) {
    if (input.rank == 0 || rarely()) return;
    add(gradient, true, dtype, std::vector<int64_t>(input.shape, input.shape + input.rank));
  }

  // All gradients of a family's backward; those of states have the type of states.
  template <class Backward, class CBackward, class CInputs>
  void add_gradients(CBackward& backward, const CInputs& inputs, int32_t state_dtype) {
    using Inputs = decltype(Backward::in);
    for (const auto& row : kTensors<Backward, CBackward>) {
      if (row.gradient_of == nullptr) continue;
      const fw_tensor& input = inputs.*input_row<Inputs, CInputs>(row.gradient_of)->view;
      add_gradient(backward.*row.view, input, row.use == Use::kWritesState ? state_dtype : or_fp32(input.dtype));
    }
  }

  // Any of the options, or the size of their struct.
  template <class Options, class COptions>
  void spoil_any_option(COptions& options) {
    const auto& rows = kOptions<Options, COptions>;
    size_t chosen = data_.ConsumeIntegralInRange<size_t>(0, std::tuple_size_v<std::remove_cvref_t<decltype(rows)>>);
    if (chosen-- == 0) {
      options.struct_size = data_.ConsumeIntegral<size_t>();
      return;
    }
    const auto spoil_if_chosen = [&](auto& value) {
      if (chosen-- == 0) spoil_option(value);
    };
    std::apply([&](const auto&... row) { (spoil_if_chosen(options.*row.value), ...); }, rows);
  }

  // For N + 2 slots.
  std::vector<int64_t> draw_state_indices() {
    std::vector<int64_t> indices;
    for (int64_t n = 0; n < N_; ++n) indices.push_back(rarely() ? -1 : N_ + 1 - n);
    return indices;
  }

  int64_t hostile_integer() {
    return data_.PickValueInArray<int64_t>(
        {-1, 0, 1, 2, 3, 5, 16, 257, INT32_MAX, int64_t{1} << 40, INT64_MAX / 2, INT64_MAX, INT64_MIN});
  }

  void spoil_option(int32_t& value) { value = static_cast<int32_t>(hostile_integer()); }
  void spoil_option(double& value) { value = hostile_number(); }

  double hostile_number() {
    return data_.PickValueInArray({0.0, -0.5, -5.0, -6.0, 1.0, static_cast<double>(NAN), static_cast<double>(-INFINITY),
                                   static_cast<double>(INFINITY), 1e308});
  }

  FuzzedDataProvider& data_;
  Mode mode_;
  int64_t B_ = 0, T_ = 0, N_ = 0;
  std::vector<int64_t> offsets_;  // empty: one length for all
  fw_context context_;

 private:
  struct Slot {
    fw_tensor* tensor;
    bool output;
    std::vector<int64_t> values;  // of an integer vector
    std::unique_ptr<uint8_t[]> memory;
    int64_t bytes = 0;
    int64_t misalignment = 0;
    bool null = false;
  };

  static void expect(bool condition, const char* text) {
    if (condition) return;
    std::fprintf(stderr, "expected: %s\n", text);
    std::abort();
  }

  void spoil() {
    const int kind = data_.ConsumeIntegralInRange(0, 19);
    if (kind < 16) {
      spoil_tensor(slots_[data_.ConsumeIntegralInRange<size_t>(0, slots_.size() - 1)]);
    } else if (kind < 18) {
      spoil_options();
    } else {
      spoil_context();
    }
  }

  void spoil_tensor(Slot& slot) {
    fw_tensor& tensor = *slot.tensor;
    const size_t axis = data_.ConsumeIntegralInRange<size_t>(0, FW_MAX_RANK - 1);
    switch (data_.ConsumeIntegralInRange(0, 12)) {
      case 0:
        tensor.shape[axis] = hostile_integer();
        break;
      case 1:
        tensor.strides[axis] = hostile_integer();
        break;
      case 2:
        tensor.rank = data_.ConsumeIntegralInRange(-2, 7);
        break;
      case 3:
        tensor.dtype = data_.ConsumeIntegralInRange(-2, 8);
        break;
      case 4:
        tensor.device_type = data_.ConsumeIntegralInRange(-1, 2);
        break;
      case 5:
        tensor.device_index = data_.ConsumeIntegralInRange(-1, 2);
        break;
      case 6:
        slot.null = true;
        break;
      case 7:
        slot.misalignment = data_.ConsumeIntegralInRange(1, 8);
        break;
      case 8:
        if (slot.values.empty()) break;
        slot.values[data_.ConsumeIntegralInRange<size_t>(0, slot.values.size() - 1)] = hostile_integer();
        break;
      case 9:
        std::memset(&tensor, 0, sizeof(tensor));
        slot.null = true;
        break;
      case 10: {  // swap two axes: valid for an input if the extents agree
        const size_t other = data_.ConsumeIntegralInRange<size_t>(0, FW_MAX_RANK - 1);
        std::swap(tensor.strides[axis], tensor.strides[other]);
        if (flag()) std::swap(tensor.shape[axis], tensor.shape[other]);
        break;
      }
      case 11:
        std::fill_n(tensor.strides, FW_MAX_RANK, 0);
        break;
      case 12:
        tensor.shape[axis] += data_.ConsumeIntegralInRange(-1, 1);
        break;
    }
  }

  void spoil_context() {
    switch (data_.ConsumeIntegralInRange(0, 9)) {
      case 0:
        context_.num_threads = -1;
        break;
      case 1:
        context_.device_type = data_.ConsumeIntegralInRange(-1, 2);
        break;
      case 2:
        context_.device_index = data_.ConsumeIntegralInRange(-1, 2);
        break;
      case 3:
        context_.struct_size = data_.ConsumeIntegral<size_t>();
        break;
      case 4:
        context_.release = [](void*, void*, size_t) {};
        break;
      case 5:
        context_.implementation = "nonsense";
        break;
      case 6:
        drop_inputs();
        break;
      case 7:
        drop_options();
        break;
      case 8:
        null_context_ = true;
        break;
      case 9:
        null_args_ = true;
        break;
    }
  }

  // A block of exactly the view's extent. A view that is too large for a block stays null: refused unless it is empty.
  void allocate(Slot& slot) {
    if (slot.null) return;
    const int64_t bytes = extent_in_bytes(*slot.tensor);
    if (bytes < 0) return;
    slot.bytes = bytes + slot.misalignment;
    slot.memory.reset(new uint8_t[static_cast<size_t>(slot.bytes)]());
    slot.tensor->data = slot.memory.get() + slot.misalignment;
    fill(slot);
  }

  void fill(Slot& slot) {
    uint8_t* const memory = static_cast<uint8_t*>(slot.tensor->data);
    const int64_t size = element_size(slot.tensor->dtype);
    const int64_t count = (slot.bytes - slot.misalignment) / size;
    if (!slot.values.empty()) {
      const int64_t stride = slot.tensor->strides[0];
      for (size_t i = 0; i < slot.values.size(); ++i) {
        const int64_t index = stride > count ? count : static_cast<int64_t>(i) * stride;
        if (index < 0 || index >= count) continue;
        std::memcpy(memory + index * size, &slot.values[i], static_cast<size_t>(size));  // little endian
      }
      return;
    }
    // Any bits are legal values. Small numbers keep the recurrence away from infinity most of the time: the top byte
    // of a float between 0.008 and 1 is 0x3c to 0x3f in every type (larger in half precision).
    const bool raw = rarely();
    uint32_t random = data_.ConsumeIntegral<uint32_t>() | 1;
    for (int64_t i = 0; i < slot.bytes - slot.misalignment; ++i) {
      random = random * 1664525u + 1013904223u;
      const uint8_t byte = static_cast<uint8_t>(random >> 24);
      memory[i] = raw || i % size != size - 1 ? byte : static_cast<uint8_t>((byte & 0x83) | 0x3c);
    }
  }

  // Lets one tensor live in the memory of another.
  void alias() {
    Slot& guest = slots_[data_.ConsumeIntegralInRange<size_t>(0, slots_.size() - 1)];
    Slot& host = slots_[data_.ConsumeIntegralInRange<size_t>(0, slots_.size() - 1)];
    const int64_t bytes = extent_in_bytes(*guest.tensor);
    if (!guest.values.empty() || bytes < 0 || guest.tensor->data == nullptr || bytes > host.bytes) return;
    guest.tensor->data = host.memory.get() + data_.ConsumeIntegralInRange<int64_t>(0, host.bytes - bytes);
  }

  std::vector<std::vector<uint8_t>> outputs() const {
    std::vector<std::vector<uint8_t>> copies;
    for (const Slot& slot : slots_) {
      if (slot.output && slot.bytes > 0) copies.emplace_back(slot.memory.get(), slot.memory.get() + slot.bytes);
    }
    return copies;
  }

  bool null_context_ = false;
  bool null_args_ = false;
  std::vector<Slot> slots_;
};

}  // namespace fastweight::fuzz
