// The entry points of Comba.
#include "fastweight/comba.h"

#include "cpu/delta_rule/registry.h"
#include "ops/recurrence.h"

namespace fastweight {
namespace {

Transition transition_of(const CombaInputs& in) {
  Transition transition{.correction = Correction::kFeedback};
  transition.reader_is_key = !in.p.present();
  transition.reader = transition.reader_is_key ? in.k : in.p;
  return transition;
}

}  // namespace

std::string comba_forward(const Context& context, const CombaForward& args) {
  DeltaRuleForward inner = common_forward(args, Gate::kPerHead);
  inner.in.beta = args.in.beta;
  inner.options.qk_l2norm = args.options.qk_l2norm;
  return run_recurrence("comba_forward", context, inner, transition_of(args.in), cpu::delta_rule_forward_list());
}

std::string comba_backward(const Context& context, const CombaBackward& args) {
  DeltaRuleBackward inner = common_backward(args, Gate::kPerHead);
  inner.in.beta = args.in.beta;
  inner.options.qk_l2norm = args.options.qk_l2norm;
  inner.dbeta = args.dbeta;
  Transition transition = transition_of(args.in);
  transition.d_reader = args.dp;
  return run_recurrence("comba_backward", context, inner, transition, cpu::related_backward_list());
}

std::string comba_step(const Context& context, const CombaStep& args) {
  DeltaRuleStep inner = common_step(args, Gate::kPerHead);
  inner.in.beta = args.in.beta;
  inner.options.qk_l2norm = args.options.qk_l2norm;
  return run_recurrence("comba_step", context, inner, transition_of(args.in), cpu::delta_rule_step_list());
}

std::vector<ImplementationInfo> comba_implementations() { return related_implementations(); }

}  // namespace fastweight
