// What the tests of the building blocks share: names, tolerances, and the comparison of every implementation with the
// reference in double.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "fastweight/blocks.h"
#include "support/blocks_case.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::BlockCase;
using support::BlockResults;
using support::BlockSpec;

inline constexpr Block kBlocks[] = {Block::kChunkLocalCumsum, Block::kScaledDotKkt,  Block::kSolveTril, Block::kWy,
                                    Block::kL2Norm,           Block::kGateActivation};

inline std::string name_of(Block block) {
  constexpr const char* kNames[] = {"chunk_local_cumsum", "scaled_dot_kkt", "solve_tril", "wy", "l2norm",
                                    "gate_activation"};
  return kNames[static_cast<size_t>(block)];
}

inline std::vector<std::string> implementations(Block block, const std::string& mode) {
  return names_of(block_implementations(block), mode);
}

inline std::string describe(const BlockSpec& spec) {
  std::ostringstream out;
  out << name_of(spec.block) << " B=" << spec.B << " T=" << spec.T << " H=" << spec.H << " HV=" << spec.HV
      << " K=" << spec.K << " V=" << spec.V << " C=" << spec.C << " gate=" << static_cast<int>(spec.gate) << " "
      << name_of(spec.dtype);
  for (size_t i = 0; i < spec.cu_seqlens.size(); ++i) out << (i == 0 ? " cu_seqlens " : " ") << spec.cu_seqlens[i];
  if (!spec.beta) out << " no_beta";
  if (spec.reverse) out << " reverse";
  if (spec.lower_bound) out << " lower_bound";
  if (!spec.a_log) out << " no_a_log";
  if (!spec.dt_bias) out << " no_dt_bias";
  if (spec.gate_scale != 1) out << " gate_scale=" << spec.gate_scale;
  return out.str();
}

inline BlockSpec spec_of(Block block, int64_t T, int64_t C = 64, Gate gate = Gate::kPerHead) {
  BlockSpec spec;
  spec.block = block;
  spec.T = T;
  spec.C = C;
  spec.gate = gate;
  return spec;
}

// The largest relative rms error of a result against the reference in double on the same rounded inputs. Stored in 16
// bits, a result is off by its rounding. Where terms of both signs are summed, or a difference is all but 0, the error
// of the terms shows in the result.
inline double tolerance(const BlockSpec& spec, const std::string& tensor, DType result_type) {
  if (result_type == DType::kBF16) return 3e-3;
  if (result_type == DType::kF16) return 1e-3;
  if (result_type == DType::kF64) return 1e-12;
  if (tensor == "da_log" || tensor == "ddt_bias") return 3e-5;
  if (spec.block == Block::kL2Norm && spec.K == 1) return 1e-4;
  return tensor == "dgamma" ? 4e-6 : 1e-6;
}

inline void expect_close(const BlockSpec& spec, const BlockResults& results, const BlockResults& expected) {
  const auto actual = results.named(), wanted = expected.named();
  ASSERT_EQ(actual.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(actual[i].first, wanted[i].first);
    const support::Difference difference = support::compare(*actual[i].second, *wanted[i].second);
    const double bound = tolerance(spec, wanted[i].first, actual[i].second->dtype());
    EXPECT_TRUE(difference.relative_rms < bound || difference.max_abs <= (spec.dtype == DType::kF64 ? 1e-14 : 1e-7))
        << results.implementation << " " << wanted[i].first << ": relative rms " << difference.relative_rms
        << ", largest " << difference.max_abs << ", allowed " << bound << "\n  " << describe(spec);
  }
}

// Every implementation on this problem, against the reference in double.
inline void check_forward(const BlockCase& problem) {
  const BlockResults expected = support::forward(support::in_double(problem), reference_context());
  for (const std::string& name : implementations(problem.spec.block, "forward")) {
    const auto results = unless_declined("forward", name, [&] { return support::forward(problem, context_for(name)); });
    if (results) expect_close(problem.spec, *results, expected);
  }
}

inline void check_backward(const BlockCase& problem) {
  if (problem.spec.block == Block::kChunkLocalCumsum) return;
  const BlockResults expected = support::backward(support::in_double(problem), reference_context());
  for (const std::string& name : implementations(problem.spec.block, "backward")) {
    const auto results =
        unless_declined("backward", name, [&] { return support::backward(problem, context_for(name)); });
    if (results) expect_close(problem.spec, *results, expected);
  }
}

inline void check(const BlockSpec& spec, uint64_t seed = 1) {
  const BlockCase problem = support::draw(spec, seed);
  check_forward(problem);
  check_backward(problem);
}

}  // namespace fastweight::test
