// The entry points of gated linear attention.
#include "fastweight/gla.h"

#include "core/check.h"
#include "cpu/delta_rule/registry.h"
#include "ops/entry.h"
#include "ops/recurrence.h"

namespace fastweight {
namespace {

constexpr Transition kTransition{.correction = Correction::kNone};

// g_gamma is a g that does not change from token to token.
void check_and_use_g_gamma(const Context& context, const GlaInputs& in, Gate gate, DeltaRuleInputs& inner) {
  if (!in.g_gamma.present()) return;
  check::present("q", in.q);
  check::well_formed("g_gamma", in.g_gamma);
  check::on_device("g_gamma", in.g_gamma, context.device);
  if (gate != Gate::kPerHead) check::absent("g_gamma", in.g_gamma, "unless the gate is per head");
  check::absent("g", in.g, "with g_gamma");
  check::floating("g_gamma", in.g_gamma);
  check::shape("g_gamma", in.g_gamma, {in.q.shape[2]});
  inner.g = in.g_gamma;
  inner.g.rank = 3;
  inner.g.shape = {in.q.shape[0], in.q.shape[1], in.q.shape[2]};
  inner.g.strides = {0, 0, in.g_gamma.strides[0]};
}

}  // namespace

std::string gla_forward(const Context& context, const GlaForward& args) {
  return entry_point("gla_forward", [&] {
    DeltaRuleForward inner = common_forward(args, args.options.gate);
    check_and_use_g_gamma(context, args.in, args.options.gate, inner.in);
    return run_recurrence("gla_forward", context, inner, kTransition, cpu::delta_rule_forward_list());
  });
}

std::string gla_backward(const Context& context, const GlaBackward& args) {
  return entry_point("gla_backward", [&] {
    DeltaRuleBackward inner = common_backward(args, args.options.gate);
    check_and_use_g_gamma(context, args.in, args.options.gate, inner.in);
    if (args.in.g_gamma.present()) check::absent("dg", args.dg, "with g_gamma");
    return run_recurrence("gla_backward", context, inner, kTransition, cpu::related_backward_list());
  });
}

std::string gla_step(const Context& context, const GlaStep& args) {
  return entry_point("gla_step", [&] {
    DeltaRuleStep inner = common_step(args, args.options.gate);
    check_and_use_g_gamma(context, args.in, args.options.gate, inner.in);
    return run_recurrence("gla_step", context, inner, kTransition, cpu::delta_rule_step_list());
  });
}

std::vector<ImplementationInfo> gla_implementations() { return related_implementations(); }

}  // namespace fastweight
