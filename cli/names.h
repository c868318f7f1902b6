// The words that the command line, the tables and the JSON records use for operators, modes and element types.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "fastweight/blocks.h"
#include "fastweight/delta_rule.h"
#include "fastweight/tensor.h"
#include "support/related_case.h"

namespace fastweight::cli {

// The first three are the delta-rule family, then what their segments do to a state; the families related to it and the building blocks follow.
enum class Op {
  kDeltaRule,
  kGdn,
  kKda,
  kDeltaRuleMap,
  kLinearAttention,
  kSimpleGla,
  kGla,
  kComba,
  kIplr,
  kDplr,
  kTttLinear,
  kShortConv,
  kChunkLocalCumsum,
  kScaledDotKkt,
  kSolveTril,
  kWy,
  kL2Norm,
  kGateActivation,
  kRmsNorm
};
using support::Mode;

inline constexpr std::array kOps = {
    Op::kDeltaRule,
    Op::kGdn,
    Op::kKda,
    Op::kDeltaRuleMap,
    Op::kLinearAttention,
    Op::kSimpleGla,
    Op::kGla,
    Op::kComba,
    Op::kIplr,
    Op::kDplr,
    Op::kTttLinear,
    Op::kShortConv,
    Op::kChunkLocalCumsum,
    Op::kScaledDotKkt,
    Op::kSolveTril,
    Op::kWy,
    Op::kL2Norm,
    Op::kGateActivation,
    Op::kRmsNorm,
};
using support::kModes;
inline constexpr std::array kDTypes = {DType::kF32, DType::kBF16, DType::kF16};

std::string op_name(Op op);           // delta_rule, gdn, kda, gla, comba, .., short_conv, the names of the blocks
std::string mode_name(Mode mode);     // fwd, bwd, step
std::string dtype_name(DType dtype);  // fp32, bf16, fp16

std::vector<std::string> op_words();  // all that --op understands

// From the values of --op, --mode and --dtype; long forms (gated_delta_rule, forward, backward) are understood. Throws
// UsageError. Without values, all that exist.
std::vector<Op> parse_ops(const std::vector<std::string>& values);
std::vector<Mode> parse_modes(const std::vector<std::string>& values);
std::vector<DType> parse_dtypes(const std::vector<std::string>& values);

// Whether an operator is one of the delta-rule family, and its gate if it is; the bench's maps are those of gdn.
bool is_delta_rule(Op op);
Gate gate_of(Op op);

// The operator of a related family, or the building block, that it is, if it is one.
std::optional<support::RelatedOp> related_of(Op op);
std::optional<Block> block_of(Op op);

// From the value of --device, cpu unless given: the CPU or the first CUDA device. Throws UsageError where there is
// none.
Device parse_device(const std::string& value);
const char* device_name(Device device);  // cpu, cuda

// The names of a device's implementations of one operator and mode, most special first; none where it does
// not have the mode.
std::vector<std::string> implementations(Op op, Mode mode, Device device = {});

}  // namespace fastweight::cli
