// One way to compute a problem. A backend shows `ops` an ordered list of these per family and mode, from special to
// general.
#pragma once

#include <string>

#include "fastweight/context.h"

namespace fastweight {

template <class Problem>
struct Implementation {
  const char* name;

  // Why it cannot take this (valid) problem; empty when it can.
  std::string (*declines)(const Problem& problem);

  // Whether the automatic choice should stop here. A caller who names the implementation is not asked.
  bool (*worthwhile)(const Problem& problem);

  void (*run)(const Problem& problem, const Context& context);

  // Which of its forms takes the problem, for the verbose line; of those with more than one.
  std::string (*form)(const Problem& problem) = nullptr;
};

}  // namespace fastweight
