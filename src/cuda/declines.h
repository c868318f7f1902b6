// What the entries of the implementation lists say to a problem.
#pragma once

#include <string>

namespace fastweight::cuda {

template <class Problem>
std::string no_fp64(const Problem& problem) {
  return problem.has_fp64 ? "computes in fp32; fp64 tensors run on the CPU's reference" : "";
}

template <class Problem>
bool always(const Problem&) {
  return true;
}

}  // namespace fastweight::cuda
