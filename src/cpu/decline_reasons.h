// What the lists of all families say about the problems that an implementation takes.
#pragma once

#include <string>

namespace fastweight::cpu {

template <class Problem>
std::string takes_all(const Problem&) {
  return {};
}

template <class Problem>
std::string no_fp64(const Problem& problem) {
  return problem.has_fp64 ? "computes in fp32; fp64 tensors run on the reference" : "";
}

template <class Problem>
bool always(const Problem&) {
  return true;
}

}  // namespace fastweight::cpu
