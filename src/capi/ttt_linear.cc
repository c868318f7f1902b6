// The C interface of TTT-Linear.
#include "fastweight/ttt_linear.h"

#include <cstddef>

#include "capi/convert.h"
#include "core/ttt_linear_fields.h"

namespace fastweight {

template <>
inline constexpr size_t capi::kFirstSize<fw_ttt_linear_forward_args> = offsetof(fw_ttt_linear_forward_args, kept);
template <>
inline constexpr size_t capi::kFirstSize<fw_ttt_linear_backward_args> = offsetof(fw_ttt_linear_backward_args, kept);

}  // namespace fastweight

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

fw_status fw_ttt_linear_kept_words(const fw_context* context, const fw_ttt_linear_options* options, int32_t dtype,
                                   int64_t head_dim, int64_t* words) {
  return fastweight::capi::guarded([&] {
    if (words == nullptr) fastweight::check::invalid("words", "a pointer", "null");
    fastweight::TttLinearOptions resolved;
    fastweight::capi::copy_fields(fastweight::capi::required<fastweight::TttLinearOptions>("options", options),
                                  resolved);
    *words = fastweight::ttt_linear_kept_words(fastweight::capi::to_context(context), resolved,
                                               static_cast<fastweight::DType>(dtype), head_dim);
  });
}

}  // extern "C"
