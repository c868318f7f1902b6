#include "support/golden.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace fastweight::support {
namespace {

using nlohmann::json;

[[noreturn]] void fail(const std::string& path, const std::string& why) { throw std::runtime_error(path + ": " + why); }

DType dtype_of(const std::string& path, const std::string& name) {
  const std::map<std::string, DType> types{{"F32", DType::kF32},   {"F64", DType::kF64}, {"F16", DType::kF16},
                                           {"BF16", DType::kBF16}, {"I32", DType::kI32}, {"I64", DType::kI64}};
  const auto found = types.find(name);
  if (found == types.end()) fail(path, "expected a known element type, got " + name);
  return found->second;
}

Tensor read_tensor(const std::string& path, const json& entry, const char* data, size_t data_size) {
  const auto shape = entry.at("shape").get<std::vector<int64_t>>();
  const auto begin = entry.at("data_offsets").at(0).get<size_t>(), end = entry.at("data_offsets").at(1).get<size_t>();
  if (shape.empty() || shape.size() > static_cast<size_t>(kMaxRank)) fail(path, "a tensor has 0 or more than 5 axes");
  if (begin > end || end > data_size) fail(path, "the file is too short for its tensors");

  // Checked before anything is allocated, and without overflow.
  const DType dtype = dtype_of(path, entry.at("dtype").get<std::string>());
  size_t bytes = static_cast<size_t>(element_size(dtype));
  for (int64_t extent : shape) {
    if (extent < 0 || (extent > 0 && bytes > data_size / static_cast<size_t>(extent))) {
      fail(path, "a shape does not fit the file");
    }
    bytes *= static_cast<size_t>(extent);
  }
  if (bytes != end - begin) fail(path, "a tensor's extent differs from its shape");
  Tensor tensor(dtype, shape);
  if (bytes > 0) std::memcpy(tensor.data(), data + begin, bytes);
  return tensor;
}

SafeTensors parse_safetensors(const std::string& path, const std::string& bytes) {
  constexpr size_t kPrefix = 8;
  if (bytes.size() < kPrefix) fail(path, "the file is too short for a safetensors header");
  uint64_t header_size = 0;
  for (size_t i = 0; i < kPrefix; ++i) {
    header_size |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  if (header_size > bytes.size() - kPrefix) fail(path, "the file is too short for its header");
  const json header = json::parse(bytes.substr(kPrefix, header_size));
  if (!header.is_object()) fail(path, "the header is not a JSON object");
  const size_t data_begin = kPrefix + header_size;

  SafeTensors result;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      result.metadata = entry.get<std::map<std::string, std::string>>();
    } else {
      result.tensors[name] = read_tensor(path, entry, bytes.data() + data_begin, bytes.size() - data_begin);
    }
  }
  return result;
}

Gate gate_of(const std::string& path, const std::string& op) {
  if (op == "delta_rule") return Gate::kNone;
  if (op == "gated_delta_rule") return Gate::kPerHead;
  if (op == "kda") return Gate::kPerChannel;
  fail(path, "expected a delta-rule operator, got " + op);
}

// The name in a file of what we call `name`.
std::string file_name(const std::string& name) {
  static const std::map<std::string, std::string> kOthers{
      {"a_log", "A_log"},          {"da_log", "dA_log"},          {"d_o", "do"},
      {"initial_state", "h0"},     {"initial_state_bias", "hb0"}, {"final_state", "ht"},
      {"final_state_bias", "hbt"}, {"d_initial_state", "dh0"},    {"d_initial_state_bias", "dhb0"},
      {"d_final_state", "dht"},    {"d_final_state_bias", "dhbt"}};
  const auto found = kOthers.find(name);
  return found == kOthers.end() ? name : found->second;
}

template <class Golden>
void take_tensors(SafeTensors& file, Golden& golden) {
  for (const auto& field : golden.problem.fields()) {
    golden.problem.*field.tensor = file.tensors["in." + file_name(field.name)];
  }
  for (const auto& field : golden.expected.fields()) {
    golden.expected.*field.tensor = file.tensors["out." + file_name(field.name)];
  }
  golden.problem.cu_seqlens = offsets_tensor(golden.problem.spec.cu_seqlens);
  golden.expected.implementation = "golden";
}

GoldenCase golden_case(const std::string& path) {
  SafeTensors file = read_safetensors(path);
  const json meta = json::parse(file.metadata["case"]);

  GoldenCase result;
  DeltaRuleSpec& spec = result.problem.spec;
  spec.name = meta.at("name").get<std::string>();
  spec.B = meta.at("B").get<int64_t>();
  spec.T = meta.at("T").get<int64_t>();
  spec.H = meta.at("H").get<int64_t>();
  spec.HV = meta.value("HV", spec.H);
  spec.K = meta.at("K").get<int64_t>();
  spec.V = meta.at("V").get<int64_t>();
  spec.cu_seqlens = meta.value("cu_seqlens", std::vector<int64_t>{});
  spec.initial_state = meta.value("state", true);
  spec.options.gate = gate_of(path, meta.at("op").get<std::string>());
  spec.options.scale = meta.value("scale", DeltaRuleOptions::kUnset);
  spec.options.qk_l2norm = meta.value("l2norm", false);
  spec.options.beta_sigmoid = meta.value("beta_sigmoid", false);
  spec.options.allow_neg_eigval = meta.value("neg_eigval", false);
  spec.options.gate_in_kernel = meta.value("gate_in_kernel", false);
  spec.options.lower_bound = meta.value("lower_bound", DeltaRuleOptions::kUnset);

  take_tensors(file, result);
  return result;
}

TttLinearGoldenCase ttt_linear_golden_case(const std::string& path) {
  SafeTensors file = read_safetensors(path);
  const json meta = json::parse(file.metadata["case"]);

  TttLinearGoldenCase result;
  TttLinearSpec& spec = result.problem.spec;
  spec.name = meta.at("name").get<std::string>();
  spec.B = meta.at("B").get<int64_t>();
  spec.T = meta.at("T").get<int64_t>();
  spec.H = meta.at("H").get<int64_t>();
  spec.D = meta.at("D").get<int64_t>();
  spec.cu_seqlens = meta.value("cu_seqlens", std::vector<int64_t>{});
  spec.options.scale = meta.value("scale", TttLinearOptions::kUnset);
  spec.options.mini_batch = meta.value("chunk_size", 16);

  take_tensors(file, result);
  return result;
}

// The safetensors files of the folder whose names begin with one of the prefixes, sorted.
std::vector<std::string> golden_paths(const std::string& folder, std::initializer_list<const char*> prefixes) {
  std::error_code error;
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string stem = entry.path().stem().string();
    const bool ours =
        std::any_of(prefixes.begin(), prefixes.end(), [&](const char* prefix) { return stem.starts_with(prefix); });
    if (ours && entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  if (error) fail(folder, error.message());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

SafeTensors read_safetensors(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) fail(path, "cannot be opened");
  const std::string bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  try {
    return parse_safetensors(path, bytes);
  } catch (const json::exception& error) {
    fail(path, error.what());
  }
}

std::vector<GoldenCase> load_delta_rule_golden(const std::string& folder) {
  std::vector<GoldenCase> cases;
  for (const std::string& path : golden_paths(folder, {"delta_rule_", "gdn_", "kda_"})) {
    cases.push_back(golden_case(path));
  }
  return cases;
}

std::vector<TttLinearGoldenCase> load_ttt_linear_golden(const std::string& folder) {
  std::vector<TttLinearGoldenCase> cases;
  for (const std::string& path : golden_paths(folder, {"ttt_"})) cases.push_back(ttt_linear_golden_case(path));
  return cases;
}

}  // namespace fastweight::support
