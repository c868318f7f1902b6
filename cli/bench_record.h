// What the bench measures and what it finds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/bench_problem.h"
#include "cli/machine.h"
#include "cli/names.h"

namespace fastweight::cli {

inline constexpr const char* kAutomatic = "auto";  // the implementation that the library chooses

struct Config {
  BenchChoice choice;
  std::string implementation;  // or kAutomatic
  int threads = 1;

  std::string text() const {
    return op_name(choice.op) + " " + mode_name(choice.mode) + " " + implementation + " " + dtype_name(choice.dtype) +
           " " + choice.shape.text() + " threads=" + std::to_string(threads);
  }
};

struct Timing {
  double first_ms = 0, median_ms = 0, min_ms = 0, p90_ms = 0;
  int64_t calls = 0;
  double fma_gflops = 0;       // median of the FMA rounds between the calls; 0: none
  std::string implementation;  // that ran
};

// Of a record on a CUDA device, where the timing is that of a call in a graph.
struct CudaTiming {
  double eager_ms = 0;    // per call, enqueued one by one, by the device's clock
  double host_ms = 0;     // that the calling thread spends in a call
  int64_t data_sets = 1;  // that the calls take turns with
  std::string device;
};

struct Record {
  Config config;
  Timing timing;
  Limits limits;  // CUDA: the rate of a copy within the device, no peak
  double gflops = 0, gbps = 0;
  std::optional<CudaTiming> cuda = {};

  double peak_gflops() const { return timing.fma_gflops > 0 ? timing.fma_gflops : limits.gflops; }
  double share_of_peak() const { return gflops / peak_gflops(); }
  double share_of_memcpy() const { return gbps / limits.memcpy_gbps; }
};

}  // namespace fastweight::cli
