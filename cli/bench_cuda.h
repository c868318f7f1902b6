// Timing on a CUDA device.
#pragma once

#include <cstdint>

#include "cli/bench_problem.h"
#include "cli/bench_record.h"

namespace fastweight::cli {

struct CudaMeasurement {
  Timing timing;
  CudaTiming cuda;
};

// The calls take turns with copies of the data that together exceed three times the second-level cache, so that each
// finds its data in memory. All of them are captured in one graph, whose replays are timed by events: `timing` is the
// time of a replay over its number of calls. Throws Error where the library declines.
CudaMeasurement time_on_cuda(const BenchProblem& host, const Config& config, Device device, double min_seconds,
                             int64_t repeat);

}  // namespace fastweight::cli
