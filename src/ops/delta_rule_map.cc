// The entry points of the delta rule's segment maps.
#include "fastweight/delta_rule_map.h"

#include "core/delta_rule_map_problem.h"
#include "cpu/delta_rule/registry.h"
#include "cuda/delta_rule/registry.h"
#include "ops/dispatch.h"
#include "ops/recurrence.h"

namespace fastweight {

std::string delta_rule_map_forward(const Context& context, const DeltaRuleMapForward& args) {
  return run_recurrence("delta_rule_map_forward", context, args, {}, cpu::delta_rule_map_forward_list(),
                        cuda::delta_rule_map_forward_list());
}

std::string delta_rule_map_backward(const Context& context, const DeltaRuleMapBackward& args) {
  return run_recurrence("delta_rule_map_backward", context, args, {}, cpu::delta_rule_map_backward_list(),
                        cuda::delta_rule_map_backward_list());
}

std::vector<ImplementationInfo> delta_rule_map_implementations() {
  std::vector<ImplementationInfo> infos;
  append_infos(cpu::delta_rule_map_forward_list(), "forward", "cpu", infos);
  append_infos(cpu::delta_rule_map_backward_list(), "backward", "cpu", infos);
  append_infos(cuda::delta_rule_map_forward_list(), "forward", "cuda", infos);
  append_infos(cuda::delta_rule_map_backward_list(), "backward", "cuda", infos);
  return infos;
}

}  // namespace fastweight
