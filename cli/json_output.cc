#include "cli/json_output.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "cli/names.h"
#include "fastweight/info.h"

namespace fastweight::cli {
namespace {

std::string utc_date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// Every record has every field: null is what does not apply to it or is not measured on its device.
nlohmann::ordered_json record_json(const Record& record, const Machine& machine, const std::string& date) {
  const BenchChoice& choice = record.config.choice;
  const Shape& shape = choice.shape;
  const auto value_if = [](bool applies, const auto& value) {
    return applies ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
  };
  const bool on_cuda = record.cuda.has_value();
  const CudaTiming cuda = record.cuda.value_or(CudaTiming{});
  nlohmann::ordered_json json;
  json["op"] = op_name(choice.op);
  json["mode"] = mode_name(choice.mode);
  json["impl"] = record.timing.implementation;
  json["device"] = on_cuda ? "cuda" : "cpu";
  json["dtype"] = dtype_name(choice.dtype);
  json["threads"] = record.config.threads;
  json["B"] = shape.B;
  json["T"] = shape.T;
  json["H"] = shape.H;
  json["HV"] = shape.HV;
  json["K"] = shape.K;
  json["V"] = shape.V;
  json["C"] = value_if(block_of(choice.op).has_value(), kBlockChunk);
  json["sequences"] = choice.sequences > 0 ? choice.sequences : shape.B;
  json["saved_states"] = choice.saved_states;
  json["median_ms"] = record.timing.median_ms;
  json["min_ms"] = record.timing.min_ms;
  json["p90_ms"] = record.timing.p90_ms;
  json["first_call_ms"] = record.timing.first_ms;
  json["calls"] = record.timing.calls;
  json["gflops"] = record.gflops;
  json["eager_ms"] = value_if(on_cuda, cuda.eager_ms);
  json["host_ms"] = value_if(on_cuda, cuda.host_ms);
  json["data_sets"] = value_if(on_cuda, cuda.data_sets);
  json["cuda_device"] = value_if(on_cuda, cuda.device);
  json["peak_gflops"] = value_if(!on_cuda, record.peak_gflops());
  json["best_peak_gflops"] = value_if(!on_cuda, record.limits.gflops);
  json["share_of_peak"] = value_if(!on_cuda, record.share_of_peak());
  json["state_dtype"] = value_if(choice.state_dtype.has_value(), dtype_name(choice.state_dtype.value_or(DType::kF32)));
  json["gbps"] = record.gbps;
  json["memcpy_gbps"] = record.limits.memcpy_gbps;
  json["share_of_memcpy"] = record.share_of_memcpy();
  json["version"] = version();
  json["cpu"] = machine.cpu;
  json["cores"] = machine.cores;
  json["target"] = machine.target;
  json["compiler"] = machine.compiler;
  json["date"] = date;
  return json;
}

}  // namespace

std::string to_json(const std::vector<Record>& records, const Machine& machine) {
  const std::string date = utc_date();
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Record& record : records) list.push_back(record_json(record, machine, date));
  return list.dump(1) + "\n";
}

std::string to_json(const Machine& machine, double first_call_ms, double second_call_ms) {
  nlohmann::ordered_json json;
  json["version"] = version();
  json["compiler"] = machine.compiler;
  json["system"] = machine.system;
  json["cpu"] = machine.cpu;
  json["cores"] = machine.cores;
  json["default_threads"] = machine.default_threads;
  json["features"] = machine.features;
  for (const Cache& cache : machine.caches) json["caches"][cache.name()] = cache.bytes;
  json["target"] = machine.target;
  json["targets"] = cpu_targets();
  json["devices"] = nlohmann::ordered_json::array({"cpu"});
  for (const CudaDeviceInfo& device : cuda_devices()) json["devices"].push_back(device.name);
  json["cuda"] = cuda_architectures();
  json["first_call_ms"] = first_call_ms;
  json["second_call_ms"] = second_call_ms;
  for (Op op : kOps) {
    for (Mode mode : kModes) {
      const std::vector<std::string> names = implementations(op, mode);
      if (!names.empty()) json["implementations"][op_name(op)][mode_name(mode)] = names;
      const std::vector<std::string> on_cuda = implementations(op, mode, {DeviceType::kCuda});
      if (!on_cuda.empty()) json["cuda_implementations"][op_name(op)][mode_name(mode)] = on_cuda;
    }
  }
  return json.dump(2) + "\n";
}

}  // namespace fastweight::cli
