// The C interface of the TTT-linear family.
#include "fastweight/ttt_linear.h"

#include <string>

#include "capi/convert.h"

namespace fastweight::capi {
namespace {

TttLinearOptions to_options(const fw_ttt_linear_options* pointer) {
  const fw_ttt_linear_options& from = required("options", pointer);
  TttLinearOptions options;
  options.scale = from.scale;
  options.mini_batch = from.mini_batch;
  options.eps = from.eps;
  return options;
}

TttLinearInputs to_inputs(const fw_ttt_linear_inputs* pointer) {
  const fw_ttt_linear_inputs& from = required("inputs", pointer);
  TttLinearInputs in;
  in.q = to_view(from.q);
  in.k = to_view(from.k);
  in.v = to_view(from.v);
  in.w = to_view(from.w);
  in.b = to_view(from.b);
  in.eta = to_view(from.eta);
  in.initial_state = to_view(from.initial_state);
  in.initial_state_bias = to_view(from.initial_state_bias);
  in.cu_seqlens = to_view(from.cu_seqlens);
  return in;
}

TttLinearForward to_args(const fw_ttt_linear_forward_args* pointer) {
  const fw_ttt_linear_forward_args& from = required("args", pointer);
  TttLinearForward args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.o = to_view(from.o);
  args.final_state = to_view(from.final_state);
  args.final_state_bias = to_view(from.final_state_bias);
  return args;
}

TttLinearBackward to_args(const fw_ttt_linear_backward_args* pointer) {
  const fw_ttt_linear_backward_args& from = required("args", pointer);
  TttLinearBackward args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.d_o = to_view(from.d_o);
  args.d_final_state = to_view(from.d_final_state);
  args.d_final_state_bias = to_view(from.d_final_state_bias);
  args.dq = to_view(from.dq);
  args.dk = to_view(from.dk);
  args.dv = to_view(from.dv);
  args.dw = to_view(from.dw);
  args.db = to_view(from.db);
  args.deta = to_view(from.deta);
  args.d_initial_state = to_view(from.d_initial_state);
  args.d_initial_state_bias = to_view(from.d_initial_state_bias);
  return args;
}

TttLinearStep to_args(const fw_ttt_linear_step_args* pointer) {
  const fw_ttt_linear_step_args& from = required("args", pointer);
  TttLinearStep args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.state = to_view(from.state);
  args.state_bias = to_view(from.state_bias);
  args.gradient = to_view(from.gradient);
  args.gradient_bias = to_view(from.gradient_bias);
  args.position = to_view(from.position);
  args.state_indices = to_view(from.state_indices);
  args.o = to_view(from.o);
  return args;
}

}  // namespace
}  // namespace fastweight::capi

extern "C" {

void fw_ttt_linear_options_init(fw_ttt_linear_options* options) {
  if (!fastweight::capi::clear(options)) return;
  const fastweight::TttLinearOptions defaults;
  options->scale = defaults.scale;
  options->eps = defaults.eps;
  options->mini_batch = defaults.mini_batch;
}

void fw_ttt_linear_inputs_init(fw_ttt_linear_inputs* inputs) { fastweight::capi::clear(inputs); }
void fw_ttt_linear_forward_args_init(fw_ttt_linear_forward_args* args) { fastweight::capi::clear(args); }
void fw_ttt_linear_backward_args_init(fw_ttt_linear_backward_args* args) { fastweight::capi::clear(args); }
void fw_ttt_linear_step_args_init(fw_ttt_linear_step_args* args) { fastweight::capi::clear(args); }

fw_status fw_ttt_linear_forward(const fw_context* context, const fw_ttt_linear_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::call(
      fastweight::ttt_linear_forward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_ttt_linear_backward(const fw_context* context, const fw_ttt_linear_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::call(
      fastweight::ttt_linear_backward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_ttt_linear_step(const fw_context* context, const fw_ttt_linear_step_args* args,
                             const char** implementation) {
  return fastweight::capi::call(
      fastweight::ttt_linear_step, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

}  // extern "C"
