// Which implementation of a list runs.
#pragma once

#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/implementation.h"
#include "cuda/backend.h"
#include "fastweight/error.h"
#include "fastweight/info.h"

namespace fastweight {

template <class Problem>
struct Choice {
  const Implementation<Problem>* implementation = nullptr;
  std::string passed_over;  // "name: reason; .." of the entries before it
};

// Adds "name: reason" to a list of them.
template <class Problem>
void add_reason(std::string& reasons, const Implementation<Problem>& implementation, const std::string& reason) {
  reasons += (reasons.empty() ? "" : "; ") + std::string(implementation.name) + ": " + reason;
}

// A name is that of an entry, which then runs or fails. A form, such as "chunk", stands for its entries "chunk_..": the
// first of them that takes the problem runs.
template <class Problem>
Choice<Problem> choose_named(const char* entry, std::span<const Implementation<Problem>> list, const Problem& problem,
                             const std::string& name) {
  std::string known, reasons;
  for (const auto& implementation : list) {
    if (name == implementation.name) {
      const std::string reason = implementation.declines(problem);
      if (reason.empty()) return {&implementation, ""};
      throw Error(ErrorCode::kUnsupported, std::string(entry) + ": " + name + ": " + reason);
    }
    known += (known.empty() ? "" : ", ") + std::string(implementation.name);
  }
  for (const auto& implementation : list) {
    if (!std::string_view(implementation.name).starts_with(name + "_")) continue;
    const std::string reason = implementation.declines(problem);
    if (reason.empty()) return {&implementation, reasons};
    add_reason(reasons, implementation, reason);
  }
  if (reasons.empty()) check::invalid("implementation", "one of " + known, "\"" + name + "\"");
  throw Error(ErrorCode::kUnsupported, std::string(entry) + ": no " + name + " takes this problem: " + reasons);
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
    add_reason(reasons, implementation, reason);
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

// Runs a validated problem on the context's device and returns the name of what ran. Without work to do, the choice
// alone is made. describe(problem) is the problem in a verbose line. A family without kernels for CUDA has no list. To
// be called within entry_point.
template <class Problem, class Describe>
std::string dispatch(const char* entry, const Context& context, std::span<const Implementation<Problem>> cpu_list,
                     const Problem& problem, bool work, const Describe& describe,
                     std::span<const Implementation<Problem>> cuda_list = {}) {
  const bool on_cuda = context.device.type == DeviceType::kCuda;
  if (on_cuda && cuda_list.empty()) {
    throw Error(ErrorCode::kUnsupported,
                std::string(entry) + (cuda::is_built() ? ": has no CUDA implementation" : ": built without CUDA") +
                    ", cannot run on " + check::text(context.device));
  }
  std::optional<cuda::DeviceScope> scope;
  if (on_cuda) scope.emplace(context.device);
  const auto choice = choose(entry, on_cuda ? cuda_list : cpu_list, problem, context.implementation);
  if (work) choice.implementation->run(problem, context);
  if (context.verbose) {
    std::string line =
        std::string("fastweight: ") + entry + " " + describe(problem) + ": ran " + choice.implementation->name;
    if (choice.implementation->config != nullptr) line += " {" + choice.implementation->config(problem, context) + "}";
    if (!choice.passed_over.empty()) line += " (" + choice.passed_over + ")";
    if (context.log != nullptr) {
      context.log(context.log_user, line.c_str());
    } else {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
  }
  return choice.implementation->name;
}

template <class Problem>
void append_infos(std::span<const Implementation<Problem>> list, const char* mode, const char* device,
                  std::vector<ImplementationInfo>& infos) {
  for (const auto& implementation : list) infos.push_back({implementation.name, mode, device});
}

// A family's three lists of one device.
template <class Forward, class Backward, class Step>
void append_infos(std::span<const Implementation<Forward>> forward, std::span<const Implementation<Backward>> backward,
                  std::span<const Implementation<Step>> step, const char* device,
                  std::vector<ImplementationInfo>& infos) {
  append_infos(forward, "forward", device, infos);
  append_infos(backward, "backward", device, infos);
  append_infos(step, "step", device, infos);
}

}  // namespace fastweight
