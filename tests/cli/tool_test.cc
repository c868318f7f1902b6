// Runs the command-line tool as a user would and looks at its output and exit code.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

namespace {

namespace fs = std::filesystem;

// The build tree keeps the tool in bin/ and this test in tests/.
fs::path tool() { return fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "bin" / "fastweight"; }

struct Outcome {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

// `setup` is what the shell runs before the tool.
Outcome run(const std::string& arguments, const fs::path& program = tool(), const std::string& setup = "") {
  Outcome outcome;
  std::FILE* pipe = popen(("exec 2>&1; " + setup + " '" + program.string() + "' " + arguments).c_str(), "r");
  if (pipe == nullptr) return outcome;
  char buffer[4096];
  for (size_t count; (count = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.output.append(buffer, count);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  return outcome;
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class Tool : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(tool())) GTEST_SKIP() << tool() << " was not built";
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / (std::string("fastweight_tool_test_") + test->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  fs::path folder_;
};

constexpr const char* kSmallBench =
    "bench --threads 1 --min-time 0 --repeat 2 --shape B=2,T=33,H=1,HV=2,K=16,V=24 --op gdn,kda ";

TEST_F(Tool, TellsItsVersionAndHelps) {
  EXPECT_EQ(run("--version").exit_code, 0);
  EXPECT_TRUE(run("--version").output.starts_with("fastweight "));
  for (const char* command : {"", "info ", "check ", "bench "}) {
    const Outcome help = run(std::string(command) + "--help");
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_TRUE(contains(help.output, "usage: fastweight")) << help.output;
  }
  EXPECT_EQ(run("").exit_code, 2);
}

TEST_F(Tool, InfoListsTheImplementations) {
  const Outcome text = run("info");
  EXPECT_EQ(text.exit_code, 0);
  for (const char* part : {"SIMD target", "cuda: ", "delta_rule", "gdn", "kda", "simple_gla", "comba", "dplr",
                           "ttt_linear", "short_conv", "reference"}) {
    EXPECT_TRUE(contains(text.output, part)) << part << " in\n" << text.output;
  }
  const Outcome json_text = run("info --json");
  EXPECT_EQ(json_text.exit_code, 0);
  const auto json = nlohmann::json::parse(json_text.output);
  EXPECT_EQ(json.at("devices").at(0), "cpu");
  for (const char* op : {"linear_attention", "simple_gla", "gla", "comba", "iplr", "dplr"}) {
    EXPECT_EQ(json.at("implementations").at(op).at("bwd"), nlohmann::json({"chunk", "reference"}));
    EXPECT_EQ(json.at("implementations").at(op).at("step"), nlohmann::json({"recurrent", "reference"}));
  }
  const std::string help = run("bench --help").output;
  for (const auto& [op, modes] : json.at("implementations").items()) EXPECT_TRUE(contains(help, op)) << op;
  EXPECT_EQ(json.at("implementations").at("solve_tril").at("bwd").back(), "reference");
  EXPECT_FALSE(json.at("implementations").at("solve_tril").contains("step"));
  for (const char* op : {"delta_rule", "gdn", "kda", "ttt_linear", "short_conv"}) {
    for (const char* mode : {"fwd", "bwd", "step"}) {
      EXPECT_EQ(json.at("implementations").at(op).at(mode).back(), "reference");
    }
  }
}

TEST_F(Tool, BenchWritesCompleteRecords) {
  const fs::path json_path = folder_ / "out.json", svg_path = folder_ / "out.svg";
  const Outcome bench = run(
      kSmallBench + ("--impl auto --dtype fp32,bf16 --json " + json_path.string() + " --plot " + svg_path.string()));
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const auto records = nlohmann::json::parse(read_text(json_path));
  EXPECT_EQ(records.size(), 2U * 3U * 2U);  // operators, modes, types
  for (const auto& record : records) {
    for (const char* key : {"op", "mode", "impl", "device", "dtype", "version", "cpu", "target", "date"}) {
      EXPECT_TRUE(record.at(key).is_string() && record.at(key) != "") << key;
    }
    for (const char* key : {"threads", "B", "T", "H", "HV", "K", "V"}) {
      EXPECT_TRUE(record.at(key).is_number_integer() && record.at(key) > 0) << key;
    }
    for (const char* key : {"median_ms", "min_ms", "p90_ms", "first_call_ms", "gflops", "peak_gflops", "gbps",
                            "memcpy_gbps", "share_of_peak"}) {
      EXPECT_TRUE(record.at(key).is_number() && record.at(key) > 0) << key;
    }
    for (const char* key : {"C", "eager_ms", "host_ms", "data_sets", "cuda_device"}) {
      EXPECT_TRUE(record.at(key).is_null()) << key;
    }
    EXPECT_LE(record.at("min_ms"), record.at("median_ms"));
    EXPECT_LE(record.at("median_ms"), record.at("p90_ms"));
    EXPECT_EQ(record.at("T"), record.at("mode") == "step" ? 1 : 33);
    EXPECT_NE(record.at("impl"), "auto");
  }
  const std::string svg = read_text(svg_path);
  EXPECT_TRUE(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
}

TEST_F(Tool, BenchPacksSequencesAndSavesStates) {
  const Outcome bench =
      run("bench --threads 1 --min-time 0 --repeat 1 --op gated_delta_rule --mode forward,backward --impl reference "
          "--shape T=100,H=1,K=16,V=8 --varlen 5 --saved-states");
  EXPECT_EQ(bench.exit_code, 0) << bench.output;
}

TEST_F(Tool, BenchAppliesAFlagWhereItBelongs) {
  const fs::path json_path = folder_ / "out.json";
  const Outcome bench =
      run("bench --threads 1 --min-time 0 --repeat 1 --op gdn,gla,ttt_linear,short_conv,l2norm --shape T=20,H=1,D=16 "
          "--state bf16 --saved-states --varlen 2 --json " +
          json_path.string());
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  if (fs::exists("/sys/devices/system/cpu/cpu0/cache/index0/size")) {  // nothing is said of caches of unknown size
    EXPECT_TRUE(contains(bench.output, "0.000488 MiB of states")) << bench.output;  // 2 bytes for each of 16 x 16
  }
  for (const auto& record : nlohmann::json::parse(read_text(json_path))) {
    const bool step = record.at("mode") == "step", block = record.at("op") == "l2norm";
    const bool delta_rule = record.at("op") == "gdn", related = record.at("op") == "gla";
    EXPECT_EQ(record.at("saved_states"), !step && (delta_rule || related)) << record;
    EXPECT_EQ(record.at("sequences"), step || block ? 1 : 2) << record;
    if (block) {
      EXPECT_TRUE(record.at("state_dtype").is_null()) << record;
    } else {
      EXPECT_EQ(record.at("state_dtype"), delta_rule && step ? "bf16" : "fp32") << record;
    }
  }
}

TEST_F(Tool, BenchMeasuresTttLinear) {
  const fs::path json_path = folder_ / "out.json";
  const Outcome bench = run(
      "bench --threads 1 --min-time 0 --repeat 1 --op ttt_linear --impl reference --shape B=2,T=20,H=2,D=16 --json " +
      json_path.string());
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const auto records = nlohmann::json::parse(read_text(json_path));
  EXPECT_EQ(records.size(), 3U);
  for (const auto& record : records) {
    EXPECT_EQ(record.at("op"), "ttt_linear");
    EXPECT_EQ(record.at("K"), 16);
    EXPECT_EQ(record.at("V"), 16);
  }
}

TEST_F(Tool, BenchMeasuresShortConv) {
  const Outcome bench =
      run("bench --threads 1 --min-time 0 --repeat 1 --op short_conv --shape T=20,H=2,D=16 --varlen 3");
  EXPECT_EQ(bench.exit_code, 0) << bench.output;
  EXPECT_TRUE(contains(bench.output, "short_conv")) << bench.output;
}

TEST_F(Tool, BenchMeasuresRelatedOperators) {
  const fs::path json_path = folder_ / "out.json";
  const Outcome bench = run(
      "bench --threads 1 --min-time 0 --repeat 1 --op linear_attention,simple_gla,gla,comba,iplr,dplr --saved-states"
      " --impl chunk --shape T=100,H=2,K=16,V=8 --varlen 3 --json " +
      json_path.string());
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const auto records = nlohmann::json::parse(read_text(json_path));
  EXPECT_EQ(records.size(), 12U);
  for (const auto& record : records) EXPECT_EQ(record.at("impl"), "chunk");
  const Outcome grouped = run("bench --op gla --shape T=16,H=1,HV=2,K=16,V=16");
  EXPECT_TRUE(contains(grouped.output, "gla needs HV = H")) << grouped.output;
}

TEST_F(Tool, BenchMeasuresBlocks) {
  const fs::path json_path = folder_ / "out.json";
  const std::string blocks = "chunk_local_cumsum,scaled_dot_kkt,solve_tril,wy,l2norm,gate_activation,rms_norm";
  const Outcome bench = run("bench --threads 1 --min-time 0 --repeat 1 --op " + blocks +
                            " --shape T=100,H=1,HV=2,K=16,V=8 --varlen 3 --json " + json_path.string());
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const auto records = nlohmann::json::parse(read_text(json_path));
  EXPECT_EQ(records.size(), 13U);  // chunk_local_cumsum is its own adjoint
  for (const auto& record : records) {
    EXPECT_EQ(record.at("impl"), "simd");
    EXPECT_EQ(record.at("C"), 64);
    EXPECT_GT(record.at("gbps"), 0);
  }
}

TEST_F(Tool, CheckRunsBlocks) {
  const Outcome check = run("check --op solve_tril,l2norm");
  EXPECT_EQ(check.exit_code, 0) << check.output;
  EXPECT_TRUE(contains(check.output, "0 failed, 0 skipped")) << check.output;
}

TEST_F(Tool, BenchSkipsOperatorsThatAShapeDoesNotFit) {
  const Outcome bench = run("bench --threads 1 --min-time 0 --repeat 1 --mode step --shape H=1,K=16,V=24");
  EXPECT_EQ(bench.exit_code, 0) << bench.output;
  EXPECT_TRUE(contains(bench.output, "skipped: ttt_linear needs K = V")) << bench.output;
}

TEST_F(Tool, BenchFailsWhenANamedImplementationCannotRun) {
  const Outcome bench = run(kSmallBench + std::string("--mode step --impl chunk"));
  EXPECT_EQ(bench.exit_code, 1) << bench.output;
  EXPECT_TRUE(contains(bench.output, "gdn step chunk")) << bench.output;
}

TEST_F(Tool, BenchFailsWhenNothingWasMeasured) {
  const std::string small = "bench --threads 1 --min-time 0 --repeat 1 ";
  const Outcome wide = run(small + "--op gdn --mode fwd --shape T=4,H=1,K=257,V=16");
  EXPECT_EQ(wide.exit_code, 1) << wide.output;
  EXPECT_TRUE(contains(wide.output, "skipped: gdn fwd chunk")) << wide.output;
  EXPECT_TRUE(contains(wide.output, "failed: nothing was measured")) << wide.output;
  const Outcome absent = run(small + "--op l2norm --impl chunk");
  EXPECT_EQ(absent.exit_code, 1) << absent.output;
  EXPECT_TRUE(contains(absent.output, "l2norm fwd chunk: there is no such implementation")) << absent.output;
  EXPECT_TRUE(contains(absent.output, "failed: nothing was measured")) << absent.output;
}

TEST_F(Tool, BenchMeasuresAsLongAsAsked) {
  const fs::path json_path = folder_ / "out.json";
  const Outcome bench =
      run("bench --threads 1 --min-time 1 --op l2norm --mode fwd --impl simd --shape T=1,H=1,K=1,V=1 --json " +
          json_path.string());
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  EXPECT_GT(nlohmann::json::parse(read_text(json_path)).at(0).at("calls"), 20000);
}

TEST_F(Tool, BenchSkipsWhatMemoryDoesNotHold) {
  const std::string step = "bench --threads 1 --min-time 0 --repeat 1 --op delta_rule --mode step ";
  // In GiB: states 2^18, each of q, k, v and o 2^11, beta 2^4; drawn: 256 of 65536 tokens, 2 states of 4.
  const Outcome huge = run(step + "--shape B=65536,T=1,H=65536,K=128,V=128 --shape H=1,K=16,V=16");
  EXPECT_EQ(huge.exit_code, 0) << huge.output;
  EXPECT_TRUE(contains(huge.output, "B=65536,T=1,H=65536,K=128,V=128 threads=1: needs 270384.1 GiB for its tensors, "))
      << huge.output;
  const Outcome beyond = run(step + "--shape B=2147483647,H=2147483647,K=2147483647,V=2147483647");
  EXPECT_EQ(beyond.exit_code, 1) << beyond.output;
  EXPECT_TRUE(contains(beyond.output, "GiB are available")) << beyond.output;
}

TEST_F(Tool, BenchNamesTheShapeThatRanOutOfMemory) {
  const Outcome bench = run("bench --threads 1 --op delta_rule --mode step --shape B=4096,H=16,K=128,V=128", tool(),
                            "ulimit -v 3145728;");
  EXPECT_EQ(bench.exit_code, 1) << bench.output;
  EXPECT_TRUE(contains(bench.output, "B=4096,T=1,H=16,K=128,V=128 threads=1: ")) << bench.output;
  // The second on a machine without these 4 GiB.
  EXPECT_TRUE(contains(bench.output, "out of memory") || contains(bench.output, "GiB are available")) << bench.output;
}

TEST_F(Tool, FailsWhenItsOutputCannotBeWritten) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  for (const std::string arguments : {"--version", "info", "info --json", "check --op l2norm", "bench --help",
                                      "bench --threads 1 --quick --op l2norm --mode fwd --shape T=4,H=1,D=16"}) {
    const Outcome outcome = run(arguments + " >/dev/full");
    EXPECT_EQ(outcome.exit_code, 1) << arguments;
    EXPECT_EQ(outcome.output, "fastweight: cannot write to stdout\n") << arguments;
  }
}

TEST_F(Tool, CheckGoesOnWithoutGoldenCases) {
  // Beside a copy of the tool there is no share/.
  const fs::path copy = folder_ / "bin" / "fastweight";
  fs::create_directories(copy.parent_path());
  fs::copy_file(tool(), copy);
  const Outcome check = run("check --op delta_rule", copy);
  EXPECT_EQ(check.exit_code, 0) << check.output;
  EXPECT_TRUE(contains(check.output, "skipped: golden cases")) << check.output;
  EXPECT_TRUE(contains(check.output, "0 failed")) << check.output;
}

TEST_F(Tool, CheckRefusesAFolderWithoutGoldenCases) {
  for (const std::string& folder : {std::string(), (folder_ / "nowhere").string(), folder_.string()}) {
    const Outcome check = run("check --op delta_rule --golden '" + folder + "'");
    EXPECT_EQ(check.exit_code, 2) << check.output;
    EXPECT_TRUE(contains(check.output, "--golden: expected a folder with golden cases, got '" + folder + "'"))
        << check.output;
  }
  const Outcome check = run("check --op delta_rule --golden " FASTWEIGHT_GOLDEN_DIR);
  EXPECT_EQ(check.exit_code, 0) << check.output;
  EXPECT_TRUE(contains(check.output, "0 failed, 0 skipped")) << check.output;
}

TEST_F(Tool, BenchRefusesOneFileForTwoResults) {
  const std::string path = (folder_ / "out").string(), same = (folder_ / "." / "out").string();
  const Outcome bench = run("bench --json " + path + " --plot " + same);
  EXPECT_EQ(bench.exit_code, 2) << bench.output;
  EXPECT_TRUE(contains(bench.output, "--plot: expected a file other than that of --json, got '" + same))
      << bench.output;
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(Tool, CheckAndBenchRunMapsOfSegments) {
  const Outcome check = run("check --op delta_rule_map");
  EXPECT_EQ(check.exit_code, 0) << check.output;
  for (const char* part :
       {"delta_rule_map      fwd   chunk", "delta_rule_map      bwd   reference", "0 failed, 0 skipped"}) {
    EXPECT_TRUE(contains(check.output, part)) << check.output;
  }
  const Outcome bench =
      run("bench --threads 1 --min-time 0 --repeat 1 --op delta_rule_map --shape T=100,H=2,K=16,V=24");
  EXPECT_EQ(bench.exit_code, 0) << bench.output;
  EXPECT_TRUE(contains(bench.output, "delta_rule_map")) << bench.output;
}

TEST_F(Tool, CheckRunsTttLinear) {
  const Outcome check = run("check --op ttt_linear");
  EXPECT_EQ(check.exit_code, 0) << check.output;
  EXPECT_TRUE(contains(check.output, "golden")) << check.output;
  EXPECT_TRUE(contains(check.output, "0 failed, 0 skipped")) << check.output;
}

TEST_F(Tool, WrongCommandLinesNameTheirFlag) {
  const struct {
    const char* arguments;
    const char* message;
  } wrong[] = {
      {"frobnicate", "frobnicate"},
      {"--frobnicate", "--frobnicate"},
      {"info --frobnicate", "--frobnicate"},
      {"info --json=yes", "--json"},
      {"check --threads 0", "--threads"},
      {"check --op mamba", "--op"},
      {"bench extra", "extra"},
      {"bench --op", "--op"},
      {"bench --op mamba", "--op"},
      {"bench --mode sideways", "--mode"},
      {"bench --op solve_tril --mode step", "--mode: solve_tril has no step"},
      {"bench --impl frobnicate", "--impl"},
      {"bench --dtype fp8", "--dtype"},
      {"bench --dtype fp32,", "--dtype"},
      {"bench --threads two", "--threads"},
      {"bench --threads 4294967298", "--threads: expected an integer from 1 to"},
      {"check --threads 4294967298", "--threads: expected an integer from 1 to"},
      {"bench --op gdn --mode fwd --state bf16", "--state: expected a step of delta_rule, gdn or kda, got gdn fwd"},
      {"bench --op ttt_linear,l2norm --saved-states", "--saved-states: expected fwd or bwd of the delta-rule family"},
      {"bench --op gdn --mode step --saved-states", "got gdn step"},
      {"bench --mode step --varlen 2", "--varlen"},
      {"bench --min-time -1", "--min-time: expected a number from 0 to 600, got '-1'"},
      {"bench --min-time nan", "--min-time: expected a number from 0 to 600, got 'nan'"},
      {"bench --min-time 1e308", "--min-time: expected a number from 0 to 600, got '1e308'"},
      {"bench --shape B=1,B=2,T=16,H=1,K=16,V=16", "--shape: B is given twice in 'B=1,B=2,"},
      {"bench --repeat 0", "--repeat"},
      {"bench --shape T=16,H=1,K=16", "--shape: V"},
      {"bench --shape T=16,H=1,K=16,V=0", "--shape: V"},
      {"bench --shape T=16,H=1,K=16,V=16,W=3", "--shape"},
      {"bench --shape H=1,K=16,V=16", "--shape: T"},
      {"bench --shape T=16,H=1,D=16,V=16", "--shape: D"},
      {"bench --op ttt_linear --shape T=16,H=1,K=16,V=8", "--shape: ttt_linear"},
      {"bench --shape T=16,H=2,HV=3,K=16,V=16", "--shape: HV"},
      {"bench --json /nowhere/out.json", "--json"},
      {"bench --varlen 4 --shape B=2,T=16,H=1,K=16,V=16", "--varlen"},
  };
  for (const auto& [arguments, message] : wrong) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments << "\n" << outcome.output;
    EXPECT_TRUE(contains(outcome.output, message)) << arguments << "\n" << outcome.output;
  }
}

}  // namespace
