// Hostile calls of the delta-rule family.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "fastweight/c_api.h"
#include "fuzz/hostile_call.h"

namespace fastweight::fuzz {
namespace {

class DeltaRuleCall : public HostileCall {
 public:
  explicit DeltaRuleCall(FuzzedDataProvider& data) : HostileCall(data) {
    fw_delta_rule_options_init(&options_);
    fw_delta_rule_inputs_init(&inputs_);
    fw_delta_rule_forward_args_init(&forward_);
    fw_delta_rule_backward_args_init(&backward_);
    fw_delta_rule_step_args_init(&step_);
    forward_.inputs = backward_.inputs = step_.inputs = &inputs_;
    forward_.options = backward_.options = step_.options = &options_;
    draw_sizes();
    draw_options();
    draw_tensors();
    spoil_and_allocate();
  }

 private:
  fw_status call(const fw_context* context, bool null_args, const char** name) override {
    if (mode_ == kForward) return fw_delta_rule_forward(context, null_args ? nullptr : &forward_, name);
    if (mode_ == kBackward) return fw_delta_rule_backward(context, null_args ? nullptr : &backward_, name);
    return fw_delta_rule_step(context, null_args ? nullptr : &step_, name);
  }
  void drop_inputs() override { forward_.inputs = backward_.inputs = step_.inputs = nullptr; }
  void drop_options() override { forward_.options = backward_.options = step_.options = nullptr; }

  void draw_sizes() {
    H_ = data_.ConsumeIntegralInRange(1, 2);
    HV_ = H_ * data_.ConsumeIntegralInRange(1, 3);
    const int max_width = rarely() ? 256 : 20;
    K_ = data_.ConsumeIntegralInRange(1, max_width);
    V_ = data_.ConsumeIntegralInRange(1, max_width);
    draw_sequences(HV_ * K_ * V_);
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
      add_gradient(backward_.dq, inputs_.q);
      add_gradient(backward_.dk, inputs_.k);
      add_gradient(backward_.dv, inputs_.v);
      add_gradient(backward_.dg, inputs_.g);
      add_gradient(backward_.dbeta, inputs_.beta);
      add_gradient(backward_.da_log, inputs_.a_log);
      add_gradient(backward_.ddt_bias, inputs_.dt_bias);
      if (inputs_.initial_state.rank > 0) add(backward_.d_initial_state, true, state_dtype, state_shape(N_));
    } else {
      const bool indexed = flag();
      add(step_.state, true, state_dtype, state_shape(indexed ? N_ + 2 : N_));
      if (indexed) add_integers(step_.state_indices, draw_state_indices());
      add(step_.o, true, or_fp32(dtype), {B_, T_, HV_, V_});
    }
  }

  void spoil_options() override {
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

  int64_t H_, HV_, K_, V_;
  fw_delta_rule_options options_;
  fw_delta_rule_inputs inputs_;
  fw_delta_rule_forward_args forward_;
  fw_delta_rule_backward_args backward_;
  fw_delta_rule_step_args step_;
};

}  // namespace
}  // namespace fastweight::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  FuzzedDataProvider data(bytes, count);
  fastweight::fuzz::DeltaRuleCall(data).run();
  return 0;
}
