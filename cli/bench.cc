// `fastweight bench`.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_cuda.h"
#include "cli/bench_memory.h"
#include "cli/bench_problem.h"
#include "cli/bench_record.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_output.h"
#include "cli/machine.h"
#include "cli/names.h"
#include "cli/plot.h"
#include "cli/text.h"
#include "fastweight/error.h"
#include "fastweight/info.h"
#include "support/device.h"
#include "support/pages.h"

namespace fastweight::cli {
namespace {

constexpr int64_t kMostSequences = 1 << 15;  // of --varlen
constexpr double kMostSeconds = 600;         // of --min-time: the time of every call is kept

struct Plan {
  std::vector<Config> configs;
  std::vector<std::string> refused;  // named by the user, but there is no such thing
  std::vector<std::string> skipped;  // not named by the user, and does not apply
  bool implementation_named = false;
  double min_seconds = 0.5;
  int64_t repeat = 5;
  Device device{};

  bool on_cuda() const { return device.type == DeviceType::kCuda; }
};

// Keeps the scratch memory of one call for the next, as a program that calls in a loop would.
class ScratchCache {
 public:
  ScratchCache() = default;
  ~ScratchCache() {
    for (const auto& [bytes, block] : free_) std::free(block);
  }
  ScratchCache(const ScratchCache&) = delete;
  ScratchCache& operator=(const ScratchCache&) = delete;

  WorkspaceSource source() { return {allocate, release, this}; }

 private:
  static void* allocate(void* user, size_t bytes) {
    auto& free = static_cast<ScratchCache*>(user)->free_;
    const auto block = free.find(bytes);
    if (block == free.end()) return support::allocate_pages(bytes);
    void* pointer = block->second;
    free.erase(block);
    return pointer;
  }
  static void release(void* user, void* pointer, size_t bytes) {
    static_cast<ScratchCache*>(user)->free_.emplace(bytes, pointer);
  }

  std::multimap<size_t, void*> free_;
};

// One line on a terminal's stderr that is written over; nothing elsewhere, where the table's rows show the progress.
class Progress {
 public:
  void show(const std::string& text) const {
    if (terminal_) std::fprintf(stderr, "\r\x1b[K%s", text.c_str());
  }
  void clear() const { show(""); }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// What to run.

std::vector<Shape> default_cuda_shapes(Mode mode, bool quick) {
  if (mode != Mode::kStep) return {{1, quick ? 1024 : 4096, 32, 32, 128, 128}};
  if (quick) return {{64, 1, 32, 32, 128, 128}};
  return {{1, 1, 32, 32, 128, 128}, {64, 1, 32, 32, 128, 128}, {256, 1, 32, 32, 128, 128}};
}

std::vector<Shape> default_shapes(Mode mode, bool quick) {
  if (mode == Mode::kStep) {
    if (quick) return {{128, 1, 8, 8, 128, 128}};
    return {{1, 1, 16, 16, 128, 128}, {64, 1, 16, 16, 128, 128}};
  }
  if (quick) return {{1, 1024, 4, 4, 128, 128}};
  return {{1, 4096, 16, 16, 128, 128}, {4, 512, 8, 8, 64, 64}};
}

bool known(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// An implementation, or a form of some: "chunk" for "chunk_16bit", "chunk_fp32".
bool stands_for_any(const std::string& name, const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [&](const std::string& one) { return one == name || one.starts_with(name + "_"); });
}

// Of one operator and mode. Unless named, the reference is left out: it is there to be right, not to be fast.
std::vector<std::string> choose_implementations(Op op, Mode mode, Device device,
                                                const std::vector<std::string>& named) {
  const std::vector<std::string> all = implementations(op, mode, device);
  std::vector<std::string> chosen;
  if (named.empty()) {
    for (const std::string& name : all) {
      if (name != "reference") chosen.push_back(name);
    }
    if (chosen.empty() && !all.empty()) chosen.push_back("reference");
    return chosen;
  }
  for (const std::string& name : named) {
    if (stands_for_any(name, all) || (name == kAutomatic && !all.empty())) chosen.push_back(name);
  }
  return chosen;
}

void check_implementation_names(Device device, const std::vector<std::string>& named) {
  std::vector<std::string> all = {kAutomatic};
  for (Op op : kOps) {
    for (Mode mode : kModes) {
      for (const std::string& name : implementations(op, mode, device)) {
        if (!known(all, name)) all.push_back(name);
      }
    }
  }
  for (const std::string& name : named) {
    if (!stands_for_any(name, all))
      throw UsageError("--impl: expected one of " + join(all, ", ") + ", got '" + name + "'");
  }
}

// A flag that only some operators and modes take.
struct PartialFlag {
  const char* name;
  const char* takers;
  bool (*applies)(Op op, Mode mode);
};

bool takes_state(Op op, Mode mode) { return is_delta_rule(op) && mode == Mode::kStep; }
bool takes_saved_states(Op op, Mode mode) {
  return (is_delta_rule(op) || related_of(op).has_value()) && mode != Mode::kStep;
}
bool takes_varlen(Op op, Mode mode) { return op != Op::kL2Norm && mode != Mode::kStep; }

constexpr PartialFlag kPartialFlags[] = {
    {"--state", "a step of delta_rule, gdn or kda", takes_state},
    {"--saved-states", "fwd or bwd of the delta-rule family or a related operator", takes_saved_states},
    {"--varlen", "fwd or bwd of an operator other than l2norm", takes_varlen},
};

// A flag that nothing in the plan takes is a mistake.
void check_partial_flags(const Flags& flags, const std::vector<std::pair<Op, Mode>>& planned) {
  for (const PartialFlag& flag : kPartialFlags) {
    std::vector<std::string> names;
    bool applies = planned.empty();
    for (const auto& [op, mode] : planned) {
      applies = applies || flag.applies(op, mode);
      names.push_back(op_name(op) + " " + mode_name(mode));
    }
    if (flags.has(flag.name) && !applies) {
      throw UsageError(std::string(flag.name) + ": expected " + flag.takers + ", got " + join(names, ", "));
    }
  }
}

// `asked` is the value of --state. The short convolution keeps rows of its inputs.
std::optional<DType> state_dtype_of(Op op, Mode mode, DType dtype, DType asked) {
  if (block_of(op)) return std::nullopt;
  if (op == Op::kShortConv) return dtype;
  return takes_state(op, mode) ? asked : DType::kF32;
}

Plan make_plan(const Flags& flags) {
  Plan plan;
  const bool quick = flags.has("--quick");
  const std::vector<std::string> named = flags.list("--impl");
  plan.device = parse_device(flags.text("--device", "cpu"));
  check_implementation_names(plan.device, named);
  plan.implementation_named = !named.empty();
  plan.min_seconds = flags.number("--min-time", quick ? 0.1 : 0.5, 0, kMostSeconds);
  plan.repeat = flags.integer("--repeat", quick ? 3 : 5, 1);

  std::vector<Shape> shapes;
  for (const std::string& text : flags.all("--shape")) shapes.push_back(parse_shape(text));
  const std::vector<Mode> modes = parse_modes(flags.list("--mode"));
  for (const Shape& shape : shapes) {
    const bool needs_tokens = std::ranges::any_of(modes, [](Mode mode) { return mode != Mode::kStep; });
    if (needs_tokens && shape.T == 0) throw UsageError("--shape: T is missing (only --mode step does without)");
    if (shape.HV % shape.H != 0) throw UsageError("--shape: HV has to be a multiple of H");
  }
  if (plan.on_cuda() && flags.has("--threads")) throw UsageError("--threads: is for the CPU");
  std::vector<int> thread_counts;
  for (const std::string& text : flags.list("--threads")) {
    thread_counts.push_back(static_cast<int>(parse_integer("--threads", text, 1, kMostThreads)));
  }
  if (thread_counts.empty()) thread_counts.push_back(plan.on_cuda() ? 1 : default_num_threads());
  const std::string state = flags.text("--state", "fp32");
  if (state != "fp32" && state != "bf16") throw UsageError("--state: expected fp32 or bf16, got '" + state + "'");
  const DType state_dtype = state == "fp32" ? DType::kF32 : DType::kBF16;
  const int64_t sequences = flags.integer("--varlen", 0, 1, kMostSequences);
  std::vector<DType> dtypes = {DType::kF32};
  if (flags.has("--dtype")) dtypes = parse_dtypes(flags.list("--dtype"));

  std::vector<std::pair<Op, Mode>> planned;
  std::vector<std::string> absent;  // not worth a word unless there is nothing else
  for (Op op : parse_ops(flags.list("--op"))) {
    for (Mode mode : modes) {
      if (implementations(op, mode, plan.device).empty()) {
        const std::string reason = op_name(op) + " has no " + mode_name(mode) + " on " + device_name(plan.device);
        if (flags.has("--op") && flags.has("--mode")) throw UsageError("--mode: " + reason);
        absent.push_back(reason);
        continue;
      }
      planned.emplace_back(op, mode);
      const std::vector<std::string> chosen = choose_implementations(op, mode, plan.device, named);
      for (const std::string& name : named) {
        if (known(chosen, name)) continue;
        (flags.has("--mode") ? plan.refused : absent)
            .push_back(op_name(op) + " " + mode_name(mode) + " " + name + ": there is no such implementation");
      }
      const std::vector<Shape> defaults =
          plan.on_cuda() ? default_cuda_shapes(mode, quick) : default_shapes(mode, quick);
      for (Shape shape : shapes.empty() ? defaults : shapes) {
        if (mode == Mode::kStep) shape.T = 1;
        const bool square = op == Op::kTttLinear, ungrouped = square || related_of(op).has_value();
        if ((square && shape.K != shape.V) || (ungrouped && shape.HV != shape.H)) {
          const std::string reason =
              op_name(op) + " needs " + (square ? "K = V and HV = H" : "HV = H") + ", got " + shape.text();
          if (flags.has("--op")) throw UsageError("--shape: " + reason);
          plan.skipped.push_back(reason);
          continue;
        }
        for (DType dtype : dtypes) {
          for (int threads : thread_counts) {
            for (const std::string& name : chosen) {
              BenchChoice choice{op, mode, shape, dtype};
              choice.state_dtype = state_dtype_of(op, mode, dtype, state_dtype);
              choice.saved_states = flags.has("--saved-states") && takes_saved_states(op, mode);
              if (sequences > 0 && takes_varlen(op, mode)) {
                if (shape.B != 1) throw UsageError("--varlen: needs shapes with B=1, got " + shape.text());
                choice.sequences = sequences;
              }
              plan.configs.push_back({choice, name, threads});
            }
          }
        }
      }
    }
  }
  check_partial_flags(flags, planned);
  if (plan.configs.empty()) plan.skipped.insert(plan.skipped.end(), absent.begin(), absent.end());
  return plan;
}

// ---------------------------------------------------------------------------------------------------------------------
// Measuring.

double call_ms(const BenchProblem& problem, const Context& context, std::string& implementation) {
  const auto start = std::chrono::steady_clock::now();
  implementation = problem.run(context);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

Timing time_config(const BenchProblem& problem, const Config& config, const Plan& plan) {
  ScratchCache scratch;
  Context context;
  context.num_threads = config.threads;
  context.workspace = scratch.source();
  if (config.implementation != kAutomatic) context.implementation = config.implementation;

  Timing timing;
  timing.first_ms = call_ms(problem, context, timing.implementation);
  // The second call has the scratch memory of the first. Long calls do without: they would gain little.
  if (timing.first_ms < plan.min_seconds * 1e3) call_ms(problem, context, timing.implementation);
  const FmaMeter meter(config.threads);
  std::vector<double> times, rates;
  double total = 0;
  while (times.size() < static_cast<size_t>(plan.repeat) || total < plan.min_seconds * 1e3) {
    // Before every call, unless calls are so short that this would take longer than they do.
    if (static_cast<double>(rates.size()) * FmaMeter::kSeconds * 1e3 <= total) rates.push_back(meter.gflops());
    times.push_back(call_ms(problem, context, timing.implementation));
    total += times.back();
  }
  std::ranges::sort(times);
  const size_t count = times.size();
  timing.calls = static_cast<int64_t>(count);
  timing.fma_gflops = median(rates);
  timing.min_ms = times.front();
  timing.median_ms = median(times);
  timing.p90_ms = times[(count * 9 + 9) / 10 - 1];
  return timing;
}

// ---------------------------------------------------------------------------------------------------------------------
// Results.

std::string milliseconds(double value) { return value < 1e4 ? format("%.4g", value) : format("%.0f", value); }

bool same_file(const std::string& a, const std::string& b) {
  const auto resolved = [](const std::string& path) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path));
  };
  return resolved(a) == resolved(b);
}

void write_text(const std::string& flag, const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) throw std::runtime_error(flag + ": cannot write " + path);
}

// A forward or a backward is measured by the FMA peak, a step by the memcpy rate. One panel for each mode, one group of
// bars for each shape.
Chart make_chart(const std::vector<Record>& records, const Machine& machine) {
  Chart chart{"Delta-rule operators: share of the machine's limits", machine.describe(), {}};
  bool several_dtypes = false, several_threads = false;
  for (const Record& record : records) {
    several_dtypes = several_dtypes || record.config.choice.dtype != records[0].config.choice.dtype;
    several_threads = several_threads || record.config.threads != records[0].config.threads;
  }
  if (!records.empty()) {
    if (!several_dtypes) chart.subtitle += ", " + dtype_name(records[0].config.choice.dtype);
    if (!several_threads) chart.subtitle += format(", %d threads", records[0].config.threads);
  }
  for (Mode mode : kModes) {
    const bool step = mode == Mode::kStep;
    Panel panel{step                     ? "Decoding step"
                : mode == Mode::kForward ? "Forward"
                                         : "Backward",
                step ? "share of the memcpy rate, bytes read and written" : "share of the fp32 FMA peak",
                {}};
    std::vector<std::string> limits;
    for (const Record& record : records) {
      const BenchChoice& choice = record.config.choice;
      if (choice.mode != mode) continue;
      const std::string limit =
          step ? format("%.1f GB/s", record.limits.memcpy_gbps) : format("%.0f GFLOP/s", record.limits.gflops);
      const std::string described = several_threads ? limit + format(" on %d threads", record.config.threads) : limit;
      if (!known(limits, described)) limits.push_back(described);
      std::string title = choice.shape.text();
      if (choice.sequences > 0) title += format(", %lld packed sequences", static_cast<long long>(choice.sequences));
      auto group = std::ranges::find(panel.groups, title, &BarGroup::title);
      if (group == panel.groups.end()) group = panel.groups.insert(group, {title, {}});
      std::string label = op_name(choice.op) + " " + record.timing.implementation;
      if (several_dtypes) label += " " + dtype_name(choice.dtype);
      if (several_threads) label += format(" x%d", record.config.threads);
      const double share = 100 * (step ? record.share_of_memcpy() : record.share_of_peak());
      const std::string rate = step ? format("%.1f GB/s", record.gbps) : format("%.1f GFLOP/s", record.gflops);
      const std::string note =
          format("%.1f %%  (%s, %s ms)", share, rate.c_str(), milliseconds(record.timing.median_ms).c_str());
      group->bars.push_back({label, op_name(choice.op), share, note});
    }
    if (panel.groups.empty()) continue;
    panel.axis += " (100 % = " + join(limits, ", ") + ")";
    chart.panels.push_back(panel);
  }
  return chart;
}

class Bench {
 public:
  Bench(Plan plan, Machine machine) : plan_(std::move(plan)), machine_(std::move(machine)), table_(columns()) {}

  // The exit code.
  int run();
  const std::vector<Record>& records() const { return records_; }

 private:
  std::vector<Column> columns() const;
  const Limits& limits_for(int threads);
  std::vector<Column> cuda_columns(size_t implementation, size_t shape) const;
  void measure_on_cuda(const Config& config, const BenchProblem& problem);
  void measure(const Config& config, const BenchProblem& problem);
  void decline(const Config& config, const std::string& reason);
  void check_memory(const BenchChoice& choice) const;
  void note_cached_states(const BenchChoice& choice);

  Plan plan_;
  Machine machine_;
  Table table_;
  Progress progress_;
  std::map<int, Limits> limits_;
  std::vector<Record> records_;
  std::vector<std::string> notes_;
  bool failed_ = false;
};

std::vector<Column> Bench::columns() const {
  size_t operation = 0, implementation = 0, shape = 0;
  for (const Config& config : plan_.configs) {
    operation = std::max(operation, op_name(config.choice.op).size());
    implementation = std::max(implementation, config.implementation.size());
    shape = std::max(shape, config.choice.shape.text().size());
  }
  if (plan_.on_cuda()) return cuda_columns(implementation, shape);
  return {{"op", operation},      {"mode", 4},          {"impl", std::max(implementation, size_t{11})},
          {"dtype", 5},           {"thr", 3, true},     {"shape", shape},
          {"median ms", 9, true}, {"min", 9, true},     {"p90", 9, true},
          {"first", 9, true},     {"GFLOP/s", 7, true}, {"% peak", 6, true},
          {"GB/s", 6, true},      {"% memcpy", 8, true}};
}

std::vector<Column> Bench::cuda_columns(size_t implementation, size_t shape) const {
  return {{"op", 10},
          {"mode", 4},
          {"impl", std::max(implementation, size_t{11})},
          {"dtype", 5},
          {"state", 5},
          {"shape", shape},
          {"median us", 9, true},
          {"min", 9, true},
          {"p90", 9, true},
          {"eager", 9, true},
          {"host", 6, true},
          {"GFLOP/s", 7, true},
          {"GB/s", 6, true},
          {"% copy", 6, true}};
}

const Limits& Bench::limits_for(int threads) {
  const auto found = limits_.find(threads);
  if (found != limits_.end()) return found->second;
  const Limits limits = plan_.on_cuda() ? Limits{0, support::device_copy_gbps()} : measure_limits(threads);
  return limits_.emplace(threads, limits).first->second;
}

void Bench::measure_on_cuda(const Config& config, const BenchProblem& problem) {
  const CudaMeasurement measured = time_on_cuda(problem, config, plan_.device, plan_.min_seconds, plan_.repeat);
  Record record{config, measured.timing, limits_for(config.threads)};
  const Timing& timing = record.timing;
  record.cuda = measured.cuda;
  record.gflops = problem.flop() / timing.median_ms * 1e-6;
  record.gbps = problem.bytes() / timing.median_ms * 1e-6;
  records_.push_back(record);
  progress_.clear();
  const std::optional<DType> state = config.choice.state_dtype;
  const auto microseconds = [](double ms) { return format("%.2f", 1e3 * ms); };
  table_.row({op_name(config.choice.op), mode_name(config.choice.mode), timing.implementation,
              dtype_name(config.choice.dtype), state ? dtype_name(*state) : "-", config.choice.shape.text(),
              microseconds(timing.median_ms), microseconds(timing.min_ms), microseconds(timing.p90_ms),
              microseconds(measured.cuda.eager_ms), microseconds(measured.cuda.host_ms), format("%.0f", record.gflops),
              format("%.0f", record.gbps), format("%.1f", 100 * record.share_of_memcpy())});
}

void Bench::decline(const Config& config, const std::string& reason) {
  notes_.push_back((plan_.implementation_named ? "failed: " : "skipped: ") + config.text() + ": " + reason);
  if (plan_.implementation_named) failed_ = true;
}

void Bench::measure(const Config& config, const BenchProblem& problem) {
  if (plan_.on_cuda()) return measure_on_cuda(config, problem);
  Record record{config, time_config(problem, config, plan_), limits_for(config.threads)};
  const Timing& timing = record.timing;
  record.gflops = problem.flop() / timing.median_ms * 1e-6;
  record.gbps = problem.bytes() / timing.median_ms * 1e-6;
  records_.push_back(record);
  progress_.clear();
  table_.row({op_name(config.choice.op), mode_name(config.choice.mode), timing.implementation,
              dtype_name(config.choice.dtype), std::to_string(config.threads), config.choice.shape.text(),
              milliseconds(timing.median_ms), milliseconds(timing.min_ms), milliseconds(timing.p90_ms),
              milliseconds(timing.first_ms), format("%.1f", record.gflops),
              format("%.1f", 100 * record.share_of_peak()), format("%.1f", record.gbps),
              format("%.1f", 100 * record.share_of_memcpy())});
}

// Throws Error where the tensors do not fit into the memory that there is.
void Bench::check_memory(const BenchChoice& choice) const {
  const double bytes = tensor_bytes(choice);
  const auto require = [](double needed, double there_is, const char* where) {
    if (needed <= there_is) return;
    constexpr double kGiB = 1 << 30;
    throw Error(ErrorCode::kOutOfMemory, format("needs %.1f GiB for its tensors, %.1f GiB are available%s",
                                                needed / kGiB, there_is / kGiB, where));
  };
  // What is uploaded stays on the host as well.
  require(plan_.on_cuda() ? 2 * bytes : bytes, available_memory_bytes(), "");
  if (!plan_.on_cuda()) return;
  const CudaDeviceInfo info = cuda_devices().at(static_cast<size_t>(plan_.device.index));
  require(bytes, static_cast<double>(info.memory_bytes), " on the device");
}

void Bench::note_cached_states(const BenchChoice& choice) {
  if (choice.mode != Mode::kStep || plan_.on_cuda()) return;
  const Shape& s = choice.shape;
  if (choice.op == Op::kShortConv) return;
  const int64_t per_head = choice.op == Op::kTttLinear ? 2 : 1;  // the state and the sums
  const int64_t each = element_size(choice.state_dtype.value());
  const double bytes = static_cast<double>(each * per_head * s.B * s.HV * s.K * s.V);
  if (bytes >= 2.0 * static_cast<double>(machine_.last_level_cache_bytes())) return;
  const std::string note = "note: step " + s.text() + format(": %.3g MiB of states, ", bytes / (1 << 20)) +
                           "which stay in the caches in part or as a whole";
  if (!known(notes_, note)) notes_.push_back(note);
}

int Bench::run() {
  std::printf("%s\n", machine_.describe().c_str());
  for (const Config& config : plan_.configs) {
    if (limits_.contains(config.threads)) continue;
    progress_.show("measuring the machine's limits");
    const Limits& limits = limits_for(config.threads);
    progress_.clear();
    if (plan_.on_cuda()) {
      std::printf("%s, copy within the device %.0f GB/s (bytes read + written)\n", cuda_devices()[0].name.c_str(),
                  limits.memcpy_gbps);
      continue;
    }
    std::printf("limits, %d threads: fp32 FMA peak %.1f GFLOP/s, memcpy %.1f GB/s (bytes read + written)\n",
                config.threads, limits.gflops, limits.memcpy_gbps);
  }
  std::printf("\n");
  table_.header();

  // Neighbours in the list differ in implementation and threads only, and share their data.
  std::unique_ptr<BenchProblem> problem;
  std::string problem_text;
  for (size_t i = 0; i < plan_.configs.size(); ++i) {
    const Config& config = plan_.configs[i];
    progress_.show(format("[%zu/%zu] ", i + 1, plan_.configs.size()) + config.text());
    try {
      const BenchChoice& choice = config.choice;
      const std::string text =
          op_name(choice.op) + mode_name(choice.mode) + dtype_name(choice.dtype) + choice.shape.text();
      if (problem == nullptr || text != problem_text) {
        problem.reset();
        check_memory(choice);
        problem = make_bench_problem(choice);
        problem_text = text;
        note_cached_states(choice);
      }
      measure(config, *problem);
    } catch (const Error& error) {
      decline(config, error.what());
    } catch (const std::bad_alloc&) {
      decline(config, "out of memory");
    }
  }
  progress_.clear();
  for (const std::string& skipped : plan_.skipped) notes_.push_back("skipped: " + skipped);
  for (const std::string& refused : plan_.refused) notes_.push_back("failed: " + refused);
  if (records_.empty()) notes_.push_back("failed: nothing was measured");
  if (!notes_.empty()) std::printf("\n");
  for (const std::string& note : notes_) std::printf("%s\n", note.c_str());
  return failed_ || !plan_.refused.empty() || records_.empty() ? 1 : 0;
}

}  // namespace

int run_bench(const std::vector<std::string>& arguments) {
  const Flags flags({{"--op", "NAMES", wrap(join(op_words(), ", ") + " (default: all)", 90)},
                     {"--mode", "NAMES", "fwd, bwd, step (default: all)"},
                     {"--impl", "NAMES",
                      "as `fastweight info` lists them, a form such as chunk, or auto (default: all but the\n"
                      "reference)"},
                     {"--dtype", "NAMES", "fp32, bf16, fp16 (default: fp32)"},
                     {"--state", "NAME", "fp32 or bf16: the states of a delta-rule step (default: fp32)"},
                     {"--device", "NAME",
                      "cpu or cuda (default: cpu). On CUDA: the time of a call in a graph, with data that\n"
                      "is not in the cache; eager: enqueued one by one; host: what the caller spends"},
                     {"--threads", "COUNTS", "threads per call (default: every core)"},
                     {"--shape", "SHAPE",
                      "B=1,T=4096,H=16,K=128,V=128; HV= where it differs from H; D= for K and V; may be\n"
                      "repeated.\n"
                      "A step takes one token for each of B states, whatever T is: choose B so that\n"
                      "the states (4 B HV K V bytes, in bf16 half, for ttt_linear twice that) exceed the caches"},
                     {"--varlen", "N", "cut T into N packed sequences of growing length (fwd, bwd; not l2norm)"},
                     {"--saved-states", "",
                      "the forward writes the chunk states and the backward reads them (delta-rule family and\n"
                      "related operators)"},
                     {"--min-time", "SECONDS", "measure each configuration at least this long (default: 0.5)"},
                     {"--repeat", "N", "and at least this many times (default: 5)"},
                     {"--quick", "", "small problems and short measurements"},
                     {"--json", "FILE", "write the results as a list of records"},
                     {"--plot", "FILE", "write a bar chart as SVG"}},
                    arguments);
  if (flags.help()) {
    std::printf(
        "usage: fastweight bench [FLAGS]\n\n"
        "Times calls of the public API on prepared, touched buffers, with scratch memory kept from call to call, "
        "after\n"
        "a warm-up; `first` is the very first call of a configuration. GFLOP/s count F = 6KV + 64(K+V) per token and\n"
        "value head forward, 3F backward, 7KV for a step; for linear_attention, simple_gla and gla F = 4KV + 32(K+V),\n"
        "for comba the delta rule's, for iplr and dplr 8KV + 128(K+V), their steps 5KV, 7KV and 9KV; for ttt_linear\n"
        "6D^2 + 96D, and 8D^2 for a step; for\n"
        "short_conv, H K channels of width 4 with silu, 2W + 4 per token and channel, 3 times that backward. Blocks, "
        "with\n"
        "chunks of C = 64, count per token and value head 2CK (scaled_dot_kkt; backward 4CK), C^2/3 (solve_tril; 4C^2) "
        "and\n"
        "2C(K+V) (wy; 4C(K+V) + 2C^2); the rest of them a few operations per element. GB/s count\n"
        "every input and output tensor once, the states of a step twice, read and written. Both are set against what "
        "this\n"
        "machine does in the same run on the same number of threads: fp32 multiply-adds on registers, and memcpy of "
        "large\n"
        "buffers, bytes read plus bytes written.\n\n"
        "NAMES and COUNTS are comma lists, and their flags may be repeated.\n\n%s",
        flags.description().c_str());
    return 0;
  }
  Plan plan = make_plan(flags);
  if (plan.on_cuda() && flags.has("--plot")) throw UsageError("--plot: the chart is for the CPU's limits");
  if (flags.has("--json") && flags.has("--plot") && same_file(flags.text("--json", ""), flags.text("--plot", ""))) {
    throw UsageError("--plot: expected a file other than that of --json, got '" + flags.text("--plot", "") + "'");
  }
  for (const char* flag : {"--json", "--plot"}) {
    // Now rather than after the measurements.
    const std::string path = flags.text(flag, "");
    if (flags.has(flag) && !std::ofstream(path, std::ios::app)) throw UsageError(flag + (": cannot write " + path));
  }
  const Machine machine = find_machine();
  const double first_ms = time_tiny_call(plan.configs.empty() ? 0 : plan.configs[0].threads);
  std::printf("first call of the process, which starts the threads: %.2f ms\n", first_ms);
  Bench bench(std::move(plan), machine);
  const int code = bench.run();
  if (flags.has("--json")) write_text("--json", flags.text("--json", ""), to_json(bench.records(), machine));
  if (flags.has("--plot")) write_text("--plot", flags.text("--plot", ""), to_svg(make_chart(bench.records(), machine)));
  return code;
}

}  // namespace fastweight::cli
