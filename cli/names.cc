#include "cli/names.h"

#include <algorithm>

#include "cli/flags.h"
#include "cli/text.h"
#include "fastweight/delta_rule_map.h"
#include "fastweight/info.h"
#include "fastweight/short_conv.h"
#include "fastweight/ttt_linear.h"

namespace fastweight::cli {
namespace {

template <class T>
struct Word {
  const char* text;
  T meaning;
};

// Of several words with one meaning, the first is the one that we print.
constexpr Word<Op> kOpWords[] = {{"delta_rule", Op::kDeltaRule},
                                 {"gdn", Op::kGdn},
                                 {"kda", Op::kKda},
                                 {"delta_rule_map", Op::kDeltaRuleMap},
                                 {"linear_attention", Op::kLinearAttention},
                                 {"simple_gla", Op::kSimpleGla},
                                 {"gla", Op::kGla},
                                 {"comba", Op::kComba},
                                 {"iplr", Op::kIplr},
                                 {"dplr", Op::kDplr},
                                 {"ttt_linear", Op::kTttLinear},
                                 {"short_conv", Op::kShortConv},
                                 {"chunk_local_cumsum", Op::kChunkLocalCumsum},
                                 {"scaled_dot_kkt", Op::kScaledDotKkt},
                                 {"solve_tril", Op::kSolveTril},
                                 {"wy", Op::kWy},
                                 {"l2norm", Op::kL2Norm},
                                 {"gate_activation", Op::kGateActivation},
                                 {"rms_norm", Op::kRmsNorm},
                                 {"gated_delta_rule", Op::kGdn}};
constexpr Word<Mode> kModeWords[] = {{"fwd", Mode::kForward},
                                     {"bwd", Mode::kBackward},
                                     {"step", Mode::kStep},
                                     {"forward", Mode::kForward},
                                     {"backward", Mode::kBackward}};
constexpr Word<DType> kDTypeWords[] = {{"fp32", DType::kF32}, {"bf16", DType::kBF16}, {"fp16", DType::kF16}};

template <class T, size_t kCount>
std::string name_of(const Word<T> (&words)[kCount], T meaning) {
  for (const Word<T>& word : words) {
    if (word.meaning == meaning) return word.text;
  }
  return "?";
}

template <class T, size_t kCount>
std::vector<std::string> texts_of(const Word<T> (&words)[kCount]) {
  std::vector<std::string> texts;
  for (const Word<T>& word : words) texts.push_back(word.text);
  return texts;
}

template <class T, size_t kCount>
std::vector<T> parse(const char* flag, const Word<T> (&words)[kCount], const std::vector<std::string>& values) {
  std::vector<T> meanings;
  for (const std::string& value : values) {
    const auto word = std::ranges::find_if(words, [&](const Word<T>& w) { return value == w.text; });
    if (word == std::end(words)) {
      throw UsageError(std::string(flag) + ": expected one of " + join(texts_of(words), ", ") + ", got '" + value +
                       "'");
    }
    if (std::ranges::find(meanings, word->meaning) == meanings.end()) meanings.push_back(word->meaning);
  }
  return meanings;
}

}  // namespace

std::string op_name(Op op) { return name_of(kOpWords, op); }
std::string mode_name(Mode mode) { return name_of(kModeWords, mode); }
std::string dtype_name(DType dtype) { return name_of(kDTypeWords, dtype); }

std::vector<std::string> op_words() { return texts_of(kOpWords); }

std::vector<Op> parse_ops(const std::vector<std::string>& values) {
  return values.empty() ? std::vector(kOps.begin(), kOps.end()) : parse("--op", kOpWords, values);
}

std::vector<Mode> parse_modes(const std::vector<std::string>& values) {
  return values.empty() ? std::vector(kModes.begin(), kModes.end()) : parse("--mode", kModeWords, values);
}

std::vector<DType> parse_dtypes(const std::vector<std::string>& values) {
  return values.empty() ? std::vector(kDTypes.begin(), kDTypes.end()) : parse("--dtype", kDTypeWords, values);
}

bool is_delta_rule(Op op) { return op == Op::kDeltaRule || op == Op::kGdn || op == Op::kKda; }

Gate gate_of(Op op) {
  switch (op) {
    case Op::kGdn:
    case Op::kDeltaRuleMap:
      return Gate::kPerHead;
    case Op::kKda:
      return Gate::kPerChannel;
    default:
      return Gate::kNone;
  }
}

std::optional<support::RelatedOp> related_of(Op op) {
  for (support::RelatedOp related : support::kRelatedOps) {
    if (op_name(op) == name_of(related)) return related;
  }
  return std::nullopt;
}

std::optional<Block> block_of(Op op) {
  switch (op) {
    case Op::kChunkLocalCumsum:
      return Block::kChunkLocalCumsum;
    case Op::kScaledDotKkt:
      return Block::kScaledDotKkt;
    case Op::kSolveTril:
      return Block::kSolveTril;
    case Op::kWy:
      return Block::kWy;
    case Op::kL2Norm:
      return Block::kL2Norm;
    case Op::kGateActivation:
      return Block::kGateActivation;
    case Op::kRmsNorm:
      return Block::kRmsNorm;
    default:
      return std::nullopt;
  }
}

namespace {

std::vector<ImplementationInfo> family_of(Op op) {
  if (op == Op::kDeltaRuleMap) return delta_rule_map_implementations();
  if (op == Op::kTttLinear) return ttt_linear_implementations();
  if (op == Op::kShortConv) return short_conv_implementations();
  if (const auto block = block_of(op)) return block_implementations(*block);
  if (const auto related = related_of(op)) return support::implementations_of(*related);
  return delta_rule_implementations();
}

}  // namespace

Device parse_device(const std::string& value) {
  if (value == "cpu") return {};
  if (value != "cuda") throw UsageError("--device: expected cpu or cuda, got '" + value + "'");
  if (!built_with_cuda()) throw UsageError("--device cuda: built without CUDA");
  if (cuda_devices().empty()) throw UsageError("--device cuda: there is no CUDA device on this machine");
  return {DeviceType::kCuda, 0};
}

const char* device_name(Device device) { return device.type == DeviceType::kCuda ? "cuda" : "cpu"; }

std::vector<std::string> implementations(Op op, Mode mode, Device device) {
  const char* const long_name = mode == Mode::kForward ? "forward" : mode == Mode::kBackward ? "backward" : "step";
  std::vector<std::string> names;
  for (const ImplementationInfo& info : family_of(op)) {
    if (info.mode == long_name && info.device == device_name(device)) names.push_back(info.name);
  }
  return names;
}

}  // namespace fastweight::cli
