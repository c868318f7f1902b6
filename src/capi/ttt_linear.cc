// The C interface of TTT-Linear.
#include "fastweight/ttt_linear.h"

#include "capi/convert.h"
#include "core/ttt_linear_fields.h"

extern "C" {

void fw_ttt_linear_options_init(fw_ttt_linear_options* options) {
  fastweight::capi::init<fastweight::TttLinearOptions>(options);
}
void fw_ttt_linear_inputs_init(fw_ttt_linear_inputs* inputs) {
  fastweight::capi::init<fastweight::TttLinearInputs>(inputs);
}
void fw_ttt_linear_forward_args_init(fw_ttt_linear_forward_args* args) {
  fastweight::capi::init<fastweight::TttLinearForward>(args);
}
void fw_ttt_linear_backward_args_init(fw_ttt_linear_backward_args* args) {
  fastweight::capi::init<fastweight::TttLinearBackward>(args);
}
void fw_ttt_linear_step_args_init(fw_ttt_linear_step_args* args) {
  fastweight::capi::init<fastweight::TttLinearStep>(args);
}

fw_status fw_ttt_linear_forward(const fw_context* context, const fw_ttt_linear_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::call(fastweight::ttt_linear_forward, context, args, implementation);
}

fw_status fw_ttt_linear_backward(const fw_context* context, const fw_ttt_linear_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::call(fastweight::ttt_linear_backward, context, args, implementation);
}

fw_status fw_ttt_linear_step(const fw_context* context, const fw_ttt_linear_step_args* args,
                             const char** implementation) {
  return fastweight::capi::call(fastweight::ttt_linear_step, context, args, implementation);
}

}  // extern "C"
