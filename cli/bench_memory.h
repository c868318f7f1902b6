// Whether the tensors of a configuration fit, before any of them is made.
#pragma once

#include "cli/bench_problem.h"

namespace fastweight::cli {

// Of the tensors that the problem holds in the host's memory, with those that are drawn and repeated to make them.
double tensor_bytes(const BenchChoice& choice);

}  // namespace fastweight::cli
