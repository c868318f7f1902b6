#include "support/case.h"

#include <cmath>
#include <limits>

namespace fastweight::support {

const char* name_of(Mode mode) {
  constexpr const char* kNames[] = {"forward", "backward", "step"};
  return kNames[static_cast<size_t>(mode)];
}

const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"f32", "bf16", "f16", "f64", "i32", "i64"};
  return kNames[static_cast<size_t>(dtype)];
}

std::string describe_lengths(const std::vector<int64_t>& cu_seqlens) {
  if (cu_seqlens.empty()) return "";
  std::string text = " cu_seqlens=[";
  for (size_t i = 0; i < cu_seqlens.size(); ++i) text += (i > 0 ? " " : "") + std::to_string(cu_seqlens[i]);
  return text + "]";
}

std::string Call::run(const Context& context) const {
  if (context.device.type == DeviceType::kCpu) return enqueue(context);
  std::vector<TensorView> host;
  for (const NamedView& named : views_) host.push_back(*named.view);
  const auto restore = [&] {
    for (size_t i = 0; i < views_.size(); ++i) *views_[i].view = host[i];
  };
  try {
    Placement placement(views_, context.device);
    const std::string implementation = enqueue(context);
    placement.finish(context.stream);
    restore();
    return implementation;
  } catch (...) {
    restore();
    throw;
  }
}

TensorView* Call::find(std::string_view name) const {
  for (const NamedView& named : views_) {
    if (name == named.name) return named.view;
  }
  return nullptr;
}

double rms(const Tensor& x) {
  double squares = 0;
  for (double value : x.values()) squares += value * value;
  return x.size() == 0 ? 0 : std::sqrt(squares / static_cast<double>(x.size()));
}

double excess(const Tensor& result, const Tensor& expected, const Tolerance& tolerance) {
  const Difference difference = compare(result, expected);
  double share = std::min(difference.relative_rms / tolerance.relative, difference.max_abs / tolerance.smallest);
  if (tolerance.rms > 0) share = std::min(share, difference.relative_rms * (rms(expected) + 1e-8) / tolerance.rms);
  return std::isnan(share) ? std::numeric_limits<double>::infinity() : share;
}

}  // namespace fastweight::support
