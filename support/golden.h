// Reads the golden cases: safetensors files with fp32 inputs `in.*` and fp64 answers `out.*`.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "support/delta_rule_case.h"
#include "support/tensor.h"
#include "support/ttt_linear_case.h"

namespace fastweight::support {

struct SafeTensors {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Tensor> tensors;
};
SafeTensors read_safetensors(const std::string& path);  // throws std::runtime_error that names the file

struct GoldenCase {
  DeltaRuleCase problem;      // fp32 inputs
  DeltaRuleResults expected;  // fp64 answers
};

// Every delta-rule-family case in the folder (delta_rule_*, gdn_*, kda_*), by name.
std::vector<GoldenCase> load_delta_rule_golden(const std::string& folder);

struct TttLinearGoldenCase {
  TttLinearCase problem;      // fp32 inputs
  TttLinearResults expected;  // fp64 answers
};

// Every case of TTT-linear in the folder (ttt_*), by name.
std::vector<TttLinearGoldenCase> load_ttt_linear_golden(const std::string& folder);

// A step leaves the last mini-batch of a sequence open where the golden answer extends it to its full length: its states
// then have no answer.
template <class Results>
void drop_open_states(Results& results) {
  const Tensor* const position = results.find("position");
  for (int64_t n = 0; position != nullptr && n < position->size(); ++n) {
    if ((*position)[n] == 0) continue;
    for (Tensor* state : results.of(Part::kEnd)) *state = {};
    return;
  }
}

}  // namespace fastweight::support
