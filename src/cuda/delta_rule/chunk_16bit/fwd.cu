// The entry chunk_16bit, forward in the chunk form with 16-bit operands: what it takes, how it cuts a problem, its scratch
// memory and its launches. The kernels: factors.cu, factors_per_channel.cu, scan.cuh.
#include <algorithm>
#include <string>

#include "cuda/delta_rule/chunk_16bit/setup.h"
#include "cuda/delta_rule/chunk_16bit/stage.cuh"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda::chunk_16bit {
namespace {

// Of a block of the scan, or of the scan back.
template <bool kBack = false>
size_t shared_bytes(const ScanConfig& config) {
  size_t bytes = 0;
  with_padded_k_and_gate(config.padded_k, config.per_channel, [&]<int kK, bool kPerChannel>() {
    const auto of = [&]<int kColumns>() {
      return kBack ? scan_back_bytes<kK, kPerChannel, kColumns>(config.stages)
                   : scan_bytes<kK, kPerChannel, kColumns>(config.stages);
    };
    bytes = config.columns() == 128  ? of.template operator()<128>()
            : config.columns() == 64 ? of.template operator()<64>()
                                     : of.template operator()<32>();
  });
  return bytes;
}

// Wide warps share their operands best, narrow blocks fill the device when there are few heads.
template <class Bytes>
ScanConfig choose(const ScanSizes& sizes, int multiprocessors, size_t shared_limit, const Bytes& bytes) {
  const auto blocks = [&](int columns) { return sizes.heads * ((sizes.head_dim_v + columns - 1) / columns); };
  ScanConfig config{.padded_k = padded_k(sizes.head_dim_k), .per_channel = sizes.per_channel};
  ScanConfig wide = config;
  wide.tiles = 2;
  if (config.padded_k <= 128 && sizes.head_dim_v > 64 && blocks(64) > multiprocessors && bytes(wide) <= shared_limit) {
    return wide;
  }
  if (sizes.head_dim_v <= 32 || blocks(32) <= multiprocessors) config.pairs = 2;
  if (bytes(config) > shared_limit) config.stages = 1;
  return config;
}

// The smallest block, which any problem of a width can fall back to.
constexpr ScanConfig smallest(int padded_k, bool per_channel) {
  return {.padded_k = padded_k, .per_channel = per_channel, .tiles = 1, .pairs = 4, .stages = 1};
}

}  // namespace

size_t least_forward_bytes(int padded_k, bool per_channel) {
  return std::max(per_channel ? factors_per_channel_bytes(padded_k) : factors_bytes(padded_k),
                  shared_bytes(smallest(padded_k, per_channel)));
}

size_t least_scan_back_bytes(int padded_k, bool per_channel) {
  return shared_bytes<true>(smallest(padded_k, per_channel));
}

std::string ScanConfig::text() const {
  return "K " + std::to_string(padded_k) + ", columns " + std::to_string(columns()) + ", warps " +
         std::to_string(warps()) + ", stages " + std::to_string(stages);
}

ScanConfig scan_config(const ScanSizes& sizes, int multiprocessors, size_t shared_limit) {
  return choose(sizes, multiprocessors, shared_limit, shared_bytes<false>);
}

ScanConfig scan_back_config(const ScanSizes& sizes, int multiprocessors, size_t shared_limit) {
  return choose(sizes, multiprocessors, shared_limit, shared_bytes<true>);
}

std::string declines_forward(const DeltaRuleForwardProblem& problem) {
  const std::string reason = beyond_all_kernels(problem);
  if (!reason.empty()) return reason;
  const DeltaRuleInputs& in = problem.args.in;
  const DType dtype = in.q.dtype;
  const TensorView& o = problem.args.o;  // absent: only the final state is wanted
  if ((dtype != DType::kBF16 && dtype != DType::kF16) || (o.present() && o.dtype != dtype)) {
    return "q, k, v and o must have one 16-bit type";
  }
  if (in.beta.rank == 4) return "beta must be a number per token";
  return lacks_shared_memory(least_forward_bytes(padded_k(problem.sizes.head_dim_k), has_decay_per_channel(problem)),
                             in.q.device.index);
}

int64_t kept_words(Device device, Gate gate, DType dtype, int64_t head_dim_k, bool all) {
  const bool per_channel = gate == Gate::kPerChannel;
  const int width = padded_k(head_dim_k);
  if (dtype != DType::kBF16 && dtype != DType::kF16) return 0;
  if (!lacks_shared_memory(least_forward_bytes(width, per_channel), device.index).empty()) return 0;
  ScratchLayout one;  // which rounds every array up: all of them take no more than so many of these
  take_factors(one, per_channel, width, 1, all || !per_channel ? 1 : 0, true);
  return static_cast<int64_t>(one.bytes() / sizeof(int32_t));
}

std::string config_text(const DeltaRuleForwardProblem& problem, const Context&) { return config_of(problem).text(); }

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  forward_in_windows(problem, context, false, 0, [&](const ChunkArgs& args) {
    compute_factors(problem, args, context);
    scan_forward(args, config_of(problem), context);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
