// The C interface of gated linear attention.
#include "fastweight/gla.h"

#include "capi/convert.h"
#include "core/related_fields.h"

extern "C" {

void fw_gla_options_init(fw_gla_options* options) { fastweight::capi::init<fastweight::GlaOptions>(options); }
void fw_gla_inputs_init(fw_gla_inputs* inputs) { fastweight::capi::init<fastweight::GlaInputs>(inputs); }
void fw_gla_forward_args_init(fw_gla_forward_args* args) { fastweight::capi::init<fastweight::GlaForward>(args); }
void fw_gla_backward_args_init(fw_gla_backward_args* args) { fastweight::capi::init<fastweight::GlaBackward>(args); }
void fw_gla_step_args_init(fw_gla_step_args* args) { fastweight::capi::init<fastweight::GlaStep>(args); }

fw_status fw_gla_forward(const fw_context* context, const fw_gla_forward_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::gla_forward, context, args, implementation);
}

fw_status fw_gla_backward(const fw_context* context, const fw_gla_backward_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::gla_backward, context, args, implementation);
}

fw_status fw_gla_step(const fw_context* context, const fw_gla_step_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::gla_step, context, args, implementation);
}

}  // extern "C"
