// One way to compute a problem. A backend shows `ops` an ordered list of these per family and mode, from special to
// general.
#pragma once

#include <string>

#include "fastweight/context.h"

namespace fastweight {

template <class Problem>
struct Implementation {
  // A form, "chunk" or "recurrent", or a form and what is special about this way of it, "chunk_16bit".
  const char* name;

  // Why it cannot take this (valid) problem; empty when it can.
  std::string (*declines)(const Problem& problem);

  // Whether the automatic choice should stop here. A caller who names the implementation is not asked.
  bool (*worthwhile)(const Problem& problem);

  void (*run)(const Problem& problem, const Context& context);

  // How it cuts a problem that it takes, for the verbose line; of those that have a choice.
  std::string (*config)(const Problem& problem, const Context& context) = nullptr;
};

// Of an implementation that cuts a problem alike in every context.
template <auto kConfig, class Problem>
std::string in_any_context(const Problem& problem, const Context&) {
  return kConfig(problem);
}

}  // namespace fastweight
