// `fastweight check`: every implementation against the fp64 reference, and all of them against the golden cases.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/names.h"
#include "cli/text.h"
#include "fastweight/error.h"
#include "fastweight/info.h"
#include "support/delta_rule_case.h"
#include "support/golden.h"

namespace fastweight::cli {
namespace {

using support::DeltaRuleCase;
using support::DeltaRuleResults;
using support::DeltaRuleSpec;
using support::Tensor;

// ---------------------------------------------------------------------------------------------------------------------
// Tolerances, on err(a, b) = rms(a - b) / (rms(b) + 1e-8). A tensor also passes when no element is off by more than
// kSmallest: what is zero in exact arithmetic has no relative error.

constexpr double kSmallest = 1e-6;
constexpr double kFp32 = 1e-5;
constexpr double kFp32HardGates = 5e-4;  // a gate of -1000 makes dg a difference of nearly equal numbers
constexpr double kReferenceVsGolden = 1e-10;
constexpr double kReferenceVsGoldenSmallest = 1e-13;

// bf16 and fp16: the thresholds that the operators are specified with.
struct HalfBounds {
  Gate gate;
  double forward, dq, dk, dv, dg, dbeta, d_initial_state, da_log, ddt_bias;
};
constexpr HalfBounds kHalfBounds[] = {
    {Gate::kNone, 0.006, 0.008, 0.008, 0.008, 0, 0.008, 0.008, 0, 0},
    {Gate::kPerHead, 0.005, 0.008, 0.008, 0.008, 0.02, 0.02, 0.008, 0.02, 0.02},
    {Gate::kPerChannel, 0.005, 0.008, 0.008, 0.008, 0.02, 0.02, 0.008, 0.008, 0.008},
};

double half_bound(Gate gate, const std::string& tensor) {
  const auto bounds = std::ranges::find(kHalfBounds, gate, &HalfBounds::gate);
  if (tensor == "dq") return bounds->dq;
  if (tensor == "dk") return bounds->dk;
  if (tensor == "dv") return bounds->dv;
  if (tensor == "dg") return bounds->dg;
  if (tensor == "dbeta") return bounds->dbeta;
  if (tensor == "d_initial_state") return bounds->d_initial_state;
  if (tensor == "da_log") return bounds->da_log;
  if (tensor == "ddt_bias") return bounds->ddt_bias;
  return bounds->forward;  // o, final_state
}

bool has_hard_gates(const DeltaRuleCase& problem) {
  constexpr double kHard = -100;
  if (!problem.g.present() || problem.spec.options.gate_in_kernel) return false;
  for (int64_t i = 0; i < problem.g.size(); ++i) {
    if (problem.g[i] < kHard) return true;
  }
  return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// The built-in problems.

std::vector<DeltaRuleSpec> built_in_specs(Gate gate) {
  std::vector<DeltaRuleSpec> specs;
  const auto add = [&](const char* name, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K,
                       int64_t V) -> DeltaRuleSpec& {
    DeltaRuleSpec spec;
    spec.name = name;
    spec.B = B, spec.T = T, spec.H = H, spec.HV = HV, spec.K = K, spec.V = V;
    spec.options.gate = gate;
    return specs.emplace_back(spec);
  };
  add("square", 2, 100, 2, 2, 64, 64);
  add("wide", 1, 129, 1, 1, 128, 128);
  add("rect", 1, 70, 2, 2, 40, 72);  // neither width is a power of two
  add("one_token", 3, 1, 2, 2, 32, 16).initial_state = false;
  DeltaRuleSpec& varlen = add("varlen", 1, 150, 2, 2, 64, 32);
  varlen.cu_seqlens = {0, 0, 17, 17, 81, 145, 150, 150};  // three of the seven sequences are empty
  DeltaRuleSpec& raw = add("in_kernel", 1, 90, 2, 2, 48, 64);
  raw.options.qk_l2norm = raw.options.beta_sigmoid = raw.options.allow_neg_eigval = true;
  raw.options.gate_in_kernel = gate != Gate::kNone;
  if (gate != Gate::kNone) add("gva", 1, 80, 2, 6, 32, 64).options.state_v_first = true;
  if (gate == Gate::kPerChannel) {
    add("hard_gates", 1, 129, 1, 1, 32, 32).hard_gate_fraction = 0.1;
    DeltaRuleSpec& bounded = add("lower_bound", 1, 70, 2, 2, 32, 32);
    bounded.options.gate_in_kernel = true;
    bounded.options.lower_bound = -5;
  }
  return specs;
}

// ---------------------------------------------------------------------------------------------------------------------
// Running and judging.

DeltaRuleResults run_mode(Mode mode, const DeltaRuleCase& problem, const std::string& implementation, int threads) {
  Context context;
  context.num_threads = threads;
  context.implementation = implementation;
  switch (mode) {
    case Mode::kForward:
      return support::forward(problem, context);
    case Mode::kBackward:
      return support::backward(problem, context);
    case Mode::kStep:
      break;
  }
  return support::step(problem, context);
}

// What the forward and the step return, and what the backward returns.
struct Oracle {
  DeltaRuleResults forward, backward;

  const DeltaRuleResults& of(Mode mode) const { return mode == Mode::kBackward ? backward : forward; }
};

// One line of the table: the worst comparison of one implementation over a set of problems.
struct Line {
  Gate gate;
  Mode mode;
  std::string implementation, dtype, against;
  int comparisons = 0, failures = 0;
  double worst = -1;  // error over bound
  double error = 0, bound = 0;
  std::string where;
};

// The error over the bound: at most 1 passes. The smaller of the relative and the absolute measure counts.
double excess(const support::Difference& difference, double bound, double smallest) {
  const double relative = difference.relative_rms / bound;
  const double absolute = difference.max_abs / smallest;
  const double least = relative <= absolute ? relative : absolute;
  return least == least ? least : std::numeric_limits<double>::infinity();
}

void judge(Line& line, const DeltaRuleCase& problem, const DeltaRuleResults& results, const DeltaRuleResults& expected,
           bool oracle) {
  const bool hard = has_hard_gates(problem);
  const auto expected_tensors = expected.named();
  for (const auto& [name, tensor] : results.named()) {
    const auto found = std::ranges::find(expected_tensors, name, [](const auto& pair) { return pair.first; });
    if (found == expected_tensors.end()) continue;
    const support::Difference difference = support::compare(*tensor, *found->second);
    const double bound = oracle                              ? kReferenceVsGolden
                         : problem.spec.dtype != DType::kF32 ? half_bound(line.gate, name)
                         : hard                              ? kFp32HardGates
                                                             : kFp32;
    const double share = excess(difference, bound, oracle ? kReferenceVsGoldenSmallest : kSmallest);
    ++line.comparisons;
    if (!(share <= 1)) ++line.failures;
    if (share > line.worst) {
      line.worst = share;
      line.error = difference.relative_rms;
      line.bound = bound;
      line.where = problem.spec.name + "/" + name;
    }
  }
}

class Checker {
 public:
  Checker(std::vector<Gate> ops, int threads) : ops_(std::move(ops)), threads_(threads) {}

  int run(const std::string& golden_folder);

 private:
  void check_built_in(Gate gate);
  void check_golden(Gate gate, const std::vector<support::GoldenCase>& cases);
  void check_determinism();

  // Runs one implementation on one problem into the line. What it declines is skipped, any other error is a failure.
  void run_into(Line& line, const DeltaRuleCase& problem, const DeltaRuleResults& expected, bool oracle);
  void finish(const Line& line);
  void skip(const std::string& what, const std::string& reason);

  std::vector<Gate> ops_;
  int threads_;
  int comparisons_ = 0, failures_ = 0, skipped_ = 0;
  std::vector<std::string> notes_;

  struct Skipped {
    int count = 0;
    std::string first;
  };
  std::map<std::string, Skipped> skipped_reasons_;

  Table table_{{{"operator", 10},
                {"mode", 4},
                {"impl", 9},
                {"dtype", 5},
                {"against", 9},
                {"worst tensor", 33},
                {"rel. RMS", 8, true},
                {"bound", 7, true},
                {"", 4}}};
};

void Checker::run_into(Line& line, const DeltaRuleCase& problem, const DeltaRuleResults& expected, bool oracle) {
  const std::string what = op_name(line.gate) + " " + mode_name(line.mode) + " " + line.implementation + " " +
                           line.dtype + " on " + problem.spec.name;
  try {
    judge(line, problem, run_mode(line.mode, problem, line.implementation, threads_), expected, oracle);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported) {
      skip(what, error.what());
      return;
    }
    ++line.comparisons;
    ++line.failures;
    notes_.push_back("FAIL: " + what + ": " + error.what());
  }
}

void Checker::skip(const std::string& what, const std::string& reason) {
  ++skipped_;
  Skipped& skipped = skipped_reasons_[reason];
  if (skipped.count++ == 0) skipped.first = what;
}

void Checker::finish(const Line& line) {
  if (line.comparisons == 0) return;
  comparisons_ += line.comparisons;
  failures_ += line.failures;
  table_.row({op_name(line.gate), mode_name(line.mode), line.implementation, line.dtype, line.against, line.where,
              format("%.1e", line.error), format("%.0e", line.bound), line.failures == 0 ? "ok" : "FAIL"});
}

void Checker::check_built_in(Gate gate) {
  struct Built {
    DeltaRuleCase problem;
    Oracle oracle;
  };
  for (DType dtype : kDTypes) {
    std::vector<Built> built;
    uint64_t seed = 1;
    for (DeltaRuleSpec& spec : built_in_specs(gate)) {
      spec.dtype = dtype;
      Built& entry = built.emplace_back(Built{support::draw(spec, seed++), {}});
      const DeltaRuleCase exact = support::in_double(entry.problem);
      entry.oracle = {run_mode(Mode::kForward, exact, "reference", threads_),
                      run_mode(Mode::kBackward, exact, "reference", threads_)};
    }
    for (Mode mode : kModes) {
      for (const std::string& name : implementations(mode)) {
        Line line{gate, mode, name, dtype_name(dtype), "reference"};
        for (const Built& entry : built) run_into(line, entry.problem, entry.oracle.of(mode), false);
        finish(line);
      }
    }
  }
}

void Checker::check_golden(Gate gate, const std::vector<support::GoldenCase>& cases) {
  for (Mode mode : kModes) {
    for (const std::string& name : implementations(mode)) {
      const bool oracle = name == "reference";
      Line line{gate, mode, name, oracle ? "fp64" : "fp32", "golden"};
      for (const support::GoldenCase& golden : cases) {
        if (golden.problem.spec.options.gate != gate) continue;
        run_into(line, oracle ? support::in_double(golden.problem) : golden.problem, golden.expected, oracle);
      }
      finish(line);
    }
  }
}

void Checker::check_determinism() {
  const int many = threads_ > 1 ? threads_ : 2;
  int configurations = 0, different = 0;
  for (Gate gate : ops_) {
    DeltaRuleSpec spec;
    spec.name = "determinism";
    spec.T = 200, spec.H = spec.HV = 3, spec.K = 64, spec.V = 96;
    spec.options.gate = gate;
    const DeltaRuleCase problem = support::draw(spec, 7);
    for (Mode mode : kModes) {
      for (const std::string& name : implementations(mode)) {
        try {
          const DeltaRuleResults first = run_mode(mode, problem, name, many);
          const DeltaRuleResults again = run_mode(mode, problem, name, many);
          const DeltaRuleResults single = run_mode(mode, problem, name, 1);
          const auto first_tensors = first.named(), again_tensors = again.named(), single_tensors = single.named();
          bool same = true;
          for (size_t i = 0; i < first_tensors.size(); ++i) {
            same = same && support::same_bits(*first_tensors[i].second, *again_tensors[i].second) &&
                   support::same_bits(*first_tensors[i].second, *single_tensors[i].second);
          }
          ++configurations;
          if (same) continue;
          ++different;
          notes_.push_back("FAIL: " + op_name(gate) + " " + mode_name(mode) + " " + name +
                           " gave other bits in a second run or with another thread count");
        } catch (const Error& error) {
          const std::string what = "determinism of " + op_name(gate) + " " + mode_name(mode) + " " + name;
          if (error.code() == ErrorCode::kUnsupported) {
            skip(what, error.what());
            continue;
          }
          ++configurations;
          ++different;
          notes_.push_back("FAIL: " + what + ": " + error.what());
        }
      }
    }
  }
  comparisons_ += configurations;
  failures_ += different;
  std::printf("\ndeterminism: two runs, and %d and 1 threads: same bits in %d of %d configurations  %s\n", many,
              configurations - different, configurations, different == 0 ? "ok" : "FAIL");
}

int Checker::run(const std::string& golden_folder) {
  const auto start = std::chrono::steady_clock::now();
  std::printf("fastweight %s, %s, %d threads\n\n", version().c_str(), cpu_target().c_str(), threads_);
  std::vector<support::GoldenCase> golden;
  if (std::filesystem::is_directory(golden_folder)) golden = support::load_delta_rule_golden(golden_folder);
  if (golden.empty()) {
    skip("golden cases", "none in " + golden_folder + " (choose the folder with --golden)");
  }
  table_.header();
  for (Gate gate : ops_) {
    check_built_in(gate);
    if (!golden.empty()) check_golden(gate, golden);
  }
  check_determinism();
  for (const std::string& note : notes_) std::printf("%s\n", note.c_str());
  for (const auto& [reason, skipped] : skipped_reasons_) {
    const std::string more = skipped.count > 1 ? format(" and %d more", skipped.count - 1) : "";
    std::printf("skipped: %s%s: %s\n", skipped.first.c_str(), more.c_str(), reason.c_str());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%d comparisons, %d failed, %d skipped, %.1f s: %s\n", comparisons_, failures_, skipped_, seconds,
              failures_ == 0 ? "all good" : "FAILED");
  return failures_ == 0 ? 0 : 1;
}

std::string default_golden_folder() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return (self.parent_path().parent_path() / "share/fastweight/golden").string();
}

}  // namespace

int run_check(const std::vector<std::string>& arguments) {
  const std::string folder = default_golden_folder();
  const Flags flags({{"--golden", "DIR", "folder of the golden cases (default: " + folder + ")"},
                     {"--op", "NAMES", "delta_rule, gdn, kda; a comma list (default: all)"},
                     {"--threads", "N", "threads per call (default: every core)"}},
                    arguments);
  if (flags.help()) {
    std::printf(
        "usage: fastweight check [FLAGS]\n\n"
        "Runs every implementation of every operator and mode in fp32, bf16 and fp16 on built-in problems, compares\n"
        "with the fp64 reference and with the golden cases, and checks that the bits do not depend on the run or the\n"
        "thread count. Exit code 0: all within their bounds.\n\n%s",
        flags.description().c_str());
    return 0;
  }
  const std::string golden = flags.text("--golden", folder);
  const int threads = static_cast<int>(flags.integer("--threads", default_num_threads(), 1));
  return Checker(parse_ops(flags.list("--op")), threads).run(golden);
}

}  // namespace fastweight::cli
