// The C interface of the building blocks.
#include "fastweight/blocks.h"

#include "capi/convert.h"
#include "core/blocks_fields.h"

extern "C" {

void fw_chunk_local_cumsum_args_init(fw_chunk_local_cumsum_args* args) {
  fastweight::capi::init<fastweight::ChunkLocalCumsum>(args);
}
void fw_scaled_dot_kkt_forward_args_init(fw_scaled_dot_kkt_forward_args* args) {
  fastweight::capi::init<fastweight::ScaledDotKktForward>(args);
}
void fw_scaled_dot_kkt_backward_args_init(fw_scaled_dot_kkt_backward_args* args) {
  fastweight::capi::init<fastweight::ScaledDotKktBackward>(args);
}
void fw_solve_tril_forward_args_init(fw_solve_tril_forward_args* args) {
  fastweight::capi::init<fastweight::SolveTrilForward>(args);
}
void fw_solve_tril_backward_args_init(fw_solve_tril_backward_args* args) {
  fastweight::capi::init<fastweight::SolveTrilBackward>(args);
}
void fw_wy_forward_args_init(fw_wy_forward_args* args) { fastweight::capi::init<fastweight::WyForward>(args); }
void fw_wy_backward_args_init(fw_wy_backward_args* args) { fastweight::capi::init<fastweight::WyBackward>(args); }
void fw_l2norm_forward_args_init(fw_l2norm_forward_args* args) {
  fastweight::capi::init<fastweight::L2NormForward>(args);
}
void fw_l2norm_backward_args_init(fw_l2norm_backward_args* args) {
  fastweight::capi::init<fastweight::L2NormBackward>(args);
}
void fw_gate_activation_forward_args_init(fw_gate_activation_forward_args* args) {
  fastweight::capi::init<fastweight::GateActivationForward>(args);
}
void fw_gate_activation_backward_args_init(fw_gate_activation_backward_args* args) {
  fastweight::capi::init<fastweight::GateActivationBackward>(args);
}
void fw_rms_norm_forward_args_init(fw_rms_norm_forward_args* args) {
  fastweight::capi::init<fastweight::RmsNormForward>(args);
}
void fw_rms_norm_backward_args_init(fw_rms_norm_backward_args* args) {
  fastweight::capi::init<fastweight::RmsNormBackward>(args);
}

fw_status fw_chunk_local_cumsum(const fw_context* context, const fw_chunk_local_cumsum_args* args,
                                const char** implementation) {
  return fastweight::capi::call(fastweight::chunk_local_cumsum, context, args, implementation);
}

fw_status fw_scaled_dot_kkt_forward(const fw_context* context, const fw_scaled_dot_kkt_forward_args* args,
                                    const char** implementation) {
  return fastweight::capi::call(fastweight::scaled_dot_kkt_forward, context, args, implementation);
}

fw_status fw_scaled_dot_kkt_backward(const fw_context* context, const fw_scaled_dot_kkt_backward_args* args,
                                     const char** implementation) {
  return fastweight::capi::call(fastweight::scaled_dot_kkt_backward, context, args, implementation);
}

fw_status fw_solve_tril_forward(const fw_context* context, const fw_solve_tril_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::call(fastweight::solve_tril_forward, context, args, implementation);
}

fw_status fw_solve_tril_backward(const fw_context* context, const fw_solve_tril_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::call(fastweight::solve_tril_backward, context, args, implementation);
}

fw_status fw_wy_forward(const fw_context* context, const fw_wy_forward_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::wy_forward, context, args, implementation);
}

fw_status fw_wy_backward(const fw_context* context, const fw_wy_backward_args* args, const char** implementation) {
  return fastweight::capi::call(fastweight::wy_backward, context, args, implementation);
}

fw_status fw_l2norm_forward(const fw_context* context, const fw_l2norm_forward_args* args,
                            const char** implementation) {
  return fastweight::capi::call(fastweight::l2norm_forward, context, args, implementation);
}

fw_status fw_l2norm_backward(const fw_context* context, const fw_l2norm_backward_args* args,
                             const char** implementation) {
  return fastweight::capi::call(fastweight::l2norm_backward, context, args, implementation);
}

fw_status fw_gate_activation_forward(const fw_context* context, const fw_gate_activation_forward_args* args,
                                     const char** implementation) {
  return fastweight::capi::call(fastweight::gate_activation_forward, context, args, implementation);
}

fw_status fw_gate_activation_backward(const fw_context* context, const fw_gate_activation_backward_args* args,
                                      const char** implementation) {
  return fastweight::capi::call(fastweight::gate_activation_backward, context, args, implementation);
}

fw_status fw_rms_norm_forward(const fw_context* context, const fw_rms_norm_forward_args* args,
                              const char** implementation) {
  return fastweight::capi::call(fastweight::rms_norm_forward, context, args, implementation);
}

fw_status fw_rms_norm_backward(const fw_context* context, const fw_rms_norm_backward_args* args,
                               const char** implementation) {
  return fastweight::capi::call(fastweight::rms_norm_backward, context, args, implementation);
}

}  // extern "C"
