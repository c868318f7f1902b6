// The C interface of the delta-rule family.
#include "fastweight/delta_rule.h"

#include <string>

#include "capi/convert.h"

namespace fastweight::capi {
namespace {

static_assert(static_cast<int32_t>(Gate::kPerChannel) == FW_GATE_PER_CHANNEL);
static_assert(static_cast<int32_t>(DType::kI64) == FW_I64);

DeltaRuleOptions to_options(const fw_delta_rule_options* pointer) {
  const fw_delta_rule_options& from = required("options", pointer);
  DeltaRuleOptions options;
  options.gate = static_cast<Gate>(from.gate);
  options.scale = from.scale;
  options.chunk_size = from.chunk_size;
  options.state_v_first = from.state_v_first != 0;
  options.qk_l2norm = from.qk_l2norm != 0;
  options.beta_sigmoid = from.beta_sigmoid != 0;
  options.allow_neg_eigval = from.allow_neg_eigval != 0;
  options.gate_in_kernel = from.gate_in_kernel != 0;
  options.lower_bound = from.lower_bound;
  options.safe_gate = from.safe_gate != 0;
  return options;
}

DeltaRuleInputs to_inputs(const fw_delta_rule_inputs* pointer) {
  const fw_delta_rule_inputs& from = required("inputs", pointer);
  DeltaRuleInputs in;
  in.q = to_view(from.q);
  in.k = to_view(from.k);
  in.v = to_view(from.v);
  in.g = to_view(from.g);
  in.beta = to_view(from.beta);
  in.a_log = to_view(from.a_log);
  in.dt_bias = to_view(from.dt_bias);
  in.initial_state = to_view(from.initial_state);
  in.cu_seqlens = to_view(from.cu_seqlens);
  return in;
}

DeltaRuleForward to_args(const fw_delta_rule_forward_args* pointer) {
  const fw_delta_rule_forward_args& from = required("args", pointer);
  DeltaRuleForward args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.o = to_view(from.o);
  args.final_state = to_view(from.final_state);
  args.chunk_states = to_view(from.chunk_states);
  return args;
}

DeltaRuleBackward to_args(const fw_delta_rule_backward_args* pointer) {
  const fw_delta_rule_backward_args& from = required("args", pointer);
  DeltaRuleBackward args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.d_o = to_view(from.d_o);
  args.d_final_state = to_view(from.d_final_state);
  args.chunk_states = to_view(from.chunk_states);
  args.dq = to_view(from.dq);
  args.dk = to_view(from.dk);
  args.dv = to_view(from.dv);
  args.dg = to_view(from.dg);
  args.dbeta = to_view(from.dbeta);
  args.da_log = to_view(from.da_log);
  args.ddt_bias = to_view(from.ddt_bias);
  args.d_initial_state = to_view(from.d_initial_state);
  return args;
}

DeltaRuleStep to_args(const fw_delta_rule_step_args* pointer) {
  const fw_delta_rule_step_args& from = required("args", pointer);
  DeltaRuleStep args;
  args.in = to_inputs(from.inputs);
  args.options = to_options(from.options);
  args.state = to_view(from.state);
  args.state_indices = to_view(from.state_indices);
  args.o = to_view(from.o);
  return args;
}

}  // namespace
}  // namespace fastweight::capi

extern "C" {

void fw_delta_rule_options_init(fw_delta_rule_options* options) {
  if (!fastweight::capi::clear(options)) return;
  const fastweight::DeltaRuleOptions defaults;
  options->scale = defaults.scale;
  options->chunk_size = defaults.chunk_size;
  options->lower_bound = defaults.lower_bound;
}

void fw_delta_rule_inputs_init(fw_delta_rule_inputs* inputs) { fastweight::capi::clear(inputs); }
void fw_delta_rule_forward_args_init(fw_delta_rule_forward_args* args) { fastweight::capi::clear(args); }
void fw_delta_rule_backward_args_init(fw_delta_rule_backward_args* args) { fastweight::capi::clear(args); }
void fw_delta_rule_step_args_init(fw_delta_rule_step_args* args) { fastweight::capi::clear(args); }

fw_status fw_delta_rule_forward(const fw_context* context, const fw_delta_rule_forward_args* args,
                                const char** implementation) {
  return fastweight::capi::call(
      fastweight::delta_rule_forward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_delta_rule_backward(const fw_context* context, const fw_delta_rule_backward_args* args,
                                 const char** implementation) {
  return fastweight::capi::call(
      fastweight::delta_rule_backward, context, [&] { return fastweight::capi::to_args(args); }, implementation);
}

fw_status fw_delta_rule_step(const fw_context* context, const fw_delta_rule_step_args* args,
                             const char** implementation) {
  return fastweight::capi::call(
      fastweight::delta_rule_step, context, [&] { return fastweight::capi::to_args(args); }, implementation);
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

}  // extern "C"
