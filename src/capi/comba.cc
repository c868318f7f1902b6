// The C interface of Comba.
#include "fastweight/comba.h"

#include "capi/related.h"

namespace fastweight::capi {
namespace {

template <class From, class Args>
void set_own(const From& from, Args& args) {
  args.in.p = to_view(from.inputs->p);
  args.in.beta = to_view(from.inputs->beta);
  args.options.qk_l2norm = from.options->qk_l2norm != 0;
}

CombaForward to_args(const fw_comba_forward_args* pointer) {
  const fw_comba_forward_args& from = required("args", pointer);
  CombaForward args = related_forward<CombaForward>(from);
  set_own(from, args);
  return args;
}

CombaBackward to_args(const fw_comba_backward_args* pointer) {
  const fw_comba_backward_args& from = required("args", pointer);
  CombaBackward args = related_backward<CombaBackward>(from);
  set_own(from, args);
  args.dp = to_view(from.dp);
  args.dbeta = to_view(from.dbeta);
  return args;
}

}  // namespace
}  // namespace fastweight::capi

extern "C" {

void fw_comba_options_init(fw_comba_options* options) {
  if (!fastweight::capi::clear(options)) return;
  const fastweight::CombaOptions defaults;
  options->scale = defaults.scale;
  options->chunk_size = defaults.chunk_size;
}

void fw_comba_inputs_init(fw_comba_inputs* inputs) { fastweight::capi::clear(inputs); }
void fw_comba_forward_args_init(fw_comba_forward_args* args) { fastweight::capi::clear(args); }
void fw_comba_backward_args_init(fw_comba_backward_args* args) { fastweight::capi::clear(args); }

fw_status fw_comba_forward(const fw_context* context, const fw_comba_forward_args* args, const char** implementation) {
  return fastweight::capi::call(
      fastweight::comba_forward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_comba_backward(const fw_context* context, const fw_comba_backward_args* args,
                            const char** implementation) {
  return fastweight::capi::call(
      fastweight::comba_backward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

}  // extern "C"
