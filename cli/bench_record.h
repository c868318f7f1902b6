// What the bench measures and what it finds.
#pragma once

#include <cstdint>
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
  std::string implementation;  // that ran
};

struct Record {
  Config config;
  Timing timing;
  Limits limits;
  double gflops = 0, gbps = 0;

  double share_of_peak() const { return gflops / limits.gflops; }
  double share_of_memcpy() const { return gbps / limits.memcpy_gbps; }
};

}  // namespace fastweight::cli
