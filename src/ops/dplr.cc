// The entry points of DPLR and IPLR.
#include "fastweight/dplr.h"

#include "core/check.h"
#include "cpu/delta_rule/registry.h"
#include "ops/entry.h"
#include "ops/recurrence.h"

namespace fastweight {
namespace {

Transition transition_of(const DplrInputs& in) {
  return {.correction = Correction::kLowRank, .reader = in.a, .writer = in.b};
}

void check_gate(Gate gate) {
  if (gate == Gate::kNone || gate == Gate::kPerChannel) return;
  check::invalid("gate", "none (0) or per channel (2)", std::to_string(static_cast<int32_t>(gate)));
}

}  // namespace

std::string dplr_forward(const Context& context, const DplrForward& args) {
  return entry_point("dplr_forward", [&] {
    check_gate(args.options.gate);
    return run_recurrence("dplr_forward", context, common_forward(args, args.options.gate), transition_of(args.in),
                          cpu::delta_rule_forward_list());
  });
}

std::string dplr_backward(const Context& context, const DplrBackward& args) {
  return entry_point("dplr_backward", [&] {
    check_gate(args.options.gate);
    Transition transition = transition_of(args.in);
    transition.d_reader = args.da;
    transition.d_writer = args.db;
    return run_recurrence("dplr_backward", context, common_backward(args, args.options.gate), transition,
                          cpu::related_backward_list());
  });
}

std::string dplr_step(const Context& context, const DplrStep& args) {
  return entry_point("dplr_step", [&] {
    check_gate(args.options.gate);
    return run_recurrence("dplr_step", context, common_step(args, args.options.gate), transition_of(args.in),
                          cpu::delta_rule_step_list());
  });
}

std::vector<ImplementationInfo> dplr_implementations() { return related_implementations(); }

}  // namespace fastweight
