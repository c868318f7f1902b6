// Problems for the delta rule on Hopper's instructions, the same for both directions.
#pragma once

#include <utility>
#include <vector>

#include "tests/delta_rule/grid.h"

namespace fastweight::test {

inline DeltaRuleSpec wide(Gate gate, int64_t T, DType dtype = DType::kBF16) {
  DeltaRuleSpec spec = spec_of(gate, T, 128, 128);
  spec.dtype = dtype;
  return spec;
}

inline std::vector<DeltaRuleCase> cases_of_lengths(Gate gate) {
  std::vector<DeltaRuleCase> cases;
  for (int64_t T : first<int64_t>({65, 0, 1, 320, 63, 64, 128, 129}, 4)) {
    cases.push_back(support::draw(with_batch(with_heads(wide(gate, T), 2, 1), 2), 1));
  }
  return cases;
}

inline std::vector<DeltaRuleCase> cases_of_small_chunks(Gate gate) {
  std::vector<DeltaRuleCase> cases;
  for (int32_t chunk_size : {16, 32}) {
    DeltaRuleSpec spec = wide(gate, 100);
    spec.options.chunk_size = chunk_size;
    cases.push_back(support::draw(spec, 2));
  }
  return cases;
}

inline DeltaRuleCase case_in_fp16(Gate gate) { return support::draw(wide(gate, 130, DType::kF16), 3); }

inline std::vector<DeltaRuleCase> cases_of_widths(Gate gate) {
  using Widths = std::pair<int64_t, int64_t>;
  std::vector<DeltaRuleCase> cases;
  for (const auto& [K, V] : first<Widths>({{72, 120}, {128, 72}, {104, 128}}, 2)) {
    DeltaRuleSpec spec = spec_of(gate, 70, K, V);
    spec.dtype = DType::kBF16;
    cases.push_back(support::draw(spec, 4));
  }
  return cases;
}

inline DeltaRuleCase case_without_initial_state_in_the_other_order(Gate gate) {
  DeltaRuleSpec spec = wide(gate, 70);
  spec.options.state_v_first = true;
  spec.initial_state = false;
  return support::draw(spec, 5);
}

inline DeltaRuleCase case_of_sequences(Gate gate) {
  return support::draw(with_lengths(with_heads(wide(gate, 0), 2, 1), {5, 0, 64, 1, 130, 63}), 6);
}

}  // namespace fastweight::test
