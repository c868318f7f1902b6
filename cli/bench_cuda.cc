#include "cli/bench_cuda.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "fastweight/error.h"
#include "fastweight/info.h"
#include "support/device.h"

namespace fastweight::cli {
namespace {

int64_t count_data_sets(const BenchProblem& host, const CudaDeviceInfo& info) {
  constexpr double kTimesCache = 3;
  constexpr int64_t kMost = 256;
  const double wanted = kTimesCache * static_cast<double>(info.l2_bytes) / std::max(host.bytes(), 1.0);
  return std::clamp(static_cast<int64_t>(wanted) + 1, int64_t{1}, kMost);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

CudaMeasurement time_on_cuda(const BenchProblem& host, const Config& config, Device device, double min_seconds,
                             int64_t repeat) {
  const CudaDeviceInfo info = cuda_devices().at(static_cast<size_t>(device.index));
  CudaMeasurement result;
  result.cuda.device = info.name;
  result.cuda.data_sets = count_data_sets(host, info);
  std::vector<std::unique_ptr<BenchProblem>> sets;
  for (int64_t i = 0; i < result.cuda.data_sets; ++i) {
    sets.push_back(host.on_device(device));
    if (sets.back() == nullptr) throw Error(ErrorCode::kUnsupported, "has no CUDA implementation");
  }
  const support::DeviceStream stream;
  Context context;
  context.device = device;
  context.stream = stream.get();
  if (config.implementation != kAutomatic) context.implementation = config.implementation;
  const auto enqueue_all = [&] {
    for (const auto& set : sets) result.timing.implementation = set->run(context);
  };
  const double calls = static_cast<double>(sets.size());

  result.timing.first_ms = support::device_ms(stream, [&] { sets[0]->run(context); });
  enqueue_all();
  stream.wait();
  // Few enough calls at a time that the queue of the stream does not fill up and hold the host back.
  result.cuda.eager_ms = support::device_ms(stream, enqueue_all) / calls;
  stream.wait();
  const auto enqueue_start = std::chrono::steady_clock::now();
  enqueue_all();
  result.cuda.host_ms = 1e3 * seconds_since(enqueue_start) / calls;
  stream.wait();

  const support::DeviceGraph graph(stream, enqueue_all);
  const auto replay_ms = [&] { return support::device_ms(stream, [&] { graph.launch(stream); }) / calls; };
  constexpr int kWarmUp = 5;
  for (int i = 0; i < kWarmUp; ++i) replay_ms();
  constexpr size_t kLeastReplays = 20;
  const size_t least = std::max(kLeastReplays, static_cast<size_t>(repeat));
  std::vector<double> times;
  const auto start = std::chrono::steady_clock::now();
  while (times.size() < least || seconds_since(start) < min_seconds) times.push_back(replay_ms());
  std::ranges::sort(times);
  const size_t count = times.size();
  result.timing.calls = static_cast<int64_t>(count * sets.size());
  result.timing.min_ms = times.front();
  result.timing.median_ms = (times[(count - 1) / 2] + times[count / 2]) / 2;
  result.timing.p90_ms = times[(count * 9 + 9) / 10 - 1];
  return result;
}

}  // namespace fastweight::cli
