#include "cli/machine.h"

#include <sys/utsname.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <sstream>
#include <thread>

#include "cli/text.h"
#include "fastweight/delta_rule.h"
#include "fastweight/info.h"
#include "src/cpu/simd/peak.h"
#include "support/delta_rule_case.h"
#include "support/tensor.h"

namespace fastweight::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The `name : value` lines of the first processor in /proc/cpuinfo.
std::map<std::string, std::string> first_cpuinfo() {
  std::map<std::string, std::string> entries;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t name_end = line.find_last_not_of(" \t", colon - 1);
    const size_t value = line.find_first_not_of(" \t", colon + 1);
    entries[line.substr(0, name_end + 1)] = value == std::string::npos ? "" : line.substr(value);
  }
  return entries;
}

bool is_vector_feature(const std::string& feature) {
  static const char* const kPrefixes[] = {"avx", "amx", "sve", "asimd"};
  static const char* const kWords[] = {"sse2", "ssse3", "sse4_1", "sse4_2", "fma", "f16c", "bf16", "fphp", "sme"};
  const auto starts = [&](const char* prefix) { return feature.starts_with(prefix); };
  return std::ranges::any_of(kPrefixes, starts) || std::ranges::find(kWords, feature) != std::end(kWords);
}

std::string read_word(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

std::vector<Cache> find_caches() {
  std::vector<Cache> caches;
  const std::filesystem::path folder = "/sys/devices/system/cpu/cpu0/cache";
  for (int index = 0; std::filesystem::exists(folder / format("index%d", index)); ++index) {
    const std::filesystem::path entry = folder / format("index%d", index);
    Cache cache{std::atoi(read_word(entry / "level").c_str()), read_word(entry / "type"), 0};
    const std::string size = read_word(entry / "size");
    cache.bytes = std::atoll(size.c_str());
    if (size.ends_with("K")) cache.bytes <<= 10;
    if (size.ends_with("M")) cache.bytes <<= 20;
    if (cache.bytes > 0) caches.push_back(cache);
  }
  return caches;
}

// Runs body(thread) on `threads` threads that start together; the seconds until the last one is done.
double time_together(int threads, const std::function<void(int thread)>& body) {
  std::atomic<int> waiting = threads;
  std::atomic<bool> go = false;
  const auto wait_and_run = [&](int thread) {
    waiting.fetch_sub(1);
    while (!go.load()) std::this_thread::yield();
    body(thread);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(wait_and_run, thread);
  while (waiting.load() > 1) std::this_thread::yield();
  const Clock::time_point start = Clock::now();
  go.store(true);
  body(0);
  for (std::thread& other : others) other.join();
  return seconds_since(start);
}

double measure_gflops(int threads) {
  // Rounds shorter than a time slice: some of them run undisturbed even on a machine with other work.
  constexpr int kRounds = 60;
  const FmaMeter meter(threads);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) best = std::max(best, meter.gflops());
  return best;
}

double measure_memcpy_gbps(int threads) {
  // Four times the last-level cache, between 64 and 512 MiB in each direction.
  constexpr int kRounds = 10;
  const int64_t cache = find_machine().last_level_cache_bytes();
  const size_t bytes = static_cast<size_t>(std::clamp<int64_t>(4 * cache, int64_t{64} << 20, int64_t{512} << 20));
  const size_t part = bytes / static_cast<size_t>(threads);
  std::vector<support::Pages> from(static_cast<size_t>(threads)), to(static_cast<size_t>(threads));
  time_together(threads, [&](int thread) {
    from[static_cast<size_t>(thread)] = support::Pages(part, std::byte{1});
    to[static_cast<size_t>(thread)] = support::Pages(part);
  });
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double elapsed = time_together(threads, [&](int thread) {
      std::memcpy(to[static_cast<size_t>(thread)].data(), from[static_cast<size_t>(thread)].data(), part);
    });
    best = std::max(best, 2.0 * static_cast<double>(part) * threads / elapsed * 1e-9);
  }
  return best;
}

}  // namespace

std::string Cache::name() const {
  const char* const kind = type == "Data" ? "d" : type == "Instruction" ? "i" : "";
  return format("L%d%s", level, kind);
}

int64_t Machine::last_level_cache_bytes() const {
  int64_t bytes = 0;
  for (const Cache& cache : caches) bytes = std::max(bytes, cache.bytes);
  return bytes;
}

std::string Machine::describe() const {
  return format("%s, %d cores, %s, fastweight %s", cpu.c_str(), cores, target.c_str(), version().c_str());
}

Machine find_machine() {
  Machine machine;
  const std::map<std::string, std::string> cpuinfo = first_cpuinfo();
  const auto entry = [&](const char* name) {
    const auto found = cpuinfo.find(name);
    return found == cpuinfo.end() ? std::string() : found->second;
  };
  utsname names{};
  uname(&names);
  machine.system = std::string(names.sysname) + " " + names.machine;
  machine.cpu = entry("model name");
  if (machine.cpu.empty()) {
    machine.cpu =
        std::string(names.machine) + " implementer " + entry("CPU implementer") + " part " + entry("CPU part");
  }
  std::istringstream words(entry("flags") + " " + entry("Features"));
  for (std::string word; words >> word;) {
    if (is_vector_feature(word)) machine.features.push_back(word);
  }
  machine.caches = find_caches();
  machine.cores = static_cast<int>(std::thread::hardware_concurrency());
  machine.default_threads = default_num_threads();
  machine.target = cpu_target();
#if defined(__clang__)
  machine.compiler = "clang " __clang_version__;
#else
  machine.compiler = "gcc " __VERSION__;
#endif
  return machine;
}

double available_memory_bytes() {
  double bytes = std::numeric_limits<double>::infinity();
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) bytes = 1024 * std::atof(line.c_str() + line.find(':') + 1);  // in kB
  }
  const double of_container = std::atof(read_word("/sys/fs/cgroup/memory.max").c_str());  // a number or `max`
  return of_container > 0 ? std::min(bytes, of_container) : bytes;
}

FmaMeter::FmaMeter(int threads) : threads_(threads), rounds_(1 << 16) {
  double seconds = 0;
  while ((seconds = time_together(1, [&](int) { cpu::run_fma_rounds(rounds_); })) < kSeconds / 4) rounds_ *= 2;
  rounds_ = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(rounds_) * kSeconds / seconds));
}

double FmaMeter::gflops() const {
  std::vector<double> rates(static_cast<size_t>(threads_));
  time_together(threads_, [&](int thread) {
    const Clock::time_point start = Clock::now();
    const double flop = cpu::run_fma_rounds(rounds_);
    rates[static_cast<size_t>(thread)] = flop / seconds_since(start) * 1e-9;
  });
  double total = 0;
  for (double rate : rates) total += rate;
  return total;
}

Limits measure_limits(int threads) { return {measure_gflops(threads), measure_memcpy_gbps(threads)}; }

double time_tiny_call(int threads) {
  support::DeltaRuleSpec spec;
  spec.H = spec.HV = 16;  // several heads, so that every thread gets some work
  spec.options.gate = Gate::kPerHead;
  const support::DeltaRuleCase problem = support::draw(spec, 1);
  const support::Tensor o(DType::kF32, {spec.B, spec.T, spec.HV, spec.V});
  DeltaRuleForward call;
  call.in = problem.inputs();
  call.in.initial_state = {};
  call.options = spec.options;
  call.o = o.view();
  Context context;
  context.num_threads = threads;
  const Clock::time_point start = Clock::now();
  delta_rule_forward(context, call);
  return seconds_since(start) * 1e3;
}

}  // namespace fastweight::cli
