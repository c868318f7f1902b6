// Problems for the delta rule on Hopper's instructions, the same for both directions.
#pragma once

#include <algorithm>
#include <cmath>
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

// Odd lengths have gates in the type of k.
inline std::vector<DeltaRuleCase> cases_of_lengths(Gate gate) {
  std::vector<DeltaRuleCase> cases;
  for (int64_t T : first<int64_t>({65, 0, 1, 320, 63, 64, 128, 129}, 4)) {
    for (const Widths& widths : {Widths{128, 128}, {64, 64}}) {
      DeltaRuleSpec spec = with_batch(with_heads(sized(gate, T, widths), 2, 1), 2);
      if (T % 2 == 1) spec.gate_dtype = spec.dtype;
      cases.push_back(support::draw(spec, 1));
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
      if (chunk_size == 16) spec.gate_dtype = spec.dtype;
      cases.push_back(support::draw(spec, 2));
    }
  }
  return cases;
}

inline std::vector<DeltaRuleCase> cases_in_fp16(Gate gate) {
  DeltaRuleSpec all = wide(gate, 130);
  all.set_types(DType::kF16);
  return {support::draw(all, 3), support::draw(sized(gate, 130, {64, 64}, DType::kF16), 3),
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

// Tiles of 16 tokens, tokens and channels that forget everything, among others that forget next to nothing.
inline DeltaRuleCase case_that_forgets(Gate gate, DType gates, const Widths& widths = {128, 128}) {
  DeltaRuleCase problem = support::draw(sized(gate, 100, widths), 34);
  problem.g = problem.g.to(gates);
  const int64_t width = problem.g.size() / problem.spec.T;
  for (int64_t i = 0; i < problem.g.size(); ++i) {
    const int64_t token = i / width, channel = i % width;
    const bool tile = token / 16 == 1, row = token == 40 || token == 63 || token == 64;
    const bool channels = width > 1 && token / 16 == 3 && channel % 7 == 0;
    problem.g.set(i, tile || row || channels ? -1000 : -0.1 * static_cast<double>(i * 7 % 11) / 11);
  }
  return problem;
}

// What a gate that is not a number may reach: the case without it, and with it in one head of the second of three sequences,
// in the middle one of its three chunks.
struct NaNGate {
  DeltaRuleCase without, with;
  int64_t head, begin, chunk_begin, token, chunk_end, end;  // the tokens of the sequence, and of the chunk
  int64_t chunks;                                           // of the call, up to its own
};

inline NaNGate nan_gate(DeltaRuleSpec spec) {
  spec.options.chunk_size = 32;
  DeltaRuleCase problem = support::draw(with_lengths(with_heads(spec, 2, 1), {20, 80, 20}), 33);
  NaNGate x{problem, problem, 1, 20, 20 + 32, 20 + 32 + 20, 20 + 64, 100, 3};
  const int64_t width = problem.g.size() / (problem.spec.T * problem.spec.HV);
  x.with.g.set((x.token * problem.spec.HV + x.head) * width + width / 3, std::nan(""));
  return x;
}

// Gates that leave much of a chunk's state, little or nothing, and raw ones, with a bound where gates have one.
inline std::vector<DeltaRuleSpec> specs_of_decays(Gate gate, const Widths& widths = {128, 128}) {
  DeltaRuleSpec weak = sized(gate, 0, widths), strong = weak, hard = weak, raw = weak;
  weak.gate_divisor = 50;
  strong.gate_divisor = 0.1;
  hard.hard_gate_fraction = 0.3;
  raw.options.gate_in_kernel = true;
  raw.gate_dtype = raw.dtype;
  DeltaRuleSpec bounded = raw;
  if (gate == Gate::kPerChannel) bounded.options.lower_bound = -5;
  return first<DeltaRuleSpec>({weak, hard, raw, strong, bounded}, 3);
}

// Of a result per token, or of another per sequence or chunk: tokens [begin, end) of one head.
inline Tensor part_of(const Tensor& x, int64_t begin, int64_t end, int64_t head) {
  return slice(slice(x, 1, begin, end), 2, head, head + 1);
}

inline bool all_nan(const Tensor& x) {
  const std::vector<double> values = x.values();
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isnan(value); });
}

}  // namespace fastweight::test
