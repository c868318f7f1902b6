// The fields that the structs of the families related to the delta rule share.
#pragma once

#include "capi/convert.h"

namespace fastweight::capi {

template <class Args, class From>
void set_inputs_and_options(const From& from, Args& args) {
  const auto& inputs = required("inputs", from.inputs);
  args.in.q = to_view(inputs.q);
  args.in.k = to_view(inputs.k);
  args.in.v = to_view(inputs.v);
  args.in.g = to_view(inputs.g);
  args.in.initial_state = to_view(inputs.initial_state);
  args.in.cu_seqlens = to_view(inputs.cu_seqlens);
  const auto& options = required("options", from.options);
  args.options.scale = options.scale;
  args.options.chunk_size = options.chunk_size;
  args.options.state_v_first = options.state_v_first != 0;
}

template <class Args, class From>
Args related_forward(const From& from) {
  Args args;
  set_inputs_and_options(from, args);
  args.o = to_view(from.o);
  args.final_state = to_view(from.final_state);
  args.chunk_states = to_view(from.chunk_states);
  return args;
}

template <class Args, class From>
Args related_backward(const From& from) {
  Args args;
  set_inputs_and_options(from, args);
  args.d_o = to_view(from.d_o);
  args.d_final_state = to_view(from.d_final_state);
  args.chunk_states = to_view(from.chunk_states);
  args.dq = to_view(from.dq);
  args.dk = to_view(from.dk);
  args.dv = to_view(from.dv);
  args.dg = to_view(from.dg);
  args.d_initial_state = to_view(from.d_initial_state);
  return args;
}

}  // namespace fastweight::capi
