// One problem of the bench: its data, its outputs, the call, and what the call costs at least.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/names.h"
#include "fastweight/delta_rule.h"
#include "support/delta_rule_case.h"
#include "support/tensor.h"

namespace fastweight::cli {

struct Shape {
  int64_t B = 1, T = 0, H = 0, HV = 0, K = 0, V = 0;

  std::string text() const;  // B=1,T=4096,H=16,K=128,V=128; HV where it differs from H
};

// From `B=1,T=4096,H=16,HV=32,K=128,V=128` in any order; B defaults to 1, HV to H, T stays 0 when absent. Throws
// UsageError.
Shape parse_shape(const std::string& text);

struct BenchChoice {
  Gate gate = Gate::kNone;
  Mode mode = Mode::kForward;
  Shape shape;
  DType dtype = DType::kF32;
  int64_t sequences = 0;      // more than 0: T is cut into this many packed sequences of growing length (not for steps)
  bool saved_states = false;  // the forward writes the chunk states, the backward reads them
};

// Forward: o and the final state, from no initial state. Backward: every gradient of the inputs, from d_o. Step: one
// token for each of B states. Gates are precomputed, keys have unit norm, gates and beta are fp32.
class BenchProblem {
 public:
  explicit BenchProblem(const BenchChoice& choice);

  // One call of the public API; the name of the implementation that ran.
  std::string run(const Context& context) const;

  // Per token and value head F = 6KV + 64(K + V) forward, 3F backward, 7KV for a step.
  double flop() const;

  // Every input and output tensor once; the states of a step twice, read and written.
  double bytes() const;

 private:
  BenchChoice choice_;
  support::DeltaRuleCase data_;
  std::vector<support::Tensor> outputs_;  // owns what the calls below write
  DeltaRuleForward forward_;
  DeltaRuleBackward backward_;
  DeltaRuleStep step_;
};

}  // namespace fastweight::cli
