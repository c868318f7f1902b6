// The C interface of the delta-rule family.
#include "fastweight/delta_rule.h"

#include <cstddef>

#include "capi/convert.h"
#include "core/delta_rule_fields.h"

namespace fastweight {

static_assert(static_cast<int32_t>(Gate::kPerChannel) == FW_GATE_PER_CHANNEL);
static_assert(static_cast<int32_t>(DType::kI64) == FW_I64);

template <>
inline constexpr size_t capi::kFirstSize<fw_delta_rule_forward_args> = offsetof(fw_delta_rule_forward_args, kept);
template <>
inline constexpr size_t capi::kFirstSize<fw_delta_rule_backward_args> = offsetof(fw_delta_rule_backward_args, kept);

}  // namespace fastweight

extern "C" {

void fw_delta_rule_options_init(fw_delta_rule_options* options) {
  fastweight::capi::init<fastweight::DeltaRuleOptions>(options);
}
void fw_delta_rule_inputs_init(fw_delta_rule_inputs* inputs) {
  fastweight::capi::init<fastweight::DeltaRuleInputs>(inputs);
}
void fw_delta_rule_forward_args_init(fw_delta_rule_forward_args* args) {
  fastweight::capi::init<fastweight::DeltaRuleForward>(args);
}
void fw_delta_rule_backward_args_init(fw_delta_rule_backward_args* args) {
  fastweight::capi::init<fastweight::DeltaRuleBackward>(args);
}
void fw_delta_rule_step_args_init(fw_delta_rule_step_args* args) {
  fastweight::capi::init<fastweight::DeltaRuleStep>(args);
}

fw_status fw_delta_rule_forward(const fw_context* context, const fw_delta_rule_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::call(fastweight::delta_rule_forward, context, args, implementation);
}

fw_status fw_delta_rule_backward(const fw_context* context, const fw_delta_rule_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::call(fastweight::delta_rule_backward, context, args, implementation);
}

fw_status fw_delta_rule_step(const fw_context* context, const fw_delta_rule_step_args* args,
                             const char** implementation) {
  return fastweight::capi::call(fastweight::delta_rule_step, context, args, implementation);
}

fw_status fw_delta_rule_num_chunks(int64_t tokens, const fw_tensor* cu_seqlens, int32_t chunk_size,
                                   int64_t* num_chunks) {
  return fastweight::capi::guarded([&] {
    if (num_chunks == nullptr) fastweight::check::invalid("num_chunks", "a pointer", "null");
    const fastweight::TensorView view =
        cu_seqlens == nullptr ? fastweight::TensorView{} : fastweight::capi::to_view(*cu_seqlens);
    *num_chunks = fastweight::delta_rule_num_chunks(tokens, view, chunk_size);
  });
}

fw_status fw_delta_rule_kept_words(const fw_context* context, const fw_delta_rule_options* options, int32_t dtype,
                                   int64_t head_dim_k, int32_t all, int64_t* words) {
  return fastweight::capi::guarded([&] {
    if (words == nullptr) fastweight::check::invalid("words", "a pointer", "null");
    fastweight::DeltaRuleOptions resolved;
    fastweight::capi::copy_fields(fastweight::capi::required<fastweight::DeltaRuleOptions>("options", options),
                                  resolved);
    *words = fastweight::delta_rule_kept_words(fastweight::capi::to_context(context), resolved,
                                               static_cast<fastweight::DType>(dtype), head_dim_k, all != 0);
  });
}

}  // extern "C"
