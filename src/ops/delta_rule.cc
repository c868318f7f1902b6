// The entry points of the delta-rule family.
#include "fastweight/delta_rule.h"

#include "cpu/delta_rule/registry.h"
#include "cuda/delta_rule/registry.h"
#include "ops/dispatch.h"
#include "ops/recurrence.h"

namespace fastweight {

std::string delta_rule_forward(const Context& context, const DeltaRuleForward& args) {
  return run_recurrence("delta_rule_forward", context, args, {}, cpu::delta_rule_forward_list(),
                        cuda::delta_rule_forward_list());
}

std::string delta_rule_backward(const Context& context, const DeltaRuleBackward& args) {
  return run_recurrence("delta_rule_backward", context, args, {}, cpu::delta_rule_backward_list(),
                        cuda::delta_rule_backward_list());
}

std::string delta_rule_step(const Context& context, const DeltaRuleStep& args) {
  return run_recurrence("delta_rule_step", context, args, {}, cpu::delta_rule_step_list(),
                        cuda::delta_rule_step_list());
}

std::vector<ImplementationInfo> delta_rule_implementations() {
  std::vector<ImplementationInfo> infos;
  append_infos(cpu::delta_rule_forward_list(), cpu::delta_rule_backward_list(), cpu::delta_rule_step_list(), "cpu",
               infos);
  append_infos(cuda::delta_rule_forward_list(), cuda::delta_rule_backward_list(), cuda::delta_rule_step_list(), "cuda",
               infos);
  return infos;
}

}  // namespace fastweight
