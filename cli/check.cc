// `fastweight check`: every implementation against the fp64 reference, and all of them against the golden cases.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/names.h"
#include "cli/text.h"
#include "fastweight/error.h"
#include "fastweight/info.h"
#include "support/blocks_case.h"
#include "support/delta_rule_case.h"
#include "support/delta_rule_map_case.h"
#include "support/golden.h"
#include "support/related_case.h"
#include "support/short_conv_case.h"
#include "support/ttt_linear_case.h"

namespace fastweight::cli {
namespace {

using support::BlockSpec;
using support::DeltaRuleMapSpec;
using support::DeltaRuleSpec;
using support::RelatedOp;
using support::RelatedSpec;
using support::ShortConvSpec;
using support::TttLinearSpec;

// ---------------------------------------------------------------------------------------------------------------------
// The built-in problems.

std::vector<DeltaRuleSpec> delta_rule_specs(Op op) {
  const Gate gate = gate_of(op);
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

// Of all three operators.
std::vector<DeltaRuleMapSpec> delta_rule_map_specs() {
  std::vector<DeltaRuleMapSpec> specs;
  for (Op op : {Op::kDeltaRule, Op::kGdn, Op::kKda}) {
    for (const DeltaRuleSpec& spec : delta_rule_specs(op)) {
      specs.emplace_back(DeltaRuleMapSpec{spec}).name = op_name(op) + "_" + spec.name;
    }
  }
  return specs;
}

std::vector<RelatedSpec> related_specs(RelatedOp op) {
  std::vector<RelatedSpec> specs;
  const auto add = [&](const char* name, int64_t B, int64_t T, int64_t H, int64_t K, int64_t V) -> RelatedSpec& {
    RelatedSpec spec;
    spec.name = name;
    spec.op = op;
    spec.B = B, spec.T = T, spec.H = H, spec.K = K, spec.V = V;
    return specs.emplace_back(spec);
  };
  add("square", 2, 100, 2, 64, 64);
  add("wide", 1, 129, 1, 128, 128);
  add("rect", 1, 70, 2, 40, 72).state_v_first = true;
  add("one_token", 3, 1, 2, 32, 16).initial_state = false;
  add("varlen", 1, 150, 2, 64, 32).cu_seqlens = {0, 0, 17, 17, 81, 145, 150, 150};  // three of the seven are empty
  if (gate_of(op) != Gate::kNone) add("hard_gates", 1, 129, 1, 32, 32).hard_gate_fraction = 0.1;
  if (op == RelatedOp::kSimpleGla) add("constant_decay", 1, 90, 3, 32, 32).g_gamma = true;
  if (op == RelatedOp::kComba) {
    add("normalised", 1, 90, 2, 48, 64).qk_l2norm = true;
    add("no_p", 1, 90, 2, 48, 64).p_absent = true;
  }
  return specs;
}

std::vector<TttLinearSpec> ttt_linear_specs() {
  std::vector<TttLinearSpec> specs;
  const auto add = [&](const char* name, int64_t B, int64_t T, int64_t H, int64_t D) -> TttLinearSpec& {
    TttLinearSpec spec;
    spec.name = name;
    spec.B = B, spec.T = T, spec.H = H, spec.D = D;
    return specs.emplace_back(spec);
  };
  add("square", 2, 96, 2, 64);
  add("wide", 1, 129, 1, 128);
  add("odd_width", 1, 70, 2, 60);
  add("one_token", 3, 1, 2, 32);
  add("mini_batch_32", 1, 100, 1, 64).options.mini_batch = 32;
  add("mini_batch_64", 1, 150, 1, 48).options.mini_batch = 64;
  add("varlen", 1, 150, 2, 32).cu_seqlens = {0, 0, 17, 17, 81, 145, 150, 150};  // three of the seven are empty
  return specs;
}

std::vector<ShortConvSpec> short_conv_specs() {
  std::vector<ShortConvSpec> specs;
  const auto add = [&](const char* name, int64_t B, int64_t T, int64_t D, int64_t W) -> ShortConvSpec& {
    ShortConvSpec spec;
    spec.name = name;
    spec.B = B, spec.T = T, spec.D = D, spec.W = W;
    spec.options.activation = Activation::kSilu;
    return specs.emplace_back(spec);
  };
  add("wide", 2, 300, 600, 4);
  add("odd_width", 1, 70, 61, 3);
  add("one_token", 3, 1, 32, 4);
  add("linear", 1, 100, 64, 4).options.activation = Activation::kNone;
  add("varlen", 1, 150, 32, 4).cu_seqlens = {0, 0, 17, 17, 81, 145, 150, 150};  // three of the seven are empty
  return specs;
}

std::vector<BlockSpec> block_specs(Block block) {
  std::vector<BlockSpec> specs;
  const auto add = [&](const char* name, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, Gate gate,
                       int64_t C) -> BlockSpec& {
    BlockSpec spec;
    spec.name = name;
    spec.block = block;
    spec.B = B, spec.T = T, spec.H = H, spec.HV = HV, spec.K = K, spec.V = K + 8, spec.C = C, spec.gate = gate;
    return specs.emplace_back(spec);
  };
  add("per_head", 2, 100, 2, 4, 64, Gate::kPerHead, 64);
  add("per_channel", 1, 129, 2, 2, 40, Gate::kPerChannel, 64);
  add("chunk_16", 1, 70, 1, 1, 32, Gate::kPerChannel, 16);
  add("chunk_32", 1, 70, 1, 1, 128, Gate::kPerHead, 32);
  add("varlen", 1, 150, 2, 2, 32, Gate::kPerHead, 64).cu_seqlens = {0, 0, 17, 17, 81, 145, 150, 150};
  add("strong_gates", 1, 100, 1, 1, 32, Gate::kPerChannel, 64).gate_scale = 100;
  if (block == Block::kChunkLocalCumsum) add("reverse", 1, 100, 1, 1, 32, Gate::kPerChannel, 64).reverse = true;
  if (block == Block::kScaledDotKkt || block == Block::kWy) add("no_gate", 1, 100, 2, 2, 64, Gate::kNone, 64);
  if (block == Block::kGateActivation) {
    add("not_summed", 1, 100, 2, 2, 32, Gate::kPerHead, 0);
    add("lower_bound", 1, 100, 2, 2, 32, Gate::kPerChannel, 64).lower_bound = true;
  }
  if (block == Block::kRmsNorm) {
    add("sigmoid", 1, 100, 2, 2, 48, Gate::kPerHead, 64).sigmoid = true;
    add("no_gate", 1, 100, 2, 2, 48, Gate::kPerHead, 64).gated = false;
  }
  return specs;
}

DeltaRuleSpec delta_rule_determinism_spec(Op op) {
  DeltaRuleSpec spec;
  spec.name = "determinism";
  spec.T = 200, spec.H = spec.HV = 3, spec.K = 64, spec.V = 96;
  spec.options.gate = gate_of(op);
  return spec;
}

RelatedSpec related_determinism_spec(RelatedOp op) {
  RelatedSpec spec;
  spec.name = "determinism";
  spec.op = op;
  spec.T = 200, spec.H = 3, spec.K = 64, spec.V = 96;
  return spec;
}

TttLinearSpec ttt_linear_determinism_spec() {
  TttLinearSpec spec;
  spec.name = "determinism";
  spec.B = 2, spec.T = 200, spec.H = 3, spec.D = 64;
  return spec;
}

BlockSpec block_determinism_spec(Block block) {
  BlockSpec spec;
  spec.name = "determinism";
  spec.block = block;
  spec.T = 600, spec.H = 2, spec.HV = 4, spec.K = 64, spec.V = 96, spec.gate = Gate::kPerChannel;
  return spec;
}

ShortConvSpec short_conv_determinism_spec() {
  ShortConvSpec spec;
  spec.name = "determinism";
  spec.B = 2, spec.T = 600, spec.D = 600;
  spec.options.activation = Activation::kSilu;
  return spec;
}

// ---------------------------------------------------------------------------------------------------------------------
// Running and judging, for every family alike: a Case has its Spec and becomes Results.

template <class Case>
auto run_mode(Mode mode, const Case& problem, const std::string& implementation, int threads, Device device = {}) {
  Context context;
  context.device = device;
  context.num_threads = threads;
  context.implementation = implementation;
  return support::run(mode, problem, context);
}

constexpr const char* kGolden = "golden";

// One line of the table: the worst comparison of one implementation over a set of problems.
struct Line {
  Op op;
  Mode mode;
  std::string implementation, dtype, against;
  int comparisons = 0, failures = 0;
  double worst = -1;  // error over bound
  double error = 0, bound = 0;
  std::string where;
};

template <class Case, class Results>
void judge(Line& line, const Case& problem, const Results& results, const Results& expected) {
  for (const auto& [name, tensor] : results.named()) {
    const support::Tensor* const wanted = expected.find(name);
    if (wanted == nullptr) continue;
    support::Tolerance bound;
    if constexpr (requires { support::tolerance(problem, expected, name, tensor->dtype(), results.implementation); }) {
      bound = support::tolerance(problem, expected, name, tensor->dtype(), results.implementation);
    } else {
      bound = support::tolerance(problem, expected, name, tensor->dtype());
    }
    const double share = support::excess(*tensor, *wanted, bound);
    ++line.comparisons;
    if (!(share <= 1)) ++line.failures;
    if (share > line.worst) {
      line.worst = share;
      line.error = support::compare(*tensor, *wanted).relative_rms;
      line.bound = bound.relative;
      line.where = problem.spec.name + "/" + name;
    }
  }
}

class Checker {
 public:
  Checker(std::vector<Op> ops, int threads, Device device) : ops_(std::move(ops)), threads_(threads), device_(device) {}

  int run(const std::string& golden_folder);

 private:
  template <class Spec>
  void check_built_in(Op op, const std::vector<Spec>& specs);
  template <class Golden>
  void check_golden(Op op, const std::vector<Golden>& cases);
  template <class Spec>
  void check_determinism(Op op, const Spec& spec);
  void check_op(Op op, const std::string& golden_folder);

  // Runs one implementation on one problem into the line. What it declines is skipped, any other error is a failure.
  template <class Case, class Results>
  void run_into(Line& line, const Case& problem, const Results& expected);
  void finish(const Line& line);
  int many_threads() const { return std::max(threads_, 2); }
  void skip(const std::string& what, const std::string& reason);

  std::vector<Op> ops_;
  int threads_;
  Device device_;
  int comparisons_ = 0, failures_ = 0, skipped_ = 0;
  int configurations_ = 0, different_ = 0;  // of the determinism check
  std::vector<std::string> notes_;

  struct Skipped {
    int count = 0;
    std::string first;
  };
  std::map<std::string, Skipped> skipped_reasons_;

  Table table_{{{"operator", 18},
                {"mode", 4},
                {"impl", 9},
                {"dtype", 5},
                {"against", 9},
                {"worst tensor", 33},
                {"rel. RMS", 8, true},
                {"bound", 7, true},
                {"", 4}}};
};

template <class Case, class Results>
void Checker::run_into(Line& line, const Case& problem, const Results& expected) {
  const std::string what = op_name(line.op) + " " + mode_name(line.mode) + " " + line.implementation + " " +
                           line.dtype + " on " + problem.spec.name;
  try {
    Results results = run_mode(line.mode, problem, line.implementation, threads_, device_);
    if (line.against == kGolden && line.mode == Mode::kStep) support::drop_open_states(results);
    judge(line, problem, results, expected);
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
  table_.row({op_name(line.op), mode_name(line.mode), line.implementation, line.dtype, line.against, line.where,
              format("%.1e", line.error), format("%.0e", line.bound), line.failures == 0 ? "ok" : "FAIL"});
}

template <class Spec>
void Checker::check_built_in(Op op, const std::vector<Spec>& specs) {
  using Case = decltype(support::draw(specs[0], 1));
  for (DType dtype : kDTypes) {
    std::vector<Case> problems;
    uint64_t seed = 1;
    for (Spec spec : specs) {
      spec.dtype = dtype;
      problems.push_back(support::draw(spec, seed++));
    }
    for (Mode mode : kModes) {
      if (implementations(op, mode, device_).empty()) continue;
      std::vector<decltype(run_mode(mode, problems[0], "", 1))> oracle;
      for (const Case& problem : problems) {
        oracle.push_back(run_mode(mode, support::in_double(problem), "reference", threads_));
      }
      for (const std::string& name : implementations(op, mode, device_)) {
        Line line{op, mode, name, dtype_name(dtype), "reference"};
        for (size_t i = 0; i < problems.size(); ++i) run_into(line, problems[i], oracle[i]);
        finish(line);
      }
    }
  }
}

template <class Golden>
void Checker::check_golden(Op op, const std::vector<Golden>& cases) {
  for (Mode mode : kModes) {
    for (const std::string& name : implementations(op, mode, device_)) {
      const bool oracle = name == "reference";
      Line line{op, mode, name, oracle ? "fp64" : "fp32", kGolden};
      for (const Golden& golden : cases) {
        run_into(line, oracle ? support::in_double(golden.problem) : golden.problem, golden.expected);
      }
      finish(line);
    }
  }
}

template <class Spec>
void Checker::check_determinism(Op op, const Spec& spec) {
  const auto problem = support::draw(spec, 7);
  for (Mode mode : kModes) {
    for (const std::string& name : implementations(op, mode, device_)) {
      try {
        const auto first = run_mode(mode, problem, name, many_threads(), device_);
        const auto again = run_mode(mode, problem, name, many_threads(), device_);
        const auto single = run_mode(mode, problem, name, 1, device_);
        const auto first_tensors = first.named(), again_tensors = again.named(), single_tensors = single.named();
        bool same = true;
        for (size_t i = 0; i < first_tensors.size(); ++i) {
          same = same && support::same_bits(*first_tensors[i].second, *again_tensors[i].second) &&
                 support::same_bits(*first_tensors[i].second, *single_tensors[i].second);
        }
        ++configurations_;
        if (same) continue;
        ++different_;
        notes_.push_back("FAIL: " + op_name(op) + " " + mode_name(mode) + " " + name +
                         " gave other bits in a second run or with another thread count");
      } catch (const Error& error) {
        const std::string what = "determinism of " + op_name(op) + " " + mode_name(mode) + " " + name;
        if (error.code() == ErrorCode::kUnsupported) {
          skip(what, error.what());
          continue;
        }
        ++configurations_;
        ++different_;
        notes_.push_back("FAIL: " + what + ": " + error.what());
      }
    }
  }
}

void Checker::check_op(Op op, const std::string& golden_folder) {
  const bool has_golden = std::filesystem::is_directory(golden_folder);
  const auto golden_of = [&](const auto& cases) {
    if (cases.empty()) {
      skip("golden cases of " + op_name(op), "none in " + golden_folder + " (choose the folder with --golden)");
    } else {
      check_golden(op, cases);
    }
  };
  if (const auto block = block_of(op)) {
    check_built_in(op, block_specs(*block));
    check_determinism(op, block_determinism_spec(*block));
    return;
  }
  if (const auto related = related_of(op)) {
    check_built_in(op, related_specs(*related));
    check_determinism(op, related_determinism_spec(*related));
    return;
  }
  if (op == Op::kDeltaRuleMap) {
    check_built_in(op, delta_rule_map_specs());
    for (Op rule : {Op::kDeltaRule, Op::kGdn, Op::kKda}) {
      check_determinism(op, DeltaRuleMapSpec{delta_rule_determinism_spec(rule)});
    }
    return;
  }
  if (op == Op::kShortConv) {
    check_built_in(op, short_conv_specs());
    check_determinism(op, short_conv_determinism_spec());
    return;
  }
  if (op == Op::kTttLinear) {
    check_built_in(op, ttt_linear_specs());
    golden_of(has_golden ? support::load_ttt_linear_golden(golden_folder)
                         : std::vector<support::TttLinearGoldenCase>());
    check_determinism(op, ttt_linear_determinism_spec());
    return;
  }
  check_built_in(op, delta_rule_specs(op));
  std::vector<support::GoldenCase> cases;
  if (has_golden) cases = support::load_delta_rule_golden(golden_folder);
  std::erase_if(cases, [&](const support::GoldenCase& one) { return one.problem.spec.options.gate != gate_of(op); });
  golden_of(cases);
  check_determinism(op, delta_rule_determinism_spec(op));
}

int Checker::run(const std::string& golden_folder) {
  const auto start = std::chrono::steady_clock::now();
  const std::string where = device_.type == DeviceType::kCuda ? cuda_devices()[0].name : cpu_target();
  std::printf("fastweight %s, %s, %d threads\n\n", version().c_str(), where.c_str(), threads_);
  table_.header();
  for (Op op : ops_) check_op(op, golden_folder);
  comparisons_ += configurations_;
  failures_ += different_;
  std::printf("\ndeterminism: two runs, and %d and 1 threads: same bits in %d of %d configurations  %s\n",
              many_threads(), configurations_ - different_, configurations_, different_ == 0 ? "ok" : "FAIL");
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

bool has_golden_cases(const std::string& folder) {
  return std::filesystem::is_directory(folder) &&
         !(support::load_delta_rule_golden(folder).empty() && support::load_ttt_linear_golden(folder).empty());
}

std::string default_golden_folder() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return (self.parent_path().parent_path() / "share/fastweight/golden").string();
}

}  // namespace

int run_check(const std::vector<std::string>& arguments) {
  const std::string folder = default_golden_folder();
  const Flags flags(
      {{"--golden", "DIR", "folder of the golden cases (default: " + folder + ")"},
       {"--op", "NAMES", "operators and building blocks as `fastweight info` lists them; a comma list (default: all)"},
       {"--device", "NAME", "cpu or cuda (default: cpu); the reference that all is compared with runs on the CPU"},
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
  if (flags.has("--golden") && !has_golden_cases(golden)) {
    throw UsageError("--golden: expected a folder with golden cases, got '" + golden + "'");
  }
  const int threads = static_cast<int>(flags.integer("--threads", default_num_threads(), 1, kMostThreads));
  return Checker(parse_ops(flags.list("--op")), threads, parse_device(flags.text("--device", "cpu"))).run(golden);
}

}  // namespace fastweight::cli
