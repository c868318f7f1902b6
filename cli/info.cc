// `fastweight info`.
#include "fastweight/info.h"

#include <cstdio>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_output.h"
#include "cli/machine.h"
#include "cli/names.h"
#include "cli/text.h"

namespace fastweight::cli {
namespace {

std::string byte_count(int64_t bytes) {
  return bytes >= 1 << 20 ? format("%g MiB", static_cast<double>(bytes) / (1 << 20))
                          : format("%g KiB", static_cast<double>(bytes) / (1 << 10));
}

std::string cuda_text() {
  if (!built_with_cuda()) return "not built";
  std::vector<std::string> devices;
  for (const CudaDeviceInfo& device : cuda_devices()) {
    devices.push_back(format("%d: %s, compute capability %d.%d, %d multiprocessors, %s, L2 %s", device.index,
                             device.name.c_str(), device.major, device.minor, device.multiprocessors,
                             byte_count(device.memory_bytes).c_str(), byte_count(device.l2_bytes).c_str()));
  }
  return "built for " + join(cuda_architectures(), ", ") + "; " + (devices.empty() ? "no device" : join(devices, "; "));
}

void print_text(const Machine& machine, double first_ms, double second_ms) {
  std::vector<std::string> caches;
  for (const Cache& cache : machine.caches) caches.push_back(cache.name() + " " + byte_count(cache.bytes));
  std::printf("fastweight    %s\n", version().c_str());
  std::printf("compiler      %s\n", machine.compiler.c_str());
  std::printf("system        %s\n", machine.system.c_str());
  std::printf("cpu           %s\n", machine.cpu.c_str());
  std::printf("cores         %d, of which a call uses %d unless told otherwise\n", machine.cores,
              machine.default_threads);
  std::printf("caches        %s\n", caches.empty() ? "unknown" : join(caches, ", ").c_str());
  std::printf("features      %s\n", machine.features.empty() ? "unknown" : join(machine.features, " ").c_str());
  std::printf("SIMD target   %s\n", machine.target.c_str());
  std::printf("built for     %s\n", join(cpu_targets(), ", ").c_str());
  std::printf("devices       cpu; cuda: %s\n", cuda_text().c_str());
  std::printf("first call    %.2f ms (starts the threads), the next one %.3f ms\n", first_ms, second_ms);
  std::printf("\nimplementations, most special first:\n\n");
  const Table table({{"device", 6}, {"operator", 18}, {"mode", 4}, {"implementations", 0}});
  table.header();
  for (Device device : {Device{DeviceType::kCpu}, Device{DeviceType::kCuda}}) {
    for (Op op : kOps) {
      for (Mode mode : kModes) {
        const std::vector<std::string> names = implementations(op, mode, device);
        if (!names.empty()) table.row({device_name(device), op_name(op), mode_name(mode), join(names, ", ")});
      }
    }
  }
}

}  // namespace

int run_info(const std::vector<std::string>& arguments) {
  const Flags flags({{"--json", "", "print JSON instead of text"}}, arguments);
  if (flags.help()) {
    std::printf("usage: fastweight info [FLAGS]\n\nWhat this build is and what it found on this machine.\n\n%s",
                flags.description().c_str());
    return 0;
  }
  const Machine machine = find_machine();
  const double first_ms = time_tiny_call(0);
  const double second_ms = time_tiny_call(0);
  if (flags.has("--json")) {
    std::printf("%s", to_json(machine, first_ms, second_ms).c_str());
  } else {
    print_text(machine, first_ms, second_ms);
  }
  return 0;
}

}  // namespace fastweight::cli
