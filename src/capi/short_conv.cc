// The C interface of the short convolution.
#include "fastweight/short_conv.h"

#include "capi/convert.h"
#include "core/short_conv_fields.h"

extern "C" {

void fw_short_conv_options_init(fw_short_conv_options* options) {
  fastweight::capi::init<fastweight::ShortConvOptions>(options);
}
void fw_short_conv_inputs_init(fw_short_conv_inputs* inputs) {
  fastweight::capi::init<fastweight::ShortConvInputs>(inputs);
}
void fw_short_conv_forward_args_init(fw_short_conv_forward_args* args) {
  fastweight::capi::init<fastweight::ShortConvForward>(args);
}
void fw_short_conv_backward_args_init(fw_short_conv_backward_args* args) {
  fastweight::capi::init<fastweight::ShortConvBackward>(args);
}
void fw_short_conv_step_args_init(fw_short_conv_step_args* args) {
  fastweight::capi::init<fastweight::ShortConvStep>(args);
}

fw_status fw_short_conv_forward(const fw_context* context, const fw_short_conv_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::call(fastweight::short_conv_forward, context, args, implementation);
}

fw_status fw_short_conv_backward(const fw_context* context, const fw_short_conv_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::call(fastweight::short_conv_backward, context, args, implementation);
}

fw_status fw_short_conv_step(const fw_context* context, const fw_short_conv_step_args* args,
                             const char** implementation) {
  return fastweight::capi::call(fastweight::short_conv_step, context, args, implementation);
}

}  // extern "C"
