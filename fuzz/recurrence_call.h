// Hostile calls of the delta rule and of the families that are the same recurrence: their sizes, states and common
// tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "fastweight/c_api.h"
#include "fuzz/hostile_call.h"

namespace fastweight::fuzz {

class RecurrenceCall : public HostileCall {
 protected:
  using HostileCall::HostileCall;

  void draw_sizes(int most_value_heads_per_head) {
    H_ = data_.ConsumeIntegralInRange(1, 2);
    HV_ = H_ * data_.ConsumeIntegralInRange(1, most_value_heads_per_head);
    const int max_width = rarely() ? 256 : 20;
    K_ = data_.ConsumeIntegralInRange(1, max_width);
    V_ = data_.ConsumeIntegralInRange(1, max_width);
    draw_sequences(HV_ * K_ * V_);
    context_.num_threads = data_.ConsumeIntegralInRange(1, 3);
  }

  template <class Options>
  void draw_common(Options& options) {
    options.chunk_size = chunk_size_ = data_.PickValueInArray({16, 32, 64});
    options.state_v_first = state_v_first_ = flag();
    if (flag()) options.scale = data_.PickValueInArray({0.0, 0.5, -1.0, 1e300});
  }

  // q, k, v, the offsets and the initial state; sets dtype_.
  template <class Inputs>
  void add_common(Inputs& inputs) {
    dtype_ = floating();
    add(inputs.q, false, dtype_, key_shape());
    add(inputs.k, false, dtype_, key_shape());
    add(inputs.v, false, dtype_, value_shape());
    if (!offsets_.empty()) add_integers(inputs.cu_seqlens, offsets_);
    if (mode_ != kStep && flag()) add(inputs.initial_state, false, floating(), state_shape(N_));
  }

  void add_gate(fw_tensor& g, int32_t gate) {
    if (gate == FW_GATE_PER_HEAD) add(g, false, floating(), {B_, T_, HV_});
    if (gate == FW_GATE_PER_CHANNEL) add(g, false, floating(), {B_, T_, HV_, K_});
  }

  template <class Args>
  void add_results(Args& forward) {
    add(forward.o, true, or_fp32(dtype_), value_shape());
    if (flag()) add(forward.final_state, true, state_dtype(), state_shape(N_));
    if (flag()) add(forward.chunk_states, true, or_fp32(dtype_), chunk_states_shape());
  }

  // What every backward reads, and its gradients.
  template <class Backward, class Args, class Inputs>
  void add_backward(Args& backward, const Inputs& inputs) {
    if (flag()) add(backward.d_o, false, or_fp32(dtype_), value_shape());
    if (flag()) add(backward.d_final_state, false, floating(), state_shape(N_));
    if (flag()) add(backward.chunk_states, false, state_dtype(), chunk_states_shape());
    add_gradients<Backward>(backward, inputs, state_dtype());
  }

  template <class Args>
  void add_step(Args& step) {
    const bool indexed = flag();
    const int32_t dtype = flag() ? static_cast<int32_t>(FW_BF16) : state_dtype();
    add(step.state, true, dtype, state_shape(indexed ? N_ + 2 : N_));
    if (indexed) add_integers(step.state_indices, draw_state_indices());
    add(step.o, true, or_fp32(dtype_), value_shape());
  }

  int32_t state_dtype() { return dtype_ == FW_F64 ? or_fp32(FW_F64) : static_cast<int32_t>(FW_F32); }

  std::vector<int64_t> key_shape() const { return {B_, T_, H_, K_}; }
  std::vector<int64_t> value_shape() const { return {B_, T_, HV_, V_}; }
  std::vector<int64_t> state_shape(int64_t count) const {
    if (state_v_first_) return {count, HV_, V_, K_};
    return {count, HV_, K_, V_};
  }
  std::vector<int64_t> chunk_states_shape() const {
    int64_t chunks = 0;
    const auto count = [&](int64_t length) { return (length + chunk_size_ - 1) / chunk_size_; };
    if (offsets_.empty()) chunks = count(T_);
    for (size_t n = 1; n < offsets_.size(); ++n) chunks += count(offsets_[n] - offsets_[n - 1]);
    std::vector<int64_t> shape = state_shape(B_);
    shape.insert(shape.begin() + 1, chunks);
    return shape;
  }

  int64_t H_, HV_, K_, V_;
  int32_t dtype_, chunk_size_;
  bool state_v_first_;
};

}  // namespace fastweight::fuzz
