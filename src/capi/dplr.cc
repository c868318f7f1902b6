// The C interface of DPLR and IPLR.
#include "fastweight/dplr.h"

#include "capi/convert.h"
#include "core/related_fields.h"

extern "C" {

void fw_dplr_options_init(fw_dplr_options* options) { fastweight::capi::init<fastweight::DplrOptions>(options); }
void fw_dplr_inputs_init(fw_dplr_inputs* inputs) { fastweight::capi::init<fastweight::DplrInputs>(inputs); }
void fw_dplr_forward_args_init(fw_dplr_forward_args* args) { fastweight::capi::init<fastweight::DplrForward>(args); }
void fw_dplr_backward_args_init(fw_dplr_backward_args* args) { fastweight::capi::init<fastweight::DplrBackward>(args); }
void fw_dplr_step_args_init(fw_dplr_step_args* args) { fastweight::capi::init<fastweight::DplrStep>(args); }

fw_status fw_dplr_forward(const fw_context* context, const fw_dplr_forward_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::dplr_forward, context, args, implementation);
}

fw_status fw_dplr_backward(const fw_context* context, const fw_dplr_backward_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::dplr_backward, context, args, implementation);
}

fw_status fw_dplr_step(const fw_context* context, const fw_dplr_step_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::dplr_step, context, args, implementation);
}

}  // extern "C"
