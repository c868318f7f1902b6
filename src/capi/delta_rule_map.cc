// The C interface of the delta rule's segment maps.
#include "fastweight/delta_rule_map.h"

#include "capi/convert.h"
#include "core/delta_rule_map_fields.h"

extern "C" {

void fw_delta_rule_map_forward_args_init(fw_delta_rule_map_forward_args* args) {
  fastweight::capi::init<fastweight::DeltaRuleMapForward>(args);
}
void fw_delta_rule_map_backward_args_init(fw_delta_rule_map_backward_args* args) {
  fastweight::capi::init<fastweight::DeltaRuleMapBackward>(args);
}

fw_status fw_delta_rule_map_forward(const fw_context* context, const fw_delta_rule_map_forward_args* args,
                                    const char** implementation) {
  return fastweight::capi::call(fastweight::delta_rule_map_forward, context, args, implementation);
}

fw_status fw_delta_rule_map_backward(const fw_context* context, const fw_delta_rule_map_backward_args* args,
                                     const char** implementation) {
  return fastweight::capi::call(fastweight::delta_rule_map_backward, context, args, implementation);
}

}  // extern "C"
