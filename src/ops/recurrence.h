// The entry points of the delta rule and of the families related to it meet here: check the arguments, build the
// problem, walk the implementation list. A related family hands in the delta rule's structs with what it has no field
// for left absent, and a transition.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/delta_rule_problem.h"
#include "core/implementation.h"
#include "fastweight/context.h"
#include "fastweight/info.h"

namespace fastweight {

template <class Args>
using ImplementationList = std::span<const Implementation<DeltaRuleProblem<Args>>>;

// `entry` is the name of the public function in messages. Args is DeltaRuleForward, DeltaRuleBackward or DeltaRuleStep.
template <class Args>
std::string run_recurrence(const char* entry, const Context& context, const Args& args, const Transition& transition,
                           ImplementationList<Args> cpu_list, ImplementationList<Args> cuda_list = {});

// The fields that the structs of a related family share with those of the delta rule.
template <class Args>
DeltaRuleInputs common_inputs(const Args& args) {
  DeltaRuleInputs in;
  in.q = args.in.q;
  in.k = args.in.k;
  in.v = args.in.v;
  in.g = args.in.g;
  in.initial_state = args.in.initial_state;
  in.cu_seqlens = args.in.cu_seqlens;
  return in;
}

template <class Args>
DeltaRuleOptions common_options(const Args& args, Gate gate) {
  DeltaRuleOptions options;
  options.gate = gate;
  options.scale = args.options.scale;
  options.chunk_size = args.options.chunk_size;
  options.state_v_first = args.options.state_v_first;
  return options;
}

template <class Args>
DeltaRuleForward common_forward(const Args& args, Gate gate) {
  DeltaRuleForward inner;
  inner.in = common_inputs(args);
  inner.options = common_options(args, gate);
  inner.o = args.o;
  inner.final_state = args.final_state;
  inner.chunk_states = args.chunk_states;
  return inner;
}

template <class Args>
DeltaRuleBackward common_backward(const Args& args, Gate gate) {
  DeltaRuleBackward inner;
  inner.in = common_inputs(args);
  inner.options = common_options(args, gate);
  inner.d_o = args.d_o;
  inner.d_final_state = args.d_final_state;
  inner.chunk_states = args.chunk_states;
  inner.dq = args.dq;
  inner.dk = args.dk;
  inner.dv = args.dv;
  inner.dg = args.dg;
  inner.d_initial_state = args.d_initial_state;
  return inner;
}

template <class Args>
DeltaRuleStep common_step(const Args& args, Gate gate) {
  DeltaRuleStep inner;
  inner.in = common_inputs(args);
  inner.options = common_options(args, gate);
  inner.state = args.state;
  inner.state_indices = args.state_indices;
  inner.o = args.o;
  return inner;
}

// The lists of a related family.
std::vector<ImplementationInfo> related_implementations();

}  // namespace fastweight
