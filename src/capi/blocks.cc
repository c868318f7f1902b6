// The C interface of the building blocks.
#include "fastweight/blocks.h"

#include <string>

#include "capi/convert.h"

namespace fastweight::capi {
namespace {

// The tensors and options that the directions of a block share.
template <class Args>
ScaledDotKktInputs to_kkt_inputs(const Args& from) {
  return {to_view(from.k), to_view(from.beta), to_view(from.gamma), to_view(from.cu_seqlens)};
}

template <class Args>
WyInputs to_wy_inputs(const Args& from) {
  return {to_view(from.k),     to_view(from.v), to_view(from.beta),
          to_view(from.gamma), to_view(from.j), to_view(from.cu_seqlens)};
}

template <class Args>
GateActivationInputs to_gate_inputs(const Args& from) {
  return {to_view(from.x), to_view(from.a_log), to_view(from.dt_bias), to_view(from.cu_seqlens)};
}

template <class Args>
GateActivationOptions to_gate_options(const Args& from) {
  return {from.lower_bound, from.chunk_size};
}

ChunkLocalCumsum to_args(const fw_chunk_local_cumsum_args& from) {
  return {to_view(from.x), to_view(from.cu_seqlens), from.chunk_size, from.reverse != 0, to_view(from.y)};
}

ScaledDotKktForward to_args(const fw_scaled_dot_kkt_forward_args& from) {
  return {to_kkt_inputs(from), to_view(from.a)};
}

ScaledDotKktBackward to_args(const fw_scaled_dot_kkt_backward_args& from) {
  return {to_kkt_inputs(from), to_view(from.da), to_view(from.dk), to_view(from.dbeta), to_view(from.dgamma)};
}

SolveTrilForward to_args(const fw_solve_tril_forward_args& from) {
  return {to_view(from.a), to_view(from.cu_seqlens), to_view(from.j)};
}

SolveTrilBackward to_args(const fw_solve_tril_backward_args& from) {
  return {to_view(from.j), to_view(from.dj), to_view(from.cu_seqlens), to_view(from.da)};
}

WyForward to_args(const fw_wy_forward_args& from) { return {to_wy_inputs(from), to_view(from.w), to_view(from.u)}; }

WyBackward to_args(const fw_wy_backward_args& from) {
  return {to_wy_inputs(from), to_view(from.dw),    to_view(from.du),     to_view(from.dk),
          to_view(from.dv),   to_view(from.dbeta), to_view(from.dgamma), to_view(from.da)};
}

L2NormForward to_args(const fw_l2norm_forward_args& from) {
  return {to_view(from.x), from.eps, to_view(from.y), to_view(from.rstd)};
}

L2NormBackward to_args(const fw_l2norm_backward_args& from) {
  return {to_view(from.y), to_view(from.rstd), to_view(from.dy), to_view(from.dx)};
}

GateActivationForward to_args(const fw_gate_activation_forward_args& from) {
  return {to_gate_inputs(from), to_gate_options(from), to_view(from.g)};
}

GateActivationBackward to_args(const fw_gate_activation_backward_args& from) {
  return {to_gate_inputs(from), to_gate_options(from), to_view(from.dg),
          to_view(from.dx),     to_view(from.da_log),  to_view(from.ddt_bias)};
}

template <class Args, class CppArgs>
fw_status run(std::string (*entry)(const Context&, const CppArgs&), const fw_context* context, const Args* args,
              const char** implementation) {
  return call(
      entry, context, [&] { return to_args(required("args", args)); }, implementation);
}

}  // namespace
}  // namespace fastweight::capi

extern "C" {

void fw_chunk_local_cumsum_args_init(fw_chunk_local_cumsum_args* args) {
  if (fastweight::capi::clear(args)) args->chunk_size = fastweight::ChunkLocalCumsum().chunk_size;
}
void fw_l2norm_forward_args_init(fw_l2norm_forward_args* args) {
  if (fastweight::capi::clear(args)) args->eps = fastweight::L2NormForward().eps;
}
void fw_gate_activation_forward_args_init(fw_gate_activation_forward_args* args) {
  if (fastweight::capi::clear(args)) args->lower_bound = fastweight::GateActivationOptions().lower_bound;
}
void fw_gate_activation_backward_args_init(fw_gate_activation_backward_args* args) {
  if (fastweight::capi::clear(args)) args->lower_bound = fastweight::GateActivationOptions().lower_bound;
}
void fw_scaled_dot_kkt_forward_args_init(fw_scaled_dot_kkt_forward_args* args) { fastweight::capi::clear(args); }
void fw_scaled_dot_kkt_backward_args_init(fw_scaled_dot_kkt_backward_args* args) { fastweight::capi::clear(args); }
void fw_solve_tril_forward_args_init(fw_solve_tril_forward_args* args) { fastweight::capi::clear(args); }
void fw_solve_tril_backward_args_init(fw_solve_tril_backward_args* args) { fastweight::capi::clear(args); }
void fw_wy_forward_args_init(fw_wy_forward_args* args) { fastweight::capi::clear(args); }
void fw_wy_backward_args_init(fw_wy_backward_args* args) { fastweight::capi::clear(args); }
void fw_l2norm_backward_args_init(fw_l2norm_backward_args* args) { fastweight::capi::clear(args); }

fw_status fw_chunk_local_cumsum(const fw_context* context, const fw_chunk_local_cumsum_args* args,
                                const char** implementation) {
  return fastweight::capi::run(fastweight::chunk_local_cumsum, context, args, implementation);
}
fw_status fw_scaled_dot_kkt_forward(const fw_context* context, const fw_scaled_dot_kkt_forward_args* args,
                                    const char** implementation) {
  return fastweight::capi::run(fastweight::scaled_dot_kkt_forward, context, args, implementation);
}
fw_status fw_scaled_dot_kkt_backward(const fw_context* context, const fw_scaled_dot_kkt_backward_args* args,
                                     const char** implementation) {
  return fastweight::capi::run(fastweight::scaled_dot_kkt_backward, context, args, implementation);
}
fw_status fw_solve_tril_forward(const fw_context* context, const fw_solve_tril_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::run(fastweight::solve_tril_forward, context, args, implementation);
}
fw_status fw_solve_tril_backward(const fw_context* context, const fw_solve_tril_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::run(fastweight::solve_tril_backward, context, args, implementation);
}
fw_status fw_wy_forward(const fw_context* context, const fw_wy_forward_args* args, const char** implementation) {
  return fastweight::capi::run(fastweight::wy_forward, context, args, implementation);
}
fw_status fw_wy_backward(const fw_context* context, const fw_wy_backward_args* args, const char** implementation) {
  return fastweight::capi::run(fastweight::wy_backward, context, args, implementation);
}
fw_status fw_l2norm_forward(const fw_context* context, const fw_l2norm_forward_args* args,
                            const char** implementation) {
  return fastweight::capi::run(fastweight::l2norm_forward, context, args, implementation);
}
fw_status fw_l2norm_backward(const fw_context* context, const fw_l2norm_backward_args* args,
                             const char** implementation) {
  return fastweight::capi::run(fastweight::l2norm_backward, context, args, implementation);
}
fw_status fw_gate_activation_forward(const fw_context* context, const fw_gate_activation_forward_args* args,
                                     const char** implementation) {
  return fastweight::capi::run(fastweight::gate_activation_forward, context, args, implementation);
}
fw_status fw_gate_activation_backward(const fw_context* context, const fw_gate_activation_backward_args* args,
                                      const char** implementation) {
  return fastweight::capi::run(fastweight::gate_activation_backward, context, args, implementation);
}

}  // extern "C"
