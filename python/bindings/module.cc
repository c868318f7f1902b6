// Registers the operators of all files with PyTorch.
#include <array>
#include <string>

#include "convert.h"

namespace fastweight::bindings {
namespace {

std::array<std::span<const Operator>, 5> families() {
  return {delta_rule_operators(), related_operators(), ttt_linear_operators(), short_conv_operators(),
          blocks_operators()};
}

void implement(torch::stable::detail::StableLibrary& library, std::span<const Operator> operators) {
  for (const Operator& op : operators) {
    library.impl(op.schema.substr(0, op.schema.find('(')).c_str(), op.kernel);
  }
}

}  // namespace
}  // namespace fastweight::bindings

STABLE_TORCH_LIBRARY(fastweight, m) {
  using namespace fastweight::bindings;
  for (const auto& family : families()) {
    for (const Operator& op : family) m.def(op.schema.c_str());
  }
  for (const Operator& op : info_operators()) m.def(op.schema.c_str());
}

STABLE_TORCH_LIBRARY_IMPL(fastweight, CPU, m) {
  for (const auto& family : fastweight::bindings::families()) fastweight::bindings::implement(m, family);
}

STABLE_TORCH_LIBRARY_IMPL(fastweight, CUDA, m) {
  for (const auto& family : fastweight::bindings::families()) fastweight::bindings::implement(m, family);
}

// Without tensors there is no device to choose by.
STABLE_TORCH_LIBRARY_IMPL(fastweight, CompositeExplicitAutograd, m) {
  fastweight::bindings::implement(m, fastweight::bindings::info_operators());
}
