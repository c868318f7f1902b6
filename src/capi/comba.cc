// The C interface of Comba.
#include "fastweight/comba.h"

#include "capi/convert.h"
#include "core/related_fields.h"

extern "C" {

void fw_comba_options_init(fw_comba_options* options) { fastweight::capi::init<fastweight::CombaOptions>(options); }
void fw_comba_inputs_init(fw_comba_inputs* inputs) { fastweight::capi::init<fastweight::CombaInputs>(inputs); }
void fw_comba_forward_args_init(fw_comba_forward_args* args) { fastweight::capi::init<fastweight::CombaForward>(args); }
void fw_comba_backward_args_init(fw_comba_backward_args* args) {
  fastweight::capi::init<fastweight::CombaBackward>(args);
}
void fw_comba_step_args_init(fw_comba_step_args* args) { fastweight::capi::init<fastweight::CombaStep>(args); }

fw_status fw_comba_forward(const fw_context* context, const fw_comba_forward_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::comba_forward, context, args, implementation);
}

fw_status fw_comba_backward(const fw_context* context, const fw_comba_backward_args* args,
                            const char** implementation) {
  return fastweight::capi::call(fastweight::comba_backward, context, args, implementation);
}

fw_status fw_comba_step(const fw_context* context, const fw_comba_step_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::comba_step, context, args, implementation);
}

}  // extern "C"
