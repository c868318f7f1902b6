// The C interface of the short convolution.
#include "fastweight/short_conv.h"

#include <string>

#include "capi/convert.h"

namespace fastweight::capi {
namespace {

ShortConvOptions to_options(const fw_short_conv_options* pointer) {
  const fw_short_conv_options& from = required("options", pointer);
  ShortConvOptions options;
  options.activation = static_cast<Activation>(from.activation);
  return options;
}

ShortConvInputs to_inputs(const fw_short_conv_inputs* pointer) {
  const fw_short_conv_inputs& from = required("inputs", pointer);
  ShortConvInputs in;
  in.x = to_view(from.x);
  in.w = to_view(from.w);
  in.bias = to_view(from.bias);
  in.initial_state = to_view(from.initial_state);
  in.cu_seqlens = to_view(from.cu_seqlens);
  return in;
}

ShortConvForward to_args(const fw_short_conv_forward_args* pointer) {
  const fw_short_conv_forward_args& from = required("args", pointer);
  ShortConvForward args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.residual = to_view(from.residual);
  args.y = to_view(from.y);
  args.final_state = to_view(from.final_state);
  return args;
}

ShortConvBackward to_args(const fw_short_conv_backward_args* pointer) {
  const fw_short_conv_backward_args& from = required("args", pointer);
  ShortConvBackward args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.dy = to_view(from.dy);
  args.d_final_state = to_view(from.d_final_state);
  args.dx = to_view(from.dx);
  args.dw = to_view(from.dw);
  args.dbias = to_view(from.dbias);
  args.d_initial_state = to_view(from.d_initial_state);
  return args;
}

ShortConvStep to_args(const fw_short_conv_step_args* pointer) {
  const fw_short_conv_step_args& from = required("args", pointer);
  ShortConvStep args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.residual = to_view(from.residual);
  args.state = to_view(from.state);
  args.state_indices = to_view(from.state_indices);
  args.y = to_view(from.y);
  return args;
}

}  // namespace
}  // namespace fastweight::capi

extern "C" {

void fw_short_conv_options_init(fw_short_conv_options* options) {
  if (!fastweight::capi::clear(options)) return;
  options->activation = static_cast<int32_t>(fastweight::ShortConvOptions().activation);
}

void fw_short_conv_inputs_init(fw_short_conv_inputs* inputs) { fastweight::capi::clear(inputs); }
void fw_short_conv_forward_args_init(fw_short_conv_forward_args* args) { fastweight::capi::clear(args); }
void fw_short_conv_backward_args_init(fw_short_conv_backward_args* args) { fastweight::capi::clear(args); }
void fw_short_conv_step_args_init(fw_short_conv_step_args* args) { fastweight::capi::clear(args); }

fw_status fw_short_conv_forward(const fw_context* context, const fw_short_conv_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::call(
      fastweight::short_conv_forward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_short_conv_backward(const fw_context* context, const fw_short_conv_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::call(
      fastweight::short_conv_backward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_short_conv_step(const fw_context* context, const fw_short_conv_step_args* args,
                             const char** implementation) {
  return fastweight::capi::call(
      fastweight::short_conv_step, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

}  // extern "C"
