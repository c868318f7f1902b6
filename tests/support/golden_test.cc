#include "support/golden.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace fastweight::support {
namespace {

// A safetensors file with the given header and data.
class File {
 public:
  File(const std::string& name, const std::string& header, const std::string& data)
      : path_((std::filesystem::temp_directory_path() / name).string()) {
    std::ofstream out(path_, std::ios::binary);
    for (int i = 0; i < 8; ++i) out.put(static_cast<char>(header.size() >> (8 * i)));
    out << header << data;
  }
  ~File() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void expect_rejected(const std::string& path) {
  try {
    read_safetensors(path);
    ADD_FAILURE() << path << " was accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
  }
}

TEST(SafeTensors, ReadsTensorsAndMetadata) {
  const File file("fastweight_good.safetensors",
                  R"({"__metadata__":{"case":"{}"},"x":{"dtype":"I32","shape":[1,2],"data_offsets":[0,8]}})",
                  std::string("\x01\0\0\0\xff\xff\xff\xff", 8));
  const SafeTensors result = read_safetensors(file.path());
  EXPECT_EQ(result.metadata.at("case"), "{}");
  EXPECT_EQ(result.tensors.at("x").values(), (std::vector<double>{1, -1}));
}

TEST(SafeTensors, RejectsBrokenFiles) {
  expect_rejected("/nonexistent/file.safetensors");
  const std::string data(8, '\0');
  int number = 0;
  for (const char* header : {
           "",
           "{",
           "[]",
           R"({"x":1})",
           R"({"x":{"dtype":"I32","shape":[1,2]}})",
           R"({"x":{"dtype":"I32","shape":[1,3],"data_offsets":[0,8]}})",
           R"({"x":{"dtype":"I32","shape":[1,2],"data_offsets":[0,800]}})",
           R"({"x":{"dtype":"I32","shape":[1,2],"data_offsets":[8,0]}})",
           R"({"x":{"dtype":"X32","shape":[1,2],"data_offsets":[0,8]}})",
           R"({"x":{"dtype":"I32","shape":[-1,-2],"data_offsets":[0,8]}})",
           R"({"x":{"dtype":"I32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
           R"({"x":{"dtype":"I32","shape":[1,1,1,1,1,2],"data_offsets":[0,8]}})",
       }) {
    expect_rejected(File("fastweight_bad_" + std::to_string(number++) + ".safetensors", header, data).path());
  }
}

TEST(Golden, LoadsEveryCaseOfTheFamily) {
  const std::vector<GoldenCase> cases = load_delta_rule_golden(FASTWEIGHT_GOLDEN_DIR);
  ASSERT_EQ(cases.size(), 21u);
  for (const GoldenCase& golden : cases) {
    const DeltaRuleSpec& spec = golden.problem.spec;
    EXPECT_EQ(golden.problem.q.shape(), (std::vector<int64_t>{spec.B, spec.T, spec.H, spec.K})) << spec.name;
    EXPECT_EQ(golden.expected.o.shape(), (std::vector<int64_t>{spec.B, spec.T, spec.HV, spec.V})) << spec.name;
    EXPECT_EQ(golden.problem.initial_state.present(), spec.initial_state) << spec.name;
    EXPECT_EQ(golden.expected.o.dtype(), DType::kF64) << spec.name;
  }
  EXPECT_THROW(load_delta_rule_golden("/nonexistent"), std::runtime_error);
}

TEST(Golden, LoadsEveryCaseOfTttLinear) {
  const std::vector<TttLinearGoldenCase> cases = load_ttt_linear_golden(FASTWEIGHT_GOLDEN_DIR);
  ASSERT_EQ(cases.size(), 5u);
  for (const TttLinearGoldenCase& golden : cases) {
    const TttLinearSpec& spec = golden.problem.spec;
    EXPECT_EQ(golden.problem.q.shape(), (std::vector<int64_t>{spec.B, spec.T, spec.H, spec.D})) << spec.name;
    EXPECT_EQ(golden.problem.eta.shape(), (std::vector<int64_t>{spec.B, spec.T, spec.H, 1})) << spec.name;
    EXPECT_EQ(golden.expected.named().size(), 11u) << spec.name;
    EXPECT_EQ(golden.expected.o.dtype(), DType::kF64) << spec.name;
  }
  EXPECT_THROW(load_ttt_linear_golden("/nonexistent"), std::runtime_error);
}

}  // namespace
}  // namespace fastweight::support
