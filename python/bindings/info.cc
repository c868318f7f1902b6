// Operators without tensors. What the library was built with, as JSON: python/fastweight/_info.py reads it when it is
// imported, which does not wake the CUDA driver, after which a process could not fork any more.
#include "fastweight/info.h"

#include <string>
#include <vector>

#include "convert.h"
#include "fastweight/fastweight.h"

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

std::string all_implementations() {
  const std::pair<const char*, std::vector<ImplementationInfo>> families[] = {
      {"delta_rule", delta_rule_implementations()},
      {"delta_rule_map", delta_rule_map_implementations()},
      {"gla", gla_implementations()},
      {"comba", comba_implementations()},
      {"dplr", dplr_implementations()},
      {"ttt_linear", ttt_linear_implementations()},
      {"short_conv", short_conv_implementations()},
      {"chunk_local_cumsum", block_implementations(Block::kChunkLocalCumsum)},
      {"scaled_dot_kkt", block_implementations(Block::kScaledDotKkt)},
      {"solve_tril", block_implementations(Block::kSolveTril)},
      {"wy", block_implementations(Block::kWy)},
      {"l2norm", block_implementations(Block::kL2Norm)},
      {"gate_activation", block_implementations(Block::kGateActivation)},
      {"rms_norm", block_implementations(Block::kRmsNorm)},
  };
  std::string text;
  for (const auto& [family, infos] : families) text += (text.empty() ? "" : ", ") + implementations(family, infos);
  return text;
}

std::string text() {
  return "{\"version\": " + quoted(version()) + ", \"cpu_target\": " + quoted(cpu_target()) +
         ", \"cpu_targets\": " + joined(cpu_targets(), quoted) +
         ", \"built_with_cuda\": " + (built_with_cuda() ? "true" : "false") +
         ", \"cuda_architectures\": " + joined(cuda_architectures(), quoted) + ", \"implementations\": {" +
         all_implementations() + "}, \"delta_rule_switches\": " + joined(delta_rule_switches(), quoted) + "}";
}

void info(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] { *stack = torch::stable::detail::from(text()); });
}

// What a forward of the delta rule can keep on a CUDA device.
void kept_words(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    Context context;
    context.device = {DeviceType::kCuda, static_cast<int>(arguments.take<int64_t>())};
    DeltaRuleOptions options;
    options.gate = static_cast<Gate>(arguments.take<int64_t>());
    const DType dtype = dtype_of("dtype", arguments.take<int32_t>());
    const auto head_dim_k = arguments.take<int64_t>();
    const auto all = arguments.take<bool>();
    *stack = torch::stable::detail::from(delta_rule_kept_words(context, options, dtype, head_dim_k, all));
  });
}

// .. and one of TTT-Linear.
void ttt_kept_words(StableIValue* stack, uint64_t, uint64_t) {
  guarded([stack] {
    Arguments arguments(stack);
    Context context;
    context.device = {DeviceType::kCuda, static_cast<int>(arguments.take<int64_t>())};
    TttLinearOptions options;
    options.mini_batch = static_cast<int32_t>(arguments.take<int64_t>());
    const DType dtype = dtype_of("dtype", arguments.take<int32_t>());
    *stack = torch::stable::detail::from(ttt_linear_kept_words(context, options, dtype, arguments.take<int64_t>()));
  });
}

}  // namespace

std::span<const Operator> info_operators() {
  static const Operator operators[] = {
      {"info() -> str", &info},
      {"delta_rule_kept_words(int cuda_device, int gate, ScalarType dtype, int head_dim_k, bool all) -> int",
       &kept_words},
      {"ttt_linear_kept_words(int cuda_device, int mini_batch, ScalarType dtype, int head_dim) -> int",
       &ttt_kept_words},
  };
  return operators;
}

}  // namespace fastweight::bindings
