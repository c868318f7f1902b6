// The C interface of gated linear attention.
#include "fastweight/gla.h"

#include "capi/related.h"

namespace fastweight::capi {
namespace {

template <class From, class Args>
void set_own(const From& from, Args& args) {
  args.in.g_gamma = to_view(from.inputs->g_gamma);
  args.options.gate = static_cast<Gate>(from.options->gate);
}

GlaForward to_args(const fw_gla_forward_args* pointer) {
  const fw_gla_forward_args& from = required("args", pointer);
  GlaForward args = related_forward<GlaForward>(from);
  set_own(from, args);
  return args;
}

GlaBackward to_args(const fw_gla_backward_args* pointer) {
  const fw_gla_backward_args& from = required("args", pointer);
  GlaBackward args = related_backward<GlaBackward>(from);
  set_own(from, args);
  return args;
}

}  // namespace
}  // namespace fastweight::capi

extern "C" {

void fw_gla_options_init(fw_gla_options* options) {
  if (!fastweight::capi::clear(options)) return;
  const fastweight::GlaOptions defaults;
  options->gate = static_cast<int32_t>(defaults.gate);
  options->scale = defaults.scale;
  options->chunk_size = defaults.chunk_size;
}

void fw_gla_inputs_init(fw_gla_inputs* inputs) { fastweight::capi::clear(inputs); }
void fw_gla_forward_args_init(fw_gla_forward_args* args) { fastweight::capi::clear(args); }
void fw_gla_backward_args_init(fw_gla_backward_args* args) { fastweight::capi::clear(args); }

fw_status fw_gla_forward(const fw_context* context, const fw_gla_forward_args* args, const char** implementation) {
  return fastweight::capi::call(
      fastweight::gla_forward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_gla_backward(const fw_context* context, const fw_gla_backward_args* args, const char** implementation) {
  return fastweight::capi::call(
      fastweight::gla_backward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

}  // extern "C"
