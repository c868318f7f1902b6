// Hostile calls of the delta-rule family.
#include <cstdint>

#include "core/delta_rule_fields.h"
#include "fuzz/recurrence_call.h"

namespace fastweight::fuzz {
namespace {

class DeltaRuleCall : public RecurrenceCall {
 public:
  explicit DeltaRuleCall(FuzzedDataProvider& data) : RecurrenceCall(data) {
    fw_delta_rule_options_init(&options_);
    fw_delta_rule_inputs_init(&inputs_);
    fw_delta_rule_forward_args_init(&forward_);
    fw_delta_rule_backward_args_init(&backward_);
    fw_delta_rule_step_args_init(&step_);
    forward_.inputs = backward_.inputs = step_.inputs = &inputs_;
    forward_.options = backward_.options = step_.options = &options_;
    draw_sizes(3);
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

  void draw_options() {
    options_.gate = data_.ConsumeIntegralInRange(0, 2);
    draw_common(options_);
    options_.qk_l2norm = flag();
    options_.beta_sigmoid = flag();
    options_.allow_neg_eigval = options_.beta_sigmoid && flag();
    options_.gate_in_kernel = options_.gate != FW_GATE_NONE && flag();
    if (options_.gate == FW_GATE_PER_CHANNEL) {
      if (options_.gate_in_kernel && flag()) options_.lower_bound = -4;
      options_.safe_gate = (!options_.gate_in_kernel || options_.lower_bound != FW_UNSET) && flag();
    }
    context_.implementation = data_.PickValueInArray<const char*>({nullptr, "", "chunk", "recurrent", "reference"});
  }

  void draw_tensors() {
    add_common(inputs_);
    add_gate(inputs_.g, options_.gate);
    if (options_.beta_sigmoid || flag()) {
      if (rarely()) {
        add(inputs_.beta, false, floating(), value_shape());
      } else {
        add(inputs_.beta, false, floating(), {B_, T_, HV_});
      }
    }
    if (options_.gate_in_kernel) {
      if (options_.lower_bound == FW_UNSET || flag()) add(inputs_.a_log, false, floating(), {HV_});
      if (flag()) add(inputs_.dt_bias, false, floating(), {options_.gate == FW_GATE_PER_HEAD ? HV_ : HV_ * K_});
    }
    if (mode_ == kForward) {
      add_results(forward_);
    } else if (mode_ == kBackward) {
      add_backward<DeltaRuleBackward>(backward_, inputs_);
    } else {
      add_step(step_);
    }
  }

  void spoil_options() override { spoil_any_option<DeltaRuleOptions>(options_); }

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
