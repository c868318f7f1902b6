#include "support/delta_rule_map_case.h"

#include <cmath>

namespace fastweight::support {

std::span<const CaseTensor<DeltaRuleMapResults>> DeltaRuleMapResults::fields() {
  using Self = DeltaRuleMapResults;
  static constexpr CaseTensor<Self> kFields[] = {
      {"m", &Self::m, Part::kStart}, {"h", &Self::h, Part::kEnd}, {"mt", &Self::mt}, {"e", &Self::e, Part::kStart}};
  return kFields;
}

DeltaRuleMapCase draw(const DeltaRuleMapSpec& spec, uint64_t seed) {
  return {draw(static_cast<const DeltaRuleSpec&>(spec), seed)};
}

DeltaRuleMapResults outputs_of(Mode mode, const DeltaRuleMapCase& problem) {
  const DeltaRuleSpec& spec = problem.spec;
  const int64_t N = num_sequences(spec);
  const bool v_first = spec.options.state_v_first, forward = mode == Mode::kForward;
  const DType dtype = accumulator_type(spec.dtype);
  DeltaRuleMapResults outputs;
  (forward ? outputs.m : outputs.mt) = poisoned(dtype, {N, spec.HV, spec.K, spec.K});
  (forward ? outputs.h : outputs.e) =
      poisoned(dtype, {N, spec.HV, v_first ? spec.V : spec.K, v_first ? spec.K : spec.V});
  return outputs;
}

Call call_of(Mode mode, const DeltaRuleMapCase& problem, const DeltaRuleMapResults& outputs) {
  if (mode == Mode::kForward) return bound_call(delta_rule_map_forward, problem, outputs);
  auto args = bound<DeltaRuleMapBackward>(problem, outputs);
  args.in.initial_state = {};
  return Call(delta_rule_map_backward, args);
}

Tolerance tolerance(const DeltaRuleCase& problem, const DeltaRuleMapResults&, const std::string& tensor,
                    DType result_type, const std::string& implementation) {
  if (implementation == "chunk_16bit" || implementation == "chunk_sm90") {
    // M has no values, which add to a state what its transition has lost: as the gradient of a state. Without a gate the
    // transitions lose nearly all of it, and the rounding of the identity stays.
    Tolerance bound =
        tolerance(problem, DeltaRuleResults(), tensor == "h" ? "final_state" : "d_initial_state", result_type, true);
    const bool is_square = tensor == "m" || tensor == "mt";
    if (is_square && problem.spec.options.gate == Gate::kNone) {
      bound.rms = bound.relative / std::sqrt(static_cast<double>(problem.spec.K));
    }
    return bound;
  }
  const bool large_gates = problem.spec.hard_gate_fraction > 0 || problem.spec.gate_divisor < 1;
  if (problem.spec.dtype == DType::kF64) return {1e-10, 1e-13};
  return {problem.spec.options.gate == Gate::kPerChannel && large_gates ? 5e-4 : 1e-5, 1e-6};
}

}  // namespace fastweight::support
