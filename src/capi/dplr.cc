// The C interface of DPLR and IPLR.
#include "fastweight/dplr.h"

#include "capi/related.h"

namespace fastweight::capi {
namespace {

template <class From, class Args>
void set_own(const From& from, Args& args) {
  args.in.a = to_view(from.inputs->a);
  args.in.b = to_view(from.inputs->b);
  args.options.gate = static_cast<Gate>(from.options->gate);
}

DplrForward to_args(const fw_dplr_forward_args* pointer) {
  const fw_dplr_forward_args& from = required("args", pointer);
  DplrForward args = related_forward<DplrForward>(from);
  set_own(from, args);
  return args;
}

DplrBackward to_args(const fw_dplr_backward_args* pointer) {
  const fw_dplr_backward_args& from = required("args", pointer);
  DplrBackward args = related_backward<DplrBackward>(from);
  set_own(from, args);
  args.da = to_view(from.da);
  args.db = to_view(from.db);
  return args;
}

}  // namespace
}  // namespace fastweight::capi

extern "C" {

void fw_dplr_options_init(fw_dplr_options* options) {
  if (!fastweight::capi::clear(options)) return;
  const fastweight::DplrOptions defaults;
  options->gate = static_cast<int32_t>(defaults.gate);
  options->scale = defaults.scale;
  options->chunk_size = defaults.chunk_size;
}

void fw_dplr_inputs_init(fw_dplr_inputs* inputs) { fastweight::capi::clear(inputs); }
void fw_dplr_forward_args_init(fw_dplr_forward_args* args) { fastweight::capi::clear(args); }
void fw_dplr_backward_args_init(fw_dplr_backward_args* args) { fastweight::capi::clear(args); }

fw_status fw_dplr_forward(const fw_context* context, const fw_dplr_forward_args* args, const char** implementation) {
  return fastweight::capi::call(
      fastweight::dplr_forward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_dplr_backward(const fw_context* context, const fw_dplr_backward_args* args, const char** implementation) {
  return fastweight::capi::call(
      fastweight::dplr_backward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

}  // extern "C"
