// What the library was built with, as JSON: python/fastweight/_info.py reads it when it is imported. Nothing here wakes
// the CUDA driver, after which a process could not fork any more.
#include "fastweight/info.h"

#include <string>
#include <vector>

#include "convert.h"
#include "fastweight/delta_rule.h"
#include "fastweight/short_conv.h"
#include "fastweight/ttt_linear.h"

namespace fastweight::bindings {
namespace {

// Names of instruction sets, architectures and implementations: nothing in them has to be escaped.
std::string quoted(const std::string& text) { return '"' + text + '"'; }

template <class Items, class Text>
std::string joined(const Items& items, const Text& text) {
  std::string result;
  for (const auto& item : items) result += (result.empty() ? "" : ", ") + text(item);
  return '[' + result + ']';
}

std::string implementations(const char* family, const std::vector<ImplementationInfo>& infos) {
  return quoted(family) + ": " + joined(infos, [](const ImplementationInfo& info) {
           return '[' + quoted(info.device) + ", " + quoted(info.mode) + ", " + quoted(info.name) + ']';
         });
}

std::string text() {
  return "{\"version\": " + quoted(version()) + ", \"cpu_target\": " + quoted(cpu_target()) +
         ", \"cpu_targets\": " + joined(cpu_targets(), quoted) +
         ", \"built_with_cuda\": " + (built_with_cuda() ? "true" : "false") +
         ", \"cuda_architectures\": " + joined(cuda_architectures(), quoted) + ", \"implementations\": {" +
         implementations("delta_rule", delta_rule_implementations()) + ", " +
         implementations("ttt_linear", ttt_linear_implementations()) + ", " +
         implementations("short_conv", short_conv_implementations()) + "}}";
}

void info(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] { *stack = torch::stable::detail::from(text()); });
}

constexpr Operator kOperators[] = {{"info() -> str", &info}};

}  // namespace

std::span<const Operator> info_operators() { return kOperators; }

}  // namespace fastweight::bindings
