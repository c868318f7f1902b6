// The map of a segment on a problem of the delta-rule family: what it computes of the data of delta_rule_case.h, and the
// functions that run it through the public API. Tests and the tool use this.
#pragma once

#include <cstdint>
#include <string>

#include "core/delta_rule_map_fields.h"
#include "fastweight/delta_rule_map.h"
#include "support/delta_rule_case.h"

namespace fastweight::support {

// The names by which families are told apart.
struct DeltaRuleMapSpec : DeltaRuleSpec {};
struct DeltaRuleMapCase : DeltaRuleCase {};

struct DeltaRuleMapResults : TensorsByName<DeltaRuleMapResults> {
  std::string implementation;
  Tensor m, h;   // of a forward
  Tensor mt, e;  // of a backward

  static std::span<const CaseTensor<DeltaRuleMapResults>> fields();
};

DeltaRuleMapCase draw(const DeltaRuleMapSpec& spec, uint64_t seed);

// Results are fp32, or fp64 for a problem in double. A backward has no initial state.
DeltaRuleMapResults outputs_of(Mode mode, const DeltaRuleMapCase& problem);
Call call_of(Mode mode, const DeltaRuleMapCase& problem, const DeltaRuleMapResults& outputs);

// What a result may be off the reference in double on the same rounded inputs: fp32, whatever the type of the problem, but
// for the implementations that round the operands of products as the operator itself does.
Tolerance tolerance(const DeltaRuleCase& problem, const DeltaRuleMapResults& expected, const std::string& tensor,
                    DType result_type, const std::string& implementation);

}  // namespace fastweight::support
