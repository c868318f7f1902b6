#include "cli/bench_memory.h"

#include <algorithm>

#include "support/related_case.h"

namespace fastweight::cli {

using support::RelatedOp;

double tensor_bytes(const BenchChoice& choice) {
  const Shape& s = choice.shape;
  const double B = static_cast<double>(s.B), K = static_cast<double>(s.K), V = static_cast<double>(s.V);
  const double HV = static_cast<double>(s.HV), each = static_cast<double>(element_size(choice.dtype));
  const double rows = choice.mode == Mode::kStep ? B : B * static_cast<double>(s.T);
  const double keys = each * rows * static_cast<double>(s.H) * K, values = each * rows * HV * V;
  const double scalars = 4 * rows * HV;  // fp32, one for each value head
  const double matrices = scalars * kBlockChunk;
  const auto gates = [&](Gate gate) {
    return gate == Gate::kPerChannel ? scalars * K : gate == Gate::kPerHead ? scalars : 0;
  };

  double inputs = 2 * keys + values, outputs = values;
  double unused = 0;  // what the case of a block holds beside the tensors of a call
  if (const auto related = related_of(choice.op)) {
    inputs += gates(support::gate_of(*related));
    if (*related == RelatedOp::kComba) inputs += keys + scalars;
    if (*related == RelatedOp::kIplr || *related == RelatedOp::kDplr) inputs += 2 * keys;
  } else if (is_delta_rule(choice.op) || choice.op == Op::kDeltaRuleMap) {
    inputs += scalars + gates(gate_of(choice.op));
  } else if (choice.op == Op::kTttLinear) {
    inputs += scalars;
  } else if (choice.op == Op::kShortConv) {
    inputs = outputs = keys;
  } else if (choice.op == Op::kScaledDotKkt) {
    inputs = keys + 2 * scalars, outputs = matrices;
  } else if (choice.op == Op::kSolveTril) {
    inputs = outputs = unused = matrices;
  } else if (choice.op == Op::kWy) {
    inputs = keys + values + matrices + 2 * scalars, outputs = values + each * rows * HV * K;
  } else if (choice.op == Op::kL2Norm) {
    inputs = outputs = unused = keys;
  } else {
    inputs = each * rows * HV * K, outputs = gates(Gate::kPerChannel);
  }
  const bool backward = choice.mode == Mode::kBackward;
  const bool has_state = !block_of(choice.op) && choice.op != Op::kShortConv;
  const double drawn = inputs * std::min(1.0, static_cast<double>(kDrawnTokens) / rows);
  double total = drawn + inputs + unused + outputs + (backward ? inputs : 0);
  // The gradients of the outputs are there in every mode.
  if (!has_state) return backward || choice.op == Op::kChunkLocalCumsum ? total : total + outputs;

  const double sequences = choice.sequences > 0 ? static_cast<double>(choice.sequences) : B;
  const double state = static_cast<double>(element_size(choice.state_dtype.value())) * HV * K * V;
  total += 2 * state;  // drawn: an initial one and the gradient of a final one
  if (choice.saved_states) total += std::max(rows / DeltaRuleOptions().chunk_size, sequences) * state;
  if (backward && choice.saved_states) total += outputs;  // of the forward that saved them
  if (!backward || choice.saved_states) total += sequences * state;
  if (choice.op == Op::kTttLinear) total += sequences * state;
  return total;
}

}  // namespace fastweight::cli
