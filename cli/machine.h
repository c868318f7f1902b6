// What the machine is, and its two measured limits: fp32 multiply-adds from registers, and memcpy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastweight::cli {

struct Cache {
  int level;
  std::string type;  // Data, Instruction or Unified
  int64_t bytes;

  std::string name() const;  // L1d
};

struct Machine {
  std::string cpu;                    // the model's name
  std::vector<std::string> features;  // the vector extensions among the CPU's features
  std::vector<Cache> caches;          // as the first core sees them
  int cores = 0;                      // online
  int default_threads = 0;            // what a call uses unless told otherwise
  std::string target;                 // the instruction set that the kernels run with
  std::string compiler;               // that built this tool
  std::string system;

  int64_t last_level_cache_bytes() const;
  std::string describe() const;  // one line
};
Machine find_machine();

// What a program can allocate without driving the system to swap or worse; infinite where the system does not say.
double available_memory_bytes();

struct Limits {
  double gflops = 0;       // fp32 multiply-adds from registers, 2 FLOP each
  double memcpy_gbps = 0;  // large buffers; bytes read plus bytes written
};

// The best of several short rounds, all threads at once. About half a second.
Limits measure_limits(int threads);

// fp32 multiply-adds from registers, a few milliseconds at a time, to be taken between the calls that they are compared
// with: on a shared machine the rate moves from second to second.
class FmaMeter {
 public:
  explicit FmaMeter(int threads);
  double gflops() const;  // of one round now
  static constexpr double kSeconds = 0.004;

 private:
  int threads_;
  int64_t rounds_;
};

// Milliseconds of one tiny forward call. The first one in a process also starts the threads and picks the kernels.
double time_tiny_call(int threads);

}  // namespace fastweight::cli
