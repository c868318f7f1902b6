// Problems for the delta rule on Hopper's instructions, the same for both directions.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/delta_rule/grid.h"

namespace fastweight::test {

inline DeltaRuleSpec wide(Gate gate, int64_t T, DType dtype = DType::kBF16) {
  DeltaRuleSpec spec = spec_of(gate, T, 128, 128);
  spec.dtype = dtype;
  return spec;
}

// K and V.
using Widths = std::pair<int64_t, int64_t>;

inline DeltaRuleSpec sized(Gate gate, int64_t T, const Widths& widths, DType dtype = DType::kBF16) {
  DeltaRuleSpec spec = spec_of(gate, T, widths.first, widths.second);
  spec.dtype = dtype;
  return spec;
}

// For what holds at all widths: those of one kernel each, with one range of value columns and with several.
inline const std::vector<Widths> kWidthsOfKernels{{128, 128}, {64, 64}, {56, 136}};

inline std::string name_of_widths(const Widths& widths) {
  return std::to_string(widths.first) + "x" + std::to_string(widths.second);
}

inline std::vector<DeltaRuleCase> cases_of_lengths(Gate gate) {
  std::vector<DeltaRuleCase> cases;
  for (int64_t T : first<int64_t>({65, 0, 1, 320, 63, 64, 128, 129}, 4)) {
    for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
      cases.push_back(support::draw(with_batch(with_heads(sized(gate, T, widths), 2, 1), 2), 1));
    }
  }
  return cases;
}

inline std::vector<DeltaRuleCase> cases_of_small_chunks(Gate gate) {
  std::vector<DeltaRuleCase> cases;
  for (int32_t chunk_size : {16, 32}) {
    for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
      DeltaRuleSpec spec = sized(gate, 100, widths);
      spec.options.chunk_size = chunk_size;
      cases.push_back(support::draw(spec, 2));
    }
  }
  return cases;
}

inline std::vector<DeltaRuleCase> cases_in_fp16(Gate gate) {
  return {support::draw(wide(gate, 130, DType::kF16), 3), support::draw(sized(gate, 130, {64, 64}, DType::kF16), 3),
          support::draw(sized(gate, 66, {64, 136}, DType::kF16), 3)};
}

inline std::vector<DeltaRuleCase> cases_of_widths(Gate gate) {
  std::vector<DeltaRuleCase> cases;
  for (const Widths& widths : first<Widths>({{72, 120},
                                             {128, 72},
                                             {64, 128},
                                             {128, 64},
                                             {8, 16},
                                             {48, 256},
                                             {104, 192},
                                             {16, 8},
                                             {104, 128},
                                             {64, 192},
                                             {72, 8},
                                             {128, 256},
                                             {56, 72},
                                             {120, 136}},
                                            7)) {
    cases.push_back(support::draw(sized(gate, 70, widths), 4));
  }
  return cases;
}

inline DeltaRuleCase case_without_initial_state_in_the_other_order(Gate gate, const Widths& widths) {
  DeltaRuleSpec spec = sized(gate, 70, widths);
  spec.options.state_v_first = true;
  spec.initial_state = false;
  return support::draw(spec, 5);
}

inline DeltaRuleCase case_of_sequences(Gate gate, const Widths& widths) {
  return support::draw(with_lengths(with_heads(sized(gate, 0, widths), 2, 1), {5, 0, 64, 1, 130, 63}), 6);
}

}  // namespace fastweight::test
