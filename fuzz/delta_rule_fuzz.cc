// Hostile calls through the C interface. Bytes become a valid small call of one mode, a few of whose fields are then
// spoiled. Every view that could pass validation lies in a heap block of exactly its extent, so that a report of the
// address sanitizer means a fault of the library. A call that is refused must leave its outputs as they were.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fastweight/c_api.h"

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 20;  // of one tensor
constexpr int64_t kMaxWork = int64_t{1} << 21;   // B T HV K V: wide heads see few tokens

enum Mode { kForward, kBackward, kStep };

int64_t element_size(int32_t dtype) {
  if (dtype == FW_BF16 || dtype == FW_F16) return 2;
  return dtype == FW_F64 || dtype == FW_I64 ? 8 : 4;
}

// Bytes from the first to the end of the last element; -1 when the view is malformed or larger than a block.
int64_t extent_in_bytes(const fw_tensor& tensor) {
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

class Call {
 public:
  explicit Call(FuzzedDataProvider& data) : data_(data) {
    fw_context_init(&context_);
    fw_delta_rule_options_init(&options_);
    fw_delta_rule_inputs_init(&inputs_);
    fw_delta_rule_forward_args_init(&forward_);
    fw_delta_rule_backward_args_init(&backward_);
    fw_delta_rule_step_args_init(&step_);
    forward_.inputs = backward_.inputs = step_.inputs = &inputs_;
    forward_.options = backward_.options = step_.options = &options_;
    mode_ = data_.PickValueInArray({kForward, kBackward, kStep});
    draw_sizes();
    draw_options();
    draw_tensors();
    const int spoils = data_.ConsumeIntegralInRange(0, 3);
    for (int i = 0; i < spoils; ++i) spoil();
    for (size_t i = 0; i < slots_.size(); ++i) allocate(slots_[i]);
    if (data_.ConsumeIntegralInRange(0, 7) == 0) alias();
  }

  void run() {
    const std::vector<std::vector<uint8_t>> before = outputs();
    const char* name = nullptr;
    const fw_context* context = null_context_ ? nullptr : &context_;
    fw_status status = FW_OK;
    if (mode_ == kForward) status = fw_delta_rule_forward(context, null_args_ ? nullptr : &forward_, &name);
    if (mode_ == kBackward) status = fw_delta_rule_backward(context, null_args_ ? nullptr : &backward_, &name);
    if (mode_ == kStep) status = fw_delta_rule_step(context, null_args_ ? nullptr : &step_, &name);
    if (status == FW_OK) {
      expect(name != nullptr && name[0] != '\0', "a name");
    } else {
      expect(status == FW_INVALID_ARGUMENT || status == FW_UNSUPPORTED, fw_last_error());
      expect(fw_last_error()[0] != '\0', "a text");
      expect(before == outputs(), "outputs left alone");
    }
  }

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

  bool flag() { return data_.ConsumeBool(); }
  bool rarely() { return data_.ConsumeIntegralInRange(0, 15) == 0; }
  int32_t floating() { return data_.PickValueInArray<int32_t>({FW_F32, FW_BF16, FW_F16, FW_F64}); }

  void draw_sizes() {
    H_ = data_.ConsumeIntegralInRange(1, 2);
    HV_ = H_ * data_.ConsumeIntegralInRange(1, 3);
    const int max_width = rarely() ? 256 : 20;
    K_ = data_.ConsumeIntegralInRange(1, max_width);
    V_ = data_.ConsumeIntegralInRange(1, max_width);
    N_ = B_ = data_.ConsumeIntegralInRange(0, 3);
    const int64_t max_tokens = kMaxWork / (std::max<int64_t>(B_, 1) * HV_ * K_ * V_);
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

  void draw_options() {
    options_.gate = data_.ConsumeIntegralInRange(0, 2);
    options_.chunk_size = data_.PickValueInArray({16, 32, 64});
    if (flag()) options_.scale = data_.PickValueInArray({0.0, 0.5, -1.0, 1e300});
    options_.state_v_first = flag();
    options_.qk_l2norm = flag();
    options_.beta_sigmoid = flag();
    options_.allow_neg_eigval = options_.beta_sigmoid && flag();
    options_.gate_in_kernel = options_.gate != FW_GATE_NONE && flag();
    if (options_.gate == FW_GATE_PER_CHANNEL) {
      if (options_.gate_in_kernel && flag()) options_.lower_bound = -4;
      options_.safe_gate = (!options_.gate_in_kernel || options_.lower_bound != FW_UNSET) && flag();
    }
    context_.num_threads = data_.ConsumeIntegralInRange(1, 3);
    context_.implementation = data_.PickValueInArray<const char*>({nullptr, "", "chunk", "recurrent", "reference"});
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

  void add_integers(fw_tensor& tensor, const std::vector<int64_t>& values) {
    const int32_t dtype = flag() ? FW_I32 : FW_I64;
    const int64_t count = static_cast<int64_t>(values.size());
    tensor = fw_tensor_dense(nullptr, dtype, 1, &count);
    slots_.push_back({&tensor, false, values, nullptr});
  }

  std::vector<int64_t> state_shape(int64_t count) const {
    if (options_.state_v_first) return {count, HV_, V_, K_};
    return {count, HV_, K_, V_};
  }

  std::vector<int64_t> chunk_states_shape() const {
    int64_t chunks = 0;
    const auto count = [&](int64_t length) { return (length + options_.chunk_size - 1) / options_.chunk_size; };
    if (offsets_.empty()) chunks = count(T_);
    for (size_t n = 1; n < offsets_.size(); ++n) chunks += count(offsets_[n] - offsets_[n - 1]);
    std::vector<int64_t> shape = state_shape(B_);
    shape.insert(shape.begin() + 1, chunks);
    return shape;
  }

  void draw_tensors() {
    const int32_t dtype = floating();
    const auto or_fp32 = [&](int32_t type) { return flag() ? type : static_cast<int32_t>(FW_F32); };
    const auto gradient_of = [&](fw_tensor& gradient, const fw_tensor& input) {
      if (input.rank == 0 || rarely()) return;
      add(gradient, true, or_fp32(input.dtype), std::vector<int64_t>(input.shape, input.shape + input.rank));
    };
    add(inputs_.q, false, dtype, {B_, T_, H_, K_});
    add(inputs_.k, false, dtype, {B_, T_, H_, K_});
    add(inputs_.v, false, dtype, {B_, T_, HV_, V_});
    if (options_.gate == FW_GATE_PER_HEAD) add(inputs_.g, false, floating(), {B_, T_, HV_});
    if (options_.gate == FW_GATE_PER_CHANNEL) add(inputs_.g, false, floating(), {B_, T_, HV_, K_});
    if (options_.beta_sigmoid || flag()) {
      if (rarely()) {
        add(inputs_.beta, false, floating(), {B_, T_, HV_, V_});
      } else {
        add(inputs_.beta, false, floating(), {B_, T_, HV_});
      }
    }
    if (options_.gate_in_kernel) {
      if (options_.lower_bound == FW_UNSET || flag()) add(inputs_.a_log, false, floating(), {HV_});
      if (flag()) add(inputs_.dt_bias, false, floating(), {options_.gate == FW_GATE_PER_HEAD ? HV_ : HV_ * K_});
    }
    if (!offsets_.empty()) add_integers(inputs_.cu_seqlens, offsets_);
    if (mode_ != kStep && flag()) add(inputs_.initial_state, false, floating(), state_shape(N_));

    const int32_t state_dtype = dtype == FW_F64 ? or_fp32(FW_F64) : static_cast<int32_t>(FW_F32);
    if (mode_ == kForward) {
      add(forward_.o, true, or_fp32(dtype), {B_, T_, HV_, V_});
      if (flag()) add(forward_.final_state, true, state_dtype, state_shape(N_));
      if (flag()) add(forward_.chunk_states, true, or_fp32(dtype), chunk_states_shape());
    } else if (mode_ == kBackward) {
      if (flag()) add(backward_.d_o, false, or_fp32(dtype), {B_, T_, HV_, V_});
      if (flag()) add(backward_.d_final_state, false, floating(), state_shape(N_));
      if (flag()) add(backward_.chunk_states, false, state_dtype, chunk_states_shape());
      gradient_of(backward_.dq, inputs_.q);
      gradient_of(backward_.dk, inputs_.k);
      gradient_of(backward_.dv, inputs_.v);
      gradient_of(backward_.dg, inputs_.g);
      gradient_of(backward_.dbeta, inputs_.beta);
      gradient_of(backward_.da_log, inputs_.a_log);
      gradient_of(backward_.ddt_bias, inputs_.dt_bias);
      if (inputs_.initial_state.rank > 0) add(backward_.d_initial_state, true, state_dtype, state_shape(N_));
    } else {
      const bool indexed = flag();
      add(step_.state, true, state_dtype, state_shape(indexed ? N_ + 2 : N_));
      if (indexed) {
        std::vector<int64_t> indices;
        for (int64_t n = 0; n < N_; ++n) indices.push_back(rarely() ? -1 : N_ + 1 - n);
        add_integers(step_.state_indices, indices);
      }
      add(step_.o, true, or_fp32(dtype), {B_, T_, HV_, V_});
    }
  }

  int64_t hostile_integer() {
    return data_.PickValueInArray<int64_t>(
        {-1, 0, 1, 2, 3, 5, 16, 257, INT32_MAX, int64_t{1} << 40, INT64_MAX / 2, INT64_MAX, INT64_MIN});
  }

  double hostile_number() {
    return data_.PickValueInArray({0.0, -0.5, -5.0, -6.0, 1.0, static_cast<double>(NAN), static_cast<double>(-INFINITY),
                                   static_cast<double>(INFINITY), 1e308});
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

  void spoil_options() {
    int32_t* const fields[] = {&options_.gate,      &options_.chunk_size,    &options_.state_v_first,
                               &options_.qk_l2norm, &options_.beta_sigmoid,  &options_.allow_neg_eigval,
                               &options_.safe_gate, &options_.gate_in_kernel};
    switch (data_.ConsumeIntegralInRange(0, 5)) {
      case 0:
        options_.scale = hostile_number();
        break;
      case 1:
        options_.lower_bound = hostile_number();
        break;
      case 2:
        options_.struct_size = data_.ConsumeIntegral<size_t>();
        break;
      default:
        *data_.PickValueInArray(fields) = static_cast<int32_t>(hostile_integer());
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
        forward_.inputs = backward_.inputs = step_.inputs = nullptr;
        break;
      case 7:
        forward_.options = backward_.options = step_.options = nullptr;
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

  FuzzedDataProvider& data_;
  Mode mode_;
  int64_t B_, T_, H_, HV_, K_, V_, N_;
  std::vector<int64_t> offsets_;  // empty: one length for all
  fw_context context_;
  fw_delta_rule_options options_;
  fw_delta_rule_inputs inputs_;
  fw_delta_rule_forward_args forward_;
  fw_delta_rule_backward_args backward_;
  fw_delta_rule_step_args step_;
  bool null_context_ = false;
  bool null_args_ = false;
  std::vector<Slot> slots_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  FuzzedDataProvider data(bytes, count);
  Call(data).run();
  return 0;
}
