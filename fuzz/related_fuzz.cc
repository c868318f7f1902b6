// Hostile calls of the families related to the delta rule: GLA, Comba, DPLR.
#include <cstdint>
#include <vector>

#include "core/related_fields.h"
#include "fuzz/recurrence_call.h"

namespace fastweight::fuzz {
namespace {

struct Gla {
  using Options = GlaOptions;
  using Backward = GlaBackward;
  static constexpr auto kForwardEntry = fw_gla_forward;
  static constexpr auto kBackwardEntry = fw_gla_backward;
  static constexpr auto kStepEntry = fw_gla_step;

  Gla() {
    fw_gla_options_init(&options);
    fw_gla_inputs_init(&inputs);
    fw_gla_forward_args_init(&forward);
    fw_gla_backward_args_init(&backward);
    fw_gla_step_args_init(&step);
  }

  fw_gla_options options;
  fw_gla_inputs inputs;
  fw_gla_forward_args forward;
  fw_gla_backward_args backward;
  fw_gla_step_args step;
};

struct Comba {
  using Options = CombaOptions;
  using Backward = CombaBackward;
  static constexpr auto kForwardEntry = fw_comba_forward;
  static constexpr auto kBackwardEntry = fw_comba_backward;
  static constexpr auto kStepEntry = fw_comba_step;

  Comba() {
    fw_comba_options_init(&options);
    fw_comba_inputs_init(&inputs);
    fw_comba_forward_args_init(&forward);
    fw_comba_backward_args_init(&backward);
    fw_comba_step_args_init(&step);
  }

  fw_comba_options options;
  fw_comba_inputs inputs;
  fw_comba_forward_args forward;
  fw_comba_backward_args backward;
  fw_comba_step_args step;
};

struct Dplr {
  using Options = DplrOptions;
  using Backward = DplrBackward;
  static constexpr auto kForwardEntry = fw_dplr_forward;
  static constexpr auto kBackwardEntry = fw_dplr_backward;
  static constexpr auto kStepEntry = fw_dplr_step;

  Dplr() {
    fw_dplr_options_init(&options);
    fw_dplr_inputs_init(&inputs);
    fw_dplr_forward_args_init(&forward);
    fw_dplr_backward_args_init(&backward);
    fw_dplr_step_args_init(&step);
  }

  fw_dplr_options options;
  fw_dplr_inputs inputs;
  fw_dplr_forward_args forward;
  fw_dplr_backward_args backward;
  fw_dplr_step_args step;
};

template <class Family>
class RelatedCall : public RecurrenceCall {
 public:
  explicit RelatedCall(FuzzedDataProvider& data) : RecurrenceCall(data) {
    family_.forward.inputs = family_.backward.inputs = family_.step.inputs = &family_.inputs;
    family_.forward.options = family_.backward.options = family_.step.options = &family_.options;
    draw_sizes(1);
    context_.implementation = data_.PickValueInArray<const char*>({nullptr, "", "chunk", "recurrent", "reference"});
    draw_common(family_.options);
    add_common(family_.inputs);
    add_own_inputs(family_);
    if (mode_ == kForward) {
      add_results(family_.forward);
    } else if (mode_ == kStep) {
      add_step(family_.step);
    } else {
      add_backward<typename Family::Backward>(family_.backward, family_.inputs);
    }
    spoil_and_allocate();
  }

 private:
  fw_status call(const fw_context* context, bool null_args, const char** name) override {
    if (mode_ == kForward) return Family::kForwardEntry(context, null_args ? nullptr : &family_.forward, name);
    if (mode_ == kStep) return Family::kStepEntry(context, null_args ? nullptr : &family_.step, name);
    return Family::kBackwardEntry(context, null_args ? nullptr : &family_.backward, name);
  }
  void drop_inputs() override { family_.forward.inputs = family_.backward.inputs = family_.step.inputs = nullptr; }
  void drop_options() override { family_.forward.options = family_.backward.options = family_.step.options = nullptr; }
  void spoil_options() override { spoil_any_option<typename Family::Options>(family_.options); }

  void add_own_inputs(Gla& gla) {
    gla.options.gate = data_.ConsumeIntegralInRange(0, 2);
    if (gla.options.gate == FW_GATE_PER_HEAD && flag()) {
      add(gla.inputs.g_gamma, false, floating(), {H_});
    } else {
      add_gate(gla.inputs.g, gla.options.gate);
    }
  }

  void add_own_inputs(Comba& comba) {
    comba.options.qk_l2norm = flag();
    if (flag()) add(comba.inputs.p, false, dtype_, key_shape());
    add_gate(comba.inputs.g, FW_GATE_PER_HEAD);
    if (flag()) add(comba.inputs.beta, false, floating(), {B_, T_, H_});
  }

  void add_own_inputs(Dplr& dplr) {
    dplr.options.gate = flag() ? FW_GATE_PER_CHANNEL : FW_GATE_NONE;
    add(dplr.inputs.a, false, dtype_, key_shape());
    add(dplr.inputs.b, false, dtype_, key_shape());
    add_gate(dplr.inputs.g, dplr.options.gate);
  }

  Family family_;
};

}  // namespace
}  // namespace fastweight::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  using namespace fastweight::fuzz;
  FuzzedDataProvider data(bytes, count);
  switch (data.ConsumeIntegralInRange(0, 2)) {
    case 0:
      RelatedCall<Gla>(data).run();
      break;
    case 1:
      RelatedCall<Comba>(data).run();
      break;
    default:
      RelatedCall<Dplr>(data).run();
      break;
  }
  return 0;
}
