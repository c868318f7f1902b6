// The words that the command line, the tables and the JSON records use for operators, modes and element types.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "fastweight/delta_rule.h"
#include "fastweight/tensor.h"

namespace fastweight::cli {

enum class Mode { kForward, kBackward, kStep };

inline constexpr std::array kOps = {Gate::kNone, Gate::kPerHead, Gate::kPerChannel};
inline constexpr std::array kModes = {Mode::kForward, Mode::kBackward, Mode::kStep};
inline constexpr std::array kDTypes = {DType::kF32, DType::kBF16, DType::kF16};

std::string op_name(Gate gate);       // delta_rule, gdn, kda
std::string mode_name(Mode mode);     // fwd, bwd, step
std::string dtype_name(DType dtype);  // fp32, bf16, fp16

// From the values of --op, --mode and --dtype; long forms (gated_delta_rule, forward, backward) are understood. Throws
// UsageError. Without values, all that exist.
std::vector<Gate> parse_ops(const std::vector<std::string>& values);
std::vector<Mode> parse_modes(const std::vector<std::string>& values);
std::vector<DType> parse_dtypes(const std::vector<std::string>& values);

// The names of the CPU implementations of one mode, most special first.
std::vector<std::string> implementations(Mode mode);

}  // namespace fastweight::cli
