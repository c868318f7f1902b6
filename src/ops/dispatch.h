// Which implementation of a list runs.
#pragma once

#include <span>
#include <string>

#include "fastweight/error.h"
#include "ops/check.h"
#include "ops/implementation.h"

namespace fastweight {

template <class Problem>
struct Choice {
  const Implementation<Problem>* implementation = nullptr;
  std::string passed_over;  // "name: reason; .." of the entries before it
};

// The named one or an error.
template <class Problem>
Choice<Problem> choose_named(const char* entry, std::span<const Implementation<Problem>> list, const Problem& problem,
                             const std::string& name) {
  std::string known;
  for (const auto& implementation : list) {
    if (name == implementation.name) {
      const std::string reason = implementation.declines(problem);
      if (reason.empty()) return {&implementation, ""};
      throw Error(ErrorCode::kUnsupported, std::string(entry) + ": " + name + ": " + reason);
    }
    known += (known.empty() ? "" : ", ") + std::string(implementation.name);
  }
  check::invalid("implementation", "one of " + known, "\"" + name + "\"");
}

// The first that takes the problem and finds it worthwhile, else the first that takes it.
template <class Problem>
Choice<Problem> choose_first(const char* entry, std::span<const Implementation<Problem>> list, const Problem& problem) {
  Choice<Problem> fallback;
  std::string reasons;
  for (const auto& implementation : list) {
    std::string reason = implementation.declines(problem);
    if (reason.empty()) {
      if (implementation.worthwhile(problem)) return {&implementation, reasons};
      if (fallback.implementation == nullptr) fallback = {&implementation, reasons};
      reason = "not worthwhile";
    }
    reasons += (reasons.empty() ? "" : "; ") + std::string(implementation.name) + ": " + reason;
  }
  if (fallback.implementation != nullptr) return fallback;
  throw Error(ErrorCode::kUnsupported, std::string(entry) + ": no implementation takes this problem: " + reasons);
}

// `name` as in Context::implementation: empty means choose.
template <class Problem>
Choice<Problem> choose(const char* entry, std::span<const Implementation<Problem>> list, const Problem& problem,
                       const std::string& name) {
  return name.empty() ? choose_first(entry, list, problem) : choose_named(entry, list, problem, name);
}

}  // namespace fastweight
