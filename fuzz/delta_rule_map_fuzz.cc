// Hostile calls of the delta rule's segment maps.
#include <cstdint>

#include "core/delta_rule_map_fields.h"
#include "fuzz/recurrence_call.h"

namespace fastweight::fuzz {
namespace {

class DeltaRuleMapCall : public RecurrenceCall {
 public:
  explicit DeltaRuleMapCall(FuzzedDataProvider& data) : RecurrenceCall(data) {
    fw_delta_rule_options_init(&options_);
    fw_delta_rule_inputs_init(&inputs_);
    fw_delta_rule_map_forward_args_init(&forward_);
    fw_delta_rule_map_backward_args_init(&backward_);
    forward_.inputs = backward_.inputs = &inputs_;
    forward_.options = backward_.options = &options_;
    draw_sizes(3);
    draw_options();
    draw_tensors();
    spoil_and_allocate();
  }

 private:
  // A step, which has no initial state, stands for the backward that is not refused for having one.
  bool is_backward() const { return mode_ != kForward; }

  fw_status call(const fw_context* context, bool null_args, const char** name) override {
    if (is_backward()) return fw_delta_rule_map_backward(context, null_args ? nullptr : &backward_, name);
    return fw_delta_rule_map_forward(context, null_args ? nullptr : &forward_, name);
  }
  void drop_inputs() override { forward_.inputs = backward_.inputs = nullptr; }
  void drop_options() override { forward_.options = backward_.options = nullptr; }

  void draw_options() {
    options_.gate = data_.ConsumeIntegralInRange(0, 2);
    draw_common(options_);
    options_.qk_l2norm = flag();
    options_.beta_sigmoid = flag();
    options_.allow_neg_eigval = options_.beta_sigmoid && flag();
    options_.gate_in_kernel = options_.gate != FW_GATE_NONE && flag();
    if (options_.gate == FW_GATE_PER_CHANNEL && options_.gate_in_kernel && flag()) options_.lower_bound = -4;
    context_.implementation = data_.PickValueInArray<const char*>({nullptr, "", "chunk", "reference"});
  }

  void draw_tensors() {
    add_common(inputs_);
    add_gate(inputs_.g, options_.gate);
    if (options_.beta_sigmoid || flag()) {
      add(inputs_.beta, false, floating(), rarely() ? value_shape() : std::vector<int64_t>{B_, T_, HV_});
    }
    if (options_.gate_in_kernel) {
      if (options_.lower_bound == FW_UNSET || flag()) add(inputs_.a_log, false, floating(), {HV_});
      if (flag()) add(inputs_.dt_bias, false, floating(), {options_.gate == FW_GATE_PER_HEAD ? HV_ : HV_ * K_});
    }
    if (is_backward()) {
      if (flag()) add(backward_.d_o, false, or_fp32(dtype_), value_shape());
      if (flag()) add(backward_.d_final_state, false, floating(), state_shape(N_));
    }
    if (flag()) add(is_backward() ? backward_.mt : forward_.m, true, state_dtype(), {N_, HV_, K_, K_});
    if (flag()) add(is_backward() ? backward_.e : forward_.h, true, state_dtype(), state_shape(N_));
  }

  void spoil_options() override { spoil_any_option<DeltaRuleOptions>(options_); }

  fw_delta_rule_options options_;
  fw_delta_rule_inputs inputs_;
  fw_delta_rule_map_forward_args forward_;
  fw_delta_rule_map_backward_args backward_;
};

}  // namespace
}  // namespace fastweight::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  FuzzedDataProvider data(bytes, count);
  fastweight::fuzz::DeltaRuleMapCall(data).run();
  return 0;
}
